"""Find where the elements of a tensor are that torch.save wrote, without unpickling: nothing that it names is called.

The file is an uncompressed zip archive. Its data.pkl is a pickle of a call,

    torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, False, OrderedDict())

or _rebuild_tensor_v3 with a dtype at the end; its data/0 has the numbers. The operations of the pickle are followed one
by one, as far as such calls need them, and must have described exactly this.
"""

from __future__ import annotations

import struct
import zipfile
from typing import Any, BinaryIO, NamedTuple

import torch

from titanmoe.checkpoint.follow_pickle import CALLS, VALUES, GlobalName, PickledCall, StorageRef, follow

Sizes = tuple[int, ...]
MOST_BYTES = 1 << 17
"""Bytes of the pickle or of the archive's list of files; torch.save needs a few hundred."""
STORAGES = {
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
"""Dtypes by the name of their storage, which _rebuild_tensor_v2 has; other dtypes have _rebuild_tensor_v3."""
OPERATIONS = VALUES | CALLS | {"NEWFALSE", "BINPERSID"}
"""Pickle opcodes with which torch.save describes one tensor: nothing of it is used twice."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class SavedTensor(NamedTuple):
    """The layout of one tensor in a file that torch.save wrote."""

    dtype: torch.dtype
    shape: Sizes
    strides: Sizes
    start: int
    """Position in the file of its first element."""
    end: int
    """Position after the last byte of its storage."""


def read_saved_tensor(file: BinaryIO) -> SavedTensor:
    """Return dtype, shape, strides and position of the one tensor in a torch.save file, without its elements.

    Reads only the zip archive's directory and its pickle, of at most MOST_BYTES each.

    Raises:
        ValueError: the file is not what torch.save writes for one tensor.
    """
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, struct.error, NotImplementedError) as error:
        raise ValueError(f"not an archive of torch.save: {error}") from None
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise ValueError("the archive is compressed, which titanmoe does not do: the contents could be of any size")
    if len(entries) < len(archive.infolist()) or "data.pkl" not in entries:
        raise ValueError(f"the archive does not have the files of one tensor: {', '.join(entries):.80}")
    start, end = _contents_range(file, entries["data.pkl"])
    if end - start > MOST_BYTES:
        raise ValueError(f"the description of the tensor has {end - start:,} bytes, and the limit is {MOST_BYTES:,}")
    file.seek(start)
    dtype, offset, shape, strides = _parse_rebuild_call(follow(file.read(end - start), OPERATIONS, "one tensor"))
    if "data/0" not in entries:
        raise ValueError("the archive has no numbers (data/0)")
    start, end = _contents_range(file, entries["data/0"])
    return SavedTensor(dtype, shape, strides, start + offset * dtype.itemsize, end)


def _contents_range(file: BinaryIO, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the positions in `file` of the first byte of a zip entry's contents, and of the byte after their last.

    Moves the position of `file`. Raises a ValueError if the entry does not begin where the archive's directory says.
    """
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise ValueError(f"{entry.filename} is not where the list of files says")
    _, name, extra = _LOCAL_HEADER.unpack(header)
    start = entry.header_offset + _LOCAL_HEADER.size + name + extra
    return start, start + entry.file_size


def _parse_rebuild_call(value: Any) -> tuple[torch.dtype, int, Sizes, Sizes]:
    """Return dtype, offset in the storage, shape and strides of the tensor that torch.load would rebuild.

    Args:
        value: what the file's pickle describes; a ValueError if that is not one tensor on a CPU.
    """
    nothing = PickledCall(GlobalName("collections OrderedDict"), ())
    match value:
        case PickledCall(
            GlobalName("torch._utils _rebuild_tensor_v2"),
            (StorageRef(("storage", GlobalName(storage), "0", "cpu", _)), offset, shape, strides, False, hooks),
        ):
            dtype = STORAGES.get(storage.removeprefix("torch ").removesuffix("Storage"))
        case PickledCall(
            GlobalName("torch._utils _rebuild_tensor_v3"),
            (
                StorageRef(("storage", GlobalName("torch.storage UntypedStorage"), "0", "cpu", _)),
                offset,
                shape,
                strides,
                False,
                hooks,
                GlobalName(dtype_name),
            ),
        ):
            dtype = getattr(torch, dtype_name.removeprefix("torch "), None)
        case _:
            raise ValueError("the pickle is not one tensor of a CPU")
    numbers = [offset, *shape, *strides] if isinstance(shape, tuple) and isinstance(strides, tuple) else [None]
    if not isinstance(dtype, torch.dtype) or hooks != nothing or len(shape) != len(strides):
        raise ValueError("the pickle is not one tensor of a dtype that is known")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError("the shape or strides are not sizes")
    return dtype, offset, shape, strides
