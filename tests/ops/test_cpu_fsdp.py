"""What FSDP sends between CPUs: pieces straight to their place, 16 bits summed in 32, and no endless wait."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests import world
from tests.support import tolerances
from titanmoe.ops.cpu import fsdp
from titanmoe.ops.cpu.fsdp import NarrowOnTheWire, ReusedMemory, StraightToPlace

ROUNDS = 3


def gradients(narrow: bool, replicas: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of a sharded weight after several backward passes, and what they should be: sums of each rank's 16
    bits."""
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
        layer.set_custom_reduce_scatter(NarrowOnTheWire(ranks // replicas, torch.float32, ReusedMemory()))
        layer.set_custom_all_gather(StraightToPlace())
    want = torch.zeros(4 * ranks, 24)
    for number in range(ROUNDS):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * number + rank)).bfloat16()
        with mock.patch.object(fsdp, "BLOCK_NUMBERS", 7):  # several, the last one incomplete
            layer(x).float().square().sum().backward()
        alone.weight.grad = None
        alone(x).float().square().sum().backward()
        want += alone.weight.grad
    dist.all_reduce(want)
    return layer.weight.grad.full_tensor(), want


def test_sixteen_bits_are_summed_in_thirty_two() -> None:
    for ranks in (2, 4):
        for got, want in world.run(ranks, gradients, True):
            assert got.dtype == torch.float32
            tolerances.close(got, want, terms=4 * ROUNDS)
    for replicas in (2, 4):
        for got, want in world.run(4, gradients, True, replicas):
            tolerances.close(got, want, terms=4 * ROUNDS)
    got, want = world.run(4, gradients, False)[0]  # torch's own sums in 16 bits: the difference shows
    assert (got - want).abs().max() > 1e-3 * want.abs().max()


def gathered(numbers: int) -> bool:
    """Several in flight at once; the whole ends up in its place, our piece is there from the start."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pending = []
    for seed in range(3):
        want = torch.randn(numbers * ranks, generator=torch.Generator().manual_seed(seed)).bfloat16()
        gather = StraightToPlace()
        whole = gather.allocate((numbers * ranks,), dtype=torch.bfloat16, device=torch.device("cpu"))
        mine = whole[numbers * rank : numbers * (rank + 1)].copy_(want[numbers * rank : numbers * (rank + 1)])
        pending.append((gather(whole, mine, dist.group.WORLD), whole, want))
    return all(work.wait() and torch.equal(whole, want) for work, whole, want in pending)


@pytest.mark.parametrize("numbers", [1, 5000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_go_straight_to_their_place(ranks: int, numbers: int) -> None:
    assert world.run(ranks, gathered, numbers) == [True] * ranks


def unanswered(gradients: bool) -> str:
    """Rank 1 never takes part, and leaves once rank 0 has given up; returns what ended rank 0's wait."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=600))
    _set_pg_timeout(timedelta(seconds=0.3), group)  # as after the first step
    key, error = f"unanswered {gradients}", "nothing"
    if dist.get_rank() == 1:
        dist.group.WORLD.get_group_store().get(key)
        return error
    whole = torch.ones(8)
    try:
        if gradients:
            NarrowOnTheWire(2, torch.float32, ReusedMemory())(torch.empty(4), whole, group, dist.ReduceOp.SUM)
        else:
            StraightToPlace()(whole, whole[:4], group).wait()
    except TimeoutError as raised:
        error = str(raised)
    dist.group.WORLD.get_group_store().set(key, "over")
    return error


@pytest.mark.parametrize("gradients", [False, True])
def test_a_rank_that_never_answers_is_named_when_the_time_is_over(gradients: bool) -> None:
    what = "reduce-scatter of gradients" if gradients else "all-gather of weights"
    try:
        message = world.run(2, unanswered, gradients, timeout=20)[0]
    finally:
        world.restart(2)  # that group cannot be used between the two again
    assert f"rank 0 waited 0.3 s in FSDP's {what} for rank 1 to send its piece" in message
    assert "training.timeout_s" in message


def test_a_wait_that_torch_cut_to_whole_milliseconds_still_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 0.0001
        return now[0]

    monkeypatch.setattr(fsdp, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, other: other)
    options = SimpleNamespace(_timeout=timedelta(seconds=0.3))
    group = SimpleNamespace(group_name="", _get_backend=lambda device: SimpleNamespace(options=options))

    def wait(timeout: timedelta) -> None:
        now[0] += timeout // timedelta(milliseconds=1) / 1000
        raise RuntimeError("Timed out")

    exchange = fsdp._Exchange.__new__(fsdp._Exchange)
    exchange.group, exchange.what, exchange.works = group, "the test", [(SimpleNamespace(wait=wait), "send", 1)]
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.3 s in the test for rank 1 to send its piece"):
        exchange.wait()


def test_kept_memory_is_used_again_when_no_tensor_lies_in_it() -> None:
    kept = ReusedMemory()
    first = kept.take((20, 5), torch.float32)
    place, part = first.data_ptr(), first[3:].view(-1)
    del first
    assert kept.take((10,), torch.float32).data_ptr() != place  # part of it is in use
    del part
    assert kept.take((200,), torch.bfloat16).data_ptr() == place
    large = kept.take((101,), torch.float32)
    assert large.data_ptr() != place and len(kept.pages) == 3
    assert kept.take((0, 4), torch.float32).shape == (0, 4)
