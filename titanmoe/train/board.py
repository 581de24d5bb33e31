"""TensorBoard and Weights & Biases: the numbers of metrics.jsonl, grouped as people look for them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanmoe.checkpoint import safe_files
from titanmoe.load_colours import colour_share
from titanmoe.train.sink import Report

GROUPS = {
    "train": ("loss", "mtp_loss", "grad_norm", "lr", "tokens", "flops", "max_logit"),
    "speed": ("tokens_per_s", "step_time_s", "mfu"),
    "memory": ("memory_gib",),
    "validation": ("val_loss", "val_perplexity", "val_best"),
    "time": ("checkpoint_blocked_s", "data_wait_s", "val_s", "answers_s"),
    "experts": ("imbalance", "router_entropy", "dropped_fraction"),
}
"""Per-layer figures are grouped by quantity, so that all layers appear side by side; times have a group `time`."""
LOSSES = {"train": ("Loss", "loss"), "smoothed": ("Loss", "smoothed"), "validation": ("Loss", "val_loss")}
COLUMNS = 200
"""Reports that an image of the load shows; older ones are thinned out."""


def tag(name: str, balance_losses: Sequence[str]) -> str:
    if name.startswith("layers."):
        _, layer, quantity = name.split(".", 2)
        return f"layers {quantity}/layer {layer}"
    if name.startswith(("time.", "data.", "straggler.", "answers.", "preference.")):
        return name.replace(".", "/", 1)
    if name in balance_losses:
        return f"experts/{name}"
    return next((f"{group}/{name}" for group, names in GROUPS.items() if name in names), f"more/{name}")


class Board:
    def __init__(self, folder: Path, recipe: str, step: int, steps: int, balance_losses: Sequence[str]):
        """recipe: the whole of it, as TOML. step: the last that is done, of `steps`."""
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
                self.writer.add_scalar(tag(name, self.balance_losses), value, report.step)
        self.writer.add_scalar("train/loss_smoothed", report.smoothed, report.step)
        for name, (first, value) in LOSSES.items():
            if (loss := report.smoothed if value == "smoothed" else report.record.get(value)) is not None:
                self.writer.add_scalar(f"{first}/{name}", loss, report.step)
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

    def __init__(self, folder: Path, project: str, config: dict[str, Any], balance_losses: Sequence[str]):
        import wandb

        self.wandb, self.balance_losses = wandb, balance_losses
        self.run = wandb.init(
            project=project,
            name=folder.name,
            id=_own_id(folder),
            resume="allow",
            dir=str(folder),
            config=config,
        )
        # W&B's own step counter cannot go back, but the step of a resumed run does.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, report: Report) -> None:
        values = {tag(name, self.balance_losses): value for name, value in report.record.items() if name != "step"}
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
        safe_files.write(folder, file.name, uuid.uuid4().hex[:12].encode())
    return safe_files.read(folder, file.name, 1000).decode()
