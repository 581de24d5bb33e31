"""The router against a plain loop: scores, choice, weights, and what must not depend on how tokens are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import tolerances
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.router import Router
from titanmoe.ops import counter_rng
from titanmoe.tokens import Tokens

SCORES = ("softmax", "sigmoid", "softmax_after_topk")


def tokens(count: int, first: int = 0, valid: Tensor | None = None) -> Tokens:
    index_T = torch.arange(first, first + count)
    valid_T = torch.ones(count, dtype=torch.bool) if valid is None else valid
    return Tokens(index_T.unsqueeze(0), index_T, torch.zeros_like(index_T), valid_T, torch.tensor(0))


def router(dim: int, dtype: torch.dtype = torch.float64, layer: int = 1, **options: Any) -> Router:
    """Options of [model] or [moe] by name."""
    moe = {name: options.pop(name) for name in list(options) if hasattr(MoE(), name)}
    out = Router(Model(**({"num_experts": 8, "top_k": 2} | options), dim=dim), MoE(**moe), 0, layer, dtype)
    torch.nn.init.normal_(out.weight, generator=torch.Generator().manual_seed(1))
    return out


def route(logits_TE: Tensor, bias: list[float] | None = None, **options: Any) -> tuple[Tensor, ...]:
    """A router with exactly these logits: the inputs are unit vectors."""
    count, experts = logits_TE.shape
    made = router(count, logits_TE.dtype, num_experts=experts, **options)
    with torch.no_grad():
        made.weight.copy_(logits_TE.t())
        if bias is not None:
            made.expert_bias.copy_(torch.tensor(bias))
    with torch.no_grad():
        return made(torch.eye(count, dtype=logits_TE.dtype), tokens(count))


def best(values: list[float], count: int) -> list[int]:
    """Positions of the largest; of equal ones the first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def plain(logits: list[float], bias: list[float], model: Model) -> tuple[list[int], list[float]]:
    row = torch.tensor([logits], dtype=torch.float64)
    s = (torch.sigmoid(row) if model.score_function == "sigmoid" else row.softmax(-1))[0].tolist()
    biased = [score + b for score, b in zip(s, bias, strict=True)]
    if model.num_groups > 1:
        size = len(s) // model.num_groups
        groups = [biased[g * size : (g + 1) * size] for g in range(model.num_groups)]
        two = 2 if model.score_function == "sigmoid" else 1
        kept = best([sum(sorted(group, reverse=True)[:two]) for group in groups], model.top_groups)
        biased = [b if i // size in kept else -float("inf") for i, b in enumerate(biased)]
    chosen = best(biased, model.top_k)
    weights = [s[e] for e in chosen]
    if model.score_function == "softmax_after_topk":
        weights = torch.tensor([logits[e] for e in chosen], dtype=torch.float64).softmax(0).tolist()
    if model.norm_topk:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return chosen, [w * model.route_scale for w in weights]


@given(st.data(), st.sampled_from(SCORES), st.booleans(), st.sampled_from([(1, 1), (2, 1), (4, 2)]))
def test_choice_and_weights_are_those_of_a_plain_loop(
    data: st.DataObject, score: str, norm: bool, groups: tuple[int, int]
) -> None:
    """Few distinct logits and biases, so that many scores are equal."""
    top_k, scale = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1.0, 2.5]))
    logits = data.draw(st.lists(st.lists(st.integers(-2, 2), min_size=8, max_size=8), min_size=1, max_size=4))
    bias = data.draw(st.lists(st.sampled_from([0.0, 0.25, -0.5]), min_size=8, max_size=8))
    shape = dict(top_k=top_k, score_function=score, norm_topk=norm, route_scale=scale)
    shape |= dict(num_groups=groups[0], top_groups=groups[1])
    logits_TE = torch.tensor(logits, dtype=torch.float64)
    got_TE, scores_TE, weights_TK, chosen_TK, _ = route(logits_TE, bias, **shape)
    assert torch.equal(got_TE, logits_TE)
    torch.testing.assert_close(scores_TE, logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1))
    for t, row in enumerate(logits):
        chosen, weights = plain(row, bias, Model(num_experts=8, **shape))
        assert chosen_TK[t].tolist() == chosen
        assert weights_TK[t].tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float64, -8.0), (torch.float32, -25.0)])
def test_what_is_added_to_the_sum_changes_no_bit_of_the_weights(dtype: torch.dtype, lowest: float) -> None:
    """MiniMax-M2 and Qwen3 add nothing, DeepSeek-V3 1e-20: the same unless all chosen scores are lower than these."""
    logits_TE = torch.linspace(lowest, lowest + 3, 96, dtype=dtype).view(12, 8)
    _, scores_TE, weights_TK, chosen_TK, _ = route(logits_TE, score_function="sigmoid", norm_topk=True, top_k=3)
    chosen_scores_TK = scores_TE.gather(1, chosen_TK)
    assert torch.equal(weights_TK, chosen_scores_TK / chosen_scores_TK.sum(-1, keepdim=True))


@pytest.mark.parametrize("score", SCORES)
def test_ties_go_to_the_lower_expert(score: str) -> None:
    level = torch.zeros(3, 8, dtype=torch.float64)
    assert route(level, score_function=score, top_k=3)[3].tolist() == [[0, 1, 2]] * 3
    assert route(level, score_function=score, top_k=2, num_groups=4, top_groups=1)[3].tolist() == [[0, 1]] * 3


def test_scores_outside_the_best_groups_are_never_chosen() -> None:
    """Expert 0 is the best of all, but a sigmoid group is rated by its two best."""
    logits = torch.tensor([[9.0, -9, 1, 1, 0, 0, 0, 0]], dtype=torch.float64)
    groups = dict(num_groups=4, top_groups=1, top_k=2)
    assert route(logits, score_function="sigmoid", **groups)[3].tolist() == [[2, 3]]
    assert route(logits, score_function="softmax", **groups)[3].tolist() == [[0, 1]]


@pytest.mark.parametrize("score", SCORES)
def test_the_bias_changes_the_choice_and_no_weight(score: str) -> None:
    logits = torch.tensor([[3.0, 2, 1, 0]], dtype=torch.float64)
    _, scores, weights, chosen, _ = route(logits, [0, 0, 0, 5.0], score_function=score, norm_topk=False)
    assert chosen.tolist() == [[3, 0]]
    want = logits[:, [3, 0]].softmax(-1) if score == "softmax_after_topk" else scores[:, [3, 0]]
    torch.testing.assert_close(weights, want)


def test_gradients_reach_the_weight_through_the_weights_alone() -> None:
    made = router(5)
    x_TD = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    _, _, weights_TK, chosen_TK, _ = made(x_TD, tokens(7))
    assert not chosen_TK.requires_grad
    (weights_TK * torch.tensor([1.0, 2.0])).sum().backward()
    assert made.weight.grad.abs().sum() > 0 and x_TD.grad.abs().sum() > 0


def test_jitter_is_a_function_of_step_layer_and_token() -> None:
    dim, count, jitter = 8, 12, 0.1
    x_TD = torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    made = router(dim, jitter=jitter)
    torch.nn.init.eye_(made.weight)  # the logits are the jittered inputs

    def noisy(step: int, *pieces: slice, layer: int = 1) -> Tensor:
        made.layer = layer
        made.begin_step(step)
        return torch.cat([made(x_TD[p], tokens(p.stop - p.start, p.start))[0] for p in pieces]).detach()

    whole = noisy(1, slice(0, count))
    u = counter_rng.uniform(
        counter_rng.key("jitter", 0, 1, 1), torch.arange(count * dim).view(count, dim), torch.float64
    )
    torch.testing.assert_close(whole, x_TD * (1 + jitter * (2 * u - 1)), rtol=1e-15, atol=0)
    assert torch.equal(noisy(1, slice(0, count)), whole), "a recomputed forward"
    assert torch.equal(noisy(1, slice(0, 5), slice(5, 6), slice(6, count)), whole), "another batch split"
    assert not torch.equal(noisy(2, slice(0, count)), whole)
    assert not torch.equal(noisy(1, slice(0, count), layer=2), whole)
    assert ((whole / x_TD - 1).abs() <= jitter).all() and (whole / x_TD - 1).abs().max() > 0.5 * jitter


def test_force_balance_goes_round_by_the_global_token_index() -> None:
    made = router(4, force_balance=True, top_k=3, norm_topk=False)
    x_TD = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    _, scores_TE, weights_TK, chosen_TK, _ = made(x_TD, tokens(10, first=6))
    want = [[(t * 3 + k) % 8 for k in range(3)] for t in range(6, 16)]
    assert chosen_TK.tolist() == want
    assert torch.equal(weights_TK, scores_TE.gather(1, torch.tensor(want)))


def test_padding_gets_no_expert() -> None:
    valid = torch.tensor([True, False, True, False])
    for forced in (False, True):
        made = router(4, force_balance=forced)
        _, _, weights_TK, chosen_TK, _ = made(torch.ones(4, 4, dtype=torch.float64), tokens(4, valid=valid))
        assert (chosen_TK == 8).all(1).tolist() == (~valid).tolist()
        assert (chosen_TK[valid] < 8).all() and weights_TK.isfinite().all()


@pytest.mark.parametrize(
    "stored, given, option, wide",
    [
        (torch.bfloat16, torch.bfloat16, "float32", torch.float32),
        (torch.float32, torch.bfloat16, "float32", torch.float32),
        (torch.float32, torch.float32, "float64", torch.float64),
        (torch.float32, torch.bfloat16, "float64", torch.float64),
        (torch.float64, torch.float64, "float32", torch.float64),
    ],
)
def test_gating_promotes_and_never_demotes(
    stored: torch.dtype, given: torch.dtype, option: str, wide: torch.dtype
) -> None:
    made = router(16, stored, router_dtype=option)
    assert made.weight.dtype == torch.promote_types(stored, torch.float32) and made.expert_bias.dtype == torch.float32
    x_TD = torch.randn(6, 16, generator=torch.Generator().manual_seed(2)).to(given)
    logits_TE, scores_TE, weights_TK, *_ = made(x_TD, tokens(6))
    assert {logits_TE.dtype, scores_TE.dtype, weights_TK.dtype} == {wide}
    want = x_TD.double() @ made.weight.double().t()
    tolerances.assert_close(logits_TE.double(), want, terms=16, dtype=wide)


def test_the_router_bias_is_a_weight_and_not_the_selection_bias() -> None:
    made = router(6, router_bias=True, score_function="softmax_after_topk", norm_topk=False)
    with torch.no_grad():
        made.bias.copy_(torch.linspace(-3, 3, 8))
    x_TD = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits_TE, _, weights_TK, chosen_TK, _ = made(x_TD, tokens(5))
    want_TE = x_TD @ made.weight.t() + made.bias
    torch.testing.assert_close(logits_TE, want_TE)
    top = want_TE.topk(2)
    assert torch.equal(chosen_TK, top.indices)
    torch.testing.assert_close(weights_TK, top.values.softmax(-1))
    cotangent = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got, want = (torch.autograd.grad(w, made.bias, cotangent)[0] for w in (weights_TK, top.values.softmax(-1)))
    torch.testing.assert_close(got, want)
    assert (got != 0).any()
