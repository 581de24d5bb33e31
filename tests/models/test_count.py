"""Counts against published checkpoints, against the parameters' shapes written out, and against hand calculation."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from tests import parity
from tests.support.families import has_attention_only
from titanmoe.config.blocks import window
from titanmoe.config.schema import Model
from titanmoe.models.__main__ import renew
from titanmoe.models.count import flops_per_token, layer_flops, parameters, training_work
from titanmoe.models.families import names, preset
from titanmoe.models.tensors import Tuning

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


LATENT = dict(qk_norm="none", qkv_bias=False, out_bias=False, attention_sinks=False)
LATENT |= dict(kv_lora_rank=40, qk_nope_head_dim=6, qk_rope_head_dim=2, head_dim=8, v_head_dim=10)
GROUPED_QUERIES = dict(kv_lora_rank=0, q_lora_rank=0, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0, head_dim=8)


def model(family: str, size: str, **overrides) -> Model:
    return Model(**{**preset(family, size), **overrides})


@pytest.mark.parametrize(
    "family, size, total",
    [
        # Elements of the checkpoint's safetensors files on Hugging Face.
        ("mixtral", "8x7b", 46_702_792_704),
        ("mixtral", "8x22b", 140_620_634_112),
        ("qwen2_moe", "57b_a14b", 57_408_658_944),
        ("qwen3_moe", "30b_a3b", 30_532_122_624),
        ("qwen3_moe", "235b_a22b", 235_093_634_560),
        ("olmoe", "7b_a1b", 6_919_161_856),
        ("gpt_oss", "20b", 20_914_757_184),
        ("gpt_oss", "120b", 116_829_156_672),
    ],
)
def test_total_is_the_published_checkpoints(family, size, total):
    assert parameters(model(family, size)).total == total


@pytest.mark.parametrize(
    "family, size, total, active, unit",
    [
        # Billions as announced; cards round or truncate the last digit, so within one unit of it.
        ("mixtral", "8x7b", 46.7, 12.9, 0.1),
        ("mixtral", "8x22b", 141, 39, 1),
        ("qwen2_moe", "57b_a14b", 57.4, 14.2, 0.1),
        ("qwen3_moe", "30b_a3b", 30.5, 3.3, 0.1),
        ("qwen3_moe", "235b_a22b", 235, 22, 1),
        ("deepseek_v3", "671b", 671, 37, 1),
        ("olmoe", "7b_a1b", 6.92, 1.28, 0.01),
    ],
)
def test_total_and_active_are_the_cards(family, size, total, active, unit):
    count = parameters(model(family, size))
    assert abs(count.total / 1e9 - total) < unit
    assert abs(count.active / 1e9 - active) < unit


@pytest.mark.parametrize(
    "family, size, total, active",
    [
        ("glm4_moe", "106b_a12b", 106.9, 13.4),
        ("glm4_moe", "355b_a32b", 352.8, 33.6),
        ("kimi_k2", "1t_a32b", 1026.4, 32.9),
        ("glm4_moe_lite", "30b_a3b", 29.9, 3.9),
        ("qwen3_next", "80b_a3b", 79.7, 3.9),
        ("qwen3_5_moe", "35b_a3b", 34.7, 3.5),
        ("qwen3_5_moe", "122b_a10b", 122.1, 9.8),
        ("minimax_m2", "230b_a10b", 228.7, 11.0),
    ],
)
def test_total_and_active_are_those_of_the_published_config(family, size, total, active):
    """Billions, counted elsewhere from its numbers; the cards of these round to others."""
    count = parameters(model(family, size))
    assert count.total / 1e9 == pytest.approx(total, rel=0.005)
    assert count.active / 1e9 == pytest.approx(active, abs=0.05)


def test_flops_of_linear_and_gated_attention_by_hand():
    """Of qwen3_next's debug size, width 64: 8 key heads and 16 value heads of 8, which share states of 8 x 8; then 16
    heads of 8 and 8 key heads."""
    experts = 2 * 64 * (16 + 3 * (4 * 64 + 64))
    projections, taps = 64 * (64 + 64 + 128 + 128 + 16 + 16 + 128), 4 * (64 + 64 + 128)
    linear = 2 * (projections + taps) + 3 * 2 * 16 * 8 * 8  # the state's answer to a key, its change, its answer
    gated = 2 * 64 * (128 + 128 + 64 + 64 + 128) + 16 * (8 + 8) * 128
    layers, _ = layer_flops(model("qwen3_next", "debug"), 128)
    assert layers == [linear + experts] * 3 + [gated + experts]


def test_moonlight_is_announced_without_embedding_and_head():
    """arXiv 2502.16982: 15.29 and 2.24 billion."""
    count = parameters(model("deepseek_v3", "16b"))
    assert abs((count.total - count.embedding) / 1e9 - 15.29) < 0.005
    assert abs((count.active - count.embedding) / 1e9 - 2.24) < 0.005


@pytest.mark.parametrize("size, total, active", [("20b", 20.91, 3.61), ("120b", 116.83, 5.13)])
def test_gpt_oss_is_its_card(size, total, active):
    """The card does not count the embedding as active (arXiv 2508.10925, table 1)."""
    m = model("gpt_oss", size)
    count = parameters(m)
    assert abs(count.total / 1e9 - total) < 0.01
    assert abs((count.active - m.vocab_size * m.dim) / 1e9 - active) < 0.01


def test_fine_grained_mixtral_keeps_the_experts_and_halves_what_a_token_visits():
    coarse, fine = parameters(model("mixtral", "8x22b")), parameters(model("mixtral", "8x22b_g8t8"))
    assert fine.experts == coarse.experts
    assert fine.active_experts * 2 == coarse.active_experts
    assert fine.total - coarse.total == 56 * (64 - 8) * 6144  # rows of the routers


def test_upcycled_llama_is_the_dense_model_with_eight_copies_of_its_ffn():
    dense = 70_553_706_496  # Meta-Llama-3-70B's checkpoint
    ffn, router = 80 * 3 * 8192 * 28672, 80 * 8 * 8192
    count = parameters(model("llama3_moe", "8x70b"))
    assert count.total == dense + 7 * ffn + router == 465_159_069_696
    assert count.active == dense + ffn + router == 126_930_395_136


def shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, written out."""
    query, key_value = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    shape = {"embed": (m.vocab_size, m.dim), "head.norm": (m.dim,)}
    if not m.tie_embeddings:
        shape["head"] = (m.vocab_size, m.dim)
    for i in range(m.num_layers + m.mtp_depth):
        if i == m.num_layers:
            shape |= {f"mtp.{name}_norm": (m.dim,) for name in ("hidden", "embed", "final")}
            shape["mtp.project"] = (m.dim, 2 * m.dim)
        shape |= {f"{i}.attention_norm": (m.dim,), f"{i}.ffn_norm": (m.dim,)}
        if m.kv_lora_rank:
            value = m.num_heads * m.v_head_dim
            shape |= {f"{i}.wkv_a": (m.kv_lora_rank + m.qk_rope_head_dim, m.dim), f"{i}.kv_norm": (m.kv_lora_rank,)}
            shape[f"{i}.wkv_b"] = (m.num_heads * m.qk_nope_head_dim + value, m.kv_lora_rank)
            shape[f"{i}.wo"] = (m.dim, value)
            if m.q_lora_rank:
                shape |= {f"{i}.wq_a": (m.q_lora_rank, m.dim), f"{i}.q_norm": (m.q_lora_rank,)}
                shape[f"{i}.wq_b"] = (query, m.q_lora_rank)
            else:
                shape[f"{i}.wq"] = (query, m.dim)
        else:
            shape |= {f"{i}.wq": (query, m.dim), f"{i}.wk": (key_value, m.dim)}
            shape |= {f"{i}.wv": (key_value, m.dim), f"{i}.wo": (m.dim, query)}
            shape |= {f"{i}.wg": (query, m.dim)} if m.attention_gate else {}
        if m.qkv_bias:
            shape |= {f"{i}.wq.bias": (query,), f"{i}.wk.bias": (key_value,), f"{i}.wv.bias": (key_value,)}
        if m.out_bias:
            shape[f"{i}.wo.bias"] = (m.dim,)
        if m.attention_sinks:
            shape[f"{i}.sinks"] = (m.num_heads,)
        if m.qk_norm != "none":
            q, k = {"head": (m.head_dim, m.head_dim), "full": (query, key_value)}[m.qk_norm]
            shape |= {f"{i}.q_norm": (q,), f"{i}.k_norm": (k,)}
        like = min(i, m.num_layers - 1)
        if like < m.num_dense_layers or (like - m.num_dense_layers + 1) % m.moe_every:
            shape |= {f"{i}.ffn.{w}": (m.dense_hidden, m.dim) for w in ("w1", "w2", "w3")}
            continue
        shape[f"{i}.router"] = (m.num_experts, m.dim)
        shape |= {f"{i}.experts.{w}": (m.num_experts, m.expert_hidden, m.dim) for w in ("w1", "w2", "w3")}
        if m.router_bias:
            shape[f"{i}.router.bias"] = (m.num_experts,)
        if m.expert_linear_bias:
            widths = {"w1": m.expert_hidden, "w2": m.dim, "w3": m.expert_hidden}
            shape |= {f"{i}.experts.{w}_bias": (m.num_experts, width) for w, width in widths.items()}
        if m.shared_hidden:
            shape |= {f"{i}.shared.{w}": (m.shared_hidden, m.dim) for w in ("w1", "w2", "w3")}
            if m.shared_gate:
                shape[f"{i}.shared.gate"] = (1, m.dim)
    return shape


@pytest.mark.parametrize("family", [name for name in names() if has_attention_only(name)])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(tie_embeddings=True),
        dict(num_layers=7, num_dense_layers=2, moe_every=2, dense_hidden=96),
        dict(num_layers=6, num_dense_layers=1, moe_every=2, dense_hidden=96, mtp_depth=1),
        dict(shared_hidden=48, shared_gate=False, mtp_depth=1),
        dict(shared_hidden=0, shared_gate=True),
        dict(GROUPED_QUERIES, qkv_bias=True, qk_norm="head", num_kv_heads=2),
        dict(GROUPED_QUERIES, qk_norm="full", num_kv_heads=2, attention_gate=True),
        dict(GROUPED_QUERIES, out_bias=True, attention_sinks=True, router_bias=True, expert_linear_bias=True),
        dict(LATENT, q_lora_rank=24),
        dict(LATENT, q_lora_rank=0),
    ],
    ids=str,
)
def test_the_parts_are_the_sums_of_the_shapes(family, overrides):
    m = model(family, "debug", **overrides)
    shape, count = shapes(m), parameters(m)

    def elements(pattern: str) -> int:
        return sum(prod(s) for name, s in shape.items() if re.search(pattern, name))

    assert count.total == elements("")
    assert count.embedding == elements(r"^embed$|^head$")
    assert count.attention == elements(r"\.w([qkvog]|kv)(_[ab])?$|\.w[qkvo]\.bias$|\.sinks$")
    assert count.dense == elements(r"\.ffn\.")
    assert count.router == elements(r"\.router")
    assert count.experts == elements(r"\.experts")
    assert count.shared == elements(r"\.shared")
    assert count.norms == elements(r"norm$")
    assert count.mtp == elements(r"\.project$")
    assert count.active_experts * m.num_experts == count.experts * m.top_k
    assert count.active == count.total - count.experts + count.active_experts


def test_flops_by_hand():
    m = Model(
        vocab_size=10,
        dim=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        num_experts=3,
        top_k=1,
        expert_hidden=5,
    )
    # wq 4x4, wk and wv 2x4, wo 4x4; router 3x4; one expert 3x(5x4); three norms of 4; head 10x4
    weights = 48 + 12 + 60 + 12 + 40
    attention = 2 * (2 * 2) * 6  # 2 (scores, values) x 2 FLOPs x 4 wide x half of 6 positions
    assert flops_per_token(m, 6) == 3 * (2 * weights + attention) == 3 * 392
    # A tied head is multiplied too.
    assert flops_per_token(replace(m, tie_embeddings=True), 6) == 3 * 392


def test_flops_with_frozen_weights_by_hand():
    """Forward 2 for each weight, its gradient 2 if it is trained, its input's 2 if anything before it is."""
    m = Model(vocab_size=10, dim=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, num_experts=3, top_k=1)
    m = replace(m, expert_hidden=5)
    qkv, scores, wo, router, w, norm, head = 32, 48, 16, 12, 20, 4, 40
    forward = 2 * (qkv + wo + router + 3 * w + 3 * norm + head) + scores
    assert flops_per_token(m, 6, Tuning(("nothing",))) == 3 * forward
    # Frozen in the middle: no gradients of weights.
    assert flops_per_token(m, 6, Tuning(("*.attention.*",))) == 3 * forward - 2 * (qkv + wo)
    # Only w2 is trained: before it nothing, after it two norms' and the head's inputs.
    frozen = ["embed.*", "head.*", "*norm.weight", "*.attention.*", "*.router.*", "*.w1", "*.w3"]
    assert flops_per_token(m, 6, Tuning(tuple(frozen))) == forward + 2 * w + 2 * (norm + head)
    # Only wk: the scores and all after them pass gradients on, but not wq and wv, which have the same input.
    frozen = ["embed.*", "head.*", "*norm.weight", "*.w[qvo].weight", "*.moe.*"]
    after = wo + router + 3 * w + 2 * norm + head
    assert flops_per_token(m, 6, Tuning(tuple(frozen))) == forward + 2 * 8 + 2 * scores + 2 * after
    # What is trained but has nothing trained before it needs no gradient of its input.
    assert flops_per_token(m, 6, Tuning(("embed.*",))) == 3 * forward - 2 * norm


def test_flops_with_adapters_by_hand():
    """6 r (inputs + outputs) for each, less for the first A, whose input needs no gradient; 4 or 2 if frozen."""
    m = Model(vocab_size=10, dim=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, num_experts=3, top_k=1)
    m = replace(m, expert_hidden=5)
    qkv, scores, wo, router, w, norm, head = 32, 48, 16, 12, 20, 4, 40
    frozen = 4 * (wo + router + 3 * w + 2 * norm + head) + 2 * (norm + qkv) + 3 * scores
    first = 3 * 2  # A of wq, wk and wv, at rank 2: no gradient for the normed embedding
    dense, experts = 6 * 2 * (8 + 6 + 6 + 8) - 2 * 4 * first, 3 * 6 * 1 * (4 + 5)
    assert flops_per_token(m, 6, Tuning((), 2, 1, ("*",))) == frozen + dense + experts


def test_flops_of_latent_attention_by_hand():
    m = Model(vocab_size=10, dim=4, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=6, num_experts=3, top_k=1)
    m = replace(m, expert_hidden=5, kv_lora_rank=3, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=8)
    # wq 12x4, wkv_a 5x4, its norm, wkv_b 24x3, wo 4x16; router 3x4; one expert 3x(5x4); three norms of 4; head 10x4
    weights = 48 + 20 + 3 + 72 + 64 + 12 + 60 + 12 + 40
    attention = 2 * (2 * 6 + 2 * 8) * 6 // 2  # 2 FLOPs x (scores 12 wide, values 16 wide) x half of 6 positions
    assert flops_per_token(m, 6) == 3 * (2 * weights + attention)
    assert layer_flops(m, 6) == ([2 * (weights - 40 - 12 - 3) + attention], 2 * 40)
    # A query latent of 7: 7x4, its norm, 12x7 instead of 12x4.
    assert flops_per_token(replace(m, q_lora_rank=7), 6) == 3 * (2 * (weights - 48 + 28 + 7 + 84) + attention)


def test_multi_token_prediction_costs_a_block_a_projection_and_a_head():
    m = model("deepseek_v3", "671b")
    more = replace(m, mtp_depth=1)
    (*_, block), head = layer_flops(m, 4096)
    norms = 2 * (2 * 7168 + 1536 + 512 + 3 * 7168)  # counted like matrix rows; layer_flops leaves them out
    layers, behind = layer_flops(more, 4096)
    assert (len(layers), behind - head) == (61, block + head + 2 * 2 * 7168 * 7168)
    assert flops_per_token(more, 4096) - flops_per_token(m, 4096) == 3 * (behind - head + norms)
    # README_WEIGHTS.md of the checkpoint: 11.5 billion in addition to the shared embedding and head.
    assert abs((parameters(more).total - parameters(m).total) / 1e9 - 11.5) < 0.15


def test_flops_of_a_window_by_hand():
    """Every other block sees 6 of 18 positions: on average 6 less the corner's 6 * 6 / 2 / 18 = 5, not 18 / 2 = 9."""
    m = model("mixtral", "debug", num_layers=4)
    narrow = replace(m, sliding_window=6, full_attention_every=2)
    saved = 2 * (9 - 5) * 2 * 2 * m.num_heads * m.head_dim  # blocks, positions, scores and values, 2 FLOPs each
    assert flops_per_token(m, 18) - flops_per_token(narrow, 18) == 3 * saved
    assert sum(layer_flops(m, 18)[0]) - sum(layer_flops(narrow, 18)[0]) == saved
    assert [window(narrow, layer) for layer in range(4)] == [6, 0, 6, 0]
    assert [window(replace(narrow, full_attention_every=0), layer) for layer in range(4)] == [6] * 4
    assert flops_per_token(replace(narrow, sliding_window=99), 18) == flops_per_token(m, 18)


def test_flops_of_mixtral_8x7b_by_hand():
    multiplied = 12_879_925_248 - 32_000 * 4_096
    attention = 6 * 32 * (32 * 128) * 4_096
    assert flops_per_token(model("mixtral", "8x7b"), 4096) == 6 * multiplied + attention == 79_714_344_960


def test_the_docs_table_is_the_count():
    """A family that is not on the page may be added."""
    page = DOCS.read_text()
    wrong = set(page.splitlines()) - set(renew(page).splitlines())
    assert not wrong, "rewrite them: python -m titanmoe.models docs/models.md"
    assert "| mixtral | 8x7b | 46,702,792,704 | 12,879,925,248 | 79.714 |" in page


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_work_by_what_is_seen_is_that_of_a_whole_sequence(family: str) -> None:
    """Of a token in a sequence of 512, which sees half of it or a window's positions on average."""
    model = Model(**parity.preset_of(family))
    frozen = Tuning.of(parity.read({"training.freeze": ["layers.0.*", "embed.*"]}, 1))
    for tuning in (Tuning(), frozen):
        work = training_work(model, tuning)
        seen = {width: (width or 512) * (1 - (width or 512) / 1024) for width in work.per_pair}
        total = work.per_token + sum(cost * seen[width] for width, cost in work.per_pair.items())
        assert total == pytest.approx(flops_per_token(model, 512, tuning), rel=1e-3)
