"""A rehearsal as tables for people, and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from titanmoe.plan.planned_rows import rows_text
from titanmoe.rehearse.memory_table import memory_as_json, memory_table
from titanmoe.rehearse.order import Verdict
from titanmoe.rehearse.record import Message
from titanmoe.rehearse.work_table import work_as_json, work_table
from titanmoe.rehearse.world import NamedGroup, Rehearsal
from titanmoe.text_report import columns, format_bytes


def messages_by_kind(rehearsal: Rehearsal, messages: list[Message]) -> dict[tuple, list[Message]]:
    """Messages that differ only in layer and time, in the order of the first of each kind."""
    out: dict[tuple, list[Message]] = {}
    for message in messages:
        group = rehearsal.groups[message.group]
        key = group, message.op, message.dtype, message.wait_timing, message.backward, message.site[:2]
        out.setdefault(key, []).append(message)
    return out


def rows(rehearsal: Rehearsal, messages: list[Message]) -> Iterator[dict[str, Any]]:
    for (group, op, dtype, waited, backward, line), same_kind in messages_by_kind(rehearsal, messages).items():
        layers = Counter(message.site.layer for message in same_kind if message.site.layer)
        yield {
            "lane": group.lane,
            "axes": group.axes,
            "ranks": len(group.ranks),
            "nodes": "across" if group.across else "within",
            "op": op,
            "dtype": str(dtype).removeprefix("torch."),
            "count": len(same_kind),
            "sent_bytes": sum(message.sent_bytes for message in same_kind),
            "received_bytes": sum(message.received_bytes for message in same_kind),
            "blocking": waited,
            "pass": "backward" if backward else "forward",
            "line": f"{line[0]}:{line[1]}",
            "by_layer": dict(layers),
        }


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
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
        "work": work_as_json(rehearsal.operations),
        "messages": list(rows(rehearsal, rehearsal.log.messages)),
        "start_up": list(rows(rehearsal, rehearsal.start_up)),
        "syncs": dict(Counter(str(line) for line in rehearsal.log.syncs)),
        "groups": [_group(group) | {"used": name in used} for name, group in rehearsal.groups.items()],
    }


def _group(group: NamedGroup) -> dict[str, Any]:
    return {"lane": group.lane, "axes": group.axes, "ranks": list(group.ranks), "across": group.across}


def table(rehearsal: Rehearsal) -> list[str]:
    fold = rehearsal.fold
    lines = [
        f"rank {rehearsal.rank} of {fold.world}, as on {rehearsal.hardware}, routing {rehearsal.routing.text}"
        + _step(rehearsal),
        f"    attention  {_axes(fold.attention_axes)}",
        f"    experts    {_axes(fold.expert_axes)}",
        *_notes(rehearsal),
        "",
        f"parameters {format_bytes(rehearsal.parameter_bytes)}, gradients {format_bytes(rehearsal.gradient_bytes)}, "
        f"optimizer {format_bytes(rehearsal.optimizer_bytes)}",
        "",
        "One step sends:",
        "",
    ]
    lines += _messages(rehearsal, rehearsal.log.messages)
    total = sum(message.sent_bytes for message in rehearsal.log.messages)
    across = sum(m.sent_bytes for m in rehearsal.log.messages if rehearsal.groups[m.group].across)
    sent_text = f"{format_bytes(total)} sent, {format_bytes(across)} in groups across nodes"
    lines += ["", f"{len(rehearsal.log.messages)} messages, {sent_text}"]
    syncs = Counter(str(line) for line in rehearsal.log.syncs)
    lines += ["", f"The host waits for the device {syncs.total()} times:", ""]
    lines += columns([(str(count), line) for line, count in syncs.items()], right=(0,))
    used = {message.group for message in rehearsal.log.messages}
    created = [group for name, group in rehearsal.groups.items() if name in used]
    lines += ["", f"Communicators that the step creates: {len(created)}", ""]
    lines += columns([(group.lane, group.axes, f"{len(group.ranks)} ranks") for group in created], right=())
    lines += ["", *memory_table(rehearsal.memory), "", *work_table(rehearsal.operations)]
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
            row["blocking"],
            row["pass"],
            row["line"],
        )
        for row in rows(rehearsal, messages)
    ]
    return columns([head, *body], right=(4, 5))


def _remarks(rehearsal: Rehearsal) -> list[str]:
    lines = []
    for title, texts in ("Note:", rehearsal.notes), ("Left out:", rehearsal.left_out):
        if texts:
            lines += ["", title, *(f"    {text}" for text in texts)]
    return lines


def table_of_ranks(rehearsals: list[Rehearsal], verdict: Verdict) -> list[str]:
    first, count = rehearsals[0], len(rehearsals)
    which = "all of them" if count == first.fold.world else f"{count} of them, the others are taken to be alike"
    lines = [
        f"{first.fold.world} ranks, as on {first.hardware}, routing {first.routing.text}{_step(first)}: {which}",
        f"    attention  {_axes(first.fold.attention_axes)}",
        f"    experts    {_axes(first.fold.expert_axes)}",
        *_notes(first),
        "",
    ]
    body = [("rank", "weights", "optimizer", "memory", "messages", "sent", "across nodes", "host waits")]
    for rehearsal in rehearsals:
        messages = rehearsal.log.messages
        across = sum(m.sent_bytes for m in messages if rehearsal.groups[m.group].across)
        sent_bytes = sum(m.sent_bytes for m in messages)
        memory_cells = (
            format_bytes(rehearsal.parameter_bytes),
            format_bytes(rehearsal.optimizer_bytes),
            format_bytes(rehearsal.memory.peak),
        )
        sent_cells = format_bytes(sent_bytes), format_bytes(across)
        body.append(
            (str(rehearsal.rank), *memory_cells, str(len(messages)), *sent_cells, str(len(rehearsal.log.syncs)))
        )
    lines += columns(body, right=tuple(range(8)))
    worst = max(rehearsals, key=lambda rehearsal: rehearsal.memory.peak)
    alike = len(rehearsals) > 1 and all(rehearsal.memory.peak == worst.memory.peak for rehearsal in rehearsals)
    most = "All of them need the same memory." if alike else f"Rank {worst.rank} needs the most memory."
    lines += ["", most, "", *memory_table(worst.memory)]
    lines += ["", f"Order of messages: {verdict.text}"]
    lines += [f"    {text}" for text in verdict.details]
    return [*lines, "", "This does not see:", *(f"    {text}" for text in _unseen(first, count)), *_remarks(first)]


def _unseen(first: Rehearsal, count: int) -> list[str]:
    """Return what the order of messages of so many rehearsed ranks says nothing about."""
    ranks = [f"faults of the {first.fold.world - count} ranks that were not rehearsed (--all-ranks)"]
    return [
        *ranks * (count < first.fold.world),
        f"any step but step {first.step} (--steps)",
        "saving, validation, passes of a reference or a teacher, and what is before the first step",
        "contents: two messages of equal size whose data are swapped",
    ]


def _notes(rehearsal: Rehearsal) -> list[str]:
    notes = {"rows": rows_text(rehearsal.config), "estimates": rehearsal.routing.estimates}
    return [f"    {name:<9}  {text}" for name, text in notes.items() if text]


def _step(rehearsal: Rehearsal) -> str:
    return f", step {rehearsal.step}" if rehearsal.step > 1 else ""


def _axes(axes: dict[str, int]) -> str:
    return " x ".join(f"{name} {n}" for name, n in axes.items())
