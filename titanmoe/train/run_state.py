"""How far a run has come; with the tensors and the loader's place, this is what a resumed run needs."""

from __future__ import annotations

from dataclasses import dataclass

from titanmoe.train.skips import Skips


@dataclass
class RunState:
    skips: Skips
    step: int = 0
    tokens: float = 0.0
    """How many were trained on so far, on all ranks, without padding."""

    @property
    def updates(self) -> int:
        return self.step - self.skips.skipped
