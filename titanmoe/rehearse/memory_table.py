"""Memory at its peak, as tables for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from titanmoe.rehearse.columns import columns, format_bytes
from titanmoe.rehearse.memory import Memory

SHOWN = 10


def memory_as_json(memory: Memory) -> dict[str, Any]:
    return {
        "peak": memory.peak,
        "at_start": memory.before,
        "line": str(memory.place),
        "layer": memory.place.layer,
        "region": memory.place.region,
        "pass": memory.place.phase,
        "components": memory.components,
        "standing": [
            {
                "component": one.component,
                "line": _line(one.place),
                "region": one.place.region,
                "pass": one.place.phase,
                "count": one.count,
                "bytes": one.size,
            }
            for one in memory.at_peak
        ],
    }


def where(memory: Memory) -> str:
    """The line of code at the peak, with its layer, region and pass."""
    place = memory.place
    context = ", ".join(x for x in (place.layer, place.region, place.phase) if x)
    return f"{place} ({context})" if place.number else "the start of the step"


def memory_table(memory: Memory) -> list[str]:
    lines = [f"Memory peaks at {format_bytes(memory.peak)}, at {where(memory)}:", ""]
    components = [(name, count) for name, count in memory.components.items() if count]
    body = [(name, format_bytes(count), f"{count / max(memory.peak, 1):.1%}") for name, count in components]
    lines += columns(body, right=(1, 2))
    lines += ["", f"The {SHOWN} lines that allocated most of it:", ""]
    head = ("component", "region", "pass", "tensors", "bytes", "line")
    body = [
        (one.component, one.place.region, one.place.phase, f"{one.count:,}", format_bytes(one.size), _line(one.place))
        for one in memory.at_peak[:SHOWN]
    ]
    return lines + columns([head, *body], right=(3, 4))


def _line(place: Any) -> str:
    return str(place) if place.number else "before the step"
