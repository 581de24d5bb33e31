"""`titanmoe checkpoint dcp`: add to a checkpoint what torch.distributed.checkpoint and its tools need to read it.

They open a folder by its .metadata, a pickle of where the blocks of tensors are. This file makes one from tensors.json,
and is the only one that pickles. Nothing here reads a .metadata: a stranger's runs the stranger's code in such tools.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import Checkpoint


def write_dcp_metadata(path: Path) -> int:
    """Write a checkpoint's .metadata for torch.distributed.checkpoint, atomically; return how many tensors it lists.

    Raises:
        CheckpointError: files of the checkpoint are missing or have another size, or .metadata cannot be written.
    """
    layout.require_intact(path)
    stored, size = Checkpoint(path).stored, torch.Size
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            size(tensor.shape),
            [ChunkStorageMetadata(size(block.offset), size(block.shape)) for block in tensor.blocks],
        )
        for name, tensor in stored.items()
    }
    places = {
        MetadataIndex(name, size(block.offset)): _StorageInfo(block.file, block.start, block.bytes)
        for name, tensor in stored.items()
        for block in tensor.blocks
    }
    layout.replace_file(path / layout.DCP_METADATA, pickle.dumps(Metadata(tensors, storage_data=places)))
    return len(stored)
