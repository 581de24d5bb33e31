"""Where this rank's time goes, step by step: computing, reading data, and waiting in the messages of each axis."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from titanmoe.observe import Observer

COMPUTE, DATA, WAITS = 0, 1, 2
"""Columns of a row, in seconds; waiting has one for each axis, from the third on. Computing is the rest of the step."""


class Marks(Protocol):
    every: int
    """One step in this many is measured."""
    behind: int
    """How many measured steps cannot be read yet when a step ends."""

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...


class HostMarks:
    every, behind, mark = 4, 0, staticmethod(time.monotonic_ns)

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) / 1e9


class StreamMarks:
    """Events on the stream that waits, because a GPU runs behind the program. Reading them never blocks: by then the
    host has waited for the loss of the next step.
    """

    every, behind = 4, 1

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3


Wait = tuple[int, Any, Any]
"""The column of its axes, and marks at both ends."""


class MeasuredStep(NamedTuple):
    step: int
    begin: Any
    data: Any
    """When data had been read and counted."""
    end: Any
    first: list[Wait]
    """Waits until then."""
    spans: list[Wait]
    """Waits after it."""


class StepTimes(Observer):
    """A step lasts from the beginning of its first phase to the end of its update. Not counted: what happens between
    steps, such as a checkpoint or a validation, the first step of a process, and steps without an update.

    Waits are those of our own code. On a GPU, FSDP sends on streams of its own: where the computing has to wait for
    them, that counts as computing.
    """

    def __init__(self, axes: Sequence[str], groups: Mapping[str, int], marks: Marks):
        """axes: those of each group, by its number; groups with the same axes share a column. groups: the numbers of
        this rank's groups by torch's names.
        """
        self.axes = list(dict.fromkeys(axes))
        self.column = {name: WAITS + self.axes.index(axes[number]) for name, number in groups.items()}
        self.marks, self.mark = marks, marks.mark
        self.messages = [0] * len(self.axes)
        """For each axis, how often this rank waited in the last step that was read."""
        self.step = 0
        """The step being measured, or 0."""
        self.spans: list[Wait] = []
        """The waits of this step, since data had been read."""
        self._first: int | None = None
        self._begin = self._data = None
        self._since: tuple[int, Any] | None = None
        self._early: list[Wait] = []
        self._measured: deque[MeasuredStep] = deque()

    def phase(self, name: str, step: int) -> None:
        if name == "data":
            self._first = step if self._first is None else self._first
            self.step = step if step > self._first and step % self.marks.every == 0 else 0
            self._data, self._since, self.spans = None, None, []
            self._begin = self.mark() if self.step else None
        elif name == "forward_backward" and self.step and self._data is None:
            self._data, self._early, self.spans = self.mark(), self.spans, []
        elif name not in ("forward_backward", "optimizer"):
            self.step = 0

    def waits(self, group: str) -> None:
        if self.step and (column := self.column.get(group)) is not None:
            self._since = column, self.mark()

    def arrived(self) -> None:
        if self._since is not None:
            self.spans.append((*self._since, self.mark()))
            self._since = None

    def updated(self, step: int) -> None:
        if self.step and self._data is not None:
            self._measured.append(
                MeasuredStep(self.step, self._begin, self._data, self.mark(), self._early, self.spans)
            )
            self.step = 0

    def take(self) -> tuple[list[int], list[list[float]]]:
        """Steps that can be read by now and have not been taken, with a row for each; the same steps on all ranks."""
        steps, rows = [], []
        while len(self._measured) > self.marks.behind:
            step = self._measured.popleft()
            steps.append(step.step)
            rows.append(self._row(step))
        return steps, rows

    def _row(self, step: MeasuredStep) -> list[float]:
        row, seconds = [0.0] * (WAITS + len(self.axes)), self.marks.seconds
        for column, begin, end in step.first:
            row[column] += seconds(begin, end)
        row[DATA] = seconds(step.begin, step.data) - sum(row)
        for column, begin, end in step.spans:
            row[column] += seconds(begin, end)
        row[COMPUTE] = seconds(step.begin, step.end) - sum(row)
        self.messages = [0] * len(self.axes)
        for column, _, _ in step.first + step.spans:
            self.messages[column - WAITS] += 1
        return row
