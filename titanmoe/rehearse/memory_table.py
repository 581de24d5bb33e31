"""Memory at its peak, as tables for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from titanmoe.rehearse.memory_over_step import Memory
from titanmoe.text_report import columns, format_bytes

SHOWN = 10


def memory_as_json(memory: Memory) -> dict[str, Any]:
    return {
        "peak": memory.peak,
        "at_start": memory.at_start,
        "line": str(memory.site),
        "layer": memory.site.layer,
        "region": memory.site.region,
        "pass": memory.site.phase,
        "components": memory.components,
        "standing": [
            {
                "component": storages.component,
                "line": _site_text(storages.site),
                "region": storages.site.region,
                "pass": storages.site.phase,
                "count": storages.count,
                "bytes": storages.size,
            }
            for storages in memory.at_peak
        ],
    }


def peak_site(memory: Memory) -> str:
    """The line of code at the peak, with its layer, region and pass."""
    site = memory.site
    context = ", ".join(x for x in (site.layer, site.region, site.phase) if x)
    return f"{site} ({context})" if site.number else "the start of the step"


def memory_table(memory: Memory) -> list[str]:
    lines = [f"Memory peaks at {format_bytes(memory.peak)}, at {peak_site(memory)}:", ""]
    components = [(name, count) for name, count in memory.components.items() if count]
    body = [(name, format_bytes(count), f"{count / max(memory.peak, 1):.1%}") for name, count in components]
    lines += columns(body, right=(1, 2))
    lines += ["", f"The {SHOWN} lines that allocated most of it:", ""]
    head = ("component", "region", "pass", "tensors", "bytes", "line")
    body = [
        (
            storages.component,
            storages.site.region,
            storages.site.phase,
            f"{storages.count:,}",
            format_bytes(storages.size),
            _site_text(storages.site),
        )
        for storages in memory.at_peak[:SHOWN]
    ]
    return lines + columns([head, *body], right=(3, 4))


def _site_text(site: Any) -> str:
    return str(site) if site.number else "before the step"
