"""Open files in a folder that anyone may have made, with retries; no link is followed but into Hugging Face's cache.

Also the errors of a checkpoint and their texts: what a user sees when a file is damaged, or a network file system away.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
RETRY_DELAYS_S = (0.1, 0.5, 2.0, 8.0)
"""Seconds to wait before each retry."""
TEMPORARY_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "ETIMEDOUT", "EAGAIN", "EBUSY", "EINTR", "EREMOTEIO", "ENFILE", "EMFILE", "ENOTCONN"),
        *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
    )
    if hasattr(errno, name)
)
"""Errors of network file systems that pass once the server is back."""


NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError)
"""Errors that say for certain that a file does not exist."""


ANOTHER = "use another checkpoint (titanmoe checkpoint ls RUN)"
"""Advice of messages about a checkpoint that cannot be repaired."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is a line for the user, and names the file.

    Args:
        problem: what is wrong.
        fix: what to do about it, with which the message ends; "" if `problem` says so, or the caller knows better.
    """

    def __init__(self, problem: str, fix: str = ""):
        super().__init__(f"{problem}: {fix}" if fix else problem)
        self.problem = problem


class NotRegularFile(OSError):
    """The file is a link, or not a regular file."""


class Unreadable(CheckpointError):
    """The file system did not answer: the file may be intact."""


def error_text(error: OSError) -> str:
    """Return an OSError as "FILE: REASON", for errors that lack a file or an errno too."""
    why = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {why}" if error.filename else why


def read_error(file: Path, error: Exception) -> CheckpointError:
    """Return a one-line CheckpointError for an exception raised while reading a damaged or foreign file.

    An exception that is a CheckpointError is returned unchanged.
    """
    if isinstance(error, CheckpointError):
        return error
    why = f"{type(error).__name__} {' '.join(str(error).split()):.300}"
    return CheckpointError(f"{file} cannot be read: {why}", ANOTHER)


def with_retries(path: Path, work: Callable[[], T]) -> T:
    """Return what `work` returns; after temporary OSErrors it is called again, up to four times within 11 seconds.

    Args:
        path: the file or folder, for messages.
        work: what to call.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file, or the path has a NUL or half a surrogate pair.
        Unreadable: another OSError, or a temporary one that stays. What is no OSError passes unchanged.
    """
    for seconds in (*RETRY_DELAYS_S, None):
        try:
            return work()
        except NOT_FOUND_ERRORS:
            raise
        except ValueError as error:
            if "\0" not in str(path) and not isinstance(error, UnicodeEncodeError):
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        except OSError as error:
            if seconds is None or error.errno not in TEMPORARY_ERRNOS:
                raise Unreadable(f"{path}: {error.strerror or error}") from None
        time.sleep(seconds)
    raise AssertionError


def exists(path: Path) -> bool:
    """Return whether a path exists, even as a dangling link; Unreadable if the disk does not answer.

    Path.exists() would take any error for a no.
    """
    try:
        with_retries(path, lambda: os.lstat(path))
    except NOT_FOUND_ERRORS:
        return False
    return True


def safe_path(folder: Path, name: str) -> Path:
    """Return the resolved path of a regular file in the folder.

    Folders of Hugging Face's cache (models--x/snapshots/y) consist of links to models--x/blobs, which are followed.

    Raises:
        CheckpointError: another symbolic link leads to it, it is no regular file, or `name` leads out of the folder.
        FileNotFoundError, NotADirectoryError: there is no such file.
    """
    shown, parts = folder / name, _components(folder, name)
    root = Path(os.path.realpath(folder))
    file, cache = root.joinpath(*parts), root.parent.parent / "blobs"
    real = Path(os.path.realpath(file))
    if real != file and not (root.parent.name == "snapshots" and real.parent == cache):
        raise CheckpointError(f"{shown} is a link to {real}: links are not followed, put the file itself there")
    mode = with_retries(shown, lambda: os.lstat(real)).st_mode
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{shown} is not a regular file: put the file itself there")
    return real


def _components(folder: Path, name: str) -> list[str]:
    """Return the components of a relative name; CheckpointError if it leads out of the folder."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{folder} names {name!r}, which is not in it: only files in the folder itself are read")
    return parts


WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_in(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file in a folder with flags of os.open; return its descriptor. The folder itself may be a link.

    Each component of `name`, a path in the folder, is opened relative to the one before and not followed if it is a
    link, so nothing that is put in its place meanwhile leads elsewhere.

    Raises:
        NotRegularFile: it is a link, a pipe, a folder or a device.
        CheckpointError: `name` leads out of the folder, as "../x" does.
        OSError: it cannot be opened, such as FileNotFoundError.
    """
    *outer, last = _components(folder, name)
    at = os.open(folder, _FOLDER)
    try:
        for part in outer:
            inner = _open_at(at, part, _FOLDER, folder / name)
            os.close(at)
            at = inner
        descriptor = _open_at(at, last, flags | os.O_NONBLOCK | os.O_CLOEXEC, folder / name)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFile(errno.EINVAL, "is not a regular file: put the file itself there", str(folder / name))
    return descriptor


def _open_at(at: int, part: str, flags: int, shown: Path) -> int:
    try:
        return os.open(part, flags | os.O_NOFOLLOW, 0o666, dir_fd=at)
    except OSError as error:  # of a link: ELOOP, or ENOTDIR where a folder is wanted
        try:
            target = os.readlink(part, dir_fd=at)
        except OSError:
            raise type(error)(error.errno, error.strerror, str(shown)) from None
        text = f"is a link to {target}: links are not followed, put the file itself there"
        raise NotRegularFile(errno.ELOOP, text, str(shown)) from None


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file in a folder for reading, with retries. Links within Hugging Face's cache are followed.

    Raises:
        CheckpointError: it is anything else, or cannot be read.
        FileNotFoundError, NotADirectoryError: there is no such file.
    """

    def opened() -> BinaryIO:
        try:
            return open(open_in(folder, name), "rb")
        except NotRegularFile:
            blob = safe_path(folder, name)  # only a link into the blobs of Hugging Face's cache is followed
            is_blob = blob.parent.name == "blobs"
            return open(open_in(blob.parent, blob.name) if is_blob else open_in(folder, name), "rb")

    return with_retries(folder / name, opened)


def write(folder: Path, name: str, data: bytes, fsync: bool = False) -> None:
    """Write `data` to a file in a folder, over an old one in place; OSError if it is a link or cannot be written."""
    with open(open_in(folder, name, WRITE), "wb") as stream:
        stream.write(data)
        if fsync:
            stream.flush()
            os.fsync(stream.fileno())


def refuse_link(path: Path) -> Path:
    """Return the path unchanged; CheckpointError if it is a link."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}: links are not followed, name that folder itself"
        )
    return path


def read(folder: Path, name: str, limit: int) -> bytes:
    """Return the contents of a file in a folder.

    Raises:
        CheckpointError: it has more than `limit` bytes, is no regular file or a link (Hugging Face's cache apart), or
            cannot be read.
        FileNotFoundError, NotADirectoryError: there is no such file.
    """

    def read_stream() -> bytes:
        with open_file(folder, name) as stream:
            return stream.read(limit + 1)

    data = with_retries(folder / name, read_stream)
    if len(data) > limit:
        raise CheckpointError(f"{folder / name} has more than {limit:,} bytes, the limit: restore the file")
    return data


# ---- a disk that does not answer


class SaveProgress:
    """Name of what this rank is doing in a save, which the training thread reports if the save does not end.

    Called with a text, a function and its arguments, it returns the function's result and has the text as `what`
    meanwhile. Before and after, `what` is WAITING.
    """

    WAITING = "waiting for the other ranks"

    def __init__(self) -> None:
        self.what = self.WAITING

    def __call__(self, what: str, work: Callable[..., T], *args: Any) -> T:
        self.what = what
        try:
            return work(*args)
        finally:
            self.what = self.WAITING
