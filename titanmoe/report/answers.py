"""The charts of the questions that a run answers: each quantity over the steps, and how early it ranks questions as in
the end.

A rank correlation (Spearman's) near 1 at a step says that the questions which are easy or hard for the last model
already were for this one: the quantity is a signal by then, whether or not its mean still moves. It is not defined
where all questions have the same value.

Shapes: Q questions.
"""

from __future__ import annotations

import numpy as np

from titanmoe.report.charts import Curve, curves_chart, percent
from titanmoe.report.draw import Sheet
from titanmoe.report.read_run import Run
from titanmoe.train.run_folder import QUANTITIES

TITLES = {
    "bits_per_byte": ("Bits per byte", "of the right choice"),
    "margin": ("Margin", "nats above the best wrong choice"),
    "accuracy": ("Accuracy", ""),
    "accuracy_norm": ("Accuracy by length", "likeliest per character"),
}


def ranks(x_Q: np.ndarray) -> np.ndarray:
    """From 0; equal values share the mean of their ranks."""
    _, inverse_Q, count = np.unique(x_Q, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[inverse_Q]


def rank_correlation(x_Q: np.ndarray, y_Q: np.ndarray) -> float | None:
    """None where either has one value only."""
    x_Q, y_Q = (ranks(values) - (len(values) - 1) / 2 for values in (x_Q, y_Q))
    size = np.sqrt((x_Q**2).sum() * (y_Q**2).sum())
    return float((x_Q * y_Q).sum() / size) if size else None


def correlations(run: Run, task: str, quantity: str) -> tuple[list[float], list[float]]:
    """Of each step's questions with those of the last step."""
    lines = run.answers.get(task, {})
    last = lines[max(lines)][quantity] if lines else None
    pairs = [(step, rank_correlation(line[quantity], last)) for step, line in lines.items()]
    return [float(step) for step, r in pairs if r is not None], [r for _, r in pairs if r is not None]


def answer_sheets(runs: list[Run], task: str) -> list[Sheet]:
    """A row of means, and below each its rank correlations."""
    means, signals = [], []
    for quantity in QUANTITIES:
        name, unit = TITLES[quantity]
        form = {"form": percent} if quantity.startswith("accuracy") else {}
        curves = [Curve(run.name, *run.series(f"answers.{task}.{quantity}"), f"c{i}") for i, run in enumerate(runs)]
        means.append(curves_chart(name, unit, curves, **form))
        curves = [Curve(run.name, *correlations(run, task, quantity), f"c{i}") for i, run in enumerate(runs)]
        signals.append(curves_chart(f"{name}: early signal", "rank correlation with the last step", curves))
    return [sheet for sheet in (*means, *signals) if sheet is not None]
