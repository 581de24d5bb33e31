"""The charts of the report: curves, stacked times, heat maps of loads and ranks, quiz answers.

Called by titanmoe.report.page, which places them. A chart is a function from the runs' metrics to a drawing
(titanmoe.report.draw), or None without data.

Shapes: E experts, R ranks, C columns (steps) of a heat map, Q questions of a quiz.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from titanmoe.config.schema import QUIZ_METRICS
from titanmoe.load_colours import transparent_colours
from titanmoe.report.draw import Area, Picture, Point, Sheet, Stroke, Words
from titanmoe.report.read_run import Run

LEFT, RIGHT, TOP, BOTTOM, LEGEND = 50, 12, 34, 26, 16
SIZE = (420.0, 230.0)
LETTER = 6.1
"""Approximate width of a letter in a legend, because the page's font is not known here."""
FEW = 12
"""Number of points up to which a curve marks each of them."""
POINTS = 400
"""Largest number of points of a curve; of more, the extremes of each interval are drawn."""
PHASES = {
    "forward_backward": ("forward and backward", "c0"),
    "optimizer": ("optimizer", "c1"),
    "data": ("data", "c2"),
    "generate": ("generate", "c5"),
    "reward": ("reward", "c6"),
    "checkpoint": ("checkpoint", "c3"),
    "validation": ("validation", "c4"),
    "other": ("other", "muted"),
}


class Curve(NamedTuple):
    """A named curve and its colour role."""

    name: str
    x: list[float]
    y: list[float]
    role: str


class Mark(NamedTuple):
    """An event that is marked at a step of a chart."""

    step: float
    text: str
    role: str


def number(value: float) -> str:
    """Return a number as short text, such as 6.7k for 6,699."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * limit:  # three digits round it up
            return f"{value / limit:.3g}{unit}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Return a fraction as text in percent, such as 12% for 0.12; "<0.1%" if it is above 0 and below 0.001."""
    if 0 < value < 0.001:
        return "<0.1%"
    return f"{100 * value:.2g}%" if value < 0.1 else f"{100 * value:.0f}%"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers at equal distances within low to high, for the ticks of an axis; [low] if high <= low.

    Args:
        about: how many ticks to aim at.
    """
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def smooth(y: list[float]) -> list[float]:
    """Return the exponential moving average of a curve over about a fortieth of it, without bias at the start."""
    keep, total, weight, out = 1 - 1 / max(2.0, len(y) / 40), 0.0, 0.0, []
    for value in y:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def thin(x: list[float], y: list[float]) -> list[Point]:
    """Return at most POINTS points (x, y) of a curve: minimum and maximum of each interval, to lose no spike."""
    if len(x) <= POINTS:
        return list(zip(x, y, strict=True))
    out: list[Point] = []
    edges = np.linspace(0, len(x), POINTS // 2 + 1).astype(int)
    for a, b in pairwise(edges):
        for i in sorted({a + int(np.argmin(y[a:b])), a + int(np.argmax(y[a:b]))}):
            out.append((x[i], y[i]))
    return out


class Frame:
    """The axes of a chart, which map values to positions on its drawing, `sheet`.

    Args:
        unit: a text at its right; "" for none.
        x: the least and the largest value of the x axis.
        y: likewise of the y axis, which gets a margin.
        form: formats the numbers at the y axis.
        size: width and height in pixels.
        legend: curves to name at the top; None for none.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        *,
        x: Point,
        y: Point,
        form: Callable[[float], str],
        size: Point,
        legend: list[Curve] | None = None,
    ):
        self.x, (width, height) = x, size
        self.width, self.height = size
        self.top = TOP
        pad = 0.06 * (y[1] - y[0]) or abs(y[0]) * 0.1 or 1.0
        self.y = (0.0 if 0 <= y[0] < 0.25 * y[1] or y[0] == 0 else y[0] - pad, y[1] + pad)
        self.sheet = Sheet(width, height, title)
        add = self.sheet.marks.append
        add(Words(12, 19, title, "ink", size=13, bold=True))
        if unit:
            add(Words(width - RIGHT, 19, unit, "muted", size=11, anchor="end"))
        at = width
        for curve in legend or ():
            wide = 33 + LETTER * len(curve.name)
            if at + wide > width:
                at, self.top = 12.0, self.top + LEGEND
            add(Stroke([(at, self.top - 15), (at + 14, self.top - 15)], curve.role, 3))
            add(Words(at + 19, self.top - 11, curve.name, "soft", size=11))
            at += wide
        for value in ticks(*self.y, about=max(4, round(height / 70))):
            at = self.point(x[0], value)[1]
            add(Stroke([(LEFT, at), (width - RIGHT, at)], "grid", 1))
            add(Words(LEFT - 6, at + 4, form(value), anchor="end"))
        add(Stroke([(LEFT, height - BOTTOM), (width - RIGHT, height - BOTTOM)], "base", 1))
        for value in ticks(*x, about=max(2, round(width / 110))):
            if value == int(value):
                add(Words(self.point(value, 0)[0], height - BOTTOM + 16, number(value), anchor="middle"))

    def point(self, x: float, y: float) -> Point:
        """Return the position on the drawing of the values (x, y), between the axes of the chart."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        right, floor = self.width - RIGHT, self.height - BOTTOM
        return LEFT + across * (right - LEFT), floor - up * (floor - self.top)

    def line(self, points: list[Point], role: str, width: float, opacity: float = 1.0) -> None:
        """Draw a line through points that are given as values (x, y).

        Args:
            points: values on the chart's axes, not positions on the drawing.
            role: role that the line's colour comes from, such as "soft".
            opacity: 1 is opaque.
        """
        self.sheet.marks.append(Stroke([self.point(*point) for point in points], role, width, opacity))

    def hover(self, curves: list[Curve]) -> None:
        """Set `sheet.hover` to the curves' values, for the page's script, which shows those under the pointer.

        They are those of `thin`, at most POINTS of a curve, in five digits.
        """
        self.sheet.hover = {
            "x": [self.x, [LEFT, self.width - RIGHT]],
            "top": [self.top, self.height - BOTTOM],
            "series": [
                {"name": c.name, "role": c.role, "points": [[x, float(f"{y:.5g}")] for x, y in thin(c.x, c.y)]}
                for c in curves
            ],
        }


def curves_chart(
    title: str,
    unit: str,
    curves: list[Curve],
    form: Callable[[float], str] = number,
    smoothed: bool = False,
    marks: Sequence[Mark] = (),
    size: tuple[float, float] = SIZE,
) -> Sheet | None:
    """Return a chart of curves over training steps; None if no curve has points.

    Args:
        unit: a text at its right, such as the unit of y.
        form: formats the numbers at the y axis.
        smoothed: whether to draw a moving average over curves of 30 points or more.
        marks: events, each drawn as a dashed line at its step; those outside the curves' steps are left out.
        size: width and height in pixels.
    """
    curves = [curve for curve in curves if curve.x]
    if not curves:
        return None
    xs, ys = ([value for curve in curves for value in getattr(curve, axis)] for axis in ("x", "y"))
    ends = {"x": (min(xs), max(xs)), "y": (min(ys), max(ys))}
    frame = Frame(title, unit, **ends, form=form, size=size, legend=curves if len(curves) > 1 else None)
    rows: list[float] = []  # where the texts of each row end
    for mark in sorted(marks):
        if min(xs) <= mark.step <= max(xs):
            ends = [frame.point(mark.step, frame.y[0]), frame.point(mark.step, frame.y[1])]
            frame.sheet.marks.append(Stroke(ends, mark.role, 1.2, dash=True))
            wide = LETTER * len(mark.text)
            start = ends[1][0] + 3 if ends[1][0] + 3 + wide <= frame.width else ends[1][0] - 3 - wide
            row = next((i for i, end in enumerate(rows) if end < start), len(rows))
            rows[row : row + 1] = [start + wide]
            anchor, across = ("start", start) if start > ends[1][0] else ("end", start + wide)
            frame.sheet.marks.append(
                Words(across, ends[1][1] + 9 + 11 * row, mark.text, mark.role, size=10, anchor=anchor)
            )
    for curve in curves:
        soft = smoothed and len(curve.x) >= 30
        frame.line(thin(curve.x, curve.y), curve.role, 1.2 if soft else 1.8, 0.3 if soft else 1.0)
        if soft:
            frame.line(thin(curve.x, smooth(curve.y)), curve.role, 2.0)
        for point in zip(curve.x, curve.y, strict=True) if len(curve.x) <= FEW else ():
            x, y = frame.point(*point)
            frame.sheet.marks.append(Area([(x - 3, y), (x, y - 3), (x + 3, y), (x, y + 3)], curve.role))
    frame.hover(curves)
    return frame.sheet


def times_chart(run: Run, title: str) -> Sheet | None:
    """Return a stacked chart of the seconds that each phase of a step takes, over the steps; None without times.

    Of more than two lines of metrics.jsonl the first is left out, because its start-up would flatten the rest. Phases
    without time are left out; dispatch, a part of forward and backward, is in the legend but not in the stack.
    """
    lines = [line for line in run.lines if "time.forward_backward" in line]
    lines = lines[1:] if len(lines) > 2 else lines
    if not lines:
        return None
    stride = math.ceil(len(lines) / POINTS)
    groups = [lines[i : i + stride] for i in range(0, len(lines), stride)]
    x = [float(group[-1]["step"]) for group in groups]
    if len(x) == 1:
        x, groups = [x[0] - 1, x[0]], groups * 2

    def mean(phase: str) -> list[float]:
        return [float(np.mean([line.get(f"time.{phase}", 0.0) for line in group])) for group in groups]

    parts = {phase: values for phase in PHASES if any(values := mean(phase))}
    total = np.sum(list(parts.values()), 0)
    curves = [Curve(PHASES[part][0], x, values, PHASES[part][1]) for part, values in parts.items()]
    if any(dispatch := mean("dispatch")):
        curves.append(Curve("of which dispatch in forward", x, dispatch, "soft"))
    legend = [c._replace(name=f"{c.name} {percent(sum(c.y) / total.sum())}") for c in curves]
    frame = Frame(title, "seconds", x=(x[0], x[-1]), y=(0.0, float(total.max())), form=number, size=SIZE, legend=legend)
    below = np.zeros(len(x))
    for curve in curves[: len(parts)]:
        above = below + curve.y
        edge = [frame.point(*point) for point in zip(x, above, strict=True)]
        floor = [frame.point(*point) for point in zip(x[::-1], below[::-1], strict=True)]
        frame.sheet.marks.append(Area(edge + floor, curve.role, 0.85))
        below = above
    frame.hover(curves)
    return frame.sheet


def relative_load(load_EC: np.ndarray) -> np.ndarray:
    """Return each value over the mean of its column, (E, C), reduced to at most 64 rows and 240 columns.

    For the picture of a layer's loads (or of ranks' times): a row per expert, a column per step. A row that stands for
    several experts has the value that is furthest from the mean, a column of several steps their mean.
    """
    relative = load_EC / np.maximum(load_EC.mean(0, keepdims=True), 1e-9)
    if relative.shape[1] > 240:
        edges = np.linspace(0, relative.shape[1], 241).astype(int)
        relative = np.stack([relative[:, a:b].mean(1) for a, b in pairwise(edges)], 1)
    if relative.shape[0] > 64:
        edges = np.linspace(0, relative.shape[0], 65).astype(int)
        rows = []
        for a, b in pairwise(edges):
            out = np.abs(np.log2(np.maximum(relative[a:b], 1e-3))).argmax(0)
            rows.append(np.take_along_axis(relative[a:b], out[None], 0)[0])
        relative = np.stack(rows)
    return relative


def load_sheet(layer: int, load_EC: np.ndarray, steps: list[int]) -> Sheet:
    """Return the heat map of the experts' load in block `layer`, relative to the mean of all experts at each step.

    Args:
        load_EC: tokens of each expert at each of `steps`.
    """
    sheet = Sheet(300, 130, f"load of the experts of layer {layer}, steps {steps[0]} to {steps[-1]}")
    draw_heatmap(sheet, (0, 2, 298, 126), transparent_colours(relative_load(load_EC)), len(load_EC), steps)
    return sheet


def draw_heatmap(
    sheet: Sheet, box: tuple[float, float, float, float], picture: np.ndarray, rows: int, steps: list[int]
) -> None:
    """Draw a bitmap as a heat map on a sheet; label the first, middle and last row, and the first and last step.

    Args:
        box: x, y, width and height.
        picture: the bitmap, (height, width, 4) RGBA of uint8; it is stretched over the box.
        rows: number of experts or ranks that the bitmap stands for, for the labels.
        steps: numbers of the steps from left to right.
    """
    x, y, width, height = box
    left, below = 30.0, 16.0
    width, height = width - left, height - below
    sheet.marks.append(Picture(x + left, y, width, height, picture))
    for row in sorted({0, rows // 2, rows - 1}):
        base = min(max(y + (row + 0.5) * height / rows + 4, y + 8), y + height)
        sheet.marks.append(Words(x + left - 4, base, f"{row}", size=10, anchor="end"))
    sheet.marks.append(Words(x + left, y + height + 12, f"step {steps[0]:,}", size=10))
    if steps[-1] != steps[0]:
        sheet.marks.append(Words(x + left + width, y + height + 12, f"{steps[-1]:,}", size=10, anchor="end"))


def ranks_sheet(run: Run) -> Sheet | None:
    """Return the heat map of the time that each rank computes or reads data, over the mean; None without times.

    A row per rank, steps from left to right. Colours are full at half and twice the mean. The steps at which a
    straggler was named are marked.
    """
    if run.busy_RC is None:
        return None
    steps, box = run.busy_steps, (10.0, 46.0, 830.0, 130.0)
    sheet = Sheet(854, 186, f"time of every rank, steps {steps[0]} to {steps[-1]}")
    sheet.marks.append(Words(12, 21, f"Time that each rank does not wait: {run.name}", "ink", size=14, bold=True))
    text = "over the mean of all ranks; a row per rank, steps from left to right; blue half of it, red twice"
    sheet.marks.append(Words(12, 40, text, "soft", size=11))
    picture = transparent_colours(relative_load(run.busy_RC) ** 2)  # full colour at twice the mean, not at four times
    draw_heatmap(sheet, box, picture, len(run.busy_RC), steps)
    left, right, top, floor = box[0] + 30, box[0] + box[2], box[1], box[1] + box[3] - 16
    for event in run.events:
        if event["kind"] == "straggler" and steps[0] <= event["step"] <= steps[-1]:
            column = sum(step < event["step"] for step in steps)
            at = left + (right - left) * column / len(steps)
            sheet.marks.append(Stroke([(at, top), (at, floor)], "event", 1.2, dash=True))
    return sheet


# ---- quizzes with Q questions: each quantity over the steps, and how early it ranks the questions as at the end

TITLES = {
    "bits_per_byte": ("Bits per byte", "of the right choice"),
    "margin": ("Margin", "nats above the best wrong choice"),
    "accuracy": ("Accuracy", ""),
    "accuracy_norm": ("Accuracy by length", "most probable per character"),
}


def ranks(x_Q: np.ndarray) -> np.ndarray:
    """Return the position of each value in ascending order, from 0; equal values share the mean of their positions."""
    _, inverse_Q, count = np.unique(x_Q, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[inverse_Q]


def rank_correlation(x_Q: np.ndarray, y_Q: np.ndarray) -> float | None:
    """Return Spearman's rank correlation of two quantities over Q questions; None if all values of either are equal."""
    x_Q, y_Q = (ranks(values) - (len(values) - 1) / 2 for values in (x_Q, y_Q))
    size = np.sqrt((x_Q**2).sum() * (y_Q**2).sum())
    return float((x_Q * y_Q).sum() / size) if size else None


def correlations(run: Run, task: str, quantity: str) -> tuple[list[float], list[float]]:
    """Return steps, and the rank correlation (Spearman) of each step's quiz questions with those of the last step.

    Near 1, the questions that are easy or hard for the last model already were so at this step: the quantity is a
    signal by then, whether or not its mean still changes. Steps without a defined correlation are left out.

    Args:
        quantity: what the questions are ordered by, such as "margin".
    """
    lines = run.quiz.get(task, {})
    last = lines[max(lines)][quantity] if lines else None
    pairs = [(step, rank_correlation(line[quantity], last)) for step, line in lines.items()]
    return [float(step) for step, r in pairs if r is not None], [r for _, r in pairs if r is not None]


def quiz_sheets(runs: list[Run], task: str) -> list[Sheet]:
    """Return the charts of a quiz: of each quantity the mean, then the rank correlation with the last step.

    Charts without data are left out.

    Args:
        runs: the runs, each of which is a curve of every chart.
        task: name of the quiz, as in the metrics "quiz.TASK.accuracy".
    """
    means, signals = [], []
    for quantity in QUIZ_METRICS:
        name, unit = TITLES[quantity]
        form = {"form": percent} if quantity.startswith("accuracy") else {}
        curves = [Curve(run.name, *run.series(f"quiz.{task}.{quantity}"), f"c{i}") for i, run in enumerate(runs)]
        means.append(curves_chart(name, unit, curves, **form))
        curves = [Curve(run.name, *correlations(run, task, quantity), f"c{i}") for i, run in enumerate(runs)]
        signals.append(curves_chart(f"{name}: early signal", "rank correlation with the last step", curves))
    return [sheet for sheet in (*means, *signals) if sheet is not None]
