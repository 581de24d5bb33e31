"""What a rank is doing, in memory that the other ranks of its machine can read even after it has stopped or died.

The step only stores a few numbers there; it makes no system call. The file is deleted as soon as all ranks of the
machine have opened it, so nothing is left behind.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "receive")
RECEIVE = OPS.index("receive")
CODES = {op: code for code, op in enumerate(OPS)}
NAMES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "uint8", "bool", "int8")
DTYPES = {getattr(torch, name): code for code, name in enumerate(NAMES)}
PHASES = ("starting", "data", "forward and backward", "norm and update", "between steps")
STARTING, BETWEEN = 0, PHASES.index("between steps")
RUNNING, ENDED, FAILED = range(3)

NUMBERS, COUNTS, RING, ANSWER, END = 0, 128, 1280, 24576, 65536
"""Where each part of the memory begins: numbers, counts, the latest messages, and text for the other ranks."""
PID, STATE, FIRST, STEP, PHASE, BEGUN, TOTAL, ARRIVED, ALARM, REPORTED, ANSWER_LENGTH, PHASE_BEGAN, TICK = range(13)
"""Indices into the numbers. FIRST: the step that this start of the run began with. BEGUN: messages before this step.
TOTAL: messages so far. ARRIVED: what TOTAL was when this rank last finished waiting for a message. REPORTED: the report
is out. PHASE_BEGAN, TICK: when the step entered its phase and when the watchdog thread last ran, in nanoseconds of the
machine's monotonic clock."""
GROUPS, PEERS = 64, 112
"""Counts: collectives of each group, then messages sent to and received from each rank of the pipeline."""
RECORDS = 512
RECORD = struct.Struct("<QQdIIHbbhxx")
assert COUNTS + 4 * (GROUPS + 2 * PEERS) <= RING
assert RING + RECORDS * RECORD.size <= ANSWER


class LoggedMessage(NamedTuple):
    """A message that a rank has issued."""

    total: int
    """Messages of the run up to and including this one."""
    bytes: int
    when: float
    number: int
    """Counted from 1 within its group; for a send or receive, among those with this peer."""
    step_position: tuple[int, int, bool]
    """Microbatch, layer (-1 for none), whether backward."""
    group: int
    op: str
    dtype: str
    peer: int


class Heartbeat:
    def __init__(self, path: Path, create: bool = False):
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, END)  # writing to a full disk would otherwise kill the rank
            self.memory = mmap.mmap(descriptor, END)
        finally:
            os.close(descriptor)
        self.numbers = memoryview(self.memory)[NUMBERS:COUNTS].cast("q")
        self.counts = memoryview(self.memory)[COUNTS:RING].cast("I")
        self.step_position, self.issued = 0, self._writer()
        if create:
            self.numbers[PID] = os.getpid()
            self.enter_phase(STARTING)
            self.tick()

    # ---- written by the rank itself

    def enter_phase(self, phase: int) -> None:
        self.numbers[PHASE] = phase
        self.numbers[PHASE_BEGAN] = int(monotonic() * 1e9)

    def tick(self) -> None:
        self.numbers[TICK] = int(monotonic() * 1e9)

    def _writer(self) -> Callable[..., None]:
        """A function with everything it needs in local variables: it is called hundreds of times in a step."""
        memory, numbers, counts, last = self.memory, self.numbers, self.counts, RECORDS - 1
        pack, size, codes, dtypes = RECORD.pack_into, RECORD.size, CODES, DTYPES

        def issued(op: str, x: torch.Tensor, group: int, peer: int = -1) -> None:
            """The step has issued a message."""
            total, code = numbers[TOTAL], codes[op]
            slot = group if peer < 0 else GROUPS + 2 * (peer % PEERS) + (code == RECEIVE)
            counts[slot] = number = counts[slot] + 1
            numbers[TOTAL] = total + 1
            at, dtype = RING + (total & last) * size, dtypes.get(x.dtype, -1)
            pack(memory, at, total + 1, x.nbytes, monotonic(), number, self.step_position, group, code, dtype, peer)

        return issued

    def arrived(self) -> None:
        """The rank has waited for what it issued last."""
        self.numbers[ARRIVED] = self.numbers[TOTAL]

    def write_answer(self, text: bytes) -> None:
        """For the other ranks of this machine."""
        self.numbers[ANSWER_LENGTH] = 0
        text = text[: END - ANSWER]
        self.memory[ANSWER : ANSWER + len(text)] = text
        self.numbers[ANSWER_LENGTH] = len(text)

    # ---- read by any rank of the machine

    def messages(self, most: int = RECORDS) -> list[LoggedMessage]:
        """The latest ones, oldest first."""
        total = self.numbers[TOTAL]
        return [self._message(one) for one in range(max(0, total - most), total)]

    def _message(self, number: int) -> LoggedMessage:
        fields = RECORD.unpack_from(self.memory, RING + number % RECORDS * RECORD.size)
        *counts, step_position, group, op, dtype, peer = fields
        name = NAMES[dtype] if dtype >= 0 else "other"
        return LoggedMessage(*counts, unpack_position(step_position), group, OPS[op], name, peer)

    @property
    def last_progress(self) -> float:
        """When the step last entered a phase or issued a message."""
        began, total = self.numbers[PHASE_BEGAN] / 1e9, self.numbers[TOTAL]
        return max(began, self._message(total - 1).when) if total else began

    @property
    def is_waiting(self) -> bool:
        return self.numbers[ARRIVED] < self.numbers[TOTAL]

    def message_counts(self) -> dict[str, int]:
        """Messages so far, by group, or by "send PEER" and "receive PEER" for the pipeline."""
        counts = self.counts.tolist()
        found = {str(group): count for group, count in enumerate(counts[:GROUPS]) if count}
        for slot, count in enumerate(counts[GROUPS:]):
            if count:
                found[f"{'receive' if slot % 2 else 'send'} {slot // 2}"] = count
        return found

    def answer(self) -> bytes:
        return self.memory[ANSWER : ANSWER + self.numbers[ANSWER_LENGTH]]


def pack_position(microbatch: int, layer: int, backward: bool) -> int:
    """Where a rank is in its step, as one number."""
    return microbatch << 17 | layer + 1 << 1 | backward


def unpack_position(step_position: int) -> tuple[int, int, bool]:
    return step_position >> 17, (step_position >> 1 & 0xFFFF) - 1, bool(step_position & 1)
