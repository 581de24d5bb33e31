"""The gated delta rule and gated linear attention in chunks, against their recurrences, token by token."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.support import tolerances
from titanmoe.ops import gated_delta_rule
from titanmoe.ops.gated_delta_rule import ChunkedSegment, make_segment, step_token

B, R, H, K, V = 2, 2, 4, 6, 5
forms = pytest.mark.parametrize("form", ["delta", "gla"])


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_rule, "CHUNK", 8)


def random_inputs(form: str, S: int, strength: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Some betas are 0 and some are 1; GLA's decays differ between value heads of a key head."""
    torch.manual_seed(S)
    wide = torch.promote_types(dtype, torch.float32)
    x = {name: torch.randn(B, S, *shape, dtype=dtype) for name, shape in dict(q=(R, K), k=(R, K), v=(H, V)).items()}
    x["decay"] = -strength * torch.rand(B, S, H, *((K,) if form == "gla" else ()), dtype=wide)
    if form == "delta":
        x["beta"] = (torch.rand(B, S, H, dtype=dtype) * 1.5 - 0.25).clamp(0, 1)
    x["state"] = torch.randn(B, H, K, V, dtype=wide)
    return {name: y.requires_grad_() for name, y in x.items()}


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q, k = (x.repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    if beta is not None:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        if begins is not None:
            state = state.where(~begins[:, t].view(B, 1, 1, 1), 0)
        state = state * decay[:, t].exp().view(B, H, -1, 1)
        column, row = k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-2)
        if beta is not None:
            b = beta[:, t].view(B, H, 1, 1)
            state, row = state - b * column @ (column.mT @ state), b * row
        state = state + column * row
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) / K**0.5)
    return torch.stack(outputs, 1), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None,
    beta: Tensor | None = None,
    **documents: Tensor,
) -> tuple[Tensor, Tensor]:
    return make_segment(q, k, v, decay, beta, **documents).forward(state)


def documents(S: int, places: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of each sample those where one begins; the same as numbers."""
    begins = torch.zeros(B, S, dtype=torch.bool)
    for sample, of_sample in enumerate(places):
        begins[sample, of_sample] = True
    return begins, dict(document_BS=begins.cumsum(1) + 5, before_B=torch.full((B,), 5))


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], x: dict[str, Tensor], roundings: int = 400) -> None:
    """Values and gradients."""
    cotangents = [torch.randn_like(y) for y in want]
    gradients = (torch.autograd.grad(y, list(x.values()), cotangents) for y in (got, want))
    for one, other in zip(got + next(gradients), want + next(gradients), strict=True):
        tolerances.assert_close(one, other, terms=400, roundings=roundings)


@forms
@pytest.mark.parametrize("S", [1, 3, 8, 21])
def test_chunks_are_the_recurrence(form: str, S: int) -> None:
    x = random_inputs(form, S)
    same(chunked(**x), recurrence(**x), x)


@forms
@pytest.mark.parametrize("places", [[[0], []], [[8], [16, 17]], [[1, 2, 5, 20], [0, 7, 15]]])
def test_documents_begin_anywhere(form: str, places: list[list[int]]) -> None:
    x = random_inputs(form, 21)
    begins, numbers = documents(21, places)
    same(chunked(**x, **numbers), recurrence(**x, begins=begins), x)


@forms
@pytest.mark.parametrize("places", [[[], []], [[9], [24, 25]]])
def test_maps_of_runs_compose(form: str, places: list[list[int]]) -> None:
    """Zigzag over 2 ranks: each has two runs of 4, not next to each other. One run begins with a document."""
    x = random_inputs(form, 36)
    state, tokens = x["state"], [x["q"], x["k"], x["v"], x["decay"], x.get("beta")]
    begins, numbers = documents(36, places)
    runs: dict[int, ChunkedSegment] = {}
    for rank in range(2):
        for run in (rank, 3 - rank):
            here = slice(9 * run, 9 * run + 9)
            document = numbers["document_BS"]
            before = document[:, here.start - 1] if run else numbers["before_B"]
            runs[run] = make_segment(*(y if y is None else y[:, here] for y in (*tokens, document)), before)
    outputs, whole = [], (torch.eye(K, dtype=state.dtype), torch.zeros_like(state))
    for run in range(4):
        out, after = runs[run].forward(state)
        M, S = runs[run].state_map()
        state, whole = M @ state + S, (M @ whole[0], M @ whole[1] + S)
        tolerances.assert_close(state, after, terms=400, roundings=400)
        outputs.append(out)
    same((torch.cat(outputs, 1), whole[0] @ x["state"] + whole[1]), recurrence(**x, begins=begins), x)


@forms
def test_a_map_has_nothing_of_what_was_before_a_document(form: str) -> None:
    x = random_inputs(form, 21)
    _, numbers = documents(21, [[4], []])
    M, _ = make_segment(*(x.get(name) for name in ("q", "k", "v", "decay", "beta")), **numbers).state_map()
    assert (M[0] == 0).all() and (M[1] != 0).any()


@forms
def test_a_step_is_a_run_of_one_token(form: str) -> None:
    x = random_inputs(form, 5)
    state, outputs = x["state"], []
    for t in range(5):
        out, state = step_token(
            state, *(x[name][:, t] if name in x else None for name in ("q", "k", "v", "decay", "beta"))
        )
        outputs.append(out)
    same((torch.stack(outputs, 1), state), recurrence(**x), x)


def test_value_heads_may_share_the_decays_of_their_key_head() -> None:
    x = random_inputs("gla", 21)
    of_key_heads = x["decay"][:, :, :R]
    once, repeated = (chunked(**x | dict(decay=y)) for y in (of_key_heads, of_key_heads.repeat_interleave(H // R, 2)))
    same(once, repeated, x)
    state, tokens = x["state"], [x[name][:, 0] for name in ("q", "k", "v")]
    want = step_token(state, *tokens, of_key_heads[:, 0].repeat_interleave(H // R, 1), None)
    same(step_token(state, *tokens, of_key_heads[:, 0], None), want, x)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decays_may_be_strong(form: str, dtype: torch.dtype) -> None:
    """exp(1000) would overflow. A sum of decays in a chunk of 8 tokens is up to 5000, and rounded accordingly."""
    x = random_inputs(form, 21, strength=1000.0, dtype=dtype)
    with torch.no_grad():
        x["decay"][:, ::3] /= 1e4
    exact = {name: y.detach().double().requires_grad_() for name, y in x.items()}
    results = []
    for outputs, leaves in ((chunked(**x), x), (recurrence(**exact), exact)):
        gradients = torch.autograd.grad([y.sum() for y in outputs], list(leaves.values()))
        results.append((*outputs, *gradients))
    for got, want, like in zip(*results, (x["v"], x["state"], *x.values()), strict=True):
        assert got.dtype == like.dtype
        tolerances.assert_close(got, want.to(like.dtype), terms=5000**2, roundings=2)


@forms
def test_autograd_keeps_the_inputs_only(form: str) -> None:
    x = random_inputs(form, 21)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        chunked(**x)
    assert {y.data_ptr() for y in kept if y.numel()} == {y.data_ptr() for y in x.values()}


@forms
def test_a_compiler_can_trace_it(form: str) -> None:
    x = random_inputs(form, 21)
    compiled = torch.compile(chunked, backend="eager", fullgraph=True, dynamic=False)
    same(compiled(**x), chunked(**x), x)


# ---- the kernels of fla-core, of which only the arguments can be tested here


def fake_delta(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    assert output_final_state and use_qk_l2norm_in_kernel and g.dtype == torch.float32
    assert q.shape == k.shape and v.shape[2] % q.shape[2] == 0 and g.shape == beta.shape == v.shape[:3]
    assert initial_state is None or initial_state.dtype == torch.float32
    return make_segment(q, k, v, g, beta).forward(initial_state)


def fake_gla(q, k, v, g, initial_state, output_final_state):
    assert output_final_state and g.dtype == torch.float32
    assert q.shape == k.shape == g.shape and v.shape[:3] == q.shape[:3]
    assert initial_state is None or initial_state.dtype == torch.float32
    return make_segment(q, k, v, g, None).forward(initial_state)


@forms
@pytest.mark.parametrize("places", [None, [[0], []], [[1, 2, 5, 20], [0, 7, 15]]])
def test_kernels_get_what_they_ask_for(
    form: str, places: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, attributes in {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": dict(chunk_gated_delta_rule=fake_delta),
        "fla.ops.gla": dict(chunk_gla=fake_gla),
    }.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gated_delta_rule, "uses_fla", lambda kernels, x: kernels == "auto")
    x = random_inputs(form, 21, dtype=torch.float32)
    numbers = {} if places is None else documents(21, places)[1]
    state, tokens = x["state"], [x.get(name) for name in ("q", "k", "v", "decay", "beta")]
    results = []
    for kernels in ("auto", "torch"):
        run = make_segment(*tokens, **numbers, kernels=kernels)
        results.append((*run.forward(state), *run.forward(), *run.state_map()))
    same(*results, x, roundings=400**2)  # 4 documents in a chunk: a sum of decays is -400


def test_when_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_rule, "FLA", True)
    monkeypatch.setattr(gated_delta_rule, "is_miscompiled", lambda device: False)
    with FakeTensorMode():
        on_gpu, on_cpu = (torch.empty(2, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu"))
        cases = [("auto", on_gpu), ("torch", on_gpu), ("auto", on_cpu), ("auto", on_gpu.float())]
        assert [gated_delta_rule.uses_fla(*case) for case in cases] == [True, False, False, False]


@pytest.mark.parametrize(
    "triton, capability, wrong",
    [
        ("3.6.0", (9, 0), True),
        ("3.7.0+git1", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.3.1", (9, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_where_triton_compiles_fla_wrongly_the_plain_form_runs(
    triton: str, capability: tuple[int, int], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta_rule, "version", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gated_delta_rule.is_miscompiled.cache_clear()
    assert gated_delta_rule.is_miscompiled(torch.device("cuda", 0)) is wrong
    gated_delta_rule.is_miscompiled.cache_clear()
