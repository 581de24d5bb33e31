"""Parsing of JSON from files that other programs may have written: bounded depth, one kind of exception.

Called by readers of data, checkpoints, tokenizers and runs.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
"""Largest nesting of lists and objects: far more than our files have, and safe for recursive functions."""


class TooDeep(ValueError):
    """The error for JSON that is nested deeper than MAX_DEPTH."""


def is_deeper(data: Any, depth: int) -> bool:
    """Return whether lists and dicts are nested deeper than `depth`."""
    level = [data]
    for _ in range(depth + 1):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError alone, if it is not JSON or nested deeper than MAX_DEPTH."""
    too_deep = TooDeep(f"lists or objects are nested too deep to be read, more than {MAX_DEPTH}")
    try:
        data = json.loads(text)
    except RecursionError:
        raise too_deep from None
    if is_deeper(data, MAX_DEPTH):
        raise too_deep
    return data
