"""What a run that has just begun is waiting for, on one line of a terminal that the next one replaces."""

from __future__ import annotations

import contextlib
import os
import sys

ERASE = "\r\x1b[K"


def waiting(what: str) -> None:
    """ "" removes the line. Only on rank 0, and not where a log would keep every line."""
    if os.environ.get("RANK", "0") != "0" or os.environ.get("TERM") == "dumb":
        return
    with contextlib.suppress(OSError, ValueError):  # a console that fails, or is closed, must not end the run
        if sys.stdout.isatty():
            sys.stdout.write(f"{ERASE}{what} ..." if what else ERASE)
            sys.stdout.flush()
