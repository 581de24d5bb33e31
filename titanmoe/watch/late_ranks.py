"""From what is known of each rank when a run hangs: which ranks are late, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titanmoe.watch.listener import LaneGroups
from titanmoe.watch.stacks import in_message, line_in

Record = tuple[int, int, str, str, int, int, int, int, int, bool]
"""A message: index in its step, group, op, dtype, bytes, number in its group, peer, microbatch, layer, backward."""
INDEX, GROUP, OP, DTYPE, BYTES, NUMBER, PEER, MICROBATCH, LAYER, BACKWARD = range(10)
TO_PEER = ("send", "receive")
What = tuple[int, str, int]
"""Group, op and bytes of a message."""
LINES = 8
"""How many groups of waiting ranks get a line each."""


@dataclass
class Seen:
    """A rank, as its heartbeat and its own answer show it."""

    rank: int
    host: str
    pid: int
    state: str
    """answers, stopped (by a signal), silent (alive, but its watchdog does not run), gone, failed, ended, or unknown
    (its machine does not answer)."""
    silent_s: float
    """Seconds since it last made progress."""
    step: int = 0
    phase: str = ""
    issued: int = 0
    """Messages of this step so far."""
    microbatch: int = 0
    layer: int = -1
    backward: bool = False
    last: list[Record] = field(default_factory=list)
    """Its latest messages."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Messages so far, by group, or by "send PEER" and "receive PEER" for the pipeline."""
    stack: list[str] = field(default_factory=list)
    threads: dict[str, list[str]] = field(default_factory=dict)
    note: str = ""
    differs: int = -1
    """The first message of this step that is not what the step before had at its place, or -1."""


@dataclass(frozen=True)
class LateRanks:
    late: dict[int, str]
    """Ranks that others wait for, or that failed, and why they are named."""
    text: str
    during: dict[int, str]
    """Which part of the step each late rank is in."""


def judge(seen: Sequence[Seen], groups: Sequence[LaneGroups], stage: int) -> LateRanks:
    """stage: the size of a pipeline stage, whose ranks all issue the same messages."""
    by_rank = {one.rank: one for one in seen}
    late = (
        _odd(seen, groups, stage)
        or _strayed(seen, groups, stage)
        or _lost(seen)
        or dict.fromkeys(_awaited(by_rank, groups), "")
        or dict.fromkeys(_apart(seen), "")
        or {one.rank: "" for one in seen if _writes(one)}
    )
    return LateRanks(late, report(by_rank, groups, late), {rank: _during(by_rank[rank]) for rank in late})


def _lost(seen: Iterable[Seen]) -> dict[int, str]:
    words = {
        "failed": "failed",
        "stopped": "stopped by a signal",
        "silent": "does not answer: its process lives, but none of its Python threads runs",
        "gone": "has exited: its process is gone",
        "ended": "has finished its run",
        "unknown": "its machine does not answer",
    }
    for states in (("failed",), ("gone", "unknown"), ("stopped", "silent"), ("ended",)):
        if found := {one.rank: words[one.state] for one in seen if one.state in states}:
            return found
    return {}


def _odd(seen: Sequence[Seen], groups: Sequence[LaneGroups], stage: int) -> dict[int, str]:
    """Ranks that issued a different message from most of their stage at the same point of a step. If a stage is split
    evenly, the other stages decide, provided that one of its halves did what they did.
    """
    issued: dict[tuple[int, int], dict[int, What]] = {}  # by step and index in it, then by rank
    for one in seen:
        for record in one.last:
            if record[OP] not in TO_PEER and record[INDEX] < one.issued:
                size = 0 if record[OP] == "all-to-all" else record[BYTES]  # its size depends on the data
                issued.setdefault((one.step, record[INDEX]), {})[one.rank] = record[GROUP], record[OP], size
    for (_, index), by_rank in sorted(issued.items()):
        for first in range(0, max(by_rank) + 1, stage):
            mine = {rank: what for rank, what in by_rank.items() if first <= rank < first + stage}
            votes, everywhere = Counter(mine.values()), Counter(by_rank.values())
            if len(votes) < 2:
                continue
            usual = max(votes, key=lambda what: (votes[what], everywhere[what]))
            others = [(votes[what], everywhere[what]) for what in votes if what != usual]
            if (votes[usual], everywhere[usual]) > max(others):
                due = _sized(groups, *usual)
                return {
                    rank: f"issued {_sized(groups, *what)} as message {index + 1} of its step, where "
                    f"{everywhere[usual]} other ranks issued {due}"
                    for rank, what in mine.items()
                    if what != usual
                }
    return {}


def _strayed(seen: Sequence[Seen], groups: Sequence[LaneGroups], stage: int) -> dict[int, str]:
    """Ranks that issued a different message from the one in the step before, where another of their stage repeated its
    own.
    """
    late = {}
    for one in seen:
        there = (other for other in seen if other.rank // stage == one.rank // stage and other.issued > one.differs)
        if one.differs >= 0 and any(not 0 <= other.differs <= one.differs for other in there):
            issued = [f"{_named(groups, r[GROUP], r[OP])} as " for r in one.last if r[INDEX] == one.differs]
            late[one.rank] = (
                f"issued {''.join(issued)}message {one.differs + 1} of its step, not that of the step before"
            )
    return late


def _awaited(by_rank: dict[int, Seen], groups: Sequence[LaneGroups]) -> list[int]:
    """Ranks at the end of a chain of waits: others wait for them, and they wait for nobody; or those of a cycle."""
    waits = {rank: _waits_for(one, by_rank, groups) for rank, one in by_rank.items()}
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank]) or sorted(awaited)


def _waits_for(one: Seen, by_rank: dict[int, Seen], groups: Sequence[LaneGroups]) -> set[int]:
    """The ranks that have not yet issued a message that this one has."""
    found = set()
    for name, number in one.numbers.items():
        way, _, peer = name.partition(" ")
        if way == "receive":
            ranks = next(group for group in groups if group.lane == "stages").of(one.rank)
            sender = by_rank.get(ranks[int(peer)])
            if sender is not None and sender.numbers.get(f"send {ranks.index(one.rank)}", 0) < number:
                found.add(sender.rank)
        elif way != "send":
            others = (by_rank[rank] for rank in groups[int(name)].of(one.rank) if rank in by_rank)
            found |= {other.rank for other in others if other.numbers.get(name, 0) < number}
    return found


def _apart(seen: Sequence[Seen]) -> list[int]:
    """Ranks whose own code runs while others are in a message that heartbeats do not have, as between two steps."""
    there = [one for one in seen if one.stack]
    waiting = [one.rank for one in there if in_message(one.stack)]
    return [one.rank for one in there if one.rank not in waiting] if waiting else []


def _writes(one: Seen) -> bool:
    """Whether the saving thread is busy itself, and not waiting for other ranks."""
    lines = one.threads.get("checkpoint", [])
    return bool(lines) and not any(" in together" in line for line in lines)


# ---- the report


def report(by_rank: dict[int, Seen], groups: Sequence[LaneGroups], late: dict[int, str]) -> str:
    if not late:
        longest = max(by_rank.values(), key=lambda one: one.silent_s)
        lines = [f"hang: {_ranks(by_rank)} wait for each other, and none is behind: check the network"]
        lines.append(f"  since {longest.silent_s:.0f} s, in step {longest.step}")
    else:
        first = by_rank[min(late)]
        others = f" (and {_ranks(rank for rank in late if rank != first.rank)})" if len(late) > 1 else ""
        lines = [f"hang: rank {first.rank} on {first.host} is late{others}, in step {first.step}"]
        for rank, why in sorted(late.items())[:LINES]:
            lines += _about(by_rank[rank], groups, why)
    waiting: dict[str, list[Seen]] = {}
    for one in by_rank.values():
        if one.rank not in late:
            waiting.setdefault(_waits_in(one, groups), []).append(one)
    if waiting:
        lines.append("  the others wait:")
    for what, some in sorted(waiting.items(), key=lambda pair: -len(pair[1]))[:LINES]:
        longest = max(one.silent_s for one in some)
        lines.append(f"    {_ranks(one.rank for one in some)}: {what}, for {longest:.0f} s")
    return "\n".join(lines)


def _about(one: Seen, groups: Sequence[LaneGroups], why: str) -> list[str]:
    lines = [
        f"  rank {one.rank}, process {one.pid} on {one.host}: " + (why or "others wait for it, and it waits for nobody")
    ]
    lines.append(f"    {_during(one)}; no progress for {one.silent_s:.0f} s")
    if one.last:
        last = one.last[-1]
        lines.append(
            f"    its last message: {_named(groups, last[GROUP], last[OP])}, number {last[NUMBER]} there, "
            f"message {last[INDEX] + 1} of its step"
        )
    if one.stack:
        lines.append(f"    it is at {line_in(one.stack)}")
    for name, stack in one.threads.items():
        if name == "checkpoint":
            lines.append(f"    its thread that saves is at {line_in(stack)}")
    if one.note:
        lines.append(f"    {one.note.strip().partition(chr(10))[0]}")
    return lines


def _during(one: Seen) -> str:
    during = f"step {one.step}, {one.phase}"
    if one.phase == "forward and backward":
        layer = f" of layer {one.layer}" if one.layer >= 0 else ""
        during += f": {'backward' if one.backward else 'forward'}{layer}, microbatch {one.microbatch}"
    return during


def _waits_in(one: Seen, groups: Sequence[LaneGroups]) -> str:
    where = f" at {line_in(one.stack)}" if one.stack else ""
    if not one.last or one.phase in ("starting", "between steps"):
        return f"{one.phase}{where}"
    return f"{_named(groups, one.last[-1][GROUP], one.last[-1][OP])}, number {one.last[-1][NUMBER]}{where}"


def _named(groups: Sequence[LaneGroups], group: int, op: str) -> str:
    return f"{op} over {groups[group].axes}"


def _sized(groups: Sequence[LaneGroups], group: int, op: str, size: int) -> str:
    return _named(groups, group, op) + (f" ({size} bytes)" if size else "")


def _ranks(ranks: Iterable[int]) -> str:
    """As text: ranks 0-3, 5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' * (len(spans) > 1 or spans[0][0] != spans[0][1])} {text}" if spans else "no rank"
