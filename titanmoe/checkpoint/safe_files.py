"""Reading files in a folder that anyone may have made: without leaving the folder, and with retries for its disk."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
WAITS = (0.1, 0.5, 2.0, 8.0)
"""Seconds to wait before each retry."""
TEMPORARY_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "ETIMEDOUT", "EAGAIN", "EBUSY", "EINTR", "EREMOTEIO", "ENFILE", "EMFILE", "ENOTCONN"),
        *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
    )
    if hasattr(errno, name)
)
"""What network file systems answer while a server is away."""


ABSENT = (FileNotFoundError, NotADirectoryError)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is a line for the user, and names the file."""


class Unreadable(CheckpointError):
    """The file system gave no answer: the file may be intact."""


def error_text(error: OSError) -> str:
    """Some errors of the standard library have neither a file nor an errno."""
    why = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {why}" if error.filename else why


def read_error(file: Path, error: Exception) -> CheckpointError:
    """For a file that is not as it should be, in one line."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{file} cannot be read: {type(error).__name__} {' '.join(str(error).split()):.300}")


def with_retries(path: Path, work: Callable[[], T]) -> T:
    """What work returns. An error that may pass is retried, after longer and longer waits; one that stays is
    Unreadable.

    Only the answer that there is nothing, ABSENT, is passed on.
    """
    for seconds in (*WAITS, None):
        try:
            return work()
        except ABSENT:
            raise
        except OSError as error:
            if seconds is None or error.errno not in TEMPORARY_ERRORS:
                raise Unreadable(f"{path}: {error.strerror or error}") from None
        time.sleep(seconds)
    raise AssertionError


def exists(path: Path) -> bool:
    """Whether the folder has such an entry, even a dangling link. Path.exists() takes any error for a no."""
    try:
        with_retries(path, lambda: os.lstat(path))
    except ABSENT:
        return False
    return True


def safe_path(folder: Path, name: str) -> Path:
    """The path of a file of the folder: a regular file in it, or in a folder in it, that is not reached by a link.

    Folders of Hugging Face's cache (models--x/snapshots/y) consist of links to models--x/blobs, which are followed.
    """
    shown, parts = folder / name, name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{folder} names {name!r}, which is not in it: only files in the folder itself are read")
    root = Path(os.path.realpath(folder))
    file, cache = root.joinpath(*parts), root.parent.parent / "blobs"
    real = Path(os.path.realpath(file))
    if real != file and not (root.parent.name == "snapshots" and real.parent == cache):
        raise CheckpointError(f"{shown} is a link to {real}: links are not followed, put the file itself there")
    mode = with_retries(shown, lambda: os.lstat(real)).st_mode
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{shown} is not a regular file")
    return real


def open_file(folder: Path, name: str) -> BinaryIO:
    # Whatever has been put in its place since: follow no link, wait for no pipe.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = safe_path(folder, name)
    return with_retries(folder / name, lambda: open(os.open(file, flags), "rb"))


def read(folder: Path, name: str, limit: int) -> bytes:
    """All of a file, which may have at most that many bytes."""

    def read_stream() -> bytes:
        with open_file(folder, name) as stream:
            return stream.read(limit + 1)

    data = with_retries(folder / name, read_stream)
    if len(data) > limit:
        raise CheckpointError(f"{folder / name} has more than {limit:,} bytes, the limit for such a file")
    return data
