"""Whose attention runs: the table of docs/parallelism.md, what is refused, and that the one chosen is the one that
runs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity
from tests.support.masks import mask_of
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config import ConfigError
from titanmoe.config.fields import with_values
from titanmoe.fold.attention_backend import attention_violations, pick_backend
from titanmoe.ops.device import Hardware, imitate
from titanmoe.parallel import choose_attention as room
from titanmoe.parallel import torch_ring
from titanmoe.parallel.attention_block import block, block_backward
from titanmoe.parallel.choose_attention import attend
from titanmoe.parallel.context import Placement, blockwise_attention
from titanmoe.parallel.flex import Masks

HALF, SINGLE = torch.bfloat16, torch.float32


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
    cases = [{"masked": masked, "sinks": sinks} for masked, sinks in ((False, False), (True, False), (False, True))]
    assert [pick_backend(asked, kind, cp, device="cuda", **case)[0] for case in cases] == [causal, masked, sinks]
    assert pick_backend(asked, kind, cp, device="cuda", float64=True, masked=True, sinks=True)[0] == "plain"
    narrow = [pick_backend(asked, kind, cp, device="cuda", **case, narrow=True)[0] for case in cases]
    assert narrow == [picked if picked == "ring" else "plain" for picked in (causal, masked, sinks)]


@pytest.mark.parametrize("kind, cp", [("ring", 1), ("ring", 4), ("ulysses", 4), ("allgather", 4)])
def test_on_a_cpu_and_where_plain_is_asked_for(kind: str, cp: int) -> None:
    for masked, sinks in ((False, False), (True, False), (False, True)):
        assert pick_backend("auto", kind, cp, device="cpu", masked=masked, sinks=sinks)[0] == "plain"
        assert pick_backend("plain", kind, cp, device="cuda", masked=masked, sinks=sinks)[0] == "plain"
        ring = kind == "ring" and cp > 1 and not masked
        assert pick_backend("torch", kind, cp, device="cpu", masked=masked, sinks=sinks)[0] == (
            "ring" if ring else "plain"
        )


def test_a_torch_without_the_template_leaves_the_ring_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ring, "_torch", None)
    assert (
        pick_backend("auto", "ring", 2, device="cuda", masked=False, sinks=False, ring_lacks=torch_ring.missing())[0]
        == "plain"
    )
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


def test_completions_to_learn_from_are_documents() -> None:
    config = with_values(parity.read({"parallelism.cp": 2}, 2), RING | {"rl.reward": "exact"})
    (problem,) = attention_violations(config, cp=2)
    assert "neither documents nor windows" in problem


def test_documents_that_come_nevertheless_are_refused() -> None:
    x, mask = torch.zeros(1, 4, 2, 16), mask_of(torch.zeros(1, 4))
    rest = dict(placement=Placement(2, True), masks=Masks(Placement(2, True), 0), group=Group("", 2, 0))
    with pytest.raises(ValueError, match="neither documents nor windows"):
        attend(x, x, x, mask, backend="torch", cp_kind="ring", **rest)


@pytest.mark.parametrize("chosen", ["flex", "ring"])
def test_what_is_chosen_runs(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "pick_backend", lambda *given, **case: (chosen, ""))
    monkeypatch.setattr(room, "flex_attention_over", lambda *given, masks, group, flex: "flex")
    monkeypatch.setattr(room, "torch_ring_attention", lambda *given, placement, group: "ring")
    x, masks = torch.zeros(1, 4, 2, 16), Masks(Placement(1, False), 0)
    assert (
        attend(x, x, x, backend="auto", cp_kind="ring", placement=masks.placement, masks=masks, group=NO_GROUP)
        == chosen
    )


@pytest.mark.parametrize("width, value, chosen", [(8, 8, "plain"), (16, 8, "plain"), (16, 16, "flex")])
def test_narrow_heads_do_not_go_to_flex_on_gpus(
    width: int, value: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "flex_attention_over", lambda *given, masks, group, flex: "flex")
    monkeypatch.setattr(room, "_plain", lambda *given, **layout: "plain")
    q, k, v, masks = *(torch.zeros(1, 4, 2, w) for w in (width, width, value)), Masks(Placement(1, False), 0)
    with imitate(Hardware("cuda", (9, 0))):
        how = dict(backend="auto", cp_kind="ring", placement=masks.placement, masks=masks, group=NO_GROUP)
        assert attend(q, k, v, mask_of(None, 2), **how) == chosen


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [0, 7])
def test_float64_on_gpus_is_plain(window: int, documents: bool) -> None:
    """Its operations, here on a CPU, give the numbers of the kernels for CPUs; no kernel for GPUs has float64."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 40, 4, 8), (2, 40, 2, 8), (2, 40, 2, 6)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes]
    inputs.append(torch.randn(4, dtype=torch.float64, generator=draw).requires_grad_())
    document = torch.stack([torch.arange(40) // n for n in (9, 25)]) if documents else None
    results = []
    for hardware in (Hardware("cpu"), Hardware("cuda", (9, 0))):
        with imitate(hardware):
            out = blockwise_attention(*inputs[:3], mask_of(document, window), inputs[3])
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class KernelsOfGpus(TorchDispatchMode):
    """What the memory-efficient kernel of CUDA requires beyond torch's checks of shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "efficient_attention" in str(func):
            backward = "backward" in str(func)
            query, key, value, bias = args[backward : 4 + backward]
            assert key.shape[1] == value.shape[1] == query.shape[1]
            if bias is not None:
                assert bias.shape == (*query.shape[:3], key.shape[2])
                assert bias.stride(3) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:3])
            if backward:
                out, lse = args[5:7]
                # It uses the output's strides of samples and heads, but computes that of positions.
                assert out.stride(2) == out.shape[1] * out.shape[3] and out.stride(3) == 1
                assert lse.shape[2] % 32 == 0 and lse.shape[2] >= query.shape[2]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("length", [40, 44])
@pytest.mark.parametrize(
    "dtype, bias, width",
    [(HALF, False, 16), (HALF, True, 16), (HALF, False, 8), (SINGLE, False, 16), (SINGLE, True, 8)],
)
def test_the_kernels_of_gpus_take_what_they_are_given(dtype: torch.dtype, bias: bool, width: int, length: int) -> None:
    """Without a GPU: only shapes, through torch's own checks for its kernels. 2 key heads for 4 query heads."""

    def of(heads: int, wide: int) -> Tensor:
        return torch.empty(2, length, heads, wide, device="meta", dtype=dtype).transpose(1, 2)

    q, k, v = of(4, 16), of(2, 16), of(2, width)
    mask = torch.empty(2, 1, length, length, device="meta", dtype=dtype) if bias else None
    with KernelsOfGpus():
        out, lse = block(q, k, v, mask, not bias)
        grads = block_backward(
            out.contiguous(), q, k, v, mask, out=out.contiguous(), lse=lse.contiguous(), causal=not bias
        )
    assert (out.shape, out.dtype) == ((2, 4, length, width), dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, length), torch.float32)
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("window, documents", [(0, True), (16, False), (16, True)])
def test_chunks_of_a_sequence_do_too(window: int, documents: bool) -> None:
    """Documents, windows and sinks as on one rank of a GPU, forward and backward."""
    q, k, v = (torch.empty(2, 128, n, 32, device="meta", dtype=HALF, requires_grad=True) for n in (4, 2, 2))
    sinks = torch.empty(4, device="meta", dtype=HALF, requires_grad=True)
    mask = mask_of(torch.arange(128).expand(2, -1) // 50 if documents else None, window).to(lambda x: x.to("meta"))
    with KernelsOfGpus():
        out = blockwise_attention(q, k, v, mask, sinks)
        grads = torch.autograd.grad(out, (q, k, v, sinks), torch.empty_like(out))
    assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, HALF) for x in (q, k, v, sinks)]
