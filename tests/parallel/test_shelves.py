"""Memory that ranks of one host share, and memory that is used again."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import world
from titanmoe.parallel import shelves as module
from titanmoe.parallel.shelves import Kept, Shelves

ROUNDS, NUMBERS = 4, 3000
shared = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory that ranks share is Linux's")


def slow_readers() -> tuple[int, bool]:
    """Every rank in turn reads late: until then nothing that it wants is written over, though shelves are few."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shelves = Shelves.between(dist.group.WORLD)
    right = True
    for number in range(ROUNDS):
        shelf = shelves.take(4 * NUMBERS)
        shelf.of(rank, NUMBERS, torch.float32).fill_(10 * number + rank)
        for work in shelves.tell(shelf):
            work.wait()
        if number % ranks == rank:
            time.sleep(0.1)
        for other in shelves.others:
            right &= bool((shelf.of(other, NUMBERS, torch.float32) == 10 * number + other).all())
        shelves.give_back(shelf)
    return len(shelves.shelves), right


@shared
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shelf_is_written_again_when_all_have_read_it(ranks: int) -> None:
    assert world.run(ranks, slow_readers) == [(1, True)] * ranks


def sizes_taken() -> list[int]:
    shelves = Shelves.between(dist.group.WORLD)
    page = module.PAGE
    large, small, third = (shelves.take(size) for size in (3 * page, 1, page))
    for shelf in (large, small):
        for work in shelves.tell(shelf):
            work.wait()
        shelves.give_back(shelf)
    return [shelves.take(size).number for size in (2, page + 1, 1)] + [third.number]


@shared
def test_the_smallest_that_fits_is_taken_and_none_that_is_in_use() -> None:
    assert world.run(2, sizes_taken) == [[1, 0, 3, 2]] * 2


def refused(rank_without: int) -> bool:
    blind = mock.patch.object(module, "_opened", lambda path, secret: None)
    with blind if dist.get_rank() == rank_without else nullcontext():
        return Shelves.between(dist.group.WORLD) is None


@shared
def test_if_one_rank_cannot_share_none_does() -> None:
    assert world.run(2, refused, 1) == [True, True]
    assert world.run(2, refused, -1) == [False, False]


@shared
def test_another_hosts_memory_is_not_taken_for_ours() -> None:
    file = os.memfd_create("ours")
    os.pwrite(file, b"a" * module.SECRET, 0)
    path = f"/proc/{os.getpid()}/fd/{file}"
    assert module._opened(path, b"b" * module.SECRET) is None
    assert module._opened(path + "0000", b"a" * module.SECRET) is None
    opened = module._opened(path, b"a" * module.SECRET)
    assert opened is not None
    module._close([opened, file, None])


def test_kept_memory_is_used_again_when_no_tensor_lies_in_it() -> None:
    kept = Kept()
    first = kept.take((20, 5), torch.float32)
    place, part = first.data_ptr(), first[3:].view(-1)
    del first
    assert kept.take((10,), torch.float32).data_ptr() != place  # a part of it lives
    del part
    assert kept.take((200,), torch.bfloat16).data_ptr() == place
    large = kept.take((101,), torch.float32)
    assert large.data_ptr() != place and len(kept.pages) == 3
    assert kept.take((0, 4), torch.float32).shape == (0, 4)
