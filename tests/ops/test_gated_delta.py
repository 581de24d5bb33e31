"""The gated delta rule and gated linear attention in chunks, against their recurrences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import tolerances
from titanmoe.ops import gated_delta

B, R, H, K, V = 2, 2, 4, 6, 5
FORMS = ["delta", "gla"]


def inputs(
    form: str, S: int, strength: float = 1.0, dtype: torch.dtype = torch.float64, heads: int = R
) -> list[Tensor]:
    """q, k, v, decay, the incoming state, and beta for the delta rule, also 0 and 1."""
    torch.manual_seed(S)
    q, k, v = (torch.randn(B, S, *shape, dtype=dtype) for shape in ((heads, K), (heads, K), (H, V)))
    decay = -strength * torch.rand(
        B, S, H, *((K,) if form == "gla" else ()), dtype=torch.promote_types(dtype, torch.float32)
    )
    all_inputs = [q, k, v, decay, torch.randn(B, H, K, V, dtype=decay.dtype)]
    if form == "delta":
        all_inputs.append(torch.rand(B, S, H, dtype=dtype).mul(1.5).sub(0.25).clamp(0, 1))
    return [x.requires_grad_() for x in all_inputs]


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
            state = torch.where(begins[:, t].view(-1, 1, 1, 1), 0, state)
        state = state * decay[:, t].exp().view(B, H, -1, 1)
        k_t, write = k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-2)
        if beta is not None:
            b = beta[:, t].view(B, H, 1, 1)
            state, write = state - b * k_t @ (k_t.mT @ state), b * write
        state = state + k_t * write
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) / K**0.5)
    return torch.stack(outputs, 1), state


def cut(q, k, v, decay, state, beta=None, document=None, before=None) -> gated_delta.ChunkedRun:
    return gated_delta.cut(q, k, v, decay, beta, document, before)


def documents(S: int, begins: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    flags = torch.zeros(B, S, dtype=torch.bool)
    for sample, places in enumerate(begins):
        flags[sample, places] = True
    numbers = flags.cumsum(1) + 5
    return flags, numbers, torch.full((B,), 5)


def compare(got: tuple[Tensor, ...], want: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    cotangents = [torch.randn_like(x) for x in want]
    gradients = [torch.autograd.grad(outputs, leaves, cotangents) for outputs in (got, want)]
    for x, y in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
        tolerances.close(x, y, terms=200, roundings=200)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("S", [1, 3, 8, 21])
def test_chunks_are_the_recurrence(form: str, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK", 8)
    x = inputs(form, S)
    compare(cut(*x).run(x[4]), recurrence(*x), x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begins", [[[0], []], [[8], [16, 17]], [[1, 2, 5, 20], [0, 7, 15]]])
def test_documents_begin_anywhere(form: str, begins: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK", 8)
    x = inputs(form, 21)
    flags, numbers, before = documents(21, begins)
    got = cut(*x, *([None] if form == "gla" else []), numbers, before).run(x[4])
    want = recurrence(*x, *([None] if form == "gla" else []), flags)
    compare(got, want, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begins", [None, [[9], [24, 25]]])
def test_maps_of_runs_compose(form: str, begins: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zigzag over 2 ranks: 4 runs, each rank's two not next to each other. A run begins with a document, too."""
    monkeypatch.setattr(gated_delta, "CHUNK", 4)
    x = inputs(form, 36)
    state, beta = x[4], x[5] if form == "delta" else None
    flags, numbers, _ = documents(36, begins) if begins else (None, None, None)
    runs = {}
    for rank in range(2):
        for run in (rank, 3 - rank):
            here = slice(9 * run, 9 * run + 9)
            tokens = [y if y is None else y[:, here] for y in (*x[:4], beta, numbers)]
            before = numbers[:, 9 * run - 1] if run and begins else None
            runs[run] = gated_delta.cut(*tokens, before)
    maps = {number: run.map() for number, run in runs.items()}
    outputs = []
    for number in range(4):
        out, after = runs[number].run(state)
        outputs.append(out)
        state = maps[number][0] @ state + maps[number][1]
        tolerances.close(state, after, terms=200, roundings=200)
    M, S = maps[0]
    for number in range(1, 4):
        M, S = maps[number][0] @ M, maps[number][0] @ S + maps[number][1]
    compare((torch.cat(outputs, 1), M @ x[4] + S), recurrence(*x[:5], beta, flags), x)
