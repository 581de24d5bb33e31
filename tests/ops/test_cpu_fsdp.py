"""FSDP over gloo: shards are gathered straight into their place, and a wait has a time-out."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests import world
from titanmoe.ops.cpu import fsdp
from titanmoe.ops.cpu.fsdp import DirectAllGather


def gathered(numbers: int) -> bool:
    """Several in flight at once; the whole ends up in its place, our piece is there from the start."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pending = []
    for seed in range(3):
        want = torch.randn(numbers * ranks, generator=torch.Generator().manual_seed(seed)).bfloat16()
        gather = DirectAllGather()
        whole = gather.allocate((numbers * ranks,), dtype=torch.bfloat16, device=torch.device("cpu"))
        mine = whole[numbers * rank : numbers * (rank + 1)].copy_(want[numbers * rank : numbers * (rank + 1)])
        pending.append((gather(whole, mine, dist.group.WORLD), whole, want))
    return all(work.wait() and torch.equal(whole, want) for work, whole, want in pending)


@pytest.mark.parametrize("numbers", [1, 5000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_go_straight_to_their_place(ranks: int, numbers: int) -> None:
    assert world.run(ranks, gathered, numbers) == [True] * ranks


def unanswered() -> str:
    """Rank 1 never takes part, and leaves once rank 0 has given up; returns what ended rank 0's wait."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=600))
    _set_pg_timeout(timedelta(seconds=0.3), group)  # as after the first step
    key, error = "unanswered", "nothing"
    if dist.get_rank() == 1:
        dist.group.WORLD.get_group_store().get(key)
        return error
    whole = torch.ones(8)
    try:
        DirectAllGather()(whole, whole[:4], group).wait()
    except TimeoutError as raised:
        error = str(raised)
    dist.group.WORLD.get_group_store().set(key, "over")
    return error


def test_a_rank_that_never_answers_is_named_when_the_time_is_over() -> None:
    try:
        message = world.run(2, unanswered, timeout=20)[0]
    finally:
        world.restart(2)  # that group cannot be used between the two again
    assert "rank 0 waited 0.3 s in FSDP's all-gather of weights for rank 1 to send its shard" in message
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
    exchange.group, exchange.works = group, [(SimpleNamespace(wait=wait), "send", 1)]
    with pytest.raises(
        TimeoutError, match=r"rank 0 waited 0.3 s in FSDP's all-gather of weights for rank 1 to send its"
    ):
        exchange.wait()
