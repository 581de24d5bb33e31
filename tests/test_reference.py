"""The reference against first principles: hand-worked values, finite differences and slower, plainer loops."""

import cmath
import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests import reference
from tests.reference import IGNORE, Batch, Routing, Tokens
from titanmoe.config.schema import Config, LRSchedule, Model, MoE, Optimizer, Training

TINY = Model(
    vocab_size=11,
    dim=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=6,
    top_k=2,
    expert_hidden=5,
    init_std=0.4,
)
EVERYTHING = replace(
    TINY,
    qkv_bias=True,
    qk_norm="head",
    num_layers=3,
    num_dense_layers=1,
    dense_hidden=6,
    shared_hidden=3,
    shared_gate=True,
    tie_embeddings=True,
    route_scale=1.5,
    out_bias=True,
    attention_sinks=True,
    sliding_window=3,
    full_attention_every=2,
    router_bias=True,
    expert_linear_bias=True,
    expert_activation="clamped_swiglu",
)

EXPERT = ("w1", "w2", "w3", "w1_bias", "w2_bias", "w3_bias")
ZIGZAG = (0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0)
"""Owners of 16 positions when each of 4 ranks has one early and one late piece."""


@pytest.fixture(autouse=True)
def same_draws():
    torch.manual_seed(0)


def batches(microbatches=2, data_ranks=2, samples=2, positions=8, vocab=11, padding=0):
    """padding: how many last positions of every second sample."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(microbatches):
        out.append([])
        for _ in range(data_ranks):
            text = torch.randint(vocab, (samples, positions + 1), generator=generator)
            tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            valid = torch.ones(samples, positions, dtype=torch.bool)
            if padding:
                valid[1::2, -padding:] = False
            out[-1].append(Batch(tokens, labels.masked_fill(~valid, IGNORE), valid))
    return out


def random_routing(tokens, model):
    logits = torch.randn(len(tokens.valid_T), model.num_experts, dtype=torch.float64)
    scores = logits.softmax(-1)
    weights, chosen = scores.topk(model.top_k)
    return Routing(logits, scores, chosen, weights, 0.0)


# ---------------------------------------------------------------------------------------------------- weights


def test_parameter_counts_are_the_published_ones():
    mixtral_8x7b = Model(
        vocab_size=32000,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_experts=8,
        expert_hidden=14336,
    )
    qwen3_30b_a3b = Model(
        vocab_size=151936,
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm="head",
        num_experts=128,
        expert_hidden=768,
    )
    assert sum(map(math.prod, reference.shapes(mixtral_8x7b).values())) == 46_702_792_704
    assert sum(map(math.prod, reference.shapes(qwen3_30b_a3b).values())) == 30_532_122_624


def test_which_layers_have_experts():
    model = replace(TINY, num_layers=8, num_dense_layers=1, moe_every=3)
    assert [i for i in range(8) if reference.is_moe(model, i)] == [3, 6]
    assert all(reference.is_moe(TINY, i) for i in range(2))


def test_initial_weights():
    model = replace(TINY, vocab_size=500, dim=40, init_std=0.02)
    weights = reference.initial_weights(model, seed=3)
    embed, down = weights["embed.weight"], weights["layers.1.moe.experts.w2"]
    # A standard normal truncated at 3 has standard deviation 0.98658.
    assert embed.std().item() == pytest.approx(0.02 * 0.98658, rel=0.02)
    assert down.std().item() == pytest.approx(0.02 * 0.98658 / 2, rel=0.05)
    assert abs(embed.mean().item()) < 5e-4
    assert embed.abs().max() <= 0.06
    assert torch.equal(weights["layers.0.ffn_norm.weight"], torch.ones(40, dtype=torch.float64))
    assert not torch.equal(weights["layers.0.attention.wq.weight"], weights["layers.1.attention.wq.weight"])
    assert not torch.equal(embed, reference.initial_weights(model, seed=4)["embed.weight"])
    single = reference.initial_weights(model, seed=3, dtype=torch.float32)["embed.weight"]
    torch.testing.assert_close(single, embed.float(), rtol=2e-7, atol=0)


# ------------------------------------------------------------------------------------------------ transformer


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_attention_is_a_loop_over_positions(qk_norm):
    """With full, also a window of 3, sinks and a bias on the output."""
    narrow = {"sliding_window": 3, "full_attention_every": 0, "attention_sinks": True, "out_bias": True}
    model = replace(TINY, qkv_bias=True, qk_norm=qk_norm, rope_theta=100.0, num_layers=1)
    model = replace(model, **narrow) if qk_norm == "full" else model
    weights = reference.initial_weights(model, seed=0)
    for value in weights.values():
        if value.dim() == 1:
            value.uniform_(0.5, 1.5)
    x_GSD = torch.randn(2, 5, model.dim, dtype=torch.float64)

    name, width = "layers.0.attention", model.head_dim

    def projected(part, x, head):
        rows = slice(head * width, (head + 1) * width)
        return weights[f"{name}.{part}.weight"][rows] @ x + weights[f"{name}.{part}.bias"][rows]

    def normed_and_rotated(part, x, head, position):
        v = projected(part, x, head)
        norm, rows = weights[f"{name}.{part[1]}_norm.weight"], slice(None)
        squares = [v.square().mean()]
        if qk_norm == "full":
            heads = {"wq": 4, "wk": 2}[part]
            squares = [projected(part, x, other).square().mean() for other in range(heads)]
            rows = slice(head * width, (head + 1) * width)
        v = v / (sum(squares) / len(squares) + model.norm_eps).sqrt() * norm[rows]
        # RoPE as it is usually derived: pair i is one complex number, turned by position * theta^(-2i/h).
        pairs = [complex(v[i], v[i + width // 2]) for i in range(width // 2)]
        pairs = [z * cmath.exp(1j * position * 100.0 ** (-2 * i / width)) for i, z in enumerate(pairs)]
        return torch.tensor([z.real for z in pairs] + [z.imag for z in pairs], dtype=torch.float64)

    expected = torch.empty_like(x_GSD)
    for g, x_SD in enumerate(x_GSD):
        for s in range(5):
            out = []
            for head in range(4):
                kv_head = head // 2
                q = normed_and_rotated("wq", x_SD[s], head, s)
                seen = range(max(0, s - 2) if model.sliding_window else 0, s + 1)
                keys = [normed_and_rotated("wk", x_SD[past], kv_head, past) for past in seen]
                exps = [math.exp(float(q @ k) / math.sqrt(width)) for k in keys]
                values = [projected("wv", x_SD[past], kv_head) for past in seen]
                whole = sum(exps) + (math.exp(weights[f"{name}.sinks"][head]) if model.attention_sinks else 0)
                out.append(sum(e / whole * v for e, v in zip(exps, values, strict=True)))
            expected[g, s] = weights[f"{name}.wo.weight"] @ torch.cat(out) + weights.get(f"{name}.wo.bias", 0)
    got = reference.attention(model, weights, name, x_GSD, None, reference.window(model, 0))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_which_layers_are_narrow():
    model = replace(TINY, num_layers=6, sliding_window=4, full_attention_every=3)
    assert [reference.window(model, i) for i in range(6)] == [4, 4, None, 4, 4, None]
    assert [reference.window(replace(model, full_attention_every=0), i) for i in range(2)] == [4, 4]
    assert reference.window(TINY, 0) is None


def test_a_document_attends_only_to_itself():
    """RoPE sees only distances, so a packed document is computed as if it were alone."""
    model = replace(TINY, num_layers=1)
    weights, name = reference.initial_weights(model, seed=0), "layers.0.attention"
    x_GSD = torch.randn(2, 9, model.dim, dtype=torch.float64)
    document_GS = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 4])
    packed = reference.attention(model, weights, name, x_GSD, document_GS)
    for g, ends in enumerate(((0, 4, 9), (0, 2, 5, 9))):
        for start, end in itertools.pairwise(ends):
            alone = reference.attention(model, weights, name, x_GSD[g : g + 1, start:end])
            torch.testing.assert_close(packed[g : g + 1, start:end], alone, rtol=1e-12, atol=1e-12)


def test_cross_entropy_is_torchs():
    logits, labels = torch.randn(3, 4, 7, dtype=torch.float64), torch.randint(7, (3, 4))
    labels[0, 2:] = IGNORE
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(reference.cross_entropy(logits, labels), expected)


def test_moe_layer_is_a_loop_over_tokens():
    model = replace(EVERYTHING, score_function="sigmoid", num_groups=3, top_groups=2)
    config = Config(model=model, moe=MoE(capacity_factor=1.0))
    weights = reference.initial_weights(model, seed=0)
    for value in (value for key, value in weights.items() if key.endswith("bias")):
        value.normal_()
    tokens = Tokens.of(batches(padding=3))
    x_TD = 4 * torch.randn(len(tokens.valid_T), model.dim, dtype=torch.float64)  # some gates are clamped
    bias_E = torch.tensor([0.1, -0.2, 0.3, 0.0, 0.2, -0.1])
    name = "layers.1.moe"
    result = reference.moe_layer(config, weights, bias_E, x_TD, tokens, 1, 1, 1)
    logit_bias_E = weights[f"{name}.router.bias"]
    routing = reference.route(
        config, weights[f"{name}.router.weight"], bias_E, x_TD, tokens.valid_T, 1, 1, logit_bias_E
    )
    kept_TK, _ = reference.keep(config, tokens, routing, 1)
    assert 0 < result.dropped < 1

    def ffn(x, w1, w2, w3):
        return w2 @ (torch.nn.functional.silu(w1 @ x) * (w3 @ x))

    def biased_ffn(e, x):
        w1, w2, w3, b1, b2, b3 = (weights[f"{name}.experts.{w}"][e] for w in EXPERT)
        gate, up = (w1 @ x + b1).clamp(max=7), (w3 @ x + b3).clamp(-7, 7)
        return w2 @ (gate / (1 + (-1.702 * gate).exp()) * (up + 1)) + b2

    for t, x in enumerate(x_TD):
        score = torch.sigmoid(weights[f"{name}.router.weight"] @ x + logit_bias_E)
        choice = (score + bias_E).tolist()
        groups = sorted(range(3), key=lambda g: -(choice[2 * g] + choice[2 * g + 1]))[:2]
        chosen = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -choice[e])[:2]
        assert routing.chosen_TK[t].tolist() == chosen
        share = score[chosen] / score[chosen].sum() * model.route_scale
        shared = ffn(x, *(weights[f"{name}.shared.{w}.weight"] for w in ("w1", "w2", "w3")))
        expected = shared * torch.sigmoid(weights[f"{name}.shared.gate.weight"][0] @ x)
        for k in range(2):
            if tokens.valid_T[t] and kept_TK[t, k]:
                expected += share[k] * biased_ffn(chosen[k], x)
        torch.testing.assert_close(result.out_TD[t], expected)


# ---------------------------------------------------------------------------------------------------- routing


def test_score_functions():
    x_TD, weight_ED = torch.randn(7, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    logits, valid, no_bias = x_TD @ weight_ED.T, torch.ones(7, dtype=torch.bool), torch.zeros(6)

    def routed(**changes):
        return reference.route(Config(model=replace(TINY, **changes)), weight_ED, no_bias, x_TD, valid, 1, 0)

    top = logits.topk(2)
    for routing in (
        routed(score_function="softmax"),
        routed(score_function="softmax_after_topk"),
        routed(score_function="softmax_after_topk", norm_topk=False),
    ):  # normalising after softmax is softmax over the chosen
        assert torch.equal(routing.chosen_TK, top.indices)
        torch.testing.assert_close(routing.weights_TK, top.values.softmax(-1))
        torch.testing.assert_close(routing.scores_TE, logits.softmax(-1))
    torch.testing.assert_close(routed(norm_topk=False).weights_TK, logits.softmax(-1).topk(2).values)
    scaled = routed(score_function="sigmoid", norm_topk=False, route_scale=2.5)
    torch.testing.assert_close(scaled.weights_TK, 2.5 * top.values.sigmoid())
    third = logits.softmax(-1).topk(3).values
    assert routed().margin == pytest.approx((third[:, 1] - third[:, 2]).min().item())


def test_equal_scores_choose_the_lower_expert():
    chosen, margin = reference.choose(TINY, torch.zeros(3, 6), torch.ones(3, dtype=torch.bool))
    assert chosen.tolist() == [[0, 1]] * 3
    assert margin == 0


def test_best_group_is_by_its_best_under_softmax_and_by_two_under_sigmoid():
    scores, valid = torch.tensor([[0.9, 0.0, 0.0, 0.6, 0.5, 0.0]]), torch.ones(1, dtype=torch.bool)
    model = replace(TINY, num_groups=2, top_groups=1, score_function="softmax")
    chosen, margin = reference.choose(model, scores, valid)
    assert chosen.tolist() == [[0, 1]]
    assert margin == 0  # expert 2 as good as expert 1
    chosen, margin = reference.choose(replace(model, score_function="sigmoid"), scores, valid)
    assert chosen.tolist() == [[3, 4]]
    assert margin == pytest.approx(1.1 - 0.9)


def test_bias_moves_the_choice_and_not_the_weights():
    x_TD, weight_ED = torch.randn(7, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    config = Config(model=replace(TINY, norm_topk=False))
    bias_E = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 4.0])
    routing = reference.route(config, weight_ED, bias_E, x_TD, torch.ones(7, dtype=torch.bool), 1, 0)
    assert routing.chosen_TK.tolist() == [[4, 5]] * 7
    torch.testing.assert_close(routing.weights_TK, (x_TD @ weight_ED.T).softmax(-1)[:, 4:])


def test_force_balance_is_round_robin_on_the_global_index():
    config = Config(model=TINY, moe=MoE(force_balance=True))
    result = reference.step(config, reference.initial_weights(TINY, 0), batches(positions=6))
    assert all(count.tolist() == [16.0] * 6 for count in result.counts.values())
    assert result.margin == math.inf


def test_jitter_is_counted():
    x_TD = torch.randn(7, 8, dtype=torch.float64)
    identity = torch.eye(8, dtype=torch.float64)
    valid, bias_E = torch.ones(7, dtype=torch.bool), torch.zeros(8)
    config = Config(model=replace(TINY, num_experts=8), moe=MoE(jitter=0.25))

    def noise(step, layer):
        return reference.route(config, identity, bias_E, x_TD, valid, step, layer).logits_TE / x_TD

    first = noise(1, 0)
    assert first.min() >= 0.75 and first.max() <= 1.25 and first.std() > 0.1
    assert torch.equal(first, noise(1, 0))
    assert not torch.equal(first, noise(2, 0)) and not torch.equal(first, noise(1, 1))


# --------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize(
    ("scope", "slices"),
    [("full_sequence", 1), ("full_sequence", 4), ("sub_sequence", 1), ("sub_sequence", 4), ("sub_sequence", ZIGZAG)],
)
def test_capacity_keeps_exactly_the_best(policy, scope, slices):
    samples, positions = 2, 16
    config = Config(model=TINY, moe=MoE(capacity_factor=0.75, drop_policy=policy, capacity_scope=scope))
    tokens = Tokens.of(batches(samples=samples, positions=positions, padding=5))
    routing = random_routing(tokens, TINY)
    kept_TK, margin = reference.keep(config, tokens, routing, slices)

    owners = list(ZIGZAG) if slices == ZIGZAG else [s * slices // positions for s in range(positions)]
    index = torch.arange(len(tokens.valid_T)).view(4, samples, positions)  # 4 = microbatches x data ranks
    if scope == "full_sequence":
        scopes = [row for part in index for row in part]
    else:
        scopes = [part[:, [s for s in range(positions) if owners[s] == o]] for part in index for o in set(owners)]
    capacity = math.ceil(0.75 * 2 * scopes[0].numel() / 6)
    over = 0
    for tokens_of_scope in (members.flatten() for members in scopes):
        for e in range(TINY.num_experts):
            routed = [
                (routing.weights_TK[t, k].item(), kept_TK[t, k].item())
                for t in tokens_of_scope
                for k in range(2)
                if routing.chosen_TK[t, k] == e and tokens.valid_T[t]
            ]
            kept = [keeps for _, keeps in routed]
            assert sum(kept) == min(capacity, len(routed))
            over += len(routed) > capacity
            if policy == "position":
                assert kept == sorted(kept, reverse=True)
            elif len(routed) > capacity:
                kept_weights, others = (torch.tensor([w for w, k in routed if k == of]) for of in (True, False))
                assert kept_weights.bfloat16().min() >= others.bfloat16().max()
    assert over > 3
    assert not kept_TK[~tokens.valid_T].any()
    if policy == "position":
        assert margin == math.inf
        return
    margin = min(margin, 1 / 512)
    assert margin > 1e-6
    for sign in torch.ones_like(routing.weights_TK).expand(20, -1, -1).bernoulli(0.5) * 2 - 1:
        moved = replace(routing, weights_TK=routing.weights_TK * (1 + 0.99 * margin * sign))
        assert torch.equal(reference.keep(config, tokens, moved, slices)[0], kept_TK)


@pytest.mark.parametrize(
    ("kept", "dropped", "margin"),
    [
        ((1.0, 0), (1.0, 1), 1 / 512),  # the first has 1/256 below it, half of that to the turn; the second 1/128 above
        ((1.0, 1), (255 / 256, 0), 1 / 512),  # one step ahead, but later
        (
            (1.0, 0),
            (255 / 256, 1),
            1 / 510,
        ),  # one step ahead and earlier: both must move, the other by 1/512 of 255/256
        (
            (1.0 + 0.9 / 256, 0),
            (1.0 + 0.8 / 256, 1),
            0.2 / 256.8,
        ),  # both rounded down to 1: the one just below the turn
        ((1.0 - 0.4 / 256, 1), (253 / 256, 0), math.inf),
    ],
)
def test_how_far_dropping_is_from_another_choice(kept, dropped, margin):
    pairs = [(reference.rounded(weight), position, 0) for weight, position in (kept, dropped)]
    assert reference.lead(*pairs) == pytest.approx(margin, abs=1e-7)


def test_equal_weights_keep_the_earlier():
    config = Config(model=TINY, moe=MoE(capacity_factor=0.5))
    tokens = Tokens.of(batches(1, 1, 1, 8))
    chosen = torch.tensor([[0, 1]] * 8)
    routing = Routing(torch.zeros(8, 6), torch.zeros(8, 6), chosen, torch.full((8, 2), 0.5), 0.0)
    kept_TK, margin = reference.keep(config, tokens, routing, 1)  # C = ceil(0.5 * 2 * 8 / 6) = 2
    assert kept_TK.tolist() == [[True, True]] * 2 + [[False, False]] * 6
    assert margin == pytest.approx(1 / 512, abs=1e-7)


def test_ample_capacity_changes_nothing():
    weights, data = reference.initial_weights(TINY, 0), batches()
    free = reference.step(Config(model=TINY), weights, data)
    ample = reference.step(Config(model=TINY, moe=MoE(capacity_factor=3.0)), weights, data)  # C = tokens in scope
    assert ample.loss == free.loss and set(ample.dropped.values()) == {0.0}
    tight = reference.step(Config(model=TINY, moe=MoE(capacity_factor=0.5)), weights, data)
    assert tight.loss != free.loss and min(tight.dropped.values()) > 0
    assert all(torch.equal(tight.counts[i].sum(), free.counts[i].sum()) for i in free.counts)


# ---------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize("score_function", ["softmax", "softmax_after_topk", "sigmoid"])
def test_uniform_routing_gives_one(score_function):
    model = replace(TINY, score_function=score_function)
    config = Config(model=model, moe=MoE(aux_loss=0.1, aux_loss_sequence=0.2, aux_loss_global=0.3, z_loss=0.4))
    weights = reference.initial_weights(model, seed=0)
    for i in range(model.num_layers):
        weights[f"layers.{i}.moe.router.weight"].zero_()
    result = reference.step(config, weights, batches(padding=3))
    for term in ("aux_loss_sequence", "aux_loss", "aux_loss_global"):
        assert result.aux[term] == pytest.approx(model.num_layers, rel=1e-14)
    assert result.aux["z_loss"] == pytest.approx(model.num_layers * math.log(6) ** 2, rel=1e-14)
    expected = result.loss + model.num_layers * (0.1 + 0.2 + 0.3 + 0.4 * math.log(6) ** 2)
    assert result.total == pytest.approx(expected, rel=1e-14)


def test_balance_terms_by_hand():
    """Two experts, top-1, three microbatches of one sample of two tokens; the very last token is padding."""
    model = replace(TINY, num_experts=2, top_k=1)
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    valid = ([[True, True]], [[True, True]], [[True, False]])
    tokens = Tokens.of([[Batch(zeros, zeros, torch.tensor(v))] for v in valid])
    p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [0.1, 0.9], [0.4, 0.6], [0.5, 0.5]])
    routing = Routing(p.log(), 3 * p, torch.tensor([[0], [0], [0], [1], [1], [0]]), p[:, :1], 0.0)
    terms = reference.balance_terms(model, tokens, routing)
    # f per sample: (2, 0), (1, 1), (0, 2); mean p: (0.7, 0.3), (0.4, 0.6), (0.4, 0.6)
    assert terms["aux_loss_sequence"].item() == pytest.approx((1.4 + 1.0 + 1.2) / 3)
    # token-weighted: 2 tokens * 1.4, 2 tokens * 1, 1 token * 1.2
    assert terms["aux_loss"].item() == pytest.approx((2.8 + 2.0 + 1.2) / 5)
    # f of microbatches <= m: (2, 0), (3/2, 1/2), (6/5, 4/5)
    assert terms["aux_loss_global"].item() == pytest.approx((2.8 + 1.5 * 0.8 + 0.5 * 1.2 + 1.2 * 0.4 + 0.8 * 0.6) / 5)
    assert terms["z_loss"].item() == pytest.approx(0, abs=1e-12)


def test_a_sample_of_padding_is_no_sample():
    """The last batch of an epoch is filled up with them."""
    ((whole,),) = batches(1, 1, 4)
    whole.valid_BS[1] = False
    tokens = Tokens.of([[whole]])
    routing = random_routing(tokens, TINY)
    others = [0, 2, 3]
    alone = Tokens.of([[Batch(*(x[others] for x in whole[:3]))]])
    rows = tokens.valid_T
    part = Routing(
        routing.logits_TE[rows], routing.scores_TE[rows], routing.chosen_TK[rows], routing.weights_TK[rows], 0.0
    )
    with_it, without = reference.balance_terms(TINY, tokens, routing), reference.balance_terms(TINY, alone, part)
    for term in ("aux_loss_sequence", "aux_loss", "aux_loss_global", "z_loss"):
        assert with_it[term].item() == pytest.approx(without[term].item(), rel=1e-14)


def test_grouping_moves_only_what_depends_on_it():
    """The same 8 samples as 1, 2 or 4 microbatches on 1 or 2 data ranks."""
    ((whole,),) = batches(1, 1, 8)
    config = Config(model=TINY, moe=MoE(capacity_factor=1.0, capacity_scope="full_sequence"))
    weights = reference.initial_weights(TINY, 0)

    def split(microbatches, data_ranks):
        parts = [x.chunk(microbatches * data_ranks) for x in whole[:3]]
        pieces = [Batch(*part) for part in zip(*parts, strict=True)]
        data = [pieces[m * data_ranks : (m + 1) * data_ranks] for m in range(microbatches)]
        return reference.step(config, weights, data)

    one = split(1, 1)
    assert one.aux["aux_loss"] == pytest.approx(one.aux["aux_loss_global"], rel=1e-14)
    for grouping in ((1, 2), (2, 1), (4, 2)):
        other = split(*grouping)
        assert other.loss == pytest.approx(one.loss, rel=1e-14)
        assert other.aux["aux_loss_sequence"] == pytest.approx(one.aux["aux_loss_sequence"], rel=1e-14)
        assert other.aux["aux_loss"] != pytest.approx(one.aux["aux_loss"], rel=1e-6)
        assert (other.aux["aux_loss_global"] == pytest.approx(one.aux["aux_loss_global"], rel=1e-10)) == (
            grouping[0] == 1
        )
    assert split(8, 1).aux["aux_loss"] == pytest.approx(one.aux["aux_loss_sequence"], rel=1e-14)


def test_padding_touches_nothing():
    """The contents of padded positions change no result: they come last, have no label and are not routed."""
    model = replace(TINY, shared_hidden=4)
    config = Config(model=model, moe=MoE(aux_loss=0.1, aux_loss_sequence=0.1, aux_loss_global=0.1, z_loss=0.1))
    weights, data = reference.initial_weights(model, 0), batches(padding=3)
    other = [[batch._replace(tokens_BS=batch.tokens_BS.where(batch.valid_BS, 7)) for batch in row] for row in data]
    a, b = reference.step(config, weights, data), reference.step(config, weights, other)
    assert a.total == pytest.approx(b.total, rel=1e-14)
    for name in weights:
        torch.testing.assert_close(a.grads[name], b.grads[name], rtol=1e-10, atol=1e-14)
    assert all(count.sum() == 2 * (4 * 8 + 4 * 5) for count in a.counts.values())


# -------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    "score_function", [pytest.param("softmax", marks=pytest.mark.slow), "softmax_after_topk", "sigmoid"]
)
def test_gradients_are_finite_differences(score_function):
    model = replace(EVERYTHING, score_function=score_function)
    moe = MoE(capacity_factor=1.0, jitter=0.1, aux_loss=0.5, aux_loss_sequence=0.4, aux_loss_global=0.3, z_loss=0.2)
    config = Config(model=model, moe=moe)
    weights, data = reference.initial_weights(model, seed=0), batches(2, 1, 2, 6, padding=2)
    result = reference.step(config, weights, data)
    assert min(result.margin, result.drop_margin) > 1e-4  # many times the step below, so that no choice flips
    assert set(result.grads) == set(weights)
    eps = 3e-6
    for name, value in weights.items():
        direction = torch.randn_like(value)
        with torch.no_grad():
            above, below = (
                reference.step(config, weights | {name: value + sign * eps * direction}, data).total for sign in (1, -1)
            )
        slope = (result.grads[name] * direction).sum().item()
        assert (above - below) / (2 * eps) == pytest.approx(slope, rel=1e-6, abs=1e-8), name


def test_unvisited_experts_have_zero_gradients():
    weights, data = reference.initial_weights(TINY, 0), batches()
    bias = {name: value + torch.tensor([9.0, 9, 0, 0, 0, 0]) for name, value in reference.initial_bias(TINY).items()}
    result = reference.step(Config(model=TINY), weights, data, bias=bias)
    for i in range(2):
        assert result.counts[i].tolist() == [64, 64, 0, 0, 0, 0]
        grad = result.grads[f"layers.{i}.moe.experts.w1"]
        assert (grad[2:] == 0).all() and (grad[:2] != 0).any()


# --------------------------------------------------------------------------------------------------- training


def test_norm_of_ones_counts_the_parameters():
    shapes = reference.shapes(EVERYTHING)
    ones = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert reference.grad_norm(ones) == pytest.approx(math.sqrt(sum(map(math.prod, shapes.values()))), rel=1e-15)


def test_clipping():
    grads = {"a": torch.tensor([3.0], dtype=torch.float64), "b": torch.tensor([4.0], dtype=torch.float64)}
    assert reference.clipped(grads, 5.0, 0.0) == grads
    assert reference.clipped(grads, 5.0, 10.0)["b"].item() == 4.0
    assert reference.clipped(grads, 5.0, 1.0)["b"].item() == pytest.approx(4.0 / (5.0 + 1e-6), rel=1e-12)


@pytest.mark.parametrize("decay_all", [False, True])
def test_adamw_is_torchs(decay_all):
    options = Optimizer(lr=0.01, weight_decay=0.3, beta2=0.9, decay_all=decay_all)
    config = Config(model=EVERYTHING, optimizer=options, lr_schedule=LRSchedule(warmup_steps=2))
    weights = reference.initial_weights(EVERYTHING, seed=0)
    copies = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    spared = [
        n for n in weights if "norm" in n or n.endswith(("bias", ".sinks", "router.weight", "shared.gate.weight"))
    ]
    assert 0 < len(spared) < len(weights)
    groups = [
        {"params": [copies[n] for n in weights if n not in spared], "weight_decay": 0.3},
        {"params": [copies[n] for n in spared], "weight_decay": 0.3 if decay_all else 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.9), eps=1e-8)
    moments = {}
    for step_number in (1, 2, 3):
        grads = {name: torch.randn_like(value) for name, value in weights.items()}
        for group in adamw.param_groups:
            group["lr"] = reference.learning_rate(config, step_number)
        for name, copy in copies.items():
            copy.grad = grads[name]
        adamw.step()
        weights, moments = reference.adamw(config, weights, grads, moments, step_number)
    for name, copy in copies.items():
        torch.testing.assert_close(weights[name], copy.detach(), rtol=1e-12, atol=1e-14)


def test_schedules():
    def rates(decay, **changes):
        options = LRSchedule(warmup_steps=2, decay=decay, min_ratio=0.2, **changes)
        return [round(reference.schedule(options, s, 10), 12) for s in range(1, 11)]

    assert rates("none") == [0.5] + [1.0] * 9
    assert rates("linear") == [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    cosine = rates("cosine")
    assert cosine[:2] == [0.5, 1.0] and cosine[5] == 0.6 and cosine[9] == 0.2
    assert rates("wsd", decay_fraction=0.4) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert reference.schedule(LRSchedule(warmup_steps=0, decay="none"), 1, 10) == 1.0


def test_bias_moves_against_the_load():
    config = Config(model=TINY, moe=MoE(bias_update_rate=0.25))
    bias = {"layers.0.moe.router.expert_bias": torch.tensor([1.0, 0, 0, 0, 0, 0])}
    moved = reference.moved_bias(config, bias, {0: torch.tensor([9.0, 3.0, 4.0, 4.0, 4.0, 0.0], dtype=torch.float64)})
    (value,) = moved.values()
    assert value.tolist() == [0.75, 0.25, 0.0, 0.0, 0.0, 0.25]
    assert value.dtype == torch.float32


def test_training_lowers_the_loss():
    config = Config(
        model=replace(EVERYTHING, init_std=0.1),
        training=Training(steps=8),
        optimizer=Optimizer(lr=0.02),
        lr_schedule=LRSchedule(warmup_steps=1),
        moe=MoE(bias_update_rate=0.001),
    )
    weights, data = reference.initial_weights(config.model, 0), batches()
    run = reference.train(config, weights, [data] * 8)
    losses = [result.loss for result in run.steps]
    assert losses[0] == pytest.approx(math.log(11), rel=0.1)
    assert losses[-1] < losses[0] - 0.3
    assert list(run.weights) == list(weights)
    assert list(run.bias) == ["layers.1.moe.router.expert_bias", "layers.2.moe.router.expert_bias"]
    assert all(value.abs().max() > 0 for value in run.bias.values())
