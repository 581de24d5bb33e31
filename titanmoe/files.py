"""Helpers of all rooms: sizes and ranges as text; checksums, fsync of a folder, the message of a failed write.

Imports nothing of titanmoe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BLOCK = 1 << 22
"""Bytes that are read at once for a checksum."""


def format_bytes(count: float) -> str:
    """Return a number of bytes as text with three digits and a decimal unit, such as "1.23 GB"."""
    unit = 0
    while float(f"{count:.3g}") >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}"


def format_ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Return ascending numbers as text, consecutive ones as a range, such as "0-2,4"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges)


def stream_crc32(stream: BinaryIO, size: float = float("inf")) -> int:
    """Return the CRC-32 of the next `size` bytes of a stream, or of all that are left if it has fewer."""
    crc = 0
    while size > 0 and (block := stream.read(int(min(size, BLOCK)))):
        crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def fsync_folder(folder: Path) -> None:
    """Fsync a directory, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(file: Path, error: OSError, missing: int) -> str:
    """Return the message for a failed write; if a disk, quota or file is full, with the bytes needed and free.

    Args:
        file: the file being written.
        error: the error that the write raised.
        missing: bytes that are still to be written, at least.
    """
    text = f"{file}: {error.strerror}"
    if error.errno not in DISK_FULL_ERRNOS:
        return text
    text += f": {missing:,} more bytes are needed"
    with contextlib.suppress(OSError):
        text += f" and {shutil.disk_usage(file.parent).free:,} are free there"
    return text
