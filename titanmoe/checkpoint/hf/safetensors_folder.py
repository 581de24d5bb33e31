"""Read blocks of tensors from a folder of safetensors files, and write such files block by block.

The format: 8 bytes with the length of a JSON header, the header, the data.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.hf.config_json import read_json
from titanmoe.checkpoint.hf.fetch import CARRIED, INDEX, SINGLE
from titanmoe.checkpoint.hf.tensor_map import ReadNamedBlock, Shape
from titanmoe.checkpoint.move_in_blocks import WRITE_BLOCK_BYTES, split_into_blocks
from titanmoe.checkpoint.tensor_index import StridedData
from titanmoe.config.load import ConfigError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredSlice(NamedTuple):
    """The location of a tensor in a safetensors file."""

    file: Path
    shape: Shape
    dtype: torch.dtype
    start: int
    """Position of its first byte in the file."""


class SafetensorsFolder:
    """The tensors of a folder with one safetensors file, or several and their index."""

    def __init__(self, path: Path, single: str = SINGLE, renamed: Mapping[str, str] = MappingProxyType({})):
        """Read the headers of all files; ConfigError with everything that is missing, damaged or of another dtype.

        Args:
            path: the folder.
            single: the file's name if there is no index.
            renamed: prefixes of tensor names in the files, and what to replace them by.
        """
        self.path, self.single, self.renamed = path, single, renamed
        self.tensors: dict[str, StoredSlice] = {}
        problems: list[str] = []
        for file in self._files(problems):
            try:
                self._add(file, problems)
            except (SafetensorError, OSError) as error:
                problems.append(f"{file} is damaged or truncated: {error}")
        if problems:
            raise ConfigError(problems)

    def _files(self, problems: list[str]) -> list[Path]:
        files = []
        for name in self._names():
            try:
                files.append(safe_files.safe_path(self.path, name))
            except safe_files.NOT_FOUND_ERRORS:
                problems.append(f"{self.path / name} is missing, {INDEX} names it: download that file")
            except safe_files.CheckpointError as error:
                problems.append(str(error))
        return files

    def _names(self) -> list[str]:
        """Return the names of the files: those in the index or, without one, `single`; ConfigError without both."""
        index = self.path / INDEX
        if not index.exists():
            if (self.path / self.single).exists():
                return [self.single]
            others = sorted(file.name for file in self.path.glob("*.bin")) + sorted(
                file.name for file in self.path.glob("*.safetensors")
            )
            listing = f" but {', '.join(others[:4])}, which cannot be read without an index" if others else ""
            fix = "name the folder of a model in safetensors"
            raise ConfigError(f"{self.path} has neither {self.single} nor {INDEX}{listing}: {fix}")
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index} has no weight_map: download the file again")
        return sorted(set(map(str, names.values())))

    def _add(self, file: Path, problems: list[str]) -> None:
        """Add all tensors of a file, by its header, to `tensors`; of other dtypes or in two files, to `problems`."""
        with safe_open(file, "pt"), open(file, "rb") as stream:  # the library checks the header
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for stored_name, entry in sorted(header.items()):
            name = self._renamed(stored_name)
            if (dtype := entry["dtype"]) not in DTYPES:
                known = ", ".join(DTYPES)
                problems.append(f"{file} has {name} of dtype {dtype}: save the tensor as one of {known}")
            elif name in self.tensors:
                problems.append(f"{name} is in {self.tensors[name].file.name} and in {file.name}: remove one of them")
            else:
                start = 8 + size + entry["data_offsets"][0]
                self.tensors[name] = StoredSlice(file, tuple(entry["shape"]), DTYPES[dtype], start)

    def _renamed(self, name: str) -> str:
        begin = next((begin for begin in self.renamed if name.startswith(begin)), "")
        return self.renamed.get(begin, "") + name.removeprefix(begin)

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a tensor, in its stored dtype on the CPU; ConfigError if the file cannot be read.

        Args:
            name: the tensor's name.
            offset: where the block begins in the tensor.
            shape: the block's shape.
        """
        file, full_shape, dtype, start = self.tensors[name]
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        strides = tuple(prod(full_shape[dim + 1 :]) for dim in range(len(full_shape)))
        try:
            with open(file, "rb") as stream:
                return StridedData(start, strides, dtype).read(stream, offset, shape)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {name} cannot be read: {error}: download the file again") from None


# ---- writing


TensorSizes = Mapping[str, tuple[Shape, torch.dtype]]
"""Shape and dtype of each tensor, by name, such as those of one safetensors file that is to be written."""


def nbytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor of this shape and dtype."""
    return prod(shape) * dtype.itemsize


def total_bytes(*files: TensorSizes) -> int:
    """Return the bytes of all tensors in some files, without the files' headers."""
    return sum(nbytes(*size) for tensors in files for size in tensors.values())


def split_into_files(sizes: TensorSizes, limit: int) -> dict[str, TensorSizes]:
    """Distribute tensors over files in the order given; return the files by name.

    The names are Hugging Face's: model.safetensors, or of several model-00001-of-00002.safetensors and so on.

    Args:
        sizes: shape and dtype of each tensor, by name.
        limit: most bytes of a file, unless a single tensor is larger.
    """
    groups: list[dict[str, tuple[Shape, torch.dtype]]] = [{}]
    room = limit
    for name, size in sizes.items():
        if nbytes(*size) > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = size
        room -= nbytes(*size)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


def index_json(files: Mapping[str, TensorSizes]) -> dict[str, Any]:
    """Return the contents of model.safetensors.index.json, given the planned safetensors files by name."""
    return {
        "metadata": {"total_size": total_bytes(*files.values())},
        "weight_map": {name: file for file, tensors in files.items() for name in sorted(tensors)},
    }


def write_file(file: Path, tensors: TensorSizes, make: ReadNamedBlock) -> None:
    """Write a safetensors file block by block; the library's own writer needs all tensors at once.

    `make` returns a block of a tensor in its planned dtype on the CPU, given its name, offset and shape.
    """
    with safetensors_writer(file, tensors) as write:
        for name, (shape, dtype) in tensors.items():
            blocks = split_into_blocks((0,) * len(shape), shape, dtype.itemsize, WRITE_BLOCK_BYTES)
            write(name, (make(name, offset, sizes) for offset, sizes in blocks))


@contextmanager
def safetensors_writer(file: Path, tensors: TensorSizes) -> Iterator[Callable[[str, Iterable[Tensor]], None]]:
    """Open a safetensors file to be written; yield a function that writes a tensor. Fsync the file at the end.

    The function takes a tensor's name, and the tensor in one or more CPU blocks that follow each other in the file.
    Each block is freed once it is written. Tensors are written in any order, each once; in the file those of wide
    dtypes come first, so that all are aligned. It raises a RuntimeError if dtype or bytes are not those planned.

    Raises:
        RuntimeError: at the end, if a planned tensor was not written; its bytes would be zeros.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        end = at + nbytes(shape, dtype)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    missing = dict.fromkeys(tensors)
    with open(file, "wb") as stream:

        def write(name: str, blocks: Iterable[Tensor]) -> None:
            shape, dtype = tensors[name]
            left = nbytes(shape, dtype)
            stream.seek(8 + len(text) + header[name]["data_offsets"][0])
            for block in blocks:
                left -= block.nbytes
                if block.dtype != dtype or left < 0:
                    raise RuntimeError(f"{name}: a block {tuple(block.shape)} {block.dtype}, planned {shape} {dtype}")
                stream.write(block.contiguous().view(-1).view(torch.uint8).numpy())
                del block  # before the next is made
            if left:
                raise RuntimeError(f"{name}: {left} bytes fewer than planned, {shape} {dtype}")
            missing.pop(name, None)

        stream.write(struct.pack("<Q", len(text)) + text)
        yield write
        if missing:
            raise RuntimeError(f"{file}: {next(iter(missing))} was not written, of {len(missing)} such tensors")
        stream.flush()
        os.fsync(stream.fileno())


# ---- what else is in a model's folder


def config_and_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the paths of the config and tokenizer files in a Hugging Face folder, by name, with links resolved.

    CheckpointError if a link leads elsewhere than to Hugging Face's cache: its target would be copied into checkpoints.
    """
    names = (file.name for pattern in CARRIED for file in sorted(folder.glob(pattern)))
    return {name: layout.require_regular(folder, name) for name in names}
