"""Drawing primitives of the report as SVG. A role is a colour with a meaning, in a light and a dark theme.

Called by titanmoe.report.charts. A drawing is a list of strokes, areas, words and bitmaps. No plotting library: the
report is one file, readable in both themes and without scripts of megabytes.
"""

from __future__ import annotations

import base64
import io
from dataclasses import KW_ONLY, dataclass, field
from html import escape
from typing import Literal

import numpy as np

Point = tuple[float, float]
LIGHT = {
    "page": "#f9f9f7",
    "card": "#fcfcfb",
    "ink": "#0b0b0b",
    "soft": "#52514e",
    "muted": "#898781",
    "grid": "#e1e0d9",
    "base": "#c3c2b7",
    "event": "#d03b3b",
    **dict(c0="#2a78d6", c1="#1baf7a", c2="#eda100", c3="#e34948"),
    **dict(c4="#4a3aa7", c5="#eb6834", c6="#008300", c7="#e87ba4"),
}
DARK = {
    "page": "#0d0d0d",
    "card": "#1a1a19",
    "ink": "#ffffff",
    "soft": "#c3c2b7",
    "muted": "#898781",
    "grid": "#2c2c2a",
    "base": "#383835",
    "event": "#e66767",
    **dict(c0="#3987e5", c1="#199e70", c2="#c98500", c3="#e66767"),
    **dict(c4="#9085e9", c5="#d95926", c6="#00a300", c7="#d55181"),
}
MOST_RUNS = 8
"""Largest number of runs on a page, limited by distinct colours."""


@dataclass
class Stroke:
    """A polyline."""

    points: list[Point]
    role: str
    width: float = 1.6
    opacity: float = 1.0
    dash: bool = False


@dataclass
class Area:
    """A filled polygon."""

    points: list[Point]
    role: str
    opacity: float = 1.0


@dataclass
class Words:
    """A text."""

    x: float
    y: float  # of the base line
    text: str
    role: str = "muted"
    _: KW_ONLY
    size: float = 11
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass
class Picture:
    """A bitmap."""

    x: float
    y: float
    width: float
    height: float
    rgba: np.ndarray


@dataclass
class Sheet:
    """A drawing with a title and marks."""

    width: float
    height: float
    title: str
    marks: list[Stroke | Area | Words | Picture] = field(default_factory=list)
    hover: dict | None = None
    """Values for the page's script, which shows those under the pointer; None without."""


def data_uri(rgba: np.ndarray) -> str:
    """Return a bitmap, RGBA of (height, width, 4) and uint8, as a PNG in a data URI.

    Needs Pillow, which TensorBoard installs.
    """
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(rgba).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def svg(sheet: Sheet, more: str = "") -> str:
    """Return a drawing as an SVG element, with the attributes `more`, HTML that begins with a space."""
    box = f"0 0 {_n(sheet.width)} {_n(sheet.height)}"
    out = [f'<svg viewBox="{box}" role="img" aria-label="{escape(sheet.title)}"{more}>']
    for mark in sheet.marks:
        if isinstance(mark, Words):
            style = f"fill:var(--{mark.role});font-size:{_n(mark.size)}px" + (";font-weight:600" if mark.bold else "")
            out.append(
                f'<text x="{_n(mark.x)}" y="{_n(mark.y)}" text-anchor="{mark.anchor}" style="{style}">'
                f"{escape(mark.text)}</text>"
            )
        elif isinstance(mark, Picture):
            out.append(
                f'<image x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}" '
                f'preserveAspectRatio="none" style="image-rendering:pixelated" href="{data_uri(mark.rgba)}"/>'
            )
        else:
            points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.points)
            if isinstance(mark, Stroke):
                style = f"fill:none;stroke:var(--{mark.role});stroke-width:{_n(mark.width)}"
                style += ";stroke-dasharray:3 3" * mark.dash
            else:
                style = f"fill:var(--{mark.role});stroke:none"
            style += f";opacity:{mark.opacity:.2f}" if mark.opacity < 1 else ""
            out.append(f'<poly{"line" if isinstance(mark, Stroke) else "gon"} points="{points}" style="{style}"/>')
    return "".join([*out, "</svg>"])
