"""What the ranks of a run had issued: dumps of torch's flight recorder, one file per rank.

NCCL's watchdog writes them on a time-out (TORCH_NCCL_DUMP_ON_TIMEOUT=1) as pickles of plain lists and dicts. Any other
class is refused, so a file from a stranger cannot run code. The JSON of torch's `_dump_fr_trace_json` is read too.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json

# By what follows the name of the backend in `profiling_name`.
OPS = {
    "all_reduce": "all-reduce",
    "_all_gather_base": "all-gather",
    "all_gather": "all-gather",
    "all_gather_single": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "all_to_all_v_single": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "all_reduce_barrier": "barrier",
    "send": "send",
    "recv": "receive",
}
# torch's names for dtypes in a dump, where ours differ.
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
PEER = re.compile(r" \d+(?:->|<-)(\d+)$")
RANK = re.compile(r"(\d+)(\.\w+)?$")
HOW_TO_RECORD = (
    "start the run with TORCH_FR_BUFFER_SIZE=20000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, and name the files that the "
    "ranks then write on a time-out, nccl_trace_rank_* (docs/rehearse.md)"
)


@dataclass(frozen=True)
class Issued:
    """An operation in a dump."""

    group: str
    """The process group's name."""
    lane: str
    """The group's description: for titanmoe's groups, the lane."""
    op: str
    dtype: str
    sent: int
    """Bytes of the input; for a receive, bytes received."""
    number: int
    """Its number among the group's collectives, from the start of the run."""
    peer: int
    """Sends and receives only: the index of the other rank in the group."""
    done: bool
    line: str
    """The innermost line of Python outside torch."""


@dataclass(frozen=True)
class Dump:
    file: Path
    rank: int
    backend: str
    issued: list[Issued]
    """In host order."""
    ranks: dict[str, tuple[int, ...]]
    """The ranks of each group, if the dump lists them; gloo's do not."""
    count: int = -1
    """How many operations of its step it has issued, if the run has counted them."""
    last: dict[str, int] = field(default_factory=dict)
    """With `count`: the number of the last collective in each group."""


class _Plain(pickle._Unpickler):
    """The unpickler in Python: the one in C allocates gigabytes if a pickle uses entry 2**31 of its memo."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which no flight recorder writes")


def read_dumps(paths: Iterable[Path]) -> list[Dump]:
    """By rank. A folder means the files in it whose names end in a number. ConfigError with all problems."""
    files = [
        file
        for path in paths
        for file in (sorted(x for x in path.iterdir() if RANK.search(x.name)) if path.is_dir() else [path])
    ]
    found: dict[int, Dump] = {}
    problems = [] if files else ["no file of --trace has a name that ends in a rank, as in nccl_trace_rank_37"]
    for file in files:
        try:
            dump = read_dump(file)
        except ConfigError as error:
            problems += error.problems
            continue
        if dump.rank in found:
            problems.append(f"{file} and {found[dump.rank].file} are both from rank {dump.rank}: leave one of them out")
        found[dump.rank] = dump
    if problems:
        raise ConfigError(problems)
    return [found[rank] for rank in sorted(found)]


def read_dump(file: Path) -> Dump:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError([f"cannot read {file}: {error.strerror}"]) from None
    number = RANK.search(file.name)
    if number is None:
        raise ConfigError([f"{file}: its name does not end in a rank, as in nccl_trace_rank_37"])
    try:
        dump = parse_json(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        ranks = {str(name): _ranks(of) for name, of in dump["pg_config"].items() if _ranks(of)}
        entries = dump.get("entries", [])
        issued = _in_order(entries)
        backend = _backend(entries[-1]) if entries else ""
    except Exception as error:  # a file that is not a dump can fail in any way
        raise ConfigError(
            [f"{file} is not a dump of torch's flight recorder ({type(error).__name__}: {error})"]
        ) from None
    if not issued:
        raise ConfigError([f"{file} holds no operations: {HOW_TO_RECORD}"])
    return Dump(file, int(number[1]), backend, issued, ranks)


def _in_order(entries: list[dict[str, Any]]) -> list[Issued]:
    """An operation is done if a later one of its group is, because a communicator is a queue. NCCL reports the end of a
    batch of sends and receives, not of each.
    """
    found, done, behind = [], set(), {}
    for entry in sorted(entries, key=lambda entry: entry["record_id"], reverse=True):
        group, op = str(entry["process_group"][0]), _op(entry)
        over = entry.get("state") == "completed" or bool(entry.get("retired"))
        if op is None:
            behind[group] = over
        else:
            if over or behind.get(group, False):
                done.add(group)
            found.append(_issued(entry, op, group in done))
    return found[::-1]


def _ranks(config: dict[str, Any]) -> tuple[int, ...]:
    ranks = config["ranks"]
    return tuple(map(int, json.loads(ranks) if isinstance(ranks, str) else ranks))


def _backend(entry: dict[str, Any]) -> str:
    return entry["profiling_name"].partition(":")[0]


def _op(entry: dict[str, Any]) -> str | None:
    """None for an entry that is not a message, such as the end of a batch."""
    words = entry["profiling_name"].partition(":")[2].split()
    return OPS.get(words[0]) if words else None


def _issued(entry: dict[str, Any], op: str, done: bool) -> Issued:
    sides = [(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]) for side in ("input", "output")]
    sizes, dtypes = next((side for side in (sides[::-1] if op == "receive" else sides) if side[0]), ([], []))
    dtype = DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else "uint8"
    count = 0 if op == "barrier" else sum(math.prod(size) for size in sizes)
    group, lane = entry["process_group"]
    peer = PEER.search(entry["profiling_name"])
    return Issued(
        str(group),
        str(lane),
        op,
        dtype,
        count * BYTES.get(dtype, 1),
        int(entry["collective_seq_id"]),
        int(peer[1]) if peer else -1,
        done,
        next((f"{f['filename']}:{f['line']}" for f in entry.get("frames", []) if "/torch/" not in f["filename"]), ""),
    )
