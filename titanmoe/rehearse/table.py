"""A rehearsal as a table for people, and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from titanmoe.rehearse.order import Verdict
from titanmoe.rehearse.record import Message
from titanmoe.rehearse.world import Named, Rehearsal

UNITS = ("B", "KB", "MB", "GB", "TB")


def size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}"


def kinds(rehearsal: Rehearsal) -> dict[tuple, list[Message]]:
    """Messages that differ in nothing but their layer and moment, in the order of the first of each."""
    out: dict[tuple, list[Message]] = {}
    for message in rehearsal.log.messages:
        group = rehearsal.groups[message.group]
        key = group, message.op, message.dtype, message.waited, message.backward, message.line[:2]
        out.setdefault(key, []).append(message)
    return out


def rows(rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    for (group, op, dtype, waited, backward, line), messages in kinds(rehearsal).items():
        layers = Counter(message.line.layer for message in messages if message.line.layer)
        yield {
            "lane": group.lane,
            "axes": group.axes,
            "ranks": len(group.ranks),
            "nodes": "across" if group.across else "within",
            "op": op,
            "dtype": str(dtype).removeprefix("torch."),
            "count": len(messages),
            "sent_bytes": sum(message.sent for message in messages),
            "received_bytes": sum(message.received for message in messages),
            "waited": waited,
            "pass": "backward" if backward else "forward",
            "line": f"{line[0]}:{line[1]}",
            "by_layer": dict(layers),
        }


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
    used = {message.group for message in rehearsal.log.messages}
    return {
        "world": rehearsal.fold.world,
        "rank": rehearsal.rank,
        "hardware": rehearsal.hardware,
        "routing": rehearsal.routing.text,
        "estimates": rehearsal.routing.estimates,
        "left_out": rehearsal.left_out,
        "bytes": {
            "parameters": rehearsal.parameter_bytes,
            "gradients": rehearsal.gradient_bytes,
            "optimizer": rehearsal.optimizer_bytes,
        },
        "work": asdict(rehearsal.work),
        "messages": list(rows(rehearsal)),
        "syncs": dict(Counter(str(line) for line in rehearsal.log.syncs)),
        "groups": [_group(group) | {"used": name in used} for name, group in rehearsal.groups.items()],
    }


def _group(group: Named) -> dict[str, Any]:
    return {"lane": group.lane, "axes": group.axes, "ranks": list(group.ranks), "across": group.across}


def table(rehearsal: Rehearsal) -> list[str]:
    fold = rehearsal.fold
    lines = [
        f"rank {rehearsal.rank} of {fold.world}, as on {rehearsal.hardware}, routing {rehearsal.routing.text}",
        f"    attention  {_axes(fold.attention_axes)}",
        f"    experts    {_axes(fold.expert_axes)}",
        *_estimates(rehearsal),
        "",
        f"parameters {size(rehearsal.parameter_bytes)}, gradients {size(rehearsal.gradient_bytes)}, "
        f"optimizer {size(rehearsal.optimizer_bytes)}",
        f"{rehearsal.work.kernels:,} kernels, {rehearsal.work.flops:.4g} FLOPs, {size(rehearsal.work.read)} read and "
        f"{size(rehearsal.work.written)} written",
        "",
        "One step sends:",
        "",
    ]
    head = ("axes", "nodes", "what", "dtype", "count", "sent", "waited for", "in", "by")
    body = [
        (
            f"{row['axes']} ({row['ranks']})",
            row["nodes"],
            row["op"],
            row["dtype"],
            str(row["count"]),
            size(row["sent_bytes"]),
            row["waited"],
            row["pass"],
            row["line"],
        )
        for row in rows(rehearsal)
    ]
    lines += columns([head, *body], right=(4, 5))
    total = sum(message.sent for message in rehearsal.log.messages)
    across = sum(m.sent for m in rehearsal.log.messages if rehearsal.groups[m.group].across)
    lines += ["", f"{len(rehearsal.log.messages)} messages, {size(total)} sent, {size(across)} in groups across nodes"]
    syncs = Counter(str(line) for line in rehearsal.log.syncs)
    lines += ["", f"The host waits for the device {syncs.total()} times:", ""]
    lines += columns([(str(count), line) for line, count in syncs.items()], right=(0,))
    used = {message.group for message in rehearsal.log.messages}
    made = [group for name, group in rehearsal.groups.items() if name in used]
    lines += ["", f"Communicators that the step makes: {len(made)}", ""]
    lines += columns([(group.lane, group.axes, f"{len(group.ranks)} ranks") for group in made], right=())
    if rehearsal.left_out:
        lines += ["", "Left out:", *(f"    {text}" for text in rehearsal.left_out)]
    return lines


def table_of_roles(rehearsals: list[Rehearsal], verdict: Verdict) -> list[str]:
    first = rehearsals[0]
    lines = [
        f"{first.fold.world} ranks, as on {first.hardware}, routing {first.routing.text}: one rank of each stage",
        f"    attention  {_axes(first.fold.attention_axes)}",
        f"    experts    {_axes(first.fold.expert_axes)}",
        *_estimates(first),
        "",
    ]
    body = [("rank", "weights", "optimizer", "messages", "sent", "of that across nodes", "host waits")]
    for one in rehearsals:
        messages = one.log.messages
        across = sum(m.sent for m in messages if one.groups[m.group].across)
        sent = sum(m.sent for m in messages)
        kept = size(one.parameter_bytes), size(one.optimizer_bytes)
        body.append((str(one.rank), *kept, str(len(messages)), size(sent), size(across), str(len(one.log.syncs))))
    lines += columns(body, right=tuple(range(7)))
    lines += ["", f"Order of messages: {verdict.text}"]
    lines += [f"    {text}" for text in verdict.concerned]
    if first.left_out:
        lines += ["", "Left out:", *(f"    {text}" for text in first.left_out)]
    return lines


def _estimates(rehearsal: Rehearsal) -> list[str]:
    why = rehearsal.routing.estimates
    return [f"    estimates  {why}"] if why else []


def _axes(axes: dict[str, int]) -> str:
    return " x ".join(f"{name} {n}" for name, n in axes.items())


def columns(body: list[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    if not body:
        return []
    widths = [max(len(row[i]) for row in body) for i in range(len(body[0]))]
    lines = []
    for row in body:
        cells = zip(row, widths, range(len(row)), strict=True)
        lines.append("    " + "  ".join(x.rjust(w) if i in right else x.ljust(w) for x, w, i in cells).rstrip())
    return lines
