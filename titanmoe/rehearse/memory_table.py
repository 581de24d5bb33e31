"""What memory holds at its peak as tables for people, and as JSON for programs."""

from __future__ import annotations

from typing import Any

from titanmoe.rehearse.columns import columns, size
from titanmoe.rehearse.memory import Memory

SHOWN = 10


def memory_as_json(memory: Memory) -> dict[str, Any]:
    return {
        "peak": memory.peak,
        "at_start": memory.before,
        "line": str(memory.place),
        "layer": memory.place.layer,
        "region": memory.place.region,
        "pass": memory.place.part,
        "components": memory.components,
        "standing": [
            {
                "component": one.component,
                "line": _line(one.place),
                "region": one.place.region,
                "pass": one.place.part,
                "count": one.count,
                "bytes": one.size,
            }
            for one in memory.standing
        ],
    }


def where(memory: Memory) -> str:
    """The line where the peak stands, and what it works for."""
    place = memory.place
    works = ", ".join(x for x in (place.layer, place.region, place.part) if x)
    return f"{place} ({works})" if place.number else "the start of the step"


def memory_table(memory: Memory) -> list[str]:
    lines = [f"Memory holds at most {size(memory.peak)}, at {where(memory)}:", ""]
    body = [
        (name, size(count), f"{count / max(memory.peak, 1):.1%}") for name, count in memory.components.items() if count
    ]
    lines += columns(body, right=(1, 2))
    lines += ["", f"The {SHOWN} lines that made most of it:", ""]
    head = ("component", "region", "in", "tensors", "bytes", "by")
    body = [
        (one.component, one.place.region, one.place.part, f"{one.count:,}", size(one.size), _line(one.place))
        for one in memory.standing[:SHOWN]
    ]
    return lines + columns([head, *body], right=(3, 4))


def _line(place: Any) -> str:
    return str(place) if place.number else "before the step"
