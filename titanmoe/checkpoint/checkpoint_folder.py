"""A checkpoint's folder: all ranks of a group write it together; any process reads any block of any tensor from it.

Writing goes through torch.distributed.checkpoint (see write_tensors). Reading uses neither its metadata nor pickle:
tensors.json says which file has which block, so what was saved under one mapping loads under any other.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import sub
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.manifest import Checksum, Manifest
from titanmoe.checkpoint.move_in_blocks import Sizes, block_slices, empty, fill_in_blocks
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError, SaveProgress
from titanmoe.checkpoint.tensor_index import (
    TENSOR_INDEX,
    StoredBlock,
    StoredTensor,
    StridedData,
    blocks_covering,
    intersection,
    locate_data,
    parse_entries,
)
from titanmoe.checkpoint.write_tensors import CheckpointWriter, NonFiniteError, ShardPlanner, TensorShard, TensorsToSave
from titanmoe.config.parse_json import parse_json


def save(
    target: Path,
    shards: TensorsToSave,
    manifest: Callable[[dict[str, Checksum]], Manifest],
    *,
    group: Group = None,
    carried: Mapping[str, Path] | None = None,
    progress: SaveProgress | None = None,
    finite: bool = False,
) -> None:
    """Write a complete checkpoint to `target`. Collective over the group; None stands for a single process.

    Of ranks with the same shard one writes it. The folder gets its name only once every byte is on disk and has been
    read back. On an error, what was there before is unchanged and the unfinished files are removed.

    Args:
        target: the checkpoint's folder, which is replaced if it exists.
        shards: what this rank holds of each tensor, by the tensor's name in the checkpoint.
        manifest: makes the manifest from the sizes and CRC-32 of all files, by file name; called on the group's first
            rank.
        group: a process group of CPU tensors (gloo).
        carried: paths of files to copy into the checkpoint's subfolder hf/, by the name of the copy.
        progress: records what this rank is doing, for messages about a save that does not end.
        finite: whether to raise if a tensor has NaN or infinite elements.

    Raises:
        CheckpointError: on all ranks, if anything fails on one.
    """
    progress = progress or SaveProgress()
    first = group is None or dist.get_rank(group) == 0
    unfinished = target.with_name(target.name + layout.WRITING)
    try:
        on_all_ranks(group, lambda: progress(f"making {unfinished}", layout.make_empty, unfinished) if first else None)
        on_all_ranks(group, lambda: _check_visible(unfinished))
        writer = CheckpointWriter(unfinished, progress, finite)
        try:
            with warnings.catch_warnings() if group is None else contextlib.nullcontext():
                if group is None:  # with a group this may be a thread, where filters must not change
                    warnings.simplefilter("ignore")  # of torch, that only one process saves
                dcp.save(dict(shards), storage_writer=writer, planner=ShardPlanner(shards), process_group=group)
        except dcp.CheckpointException as failure:
            raise _save_error(failure, target) from None
        on_all_ranks(group, lambda: writer.copy_files(carried or {}) if first else None)
        # Read back what was written, to find a byte that the file system lost before anyone relies on it.
        sums = on_all_ranks(
            group, lambda: progress(f"reading back {writer.current_file}", layout.check_files, unfinished, writer.sums)
        )

        def publish() -> None:
            layout.publish(unfinished, target, manifest({name: s for some in sums for name, s in some.items()}))

        on_all_ranks(group, lambda: progress(f"publishing {target}", publish) if first else None)
    except CheckpointError:  # raised on all ranks, so none of them is still writing
        if first:
            layout.erase_incomplete(unfinished)
        raise


def _check_visible(unfinished: Path) -> None:
    if not unfinished.is_dir():
        raise CheckpointError(
            f"rank {dist.get_rank()} does not see {unfinished}, which rank 0 has made: put the run's folder "
            "(job.dump_folder) on a file system that all ranks share"
        )


# ---- reading


class StoredTensors:
    """A folder of files that hold blocks of tensors, from which any block of any tensor can be read.

    Reading compares no checksums of these files.
    """

    stored: Mapping[str, StoredTensor]

    def __init__(self, path: Path):
        self.path = path
        self._numbers: dict[StoredBlock, StridedData] = {}
        """Locations of the elements in blocks that have been read from, so that each header is parsed once."""

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, by name."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.stored.items()}

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a block of a stored tensor, in its stored dtype on the CPU; CheckpointError if it cannot be read.

        Args:
            name: the tensor's name.
            offset: where the block begins in the full tensor; None for the origin.
            shape: the block's shape; None for the full tensor's.
        """
        if name not in self.stored:
            raise CheckpointError(f"{self.path} has no tensor {name}", safe_files.ANOTHER)
        full_shape, dtype = self.tensors[name]
        out = empty(full_shape if shape is None else shape, dtype)
        self.fill({name: (name, TensorShard(out, (0,) * len(full_shape) if offset is None else offset, full_shape))})
        return out

    def fill(self, targets: Mapping[str, tuple[str, TensorShard]]) -> None:
        """Fill local shards in place from the files, converting dtypes. Not collective.

        Args:
            targets: (name of a stored tensor, shard of it to fill) for each shard; the keys of the dict are not used.

        Raises:
            CheckpointError: a tensor is not stored, has another shape, or a file cannot be read.
        """
        blocks_by_file: dict[str, dict[StoredBlock, list[tuple[str, TensorShard]]]] = {}
        for name, shard in targets.values():
            try:
                needed = blocks_covering(self.stored.get(name), shard.shape, shard.offset, shard.sizes)
            except ValueError as error:
                raise CheckpointError(f"{self.path} cannot be read: {name} {error}", safe_files.ANOTHER) from None
            for block in needed:
                blocks_by_file.setdefault(block.file, {}).setdefault(block, []).append((name, shard))
        for file, blocks in blocks_by_file.items():
            try:
                safe_files.with_retries(self.path / file, lambda file=file, blocks=blocks: self._fill(file, blocks))
            except Exception as error:
                raise safe_files.read_error(self.path / file, error) from None

    def _fill(self, file: str, blocks: Mapping[StoredBlock, list[tuple[str, TensorShard]]]) -> None:
        with safe_files.open_file(self.path, file) as stream:
            for block in sorted(blocks, key=lambda block: block.start):
                dtype = self.stored[blocks[block][0][0]].dtype
                if block not in self._numbers:
                    self._numbers[block] = locate_data(block, dtype, stream)

                def read(at: Sizes, sizes: Sizes, block: StoredBlock = block) -> Tensor:
                    return self._numbers[block].read(stream, tuple(map(sub, at, block.offset)), sizes)

                for _, shard in blocks[block]:
                    offset, sizes = intersection(block, shard.offset, shard.sizes)
                    fill_in_blocks(shard.tensor.detach()[block_slices(offset, sizes, shard.offset)], offset, read)


class Checkpoint(StoredTensors):
    """A complete checkpoint that titanmoe wrote, open for reading."""

    def __init__(self, path: Path):
        """Open a checkpoint's folder and read its manifest; CheckpointError if it has no valid one."""
        super().__init__(path)
        self.manifest = layout.read_manifest(path)
        self.record = self.manifest.record

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Blocks of each tensor, by name, as tensors.json lists them; CheckpointError if that file's CRC-32 differs."""
        files = self.manifest.files
        if TENSOR_INDEX not in files:
            manifest = self.path / layout.MANIFEST
            raise CheckpointError(f"{manifest} is damaged: {TENSOR_INDEX} is not listed", safe_files.ANOTHER)
        data = layout.read_intact(self.path, TENSOR_INDEX, files[TENSOR_INDEX])
        try:
            return parse_entries(parse_json(data), files)
        except Exception as error:  # files that are not ours can raise anything
            raise safe_files.read_error(self.path / TENSOR_INDEX, error) from None


def write_checkpoint(
    path: Path | str,
    tensors: TensorsToSave,
    record: dict[str, Any],
    overwrite: bool = False,
    carried: Mapping[str, Path] | None = None,
    group: Group = None,
) -> None:
    """Write a checkpoint that does not come from training, such as a converted one. Collective over the group.

    NaN is not refused. In the order in which a run's checkpoints were written it is the first (number 0).

    Args:
        path: the checkpoint's folder, which is made.
        tensors: what this rank writes of each tensor, by the tensor's name in the checkpoint.
        record: the record of manifest.json: the model's config, the step and the like.
        overwrite: replace an existing folder.
        carried: paths of files to copy into the checkpoint's subfolder hf/, by the name of the copy.
        group: the ranks that write together; None for a single process.

    Raises:
        CheckpointError: the folder exists without `overwrite`; on all ranks, if anything cannot be written on one.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists: choose another folder, or give --overwrite")
    save(target, tensors, lambda sums: Manifest(record.get("step", 0), 0, sums, record), group=group, carried=carried)


def _save_error(failure: dcp.CheckpointException, target: Path) -> CheckpointError:
    """Return the error of a failed save: the lowest rank's with NaN or infinite numbers, else every distinct reason."""
    errors = [error for error, _ in failure.failures.values()]
    if nonfinite := {rank: error for rank, (error, _) in failure.failures.items() if isinstance(error, NonFiniteError)}:
        other_ranks = len(nonfinite) - 1
        others = f", and on {other_ranks} more rank{'s' * (other_ranks > 1)}" if other_ranks else ""
        rank = min(nonfinite)
        return CheckpointError(
            f"{target} is not saved: on rank {rank} {nonfinite[rank]}{others}. Earlier checkpoints are untouched; "
            "start again to resume from the latest, with a lower optimizer.lr if it happens again"
        )
    return CheckpointError(
        "; ".join(dict.fromkeys(safe_files.error_text(e) if isinstance(e, OSError) else str(e) for e in errors))
    )
