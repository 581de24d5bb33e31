"""The ranks that a hung run waits for, found from what is known of each rank, and the report that names them.

The watchdog of the first machine calls `find_late_ranks` with the statuses of all ranks and all process groups, as
`name_groups` numbers them. Each rule is a function of these that returns late ranks and why they are named; the first
rule that finds any decides. In reports "number" counts the collectives of a group over the run, and "message" those of
a rank in its step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from titanmoe.files import format_ranges
from titanmoe.watch.connections import Connections
from titanmoe.watch.flight_recorder import CollectiveKind, FlightRecord
from titanmoe.watch.heartbeat import Position
from titanmoe.watch.process_groups import AxisGroups
from titanmoe.watch.stacks import innermost_own_line, is_communicating

MAX_LINES = 8
"""The most lines of a report about late ranks, waiting ranks and stuck collectives each."""


@dataclass
class RankStatus:
    """The status of a rank, from its heartbeat and its reply to the alarm."""

    rank: int
    host: str
    pid: int
    state: str
    """alive, stopped (by a signal), silent (its process lives, but its watchdog does not run), gone, failed, ended, or
    unknown (its machine does not answer)."""
    silent_s: float
    """The seconds since the rank last made progress."""
    step: int = 0
    phase: str = ""
    """An entry of `heartbeat.PHASE_NAMES`; "" if nothing is known."""
    position: Position = field(default_factory=Position)
    recorded: FlightRecord = field(default_factory=FlightRecord)
    stack: list[str] = field(default_factory=list)
    """The stack of the rank's main thread, innermost line first."""
    threads: dict[str, list[str]] = field(default_factory=dict)
    """The stacks of the rank's other threads, by name."""
    note: str = ""
    """The rank's error, or where it has saved its flight recorder."""
    connections: Connections = field(default_factory=Connections)

    def as_json(self) -> dict[str, Any]:
        position, recorded = self.position._asdict(), self.recorded._asdict()
        return vars(self) | {"position": position, "recorded": recorded, "connections": vars(self.connections)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> RankStatus:
        recorded, connections = FlightRecord.from_json(value["recorded"]), Connections(**value["connections"])
        nested = {"position": Position(**value["position"]), "recorded": recorded, "connections": connections}
        return RankStatus(**value | nested)


@dataclass(frozen=True)
class LateRanks:
    """The ranks that a hung training job waits for, and the report about them."""

    late: dict[int, str]
    """The reason why each late rank is named; "" if others wait for it and nothing else is known."""
    text: str
    """The report, several lines."""
    during: dict[int, str]
    """The activity of each late rank: step, phase, and place in forward or backward, as text."""


def find_late_ranks(statuses: Sequence[RankStatus], groups: Sequence[AxisGroups], stage: int) -> LateRanks:
    """Return the ranks that a hung training job waits for, with the reasons and the report.

    If no rank is behind, `late` is empty and the report says that the network is to be checked. `stage` is the number
    of ranks in a pipeline stage, which all issue the same collectives.
    """
    by_rank = {status.rank: status for status in statuses}
    late = (
        _with_odd_message(statuses, groups, stage)
        or _with_new_message(statuses, groups, stage)
        or _with_odd_number(statuses, groups)
        or _not_running(statuses)
        or _alone_in_step(by_rank, groups)
    )
    cut_off = {} if late else _cut_off(statuses)
    late = (
        late
        or cut_off
        or _finished(statuses)
        or _last_of_chains({rank: status for rank, status in by_rank.items() if status.stack}, groups)
        or dict.fromkeys(_in_own_code(statuses), "")
        or _last_of_chains(by_rank, groups)  # with ranks that have not replied, as if they had issued nothing
        or {status.rank: "" for status in statuses if _is_saving(status)}
    )
    text = report(by_rank, groups, late, bool(cut_off))
    return LateRanks(late, text, {rank: _during(by_rank[rank]) for rank in late})


def _not_running(statuses: Iterable[RankStatus]) -> dict[int, str]:
    """Return (rank -> reason) of failed ranks; if none, of ranks that are gone, then stopped, then silent; else {}.

    "Gone" includes ranks whose machine does not answer. On a busy machine a rank may be silent that merely waits.
    """
    words = {
        "failed": "failed",
        "stopped": "stopped by a signal",
        "silent": "does not answer: its process lives, but none of its Python threads runs",
        "gone": "has exited: its process is gone",
        "unknown": "its machine does not answer, or its network is down",
    }
    for states in (("failed",), ("gone", "unknown"), ("stopped",), ("silent",)):
        if ranks := {status.rank: words[status.state] for status in statuses if status.state in states}:
            return ranks
    return {}


def _finished(statuses: Sequence[RankStatus]) -> dict[int, str]:
    """Return (rank -> reason) of ranks that have ended while others are in a step; else of ranks that have not ended.

    {} if no rank has ended.
    """
    running = [status for status in statuses if status.state != "ended"]
    if not (ended := [status.rank for status in statuses if status.state == "ended"]):
        return {}
    if any(is_communicating(status.stack) or status.phase != "between steps" for status in running):
        return dict.fromkeys(ended, "has finished its run")
    return {status.rank: f"has not finished, as {_ranks(ended)} {_have(ended)}" for status in running}


def _cut_off(statuses: Sequence[RankStatus]) -> dict[int, str]:
    """Return (rank -> reason) of ranks whose network fails: their address is an end of every unacknowledged connection.

    If there is only one such connection, the end that a probe has reached is not to blame.
    """
    ranks_of: dict[str, list[int]] = {}
    for status in statuses:
        for address in {end for end, _ in status.connections.pairs}:
            ranks_of.setdefault(address, []).append(status.rank)
    every = {frozenset(pair) for status in statuses for pair in status.connections.unanswered}
    pairs = [pair for pair in every if len(pair) == 2 and pair <= ranks_of.keys()]
    suspects = frozenset.intersection(*pairs) if pairs else frozenset[str]()
    reached = {address for status in statuses for pair in status.connections.reached for address in pair}
    late = {}
    for address in sorted(suspects - reached or suspects):
        peers = {rank for pair in pairs for peer in pair - {address} for rank in ranks_of[peer]}
        for rank in ranks_of[address]:
            late[rank] = (
                f"what {_ranks(peers)} and it send each other is not acknowledged: look at the network of {address}"
            )
    return late


def _alone_in_step(by_rank: dict[int, RankStatus], groups: Sequence[AxisGroups]) -> dict[int, str]:
    """Return (rank -> reason) of ranks in another step than most, if ranks of both steps wait for each other; else {}.

    That is so if a rank waits for a collective that a rank in a later step has not issued: one of the two has called
    the collective too often, or not often enough. If both steps have as many ranks, all of them are returned.
    """
    conflicts = {
        status.step: other.step
        for status in by_rank.values()
        for other in (by_rank[rank] for rank in _waits_for(status, by_rank, groups))
        if status.step < other.step and is_communicating(status.stack)
    }
    if not conflicts:
        return {}
    involved = {*conflicts, *conflicts.values()}
    counts = Counter(status.step for status in by_rank.values() if status.step in involved)
    fewest = min(counts.values())
    late = {}
    for status in by_rank.values():
        if counts[status.step] == fewest:
            others = [other.rank for other in by_rank.values() if other.step in involved - {status.step}]
            where = ", ".join(str(step) for step in sorted(involved - {status.step}))
            late[status.rank] = f"in step {status.step}, when {_ranks(others)} {_are(others)} in step {where}"
    return late


def _with_odd_number(statuses: Sequence[RankStatus], groups: Sequence[AxisGroups]) -> dict[int, str]:
    """Return (rank -> reason) of ranks whose n-th collective in a process group is another operation than most have.

    Sizes and dtypes are not compared. {} if there is none, or no operation has most ranks.
    """
    issued: dict[tuple[int, int, tuple[int, ...]], dict[int, str]] = {}
    for status in statuses:
        for collective in status.recorded.last:
            key = collective.group, collective.number, groups[collective.group].of(status.rank)
            issued.setdefault(key, {})[status.rank] = collective.op
    for (group, number, _), ops in sorted(issued.items()):
        (usual, count), *rivals = Counter(ops.values()).most_common()
        if rivals and count > rivals[0][1]:
            expected = _collective_text(groups, group, usual)
            return {
                rank: f"issued {_collective_text(groups, group, op)} as number {number} there, where {count} other "
                f"ranks issued {expected}"
                for rank, op in ops.items()
                if op != usual
            }
    return {}


def _with_odd_message(statuses: Sequence[RankStatus], groups: Sequence[AxisGroups], stage: int) -> dict[int, str]:
    """Return (rank -> reason) of ranks whose n-th collective of a step differs from that of most ranks of their stage.

    If a pipeline stage, of `stage` ranks, is split evenly, the ranks of other stages decide. {} if all agree, or no
    kind has most ranks.
    """
    issued: dict[tuple[int, int], dict[int, CollectiveKind]] = {}  # by step and index in it, then by rank
    for status in statuses:
        for collective in status.recorded.last:
            issued.setdefault((status.step, collective.index), {})[status.rank] = collective.kind
    for (_, index), by_rank in sorted(issued.items()):
        for first in range(0, max(by_rank) + 1, stage):
            of_stage = {rank: kind for rank, kind in by_rank.items() if first <= rank < first + stage}
            votes, everywhere = Counter(of_stage.values()), Counter(by_rank.values())
            if len(votes) < 2:
                continue
            usual = max(votes, key=lambda kind: (votes[kind], everywhere[kind]))
            rivals = [(votes[kind], everywhere[kind]) for kind in votes if kind != usual]
            if (votes[usual], everywhere[usual]) > max(rivals):
                expected = _sized_collective_text(groups, *usual)
                return {
                    rank: f"issued {_sized_collective_text(groups, *kind)} as message {index + 1} of its step, where "
                    f"{everywhere[usual]} other ranks issued {expected}"
                    for rank, kind in of_stage.items()
                    if kind != usual
                }
    return {}


def _with_new_message(statuses: Sequence[RankStatus], groups: Sequence[AxisGroups], stage: int) -> dict[int, str]:
    """Return (rank -> reason) of ranks whose n-th collective of a step differs from the one in their previous step.

    A rank counts only if another rank of its stage, of `stage` ranks, has repeated its previous step up to that
    collective.
    """
    late = {}
    for status in statuses:
        differs = status.recorded.differs
        peers = [peer.recorded for peer in statuses if peer.rank // stage == status.rank // stage]
        reached = [peer for peer in peers if peer.issued > differs]
        if differs >= 0 and any(not 0 <= peer.differs <= differs for peer in reached):
            message = f"message {differs + 1} of its step, not that of the step before"
            issued = [c.kind[:2] for c in status.recorded.last if c.index == differs]
            operation = "".join(f"{_collective_text(groups, *kind)} as " for kind in issued)
            late[status.rank] = f"issued {operation}{message}"
    return late


def _last_of_chains(by_rank: dict[int, RankStatus], groups: Sequence[AxisGroups]) -> dict[int, str]:
    """Return (rank -> "") of ranks that others wait for and that wait for nobody; if none, (rank -> reason) of a cycle.

    A rank in a collective that all of its group have issued is left out: it waits for the network. {} if nobody waits.
    """
    waits = {rank: _waits_for(status, by_rank, groups) for rank, status in by_rank.items()}
    awaited = {other for others in waits.values() for other in others}
    if last := [rank for rank in sorted(awaited) if not waits[rank]]:
        stuck = {rank for ranks in _stuck_collectives(by_rank, groups).values() for rank in ranks}
        return dict.fromkeys((rank for rank in last if rank not in stuck), "")
    return {rank: f"waits for {_ranks(waits[rank])} in a circle" for rank in sorted(awaited)}


def _stuck_collectives(
    by_rank: dict[int, RankStatus], groups: Sequence[AxisGroups]
) -> dict[tuple[int, int, tuple[int, ...]], list[int]]:
    """Return the collectives that all members have issued and that do not complete, with the ranks that wait in them.

    The waiting ranks are by (index of the group, number of the collective in the group, members of the group).
    """
    stuck: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for rank, status in by_rank.items():
        for name, number in status.recorded.unfinished.items():
            ranks = groups[int(name)].of(rank)
            issued = [by_rank[peer].recorded.numbers.get(name, 0) for peer in ranks if peer in by_rank]
            if is_communicating(status.stack) and min(issued) >= number:
                stuck.setdefault((int(name), number, ranks), []).append(rank)
    return stuck


def _waits_for(status: RankStatus, by_rank: dict[int, RankStatus], groups: Sequence[AxisGroups]) -> set[int]:
    """Return the ranks of its groups that have not yet issued a collective that the rank of `status` has issued."""
    late = set()
    for name, number in status.recorded.numbers.items():
        peers = (by_rank[rank] for rank in groups[int(name)].of(status.rank) if rank in by_rank)
        late |= {peer.rank for peer in peers if peer.recorded.numbers.get(name, 0) < number}
    return late


def _in_own_code(statuses: Sequence[RankStatus]) -> list[int]:
    """Return the ranks whose main thread computes while other ranks wait in a communication; [] if no rank waits.

    It decides where the flight recorder has nothing, as between two steps.
    """
    with_stack = [status for status in statuses if status.stack]
    waiting = [status.rank for status in with_stack if is_communicating(status.stack)]
    return [status.rank for status in with_stack if status.rank not in waiting] if waiting else []


def _is_saving(status: RankStatus) -> bool:
    """Return whether the rank's checkpoint thread works, rather than waits for other ranks."""
    lines = status.threads.get("checkpoint", [])
    return bool(lines) and not is_communicating(lines)


# ---- the report


def report(by_rank: dict[int, RankStatus], groups: Sequence[AxisGroups], late: dict[int, str], cut_off: bool) -> str:
    """Return the report on a hung training job: the late ranks and where they are, then what the others wait for.

    Of a stack only the innermost line outside of torch is shown. Without late ranks it names the collectives that all
    members have issued and that do not complete. Each list has at most MAX_LINES lines.

    Args:
        by_rank: The statuses of all ranks, by rank.
        groups: The process groups, as `name_groups` numbers them.
        late: By late rank the reason why it is named, "" if others just wait for it; {} if no rank is late.
        cut_off: Whether the network of the late ranks is to blame.
    """
    if not late:
        longest = max(by_rank.values(), key=lambda status: status.silent_s)
        lines = [f"hang: {_ranks(by_rank)} wait for each other, and none is behind: check the network"]
        lines.append(f"  since {longest.silent_s:.0f} s, in step {longest.step}")
        for (group, number, ranks), waiting_ranks in list(_stuck_collectives(by_rank, groups).items())[:MAX_LINES]:
            lines.append(
                f"  number {number} over {groups[group].axes} was sent by all of {_ranks(ranks)} and has not reached "
                f"{_ranks(waiting_ranks)}"
            )
    else:
        first = by_rank[min(late)]
        others = f" (and {_ranks(rank for rank in late if rank != first.rank)})" if len(late) > 1 else ""
        first_line = f"hang: rank {first.rank} on {first.host} is late{others}, in step {first.step}"
        if cut_off:
            first_line = f"hang: rank {first.rank} on {first.host} cannot be reached{others}, in step {first.step}"
        lines = [first_line]
        for rank, why in sorted(late.items())[:MAX_LINES]:
            lines += _late_rank_lines(by_rank[rank], groups, why)
    waiting: dict[str, list[RankStatus]] = {}
    for status in by_rank.values():
        if status.rank not in late and status.state != "ended":
            waiting.setdefault(_waits_in(status, groups), []).append(status)
    if waiting:
        lines.append("  the others wait:")
    for activity, waiting_ranks in sorted(waiting.items(), key=lambda pair: -len(pair[1]))[:MAX_LINES]:
        longest = max(status.silent_s for status in waiting_ranks)
        lines.append(f"    {_ranks(status.rank for status in waiting_ranks)}: {activity}, for {longest:.0f} s")
    if ended := [rank for rank, status in by_rank.items() if status.state == "ended" and rank not in late]:
        lines.append(f"  {_ranks(ended)} {_have(ended)} finished")
    return "\n".join(lines)


def _late_rank_lines(status: RankStatus, groups: Sequence[AxisGroups], why: str) -> list[str]:
    why = why or "others wait for it, and it waits for nobody"
    lines = [f"  rank {status.rank}, process {status.pid} on {status.host}: {why}"]
    lines.append(f"    {_during(status)}; no progress for {status.silent_s:.0f} s")
    if status.recorded.last:
        last = status.recorded.last[-1]
        lines.append(
            f"    its last collective: {_collective_text(groups, last.group, last.op)}, number {last.number} there, "
            f"message {last.index + 1} of its step"
        )
    if status.stack:
        lines.append(f"    it is at {innermost_own_line(status.stack)}")
    if "checkpoint" in status.threads:
        lines.append(f"    its thread that saves is at {innermost_own_line(status.threads['checkpoint'])}")
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


def _waits_in(status: RankStatus, groups: Sequence[AxisGroups]) -> str:
    place = f" at {innermost_own_line(status.stack)}" if status.stack else ""
    if not status.recorded.last or status.phase in ("starting", "between steps"):
        return f"{status.phase}{place}"
    last = status.recorded.last[-1]
    return f"{_collective_text(groups, last.group, last.op)}, number {last.number}{place}"


def _collective_text(groups: Sequence[AxisGroups], group: int, op: str) -> str:
    return f"{op.replace('_', '-')} over {groups[group].axes}"


def _sized_collective_text(groups: Sequence[AxisGroups], group: int, op: str, dtype: str, elements: int) -> str:
    return _collective_text(groups, group, op) + (f" ({elements} x {dtype})" if elements else "")


def _have(ranks: Sized) -> str:
    return "has" if len(ranks) == 1 else "have"


def _are(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"


def _ranks(ranks: Iterable[int]) -> str:
    """Return rank numbers as text such as "ranks 0-3, 5"."""
    ordered = sorted(ranks)
    return f"rank{'s' * (len(ordered) > 1)} {format_ranges(ordered, ', ')}" if ordered else "no rank"
