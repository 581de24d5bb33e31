"""Measure where this rank's time goes in a step: computing, reading data, and waiting in the messages of each axis.

`StepTimes` observes the step. `titanmoe.watch.stragglers` takes its rows and compares the ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from titanmoe.observe import Observer

COMPUTE, DATA, WAITS = 0, 1, 2
"""The columns of a row, in seconds. Waiting has one for each axis, from the third on; computing is what remains."""


class Timer(Protocol):
    """A clock of the device that steps are measured with."""

    every: int
    """The period of measured steps: one step in this many."""
    unreadable_steps: int
    """The count of measured steps that cannot be read yet when a step ends."""

    def mark(self) -> Any:
        """Return an object that stands for the present moment on the device, such as a recorded CUDA event."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that the device has reached, the earlier first. Never waits."""


class HostTimer:
    """The timer of CPUs: the host's clock."""

    every, unreadable_steps, mark = 4, 0, staticmethod(time.monotonic_ns)

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) / 1e9


class CudaEventTimer:
    """The timer of GPUs: events on the stream that waits, because a GPU runs asynchronously.

    Reading them never blocks: by then the host has waited for the loss of the next step.
    """

    every, unreadable_steps = 4, 1

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3


Wait = tuple[int, Any, Any]
"""A wait for a message: the column of its axis, and the marks of its begin and end."""


@dataclass(eq=False)
class MeasuredStep:
    """The marks of a step that is measured, whose seconds are not read yet. None stands for a mark to come."""

    step: int
    begin: Any
    data: Any = None
    """The mark when data had been read and counted."""
    end: Any = None
    data_waits: list[Wait] = field(default_factory=list)
    """The waits before `data`."""
    waits: list[Wait] = field(default_factory=list)
    """The waits since `data`, or since `begin` until then."""


class StepTimes(Observer):
    """Observer that measures this rank's steps: seconds of computing, of reading data, and of waiting on each axis.

    A step lasts from the beginning of its first phase to the end of its update. Not measured are the time between
    steps, such as a checkpoint or a validation, generation and rewards and what is before them, the first step of a
    process, and steps without an update.

    Only waits of our own code are measured. On a GPU, FSDP communicates on streams of its own: where computation has to
    wait for them, that counts as computing.
    """

    def __init__(self, axes: Sequence[str], groups: Mapping[str, int], timer: Timer):
        """Prepare a column of waits for each distinct entry of `axes`.

        Args:
            axes: The axes of each process group, such as "ep x etp". Groups with the same axes share a column.
            groups: The index in `axes` of each process group that this rank is in, by torch's name for the group.
            timer: The clock of the device.
        """
        self.axes = list(dict.fromkeys(axes))
        self.column = {name: WAITS + self.axes.index(axes[number]) for name, number in groups.items()}
        self.timer, self.mark = timer, timer.mark
        self.messages = [0] * len(self.axes)
        """Number of waits of this rank on each axis, in the last step that was read."""
        self.current: MeasuredStep | None = None
        """The step that is being measured, if any."""
        self._first: int | None = None
        self._wait_begin: tuple[int, Any] | None = None
        self._measured: deque[MeasuredStep] = deque()

    def phase(self, name: str, step: int) -> None:
        if name == "data":
            self._first = step if self._first is None else self._first
            measures = step > self._first and step % self.timer.every == 0
            self.current, self._wait_begin = MeasuredStep(step, self.mark()) if measures else None, None
        elif (current := self.current) is None:
            return
        elif name in ("generate", "reward"):
            current.begin, current.waits = None, []
        elif name == "forward_backward" and current.data is None:
            current.data, current.data_waits, current.waits = self.mark(), current.waits, []
            if current.begin is None:
                current.begin, current.data_waits = current.data, []
        elif name not in ("forward_backward", "optimizer"):
            self.current = None

    def waits(self, group: str) -> None:
        if self.current and (column := self.column.get(group)) is not None:
            self._wait_begin = column, self.mark()

    def arrived(self) -> None:
        current, begin = self.current, self._wait_begin  # read once: a thread that saves waits too
        if current and begin:
            current.waits.append((*begin, self.mark()))
            self._wait_begin = None

    def updated(self, step: int) -> None:
        if self.current and self.current.data is not None:
            self.current.end = self.mark()
            self._measured.append(self.current)
            self.current = None

    def take(self) -> tuple[list[int], list[list[float]]]:
        """Remove and return the measured steps whose times can be read without blocking, as (step numbers, rows).

        A row has the seconds of a step: computing, reading data, then waiting on each entry of `axes`. All ranks return
        the same steps.
        """
        steps, rows = [], []
        while len(self._measured) > self.timer.unreadable_steps:
            step = self._measured.popleft()
            steps.append(step.step)
            rows.append(self._row(step))
        return steps, rows

    def _row(self, step: MeasuredStep) -> list[float]:
        """Return the seconds of a step by column, and set `messages` to the number of waits on each axis."""
        row, seconds = [0.0] * (WAITS + len(self.axes)), self.timer.seconds
        for column, begin, end in step.data_waits:
            row[column] += seconds(begin, end)
        row[DATA] = seconds(step.begin, step.data) - sum(row)
        for column, begin, end in step.waits:
            row[column] += seconds(begin, end)
        row[COMPUTE] = seconds(step.begin, step.end) - sum(row)
        self.messages = [0] * len(self.axes)
        for column, _, _ in step.data_waits + step.waits:
            self.messages[column - WAITS] += 1
        return row
