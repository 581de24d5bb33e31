"""The operations of a step as tables for people, and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from titanmoe.rehearse.columns import columns, size
from titanmoe.rehearse.work import Operation, Operations, Work, work_of

SHOWN = 12
PARTS = ("forward", "backward", "recomputed", "update")


def by_layer(operations: Operations) -> dict[Operation, Counter[str]]:
    """Operations that differ in nothing but their layer."""
    found: dict[Operation, Counter[str]] = {}
    for one, count in operations.items():
        found.setdefault(one._replace(place=one.place._replace(layer="")), Counter())[one.place.layer] += count
    return found


def work_as_json(operations: Operations) -> dict[str, Any]:
    return asdict(operations.total()) | {
        "operations": [
            {
                "op": one.name,
                "line": str(one.place),
                "region": one.place.region,
                "pass": one.place.part,
                "count": layers.total(),
                "flops": one.flops,
                "read": one.read,
                "written": one.written,
                "by_layer": {layer: count for layer, count in layers.items() if layer},
            }
            for one, layers in by_layer(operations).items()
        ],
        "by_layer": {name: asdict(work) for name, work in operations.by("layer").items() if name},
        "by_region": {
            name: {part: asdict(work) for part, work in parts.items()} for name, parts in _regions(operations).items()
        },
    }


def _regions(operations: Operations) -> dict[str, dict[str, Work]]:
    """By region, and there by pass; what is in no region is under ""."""
    found: dict[str, dict[str, Work]] = {}
    for one, count in operations.items():
        parts = found.setdefault(one.place.region, {})
        parts.setdefault(one.place.part, Work()).__iadd__(work_of(one) * count)
    return found


def work_table(operations: Operations) -> list[str]:
    total = operations.total()
    lines = [
        f"One step computes: {total.kernels:,} kernels, {total.flops:.4g} FLOPs, {size(total.read)} read and "
        f"{size(total.written)} written",
        "",
    ]
    body = [("region", "in", "kernels", "FLOPs", "read", "written")]
    for region, parts in sorted(_regions(operations).items(), key=lambda x: -sum(w.moved for w in x[1].values())):
        for part in PARTS:
            if part in parts:
                work = parts[part]
                counts = f"{work.kernels:,}", f"{work.flops:.3g}" if work.flops else "", size(work.read)
                body.append((region or "(none)", part, *counts, size(work.written)))
    lines += columns(body, right=(2, 3, 4, 5))
    lines += ["", f"The {SHOWN} operations that move most bytes:", ""]
    moved: dict[tuple, Work] = {}
    for one, count in operations.items():
        key = one.name, one.place.region, one.place.part, str(one.place)
        moved.setdefault(key, Work()).__iadd__(work_of(one) * count)
    body = [("operation", "region", "in", "kernels", "FLOPs", "bytes", "of all", "by")]
    for (name, region, part, line), work in sorted(moved.items(), key=lambda x: -x[1].moved)[:SHOWN]:
        share = f"{work.moved / max(total.moved, 1):.1%}"
        flops = f"{work.flops:.3g}" if work.flops else ""
        body.append((name, region, part, f"{work.kernels:,}", flops, size(work.moved), share, line))
    return lines + columns(body, right=(3, 4, 5, 6))
