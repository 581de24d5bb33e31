"""Write each rank's shards of every logical tensor into a checkpoint, through torch.distributed.checkpoint.

A shard knows its offset in the full tensor, and nothing about meshes or placements. So what was saved under one mapping
can be read under any other, or in full, or block by block.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.manifest import Checksum
from titanmoe.checkpoint.move_in_blocks import WRITE_BLOCK_BYTES, ReadBlock, Sizes, split_into_blocks
from titanmoe.checkpoint.safe_files import CheckpointError, SaveProgress
from titanmoe.checkpoint.tensor_index import TENSOR_INDEX, StoredBlock, StoredTensor, to_json
from titanmoe.files import write_error

SMALL_NUMEL = 4096
"""Replicas of at most this many elements, such as a router's bias, are checked by ranks that do not write them too."""
FILE_BYTES = 4 << 30
"""A rank starts a new file past this size, so that one bad byte, or one file to verify, costs little."""


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of a logical tensor."""

    tensor: Tensor
    offset: tuple[int, ...]
    """Start of the shard in the full tensor, an index per dim."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def blocks(self) -> list[tuple[Sizes, Sizes]]:
        """Offset and sizes of the block to write; [] if the shard is empty."""
        return [(self.offset, self.sizes)] if self.tensor.numel() else []

    def get(self) -> Tensor:
        """Return this rank's shard of the tensor, without copying."""
        return self.tensor


@dataclass(frozen=True)
class LazyTensor:
    """A full tensor of which each block is made only when it is about to be written, and released afterwards."""

    shape: Sizes
    dtype: torch.dtype
    read: ReadBlock

    @property
    def offset(self) -> Sizes:
        return (0,) * len(self.shape)

    @property
    def sizes(self) -> Sizes:
        return self.shape

    @property
    def blocks(self) -> Iterator[tuple[Sizes, Sizes]]:
        """Offsets and sizes of the blocks to write, each of at most WRITE_BLOCK_BYTES (32 MiB) or one row."""
        return split_into_blocks(self.offset, self.shape, self.dtype.itemsize, WRITE_BLOCK_BYTES)

    def get(self) -> Tensor:
        """Make and return the full tensor at once."""
        return self.read(self.offset, self.shape)


TensorsToSave = Mapping[str, TensorShard | LazyTensor]


class NonFiniteError(CheckpointError):
    """A tensor on this rank has NaN or infinite elements; the message names it."""


class ShardPlanner(DefaultSavePlanner):
    """The plan of what each rank writes; torch's planner chooses one writer among ranks with the same shard."""

    def __init__(self, shards: TensorsToSave):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = shards

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, shard in self.shards.items() for item in _items(name, shard)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        shard, chunk = self.shards[write_item.index.fqn], write_item.tensor_data.chunk
        return shard.get() if isinstance(shard, TensorShard) else shard.read(tuple(chunk.offsets), tuple(chunk.sizes))


def _items(name: str, shard: TensorShard | LazyTensor) -> Iterator[WriteItem]:
    for offset, sizes in shard.blocks:
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=shard.dtype), torch.Size(shard.shape))
        yield WriteItem(MetadataIndex(name, torch.Size(offset)), WriteItemType.SHARD, tensor_data=data)


class _ChecksummedFile(io.RawIOBase):
    """A file that counts its bytes and CRC-32 as it is written, and fsyncs on close. torch.save only appends to it."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.bytes, self.crc32 = path, 0, 0
        self.file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            self.bytes += (written := self.file.write(data))
        except OSError as error:  # torch.save turns it into a RuntimeError that says nothing
            self.failure = error
            raise
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def close(self) -> None:
        if not self.closed:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            finally:
                try:
                    self.file.close()
                finally:
                    super().close()

    @property
    def sum(self) -> Checksum:
        """Size and CRC-32 of what has been written."""
        return Checksum(self.bytes, self.crc32)


class CheckpointWriter(StorageWriter):
    """A storage for torch.distributed.checkpoint: tensors one by one with torch.save, then tensors.json.

    `sums` has the size and CRC-32 of every file that this rank has written, by the file's path in the folder.
    """

    def __init__(self, folder: Path, progress: SaveProgress, finite: bool):
        """Prepare to write into an empty folder.

        Args:
            folder: where to write.
            progress: records which file is being written, for messages about a save that does not end.
            finite: whether `write_data` raises a NonFiniteError if a tensor has NaN or infinite elements.
        """
        self.folder, self.progress, self.finite = folder, progress, finite
        self.sums: dict[str, Checksum] = {}
        self.current_file = folder
        """The file being written, for error messages."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank:05}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: ShardPlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks one by one to files, a new one past each 4 GiB. The future is done when it returns.

        Raises:
            CheckpointError: a file cannot be written, or with `finite` a tensor has NaN or infinite elements.
        """
        if self.finite:
            self.progress(f"checking the numbers of {self.folder}", self._check_finite, plan, planner)
        results: list[WriteResult] = []
        stream: _ChecksummedFile | None = None
        try:
            for item in plan.items:
                if stream is None or stream.bytes >= FILE_BYTES:
                    stream = self._next_file(stream, plan.storage_data)
                start = stream.tell()
                # cpu() if it is on a GPU; clone() if it is part of a larger storage, all of which torch.save writes
                tensor = planner.resolve_data(item).detach().cpu().contiguous()
                torch.save(tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor, stream)
                del tensor
                chunk = item.tensor_data.chunk
                place = StoredBlock(
                    tuple(chunk.offsets), tuple(chunk.sizes), stream.path.name, start, stream.tell() - start
                )
                results.append(WriteResult(item.index, place.bytes, place))
            if stream is not None:
                self._finish_file(stream)
        except (OSError, RuntimeError) as error:  # from write(), which does not know the file's name
            failure = error if isinstance(error, OSError) else stream and stream.failure
            if failure is None:
                raise CheckpointError(f"{self.current_file}: {error}") from None
            raise CheckpointError(write_error(self.current_file, failure, self._bytes_left(plan))) from None
        finally:
            self.progress.what = SaveProgress.WAITING
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _check_finite(self, plan: SavePlan, planner: ShardPlanner) -> None:
        """Raise NonFiniteError if a tensor that this rank writes has NaN or infinite elements. Not collective.

        The plan is known by now, so replicas are checked by the rank that writes them; small ones by every rank that
        has them.
        """
        written = {item.index.fqn for item in plan.items}
        shards = {
            name: shard for name, shard in planner.shards.items() if name in written or prod(shard.sizes) <= SMALL_NUMEL
        }
        if nonfinite := describe_first_nonfinite({name: shard.get() for name, shard in shards.items()}):
            raise NonFiniteError(nonfinite)

    def _next_file(self, full: _ChecksummedFile | None, prefix: str) -> _ChecksummedFile:
        if full is not None:
            self._finish_file(full)
        self._start_file(f"{prefix}-{len(self.sums):03}.distcp")
        return _ChecksummedFile(self.current_file)

    def _start_file(self, name: str) -> None:
        self.current_file = self.folder / name
        self.progress.what = f"writing {self.current_file}"

    def _bytes_left(self, plan: SavePlan) -> int:
        """Return the bytes of the plan that this rank has not yet written, for a message when the disk is full."""
        blocks = [item.tensor_data for item in plan.items]
        left = sum(prod(block.chunk.sizes) * block.properties.dtype.itemsize for block in blocks)
        with contextlib.suppress(OSError):
            left -= sum(file.stat().st_size for file in self.folder.glob(f"{plan.storage_data}-*"))
        return max(left, 0)

    def _finish_file(self, stream: _ChecksummedFile) -> None:
        stream.close()
        self.sums[stream.path.name] = stream.sum

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        blocks: dict[str, list[StoredBlock]] = {}
        for result in (result for rank in results for result in rank):
            blocks.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {
            name: StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(blocks[name]))
            for name, entry in metadata.state_dict_metadata.items()
        }
        self._write_bytes(TENSOR_INDEX, to_json(tensors))

    def copy_files(self, files: Mapping[str, Path]) -> None:
        """Copy files into the checkpoint's subfolder hf/, and add their checksums to `sums`. One rank calls it.

        `files` has their paths by the name of the copy.

        Raises:
            CheckpointError: a file has more than 1 GiB, is a link, or cannot be read or copied.
            FileNotFoundError: there is no such file.
        """
        for name, source in files.items():
            (self.folder / layout.CARRIED).mkdir(exist_ok=True)
            self._write_bytes(
                f"{layout.CARRIED}/{name}", safe_files.read(source.parent, source.name, layout.CARRIED_BYTES)
            )

    def _write_bytes(self, name: str, data: bytes) -> None:
        self._start_file(name)
        try:
            with contextlib.closing(_ChecksummedFile(self.current_file)) as stream:
                stream.write(data)
        except OSError as error:
            raise CheckpointError(write_error(self.current_file, error, len(data))) from None
        self.sums[name] = stream.sum
        self.progress.what = SaveProgress.WAITING

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@torch.no_grad()
def describe_first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """Return a text that names the first tensor with NaN or infinite elements and counts these; "" if all are finite.

    Tensors of integers are passed over. Synchronises with the device.
    """
    nonempty = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not nonempty:
        return ""
    # One fused pass. A norm that is not finite may be an overflow of finite elements: these are then checked.
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(nonempty.values()))]).tolist()
    for (name, tensor), norm in zip(nonempty.items(), norms, strict=True):
        if not math.isfinite(norm) and (bad := tensor.numel() - int(tensor.isfinite().sum())):
            return f"{name} ({bad:,} of {tensor.numel():,} numbers are NaN or infinite)"
    return ""
