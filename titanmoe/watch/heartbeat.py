"""The heartbeat of a rank: what it is doing, in memory that the other ranks of its machine can read.

They can read it even after the rank has stopped or died. The step only stores a few integers there and makes no system
call. The memory is a mapped file (`titanmoe.watch.machines`), deleted as soon as all ranks of the machine have opened
it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

PHASE_NAMES = ("starting", "data", "generate", "reward", "forward and backward", "norm and update", "between steps")
STARTING, BETWEEN = 0, PHASE_NAMES.index("between steps")
RUNNING, ENDED, FAILED = range(3)

REPLY, END = 32, 8192
"""The offsets of the reply to an alarm and of the end of the memory, in words of 8 bytes."""
# Indices into a heartbeat's numbers.
(PID, STATE, FIRST_STEP, STEP, PHASE, POSITION) = range(6)
"""FIRST_STEP: the first step that this start of the run computes. PHASE: an index into PHASE_NAMES."""
(STEP_BEGUN, PREVIOUS_BEGUN) = range(6, 8)
"""Times when this step and the one before it began, in nanoseconds of `time.time_ns`."""
(WAITING, ALARM, REPORTED, REPLY_LENGTH) = range(8, 12)
"""WAITING: whether the rank was inside a collective when its watchdog thread last ran. REPORTED: whether the report is
out."""
(PROGRESS, TICK) = range(12, 14)
"""Times when the step last moved on and the watchdog thread last ran, in nanoseconds of `time.monotonic_ns`."""


class Position(NamedTuple):
    """The pipeline stage, microbatch, layer and direction (forward or backward) that a rank computes at the moment."""

    stage: int = 0
    """The pipeline stage."""
    microbatch: int = 0
    layer: int = -1
    """The layer; -1 outside of all layers."""
    backward: bool = False

    def pack(self) -> int:
        """Return the position as one integer of 64 bits."""
        return self.stage << 48 | self.microbatch << 17 | self.layer + 1 << 1 | self.backward

    @staticmethod
    def unpack(number: int) -> Position:
        return Position(number >> 48, number >> 17 & 0x7FFFFFFF, (number >> 1 & 0xFFFF) - 1, bool(number & 1))


class Heartbeat:
    """One rank's heartbeat in shared memory: integers at fixed indices, and the rank's reply to an alarm."""

    def __init__(self, path: Path, create: bool = False):
        """Map the file that holds a rank's heartbeat into memory; with `create`, make it as this process's own.

        Raises OSError if the file to create exists or has no room.
        """
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
        """Store the phase that this rank enters (an index into `PHASE_NAMES`) as progress, and reset its position."""
        self.numbers[PHASE] = phase
        self.enter(Position())

    def enter(self, position: Position) -> None:
        """Store the position in the step that this rank has reached, and now as the time of its progress."""
        self.numbers[POSITION] = position.pack()
        self.numbers[PROGRESS] = monotonic_ns()

    def tick(self, waiting: bool) -> None:
        """Store that this rank's watchdog thread runs, and whether its main thread waits in a collective."""
        self.numbers[WAITING] = waiting
        self.numbers[TICK] = monotonic_ns()

    def write_reply(self, text: bytes) -> None:
        """Store this rank's reply to an alarm (JSON) for the other ranks of its machine, cut off after 65,280 bytes."""
        self.numbers[REPLY_LENGTH] = 0
        text = text[: 8 * (END - REPLY)]
        self.memory[8 * REPLY : 8 * REPLY + len(text)] = text
        self.numbers[REPLY_LENGTH] = len(text)

    # ---- read by any rank of the machine

    @property
    def position(self) -> Position:
        return Position.unpack(self.numbers[POSITION])

    @property
    def last_progress(self) -> float:
        """The time at which the rank last made progress, in seconds of `time.monotonic`."""
        return self.numbers[PROGRESS] / 1e9

    @property
    def step_times(self) -> tuple[int, int]:
        """The times at which the current and the previous step began, in nanoseconds of `time.time_ns`."""
        return self.numbers[STEP_BEGUN], self.numbers[PREVIOUS_BEGUN]

    @property
    def is_waiting(self) -> bool:
        return bool(self.numbers[WAITING])

    def reply(self) -> bytes:
        """Return the rank's reply to an alarm, JSON of its stacks and collectives; empty if it has not replied."""
        return self.memory[8 * REPLY : 8 * REPLY + self.numbers[REPLY_LENGTH]]
