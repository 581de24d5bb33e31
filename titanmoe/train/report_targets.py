"""Writers of a run's metrics and events: its own files, TensorBoard, Weights & Biases; the console is another one.

`titanmoe.train.metrics` wraps each in a RetriedWriter: if one fails, the run goes on without it and tries it again
later. Shapes: E experts, C reports, 3 colours.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from titanmoe.checkpoint import safe_files
from titanmoe.load_colours import opaque_colours


class Report(NamedTuple):
    """Metrics of a step, as the console, TensorBoard and W&B get them. Speeds are means since the last report."""

    step: int
    record: dict[str, float]
    """Metrics by name, as a line of metrics.jsonl has them."""
    load: dict[int, list[float]]
    """Number of tokens that each expert received in this step, by number of the block."""
    smoothed: float
    """Average of the loss over about ten steps."""
    eta: float | None
    """Seconds until the end of the last step; None at the first step."""
    wrong: str = ""
    """Text of the divergence alarm while it lasts, else ""."""


class ReportTarget(Protocol):
    """Interface of an object that shows or stores reports and events, such as the console or TensorBoard."""

    def log(self, report: Report) -> None: ...

    def event(self, step: int, kind: str, text: str) -> None: ...

    def close(self) -> None: ...


PAUSE_S, LONGEST_S = 30.0, 600.0
"""Seconds until a failed writer is tried again; they double with every failure up to the longest pause."""


P = TypeVar("P", bound="ReportTarget | LineFile")


class RetriedWriter(Generic[P]):
    """File or service that must not end the run: it is closed when it fails, and opened again after a pause.

    `make` opens it and returns an object with `close`; `warn` is called with a text when it fails and when it works
    again.
    """

    def __init__(self, name: str, make: Callable[[], P], warn: Callable[[str], None]):
        self.name, self.make, self.warn = name, make, warn
        self.opened: P | None = None
        self.lost = 0
        self._pause, self._retry_at = 0.0, 0.0  # no pause: it works

    def open(self) -> None:
        """Open the file or service at the start of a run. An OSError only warns; any other error is raised."""
        try:
            self.opened = self.make()
        except OSError as error:
            self._failed(error)

    def put(self, write: Callable[[P], None]) -> None:
        """Call `write` with the opened file or service, such as to write a line; on failure warn, and never raise.

        What failed is lost. After a failure nothing is written for a pause, then the file or service is opened again.
        Lines lost are counted in `lost`; only the first failure in a row warns.
        """
        if self._pause and time.monotonic() < self._retry_at:
            self.lost += 1
            return
        try:
            if self.opened is None:
                self.opened = self.make()
            write(self.opened)
        except Exception as error:  # TensorBoard and Weights & Biases raise anything
            self.lost += 1
            self._failed(error)
            return
        if self._pause:
            lost, self.lost, self._pause = self.lost, 0, 0.0
            self.warn(f"{self.name}: works again; {lost} line{'s were' if lost != 1 else ' was'} lost")

    def _failed(self, error: Exception) -> None:
        self.close()
        first, self._pause = not self._pause, min(2 * self._pause, LONGEST_S) or PAUSE_S
        self._retry_at = time.monotonic() + self._pause
        if first:
            why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.warn(
                f"{self.name}: {why}: the run goes on without it and tries again in {PAUSE_S:g} s, then less often"
            )

    def close(self) -> None:
        if self.opened is not None:
            with contextlib.suppress(Exception):
                self.opened.close()
            self.opened = None


class LineFile:
    """File that lines are appended to; `write` returns once the kernel has the line.

    If writing fails, what was written of the line is removed and the OSError raised.
    """

    def __init__(self, path: Path):
        self.descriptor = safe_files.open_in(path.parent, path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        data, size = line.encode() + b"\n", os.fstat(self.descriptor).st_size
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, size)
            raise

    def close(self) -> None:
        os.close(self.descriptor)


CHART_GROUPS = {
    "train": ("loss", "mtp_loss", "grad_norm", "lr", "tokens", "flops", "max_logit"),
    "speed": ("tokens_per_s", "step_time_s", "mfu"),
    "memory": ("memory_gib",),
    "validation": ("val_loss", "val_perplexity", "val_best"),
    "time": ("checkpoint_blocked_s", "data_wait_s", "val_s", "quiz_s", "samples_s"),
    "experts": ("imbalance", "router_entropy", "dropped_fraction"),
}
"""Metrics of each group of charts in TensorBoard and W&B."""
COLUMNS = 200
"""Largest number of reports that an image of the load shows; older ones are thinned out."""


def chart_name(name: str, balance_losses: Sequence[str]) -> str:
    """Return a metric's name in TensorBoard and W&B: "loss" is "train/loss", "layers.3.load" is "layers load/layer 3".

    Metrics of no group are in the group "more".

    Args:
        name: the metric's name in metrics.jsonl.
        balance_losses: names of the metrics of balance losses, which are in the group "experts".
    """
    if name.startswith("layers."):
        _, layer, quantity = name.split(".", 2)
        return f"layers {quantity}/layer {layer}"
    if name.startswith(("time.", "data.", "straggler.", "quiz.", "preference.")):
        return name.replace(".", "/", 1)
    if name in balance_losses:
        return f"experts/{name}"
    return next((f"{group}/{name}" for group, names in CHART_GROUPS.items() if name in names), f"more/{name}")


class TensorBoardWriter:
    """ReportTarget that writes to TensorBoard, in the folder `tensorboard` of a run."""

    def __init__(self, folder: Path, recipe: str, step: int, steps: int, balance_losses: Sequence[str]):
        """Open the event file, write the config to it, and hide entries of steps that will run again.

        Args:
            recipe: the resolved config as TOML.
            step: the number of steps that the run has made already.
            steps: the step at which the run ends; images of the loads are drawn about 50 times until then.
            balance_losses: names of the metrics of balance losses, for `chart_name`.
        """
        from torch.utils.tensorboard import SummaryWriter

        # Hides entries of later steps, which will run again.
        purge = step + 1 if step else None
        self.writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10, purge_step=purge)
        self.writer.add_text("config", "    " + recipe.replace("\n", "\n    "), step)
        self.every, self.balance_losses = max(1, steps // 50), balance_losses
        self.images: int | None = None
        self.loads: dict[int, list[np.ndarray]] = {}

    def log(self, report: Report) -> None:
        for name, value in report.record.items():
            if name != "step":
                self.writer.add_scalar(chart_name(name, self.balance_losses), value, report.step)
        self.writer.add_scalar("train/loss_smoothed", report.smoothed, report.step)
        losses = {"train": report.record.get("loss"), "smoothed": report.smoothed}
        for name, loss in (losses | {"validation": report.record.get("val_loss")}).items():
            if loss is not None:
                self.writer.add_scalar(f"Loss/{name}", loss, report.step)
        for layer, load in report.load.items():
            relative_load_E = np.asarray(load) / max(float(np.mean(load)), 1.0)
            history = self.loads.setdefault(layer, [])
            history.append(relative_load_E)
            if len(history) > COLUMNS:
                del history[1:-1:2]
        if self.images is None or report.step - self.images >= self.every:
            self._draw(report.step)
            self.images = report.step

    def _draw(self, step: int) -> None:
        """Write for each layer an image of the experts' loads over time and a histogram of the latest loads.

        The image has a row per expert and a column per report; grey is the mean load, blue less, red more.
        """
        import torch  # titanmoe report and the console import this module without torch

        for layer, history in self.loads.items():
            image_EC3 = opaque_colours(np.stack(history, 1))
            scale = max(1, 160 // image_EC3.shape[0]), max(1, 400 // image_EC3.shape[1])
            image_EC3 = image_EC3.repeat(scale[0], 0).repeat(scale[1], 1)
            self.writer.add_image(f"load/layer {layer}", image_EC3, step, dataformats="HWC")
            self.writer.add_histogram(f"load over its mean/layer {layer}", torch.from_numpy(history[-1]), step)

    def event(self, step: int, kind: str, text: str) -> None:
        # Markdown would join lines: those of several are shown as they are.
        self.writer.add_text(f"events/{kind}", textwrap.indent(text, "    ") if "\n" in text else text, step)

    def close(self) -> None:
        self.writer.close()


class WandbWriter:
    """ReportTarget that writes to Weights & Biases: one W&B run per run folder, continued when the run resumes."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any], balance_losses: Sequence[str]):
        import wandb

        self.wandb, self.balance_losses = wandb, balance_losses
        self.run = wandb.init(
            project=project, name=folder.name, id=_wandb_id(folder), resume="allow", dir=str(folder), config=config
        )
        # W&B's own step counter cannot go back, but the step of a resumed run does.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, report: Report) -> None:
        values = {
            chart_name(name, self.balance_losses): value for name, value in report.record.items() if name != "step"
        }
        for layer, load in report.load.items():
            values[f"load/layer {layer}"] = self.wandb.Histogram(load)
        self.run.log({"step": report.step, "train/loss_smoothed": report.smoothed, **values})

    def event(self, step: int, kind: str, text: str) -> None:
        if kind in ("spike", "skip", "divergence", "collapse", "straggler", "suspect", "restore", "stop"):
            self.run.alert(title=f"step {step}: {kind}", text=text)

    def close(self) -> None:
        self.run.finish()


def _wandb_id(folder: Path) -> str:
    """Return the W&B id in the file wandb-id of a run's folder; the first time draw it at random and write the file."""
    file = folder / "wandb-id"
    if not file.exists():
        safe_files.write(folder, file.name, uuid.uuid4().hex[:12].encode())
    return safe_files.read(folder, file.name, 1000).decode()
