"""The collectives that a rank has issued lately, from torch's flight recorder.

torch 2.13 records them over NCCL and gloo; on CPUs, sends and receives are not recorded, nor is what FSDP exchanges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

MOST = 32
"""How many of a step's latest collectives a report uses."""

MessageKind = tuple[int, str, str, int]


class Collective(NamedTuple):
    index: int
    """Which message of its step it is, from 0."""
    group: int
    op: str
    dtype: str
    elements: int
    number: int
    """Which message of its group it is, counted from 1 over the whole run."""

    @property
    def kind(self) -> MessageKind:
        """Group, op, dtype and elements, the same in each step: how many rows an all-to-all sends depends on the data,
        and is 0 here."""
        return self.group, self.op, self.dtype, 0 if self.op == "all_to_all" else self.elements


class FlightRecord(NamedTuple):
    """What a rank's flight recorder says about its step."""

    issued: int = 0
    """Messages of this step so far."""
    last: tuple[Collective, ...] = ()
    """Its latest ones."""
    numbers: Mapping[str, int] = {}
    """By group (as text, as in JSON), the number of its latest message."""
    differs: int = -1
    """The first message of this step that is not what the step before had at its place, or -1."""
    unfinished: Mapping[str, int] = {}
    """By group (as text), the number of its earliest message that has not completed."""

    def as_json(self) -> dict[str, Any]:
        return self._asdict()

    @staticmethod
    def from_json(value: dict[str, Any]) -> FlightRecord:
        return FlightRecord(**value | {"last": tuple(Collective(*collective) for collective in value["last"])})


def read_recorder(groups: Mapping[str, int], begun: int, before: int) -> FlightRecord:
    """groups: numbers of groups by torch's names; others do not count. begun, before: when this step and the one
    before it began (`titanmoe.watch.heartbeat`).
    """
    entries = list(_entries(groups))
    step = _messages(entry for entry in entries if entry[0] >= begun)
    previous = _messages(entry for entry in entries if before <= entry[0] < begun)
    # A step whose beginning is no longer there cannot be compared.
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
    pairs = enumerate(zip(step, previous, strict=False))
    return next((index for index, (now, then) in pairs if now.kind != then.kind), -1)


Entry = tuple[int, bool, int, str, str, int, int]
"""When it was issued, whether it has completed, then a Collective without its index."""


def _messages(entries: Iterator[Entry]) -> list[Collective]:
    return [Collective(index, *entry[2:]) for index, entry in enumerate(entries)]


def _entries(groups: Mapping[str, int]) -> Iterator[Entry]:
    """Oldest first."""
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
    """Saves what the flight recorder has for torch's own analyser, torchfrtrace."""
    c10d = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return False
    folder.mkdir(exist_ok=True)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(dump())
    return True


def _dump() -> list[dict[str, Any]]:
    c10d = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            entries = entries or json.loads(dump()).get("entries", [])
    return entries
