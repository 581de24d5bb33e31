"""TensorBoard and Weights & Biases: the numbers of metrics.jsonl, grouped as people look for them."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import torch

from titanmoe.config.fields import nested, to_toml
from titanmoe.config.schema import Config
from titanmoe.load_colours import colour_share
from titanmoe.moe.balance_losses.rules import switched_on
from titanmoe.train.sink import Report

GROUPS = {
    "train": ("loss", "mtp_loss", "grad_norm", "lr", "tokens"),
    "speed": ("tokens_per_s", "step_time_s", "mfu"),
    "memory": ("memory_gib",),
    "validation": ("val_loss", "val_perplexity", "val_best"),
    "time": ("checkpoint_blocked_s", "data_wait_s", "val_s"),
    "experts": ("imbalance", "router_entropy", "dropped_fraction"),
}
"""Per-layer figures are grouped by quantity, so that all layers appear side by side; times have a group `time`."""
LOSSES = {"train": ("Loss", "loss"), "smoothed": ("Loss", "smoothed"), "validation": ("Loss", "val_loss")}
COLUMNS = 200
"""Reports that an image of the load shows; older ones are thinned out."""


def tag(name: str, config: Config) -> str:
    if name.startswith("layers."):
        _, layer, quantity = name.split(".", 2)
        return f"layers {quantity}/layer {layer}"
    if name.startswith(("time.", "data.", "straggler.")):
        return name.replace(".", "/", 1)
    if any(name == term.metric for term in switched_on(config.moe)):
        return f"experts/{name}"
    return next((f"{group}/{name}" for group, names in GROUPS.items() if name in names), f"more/{name}")


class Board:
    def __init__(self, folder: Path, config: Config, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Hides entries of later steps, which will run again.
        purge = step + 1 if step else None
        self.writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10, purge_step=purge)
        self.writer.add_text("config", "    " + to_toml(config).replace("\n", "\n    "), step)
        self.config = config
        self.every = max(1, config.training.steps // 50)
        self.images: int | None = None
        self.loads: dict[int, list[np.ndarray]] = {}

    def log(self, report: Report) -> None:
        for name, value in report.record.items():
            if name != "step":
                self.writer.add_scalar(tag(name, self.config), value, report.step)
        self.writer.add_scalar("train/loss_smoothed", report.smoothed, report.step)
        for name, (first, value) in LOSSES.items():
            if (found := report.smoothed if value == "smoothed" else report.record.get(value)) is not None:
                self.writer.add_scalar(f"{first}/{name}", found, report.step)
        for layer, load in report.load.items():
            share_E = np.asarray(load) / max(float(np.mean(load)), 1.0)
            history = self.loads.setdefault(layer, [])
            history.append(share_E)
            if len(history) > COLUMNS:
                del history[1:-1:2]
        if self.images is None or report.step - self.images >= self.every:
            self._draw(report.step)
            self.images = report.step

    def _draw(self, step: int) -> None:
        """A row per expert and a column per report: grey is the mean, blue is less, red is more. Also a histogram."""
        for layer, history in self.loads.items():
            image_EC3 = colour_share(np.stack(history, 1))
            scale = max(1, 160 // image_EC3.shape[0]), max(1, 400 // image_EC3.shape[1])
            image_EC3 = image_EC3.repeat(scale[0], 0).repeat(scale[1], 1)
            self.writer.add_image(f"load/layer {layer}", image_EC3, step, dataformats="HWC")
            self.writer.add_histogram(f"load over its mean/layer {layer}", torch.from_numpy(history[-1]), step)

    def event(self, step: int, kind: str, text: str) -> None:
        self.writer.add_text(f"events/{kind}", text, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """One W&B run per run folder: a run that resumes continues it."""

    def __init__(self, folder: Path, config: Config):
        import wandb

        self.wandb, self.config = wandb, config
        self.run = wandb.init(
            project=config.metrics.wandb,
            name=folder.name,
            id=_own_id(folder),
            resume="allow",
            dir=str(folder),
            config=nested(config),
        )
        # W&B's own step counter cannot go back, but the step of a resumed run does.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, report: Report) -> None:
        values = {tag(name, self.config): value for name, value in report.record.items() if name != "step"}
        for layer, load in report.load.items():
            values[f"load/layer {layer}"] = self.wandb.Histogram(load)
        self.run.log({"step": report.step, "train/loss_smoothed": report.smoothed, **values})

    def event(self, step: int, kind: str, text: str) -> None:
        if kind in ("spike", "skip", "divergence", "collapse", "straggler", "suspect", "restore", "stop"):
            self.run.alert(title=f"step {step}: {kind}", text=text)

    def close(self) -> None:
        self.run.finish()


def _own_id(folder: Path) -> str:
    """Drawn once per folder and kept in it."""
    file = folder / "wandb-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return file.read_text(encoding="utf-8")
