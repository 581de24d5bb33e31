"""local.json in a run's checkpoint folder: which start of the run made the local copies that count. Needs no torch.

The copies are in the memory of hosts, which come and go; this file is where the checkpoints are. It has the token of
the last start that made a complete set of copies. A set with another token is from another run, or from steps that the
run went back from, and is never used.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from titanmoe.checkpoint import inside, layout
from titanmoe.checkpoint.inside import ABSENT, CheckpointError
from titanmoe.config.parse_json import parse_json

NAME = "local.json"


@dataclass(frozen=True)
class LocalRecord:
    start: str
    """A token drawn for each start."""
    global_batch_size: int
    """For a start on another number of ranks, which keeps it. Later, ordinary checkpoints have it too."""


def read(folder: Path) -> LocalRecord | None:
    try:
        found = parse_json(inside.read(folder, NAME, 1 << 16))
        ledger = LocalRecord(found["start"], found["global_batch_size"])
        if type(ledger.start) is not str or type(ledger.global_batch_size) is not int:
            raise TypeError("an entry has the wrong type")
        return ledger
    except ABSENT:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME} is damaged: {type(error).__name__} {error}") from None


def write(folder: Path, ledger: LocalRecord) -> None:
    fresh = folder / f"{NAME}.new"
    layout.write_text(fresh, json.dumps(asdict(ledger)) + "\n")
    os.replace(fresh, folder / NAME)
    layout.sync(folder)
