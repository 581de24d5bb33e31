"""How far each rank of a hung run has got in its step, and which ranks it waits for.

A rank's dump is matched against the operations that a rehearsal of its step issues, in host order. An operation matches
by group, kind, dtype and bytes; an all-to-all, whose sizes depend on data, by the first three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.rehearse.order import POINT_TO_POINT, Comm, Program, describe
from titanmoe.rehearse.record import SYMMETRIC, Message
from titanmoe.rehearse.trace import HOW_TO_RECORD, Dump, Issued
from titanmoe.rehearse.world import NamedGroup, Rehearsal, rehearse

FEWEST = 8
"""How many operations in a row must match to place a rank whose dump holds no whole step."""
FSDP = ("shards", "replicas")
"""Its lanes."""
MOST_NAMED = 8
"""How many waiting ranks get a line each."""
Key = tuple


@dataclass(eq=False)
class Position:
    """How far a rank has got: it has issued the first `at` operations of its step."""

    dump: Dump
    program: Program
    expected: list[int]
    """The messages of the program that its backend records in dumps."""
    issued: list[Issued | None]
    """Since the start of the step; None for an operation that the dump no longer holds."""
    at: int
    last: dict[Comm, int]
    """The number of the last collective that it issued in each communicator."""
    unexpected: Issued | None = None
    """What it issued instead of the next expected operation."""

    @property
    def rank(self) -> int:
        return self.dump.rank

    @property
    def waits_in(self) -> int | None:
        """Its first unfinished operation; None if it waits for no message."""
        issued = enumerate(self.issued[: self.at])
        return next((i for i, one in issued if one is not None and not one.done), None)

    def message(self, number: int) -> Message:
        return self.program.log.messages[self.expected[number]]

    def describe(self, number: int) -> str:
        text = describe(self.program, self.message(number)).partition(": operation of ")[2]
        return f"operation {number} of the {len(self.expected)} of its step, in {text}"


def find_hang(config: Config, world: int, hardware: str, node: int, dumps: list[Dump]) -> Finding:
    outside = [dump for dump in dumps if dump.rank >= world]
    if outside:
        raise ConfigError(
            [
                f"{one.file} is from rank {one.rank}, but --world is {world}: is that the world of the run?"
                for one in outside
            ]
        )
    stage = world // config.parallelism.pp
    stages = sorted({dump.rank // stage for dump in dumps})
    return judge(locate({i: rehearse(config, world, i * stage, hardware, 1.0, node, 2) for i in stages}, dumps))


def locate(roles: dict[int, Rehearsal], dumps: list[Dump]) -> list[Position]:
    """roles: by stage, the second step of its first rank. ConfigError if a dump matches no place in its step."""
    found = [_locate(roles[dump.rank // _fold(roles).stage], dump) for dump in dumps]
    if problems := [one for one in found if isinstance(one, str)]:
        raise ConfigError(problems)
    return [one for one in found if isinstance(one, Position)]


def _fold(roles: dict[int, Rehearsal]) -> Fold:
    return next(iter(roles.values())).fold


def _locate(rehearsal: Rehearsal, dump: Dump) -> Position | str:
    if dump.count >= 0:
        return _placed(rehearsal, dump)
    gloo = dump.backend == "gloo"  # which records no sends or receives, and does a reduce-scatter as an all-reduce
    comms = {name: (f"{g.lane} {g.axes}", _members(g, dump.rank)) for name, g in rehearsal.groups.items()}
    program = Program(dump.rank, rehearsal.log, comms)
    unrecorded = SYMMETRIC + (POINT_TO_POINT if gloo else ())
    expected = [i for i, m in enumerate(rehearsal.log.messages) if m.op not in unrecorded]
    wanted = [_expected_key(rehearsal.log.messages[i], program, gloo) for i in expected]
    find = _communicator_finder(rehearsal, dump, comms)
    ours = [(one, comm) for one in dump.issued if (comm := find(one)) is not None]
    keys, issued = [_key(*pair) for pair in ours], [one for one, _ in ours]
    last = {comm: one.number for one, comm in ours if one.op not in POINT_TO_POINT}
    start = _last_whole_step(keys, wanted)
    if start is not None:
        if len(keys) > start + len(wanted):  # the next step has begun
            start += len(wanted)
        at = _matching(keys[start:], wanted)
        unexpected = issued[start + at] if start + at < len(issued) else None
        return Position(dump, program, expected, issued[start:], at, last, unexpected)
    at = max(range(1, len(wanted) + 1), key=lambda i: ((n := _matching_back(keys, wanted, i)), n == i))
    length = _matching_back(keys, wanted, at)
    few = length < min(FEWEST, len(wanted))
    if length == len(keys) and (
        few or any(i != at and _matching_back(keys, wanted, i) == length for i in range(1, len(wanted)))
    ):
        return f"{dump.file} holds {length} operations of a step of {len(wanted)}, too few to place it: {HOW_TO_RECORD}"
    if few:
        return (
            f"{dump.file}: its last operations are not from a step of rank {dump.rank}; the last is "
            f"{_describe_issued(dump.issued[-1])}. Are the recipe, overrides, --world and --hardware those of the run?"
        )
    known = issued[len(issued) - min(at, length) :]
    return Position(dump, program, expected, [*[None] * (at - len(known)), *known], at, last)


def _placed(rehearsal: Rehearsal, dump: Dump) -> Position | str:
    """The same where the run has counted its operations."""
    comms = {name: (f"{g.lane} {g.axes}", _members(g, dump.rank)) for name, g in rehearsal.groups.items()}
    program = Program(dump.rank, rehearsal.log, comms)
    expected = list(_as_the_run_counts(rehearsal))
    wanted = [_counted_key(rehearsal.log.messages[i], program) for i in expected]
    find, at = _communicator_finder(rehearsal, dump, comms), min(dump.count, len(expected))
    first = dump.count - len(dump.issued)
    keys = [_counted_key(one, program, find(one)) for one in dump.issued][: max(0, at - first)]
    same = _matching(keys, wanted[first:at])
    if keys and not same:
        return (
            f"{dump.file}: the messages of rank {dump.rank} are not those of a step: operation {first} was "
            f"{_describe_issued(dump.issued[0])}. Are the recipe, overrides, --world and --hardware those of the run?"
        )
    unexpected = dump.issued[same] if same < len(keys) else None
    at = first + same if unexpected else at
    last = {comm: dump.last[name] for name in dump.last if (comm := find(_of_group(name))) is not None}
    return Position(
        dump, program, expected, [*[None] * min(first, at), *dump.issued[: max(0, at - first)]], at, last, unexpected
    )


def _as_the_run_counts(rehearsal: Rehearsal) -> Iterator[int]:
    """The messages of the program: an exchange of FSDP's on CPUs is one, and not a message to and from every rank."""
    exchanged: dict[str, int] = defaultdict(int)
    for i, message in enumerate(rehearsal.log.messages):
        group = rehearsal.groups[message.group]
        if message.op in SYMMETRIC:
            continue
        if message.op in POINT_TO_POINT and group.lane in FSDP:
            exchanged[message.group] += 1
            if exchanged[message.group] % (2 * len(group.ranks) - 2) != 1:
                continue
        yield i


def _counted_key(one: Message | Issued, program: Program, comm: Comm | None = None) -> Key:
    if isinstance(one, Message):
        comm = program.comm(one)
    if comm is not None and comm[0].partition(" ")[0] in FSDP:
        return comm, "FSDP"
    return comm, one.op, str(one.dtype).removeprefix("torch."), one.peer


def _of_group(name: str) -> Issued:
    return Issued(name, name.partition(" ")[0], "", "", 0, 0, -1, True, "")


def _members(group: NamedGroup, rank: int) -> tuple[int, ...]:
    """The ranks that share such a group with this rank."""
    return next(part for part in group.parts if rank in part)


def _communicator_finder(rehearsal: Rehearsal, dump: Dump, comms: dict[str, Comm]) -> Callable[[Issued], Comm | None]:
    """Finds the communicator of an operation: by its ranks if the dump lists them, otherwise by torch's name for it.

    torch numbers groups in the order in which they are made, and every rank makes all parts in the same order.
    """
    by_ranks, by_name = {}, {}
    for name, group in rehearsal.groups.items():
        ours, theirs = (next(i for i, part in enumerate(group.parts) if r in part) for r in (rehearsal.rank, dump.rank))
        by_ranks[group.lane, comms[name][1]] = comms[name]
        if name.isdecimal():
            by_name[str(int(name) - ours + theirs)] = comms[name]

    def find(one: Issued) -> Comm | None:
        if one.group not in dump.ranks:
            return by_name.get(one.group)
        return by_ranks.get(("waited" if one.lane == "default_pg" else one.lane, dump.ranks[one.group]))

    return find


def _expected_key(m: Message, program: Program, gloo: bool) -> Key:
    op = "all-reduce" if gloo and m.op == "reduce-scatter" else m.op
    size = 0 if m.op == "all-to-all" else m.received if m.op == "receive" else m.sent
    return program.comm(m), op, str(m.dtype).removeprefix("torch."), m.peer, size


def _key(one: Issued, comm: Comm) -> Key:
    return comm, one.op, one.dtype, one.peer, 0 if one.op == "all-to-all" else one.sent


def _describe_issued(one: Issued) -> str:
    return f"{one.op} of {one.sent} bytes of {one.dtype} in {one.lane}{f', {one.line}' if one.line else ''}"


def _matching(keys: list[Key], wanted: list[Key]) -> int:
    """How many keys match, from the first on."""
    return next((i for i, (a, b) in enumerate(zip(keys, wanted, strict=False)) if a != b), min(len(keys), len(wanted)))


def _matching_back(keys: list[Key], wanted: list[Key], end: int) -> int:
    """How many keys match, counted back from the last key and from `end` in the step, which repeats."""
    n = 0
    while n < len(keys) and keys[-1 - n] == wanted[(end - 1 - n) % len(wanted)]:
        n += 1
    return n


def _last_whole_step(keys: list[Key], wanted: list[Key]) -> int | None:
    """The index at which the last whole step begins."""
    starts = range(len(keys) - len(wanted), -1, -1)
    return next((i for i in starts if keys[i] == wanted[0] and keys[i : i + len(wanted)] == wanted), None)


# ---- who waits for whom


@dataclass(frozen=True)
class Finding:
    stuck: bool
    lines: tuple[str, ...]


def judge(positions: list[Position]) -> Finding:
    lines = [
        f"rank {one.rank} issued {_describe_issued(one.unexpected)}, where {one.describe(one.at)} is expected"
        for one in positions
        if one.unexpected is not None and 0 < one.at < len(one.expected)
    ]
    by_rank, blamed = {one.rank: one for one in positions}, defaultdict(list)
    for one in positions:
        if one.waits_in is not None:
            blamed[_culprit(one, by_rank)].append(one)
    for culprit, waiting in blamed.items():
        lines += _blame(culprit, by_rank, waiting)
    if not lines:
        return Finding(
            False, (f"none of the {len(positions)} ranks waits for a message: everything they issued has completed",)
        )
    return Finding(True, tuple(lines))


def _culprit(one: Position, by_rank: dict[int, Position]) -> tuple[int, ...]:
    """The last rank of the chain of waits that starts here, or the ranks of its cycle, or nobody."""
    chain = [one.rank]
    while chain[-1] in by_rank and (number := by_rank[chain[-1]].waits_in) is not None:
        absent = _absent(by_rank[chain[-1]], number, by_rank)
        if absent is None:
            return ()
        if absent in chain:
            return tuple(sorted(chain[chain.index(absent) :]))
        chain.append(absent)
    return (chain[-1],)


def _absent(one: Position, number: int, by_rank: dict[int, Position]) -> int | None:
    """A rank that has not issued its side of the operation that this one waits for; ranks without a dump come last."""
    message, mine = one.message(number), one.issued[number]
    comm = one.program.comm(message)
    others = [rank for rank in comm[1] if rank != one.rank]
    if message.op in POINT_TO_POINT:
        others = [comm[1][message.peer]]
    for rank in others:
        if (other := by_rank.get(rank)) is None:
            continue
        if message.op in POINT_TO_POINT:
            count = _count(other, one.rank, "send" if message.op == "receive" else "receive", other.at)
            if count <= _count(one, rank, message.op, number):
                return rank
        elif other.last.get(comm, 0) < mine.number:
            return rank
    return next((rank for rank in others if rank not in by_rank), None)


def _count(one: Position, peer: int, op: str, end: int) -> int:
    """How many sends to, or receives from, that peer it has issued before operation `end`."""
    messages = (one.message(i) for i in range(end))
    return sum(m.op == op and one.program.comm(m)[1][m.peer] == peer for m in messages)


def _blame(culprit: tuple[int, ...], by_rank: dict[int, Position], waiting: list[Position]) -> Iterator[str]:
    if len(culprit) > 1:
        yield f"ranks {_ranks(culprit)} wait for each other in a cycle:"
        yield from (f"    rank {rank}: {by_rank[rank].describe(by_rank[rank].waits_in)}" for rank in culprit)
        waiting = [one for one in waiting if one.rank not in culprit]
    elif not culprit:
        yield "all ranks of the group have issued this operation, and it has not completed: check the network, and the"
        yield "split sizes, which dumps do not hold:"
    elif culprit[0] not in by_rank:
        yield f"rank {culprit[0]} left no dump, and others wait for it: it has died, or hangs outside torch"
    else:
        one = by_rank[culprit[0]]
        whole = one.at == len(one.expected)
        yield f"rank {one.rank} never issued {'the next step: ' if whole else ''}{one.describe(0 if whole else one.at)}"
        yield "    it waits for no message itself: look at its stack to see what it is doing"
    if waiting:
        yield f"    rank{'s' * (len(waiting) > 1)} {_ranks([one.rank for one in waiting])} wait for it:"
        for one in waiting[:MOST_NAMED]:
            yield f"        rank {one.rank} in {one.describe(one.waits_in)}"
        if len(waiting) > MOST_NAMED:
            yield f"        and {len(waiting) - MOST_NAMED} more"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
