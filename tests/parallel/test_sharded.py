"""Gradients that travel in 16 bits are added up in 32."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests import near, world
from titanmoe.parallel import sharded
from titanmoe.parallel.sharded import NarrowOnTheWire, StraightToPlace
from titanmoe.parallel.shelves import Kept, Shelves

ROUNDS = 3


def gradients(narrow: bool, replicas: int = 1, on_shelves: bool = False) -> tuple[Tensor, Tensor]:
    """Of a sharded weight after several backward passes, and what they should be: sums of each rank's 16 bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = nn.Linear(24, 4 * ranks, bias=False)
    alone = nn.Linear(24, 4 * ranks, bias=False, dtype=torch.bfloat16)
    alone.weight.data.copy_(layer.weight)
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    if narrow:
        shelves = Shelves.between(mesh.get_group(mesh.ndim - 1)) if on_shelves else None
        layer.set_custom_reduce_scatter(NarrowOnTheWire(ranks // replicas, torch.float32, Kept(), shelves))
        layer.set_custom_all_gather(StraightToPlace(shelves))
    want = torch.zeros(4 * ranks, 24)
    for number in range(ROUNDS):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * number + rank)).bfloat16()
        with mock.patch.object(sharded, "BLOCK", 7):  # several, the last not whole
            layer(x).float().square().sum().backward()
        alone.weight.grad = None
        alone(x).float().square().sum().backward()
        want += alone.weight.grad
    dist.all_reduce(want)
    return layer.weight.grad.full_tensor(), want


@pytest.mark.parametrize("on_shelves", [False, True])
def test_sixteen_bits_are_summed_in_thirty_two(on_shelves: bool) -> None:
    for ranks in (2, 4):
        for got, want in world.run(ranks, gradients, True, 1, on_shelves):
            assert got.dtype == torch.float32
            near.close(got, want, terms=4 * ROUNDS)
    for replicas in (2, 4):
        for got, want in world.run(4, gradients, True, replicas, on_shelves):
            near.close(got, want, terms=4 * ROUNDS)
    got, want = world.run(4, gradients, False)[0]  # torch's own adds up in 16 bits: the difference is seen
    assert (got - want).abs().max() > 1e-3 * want.abs().max()


def gathered(numbers: int, on_shelves: bool) -> bool:
    """Several in flight at once; the whole lies in its place, ours in place from the start."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shelves = Shelves.between(dist.group.WORLD) if on_shelves else None
    pending = []
    for seed in range(3):
        want = torch.randn(numbers * ranks, generator=torch.Generator().manual_seed(seed)).bfloat16()
        gather = StraightToPlace(shelves)
        whole = gather.allocate((numbers * ranks,), dtype=torch.bfloat16, device=torch.device("cpu"))
        mine = whole[numbers * rank : numbers * (rank + 1)].copy_(want[numbers * rank : numbers * (rank + 1)])
        pending.append((gather(whole, mine, dist.group.WORLD), whole, want))
    return all(work.wait() and torch.equal(whole, want) for work, whole, want in pending)


@pytest.mark.parametrize("on_shelves", [False, True])
@pytest.mark.parametrize("numbers", [1, 5000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_go_straight_to_their_place(ranks: int, numbers: int, on_shelves: bool) -> None:
    assert world.run(ranks, gathered, numbers, on_shelves) == [True] * ranks
