"""What a run's folder tells: metrics, experts' load, events, config."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.config import ConfigError, load
from titanmoe.config.recipe import toml
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, FoldError, derive
from titanmoe.models.families import preset
from titanmoe.train.folder import CONFIG, EVENTS, EXPERTS, METRICS


@dataclass
class Run:
    name: str
    folder: Path
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""
    events: list[dict[str, Any]] = field(default_factory=list)
    load_steps: list[int] = field(default_factory=list)
    load: dict[int, np.ndarray] = field(default_factory=dict)
    """By layer: tokens of expert e at load_steps[c], (E, C)."""
    config_text: str = ""
    config: Config | None = None
    """None where the folder's is of another version of titanmoe."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values, where there is one that is a number."""
        pairs = [(line["step"], line[name]) for line in self.lines if isinstance(line.get(name), (int, float))]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]

    def median(self, name: str) -> float | None:
        """Without the first line, which has start-up in it."""
        _, values = self.series(name)
        return float(np.median(values[1:] or values)) if values else None

    @property
    def environment(self) -> dict[str, Any]:
        return next((event["environment"] for event in reversed(self.events) if "environment" in event), {})

    @property
    def fold(self) -> Fold | None:
        if self.config is None or "ranks" not in self.environment:
            return None
        try:
            return derive(self.environment["ranks"], self.config.parallelism)
        except FoldError:
            return None

    def settings(self) -> dict[str, Any]:
        """The config, flat."""

        def flat(table: dict[str, Any], before: str) -> dict[str, Any]:
            out: dict[str, Any] = {}
            for name, value in table.items():
                out |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
            return out

        return flat(toml().loads(self.config_text), "")


def read_runs(folders: list[Path]) -> list[Run]:
    """All of them, or every reason why not."""
    runs, problems = [], []
    for folder in folders:
        if not (folder / METRICS).is_file():
            problems.append(f"{folder} has no {METRICS}: name the folder of a run, such as runs/debug")
            continue
        lines = _lines(folder / METRICS)
        if not lines:
            problems.append(f"{folder / METRICS} has no line yet: wait for the run's first step")
            continue
        runs.append(_read(folder, lines))
    if problems:
        raise ConfigError(problems)
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:  # runs of one name in different places
            run.name = str(run.folder)
    return runs


def _read(folder: Path, lines: list[dict[str, Any]]) -> Run:
    run = Run(folder.resolve().name, folder, lines, _lines(folder / EVENTS))
    loads = _lines(folder / EXPERTS)
    run.load_steps = [line["step"] for line in loads]
    for layer in loads[0]["load"] if loads else ():
        run.load[int(layer)] = np.array([line["load"][layer] for line in loads], dtype=np.float64).T
    if (folder / CONFIG).is_file():
        run.config_text = (folder / CONFIG).read_text(encoding="utf-8")
        try:
            run.config = load(["--config", str(folder / CONFIG)], preset, lambda config: [])
        except ConfigError:
            run.config = None
    return run


def _lines(file: Path) -> list[dict[str, Any]]:
    """The last may be half written, as a run may be going on."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
