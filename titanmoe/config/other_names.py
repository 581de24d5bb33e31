"""Options under the names that other programs, or earlier versions, have for them, and options that are gone."""

from __future__ import annotations

from collections.abc import Sequence

RANKS = ("nproc", "nproc-per-node", "nprocs", "world", "world-size", "gpus", "num-gpus", "np")

REMOVED = dict.fromkeys(
    ("checkpoint.local", "checkpoint.local_folder"),
    "a run no longer keeps copies in the memory of its hosts: leave it out, and set checkpoint.interval to as many "
    "steps as you can afford to repeat",
)
"""What to do instead, by the path of a field that earlier versions had."""


def hint(name: str, texts: Sequence[str]) -> str:
    """What to write in place of an unknown option; empty if the name is not known from elsewhere."""
    if name.replace("_", "-") in RANKS:
        return f"the number of ranks is given by --ranks {texts[0] if texts else 'N'}"
    return REMOVED.get(name, "")
