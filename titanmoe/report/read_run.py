"""Reading of a run's folder for the report: metrics, experts' loads, times of ranks, events, config.

Files may come from other versions or programs: lines that do not fit are left out with a warning.

Shapes: R ranks, C recorded steps, E experts, Q questions of a quiz.
"""

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
from titanmoe.config.schema import QUIZ_METRICS, Config
from titanmoe.fold.degrees import Fold, FoldError, derive
from titanmoe.train.run_folder import (
    CONFIG,
    EVALUATION_TIMES,
    EVENTS,
    EXPERTS,
    METRICS,
    OLD_QUIZ,
    QUIZ,
    RANKS,
    ROLLOUTS,
)

EVENT_TEXTS = ("kind", "text", "time")
LARGE = 1e15
"""Largest number accepted, far above anything counted or measured."""


@dataclass
class Run:
    """The data of one run."""

    name: str
    folder: Path
    lines: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    events: list[dict[str, Any]] = field(default_factory=list)
    load_steps: list[int] = field(default_factory=list)
    load: dict[int, np.ndarray] = field(default_factory=dict)
    """Tokens of each expert at load_steps, (E, C), by layer."""
    busy_steps: list[int] = field(default_factory=list)
    busy_RC: np.ndarray | None = None
    """Seconds of each rank without waiting, at busy_steps, (R, C)."""
    quiz: dict[str, dict[int, dict[str, np.ndarray]]] = field(default_factory=dict)
    """Each quantity of every quiz question, (Q,), by task and step."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """The lines of rollouts.jsonl: completions of reinforcement learning."""
    config_text: str = ""
    config: Config | None = None
    """The run's config; None if this version cannot read it."""
    table: dict[str, Any] = field(default_factory=dict)
    """The tables of config.toml, unchecked, with present option names."""
    warnings: list[str] = field(default_factory=list)
    """Messages about data that was left out."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return the steps and the values of a metric of metrics.jsonl, such as "loss"; without steps that lack it."""
        pairs = [(line["step"], line[name]) for line in self.lines if line.get(name) is not None]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]

    def median(self, name: str) -> float | None:
        """Return the median of a metric over the run; None without values.

        The first line, which includes start-up, counts only if it is the only one with a value.
        """
        _, values = self.series(name)
        return float(np.median(values[1:] or values)) if values else None

    @property
    def seconds(self) -> float | None:
        """Seconds of reported steps and evaluations, without start-ups and repeated steps; None if unknown."""
        total, last_step = 0.0, None
        for line in self.lines:
            steps = 1 if last_step is None else max(1, line["step"] - last_step)
            total += steps * line.get("step_time_s", 0.0) + sum(line.get(name, 0.0) for name in EVALUATION_TIMES)
            last_step = line["step"]
        return total or None

    @property
    def environment(self) -> dict[str, Any]:
        """Record of the last start of the run in events.jsonl, such as ranks, device and command; {} if nothing."""
        return next((event["environment"] for event in reversed(self.events) if "environment" in event), {})

    @property
    def fold(self) -> Fold | None:
        """The degrees of the run's mapping; None if its config or number of ranks is unknown, or they do not fit."""
        if self.config is None or "ranks" not in self.environment:
            return None
        try:
            return derive(self.environment["ranks"], self.config.parallelism)
        except FoldError:
            return None

    def settings(self) -> dict[str, Any]:
        """Return the values of the run's config.toml in one dict by dotted path, such as "training.objective".

        They are unchecked; {} if the file is missing or no TOML.
        """
        return flatten_record(self.table)


def read_runs(folders: list[Path]) -> list[Run]:
    """Read the folders of runs for the report.

    A run is named by its folder, and by the folder's path if several have the same name. Files other than metrics.jsonl
    may be missing; those that cannot be read, and lines that do not fit, are left out with a line in `Run.warnings`.

    Raises:
        ConfigError: a folder cannot be read, or has no metrics yet; with a line for each such folder.
    """
    runs, problems = [], []
    for folder in folders:
        warnings: list[str] = []
        try:
            lines = _read_lines(folder, METRICS, _accept_metrics, warnings)
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
    shapes: dict[str, int] = {}

    def read(name: str, accept: Accept) -> list[dict[str, Any]]:
        """Return the accepted lines of a file; [] if there is none, or with a warning if it cannot be read."""
        try:
            return _read_lines(folder, name, accept, warnings)
        except safe_files.NOT_FOUND_ERRORS:
            return []
        except CheckpointError as error:
            warnings.append(str(error))
            return []

    run = Run(folder.resolve().name, folder, lines, read(EVENTS, _accept_event), warnings=warnings)
    loads = read(EXPERTS, lambda line: _accept_loads(line, shapes))
    times = read(RANKS, _accept_times)
    quiz = read(OLD_QUIZ, _accept_quiz) + read(QUIZ, _accept_quiz)
    run.rollouts = read(ROLLOUTS, _accept_rollout)
    for line in quiz:
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
    except (RecipeError, CheckpointError, CodeNotAllowed, ConfigError) as error:
        run.warnings.append(str(error))
    return run


def _config(recipe: Recipe) -> Config:
    """Return the config in a run's config.toml, without opening the files that it names, such as model.hf.

    Raises:
        ConfigError: this version does not accept it.
    """
    model = recipe.data.get("model")
    alone = {**recipe.data, "model": {**model, "hf": ""}} if isinstance(model, dict) else recipe.data
    return read_draft([], COMPONENTS, Recipe(recipe.name, recipe.text, alone)).finish(lambda config: [])


# ---- lines


Accept = Callable[[dict[str, Any]], dict[str, Any] | None]


def _read_lines(folder: Path, name: str, accept: Accept, warnings: list[str]) -> list[dict[str, Any]]:
    """Return the accepted objects of a file with a JSON object in each line, which has a number "step".

    Args:
        accept: returns the object if it is valid, perhaps changed, else None.
        warnings: gets one message for each kind of rejected lines.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        CheckpointError: it is a link, or cannot be read.
    """
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
    warnings += [
        f"{file}: {n} line{'s are' if n > 1 else ' is'} {what}: left out" for what, n in rejected_counts.items()
    ]
    return accepted


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGE < value < LARGE


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_number, value))


def _step(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGE


def _accept_metrics(line: dict[str, Any]) -> dict[str, Any] | None:
    if "loss" not in line or not (line["loss"] is None or _number(line["loss"])):
        return None
    figures = {name: value for name, value in line.items() if _number(value)}
    # Metrics of a quiz begin with "answers" in the folders of earlier versions.
    return {"loss": line["loss"]} | {re.sub(r"^answers(?=[._])", "quiz", name): x for name, x in figures.items()}


def _accept_event(line: dict[str, Any]) -> dict[str, Any] | None:
    ranks = line.get("environment", {"ranks": 1})
    ranks = ranks.get("ranks") if isinstance(ranks, dict) else None
    fits = type(ranks) is int and 0 < ranks < LARGE and all(isinstance(line.get(key), str) for key in EVENT_TEXTS)
    return line if fits else None


def _accept_loads(line: dict[str, Any], shapes: dict[str, int]) -> dict[str, Any] | None:
    """Return a line of experts.jsonl if it is valid and has the layers and experts of the first such line, else None.

    Args:
        shapes: number of experts by layer; filled by the first valid line.
    """
    load = line.get("load")
    if not isinstance(load, dict) or not all(
        layer.isdecimal() and len(layer) < 9 and _numbers(counts) for layer, counts in load.items()
    ):
        return None
    experts = {layer: len(counts) for layer, counts in load.items()}
    if not shapes:
        shapes |= experts
    return line if experts == shapes else None


def _accept_times(line: dict[str, Any]) -> dict[str, Any] | None:
    seconds = line.get("seconds")
    columns = [seconds.get(name) for name in ("compute", "data")] if isinstance(seconds, dict) else []
    return line if columns and all(map(_numbers, columns)) and len(columns[0]) == len(columns[1]) else None


def _accept_rollout(line: dict[str, Any]) -> dict[str, Any] | None:
    if "answer" in line:  # a completion, in the folders of earlier versions
        line = {"completion": line["answer"]} | line
    texts = all(isinstance(line.get(name), str) for name in ("text", "completion"))
    return line if texts and (line.get("reward") is None or _number(line["reward"])) else None


def _accept_quiz(line: dict[str, Any]) -> dict[str, Any] | None:
    columns = [line.get(name) for name in QUIZ_METRICS]
    fits = all(map(_numbers, columns)) and len(set(map(len, columns))) == 1
    return line if fits and isinstance(line.get("task"), str) else None
