"""Memory over a step as one self-contained HTML page, drawn like the pages of `titanmoe report`."""

from __future__ import annotations

from html import escape

from titanmoe.rehearse.memory_over_step import COMPONENTS, Memory
from titanmoe.rehearse.memory_table import peak_site
from titanmoe.rehearse.world import Rehearsal
from titanmoe.report.charts import Curve, Frame
from titanmoe.report.draw import Area, Sheet, Stroke, Words
from titanmoe.report.page import document, figure
from titanmoe.text_report import format_bytes

ROLES = dict(zip(COMPONENTS, ("c0", "c1", "c2", "c4", "c3", "c5", "ink", "c6", "c7", "soft", "muted"), strict=True))
SIZE = (1240.0, 420.0)


def picture(rehearsals: list[Rehearsal]) -> str:
    first = rehearsals[0]
    title = f"Memory of a step: {first.config.model.family} {first.config.model.size} on {first.fold.world} ranks"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">As on {first.hardware}, routing {escape(first.routing.text)}.</p>',
    ]
    for rehearsal in rehearsals:
        sheet = chart(
            rehearsal.memory,
            f"Rank {rehearsal.rank}: peak of {format_bytes(rehearsal.memory.peak)}, at {peak_site(rehearsal.memory)}",
        )
        parts.append(figure(sheet))
    return document(title, parts)


def chart(memory: Memory, title: str) -> Sheet:
    """Components stacked, with the peak marked."""
    x = [float(operation) for operation in memory.picture_operations]
    names = [name for name in COMPONENTS if any(memory.curves[name])]
    curves = [Curve(name, x, [float(y) for y in memory.curves[name]], ROLES[name]) for name in names]
    frame = Frame(title, "over operations", (x[0], x[-1]), (0.0, float(memory.peak)), format_bytes, *SIZE, curves)
    below = [0.0] * len(x)
    for curve in curves:
        above = [a + b for a, b in zip(below, curve.y, strict=True)]
        edge = [frame.point(*point) for point in zip(x, above, strict=True)]
        floor = [frame.point(*point) for point in zip(x[::-1], below[::-1], strict=True)]
        frame.sheet.marks.append(Area(edge + floor, curve.role, 0.85))
        below = above
    at = x[below.index(max(below))]
    foot, top = frame.point(at, 0.0), frame.point(at, frame.y[1])
    frame.sheet.marks.append(Stroke([foot, top], "event", 1.2, dash=True))
    frame.sheet.marks.append(Words(top[0] + 3, top[1] + 9, "peak", "event", 10))
    frame.hover(curves)
    frame.sheet.hover["what"] = "operation "
    return frame.sheet
