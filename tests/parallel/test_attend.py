"""Whose attention runs: the table of docs/parallelism.md, what is refused, and that what is chosen is what runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests import parity
from titanmoe.comm import ALONE, Group
from titanmoe.config import ConfigError
from titanmoe.parallel import attend as room
from titanmoe.parallel import torch_ring
from titanmoe.parallel.attend import attend, way
from titanmoe.parallel.context import Placement, _block, _block_backward
from titanmoe.parallel.flex import Masks

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "kind, cp, causal, masked, sinks",
    [
        ("ring", 1, "plain", "flex", "flex"),
        ("ulysses", 4, "plain", "flex", "flex"),
        ("allgather", 4, "flex", "flex", "flex"),
        ("ring", 4, "ring", "plain", "ring"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_on_a_gpu(asked: str, kind: str, cp: int, causal: str, masked: str, sinks: str) -> None:
    for dtype in (HALF, SINGLE):
        got = [way(asked, kind, cp, "cuda", dtype, *case)[0] for case in ((False, False), (True, False), (False, True))]
        assert got == [causal, masked, sinks]
    assert way(asked, kind, cp, "cuda", DOUBLE, True, True)[0] == "plain"


@pytest.mark.parametrize("kind, cp", [("ring", 1), ("ring", 4), ("ulysses", 4), ("allgather", 4)])
def test_on_a_cpu_and_where_plain_is_asked_for(kind: str, cp: int) -> None:
    for masked, sinks in ((False, False), (True, False), (False, True)):
        assert way("auto", kind, cp, "cpu", SINGLE, masked, sinks)[0] == "plain"
        assert way("plain", kind, cp, "cuda", HALF, masked, sinks)[0] == "plain"
        ring = kind == "ring" and cp > 1 and not masked
        assert way("torch", kind, cp, "cpu", SINGLE, masked, sinks)[0] == ("ring" if ring else "plain")


def test_a_torch_without_the_template_leaves_the_ring_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ring, "_torch", None)
    assert way("auto", "ring", 2, "cuda", HALF, False, False)[0] == "plain"
    with pytest.raises(ConfigError, match=r"has no _templated_ring_attention\(.*use \"auto\""):
        parity.read(RING | {"training.seed": 5}, 2)


RING = {"parallelism.attention_backend": "torch", "parallelism.cp": 2}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parallelism.cp_kind": "allgather"}, r'no backward on CPUs; use "auto", or cp > 1 with cp_kind = "ring"'),
        ({"parallelism.cp": 1}, 'no backward on CPUs; use "auto"'),
        ({"model.sliding_window": 8, "model.full_attention_every": 0}, 'neither documents nor windows; use "auto"'),
    ],
)
def test_what_torch_cannot_do_here_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parity.read(RING | changes, 2)


def test_documents_that_come_nevertheless_are_refused() -> None:
    x, document = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4)
    rest = dict(placement=Placement(2, True), masks=Masks(Placement(2, True), 0), group=Group("", 2, 0))
    with pytest.raises(ValueError, match="neither documents nor windows"):
        attend(x, x, x, document, asked="torch", kind="ring", **rest)


@pytest.mark.parametrize("chosen", ["flex", "ring"])
def test_what_is_chosen_runs(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "way", lambda *given: (chosen, ""))
    monkeypatch.setattr(room, "flex", lambda *given: "flex")
    monkeypatch.setattr(room, "flex_attention_over", lambda *given, masks, group: "flex")
    monkeypatch.setattr(room, "torch_ring_attention", lambda *given, placement, group: "ring")
    x, masks = torch.zeros(1, 4, 2, 16), Masks(Placement(1, False), 0)
    assert attend(x, x, x, asked="auto", kind="ring", placement=masks.placement, masks=masks, group=ALONE) == chosen


@pytest.mark.parametrize(
    "dtype, bias, width", [(HALF, False, 16), (HALF, True, 16), (HALF, False, 8), (SINGLE, False, 16)]
)
def test_the_kernels_of_gpus_take_what_they_are_given(dtype: torch.dtype, bias: bool, width: int) -> None:
    """No GPU: shapes alone, through torch's own rules for its kernels. 2 key heads for 4 of queries, 40 positions."""

    def of(heads: int, wide: int) -> Tensor:
        return torch.empty(2, 40, heads, wide, device="meta", dtype=dtype).transpose(1, 2)

    q, k, v = of(4, 16), of(2, 16), of(2, width)
    mask = torch.empty(2, 1, 40, 40, device="meta", dtype=dtype) if bias else None
    out, lse = _block(q, k, v, mask, not bias)
    assert (out.shape, out.dtype) == ((2, 4, 40, width), dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)
    grads = _block_backward(out.contiguous(), q, k, v, mask, out.contiguous(), lse.contiguous(), not bias)
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]
