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
    """A collective that a rank has issued, as torch's flight recorder has it."""

    index: int
    """The index of the collective among those of the rank's step, from 0."""
    group: int
    """The index of the process group in `name_groups`."""
    op: str
    dtype: str
    """The dtype of its first input; "" if it has none."""
    elements: int
    """The elements of all its inputs on this rank."""
    number: int
    """The number of the collective among those of its group, from 1 since the process started."""

    @property
    def kind(self) -> CollectiveKind:
        """(Group, operation, dtype, number of elements): what steps are compared by, collective by collective.

        The number of elements of an all-to-all depends on the data, and counts as 0.
        """
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

    @staticmethod
    def from_json(value: dict[str, Any]) -> FlightRecord:
        return FlightRecord(**value | {"last": tuple(Collective(*collective) for collective in value["last"])})


def read_recorder(group_indices: Mapping[str, int], step_begun: int, previous_begun: int) -> FlightRecord:
    """Return the collectives of this rank's current step, compared with those of the previous step.

    `differs` is -1 if none differs, or if the recorder no longer has all of the previous step to compare with.

    Args:
        group_indices: The index of each process group in `name_groups`, by torch's name for it. Collectives of other
            groups are left out.
        step_begun: The time at which this step began, in nanoseconds of `time.time_ns`.
        previous_begun: The time at which the previous step began; 0 if there was none.
    """
    entries = list(_entries(group_indices))
    step = _collectives(entry for entry in entries if entry[0] >= step_begun)
    previous = _collectives(entry for entry in entries if previous_begun <= entry[0] < step_begun)
    # A step whose first collectives have left the recorder cannot be compared.
    comparable = previous_begun > 0 and bool(entries) and entries[0][0] < previous_begun
    numbers: dict[str, int] = {}
    unfinished: dict[str, int] = {}
    for _, finished, group, *_, number in entries:
        numbers[str(group)] = max(number, numbers.get(str(group), 0))
        if not finished:
            unfinished[str(group)] = min(number, unfinished.get(str(group), number))
    differs = first_difference(step, previous) if comparable else -1
    return FlightRecord(len(step), tuple(step[-MOST:]), numbers, differs, unfinished)


def first_difference(step: list[Collective], previous: list[Collective]) -> int:
    """Return the first index at which two steps issued collectives of different kinds; -1 if there is none.

    Both lists begin at their step's first collective; what one has beyond the other's end is not compared.
    """
    pairs = enumerate(zip(step, previous, strict=False))
    return next((index for index, (now, then) in pairs if now.kind != then.kind), -1)


Entry = tuple[int, bool, int, str, str, int, int]
"""Time when a collective was issued, whether it has completed, then the fields of `Collective` without the index."""


def _collectives(entries: Iterator[Entry]) -> list[Collective]:
    return [Collective(index, *entry[2:]) for index, entry in enumerate(entries)]


def _entries(group_indices: Mapping[str, int]) -> Iterator[Entry]:
    """Yield the collectives in torch's flight recorder as tuples, oldest first, without sends and receives.

    Those of groups that are not in `group_indices` are left out.
    """
    for entry in sorted(_dump(), key=lambda entry: entry["record_id"]):
        group = group_indices.get(entry["process_group"][0])
        if group is None or entry["is_p2p"]:
            continue
        op = entry["profiling_name"].partition(":")[2].removeprefix("_").removesuffix("_base")
        sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
        elements = sum(math.prod(size) for size in sizes)
        dtype, number = dtypes[0] if dtypes else "", entry["collective_seq_id"]
        yield entry["time_created_ns"], entry["retired"], group, op, dtype, elements, number


def save(folder: Path, rank: int) -> bool:
    """Write the content of torch's flight recorder to a file of this rank in `folder`, for PyTorch's torchfrtrace.

    Returns False, and writes nothing, if this build of torch cannot dump its recorder.
    """
    c10d = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return False
    folder.mkdir(exist_ok=True)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(dump())
    return True


def _dump() -> list[dict[str, Any]]:
    """Return the records of torch's flight recorder as dicts, of NCCL or else of gloo; [] if this torch has none."""
    c10d = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            entries = entries or json.loads(dump()).get("entries", [])
    return entries
