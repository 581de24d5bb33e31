"""Memory that ranks on CPUs share: what is refused, on all ranks, and what is left when they are killed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import world
from tests.support import processes
from titanmoe.ops.cpu import shared_memory

SHAPE = 125, 1000
CPU = torch.device("cpu")


def exchange() -> list[float]:
    own, handle = shared_memory.allocate_shared((dist.get_world_size(),), torch.float32, CPU, dist.group.WORLD)
    handle.barrier()
    for rank in range(dist.get_world_size()):
        handle.get_remote_tensor(rank, own.shape, own.dtype)[dist.get_rank()] = 10 * dist.get_rank() + rank
    handle.barrier()
    return own.tolist()


def test_a_rank_reads_what_others_have_written() -> None:
    assert world.run(3, exchange) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def refused(case: str) -> str:
    """Return the error of `share` on this rank if something is wrong on rank 1 alone."""
    wrong: dict[str, Any] = {
        "room": ("os.statvfs", SimpleNamespace(f_bavail=900, f_frsize=1000)),
        "full": ("os.posix_fallocate", OSError(28, "No space left on device")),
        "machines": ("pathlib.Path.read_text", "of another machine"),
        "containers": ("os.stat", SimpleNamespace(st_dev=0, st_ino=0)),
    }
    target, value = wrong[case]
    how = {"side_effect": value} if isinstance(value, OSError) else {"return_value": value}
    with mock.patch(target, **how) if dist.get_rank() == 1 else mock.MagicMock():
        try:
            shared_memory.allocate_shared(SHAPE, torch.float64, CPU, dist.group.WORLD)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "case, message",
    [
        ("room", "/dev/shm has 0.9 MB free, and the buffers of 2 ranks take 2 MB"),
        ("full", "/dev/shm: No space left on device"),
        ("machines", "ranks of one group are on 2 machines"),
        ("containers", "rank 1 cannot open the buffer of another: /proc/"),
    ],
)
def test_what_one_rank_cannot_do_is_refused_on_all(case: str, message: str) -> None:
    first, second = world.run(2, refused, case)
    assert first == second and first.startswith(message)


def test_nothing_is_left_of_a_rank_that_is_killed_before_its_buffer_is_mapped() -> None:
    size = 1_234_577
    code = (
        "import os, signal, torch, torch.distributed as dist\n"
        "from titanmoe.ops.cpu import shared_memory\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "torch.from_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"shared_memory.allocate_shared(({size},), torch.uint8, torch.device('cpu'), dist.group.WORLD)\n"
    )
    assert processes.run(["-c", code], timeout=120).returncode == -9
    with os.scandir(shared_memory.FOLDER) as files:
        assert size not in [file.stat().st_size for file in files]
