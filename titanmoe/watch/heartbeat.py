"""What a rank is doing, in memory that the other ranks of its machine can read even after it has stopped or died.

The step only stores a few numbers there; it makes no system call. The file is deleted as soon as all ranks of the
machine have opened it, so nothing is left behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import torch

from titanmoe.comm.listener import OPS, RECEIVE

NAMES = ("other", "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "uint8", "bool", "int8")
DTYPES = {dtype: 0 for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DTYPES |= {getattr(torch, name): code << 9 for code, name in enumerate(NAMES) if code}
"""Their bits in a record's third word."""
PHASES = ("starting", "data", "forward and backward", "norm and update", "between steps")
STARTING, BETWEEN = 0, PHASES.index("between steps")
RUNNING, ENDED, FAILED = range(3)

COUNTS, RING, ANSWER, END = 16, 320, 3072, 8192
"""Where each part of the memory begins, in words of 8 bytes: numbers, counts, the latest messages, and text for the
other ranks."""
(PID, STATE, FIRST, STEP, PHASE, BEGUN, BEFORE, WAITING, ALARM, REPORTED, ANSWER_LENGTH, PHASE_BEGAN, ISSUED, TICK) = (
    range(14)
)
"""Indices into the numbers. FIRST: the step that this start of the run began with. BEGUN, BEFORE: messages before this
step, and before the one before it. WAITING: whether this rank was waiting for a message when its watchdog thread last
ran. REPORTED: the report is out. PHASE_BEGAN, ISSUED, TICK: when the step entered its phase, when it issued a message,
and when the watchdog thread last ran, in nanoseconds of the machine's monotonic clock."""
GROUPS, PEERS = 64, 112
"""Counts: collectives of each group, then messages sent to and received from each rank of the pipeline."""
RECORDS = 512
"""Of three words each: position; bytes; group, op, dtype and peer from the lowest bit on. Packed closer, they would be
large integers, which Python handles more slowly."""
WORDS = 3
assert COUNTS + GROUPS + 2 * PEERS <= RING and RING + WORDS * RECORDS <= ANSWER
assert GROUPS <= 1 << 6 and len(OPS) <= 1 << 3 and len(NAMES) <= 1 << 4


class LoggedMessage(NamedTuple):
    """A message that a rank has issued."""

    total: int
    """Messages of the run up to and including this one."""
    bytes: int
    number: int
    """Counted from 1 within its group; for a send or receive, among those with this peer."""
    step_position: tuple[int, int, bool]
    """Microbatch, layer (-1 for none), whether backward."""
    group: int
    op: str
    dtype: str
    peer: int

    @property
    def what(self) -> tuple[int, str, int, int]:
        """The same in each step: how many rows an all-to-all sends depends on the data."""
        return self.group, self.op, self.peer, 0 if self.op == "all-to-all" else self.bytes


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
        self.step_position = 0
        self.measured = False
        """Whether this step's waits are measured."""
        self.group, self.since = None, None
        """The group of the message that this rank waits for, and since when, or 0 if that is not measured; None if it
        does not wait."""
        if create:
            self.numbers[PID] = os.getpid()
            self.enter_phase(STARTING)
            self.tick()

    # ---- written by the rank itself

    def enter_phase(self, phase: int) -> None:
        self.numbers[PHASE] = phase
        self.numbers[PHASE_BEGAN] = monotonic_ns()

    def tick(self) -> None:
        """Called by the watchdog thread."""
        self.numbers[WAITING] = self.since is not None
        self.numbers[TICK] = monotonic_ns()

    def writer(self, groups: Mapping[Any, int]) -> Callable[..., None]:
        """A function to call when the step issues a message to one of these groups; it ignores others. A step calls it
        hundreds of times, so it touches as little as it can.
        """
        numbers, group_numbers, dtypes = self.numbers, dict(groups), DTYPES
        at, end = RING + WORDS * (self.total % RECORDS), RING + WORDS * RECORDS

        def issued(op: int, x: torch.Tensor, group: Any, peer: int = -1) -> None:
            nonlocal at
            number = group_numbers.get(group)
            if number is None:
                return
            slot, word = COUNTS + number, number + (op << 6) + dtypes[x.dtype]
            if peer >= 0:
                slot, word = COUNTS + GROUPS + 2 * (peer % PEERS) + (op == RECEIVE), word + (peer + 1 << 13)
            numbers[at] = self.step_position
            numbers[at + 1] = x.nbytes
            numbers[at + 2] = word
            numbers[slot] += 1
            at += WORDS
            if at == end:
                at = RING
            self.group = group
            now = numbers[ISSUED] = monotonic_ns()
            self.since = now if self.measured else 0

        return issued

    def write_answer(self, text: bytes) -> None:
        """For the other ranks of this machine."""
        self.numbers[ANSWER_LENGTH] = 0
        text = text[: 8 * (END - ANSWER)]
        self.memory[8 * ANSWER : 8 * ANSWER + len(text)] = text
        self.numbers[ANSWER_LENGTH] = len(text)

    # ---- read by any rank of the machine

    @property
    def total(self) -> int:
        """How many messages the rank has issued."""
        return sum(self.numbers[COUNTS:RING])

    def messages(self, most: int = RECORDS) -> list[LoggedMessage]:
        """The latest ones, oldest first."""
        counts, found = self.numbers[COUNTS:RING].tolist(), list[LoggedMessage]()
        total = sum(counts)
        for number in range(total - 1, max(0, total - most) - 1, -1):
            at = RING + WORDS * (number % RECORDS)
            position, size, word = self.numbers[at : at + WORDS].tolist()
            group, op, dtype, peer = word & 63, word >> 6 & 7, NAMES[word >> 9 & 15], (word >> 13) - 1
            slot = group if peer < 0 else GROUPS + 2 * (peer % PEERS) + (op == RECEIVE)
            where = unpack_position(position)
            found.append(LoggedMessage(number + 1, size, counts[slot], where, group, OPS[op], dtype, peer))
            counts[slot] -= 1
        return found[::-1]

    @property
    def last_progress(self) -> float:
        """When the step last entered a phase or issued a message."""
        return max(self.numbers[PHASE_BEGAN], self.numbers[ISSUED]) / 1e9

    @property
    def is_waiting(self) -> bool:
        return bool(self.numbers[WAITING])

    @property
    def differs(self) -> int:
        """The index of this step's first message that is not the one which the step before had there; -1 if there is
        none, or that step is no longer known.
        """
        begun, before = self.numbers[BEGUN], self.numbers[BEFORE]
        kept = {one.total: one for one in self.messages()}
        for index in range(min(self.total - begun, begun - before)):
            now, then = kept.get(begun + index + 1), kept.get(before + index + 1)
            if now and then and now.what != then.what:
                return index
        return -1

    def message_counts(self) -> dict[str, int]:
        """Messages so far, by group, or by "send PEER" and "receive PEER" for the pipeline."""
        counts = self.numbers[COUNTS:RING].tolist()
        found = {str(group): count for group, count in enumerate(counts[:GROUPS]) if count}
        for slot, count in enumerate(counts[GROUPS:]):
            if count:
                found[f"{'receive' if slot % 2 else 'send'} {slot // 2}"] = count
        return found

    def answer(self) -> bytes:
        return self.memory[8 * ANSWER : 8 * ANSWER + self.numbers[ANSWER_LENGTH]]


def pack_position(microbatch: int, layer: int, backward: bool) -> int:
    """Where a rank is in its step, as one number."""
    return microbatch << 17 | layer + 1 << 1 | backward


def unpack_position(step_position: int) -> tuple[int, int, bool]:
    return step_position >> 17, (step_position >> 1 & 0xFFFF) - 1, bool(step_position & 1)
