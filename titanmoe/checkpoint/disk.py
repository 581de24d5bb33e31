"""Messages about a disk that is full, or that does not answer."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_error(file: Path, error: OSError, missing: int) -> str:
    """missing: bytes that are still to be written, at least."""
    text = f"{file}: {error.strerror}"
    if error.errno not in NO_ROOM:
        return text
    text += f": {missing:,} more bytes are needed"
    with contextlib.suppress(OSError):
        text += f" and {shutil.disk_usage(file.parent).free:,} are free there"
    return text


class SaveProgress:
    """What this rank is doing in a save: read by another thread if the save does not end."""

    WAITING = "waiting for the other ranks"

    def __init__(self) -> None:
        self.what = self.WAITING

    def __call__(self, what: str, work: Callable[..., T], *args: Any) -> T:
        self.what = what
        try:
            return work(*args)
        finally:
            self.what = self.WAITING
