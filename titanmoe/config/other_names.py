"""Options under the names that other programs, or earlier versions, have for them."""

from __future__ import annotations

from collections.abc import Sequence

RANKS = ("nproc", "nproc-per-node", "nprocs", "world", "world-size", "gpus", "num-gpus", "np")


def hint(name: str, texts: Sequence[str]) -> str:
    """What to write in place of an unknown option; empty if the name is not known from elsewhere."""
    if name.replace("_", "-") in RANKS:
        return f"the number of ranks is given by --ranks {texts[0] if texts else 'N'}"
    return ""
