"""What a rank is doing, in memory that the other ranks of its machine can read even after it has stopped or died.

The step only stores a few numbers there; it makes no system call. The file is deleted as soon as all ranks of the
machine have opened it, so nothing is left behind.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

PHASE_NAMES = ("starting", "data", "forward and backward", "norm and update", "between steps")
STARTING, BETWEEN = 0, PHASE_NAMES.index("between steps")
RUNNING, ENDED, FAILED = range(3)

ANSWER, END = 32, 8192
"""In words of 8 bytes: where the text for the other ranks begins, and where the memory ends."""
# Indices into a heartbeat's numbers.
(PID, STATE, FIRST_STEP, STEP, PHASE, POSITION) = range(6)
"""FIRST_STEP: the step that this start of the run began with. PHASE: an index into PHASE_NAMES."""
(STEP_BEGUN, PREVIOUS_BEGUN) = range(6, 8)
"""When this step and the one before it began, in nanoseconds of `time.time_ns`."""
(WAITING, ALARM, REPORTED, ANSWER_LENGTH) = range(8, 12)
"""WAITING: whether the rank was inside a collective when its watchdog thread last ran. REPORTED: whether the report is
out."""
(PROGRESS, TICK) = range(12, 14)
"""When the step last moved on, and when the watchdog thread last ran, in nanoseconds of `time.monotonic_ns`."""


class Position(NamedTuple):
    """Where a rank is in forward and backward."""

    stage: int = 0
    """Of the pipeline."""
    microbatch: int = 0
    layer: int = -1
    """-1 for none."""
    backward: bool = False

    def pack(self) -> int:
        return self.stage << 48 | self.microbatch << 17 | self.layer + 1 << 1 | self.backward

    @staticmethod
    def unpack(number: int) -> Position:
        return Position(number >> 48, number >> 17 & 0x7FFFFFFF, (number >> 1 & 0xFFFF) - 1, bool(number & 1))


class Heartbeat:
    def __init__(self, path: Path, create: bool = False):
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, 8 * END)  # writing to a full disk would otherwise kill the rank
            self.memory = mmap.mmap(descriptor, 8 * END)
        finally:
            os.close(descriptor)
        self.numbers = memoryview(self.memory).cast("Q")
        if create:
            self.numbers[PID] = os.getpid()
            self.enter_phase(STARTING)
            self.tick(waiting=False)

    # ---- written by the rank itself

    def enter_phase(self, phase: int) -> None:
        self.numbers[PHASE] = phase
        self.enter(Position())

    def enter(self, position: Position) -> None:
        self.numbers[POSITION] = position.pack()
        self.numbers[PROGRESS] = monotonic_ns()

    def tick(self, waiting: bool) -> None:
        """Called by the watchdog thread."""
        self.numbers[WAITING] = waiting
        self.numbers[TICK] = monotonic_ns()

    def write_answer(self, text: bytes) -> None:
        """For the other ranks of this machine."""
        self.numbers[ANSWER_LENGTH] = 0
        text = text[: 8 * (END - ANSWER)]
        self.memory[8 * ANSWER : 8 * ANSWER + len(text)] = text
        self.numbers[ANSWER_LENGTH] = len(text)

    # ---- read by any rank of the machine

    @property
    def position(self) -> Position:
        return Position.unpack(self.numbers[POSITION])

    @property
    def last_progress(self) -> float:
        return self.numbers[PROGRESS] / 1e9

    @property
    def step_times(self) -> tuple[int, int]:
        """When the current and the previous step began, in nanoseconds of the clock that shows the date."""
        return self.numbers[STEP_BEGUN], self.numbers[PREVIOUS_BEGUN]

    @property
    def is_waiting(self) -> bool:
        return bool(self.numbers[WAITING])

    def answer(self) -> bytes:
        return self.memory[8 * ANSWER : 8 * ANSWER + self.numbers[ANSWER_LENGTH]]
