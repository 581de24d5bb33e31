"""The latest collectives of a rank, from torch's flight recorder.

The watchdog reads them when a run hangs, to find the rank that issued another collective or none. torch 2.13 records
collectives over NCCL and gloo. On CPUs it records neither sends and receives nor the collectives of FSDP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

MOST = 32
"""The number of a step's latest collectives that a report uses."""

CollectiveKind = tuple[int, str, str, int]
"""Group, operation, dtype and elements of a collective."""


class Collective(NamedTuple):
    """A collective that a rank has issued."""

    index: int
    """Its index among the collectives of its step, from 0."""
    group: int
    """The index of its group in `name_groups`."""
    op: str
    dtype: str
    elements: int
    number: int
    """Its number among the collectives of its group, from 1 over the whole run."""

    @property
    def kind(self) -> CollectiveKind:
        """What is the same in every step. The size of an all-to-all depends on the data, so it counts as 0."""
        return self.group, self.op, self.dtype, 0 if self.op == "all_to_all" else self.elements


class FlightRecord(NamedTuple):
    """The collectives of a rank's current step, as its flight recorder has them."""

    issued: int = 0
    """The count of this step's collectives so far."""
    last: tuple[Collective, ...] = ()
    """The latest collectives of this step, oldest first."""
    numbers: Mapping[str, int] = {}
    """The number of the latest collective of each group. The keys are group indices as text, as in JSON."""
    differs: int = -1
    """The index of the first collective of this step that is not the one at its place in the step before; -1 if
    none."""
    unfinished: Mapping[str, int] = {}
    """The number of the earliest collective of each group that has not completed."""

    def as_json(self) -> dict[str, Any]:
        return self._asdict()

    @staticmethod
    def from_json(value: dict[str, Any]) -> FlightRecord:
        return FlightRecord(**value | {"last": tuple(Collective(*collective) for collective in value["last"])})


def read_recorder(groups: Mapping[str, int], begun: int, before: int) -> FlightRecord:
    """Return the collectives of this rank's current step, compared with those of the step before.

    Args:
        groups: The index of each group by torch's name for it. Collectives of other groups are left out.
        begun: When this step began (`titanmoe.watch.heartbeat.STEP_BEGUN`).
        before: When the step before it began; 0 if there was none.
    """
    entries = list(_entries(groups))
    step = _collectives(entry for entry in entries if entry[0] >= begun)
    previous = _collectives(entry for entry in entries if before <= entry[0] < begun)
    # A step whose first collectives have left the recorder cannot be compared.
    comparable = before > 0 and bool(entries) and entries[0][0] < before
    numbers: dict[str, int] = {}
    unfinished: dict[str, int] = {}
    for _, finished, group, *_, number in entries:
        numbers[str(group)] = max(number, numbers.get(str(group), 0))
        if not finished:
            unfinished[str(group)] = min(number, unfinished.get(str(group), number))
    differs = first_difference(step, previous) if comparable else -1
    return FlightRecord(len(step), tuple(step[-MOST:]), numbers, differs, unfinished)


def first_difference(step: list[Collective], previous: list[Collective]) -> int:
    """Return the first index at which two steps have collectives of different kinds; -1 if there is none."""
    pairs = enumerate(zip(step, previous, strict=False))
    return next((index for index, (now, then) in pairs if now.kind != then.kind), -1)


Entry = tuple[int, bool, int, str, str, int, int]
"""When a collective was issued, whether it has completed, then the fields of `Collective` without the index."""


def _collectives(entries: Iterator[Entry]) -> list[Collective]:
    return [Collective(index, *entry[2:]) for index, entry in enumerate(entries)]


def _entries(groups: Mapping[str, int]) -> Iterator[Entry]:
    """Yield the recorded collectives of these groups, oldest first."""
    for entry in sorted(_dump(), key=lambda entry: entry["record_id"]):
        group = groups.get(entry["process_group"][0])
        if group is None or entry["is_p2p"]:
            continue
        op = entry["profiling_name"].partition(":")[2].removeprefix("_").removesuffix("_base")
        sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
        elements = sum(math.prod(size) for size in sizes)
        dtype, number = dtypes[0] if dtypes else "", entry["collective_seq_id"]
        yield entry["time_created_ns"], entry["retired"], group, op, dtype, elements, number


def save(folder: Path, rank: int) -> bool:
    """Write the flight recorder's content to `folder`, for PyTorch's torchfrtrace.

    Returns:
        Whether this build of torch can dump its recorder; if not, nothing is written.
    """
    c10d = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return False
    folder.mkdir(exist_ok=True)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(dump())
    return True


def _dump() -> list[dict[str, Any]]:
    """Return torch's recorded entries, of NCCL or else of gloo; an empty list if this torch records none."""
    c10d = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            entries = entries or json.loads(dump()).get("entries", [])
    return entries
