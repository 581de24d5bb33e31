"""From what is known of each rank when a run hangs: which ranks are late, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanmoe.watch.flight_recorder import Kind, Recorded
from titanmoe.watch.heartbeat import Position
from titanmoe.watch.process_groups import LaneGroups
from titanmoe.watch.stacks import in_message, line_in

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
    position: Position = field(default_factory=Position)
    recorded: Recorded = field(default_factory=Recorded)
    stack: list[str] = field(default_factory=list)
    threads: dict[str, list[str]] = field(default_factory=dict)
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"position": self.position._asdict(), "recorded": self.recorded.as_json()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Seen:
        position, recorded = Position(**value["position"]), Recorded.from_json(value["recorded"])
        return Seen(**value | {"position": position, "recorded": recorded})


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
    issued: dict[tuple[int, int], dict[int, Kind]] = {}  # by step and index in it, then by rank
    for one in seen:
        for message in one.recorded.last:
            issued.setdefault((one.step, message.index), {})[one.rank] = message.kind
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
        differs = one.recorded.differs
        others = [other.recorded for other in seen if other.rank // stage == one.rank // stage]
        there = [other for other in others if other.issued > differs]
        if differs >= 0 and any(not 0 <= other.differs <= differs for other in there):
            issued = [f"{_named(groups, *m.kind[:2])} as " for m in one.recorded.last if m.index == differs]
            late[one.rank] = f"issued {''.join(issued)}message {differs + 1} of its step, not that of the step before"
    return late


def _awaited(by_rank: dict[int, Seen], groups: Sequence[LaneGroups]) -> list[int]:
    """Ranks at the end of a chain of waits: others wait for them, and they wait for nobody; or those of a cycle."""
    waits = {rank: _waits_for(one, by_rank, groups) for rank, one in by_rank.items()}
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank]) or sorted(awaited)


def _waits_for(one: Seen, by_rank: dict[int, Seen], groups: Sequence[LaneGroups]) -> set[int]:
    """The ranks that have not yet issued a message that this one has."""
    found = set()
    for name, number in one.recorded.numbers.items():
        others = (by_rank[rank] for rank in groups[int(name)].of(one.rank) if rank in by_rank)
        found |= {other.rank for other in others if other.recorded.numbers.get(name, 0) < number}
    return found


def _apart(seen: Sequence[Seen]) -> list[int]:
    """Ranks whose own code runs while others are in a message that heartbeats do not have, as between two steps."""
    there = [one for one in seen if one.stack]
    waiting = [one.rank for one in there if in_message(one.stack)]
    return [one.rank for one in there if one.rank not in waiting] if waiting else []


def _writes(one: Seen) -> bool:
    """Whether the saving thread is busy itself, and not waiting for other ranks."""
    lines = one.threads.get("checkpoint", [])
    return bool(lines) and not any(" in on_all_ranks" in line for line in lines)


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
    if one.recorded.last:
        last = one.recorded.last[-1]
        lines.append(
            f"    its last collective: {_named(groups, last.group, last.op)}, number {last.number} there, "
            f"message {last.index + 1} of its step"
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
        where = one.position
        layer = f" of layer {where.layer}" if where.layer >= 0 else ""
        during += f": {'backward' if where.backward else 'forward'}{layer}, microbatch {where.microbatch}"
        during += f", stage {where.stage}" if where.stage else ""
    return during


def _waits_in(one: Seen, groups: Sequence[LaneGroups]) -> str:
    where = f" at {line_in(one.stack)}" if one.stack else ""
    if not one.recorded.last or one.phase in ("starting", "between steps"):
        return f"{one.phase}{where}"
    last = one.recorded.last[-1]
    return f"{_named(groups, last.group, last.op)}, number {last.number}{where}"


def _named(groups: Sequence[LaneGroups], group: int, op: str) -> str:
    return f"{op.replace('_', '-')} over {groups[group].axes}"


def _sized(groups: Sequence[LaneGroups], group: int, op: str, dtype: str, elements: int) -> str:
    return _named(groups, group, op) + (f" ({elements} x {dtype})" if elements else "")


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
