"""Torch's ring template against our own ring, on real ranks. tests/test_parity.py compares it with the reference."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import world
from tests.support import tolerances
from titanmoe.comm.collectives import Group
from titanmoe.mask import Mask
from titanmoe.parallel import torch_ring
from titanmoe.parallel.context import Placement, ring_attention

B, S, H, WIDTH = 2, 8, 4, 16


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def compared(zigzag: bool, dtype: torch.dtype, key_heads: int, value_width: int, with_sinks: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group, placement = Group(dist.group.WORLD.group_name, size, rank), Placement(size, zigzag)
    inputs = [
        random(B, S, heads, width, dtype=dtype, seed=10 * rank + n).requires_grad_()
        for n, (heads, width) in enumerate(((H, WIDTH), (key_heads, WIDTH), (key_heads, value_width)))
    ]
    sinks = None
    if with_sinks:
        sinks = torch.tensor([-1e4, 0.0, 2.5, 60.0], dtype=dtype, requires_grad=True)
        inputs.append(sinks)
    cotangent = random(B, S, H, value_width, dtype=dtype, seed=100 + rank)
    options = vars(torch_ring._torch._cp_options).copy()
    lse, layout = [], {"placement": placement, "group": group}
    got = torch_ring.torch_ring_attention(*inputs[:3], sinks, lse.append, **layout)
    want = ring_attention(*inputs[:3], Mask(), sinks, **layout)
    ring_attention(*inputs[:3], Mask(), None, lse.append, **layout)
    tolerances.assert_close(*lse, terms=4 * WIDTH, roundings=4 * 16)
    grads = [torch.autograd.grad(out, inputs, cotangent) for out in (got, want)]
    assert vars(torch_ring._torch._cp_options) == options, "torch's global is left changed"
    for mine, wanted in zip((got, *grads[0]), (want, *grads[1]), strict=True):
        assert mine.dtype == dtype
        # Scores of up to 4 shift an exponent by 4 roundings each; forward and backward sum over the width and the keys.
        tolerances.assert_close(mine, wanted, terms=4 * (WIDTH + S * size), roundings=4 * 16)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_our_ring(dtype: torch.dtype, zigzag: bool, size: int) -> None:
    world.run(size, compared, zigzag, dtype, H, WIDTH, False)


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("case", [(2, WIDTH, False), (H, WIDTH - 5, False), (2, WIDTH, True)])
def test_fewer_key_heads_narrow_values_and_sinks(case: tuple[int, int, bool], zigzag: bool) -> None:
    world.run(2, compared, zigzag, torch.float64, *case)


@pytest.mark.parametrize("name", ["_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options"])
def test_a_torch_without_the_template_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_ring.missing() == ""
    monkeypatch.setattr(torch_ring._torch, name, lambda query, key, value: None)
    assert name in torch_ring.missing()
    monkeypatch.delattr(torch_ring._torch, name)
    assert name in torch_ring.missing()
