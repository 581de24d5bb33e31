"""What a rank is doing, in memory that the other ranks of its machine can read, whatever has become of it.

The step writes a few numbers there and calls nothing: a stopped or dead rank leaves what it did last. The file loses
its name once all ranks of the machine have opened it, so nothing stays behind.
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

NUMBERS, COUNTS, RING, MAIL, END = 0, 128, 1280, 24576, 65536
"""Where each part of the memory begins: numbers, counts, the last messages, and text for the others."""
PID, STATE, FIRST, STEP, PHASE, BEGUN, TOTAL, ARRIVED, ALARM, ENDS, LENGTH, BEAT, TICK = range(13)
"""Numbers. FIRST: the step that this start of the run began with; BEGUN: messages before this step; TOTAL: messages so
far; ARRIVED: as many when one was last waited for; ENDS: the report has been made. BEAT, TICK: when the step entered
its phase and when the watching thread last ran, in nanoseconds of the machine's monotonic clock."""
GROUPS, PEERS = 64, 112
"""Counts: of the collectives of each group, then of what was sent to each rank of the pipeline and received from it."""
RECORDS = 512
RECORD = struct.Struct("<QQdIIHbbhxx")
assert COUNTS + 4 * (GROUPS + 2 * PEERS) <= RING
assert RING + RECORDS * RECORD.size <= MAIL


class Heard(NamedTuple):
    """One that a rank has issued."""

    total: int
    """Messages of the run, with this one."""
    bytes: int
    when: float
    number: int
    """Among the messages of its group; of a send or receive, among those with this peer."""
    place: int
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
        self.place, self.message = 0, self._writer()
        if create:
            self.numbers[PID] = os.getpid()
            self.beat(STARTING)
            self.tick()

    # ---- of the rank itself

    def beat(self, phase: int) -> None:
        self.numbers[PHASE] = phase
        self.numbers[BEAT] = int(monotonic() * 1e9)

    def tick(self) -> None:
        self.numbers[TICK] = int(monotonic() * 1e9)

    def _writer(self) -> Callable[..., None]:
        """A function with everything at hand: it is called hundreds of times in a step."""
        memory, numbers, counts, last = self.memory, self.numbers, self.counts, RECORDS - 1
        pack, size, codes, dtypes = RECORD.pack_into, RECORD.size, CODES, DTYPES

        def message(op: str, x: torch.Tensor, group: int, peer: int = -1) -> None:
            """A message that the step issues."""
            total, code = numbers[TOTAL], codes[op]
            slot = group if peer < 0 else GROUPS + 2 * (peer % PEERS) + (code == RECEIVE)
            counts[slot] = number = counts[slot] + 1
            numbers[TOTAL] = total + 1
            at, dtype = RING + (total & last) * size, dtypes.get(x.dtype, -1)
            pack(memory, at, total + 1, x.nbytes, monotonic(), number, self.place, group, code, dtype, peer)

        return message

    def arrived(self) -> None:
        self.numbers[ARRIVED] = self.numbers[TOTAL]

    def leave(self, text: bytes) -> None:
        """For the other ranks of this machine."""
        self.numbers[LENGTH] = 0
        text = text[: END - MAIL]
        self.memory[MAIL : MAIL + len(text)] = text
        self.numbers[LENGTH] = len(text)

    # ---- of any rank of the machine

    def messages(self, most: int = RECORDS) -> list[Heard]:
        """The last ones, oldest first."""
        total = self.numbers[TOTAL]
        return [self._message(one) for one in range(max(0, total - most), total)]

    def _message(self, number: int) -> Heard:
        *others, op, dtype, peer = RECORD.unpack_from(self.memory, RING + number % RECORDS * RECORD.size)
        return Heard(*others, OPS[op], NAMES[dtype] if dtype >= 0 else "other", peer)

    @property
    def last(self) -> float:
        """When the step last entered a phase or issued a message."""
        began, total = self.numbers[BEAT] / 1e9, self.numbers[TOTAL]
        return max(began, self._message(total - 1).when) if total else began

    @property
    def waits(self) -> bool:
        return self.numbers[ARRIVED] < self.numbers[TOTAL]

    def counted(self) -> dict[str, int]:
        """The number of its last message, by group, or "send PEER" and "receive PEER" for the pipeline."""
        counts = self.counts.tolist()
        found = {str(group): count for group, count in enumerate(counts[:GROUPS]) if count}
        for slot, count in enumerate(counts[GROUPS:]):
            if count:
                found[f"{'receive' if slot % 2 else 'send'} {slot // 2}"] = count
        return found

    def left(self) -> bytes:
        return self.memory[MAIL : MAIL + self.numbers[LENGTH]]


def place(microbatch: int, layer: int, backward: bool) -> int:
    return microbatch << 17 | layer + 1 << 1 | backward


def where(place: int) -> tuple[int, int, bool]:
    """Microbatch, layer (-1 for none), whether backward."""
    return place >> 17, (place >> 1 & 0xFFFF) - 1, bool(place & 1)
