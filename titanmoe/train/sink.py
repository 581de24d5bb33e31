"""What is reported about a step, and what shows it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Report(NamedTuple):
    """On one step, or on the steps since the last report."""

    step: int
    record: dict[str, float]
    """The line of metrics.jsonl."""
    load: dict[int, list[float]]
    """The number of tokens of every expert in this step, by layer."""
    smoothed: float
    """The loss, averaged over about ten steps."""
    eta: float | None
    """Seconds until the last step is done; None at the first step."""
    wrong: str = ""
    """What is wrong with the loss, for as long as it is."""


class Sink(Protocol):
    def log(self, report: Report) -> None: ...

    def event(self, step: int, kind: str, text: str) -> None: ...

    def close(self) -> None: ...
