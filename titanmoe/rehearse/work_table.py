"""The operations of a step as tables for people, and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from titanmoe.rehearse.work import Operation, Operations, Work, work_of
from titanmoe.text_report import columns, format_bytes

SHOWN = 12
STEP_PHASES = ("forward", "backward", "recomputed", "update")


def by_layer(operations: Operations) -> dict[Operation, Counter[str]]:
    """Counts by layer of operations that differ in nothing else."""
    counts: dict[Operation, Counter[str]] = {}
    for operation, count in operations.items():
        counts.setdefault(operation._replace(site=operation.site._replace(layer="")), Counter())[
            operation.site.layer
        ] += count
    return counts


def work_as_json(operations: Operations) -> dict[str, Any]:
    return asdict(operations.total()) | {
        "operations": [
            {
                "op": operation.name,
                "line": str(operation.site),
                "region": operation.site.region,
                "pass": operation.site.phase,
                "count": layers.total(),
                "flops": operation.flops,
                "read": operation.read,
                "written": operation.written,
                "by_layer": {layer: count for layer, count in layers.items() if layer},
            }
            for operation, layers in by_layer(operations).items()
        ],
        "by_layer": {name: asdict(work) for name, work in operations.totals_by("layer").items() if name},
        "by_region": {
            name: {phase: asdict(work) for phase, work in phases.items()}
            for name, phases in _regions(operations).items()
        },
    }


def _regions(operations: Operations) -> dict[str, dict[str, Work]]:
    """By region, then by phase; operations outside any region are under ""."""
    totals: dict[str, dict[str, Work]] = {}
    for operation, count in operations.items():
        phases = totals.setdefault(operation.site.region, {})
        phases.setdefault(operation.site.phase, Work()).__iadd__(work_of(operation) * count)
    return totals


def work_table(operations: Operations) -> list[str]:
    total = operations.total()
    lines = [
        f"One step computes: {total.kernels:,} kernels, {total.flops:.4g} FLOPs, {format_bytes(total.read)} read and "
        f"{format_bytes(total.written)} written",
        "",
    ]
    body = [("region", "pass", "kernels", "FLOPs", "read", "written")]
    for region, phases in sorted(_regions(operations).items(), key=lambda x: -sum(w.moved for w in x[1].values())):
        for phase in STEP_PHASES:
            if phase in phases:
                work = phases[phase]
                counts = f"{work.kernels:,}", f"{work.flops:.3g}" if work.flops else "", format_bytes(work.read)
                body.append((region or "(none)", phase, *counts, format_bytes(work.written)))
    lines += columns(body, right=(2, 3, 4, 5))
    lines += ["", f"The {SHOWN} operations that move the most bytes:", ""]
    moved: dict[tuple, Work] = {}
    for operation, count in operations.items():
        key = operation.name, operation.site.region, operation.site.phase, str(operation.site)
        moved.setdefault(key, Work()).__iadd__(work_of(operation) * count)
    body = [("operation", "region", "pass", "kernels", "FLOPs", "bytes", "of all", "line")]
    for (name, region, phase, line), work in sorted(moved.items(), key=lambda x: -x[1].moved)[:SHOWN]:
        share = f"{work.moved / max(total.moved, 1):.1%}"
        flops = f"{work.flops:.3g}" if work.flops else ""
        body.append((name, region, phase, f"{work.kernels:,}", flops, format_bytes(work.moved), share, line))
    return lines + columns(body, right=(3, 4, 5, 6))
