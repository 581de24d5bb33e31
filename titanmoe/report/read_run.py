"""What is in a run's folder: metrics, experts' load, events, config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.checkpoint import safe_files
from titanmoe.checkpoint.manifest import flatten_record
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, old_names
from titanmoe.config.allowed_code import CodeNotAllowed, refuse_code
from titanmoe.config.load import read_draft
from titanmoe.config.parse_json import MAX_DEPTH, TooDeep, parse_json
from titanmoe.config.recipe import MAX_BYTES, Recipe, RecipeError, parse_recipe
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, FoldError, derive
from titanmoe.train.run_folder import CONFIG, EVENTS, EXPERTS, METRICS, OLD_QUIZ, QUIZ, QUIZ_METRICS, RANKS

EVENT_TEXTS = ("kind", "text", "time")
LARGE = 1e15
"""Far above anything counted or measured; text may hold a number of any size."""


@dataclass
class Run:
    name: str
    folder: Path
    lines: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    events: list[dict[str, Any]] = field(default_factory=list)
    load_steps: list[int] = field(default_factory=list)
    load: dict[int, np.ndarray] = field(default_factory=dict)
    """By layer: tokens of expert e at load_steps[c], (E, C)."""
    busy_steps: list[int] = field(default_factory=list)
    busy_RC: np.ndarray | None = None
    """Seconds that rank r did not wait in, at busy_steps[c]."""
    quiz: dict[str, dict[int, dict[str, np.ndarray]]] = field(default_factory=dict)
    """By task and step: each quantity of every question, (Q,)."""
    config_text: str = ""
    config: Config | None = None
    """None if it was written by another version of titanmoe."""
    table: dict[str, Any] = field(default_factory=dict)
    """The contents of config.toml, unchecked, with the names that options have now."""
    warnings: list[str] = field(default_factory=list)
    """What was left out, and why."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values, where the value is a number."""
        pairs = [(line["step"], line[name]) for line in self.lines if line.get(name) is not None]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]

    def median(self, name: str) -> float | None:
        """Without the first line, which includes start-up."""
        _, values = self.series(name)
        return float(np.median(values[1:] or values)) if values else None

    @property
    def seconds(self) -> float | None:
        """Of the steps and validations that the lines are of; not of start-ups, nor of steps that were repeated."""
        total, last_step = 0.0, None
        for line in self.lines:
            steps = 1 if last_step is None else max(1, line["step"] - last_step)
            total += steps * line.get("step_time_s", 0.0) + line.get("val_s", 0.0) + line.get("quiz_s", 0.0)
            last_step = line["step"]
        return total or None

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

        return flat(self.table, "")


def read_runs(folders: list[Path]) -> list[Run]:
    """All of them, or every reason why not."""
    runs, problems = [], []
    for folder in folders:
        try:
            lines, warnings = _lines(folder, METRICS, _figures)
        except safe_files.NOT_FOUND_ERRORS:
            problems.append(f"{folder} has no {METRICS}: name the folder of a run, such as runs/debug")
            continue
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if lines:
            runs.append(_read(folder, lines, warnings))
        else:
            problems += warnings or [f"{folder / METRICS} has no lines yet: wait for the run's first step"]
    if problems:
        raise ConfigError(problems)
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:  # runs with the same name in different places
            run.name = str(run.folder)
    return runs


def _read(folder: Path, lines: list[dict[str, Any]], warnings: list[str]) -> Run:
    events, event_warnings = _lines_if_any(folder, EVENTS, _event)
    shapes: dict[str, int] = {}
    loads, load_warnings = _lines_if_any(folder, EXPERTS, lambda line: _load(line, shapes))
    times, time_warnings = _lines_if_any(folder, RANKS, _times)
    old_quiz, old_warnings = _lines_if_any(folder, OLD_QUIZ, _quiz_line)
    quiz, quiz_warnings = _lines_if_any(folder, QUIZ, _quiz_line)
    warnings = [*warnings, *event_warnings, *load_warnings, *time_warnings, *old_warnings, *quiz_warnings]
    run = Run(folder.resolve().name, folder, lines, events, warnings=warnings)
    for line in [*old_quiz, *quiz]:
        run.quiz.setdefault(line["task"], {})[line["step"]] = {name: np.array(line[name]) for name in QUIZ_METRICS}
    for by_step in run.quiz.values():  # the questions may have changed when it resumed
        last = len(by_step[max(by_step)][QUIZ_METRICS[0]])
        for step in [step for step, line in by_step.items() if len(line[QUIZ_METRICS[0]]) != last]:
            del by_step[step]
    if times:
        busy = {line["step"]: np.add(line["seconds"]["compute"], line["seconds"]["data"]) for line in times}
        last = len(busy[times[-1]["step"]])
        busy = {step: row for step, row in busy.items() if len(row) == last}  # it may have resumed on other ranks
        run.busy_steps, run.busy_RC = list(busy), np.array(list(busy.values()), dtype=np.float64).T
    run.load_steps = [line["step"] for line in loads]
    for layer in shapes:
        run.load[int(layer)] = np.array([line["load"][layer] for line in loads], dtype=np.float64).T
    try:
        with safe_files.open_file(folder, CONFIG) as stream:
            data = stream.read(MAX_BYTES + 1)
        run.config_text = data[:MAX_BYTES].decode(errors="replace")
        recipe = parse_recipe(str(folder / CONFIG), data)
        old_names.rename(recipe.data)
        run.table = recipe.data
        refuse_code(flatten_record(run.table), folder / CONFIG)
        run.config = _config(recipe)
    except safe_files.NOT_FOUND_ERRORS:
        pass
    except (RecipeError, CheckpointError, CodeNotAllowed) as error:
        run.warnings.append(str(error))
    except ConfigError as error:
        run.warnings.append(str(error))
    return run


def _config(recipe: Recipe) -> Config:
    """Return the config that a run has recorded. Nothing that it names is opened: it stands alone."""
    model = recipe.data.get("model")
    alone = {**recipe.data, "model": {**model, "hf": ""}} if isinstance(model, dict) else recipe.data
    return read_draft([], COMPONENTS, Recipe(recipe.name, recipe.text, alone)).finish(lambda config: [])


# ---- lines


Accept = Callable[[dict[str, Any]], dict[str, Any] | None]


def _lines_if_any(folder: Path, name: str, accept: Accept) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what `_lines` does; nothing of a file that does not exist, and a message about one that is a link."""
    try:
        return _lines(folder, name, accept)
    except safe_files.NOT_FOUND_ERRORS:
        return [], []
    except CheckpointError as error:
        return [], [str(error)]


def _lines(folder: Path, name: str, accept: Accept) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines that accept() takes, and messages about the others: a line for each kind."""
    accepted, rejected_counts = [], Counter()
    with safe_files.open_file(folder, name) as stream:
        *complete, unfinished = stream.read().split(b"\n")
    for text in [*complete, unfinished]:
        try:
            line = parse_json(text)
            line = accept(line) if isinstance(line, dict) and _step(line.get("step")) else None
            if line is not None:
                accepted.append(line)
            else:
                rejected_counts["not what titanmoe writes there"] += 1
        except TooDeep:
            rejected_counts[f"nested more than {MAX_DEPTH} deep"] += 1
        except ValueError:
            if text is not unfinished and text.strip():  # the run may still be writing its last line
                rejected_counts["not JSON"] += 1
    file = folder / name
    warnings = [
        f"{file}: {n} line{'s are' if n > 1 else ' is'} {what}: left out" for what, n in rejected_counts.items()
    ]
    return accepted, warnings


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGE < value < LARGE


def _step(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGE


def _figures(line: dict[str, Any]) -> dict[str, Any] | None:
    if "loss" not in line or not (line["loss"] is None or _number(line["loss"])):
        return None
    figures = {name: value for name, value in line.items() if _number(value)}
    # Metrics of a quiz begin with "answers" in the folders of earlier versions.
    return {"loss": line["loss"]} | {re.sub(r"^answers(?=[._])", "quiz", name): x for name, x in figures.items()}


def _event(line: dict[str, Any]) -> dict[str, Any] | None:
    ranks = line.get("environment", {"ranks": 1})
    ranks = ranks.get("ranks") if isinstance(ranks, dict) else None
    fits = type(ranks) is int and 0 < ranks < LARGE and all(isinstance(line.get(key), str) for key in EVENT_TEXTS)
    return line if fits else None


def _load(line: dict[str, Any], shapes: dict[str, int]) -> dict[str, Any] | None:
    """shapes: experts by layer, those of the first valid line."""
    load = line.get("load")
    if not isinstance(load, dict) or not all(
        layer.isdecimal() and len(layer) < 9 and isinstance(counts, list) and counts and all(map(_number, counts))
        for layer, counts in load.items()
    ):
        return None
    experts = {layer: len(counts) for layer, counts in load.items()}
    if not shapes:
        shapes |= experts
    return line if experts == shapes else None


def _times(line: dict[str, Any]) -> dict[str, Any] | None:
    seconds = line.get("seconds")
    columns = [seconds.get(name) for name in ("compute", "data")] if isinstance(seconds, dict) else []
    fits = columns and all(isinstance(x, list) and x and all(map(_number, x)) for x in columns)
    return line if fits and len(columns[0]) == len(columns[1]) else None


def _quiz_line(line: dict[str, Any]) -> dict[str, Any] | None:
    columns = [line.get(name) for name in QUIZ_METRICS]
    fits = all(isinstance(x, list) and x and all(map(_number, x)) for x in columns)
    return line if fits and isinstance(line.get("task"), str) and len({len(x) for x in columns}) == 1 else None
