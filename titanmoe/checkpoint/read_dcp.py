"""Read a folder that other programs wrote with torch.distributed.checkpoint, without unpickling anything.

Its .metadata is a pickle of a Metadata: by name, the dtype, shape and blocks of each tensor; by name and offset, the
file, first byte and length of each block, which torch.save wrote. follow_pickle finds the same as tensors.json would
say, and it is checked like that. Entries of bytes, which only unpickling could read, have no tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.checkpoint_folder import StoredTensors
from titanmoe.checkpoint.follow_pickle import OBJECTS, VALUES, DictItems, GlobalName, PickledCall, follow
from titanmoe.checkpoint.manifest import Checksum
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.tensor_index import DTYPES, MOST_DIMS, parse_entries

MOST_BYTES = 1 << 28
"""Bytes of .metadata: a block of a tensor takes about 140."""
_CLASSES, _INFO = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem _StorageInfo"
_KINDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
NAMES = {
    *(f"{_CLASSES} {kind}" for kind in (*_KINDS, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"torch {dtype}" for dtype in DTYPES),
    *("torch Size", "torch.serialization _get_layout", _INFO),
    *(f"pathlib{module} {system}Path" for module in ("", "._local") for system in ("Posix", "Windows")),
}
"""The only functions and classes that a .metadata may name."""


class DcpFolder(StoredTensors):
    """Tensors that another program saved through torch.distributed.checkpoint, open for reading."""

    def __init__(self, path: Path, begins: tuple[str, ...]):
        """Parse the folder's .metadata and find the blocks of its tensors. No tensor is read yet.

        Args:
            path: the folder.
            begins: prefixes of the names of the tensors to read; names of other entries are kept in `others`.

        Raises:
            CheckpointError: with one line, if the folder or its .metadata is not what torch writes.
        """
        super().__init__(path)
        self.others: list[str] = []
        """Names of all other entries, which are not read."""
        try:
            data = safe_files.read(path, layout.DCP_METADATA, MOST_BYTES)
        except safe_files.NOT_FOUND_ERRORS:
            what = f"there is no {layout.DCP_METADATA}" if path.is_dir() else "no such folder"
            fix = f"name the folder with {layout.DCP_METADATA}"
            raise CheckpointError(f"{path} is no folder of torch.distributed.checkpoint: {what}", fix) from None
        try:
            entries = self._entries(follow(data, VALUES | OBJECTS, "a Metadata of torch", NAMES), begins)
            files = {block[2] for entry in entries.values() for block in entry["blocks"]}
            sums = {name: Checksum(os.lstat(safe_files.safe_path(path, name)).st_size, 0) for name in sorted(files)}
            self.stored = parse_entries(entries, sums)
        except Exception as error:  # files that are not ours can raise anything
            raise safe_files.read_error(path / layout.DCP_METADATA, error) from None

    def _entries(self, metadata: Any, begins: tuple[str, ...]) -> dict[str, Any]:
        """Translate a parsed Metadata of torch to entries as in tensors.json, dicts by tensor name.

        Args:
            metadata: what the pickle in .metadata describes.
            begins: prefixes of the names of the tensors to read; names of other entries are added to `others`.

        Raises:
            ValueError: something in it is not what torch writes, or the files are compressed or encrypted.
        """
        fields = _fields(metadata, "Metadata")
        places = {}
        for key, value in _items(fields["storage_data"]):
            index, place = _fields(key, "MetadataIndex"), _fields(value, _INFO)
            if not _text(index["fqn"]).startswith(begins):
                continue
            if place.get("transform_descriptors"):
                raise ValueError("the files are compressed or encrypted: save the checkpoint again without extensions")
            at = _size(index["offset"]) if index["offset"] is not None else None
            places[index["fqn"], at] = [_text(place["relative_path"]), place["offset"], place["length"]]
        entries = {}
        for name, value in _items(fields["state_dict_metadata"]):
            if not _text(name).startswith(begins):
                self.others.append(name)
                continue
            entry = _fields(value, "TensorStorageMetadata", f"{name:.80} is not a tensor")
            blocks = [_fields(chunk, "ChunkStorageMetadata") for chunk in entry["chunks"]]
            sizes = {_size(block["offsets"]): _size(block["sizes"]) for block in blocks}
            entries[name] = {
                "dtype": entry["properties"].state[0].name.removeprefix("torch "),
                "shape": _size(entry["size"]),
                "blocks": [[at, sizes[at], *places[name, at]] for at in sizes if 0 not in sizes[at]],
            }
        return entries


def _fields(value: Any, class_name: str, wrong: str = "") -> dict[str, Any]:
    """Return the attributes of a pickled object by name; ValueError, with the text `wrong`, if its class is another.

    Args:
        value: what the pickle describes.
        class_name: the class, in torch.distributed.checkpoint.metadata unless it is "MODULE NAME".
        wrong: the error's text; "" for one that names the class.
    """
    name = class_name if " " in class_name else f"{_CLASSES} {class_name}"
    if not isinstance(value, PickledCall) or value.function != GlobalName(name):
        raise ValueError(wrong or f"an entry is not a {class_name.rpartition(' ')[2]}")
    return {key: item for key, item in _items(value.state) if type(key) is str}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return the items of a pickled dict; ValueError if the value is none."""
    if not isinstance(value, DictItems):
        raise ValueError("an entry is not a dict")
    return iter(value)


def _size(value: Any) -> tuple[int, ...]:
    """Return the sizes in a pickled torch.Size; ValueError if the value is none, or has more dims than torch allows."""
    match value:
        case PickledCall(GlobalName("torch Size"), (tuple(sizes),)) if len(sizes) <= MOST_DIMS and {
            *map(type, sizes)
        } <= {int}:
            return sizes
    raise ValueError("an entry is not a torch.Size")


def _text(value: Any) -> str:
    """Return `value` itself; ValueError if it is no str."""
    if type(value) is not str:
        raise ValueError("an entry is not a text")
    return value
