"""JSON of files that others wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """ValueError, and nothing else, for what cannot be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects lie in each other too deep to be read") from None
