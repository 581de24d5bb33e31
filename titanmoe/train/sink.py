"""What is told of a step, and what shows it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Report(NamedTuple):
    """Of one step, or of those since the report before."""

    step: int
    record: dict[str, float]
    """The line of metrics.jsonl."""
    load: dict[int, list[float]]
    """Of this step: tokens of every expert, by layer."""
    smoothed: float
    """The loss, averaged over about ten steps."""
    eta: float | None
    """Seconds to the last step; unknown at the first."""


class Sink(Protocol):
    def log(self, report: Report) -> None: ...

    def event(self, step: int, kind: str, text: str) -> None: ...

    def close(self) -> None: ...
