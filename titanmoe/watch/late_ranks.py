"""From what is known of each rank when a run hangs: which ranks are late, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanmoe.watch.flight_recorder import FlightRecord, MessageKind
from titanmoe.watch.heartbeat import Position
from titanmoe.watch.process_groups import LaneGroups
from titanmoe.watch.stacks import in_message, line_in

LINES = 8
"""How many groups of waiting ranks get a line each."""


@dataclass
class RankStatus:
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
    recorded: FlightRecord = field(default_factory=FlightRecord)
    stack: list[str] = field(default_factory=list)
    threads: dict[str, list[str]] = field(default_factory=dict)
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"position": self.position._asdict(), "recorded": self.recorded.as_json()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> RankStatus:
        position, recorded = Position(**value["position"]), FlightRecord.from_json(value["recorded"])
        return RankStatus(**value | {"position": position, "recorded": recorded})


@dataclass(frozen=True)
class LateRanks:
    late: dict[int, str]
    """Ranks that others wait for, or that failed, and why they are named."""
    text: str
    during: dict[int, str]
    """Which part of the step each late rank is in."""


def judge(statuses: Sequence[RankStatus], groups: Sequence[LaneGroups], stage: int) -> LateRanks:
    """stage: the size of a pipeline stage, whose ranks all issue the same messages."""
    by_rank = {status.rank: status for status in statuses}
    late = (
        _with_odd_message(statuses, groups, stage)
        or _with_new_message(statuses, groups, stage)
        or _not_running(statuses)
        or dict.fromkeys(_last_of_chains(by_rank, groups), "")
        or dict.fromkeys(_in_own_code(statuses), "")
        or {status.rank: "" for status in statuses if _is_saving(status)}
    )
    return LateRanks(late, report(by_rank, groups, late), {rank: _during(by_rank[rank]) for rank in late})


def _not_running(statuses: Iterable[RankStatus]) -> dict[int, str]:
    words = {
        "failed": "failed",
        "stopped": "stopped by a signal",
        "silent": "does not answer: its process lives, but none of its Python threads runs",
        "gone": "has exited: its process is gone",
        "ended": "has finished its run",
        "unknown": "its machine does not answer",
    }
    for states in (("failed",), ("gone", "unknown"), ("stopped", "silent"), ("ended",)):
        if ranks := {status.rank: words[status.state] for status in statuses if status.state in states}:
            return ranks
    return {}


def _with_odd_message(statuses: Sequence[RankStatus], groups: Sequence[LaneGroups], stage: int) -> dict[int, str]:
    """Ranks that issued a different message from most of their stage at the same point of a step. If a stage is split
    evenly, the other stages decide, provided that one of its halves did what they did.
    """
    issued: dict[tuple[int, int], dict[int, MessageKind]] = {}  # by step and index in it, then by rank
    for status in statuses:
        for message in status.recorded.last:
            issued.setdefault((status.step, message.index), {})[status.rank] = message.kind
    for (_, index), by_rank in sorted(issued.items()):
        for first in range(0, max(by_rank) + 1, stage):
            of_stage = {rank: kind for rank, kind in by_rank.items() if first <= rank < first + stage}
            votes, everywhere = Counter(of_stage.values()), Counter(by_rank.values())
            if len(votes) < 2:
                continue
            usual = max(votes, key=lambda kind: (votes[kind], everywhere[kind]))
            rivals = [(votes[kind], everywhere[kind]) for kind in votes if kind != usual]
            if (votes[usual], everywhere[usual]) > max(rivals):
                due = _message_text(groups, *usual)
                return {
                    rank: f"issued {_message_text(groups, *kind)} as message {index + 1} of its step, where "
                    f"{everywhere[usual]} other ranks issued {due}"
                    for rank, kind in of_stage.items()
                    if kind != usual
                }
    return {}


def _with_new_message(statuses: Sequence[RankStatus], groups: Sequence[LaneGroups], stage: int) -> dict[int, str]:
    """Ranks that issued a different message from the one in the step before, where another of their stage repeated its
    own.
    """
    late = {}
    for status in statuses:
        differs = status.recorded.differs
        peers = [peer.recorded for peer in statuses if peer.rank // stage == status.rank // stage]
        reached = [peer for peer in peers if peer.issued > differs]
        if differs >= 0 and any(not 0 <= peer.differs <= differs for peer in reached):
            message = f"message {differs + 1} of its step, not that of the step before"
            issued = [m.kind[:2] for m in status.recorded.last if m.index == differs]
            what = "".join(f"{_collective_text(groups, *kind)} as " for kind in issued)
            late[status.rank] = f"issued {what}{message}"
    return late


def _last_of_chains(by_rank: dict[int, RankStatus], groups: Sequence[LaneGroups]) -> list[int]:
    """Ranks at the end of a chain of waits: others wait for them, and they wait for nobody; or those of a cycle."""
    waits = {rank: _waits_for(status, by_rank, groups) for rank, status in by_rank.items()}
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank]) or sorted(awaited)


def _waits_for(status: RankStatus, by_rank: dict[int, RankStatus], groups: Sequence[LaneGroups]) -> set[int]:
    """The ranks that have not yet issued a message that this one has."""
    behind = set()
    for name, number in status.recorded.numbers.items():
        peers = (by_rank[rank] for rank in groups[int(name)].of(status.rank) if rank in by_rank)
        behind |= {peer.rank for peer in peers if peer.recorded.numbers.get(name, 0) < number}
    return behind


def _in_own_code(statuses: Sequence[RankStatus]) -> list[int]:
    """Ranks whose own code runs while others are in a message that heartbeats do not have, as between two steps."""
    with_stack = [status for status in statuses if status.stack]
    waiting = [status.rank for status in with_stack if in_message(status.stack)]
    return [status.rank for status in with_stack if status.rank not in waiting] if waiting else []


def _is_saving(status: RankStatus) -> bool:
    """Whether the saving thread is busy itself, and not waiting for other ranks."""
    lines = status.threads.get("checkpoint", [])
    return bool(lines) and not any(" in on_all_ranks" in line for line in lines)


# ---- the report


def report(by_rank: dict[int, RankStatus], groups: Sequence[LaneGroups], late: dict[int, str]) -> str:
    if not late:
        longest = max(by_rank.values(), key=lambda status: status.silent_s)
        lines = [f"hang: {_ranks(by_rank)} wait for each other, and none is behind: check the network"]
        lines.append(f"  since {longest.silent_s:.0f} s, in step {longest.step}")
    else:
        first = by_rank[min(late)]
        others = f" (and {_ranks(rank for rank in late if rank != first.rank)})" if len(late) > 1 else ""
        lines = [f"hang: rank {first.rank} on {first.host} is late{others}, in step {first.step}"]
        for rank, why in sorted(late.items())[:LINES]:
            lines += _about(by_rank[rank], groups, why)
    waiting: dict[str, list[RankStatus]] = {}
    for status in by_rank.values():
        if status.rank not in late:
            waiting.setdefault(_waits_in(status, groups), []).append(status)
    if waiting:
        lines.append("  the others wait:")
    for activity, waiting_ranks in sorted(waiting.items(), key=lambda pair: -len(pair[1]))[:LINES]:
        longest = max(status.silent_s for status in waiting_ranks)
        lines.append(f"    {_ranks(status.rank for status in waiting_ranks)}: {activity}, for {longest:.0f} s")
    return "\n".join(lines)


def _about(status: RankStatus, groups: Sequence[LaneGroups], why: str) -> list[str]:
    lines = [
        f"  rank {status.rank}, process {status.pid} on {status.host}: "
        + (why or "others wait for it, and it waits for nobody")
    ]
    lines.append(f"    {_during(status)}; no progress for {status.silent_s:.0f} s")
    if status.recorded.last:
        last = status.recorded.last[-1]
        lines.append(
            f"    its last collective: {_collective_text(groups, last.group, last.op)}, number {last.number} there, "
            f"message {last.index + 1} of its step"
        )
    if status.stack:
        lines.append(f"    it is at {line_in(status.stack)}")
    for name, stack in status.threads.items():
        if name == "checkpoint":
            lines.append(f"    its thread that saves is at {line_in(stack)}")
    if status.note:
        lines.append(f"    {status.note.strip().partition(chr(10))[0]}")
    return lines


def _during(status: RankStatus) -> str:
    during = f"step {status.step}, {status.phase}"
    if status.phase == "forward and backward":
        position = status.position
        layer = f" of layer {position.layer}" if position.layer >= 0 else ""
        during += f": {'backward' if position.backward else 'forward'}{layer}, microbatch {position.microbatch}"
        during += f", stage {position.stage}" if position.stage else ""
    return during


def _waits_in(status: RankStatus, groups: Sequence[LaneGroups]) -> str:
    place = f" at {line_in(status.stack)}" if status.stack else ""
    if not status.recorded.last or status.phase in ("starting", "between steps"):
        return f"{status.phase}{place}"
    last = status.recorded.last[-1]
    return f"{_collective_text(groups, last.group, last.op)}, number {last.number}{place}"


def _collective_text(groups: Sequence[LaneGroups], group: int, op: str) -> str:
    return f"{op.replace('_', '-')} over {groups[group].axes}"


def _message_text(groups: Sequence[LaneGroups], group: int, op: str, dtype: str, elements: int) -> str:
    return _collective_text(groups, group, op) + (f" ({elements} x {dtype})" if elements else "")


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
