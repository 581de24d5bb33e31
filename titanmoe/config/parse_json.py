"""Parses JSON from files that other programs wrote."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
"""Nesting of lists and objects: far more than any file of ours has, and harmless to whatever walks through it."""


class TooDeep(ValueError):
    """Lists or objects nested deeper than anyone would mean to."""


def parse_json(text: str | bytes) -> Any:
    """ValueError, and nothing else, if the text cannot be read."""
    too_deep = TooDeep(f"lists or objects are nested too deep to be read, more than {MAX_DEPTH}")
    try:
        data = json.loads(text)
    except RecursionError:
        raise too_deep from None
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise too_deep
    return data
