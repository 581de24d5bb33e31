"""Recipes small enough to rehearse in a second or two, and the messages of a rehearsal in a form to compare."""

from __future__ import annotations

from typing import Any

from tests import parity
from titanmoe.config.schema import Config
from titanmoe.rehearse.message_recorder import Log
from titanmoe.rehearse.rehearsal import NamedGroup, recipe_to_rehearse

Comparable = list[tuple[Any, ...]]
FORCED = {"moe.force_balance": True, "training.dtype": "float32", "training.mixed_precision_param": "float32"}
FORCED |= {"training.mixed_precision_reduce": "float32", "moe.kernels": "torch"}


def config_of(changes: dict[str, Any], world: int, hardware: str) -> Config:
    return recipe_to_rehearse(parity.arguments(parity.TINY | FORCED | changes), world, hardware)


def comparable(log: Log, groups: dict[str, NamedGroup]) -> Comparable:
    """Every message and every wait in host order, with all fields that can be compared."""
    out: Comparable = []
    for kind, number in log.events:
        if kind == "sync":
            continue
        m = log.messages[number]
        if kind == "issue":
            group = groups[m.group]
            what = m.op, str(m.dtype), m.sent_bytes, m.received_bytes, m.splits, m.peer, m.batch >= 0
            out.append((group.kind, group.axes, group.ranks, *what, m.backward, m.wait_timing, *m.site))
        else:
            out.append(("waits for", number))
    return out
