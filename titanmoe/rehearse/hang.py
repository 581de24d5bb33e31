"""Where the ranks of a run that hangs stand in their step, and whom they wait for.

A rank's dump is laid over what a rehearsal says that its step issues, in the order of the host. What is compared is
the group, the operation, dtype and bytes; of all-to-alls, whose sizes follow from data, the first three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.rehearse.order import POINT_TO_POINT, Comm, Program, told
from titanmoe.rehearse.record import Message
from titanmoe.rehearse.trace import HOW, Dump, Issued
from titanmoe.rehearse.world import Named, Rehearsal, rehearse

LEAST = 8
"""So many operations in a row tell where a rank stands, if its dump has no whole step."""
MANY = 8
"""Ranks that are named one by one."""
Key = tuple


@dataclass(eq=False)
class Standing:
    """Of a rank: it has issued the first `at` of its step's operations."""

    dump: Dump
    program: Program
    expected: list[int]
    """Messages of the program that dumps of its backend have."""
    issued: list[Issued | None]
    """Since it began the step; None for one that its dump no longer has."""
    at: int
    last: dict[Comm, int]
    """The number of the last collective that it issued in each communicator."""
    astray: Issued | None = None
    """What it issued instead of the next."""

    @property
    def rank(self) -> int:
        return self.dump.rank

    @property
    def waits(self) -> int | None:
        """Which of its operations, the first that is not done; None if it waits for no message."""
        here = enumerate(self.issued[: self.at])
        return next((i for i, one in here if one is not None and not one.done), None)

    def message(self, number: int) -> Message:
        return self.program.log.messages[self.expected[number]]

    def told(self, number: int) -> str:
        text = told(self.program, self.message(number)).partition(": operation of ")[2]
        return f"operation {number} of the {len(self.expected)} of its step, in {text}"


def held(config: Config, world: int, hardware: str, node: int, dumps: list[Dump]) -> Finding:
    outside = [dump for dump in dumps if dump.rank >= world]
    if outside:
        raise ConfigError(
            [f"{one.file} is of rank {one.rank}, and --world is {world}: is that the run's?" for one in outside]
        )
    stage = world // config.parallelism.pp
    stages = sorted({dump.rank // stage for dump in dumps})
    return judge(stand({i: rehearse(config, world, i * stage, hardware, 1.0, node, 2) for i in stages}, dumps))


def stand(roles: dict[int, Rehearsal], dumps: list[Dump]) -> list[Standing]:
    """roles: of each stage, the second step of its first rank. ConfigError where a dump cannot be placed."""
    found = [_placed(roles[dump.rank // _fold(roles).stage], dump) for dump in dumps]
    if problems := [one for one in found if isinstance(one, str)]:
        raise ConfigError(problems)
    return [one for one in found if isinstance(one, Standing)]


def _fold(roles: dict[int, Rehearsal]) -> Fold:
    return next(iter(roles.values())).fold


def _placed(role: Rehearsal, dump: Dump) -> Standing | str:
    gloo = dump.backend == "gloo"  # which records no sends and receives, and scatters what it has summed
    comms = {name: (f"{g.lane} {g.axes}", _part(g, dump.rank)) for name, g in role.groups.items()}
    program = Program(dump.rank, role.log, comms)
    expected = [i for i, m in enumerate(role.log.messages) if not gloo or m.op not in POINT_TO_POINT]
    wanted = [_wanted(role.log.messages[i], program, gloo) for i in expected]
    place = _places(role, dump, comms)
    ours = [(one, comm) for one in dump.issued if (comm := place(one)) is not None]
    keys, issued = [_key(*pair) for pair in ours], [one for one, _ in ours]
    last = {comm: one.number for one, comm in ours if one.op not in POINT_TO_POINT}
    start = _last_whole(keys, wanted)
    if start is not None:
        if len(keys) > start + len(wanted):  # the next step has begun
            start += len(wanted)
        at = _alike(keys[start:], wanted)
        astray = issued[start + at] if start + at < len(issued) else None
        return Standing(dump, program, expected, issued[start:], at, last, astray)
    at = max(range(1, len(wanted) + 1), key=lambda i: ((n := _back(keys, wanted, i)), n == i))
    length = _back(keys, wanted, at)
    few = length < min(LEAST, len(wanted))
    if length == len(keys) and (
        few or any(i != at and _back(keys, wanted, i) == length for i in range(1, len(wanted)))
    ):
        return f"{dump.file} holds {length} operations of a step of {len(wanted)}, too few to say which: {HOW}"
    if few:
        return (
            f"{dump.file}: its last operations are none of a step of rank {dump.rank}; the last is "
            f"{_plain(dump.issued[-1])}. Are the recipe, overrides, --world and --hardware those of the run?"
        )
    known = issued[len(issued) - min(at, length) :]
    return Standing(dump, program, expected, [*[None] * (at - len(known)), *known], at, last)


def _part(group: Named, rank: int) -> tuple[int, ...]:
    """Who shares such a group with that rank."""
    return next(part for part in group.parts if rank in part)


def _places(role: Rehearsal, dump: Dump, comms: dict[str, Comm]) -> Callable[[Issued], Comm | None]:
    """Which communicator an operation is of: by its ranks, where the dump tells them, else by torch's name for it.

    torch numbers groups as they are made, and all ranks make those of every part, in order.
    """
    by_ranks, by_name = {}, {}
    for name, group in role.groups.items():
        mine, here = (next(i for i, part in enumerate(group.parts) if r in part) for r in (role.rank, dump.rank))
        by_ranks[group.lane, comms[name][1]] = comms[name]
        if name.isdecimal():
            by_name[str(int(name) - mine + here)] = comms[name]

    def place(one: Issued) -> Comm | None:
        if one.group not in dump.ranks:
            return by_name.get(one.group)
        return by_ranks.get(("waited" if one.lane == "default_pg" else one.lane, dump.ranks[one.group]))

    return place


def _wanted(m: Message, program: Program, gloo: bool) -> Key:
    op = "all-reduce" if gloo and m.op == "reduce-scatter" else m.op
    size = 0 if m.op == "all-to-all" else m.received if m.op == "receive" else m.sent
    return program.comm(m), op, str(m.dtype).removeprefix("torch."), m.peer, size


def _key(one: Issued, comm: Comm) -> Key:
    return comm, one.op, one.dtype, one.peer, 0 if one.op == "all-to-all" else one.sent


def _plain(one: Issued) -> str:
    return f"{one.op} of {one.sent} bytes of {one.dtype} in {one.lane}{f', {one.line}' if one.line else ''}"


def _alike(keys: list[Key], wanted: list[Key]) -> int:
    """How many from the first on."""
    return next((i for i, (a, b) in enumerate(zip(keys, wanted, strict=False)) if a != b), min(len(keys), len(wanted)))


def _back(keys: list[Key], wanted: list[Key], end: int) -> int:
    """How many agree, counted back from the last of keys and from the one before `end`; before a step is a step."""
    n = 0
    while n < len(keys) and keys[-1 - n] == wanted[(end - 1 - n) % len(wanted)]:
        n += 1
    return n


def _last_whole(keys: list[Key], wanted: list[Key]) -> int | None:
    """Where the last whole step begins."""
    starts = range(len(keys) - len(wanted), -1, -1)
    return next((i for i in starts if keys[i] == wanted[0] and keys[i : i + len(wanted)] == wanted), None)


# ---- who waits for whom


@dataclass(frozen=True)
class Finding:
    stuck: bool
    lines: tuple[str, ...]


def judge(standings: list[Standing]) -> Finding:
    lines = [
        f"rank {one.rank} issued {_plain(one.astray)}, where {one.told(one.at)} is expected"
        for one in standings
        if one.astray is not None and 0 < one.at < len(one.expected)
    ]
    by_rank, blamed = {one.rank: one for one in standings}, defaultdict(list)
    for one in standings:
        if one.waits is not None:
            blamed[_culprit(one, by_rank)].append(one)
    for culprit, waiting in blamed.items():
        lines += _blame(culprit, by_rank, waiting)
    if not lines:
        return Finding(False, (f"no rank of {len(standings)} waits for a message: all that they issued is done",))
    return Finding(True, tuple(lines))


def _culprit(one: Standing, by_rank: dict[int, Standing]) -> tuple[int, ...]:
    """The rank at the end of those that wait for each other, the ranks of a circle, or nobody."""
    way = [one.rank]
    while way[-1] in by_rank and (number := by_rank[way[-1]].waits) is not None:
        absent = _absent(by_rank[way[-1]], number, by_rank)
        if absent is None:
            return ()
        if absent in way:
            return tuple(sorted(way[way.index(absent) :]))
        way.append(absent)
    return (way[-1],)


def _absent(one: Standing, number: int, by_rank: dict[int, Standing]) -> int | None:
    """A rank that has not issued its part of what this one waits for, those without a dump last."""
    message, mine = one.message(number), one.issued[number]
    comm = one.program.comm(message)
    others = [rank for rank in comm[1] if rank != one.rank]
    if message.op in POINT_TO_POINT:
        others = [comm[1][message.peer]]
    for rank in others:
        if (other := by_rank.get(rank)) is None:
            continue
        if message.op in POINT_TO_POINT:
            met = _met(other, one.rank, "send" if message.op == "receive" else "receive", other.at)
            if met <= _met(one, rank, message.op, number):
                return rank
        elif other.last.get(comm, 0) < mine.number:
            return rank
    return next((rank for rank in others if rank not in by_rank), None)


def _met(one: Standing, peer: int, op: str, end: int) -> int:
    """How many such operations with that rank it has issued before the one of number `end`."""
    messages = (one.message(i) for i in range(end))
    return sum(m.op == op and one.program.comm(m)[1][m.peer] == peer for m in messages)


def _blame(culprit: tuple[int, ...], by_rank: dict[int, Standing], waiting: list[Standing]) -> Iterator[str]:
    if len(culprit) > 1:
        yield f"ranks {_ranks(culprit)} wait for each other in a circle:"
        yield from (f"    rank {rank}: {by_rank[rank].told(by_rank[rank].waits)}" for rank in culprit)
        waiting = [one for one in waiting if one.rank not in culprit]
    elif not culprit:
        yield "all ranks of the group have issued what they wait for, and it is not done: look at the network, and at"
        yield "split sizes, which no dump of another rank can be held against:"
    elif culprit[0] not in by_rank:
        yield f"rank {culprit[0]} left no dump, and others wait for it: it has died, or hangs outside torch"
    else:
        one = by_rank[culprit[0]]
        whole = one.at == len(one.expected)
        yield f"rank {one.rank} never issued {'the next step: ' if whole else ''}{one.told(0 if whole else one.at)}"
        yield "    it waits for no message itself: its own stack says what it does"
    if waiting:
        yield f"    rank{'s' * (len(waiting) > 1)} {_ranks([one.rank for one in waiting])} waited for that:"
        for one in waiting[:MANY]:
            yield f"        rank {one.rank} in {one.told(one.waits)}"
        if len(waiting) > MANY:
            yield f"        and {len(waiting) - MANY} more"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
