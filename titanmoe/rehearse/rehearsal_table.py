"""A rehearsal as lines of text, and as JSON.

`titanmoe rehearse` prints `format_rehearsal` for one rank or `format_ranks` for several, and writes `as_json`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from titanmoe.files import format_bytes
from titanmoe.plan.planned_overlap import overlap_text
from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.memory_over_step import Memory
from titanmoe.rehearse.message_order import Verdict
from titanmoe.rehearse.message_recorder import Message
from titanmoe.rehearse.operation_costs import Operation, OperationCost, Operations
from titanmoe.rehearse.rehearsal import Rehearsal
from titanmoe.text_report import columns

SHOWN_LINES, SHOWN_OPERATIONS = 10, 12
"""The number of allocating lines and of operations that are printed."""
STEP_PHASES = ("forward", "backward", "recomputed", "update")


def message_rows(rehearsal: Rehearsal, messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield a JSON object for all messages with the same group, operation, dtype, wait, pass and line: count, bytes."""
    by_kind: dict[tuple, list[Message]] = defaultdict(list)
    for message in messages:
        group = rehearsal.groups[message.group]
        key = group, message.op, message.dtype, message.wait_timing, message.backward, message.site[:2]
        by_kind[key].append(message)
    for (group, op, dtype, waited, backward, line), same_kind in by_kind.items():
        layers = Counter(message.site.layer for message in same_kind if message.site.layer)
        yield {
            "communicator": group.kind,
            "axes": group.axes,
            "ranks": len(group.ranks),
            "nodes": "across" if group.across else "within",
            "op": op,
            "dtype": str(dtype).removeprefix("torch."),
            "count": len(same_kind),
            "sent_bytes": sum(message.sent_bytes for message in same_kind),
            "received_bytes": sum(message.received_bytes for message in same_kind),
            "waited_for": waited,
            "pass": "backward" if backward else "forward",
            "line": f"{line[0]}:{line[1]}",
            "by_layer": dict(layers),
        }


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the full rehearsal of a rank as a JSON object, for `--json`.

    It has "world", "rank", "step", "hardware", the assumed routing, notes, "bytes" of parameters, gradients and
    optimizer, "memory" (`memory_as_json`), "work" (`costs_as_json`), "messages", "start_up", "syncs" and "groups".
    """
    used = {message.group for message in rehearsal.log.messages}
    return {
        "world": rehearsal.fold.world,
        "rank": rehearsal.rank,
        "step": rehearsal.step,
        "hardware": rehearsal.hardware,
        "routing": rehearsal.routing.text,
        "estimates": rehearsal.routing.estimates,
        "left_out": rehearsal.left_out,
        "notes": rehearsal.notes,
        "bytes": {
            "parameters": rehearsal.parameter_bytes,
            "gradients": rehearsal.gradient_bytes,
            "optimizer": rehearsal.optimizer_bytes,
        },
        "memory": memory_as_json(rehearsal.memory),
        "work": costs_as_json(rehearsal.operations),
        "messages": list(message_rows(rehearsal, rehearsal.log.messages)),
        "start_up": list(message_rows(rehearsal, rehearsal.start_up)),
        "syncs": dict(Counter(str(line) for line in rehearsal.log.syncs)),
        "groups": [
            {
                "communicator": group.kind,
                "axes": group.axes,
                "ranks": list(group.ranks),
                "across": group.across,
                "used": name in used,
            }
            for name, group in rehearsal.groups.items()
        ],
    }


def format_rehearsal(rehearsal: Rehearsal) -> list[str]:
    """Return the report of one rank's rehearsal as lines to print.

    It has the messages, host waits, communicators, memory at its peak and operations of the step, then the messages
    before the first step, notes, and what was left out.
    """
    lines = [
        *_heading(rehearsal, f"rank {rehearsal.rank} of {rehearsal.fold.world}"),
        f"parameters {format_bytes(rehearsal.parameter_bytes)}, gradients {format_bytes(rehearsal.gradient_bytes)}, "
        f"optimizer {format_bytes(rehearsal.optimizer_bytes)}",
        "",
        "One step sends:",
        "",
    ]
    lines += _messages(rehearsal, rehearsal.log.messages)
    total, across = map(format_bytes, sent_bytes(rehearsal))
    lines += ["", f"{len(rehearsal.log.messages)} messages, {total} sent, {across} in groups across nodes"]
    syncs = Counter(str(line) for line in rehearsal.log.syncs)
    lines += ["", f"The host waits for the device {syncs.total()} times:", ""]
    lines += columns([(str(count), line) for line, count in syncs.items()], right=(0,))
    used = {message.group for message in rehearsal.log.messages}
    created = [group for name, group in rehearsal.groups.items() if name in used]
    lines += ["", f"Communicators that the step creates: {len(created)}", ""]
    lines += columns([(group.kind, group.axes, f"{len(group.ranks)} ranks") for group in created], right=())
    lines += ["", *memory_lines(rehearsal.memory), "", *cost_lines(rehearsal.operations)]
    if rehearsal.start_up:
        lines += ["", "Before the first step symmetric memory sends:", "", *_messages(rehearsal, rehearsal.start_up)]
    return lines + _remarks(rehearsal)


def _messages(rehearsal: Rehearsal, messages: list[Message]) -> list[str]:
    head = ("axes", "nodes", "operation", "dtype", "count", "sent", "waited for", "pass", "line")
    body = [
        (
            f"{row['axes']} ({row['ranks']})",
            row["nodes"],
            row["op"],
            row["dtype"],
            str(row["count"]),
            format_bytes(row["sent_bytes"]),
            row["waited_for"],
            row["pass"],
            row["line"],
        )
        for row in message_rows(rehearsal, messages)
    ]
    return columns([head, *body], right=(4, 5))


def _remarks(rehearsal: Rehearsal) -> list[str]:
    lines = []
    for title, texts in ("Note:", rehearsal.notes), ("Left out:", rehearsal.left_out):
        if texts:
            lines += ["", title, *(f"    {text}" for text in texts)]
    return lines


def format_ranks(rehearsals: list[Rehearsal], verdict: Verdict) -> list[str]:
    """Return the report of several ranks as lines to print: a row for each, the largest memory, and the verdict.

    Memory by component is that of the rank with the highest peak; notes are those of the first rank.
    """
    first, count = rehearsals[0], len(rehearsals)
    which = "all of them" if count == first.fold.world else f"{count} of them, the others are taken to be alike"
    lines = _heading(first, f"{first.fold.world} ranks", f": {which}")
    body = [("rank", "weights", "optimizer", "memory", "messages", "sent", "across nodes", "host waits")]
    for rehearsal in rehearsals:
        sizes = rehearsal.parameter_bytes, rehearsal.optimizer_bytes, rehearsal.memory.peak
        counts = str(len(rehearsal.log.messages)), *map(format_bytes, sent_bytes(rehearsal))
        body.append((str(rehearsal.rank), *map(format_bytes, sizes), *counts, str(len(rehearsal.log.syncs))))
    lines += columns(body, right=tuple(range(8)))
    worst = max(rehearsals, key=lambda rehearsal: rehearsal.memory.peak)
    equal = len(rehearsals) > 1 and all(rehearsal.memory.peak == worst.memory.peak for rehearsal in rehearsals)
    most = "All of them need the same memory." if equal else f"Rank {worst.rank} needs the most memory."
    lines += ["", most, "", *memory_lines(worst.memory)]
    lines += ["", f"Order of messages: {verdict.text}"]
    lines += [f"    {text}" for text in verdict.details]
    return [*lines, "", "This does not see:", *(f"    {text}" for text in _unseen(first, count)), *_remarks(first)]


def _unseen(first: Rehearsal, count: int) -> list[str]:
    """Return lines that say which faults the check of message order cannot find.

    `first` is one of the `count` rehearsals that are checked.
    """
    ranks = [f"faults of the {first.fold.world - count} ranks that were not rehearsed (--all-ranks)"]
    return [
        *ranks * (count < first.fold.world),
        f"any step but step {first.step} (--steps)",
        "saving, validation, passes of a reference or a teacher, and what is before the first step",
        "contents: two messages of equal size whose data are swapped",
    ]


def _heading(rehearsal: Rehearsal, ranks: str, which: str = "") -> list[str]:
    """Return the lines above a report: ranks, hardware, routing, mapping, overlap, and an empty line.

    `ranks` and `which` are texts that begin and end the first line.
    """
    step = f", step {rehearsal.step}" if rehearsal.step > 1 else ""
    views = {"attention": rehearsal.fold.attention_axes, "experts": rehearsal.fold.expert_axes}
    texts = {view: " x ".join(f"{name} {n}" for name, n in axes.items()) for view, axes in views.items()}
    texts |= {"dispatch": overlap_text(rehearsal.config), "estimates": rehearsal.routing.estimates}
    return [
        f"{ranks}, as on {rehearsal.hardware}, routing {rehearsal.routing.text}{step}{which}",
        *(f"    {name:<9}  {text}" for name, text in texts.items() if text),
        "",
    ]


def sent_bytes(rehearsal: Rehearsal) -> tuple[int, int]:
    """Return the bytes of the inputs of a rank's messages in a step: (in all groups, in groups that span nodes)."""
    messages = rehearsal.log.messages
    across = sum(message.sent_bytes for message in messages if rehearsal.groups[message.group].across)
    return sum(message.sent_bytes for message in messages), across


# ---- memory at its peak


def memory_as_json(memory: Memory) -> dict[str, Any]:
    """Return a step's memory as a JSON object: bytes at its start and peak, and the line of code that reaches the peak.

    "components" are the bytes at the peak by component, "at_peak" the storages by component and line of code.
    """
    return {
        "peak": memory.peak,
        "at_start": memory.at_start,
        "line": str(memory.site),
        "layer": memory.site.layer,
        "region": memory.site.region,
        "pass": memory.site.phase,
        "components": memory.components,
        "at_peak": [
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


def memory_lines(memory: Memory) -> list[str]:
    """Return lines to print about the memory peak: its components, and the ten lines of code that allocated most."""
    site = memory.site
    context = ", ".join(x for x in (site.layer, site.region, site.phase) if x)
    peak_site = f"{site} ({context})" if site.line else "the start of the step"
    lines = [f"Memory peaks at {format_bytes(memory.peak)}, at {peak_site}:", ""]
    components = [(name, count) for name, count in memory.components.items() if count]
    body = [(name, format_bytes(count), f"{count / max(memory.peak, 1):.1%}") for name, count in components]
    lines += columns(body, right=(1, 2))
    lines += ["", f"The {SHOWN_LINES} lines that allocated most of it:", ""]
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
        for storages in memory.at_peak[:SHOWN_LINES]
    ]
    return lines + columns([head, *body], right=(3, 4))


def _site_text(site: CodeSite) -> str:
    return str(site) if site.line else "before the step"


# ---- operations


def counts_by_layer(operations: Operations) -> dict[Operation, Counter[str]]:
    """Return the operations without their layer, each with its number of launches by layer, "" outside of layers."""
    counts: dict[Operation, Counter[str]] = defaultdict(Counter)
    for operation, count in operations.items():
        anywhere = operation._replace(site=operation.site._replace(layer=""))
        counts[anywhere][operation.site.layer] += count
    return counts


def costs_as_json(operations: Operations) -> dict[str, Any]:
    """Return a step's kernels, FLOPs and bytes as a JSON object: in all, by operation, layer, and region and pass.

    An entry of "operations" has the figures of one launch, and "count" launches.
    """
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
            for operation, layers in counts_by_layer(operations).items()
        ],
        "by_layer": {name: asdict(cost) for name, cost in operations.totals_by(lambda x: x.site.layer).items() if name},
        "by_region": {
            name: {phase: asdict(cost) for phase, cost in phases.items()}
            for name, phases in _costs_by_region(operations).items()
        },
    }


def _costs_by_region(operations: Operations) -> dict[str, dict[str, OperationCost]]:
    """Return the costs by region, then by phase; operations outside any region are under ""."""
    totals: dict[str, dict[str, OperationCost]] = defaultdict(dict)
    for (region, phase), cost in operations.totals_by(lambda x: (x.site.region, x.site.phase)).items():
        totals[region][phase] = cost
    return totals


def cost_lines(operations: Operations) -> list[str]:
    """Return lines to print about the cost of a step: by region and pass, and the twelve operations with most bytes.

    An operation is all launches of one torch operation from one line of code, in one region and pass.
    """
    total = operations.total()
    lines = [
        f"One step computes: {total.kernels:,} kernels, {total.flops:.4g} FLOPs, {format_bytes(total.read)} read and "
        f"{format_bytes(total.written)} written",
        "",
    ]
    body = [("region", "pass", "kernels", "FLOPs", "read", "written")]
    for region, phases in sorted(
        _costs_by_region(operations).items(), key=lambda x: -sum(w.moved for w in x[1].values())
    ):
        for phase in STEP_PHASES:
            if phase in phases:
                cost = phases[phase]
                counts = f"{cost.kernels:,}", f"{cost.flops:.3g}" if cost.flops else "", format_bytes(cost.read)
                body.append((region or "(none)", phase, *counts, format_bytes(cost.written)))
    lines += columns(body, right=(2, 3, 4, 5))
    lines += ["", f"The {SHOWN_OPERATIONS} operations that move the most bytes:", ""]
    moved = operations.totals_by(lambda x: (x.name, x.site.region, x.site.phase, str(x.site)))
    body = [("operation", "region", "pass", "kernels", "FLOPs", "bytes", "of all", "line")]
    for (name, region, phase, line), cost in sorted(moved.items(), key=lambda x: -x[1].moved)[:SHOWN_OPERATIONS]:
        fraction = f"{cost.moved / max(total.moved, 1):.1%}"
        flops = f"{cost.flops:.3g}" if cost.flops else ""
        body.append((name, region, phase, f"{cost.kernels:,}", flops, format_bytes(cost.moved), fraction, line))
    return lines + columns(body, right=(3, 4, 5, 6))
