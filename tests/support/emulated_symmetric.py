"""The symmetric-memory operations that titanmoe.moe.dispatchers.symm_mem calls, emulated on CPUs by their documented
contract.

Importing this gives torch's own operations a CPU kernel over gloo, and makes `symm_mem.empty` return a CPU tensor that
counts as symmetric. What the real operations leave undefined is filled with NaN here, and what would corrupt
memory or race with a peer raises: operands that are not symmetric, contiguous or as large as they must be, more rows
than `input` has or than `out` can take, and buffers reused by the very next operation.

Contract, with G ranks of a group and e experts on each: `all_to_all_vdev_2d` takes rows in order of (rank, expert), as
many as in_splits (G * e) says, to the ranks, where they are in order of (expert, sender), each expert starting at a
multiple of major_align, none with a shorter bin than that. Splits and offsets are written to out_splits_offsets (2, e *
G). `all_to_all_vdev_2d_offset` takes rows at such offsets back, densely in order of (rank, expert).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

_symmetric: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_last: dict[str, tuple[int, int]] = {}  # by group: buffers that peers may still use
_real_empty, _real_rendezvous = symm_mem.empty, symm_mem.rendezvous
calls: list[str] = []


def _empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    if torch.device(device).type != "cpu":
        return _real_empty(*size, dtype=dtype, device=device)
    buffer = torch.empty(*size, dtype=dtype)
    _poison(buffer)
    _symmetric.add(buffer.untyped_storage())
    _last.clear()  # the address may have been another buffer's
    return buffer


def _rendezvous(buffer: Tensor, group: Any) -> Any:
    return None if buffer.device.type == "cpu" else _real_rendezvous(buffer, group)


def _poison(buffer: Tensor) -> None:
    buffer.fill_(float("nan") if buffer.is_floating_point() else -(2**40))


def _check(name: str, rows: tuple[Tensor, Tensor], splits: tuple[Tensor, Tensor], group_name: str) -> Any:
    group = dist.distributed_c10d._resolve_process_group(group_name)
    addresses = {storage.data_ptr() for storage in _symmetric}
    for operand in (*rows, *splits):
        assert operand.untyped_storage().data_ptr() in addresses, f"{name}: an operand is not symmetric"
        assert operand.is_contiguous() and operand.storage_offset() == 0, f"{name}: an operand is not a whole buffer"
    assert rows[0].dtype == rows[1].dtype and rows[0].shape[1:] == rows[1].shape[1:], f"{name}: unlike rows"
    assert all(s.dtype == torch.int64 for s in splits), f"{name}: splits of another type"
    assert splits[1].shape == (2, splits[0].shape[-1]) and splits[0].shape[-1] % group.size() == 0
    used = rows[0].data_ptr(), splits[1].data_ptr()
    assert not set(used) & set(_last.get(group_name, ())), f"{name}: a buffer is used again while peers may use it"
    _last[group_name] = used
    calls.append(name)
    return group


def _exchange(rows: list[list[Tensor]], group: Any, like: Tensor) -> list[list[Tensor]]:
    """rows[rank][expert] to their ranks; returns what arrived, [rank][expert]."""
    sizes = torch.tensor([[len(piece) for piece in pieces] for pieces in rows])
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=group)
    came = like.new_empty(int(theirs.sum()), *like.shape[1:])
    sent = torch.cat([piece for pieces in rows for piece in pieces])
    dist.all_to_all_single(came, sent, theirs.sum(1).tolist(), sizes.sum(1).tolist(), group=group)
    pieces = iter(came.split(theirs.flatten().tolist()))
    return [[next(pieces) for _ in row] for row in theirs]


def _write(out: Tensor, report: Tensor, pieces: list[list[Tensor]], align: int) -> None:
    """pieces[major][minor] concatenated, each major starting at a multiple of align."""
    _poison(out)
    splits, offsets, begin = [], [], 0
    for row in pieces:
        place = begin
        for piece in row:
            splits.append(len(piece))
            offsets.append(place)
            if place + len(piece) > len(out):
                raise RuntimeError(f"{place + len(piece)} rows are written to a buffer of {len(out)}")
            out[place : place + len(piece)] = piece
            place += len(piece)
        begin = begin + max(align, -(-(place - begin) // align) * align) if align else place
    report.copy_(torch.tensor([splits, offsets]))


def _there(input, out, in_splits, out_splits_offsets, group_name, major_align=None) -> None:
    group = _check("there", (input, out), (in_splits, out_splits_offsets), group_name)
    splits = in_splits.view(group.size(), -1).tolist()
    assert all(n >= 0 for row in splits for n in row), "a negative split"
    assert sum(map(sum, splits)) <= len(input), f"{sum(map(sum, splits))} rows are read from a buffer of {len(input)}"
    pieces = iter(input[: sum(map(sum, splits))].split([n for row in splits for n in row]))
    came = _exchange([[next(pieces) for _ in row] for row in splits], group, input)
    _write(out, out_splits_offsets, list(map(list, zip(*came, strict=True))), major_align or 1)


def _back(input, out, in_splits_offsets, out_splits_offsets, group_name) -> None:
    group = _check("back", (input, out), (in_splits_offsets, out_splits_offsets), group_name)
    lengths, places = in_splits_offsets.view(2, -1, group.size()).tolist()
    assert all(
        place >= 0 and place + n <= len(input)
        for row, where in zip(lengths, places, strict=True)
        for n, place in zip(row, where, strict=True)
    )
    pieces = [
        [input[where[rank] : where[rank] + row[rank]] for row, where in zip(lengths, places, strict=True)]
        for rank in range(group.size())
    ]
    _write(out, out_splits_offsets, _exchange(pieces, group, input), 0)


_library = torch.library.Library("symm_mem", "IMPL")
_library.impl("all_to_all_vdev_2d", _there, "CPU")
_library.impl("all_to_all_vdev_2d_offset", _back, "CPU")
symm_mem.empty, symm_mem.rendezvous = _empty, _rendezvous
