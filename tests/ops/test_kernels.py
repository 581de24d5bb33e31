"""Triton's kernels against their plain references: on a GPU with `pytest -m gpu`, elsewhere line by line.

Without a GPU this file runs in a process with Triton's interpreter, which tests/ops/test_interpreter.py starts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.moe.test_router_product import within
from tests.support import tolerances
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config.schema import Model, MoE
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import RMSNorm, SplitRMSNorm, plain_norm, plain_rotate, rotate, rotate_both
from titanmoe.models.vocabulary import chunked_cross_entropy
from titanmoe.moe.dispatchers.symmetric_buffers import plain_put, plain_take
from titanmoe.moe.expert_products import ExpertProducts
from titanmoe.moe.fp8 import plain_quantise, quantise
from titanmoe.moe.grouped_mm import Groups, add_gradient
from titanmoe.moe.layer_statistics import entropy_and_count as balance_spread
from titanmoe.moe.permute import (
    can_pack,
    invert,
    permute_packed,
    permute_tokens,
    permute_with_weights,
    reorder,
    reorder_and_unpack,
    reorder_weighted,
    unpermute_tokens,
)
from titanmoe.moe.router import Router
from titanmoe.moe.router_product import plain_bfloat16_terms, product_by_terms
from titanmoe.moe.score_functions import Sigmoid
from titanmoe.moe.send_slots import assign_slots, assign_unpadded_slots, fill_slots, order_by_expert, sort_by_expert
from titanmoe.ops.kernels import installed, interpreted
from titanmoe.tokens import IGNORE, Tokens

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [
    pytest.mark.skipif(not interpreted() and not torch.cuda.is_available(), reason="no CUDA device"),
    *([] if interpreted() else [pytest.mark.gpu]),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
if installed():
    from titanmoe.ops.kernels import put, rms_norm, router_entropy, slot_kernels
    from titanmoe.ops.kernels.bfloat16_terms import bfloat16_terms
    from titanmoe.ops.kernels.permute_rows import fetch_rows
E = 4


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(DEVICE, dtype).requires_grad_()


def close(got: Tensor, want: Tensor, dtype: torch.dtype, terms: int = 300) -> None:
    """The reference rounds after each of some 6 operations; the interpreter rounds towards zero, twice as far."""
    tolerances.assert_close(got, want, terms, roundings=4 * 6, dtype=dtype)


def choices(kind: str, tokens: int, top_k: int) -> Tensor:
    """Distinct experts for each token, E for none."""
    rows = torch.rand(tokens, E, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :top_k]
    if kind == "one expert":
        rows = torch.arange(top_k).expand(tokens, -1) + (E - top_k)
    elif kind == "an idle expert":
        rows = torch.where(rows == 1, E, rows)
    elif kind == "padding":
        rows = torch.where((torch.arange(tokens) % 3 == 1).unsqueeze(1), E, rows)
    elif kind == "none":
        rows = torch.full_like(rows, E)
    return rows.contiguous().to(DEVICE)


def through(kernels: str, x: Tensor, weights: Tensor, entry: Tensor, slot: Tensor) -> list[Tensor]:
    rows, row_weights, route = fill_slots(x, weights, entry, slot, kernels)
    back = unpermute_tokens(rows * row_weights.to(rows.dtype), route.source_S, route.slot_TJ, kernels)
    cotangents = [random(*y.shape, dtype=y.dtype, seed=9).detach() for y in (rows, row_weights, back)]
    grads = torch.autograd.grad((rows, row_weights, back), (x, weights), cotangents)
    return [rows, row_weights, back, *grads]


@pytest.mark.parametrize("kind", ["random", "one expert", "an idle expert", "padding", "none"])
@pytest.mark.parametrize(
    "tokens, top_k, etp, slots_per_expert, width",
    [(37, 2, 1, 0, 24), (37, 1, 1, 0, 24), (5, 3, 2, 0, 130), (16, 2, 1, 20, 8), (1, 1, 1, 0, 1), (0, 2, 1, 0, 8)],
)
def test_tokens_to_rows_and_back(
    kind: str, tokens: int, top_k: int, etp: int, slots_per_expert: int, width: int
) -> None:
    """The interpreter sums in float32 in a test below, which is compiled too."""
    for dtype in DTYPES[::2] if interpreted() else DTYPES:
        chosen = choices(kind, tokens, top_k)
        order, count = sort_by_expert(chosen, E)
        rows = E * etp * slots_per_expert if slots_per_expert else int(count.sum()) * etp
        entry, slot = assign_slots(
            chosen, order, count, ep=2, etp=etp, slots_per_expert=slots_per_expert, num_slots=rows
        )
        inputs = (
            random(tokens, width, dtype=dtype),
            random(tokens, top_k, dtype=torch.promote_types(dtype, torch.float32), seed=1),
        )
        got, want = (through(kernels, *inputs, entry, slot) for kernels in ("triton", "torch"))
        again = got if interpreted() else through("triton", *inputs, entry, slot)  # it runs programs one by one
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        for g, a, w in zip(got, again, want, strict=True):
            close(g, w, dtype)
            assert torch.equal(g, a), "two runs differ"


def test_rows_wider_than_a_program() -> None:
    """5,000 columns are two tiles; 300 rows of one column are just one tile."""
    for rows, width in ((3, 5000), (300, 1)):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        x = random(rows, width, dtype=torch.float32)
        results = []
        for kernels in ("triton", "torch"):
            moved = reorder(x, order, invert(order), kernels)
            back = permute_tokens(moved, order, invert(order).unsqueeze(1), kernels)
            cotangent = random(rows, width, dtype=torch.float32, seed=4).detach()
            results.append([moved, back, *torch.autograd.grad((moved, back), x, (cotangent, cotangent))])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_regrouped_rows_come_back() -> None:
    count = torch.tensor([[3, 0], [1, 4]], device=DEVICE)
    x = random(8, 6, dtype=torch.float32)
    regroup = order_by_expert(count, 8)
    assert torch.equal(reorder(reorder(x, *regroup, "triton"), *reversed(regroup), "triton"), x)
    weights, cotangent = random(8, 1, dtype=torch.float32, seed=1), random(8, 6, dtype=torch.float32, seed=2).detach()
    results = []
    for kernels in ("triton", "torch"):
        moved = reorder_weighted(x, weights, *regroup, kernels)
        results.append([*moved, *torch.autograd.grad(moved, (x, weights), (cotangent, cotangent[:, :1]))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["random", "padding", "none"])
def test_rows_packed_with_their_weights(kind: str) -> None:
    """Bit by bit what goes apart, there and back."""
    chosen = choices(kind, 13, 2)
    order, count = sort_by_expert(chosen, E)
    entry, slot = assign_slots(chosen, order, count, ep=2, etp=1, slots_per_expert=9, num_slots=E * 9)  # padded bins
    again = torch.randperm(len(entry), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for dtype in DTYPES:
        wide = torch.promote_types(dtype, torch.float32)
        x, weights = random(13, 24, dtype=dtype), random(13, 2, dtype=wide, seed=1)
        assert can_pack(x, "triton") and not can_pack(x[:, :9], "triton") and not can_pack(x, "torch")
        apart = reorder_weighted(
            *permute_with_weights(x, weights, entry, slot.view(13, 2), "torch"), again, invert(again)
        )
        packed = permute_packed(x, weights, entry, slot.view(13, 2))
        assert packed.shape[1] * packed.element_size() == 24 * x.element_size() + 16
        results = []
        for rows in (apart, reorder_and_unpack(packed, again, invert(again), wide)):
            cotangents = [random(*y.shape, dtype=y.dtype, seed=9).detach() for y in rows]
            results.append([*rows, *torch.autograd.grad(rows, (x, weights), cotangents)])
        for a, b in zip(*results[:2], strict=True):
            close(b, a, dtype)
        assert all(torch.equal(a, b) for a, b in zip(results[0][:2], results[1][:2], strict=True))


@pytest.mark.parametrize(
    "width, counts, clamped, side_by_side",
    [
        (100, [2, 0, 3, 1], False, False),
        (100, [2, 0, 3, 1], True, True),
        (100, [0, 23, 0, 0], True, False),
        (100, [0, 0, 0, 0], False, True),
        (2056, [1, 0, 2, 0], False, True),  # two tiles
    ],
)
def test_activation_with_the_routing_weight(width: int, counts: list[int], clamped: bool, side_by_side: bool) -> None:
    for dtype in DTYPES:
        count, wide = torch.tensor(counts, device=DEVICE), torch.promote_types(dtype, torch.float32)
        results = []
        for kernels in ("triton", "torch"):
            leaves = [
                (random(sum(counts), width, dtype=dtype, seed=0) * 6).detach().requires_grad_(),
                (random(sum(counts), width, dtype=dtype, seed=1) * 6).detach().requires_grad_(),
                random(sum(counts), 1, dtype=wide, seed=2),
                (random(4, 8, width, dtype=dtype, seed=3) / width**0.5).detach().requires_grad_(),
            ]
            *hidden, weight, w2 = (x.view_as(x) for x in leaves)
            hidden = (torch.cat(hidden, 1),) if side_by_side else tuple(hidden)
            products = ExpertProducts(groups=Groups(count), method="loop", clamped=clamped, kernels=kernels)
            (y,) = products.down(hidden, weight, w2)
            grads = torch.autograd.grad(y, leaves, random(*y.shape, dtype=dtype, seed=4).detach())
            results.append([y.detach(), *grads])
        for got, want in zip(*results, strict=True):
            close(got, want, dtype, terms=2 * width)


@pytest.mark.parametrize("counts", [[2, 0, 70, 1], [0, 0, 0, 0]])
def test_gradients_added_to_their_sums(counts: list[int]) -> None:
    """Of two weights side by side and of one, wider than a tile; the first of them begin the sums. The interpreter
    cannot multiply bfloat16."""
    narrow = torch.float16 if interpreted() else torch.bfloat16
    rows, groups = sum(counts), Groups(torch.tensor(counts, device=DEVICE))
    for dtype, parts, width, across in ((torch.float32, 2, 72, 8), (narrow, 1, 8, 136)):
        sums = []
        for kernels in ("triton", "torch"):
            total = torch.full((parts, len(counts), width, across), torch.nan, device=DEVICE)
            for seed in range(2):
                grad = random(rows, parts * width, dtype=dtype, seed=seed).detach()
                x = random(rows, 2 * across, dtype=dtype, seed=2 + seed).detach()[:, across:]
                add_gradient(total, grad, x, groups, grouped=True, kernels=kernels, add=seed > 0)
            sums.append(total)
        tolerances.assert_close(*sums, terms=2 * max(counts), roundings=4)


@pytest.mark.parametrize("kind", ["random", "one expert", "an idle expert", "padding", "none"])
@pytest.mark.parametrize(
    "tokens, top_k, ep, etp", [(37, 2, 2, 1), (70, 3, 4, 1), (37, 2, 1, 2), (5, 3, 2, 3), (0, 2, 1, 1)]
)
def test_the_place_of_every_choice(kind: str, tokens: int, top_k: int, ep: int, etp: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(slot_kernels, "TILE", 256)  # blocks of 64 choices
    chosen = choices(kind, tokens, top_k)
    for got, want in zip(
        *(assign_unpadded_slots(chosen, E, ep, etp, kernels) for kernels in ("triton", "torch")), strict=True
    ):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("counts", [[[3, 0], [1, 4]], [[0, 0, 0]], [[2000, 1, 0], [0, 0, 0], [5, 1030, 7]]])
def test_rows_by_expert(counts: list[list[int]]) -> None:
    count = torch.tensor(counts, device=DEVICE)
    rows = int(count.sum())
    for got, want in zip(*(order_by_expert(count, rows, kernels) for kernels in ("triton", "torch")), strict=True):
        assert torch.equal(got, want)


def normed(norm: Any, x: Tensor, weight: Tensor, begin: int) -> list[Tensor]:
    """y of the last numbers of x's rows, and the gradients of x and of the weight."""
    y = norm(x[..., begin:], weight, 1e-6)
    grad = random(*y.shape[:-1], y.shape[-1] + 4, dtype=y.dtype, seed=7).detach()[..., 4:]  # a part of longer rows
    return [y, *torch.autograd.grad(y, (x, weight), grad)]


@pytest.mark.parametrize(
    "shape, begin",
    [((3, 5, 4, 64), 0), ((2, 70, 128), 8), ((9, 100), 1), ((3, 2048), 0), ((2, 8192), 0), ((0, 64), 0), ((5, 3), 0)],
)
@pytest.mark.parametrize("warps", [8, rms_norm.WARPS if installed() else 0])
def test_rms_norm(shape: tuple[int, ...], begin: int, warps: int, monkeypatch: Any) -> None:
    """With 8 warps a program of backward has several blocks of rows; the last is not full."""
    monkeypatch.setattr(rms_norm, "WARPS", warps)
    for dtype, of_weight in zip((*DTYPES, torch.bfloat16), (*DTYPES, torch.float32), strict=True):
        x, weight = random(*shape, dtype=dtype), random(shape[-1] - begin, dtype=of_weight, seed=1)
        got, want = (normed(norm, x, weight, begin) for norm in (rms_norm.rms_norm, plain_norm))
        for g, a, w in zip(got, normed(rms_norm.rms_norm, x, weight, begin), want, strict=True):
            close(g, w, dtype, terms=2 * max(x.numel() // shape[-1], shape[-1]))
            assert torch.equal(g, a), "two runs differ"


@pytest.mark.parametrize("kind", [RMSNorm, SplitRMSNorm])
def test_norms_of_modules(kind: type[RMSNorm]) -> None:
    """Rows of queries with gaps between them; a weight that begins at zero; a weight that is not trained."""
    for adds_one, trained in ((False, True), (True, True), (False, False)):
        x, results = random(2, 3, 4, 20, dtype=torch.float64), []
        for kernels in ("triton", "torch"):
            norm = kind(16, 1e-5, torch.float64, adds_one, kernels).to(DEVICE)
            norm.weight = torch.nn.Parameter(random(16, dtype=torch.float64, seed=1).detach(), requires_grad=trained)
            y = norm(x[:, :, 1:3, :16])
            assert (type(y.grad_fn).__name__ == "_RMSNormBackward") == (kernels == "triton")
            wanted = [x, norm.weight] if trained else [x]
            results.append([y, *torch.autograd.grad(y, wanted, random(*y.shape, dtype=y.dtype, seed=2).detach())])
        for got, want in zip(*results, strict=True):
            close(got, want, torch.float64)


@pytest.mark.parametrize("queries, keys, width", [(4, 2, 12), (3, 3, 64), (5, 1, 8)])
@pytest.mark.parametrize("samples, positions, angles", [(2, 3, 2), (2, 2, 1), (1, 0, 1)])
def test_rotation(queries: int, keys: int, width: int, samples: int, positions: int, angles: int) -> None:
    for dtype in DTYPES:
        wide = torch.promote_types(dtype, torch.float32)
        half = random(angles, positions, 1, width // 2, dtype=wide, seed=2).detach()
        angle = torch.cat((half, half), -1)
        rope = angle.cos(), angle.sin()
        q = random(samples, positions, queries, width, dtype=dtype)
        wider = random(samples, positions, keys, width + 4, dtype=dtype, seed=1)  # keys that are a part of other rows
        results = []
        for rotated in (
            rotate_both(q, wider[..., 4:], rope, "triton"),
            (rotate(q, rope, "triton"), rotate(wider[..., 4:], rope, "triton")),
            (plain_rotate(q, rope), plain_rotate(wider[..., 4:], rope)),
        ):
            cotangents = [random(*y.shape, dtype=dtype, seed=7).detach() for y in rotated]
            results.append([*rotated, *torch.autograd.grad(rotated, (q, wider), cotangents)])
        for got, alone, want in zip(*results, strict=True):
            close(got, want, dtype)
            assert torch.equal(got, alone)


def test_rotation_of_a_part_of_each_head() -> None:
    for dtype in DTYPES:
        half = random(2, 3, 1, 4, dtype=torch.promote_types(dtype, torch.float32), seed=2).detach()
        angle = torch.cat((half, half), -1)
        rope = angle.cos(), angle.sin()
        q, k = random(2, 3, 4, 12, dtype=dtype), random(2, 3, 2, 12, dtype=dtype, seed=1)
        want = [torch.cat((plain_rotate(x[..., :8], rope), x[..., 8:]), -1) for x in (q, k)]
        cotangents = [random(*y.shape, dtype=dtype, seed=7).detach() for y in want]
        for kernels in ("triton", "torch"):
            got = rotate_both(q, k, rope, kernels)
            for a, b in zip(
                [*got, *torch.autograd.grad(got, (q, k), cotangents)],
                [*want, *torch.autograd.grad(want, (q, k), cotangents, retain_graph=True)],
                strict=True,
            ):
                close(a, b, dtype)


@pytest.mark.parametrize(("heads", "nope", "rope", "value"), [(3, 6, 8, 10), (2, 128, 64, 128), (70, 40, 2, 24)])
@pytest.mark.parametrize(("samples", "positions", "angles"), [(2, 2, 2), (2, 1, 1), (1, 0, 1)])
def test_latent_queries_and_keys(
    heads: int, nope: int, rope: int, value: int, samples: int, positions: int, angles: int
) -> None:
    shape = dict(num_heads=heads, num_kv_heads=heads, head_dim=nope + rope, qk_nope_head_dim=nope, v_head_dim=value)
    model = Model(dim=8, kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=rope, **shape)
    for dtype in DTYPES:
        half = random(angles, positions, 1, rope // 2, dtype=torch.promote_types(dtype, torch.float32), seed=2).detach()
        angle = torch.cat((half, half), -1)
        cos_sin, results = (angle.cos(), angle.sin()), []
        latent, wide = random(samples, positions, 4, dtype=dtype), random(samples, positions, rope + 2, dtype=dtype)
        for kernels in ("triton", "torch"):
            attention = LatentAttention(model, 0, dtype, kernels).to(DEVICE)
            for weight in (attention.wq_b.weight, attention.wkv_b.weight):
                torch.nn.init.normal_(weight, generator=torch.Generator(DEVICE).manual_seed(3))
            q = attention.queries(latent, cos_sin)
            k, v = attention.keys_and_values(latent, wide[..., 2:], cos_sin)
            leaves = latent, wide, attention.wq_b.weight, attention.wkv_b.weight
            outputs = q, k, v
            # As attention's backward may leave them: heads before positions.
            shapes = [y.transpose(1, 2).shape for y in outputs]
            cotangents = [random(*shape, dtype=dtype, seed=7).detach().transpose(1, 2) for shape in shapes]
            results.append([*outputs, *torch.autograd.grad(outputs, leaves, cotangents)])
        for got, want in zip(*results, strict=True):
            close(got, want, dtype)


def test_watched_or_not_the_kernels_give_the_same() -> None:
    """Without a mode nothing goes through torch's dispatcher; a mode sees every kernel as one operation."""
    x, index = random(5, 8, dtype=torch.float32).detach(), torch.tensor([4, 0, 5, 2], device=DEVICE)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.profiler.profile() as profile:
        alone = fetch_rows(x, index)
    assert "titanmoe::fetch_rows" not in [event.key for event in profile.key_averages()]
    with Watch():
        watched = fetch_rows(x, index)
    assert torch.ops.titanmoe.fetch_rows.default in seen
    assert torch.equal(alone, watched)


def padded_tokens(samples: int, length: int, valid: Tensor | None = None) -> Tokens:
    index = torch.arange(samples * length, device=DEVICE)
    valid = torch.ones_like(index, dtype=torch.bool) if valid is None else valid
    sample = index // max(1, length)
    return Tokens(index.view(samples, length), index, sample, valid, torch.tensor(0, device=DEVICE))


def router(experts: int, dtype: torch.dtype, kernels: str, forced: bool = False, **model: Any) -> Router:
    shape = Model(**({"top_k": 3, "dim": experts} | model), num_experts=experts)
    made = Router(shape, MoE(kernels=kernels, force_balance=forced), 0, 0, dtype).to(DEVICE)
    with torch.no_grad():
        made.weight.copy_(torch.eye(experts))  # the inputs are the logits
        made.expert_bias.copy_(torch.linspace(-0.1, 0.1, experts))
    return made


def routed(logits: Tensor, tokens: Tokens, which: str = "both", **options: Any) -> list[Tensor]:
    made = router(logits.shape[1], logits.dtype, **options)
    routes = torch.empty(len(logits), 1, made.model.top_k, dtype=torch.int16, device=DEVICE)
    _, scores, weights, chosen, count = made(logits, tokens._replace(routes_TNK=routes))
    assert torch.equal(routes[:, 0].to(torch.int64), chosen)
    if not logits.numel():
        return [scores, weights, chosen, count]
    outputs = {"both": (scores, weights), "scores": (scores,), "weights": (weights,)}[which]
    valid = tokens.valid_T.unsqueeze(1)  # padding gets nothing back
    cotangents = [random(*y.shape, dtype=y.dtype, seed=7 + y.shape[1]).detach() * valid for y in outputs]
    return [scores, weights, chosen, count, *torch.autograd.grad(outputs, logits, cotangents)]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", [(1, 3000), (70, 33), (0, 4)])
def test_parts_of_bfloat16(shape: tuple[int, int], backwards: bool) -> None:
    x_RC = random(*shape, dtype=torch.float32).detach()
    parts, plain = bfloat16_terms(x_RC, backwards), plain_bfloat16_terms(x_RC, backwards)
    assert parts.dtype == torch.bfloat16 and parts.shape == plain.shape
    parts, plain = (x.flip(1) if backwards else x for x in (parts, plain))
    assert torch.equal(parts[:, 1:].double().sum(1), x_RC.double())
    assert torch.equal(parts[:, 0], parts[:, 1])
    # The interpreter rounds towards zero, so that the second part may have the other sign.
    torch.testing.assert_close(parts[:, 0], plain[:, 0], rtol=2**-7, atol=0)


@pytest.mark.parametrize(("rows", "experts", "dim"), [(300, 5, 8), (3, 64, 40), (0, 4, 8)])
def test_the_routers_product(rows: int, experts: int, dim: int) -> None:
    """On a GPU by torch's product of bfloat16 into float32. Parts rounded towards zero leave more to the others."""
    x_TD, w_ED = random(rows, dim, dtype=torch.bfloat16, seed=1), random(experts, dim, dtype=torch.float32, seed=2)
    grad_TE = random(rows, experts, dtype=torch.float32, seed=3).detach()
    logits_TE = product_by_terms(x_TD, w_ED, "triton")
    dx_TD, dw_ED = torch.autograd.grad(logits_TE, (x_TD, w_ED), grad_TE)
    within(logits_TE, x_TD, w_ED.t())
    within(dw_ED, grad_TE.t(), x_TD)
    within(dx_TD, grad_TE, w_ED, also=2**-12, rounded=2**-8)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize(
    "experts, norm, shape",
    [
        (8, False, {}),
        (300, True, {}),
        (6, False, {"num_groups": 3, "top_groups": 2}),
        (16, True, {"num_groups": 4, "top_groups": 2, "route_scale": 2.6}),
        (5, False, {"top_k": 1}),
        (4, True, {"num_groups": 4, "top_groups": 3}),
    ],
)
def test_routing(score: str, experts: int, norm: bool, shape: dict[str, Any]) -> None:
    length = 13 if experts == 16 else 2  # a program has 32 tokens of 16 experts, and 1 of 300
    valid = (torch.arange(3 * length) % 7 != 3).to(DEVICE)
    options, real = dict(score_function=score, norm_topk=norm, **shape), valid.unsqueeze(1)
    for dtype, which in ((torch.float64, "both"), (torch.float32, "scores"), (torch.float32, "weights")):
        logits = random(3 * length, experts, dtype=dtype, seed=5)
        got, want = (
            routed(logits, padded_tokens(3, length, valid), which, kernels=k, **options) for k in ("triton", "torch")
        )
        for g, w in zip(got[2:4], want[2:4], strict=True):
            assert torch.equal(g, w)
        for g, w in zip((*got[:2], got[-1]), (*want[:2], want[-1]), strict=True):
            close(g * real, w * real, dtype)


class RatedByOne(Sigmoid):
    scores_per_group = 1


class RatedByThree(Sigmoid):
    scores_per_group = 3


RATED_BY_ONE, RATED_BY_THREE = RatedByOne(), RatedByThree()


@pytest.mark.parametrize("name", ["RATED_BY_ONE", "RATED_BY_THREE"])
def test_groups_rated_by_other_numbers_of_scores_than_their_formulas_usual_one(name: str) -> None:
    logits = random(39, 16, dtype=torch.float32, seed=5)
    options = {"score_function": f"{__name__}:{name}", "norm_topk": True, "num_groups": 4, "top_groups": 2}
    chosen, plain, usual = (
        routed(logits, padded_tokens(3, 13), kernels=kernels, **options | more)[3]
        for kernels, more in (("triton", {}), ("torch", {}), ("torch", {"score_function": "sigmoid"}))
    )
    assert torch.equal(chosen, plain) and not torch.equal(chosen, usual)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after_topk"])
def test_ties_forced_balance_and_no_tokens(score: str) -> None:
    level = torch.zeros(9, 8, dtype=torch.float32, device=DEVICE, requires_grad=True)
    for forced in (False, True):
        for logits, tokens in ((level, padded_tokens(1, 9)), (level[:0].detach(), padded_tokens(1, 0))):
            got, want = (
                routed(logits, tokens, kernels=k, forced=forced, score_function=score, norm_topk=False)
                for k in ("triton", "torch")
            )
            for g, w in zip(got, want, strict=True):
                close(g, w, torch.float32)


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    """So that a diverged run ends with its own error and not with an access outside a table."""
    logits = torch.full((4, 8), float("nan"), device=DEVICE, requires_grad=True)
    _, _, _, chosen, count = router(8, torch.float32, "triton")(logits, padded_tokens(2, 2))
    assert chosen.tolist() == [[0, 1, 2]] * 4 and count.tolist() == [[2, 2, 2, 0, 0, 0, 0, 0]] * 2


def test_compiled_calls_keep_the_kernels_whole() -> None:
    chosen = choices("random", 12, 2)
    order, count = sort_by_expert(chosen, E)
    entry, slot = assign_slots(chosen, order, count, ep=1, etp=1, slots_per_expert=0, num_slots=24)
    x, weights = random(12, 8, dtype=torch.float32), random(12, 2, dtype=torch.float32, seed=1)

    logits = random(12, 8, dtype=torch.float32, seed=2)
    made = router(8, torch.float32, "triton")

    def forward(x: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
        rows, row_weights, route = fill_slots(x, weights, entry, slot, "triton")
        _, scores, chosen_weights, _, _ = made(logits, tokens)
        back = unpermute_tokens(rows * row_weights, route.source_S, route.slot_TJ, "triton")
        return back.square().sum() + (scores.sum(1) * chosen_weights.sum(1)).sum()

    tokens = padded_tokens(2, 6)
    results = []
    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        y = function(x, weights, logits)
        results.append([y, *torch.autograd.grad(y, (x, weights, logits))])
    for got, want in zip(*results, strict=True):
        close(got, want, torch.float32)


@pytest.mark.parametrize("shape", [(7, 24), (3, 5000), (2, 70, 130), (0, 8)])
def test_rows_in_8_bits(shape: tuple[int, ...]) -> None:
    """The same numbers as the formula's, of rows as they lie and of a transposed weight's."""
    x = random(*shape, dtype=torch.float32).detach()
    if shape == (7, 24):
        x[1:4] *= torch.tensor([[1e6], [0.0], [1e-30]], device=DEVICE)
        # Of scale 1: 17, 19 and 2^-10 lie in the middle between two numbers of e4m3.
        x[4, :7] = torch.tensor([448.0, 17.0, 19.0, -23.999, 2.0**-10, 3 * 2.0**-10, 0.49 * 2.0**-9])
    for rows in (x, x.bfloat16(), *([x.transpose(-1, -2)] if x.numel() and shape[-1] < 1000 else [])):
        got, want = quantise(rows, "triton"), plain_quantise(rows)
        assert torch.equal(got.scale, want.scale) and got.dtype == want.dtype
        assert got.q.is_contiguous() and torch.equal(got.q.float(), want.q.float())


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("tokens, experts", [(70, 8), (3, 300), (0, 8)])
def test_the_spread_of_scores(tokens: int, experts: int, normalise: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(router_entropy, "TILE", 64)
    for dtype in (torch.float64, torch.float32):
        scores = random(tokens, experts, dtype=dtype).detach().softmax(-1) * (3 if normalise else 1)
        scores[:1, 1] = 0
        valid = (torch.arange(tokens) % 5 != 2).to(DEVICE)
        got, want = (balance_spread(scores, valid, normalise, kernels) for kernels in ("triton", "torch"))
        tolerances.assert_close(got, want, terms=tokens * experts, roundings=16, dtype=dtype)


@pytest.mark.parametrize("ignored", [slice(None, None, 3), slice(None)], ids=["some", "all"])
@pytest.mark.parametrize("tokens, vocabulary, chunks", [(4, 33, 4), (3, 9000, 2), (1, 5, 5), (0, 33, 2)])
def test_the_loss_over_slices(tokens: int, vocabulary: int, chunks: int, ignored: slice) -> None:
    """9,000 columns in two slices are two tiles each; the second token's label is in the last of them."""
    for dtype in DTYPES:
        x, weight = random(tokens, 8, dtype=dtype), random(vocabulary, 8, dtype=dtype, seed=1)
        label = torch.arange(tokens, device=DEVICE) * 8800 % vocabulary
        label[ignored] = IGNORE
        results = []
        for kernels in ("triton", "torch"):
            loss = chunked_cross_entropy(x, weight, label, NO_GROUP, chunks, kernels=kernels)[0]
            of_token = torch.arange(tokens, device=DEVICE, dtype=loss.dtype)
            results.append([loss, *torch.autograd.grad(loss, (x, weight), of_token + 1)])
        for got, want in zip(*results, strict=True):
            close(got, want, dtype, terms=vocabulary)


@pytest.mark.parametrize("width, dtype", [(1, torch.float32), (72, torch.bfloat16), (4100, torch.bfloat16)])
@pytest.mark.parametrize("kind", ["some go nowhere", "one rank gets none", "none go"])
def test_rows_put_in_the_buffers_of_two_ranks(kind: str, width: int, dtype: torch.dtype) -> None:
    """Both buffers are on this device."""
    N, limit = 21, 16
    x_ND = random(N, width, dtype=dtype).detach()
    to_N = torch.randperm(2 * limit, generator=torch.Generator().manual_seed(1))[:N].to(DEVICE)
    to_N[::5] = -1
    if kind == "one rank gets none":
        to_N[to_N < limit] = -1
    elif kind == "none go":
        to_N[:] = -1
    got, want = ([torch.full((limit + 1, width), 7, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2))
    put.put_rows(x_ND, to_N, torch.tensor([buffer.data_ptr() for buffer in got], device=DEVICE), limit)
    plain_put(x_ND, to_N, want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[:limit], b[:limit]) and a[limit].eq(7).all()
    assert sum(int(b[:limit].ne(7).any(1).sum()) for b in want) == int((to_N >= 0).sum())
    buffer_ND = random(limit + 1, width, dtype=dtype).detach()[:limit]
    assert torch.equal(put.take_rows(buffer_ND, to_N[:limit]), plain_take(buffer_ND, to_N[:limit]))
