"""Metrics and events of a run (docs/watching.md), written on rank 0.

`Metrics` computes the numbers, writes the run's JSONL files, and passes reports to the ReportTargets: the console,
TensorBoard, Weights & Biases. The training loop calls `begin`, `log` after each step, `event` and `close`.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import resource
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.choose_checkpoint import checkpoints_folder
from titanmoe.config.schema import Metrics as Options
from titanmoe.config.schema import Model
from titanmoe.fold.degrees import Fold
from titanmoe.observe import Observer
from titanmoe.train import console
from titanmoe.train.alarms import DivergenceAlarm, ExpectedLoss, LoadAlarm, SpikeAlarm
from titanmoe.train.header import Header
from titanmoe.train.launch_messages import show_status
from titanmoe.train.report_targets import LineFile, Report, ReportTarget, RetriedWriter, TensorBoardWriter, WandbWriter
from titanmoe.train.run_folder import (
    CONFIG,
    EVALUATION_TIMES,
    EVENTS,
    EXPERTS,
    METRICS,
    QUIZ,
    RANKS,
    SAMPLE,
    read_records,
    typed_command,
)
from titanmoe.train.runtime import Runtime
from titanmoe.train.timing import Clock

EXPERT_LINES = 500
"""Approximate number of lines of a run's experts.jsonl, if metrics.experts_every is not set."""
RANK_LINES = 500
"""Approximate largest number of lines of a run's ranks.jsonl."""
PROMPT_WIDTH = 100
"""Largest number of characters of a prompt that an event shows above its completion."""

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.5,
    "GH200": 989.5,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Dense bf16/fp16 TFLOP/s without sparsity, from NVIDIA's data sheets, by the first key in the device's name."""


def device_name(device: torch.device) -> str:
    """Return the GPU's name as PyTorch gives it, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one device; None if unknown, as for any dtype but bfloat16 and float16."""
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB since its start: on a GPU reserved by PyTorch, on a CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux


def as_json(record: dict[str, float]) -> str:
    """Return metrics as one line of strict JSON, in which NaN and infinities are null.

    The field "nonfinite" then has these numbers as strings, by name.
    """
    nonfinite = {name: str(value) for name, value in record.items() if not math.isfinite(value)}
    line: dict[str, object] = {name: None if name in nonfinite else value for name, value in record.items()}
    return json.dumps(line | {"nonfinite": nonfinite} if nonfinite else line, allow_nan=False)


@dataclass(eq=False, kw_only=True)
class Metrics(Observer):
    """Writer of a run's header, metrics and events on rank 0. On other ranks `begin`, `log` and `close` do nothing."""

    options: Options
    model: Model
    expected: ExpectedLoss
    shown: console.ConsoleSettings
    header: Header
    recipe: str
    """Resolved config as TOML."""
    values: dict[str, Any]
    """Resolved config as nested dicts, for W&B."""
    balance_losses: tuple[str, ...]
    """Names of the metrics of the balance losses that are on."""
    runtime: Runtime
    fold: Fold
    clock: Clock
    peak: float | None
    """Peak FLOP/s of a device; None if unknown."""

    def __post_init__(self) -> None:
        self.steps, self.writes = self.shown.steps, self.runtime.rank == 0

    def begin(self, folder: Path, step: int = 0, notes: dict[str, str] | None = None, sample: str = "") -> None:
        """Print the header, open the files of the run's folder, and start to measure the time of steps.

        Also open the console and the other report targets, write config.toml and the "start" or "restart" event, and
        read the running average from the folder's metrics.jsonl.

        Args:
            folder: the run's folder.
            step: number of steps that the run has made already.
            notes: lines to add to the header, by label.
            sample: text of the run's first sample, for a file of its own; "" to write none.
        """
        if not self.writes:
            return
        self.folder = folder
        self._step = step
        self._targets: list[RetriedWriter[ReportTarget]] = []
        self._events, self._file, self._experts = (
            self._line_file(folder / name) for name in (EVENTS, METRICS, EXPERTS)
        )
        for writer in (self._events, self._file, self._experts):
            writer.open()
        # Opened when their first line is written: not every run has one.
        self._ranks, self._quiz = self._line_file(folder / RANKS), self._line_file(folder / QUIZ)
        self._times: list[dict[str, np.ndarray]] = []
        self._spikes, self._collapse = SpikeAlarm(), LoadAlarm(self.model.num_experts, self.model.top_k)
        self._judged, self._first_value = "loss", None
        self._last_value, self._begun = 0.0, time.monotonic()
        self._tokens = self._flops = 0.0  # since the last line
        self._last_step: int | None = None
        self._steady_seconds, self._steady_steps = 0.0, 0  # without the first step
        self._smoothed, self._weight = 0.0, 0.0
        self._divergence = DivergenceAlarm(self.expected)
        before = 0
        for line, self._judged, value in read_losses(folder):
            self._track(line, value, line - before)
            before = line
        self._open_targets(notes or {})
        for name, text in ((CONFIG, self.recipe), (SAMPLE, sample)):
            try:
                if text:
                    safe_files.write(folder, name, text.encode())
            except OSError as error:
                self._warn(f"{folder / name}: {error.strerror}")
        self._describe_machine(step)
        self._since = time.monotonic()

    def _line_file(self, file: Path) -> RetriedWriter[LineFile]:
        return RetriedWriter(str(file), lambda: LineFile(file), self._warn)

    def _warn(self, text: str) -> None:
        self.event(self._step, "log", text)

    def _open_targets(self, notes: dict[str, str]) -> None:
        options = self.options
        show_status("")
        with contextlib.suppress(OSError):  # the lines that follow report it
            console.print_header(self.header.rows(notes, self.folder))

        def add(name: str, make: Callable[[], ReportTarget]) -> None:
            self._targets.append(writer := RetriedWriter(name, make, self._warn))
            writer.open()

        add("the console", lambda: console.open_console(options.console, self.shown, self.folder.name))
        if options.tensorboard:
            add(
                "TensorBoard",
                lambda: TensorBoardWriter(self.folder, self.recipe, self._step, self.steps, self.balance_losses),
            )
        if options.wandb:
            add("Weights & Biases", lambda: WandbWriter(self.folder, options.wandb, self.values, self.balance_losses))

    def _describe_machine(self, step: int) -> None:
        """Write the event "start", or if `step` is not 0 "restart", with the machine, the software and the mapping.

        The text of a restart also says what changed of ranks, mapping and device since the start before.
        """
        fold, device = self.fold, device_name(self.runtime.device)
        machine = {
            "ranks": fold.world,
            "device": device,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
            "attention": console.format_mapping(fold.attention_axes),
            "experts": console.format_mapping(fold.expert_axes),
            "steps": self.steps,
            "command": typed_command(),
        }
        if step:
            # Machine, software and mapping of the start before this one.
            before: dict[str, Any] = {}
            for record in read_records(self.folder, EVENTS):
                before = record.get("environment", before)
            changes = "".join(
                f"; {name} {before[name]} -> {machine[name]}"
                for name in ("ranks", "attention", "experts", "device")
                if before.get(name) not in (None, machine[name])
            )
            self.event(step, "restart", f"continues after step {step}{changes}", environment=machine)
        else:
            self.event(step, "start", f"{fold.world} rank{'s' * (fold.world > 1)} on {device}", environment=machine)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write the events that a step's metrics cause, and the metrics themselves if metrics.log_every asks for it.

        The first step of this process, the last one, and those with an evaluation are written as well: a line of
        metrics.jsonl and a report. Speeds are means since the line before, without the time of evaluations.

        Args:
            values: metrics of the step by name: loss, grad_norm, lr, tokens (over all ranks), flops, and any others. A
                list under "layers.N.load" has the number of tokens of each expert of block N. "quiz" has the lines for
                quiz.jsonl, "samples" the completions of [validation.samples]; these two are removed from the dict.
        """
        if not self.writes:
            return
        self._step = step
        quiz, samples = values.pop("quiz", ()), values.pop("samples", ())
        loads = {int(name.split(".")[1]): value for name, value in values.items() if isinstance(value, list)}
        values = {name: value for name, value in values.items() if not isinstance(value, list)}
        self._judged, value = console.judged_metric(values)
        if self._judged == "loss" and (spike := self._spikes.check(value)):
            self.event(step, "spike", spike)
        for text in self._collapse.check(loads):
            self.event(step, "collapse", text)
        if text := self._track(step, value):
            self.event(step, "divergence", text)
        self._first_value, self._last_value = self._first_value or (step, value), value
        self._log_experts(step, loads)
        self._tokens, self._flops = self._tokens + values["tokens"], self._flops + values["flops"]
        for line in quiz:
            self._quiz.put(lambda file, line=line: file.write(json.dumps(line, separators=(",", ":"))))
        evaluation_s = [values[name] for name in EVALUATION_TIMES if name in values]
        if not (self._due(step, self.options.log_every) or evaluation_s):
            return
        now, first = time.monotonic(), self._last_step is None
        seconds, steps = max(now - self._since - sum(evaluation_s), 1e-9), 1 if first else step - self._last_step
        if not first:
            self._steady_seconds += seconds
            self._steady_steps += steps
        record = {"step": step, **{name: values[name] for name in ("loss", "grad_norm", "lr")}}
        record["tokens_per_s"] = self._tokens / seconds
        record["step_time_s"] = seconds / steps
        if self.peak:
            record["mfu"] = self._flops / seconds / (self.peak * self.runtime.world)
        record["memory_gib"] = memory_gib(self.runtime.device)
        record |= values
        record |= {f"time.{name}": value for name, value in self.clock.take(steps).items()}
        self._file.put(lambda file: file.write(as_json(record)))
        eta = None
        if self._steady_steps:
            eta = (self.steps - step) * self._steady_seconds / self._steady_steps
        report = Report(step, record, loads, self._average, eta, self._divergence.text)
        for writer in self._targets:
            writer.put(lambda target: target.log(report))
        self._tokens, self._flops, self._last_step, self._since = 0.0, 0.0, step, now
        if samples:
            self.event(step, "samples", describe_completions(samples), samples=samples)

    @property
    def _average(self) -> float:
        """Exponential average of the loss or reward over about ten steps."""
        return self._smoothed / max(self._weight, 0.1)

    def _track(self, step: int, value: float, steps: int = 1) -> str:
        """Add a loss or reward to the running average, unless it is not finite; check a loss for divergence.

        Returns the text of an event, once when the loss has become too high and once when it has recovered; else "".

        Args:
            steps: number of steps since the last one that was added.
        """
        if math.isfinite(value):
            decay = 0.9**steps
            self._smoothed = decay * self._smoothed + (1 - decay) * value
            self._weight = decay * self._weight + 1 - decay
        return self._divergence.check(step, value, self._average) if self._judged == "loss" else ""

    def _due(self, step: int, every: int) -> bool:
        return self._last_step is None or step % every == 0 or step == self.steps

    def _log_experts(self, step: int, loads: dict[int, list[float]]) -> None:
        every = self.options.experts_every
        if every == -1:
            every = math.ceil(self.steps / EXPERT_LINES)
        if every and loads and self._due(step, every):
            line = {"step": step, "load": {layer: [round(n) for n in load] for layer, load in loads.items()}}
            self._experts.put(lambda file: file.write(json.dumps(line, separators=(",", ":"))))

    def rank_times(self, steps: list[int], seconds: dict[str, np.ndarray]) -> None:
        """Record how long each rank took in some steps; write means over several steps to ranks.jsonl. On rank 0 alone.

        A line is the mean of as many recorded steps as keep the file at RANK_LINES lines; a remainder is not written.

        Args:
            seconds: by "compute", "data" or the axes of the messages waited for, an array of shape (steps, ranks).
        """
        every = math.ceil(self.steps / RANK_LINES)
        for i, step in enumerate(steps):
            self._times.append({name: rows[i] for name, rows in seconds.items()})
            if len(self._times) >= every:
                mean = {name: np.mean([one[name] for one in self._times], 0) for name in seconds}
                line = {"step": step, "seconds": {k: [float(f"{x:.3g}") for x in row] for k, row in mean.items()}}
                self._ranks.put(lambda file, line=line: file.write(json.dumps(line, separators=(",", ":"))))
                self._times = []

    def event(self, step: int, kind: str, text: str, **more: Any) -> None:
        """Write an event to events.jsonl, the console and the other report targets. On rank 0 alone, after `begin`.

        Args:
            kind: start, restart, save, spike, skip, divergence, collapse, stop, ... (docs/watching.md).
            text: what happened, for the user.
            more: further fields of the line in events.jsonl.
        """
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"step": step, "kind": kind, "text": text, "time": when, **more}
        self._events.put(lambda file: file.write(json.dumps(line)))
        for writer in self._targets:
            writer.put(lambda target: target.event(step, kind, text))

    def close(self) -> None:
        """Close all files and report targets, and print how the run ended. Does nothing on ranks that do not report."""
        if not self.writes:
            return
        for writer in (self._file, self._experts, self._ranks, self._quiz, self._events, *self._targets):
            writer.close()
        if self._first_value:
            with contextlib.suppress(OSError):
                self._print_closing_line(*self._first_value)

    def _print_closing_line(self, first: int, value: float) -> None:
        """Print how the run ended: steps, loss or reward, time, the last checkpoint, and the command of its report.

        Args:
            first: the first step that this process reported.
            value: loss or reward after that step.
        """
        options, done = self.header.checkpoint, "done" if self._step == self.steps else "ended"
        if wrong := self._divergence.text:
            rich = console.Console(highlight=False)
            rich.print(Text(f"{done}, but {wrong}: {self._divergence.advice}", "bold red"), soft_wrap=True)
            done = ""
        saved = "nothing was saved (checkpoint.enable = false)"
        if options.enable:
            folder = checkpoints_folder(self.folder, options)
            name = layout.read_latest(folder)
            saved = f"saved as {folder / name}" if name else "no checkpoint was completed"
        seconds = console.format_duration(time.monotonic() - self._begun)
        print(
            f"{done:<11}step {self._step:,} of {self.steps:,} after {seconds}: {self._judged} {value:.4f} at step "
            f"{first:,} -> {self._last_value:.4f}; {saved}; a page of it: titanmoe report "
            f"{shlex.quote(str(self.folder))}",
            flush=True,
        )


def describe_completions(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return prompts and their completions as lines of text.

    Args:
        samples: dicts with "prompt" and "completion" as text; other keys are not read.
    """
    lines = [f"{len(samples)} prompt{'s' * (len(samples) > 1)} completed"]
    for sample in samples:
        lines.append(textwrap.indent(textwrap.shorten(sample["prompt"], PROMPT_WIDTH) or "(empty)", "  "))
        lines.append(textwrap.indent(sample["completion"].strip("\n") or "(nothing)", "    > ", lambda line: True))
    return "\n".join(lines)


def read_losses(folder: Path) -> Iterator[tuple[int, str, float]]:
    """Yield step, "loss" or "reward", and the value of each readable line of a run's metrics.jsonl, if it exists."""
    for record in read_records(folder, METRICS):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            name, value = console.judged_metric(record)
            yield int(record["step"]), name, float(value)
