"""What the ranks of a run had issued, as the event of its hang in `events.jsonl` has it (`titanmoe.watch`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.rehearse.trace import Dump, Issued

TO_PEER = ("send", "receive")


def read_event(file: Path) -> list[Dump]:
    """Of the last hang in the file. The ranks that left nothing are not among them."""
    try:
        texts = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError([f"cannot read {file}: {error.strerror}"]) from None
    found = None
    for text in texts:
        try:
            line = parse_json(text)
        except ValueError:  # cut off by a kill
            continue
        if isinstance(line, dict) and line.get("kind") == "hang":
            found = line
    if found is None:
        raise ConfigError([f"{file} has no event of a hang, which a run writes when one of its ranks is late"])
    try:
        groups = [(str(one["lane"]), [tuple(map(int, part)) for part in one["parts"]]) for one in found["groups"]]
        ranks = [one for one in found["ranks"] if one["numbers"]]
        counts = {int(one["rank"]): {str(k): int(n) for k, n in one["numbers"].items()} for one in ranks}
        dumps = [_dump(file, one, groups, counts) for one in ranks]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError([f"{file}: its event of a hang cannot be read ({type(error).__name__}: {error})"]) from None
    if not dumps:
        raise ConfigError([f"{file}: in its event of a hang no rank has sent anything"])
    return dumps


def _dump(file: Path, one: dict[str, Any], groups: list[Any], counts: dict[int, dict[str, int]]) -> Dump:
    rank, issued = int(one["rank"]), []
    mine = {i: next((part for part in parts if rank in part), ()) for i, (_, parts) in enumerate(groups)}
    for _, group, op, dtype, size, number, peer, *_ in one["last"]:
        if op in TO_PEER:
            ranks = mine[group]
            sent = counts.get(ranks[peer], {}).get(f"send {ranks.index(rank)}", 0)
            done = op == "send" or sent >= number
        else:
            done = all(counts.get(other, {}).get(str(group), 0) >= number for other in mine[group])
        name = f"{groups[group][0]} {group}"
        issued.append(Issued(name, groups[group][0], op, dtype, int(size), int(number), int(peer), done, ""))
    ranks = {f"{groups[i][0]} {i}": part for i, part in mine.items() if part}
    numbers = {f"{groups[int(k)][0]} {k}": n for k, n in counts[rank].items() if k.isdecimal()}
    return Dump(file, rank, "watch", issued, ranks, int(one["issued"]), numbers)
