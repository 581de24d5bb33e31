"""Stands in for torch's symmetric memory on CPUs: importing this makes `get_backend`, `empty` and `rendezvous` of
`torch.distributed._symmetric_memory` know the CPU. Buffers are memory that the processes share, so ranks do write to
each other's; a barrier is gloo's.

Before a rank tells its peers that they may write, it fills its buffer with NaN: so a row that is read without having
been written shows.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_real_backend, _real_empty, _real_rendezvous = symm_mem.get_backend, symm_mem.empty, symm_mem.rendezvous
calls: list[str] = []
_files: dict[int, str] = {}  # by the address of a buffer that peers have not mapped yet


def _map(path: str, size: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


def _empty(*shape: int, dtype: torch.dtype, device: Any) -> Tensor:
    if torch.device(device).type != "cpu":
        return _real_empty(*shape, dtype=dtype, device=device)
    number, path = tempfile.mkstemp(dir="/dev/shm")
    size = torch.Size(shape).numel()
    os.ftruncate(number, size * dtype.itemsize)
    os.close(number)
    buffer = _map(path, size, dtype).view(shape)
    _files[buffer.data_ptr()] = path
    return buffer


class _Handle:
    def __init__(self, own: Tensor, group: dist.ProcessGroup):
        self.own, self.group, self.paths = own, group, [""] * group.size()
        path = _files.pop(own.data_ptr())
        dist.all_gather_object(self.paths, path, group)
        self.peers = [_map(path, own.numel(), own.dtype) for path in self.paths]
        dist.barrier(group)
        os.unlink(path)
        self.entered = 0

    def get_remote_tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert dtype == self.own.dtype
        return self.peers[rank].view(shape)

    def barrier(self) -> None:
        calls.append("barrier")
        with _disable_current_modes():
            if self.entered % 2 == 0:  # the first of an exchange
                self.own.fill_(float("nan"))
            self.entered += 1
            dist.barrier(self.group)


def _rendezvous(buffer: Tensor, group: str) -> Any:
    if buffer.device.type != "cpu":
        return _real_rendezvous(buffer, group)
    return _Handle(buffer, dist.distributed_c10d._resolve_process_group(group))


def _backend(device: torch.device) -> str | None:
    return "shared memory" if device.type == "cpu" else _real_backend(device)


symm_mem.get_backend, symm_mem.empty, symm_mem.rendezvous = _backend, _empty, _rendezvous
