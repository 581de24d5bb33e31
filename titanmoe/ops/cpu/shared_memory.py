"""Buffers that all ranks of a group on one machine map: on CPUs, what torch's symmetric memory is on GPUs.

They show that dispatch over symmetric memory is right where there is no GPU; they are not meant to be fast. A rank's
buffer is a file in /dev/shm that never has a name; the other ranks open it through /proc. So nothing is left of it
however the ranks end. A barrier is gloo's.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = "/dev/shm"
"""The folder in which buffers are made."""


def missing() -> str:
    """Return why ranks on CPUs cannot share memory where the system is not Linux, as text; "" on Linux."""
    return "" if sys.platform == "linux" else f"ranks on CPUs share memory in {FOLDER}, which only Linux has"


class MappedBuffers:
    """The buffers of all ranks of a group, mapped into this rank's memory.

    It has those methods of torch's symmetric memory handle that dispatchers call.
    """

    def __init__(self, buffers: list[Tensor], group: dist.ProcessGroup):
        self.buffers, self.group = buffers, group

    def get_remote_tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer of a rank of the group.

        `shape` and `dtype` are those of its allocation, and are not used.
        """
        return self.buffers[rank]

    def barrier(self) -> None:
        """Wait until all ranks of the group have called this."""
        dist.barrier(self.group)


def allocate_shared(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, MappedBuffers]:
    """Allocate a buffer on this rank that the ranks of `group` map into their memory. Collective over the world.

    Buffers begin as zeros.

    Args:
        shape: the shape of each rank's buffer, equal on all ranks.
        dtype: its dtype.
        device: not used.
        group: the ranks whose buffers are mapped.

    Returns:
        The buffer, and a handle to the buffers of all ranks of the group.

    Raises:
        RuntimeError: on all ranks, if the ranks of a group are on several machines, or if the buffers do not fit.
    """
    size, peers = math.prod(shape) * dtype.itemsize, dist.get_process_group_ranks(group)
    _check_machines(size, peers)
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        problem = ""
        try:
            os.posix_fallocate(file, 0, size)  # a page that is not there when it is written to would end the process
        except OSError as error:
            problem = f"{FOLDER}: {error.strerror}"
        opened = os.fstat(file)
        files = _gather((f"/proc/{os.getpid()}/fd/{file}", (opened.st_dev, opened.st_ino), problem))
        _raise_first(problem for *_, problem in files)
        buffers = []
        try:
            for path, identity, _ in (files[rank] for rank in peers):
                status = os.stat(path)
                if (status.st_dev, status.st_ino) != identity:  # a process of another container has that number here
                    raise OSError(f"{path} is another file here")
                buffers.append(torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape))
        except (OSError, RuntimeError) as error:
            problem = f"rank {dist.get_rank()} cannot open the buffer of another: {error}"
        _raise_first(_gather(problem))  # only now may a rank close its file: all have mapped it
    finally:
        os.close(file)
    return buffers[group.rank()], MappedBuffers(buffers, group)


def _check_machines(size: int, peers: list[int]) -> None:
    """Raise a RuntimeError on all ranks if a group is on several machines or a machine has too little shared memory.

    Collective over the world.

    Args:
        size: bytes of each rank's buffer.
        peers: the ranks of this rank's group.
    """
    space = os.statvfs(FOLDER)
    here = Path("/proc/sys/kernel/random/boot_id").read_text()
    ranks = _gather((here, space.f_bavail * space.f_frsize, peers))
    machines = [machine for machine, *_ in ranks]
    for machine, free, group in ranks:
        if (several := len({machines[rank] for rank in group})) > 1:
            raise RuntimeError(f"ranks of one group are on {several} machines")
        if (needed := size * machines.count(machine)) > free:
            raise RuntimeError(
                f"{FOLDER} has {free / 1e6:.3g} MB free, and the buffers of {machines.count(machine)} ranks take "
                f"{needed / 1e6:.3g} MB"
            )


def _gather(value: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective over the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _raise_first(problems: Any) -> None:
    for problem in problems:
        if problem:
            raise RuntimeError(problem)
