"""What a run tells: a console line, metrics.jsonl and TensorBoard, all from the same numbers (docs/metrics.md)."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.models.count import Parameters
from titanmoe.train.folder import METRICS
from titanmoe.train.runtime import Runtime

# Dense bf16/fp16 TFLOP/s, without sparsity, from the maker's data sheets. The first name found in the device's counts.
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


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of one device, None where not known; only 16-bit peaks are known."""
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def memory_gib(device: torch.device) -> float:
    """The peak so far: on a GPU what PyTorch's allocator reserved, on a CPU what the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux


def as_json(record: dict[str, float]) -> str:
    """One line of strict JSON. JSON has no NaN or infinity: those become null, and "nonfinite" says which they were."""
    nonfinite = {name: str(value) for name, value in record.items() if not math.isfinite(value)}
    line: dict[str, object] = {name: None if name in nonfinite else value for name, value in record.items()}
    return json.dumps(line | {"nonfinite": nonfinite} if nonfinite else line, allow_nan=False)


class Metrics:
    """Writes on rank 0 and does nothing on the others. The clock starts when it is made."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        fold: Fold,
        parameters: Parameters,
        flops_per_token: float,
        folder: Path,
        notes: dict[str, str] | None = None,
        step: int = 0,
    ):
        self.config, self.runtime = config, runtime
        self.writes = runtime.rank == 0
        if not self.writes:
            return
        self.folder = folder
        self._file = (folder / METRICS).open("a", encoding="utf-8")
        self._board = None
        if config.metrics.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a second to load, for those who want it

            # What it holds of later steps is hidden: they will be made again.
            self._board = SummaryWriter(
                str(folder / "tensorboard"), flush_secs=10, purge_step=step + 1 if step else None
            )
        self.flops_per_token = flops_per_token
        on_gpu = runtime.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(runtime.device) if on_gpu else "CPU"
        known = peak_flops(self.device_name, config.training.mixed_precision_param) if on_gpu else None
        self.peak = config.metrics.peak_tflops * 1e12 or known
        self._banner(fold, parameters, notes or {})
        self._tokens = 0.0  # since the last line
        self._last_step: int | None = None
        self._steady_seconds, self._steady_steps = 0.0, 0  # without the first step
        self._since = time.monotonic()

    def log(self, step: int, values: dict[str, float]) -> None:
        """After every step. `values`: loss, grad_norm, lr, tokens (of the step, all ranks), and what else to keep."""
        if not self.writes:
            return
        self._tokens += values["tokens"]
        first = self._last_step is None
        due = first or step % self.config.metrics.log_every == 0 or step == self.config.training.steps
        if not (due or "val_loss" in values):
            return
        now = time.monotonic()
        # Validation is told apart (val_s): the others are of training.
        seconds, steps = max(now - self._since - values.get("val_s", 0.0), 1e-9), 1 if first else step - self._last_step
        if not first:
            self._steady_seconds += seconds
            self._steady_steps += steps
        record = {"step": step, **{name: values[name] for name in ("loss", "grad_norm", "lr")}}
        record["tokens_per_s"] = self._tokens / seconds
        record["step_time_s"] = seconds / steps
        if self.peak:
            record["mfu"] = record["tokens_per_s"] * self.flops_per_token / (self.peak * self.runtime.world)
        record["memory_gib"] = memory_gib(self.runtime.device)
        record |= values

        self._file.write(as_json(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(_board_tag(name), value, step)
        print(self._line(record), flush=True)
        if first:
            print(
                f"first step took {seconds:.1f} s, start-up and compilation in it; ETA counts from the next", flush=True
            )
        self._tokens, self._last_step, self._since = 0.0, step, now

    def close(self) -> None:
        if not self.writes:
            return
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _line(self, record: dict[str, float]) -> str:
        steps = self.config.training.steps
        parts = [
            f"step {record['step']:>{len(str(steps))}}/{steps}",
            f"loss {record['loss']:.4f}",
            f"grad norm {record['grad_norm']:.3f}",
            f"lr {record['lr']:.2e}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
        ]
        if "mfu" in record:
            parts.append(f"MFU {record['mfu']:.1%}")
        parts.append(f"memory {record['memory_gib']:.2f} GiB")
        if "imbalance" in record:
            parts.append(f"imbalance {record['imbalance']:.2f}")
        if record.get("dropped_fraction"):
            parts.append(f"dropped {record['dropped_fraction']:.1%}")
        if "val_loss" in record:
            best = "the best" if record["val_loss"] == record["val_best"] else f"best {record['val_best']:.4f}"
            parts.append(f"val loss {record['val_loss']:.4f} ({best})  perplexity {record['val_perplexity']:.2f}")
        if self.config.moe.force_balance:
            parts.append("FORCED BALANCE")
        if self._steady_steps:
            left = (steps - record["step"]) * self._steady_seconds / self._steady_steps
            parts.append(f"ETA {_duration(left)}")
        return "  ".join(parts)

    def _banner(self, fold: Fold, parameters: Parameters, notes: dict[str, str]) -> None:
        model, training = self.config.model, self.config.training
        dp = fold.dp_replicate * fold.dp_shard
        samples = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * dp
        microbatches = samples // (training.local_batch_size * dp)
        ranks = f"{fold.world} rank{'s' * (fold.world > 1)} on {self.device_name}"
        peak = f", peak {self.peak / 1e12:,.1f} TFLOP/s each" if self.peak else ""
        count = f"{parameters.total:,} parameters, {parameters.active:,} active per token"
        rows = {
            "model": f"{model.family} {model.size}: {count}",
            "attention": _mapping(fold.attention_axes),
            "experts": _mapping(fold.expert_axes),
            **notes,
            "devices": f"{ranks}, computing in {training.mixed_precision_param}{peak}",
            "batch": f"{samples} x {training.seq_len} = {samples * training.seq_len:,} tokens per step: "
            f"{dp} data rank{'s' * (dp > 1)} x {microbatches} microbatch{'es' * (microbatches > 1)} "
            f"of {training.local_batch_size}",
            "data": self.config.data.source,
            "run folder": str(self.folder),
        }
        if self.config.moe.force_balance:
            rows["routing"] = "FORCED BALANCE: tokens go round-robin, whatever the router says. For benchmarks only."
        table = Table.grid(padding=(0, 2))
        for name, text in rows.items():
            table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
        Console(highlight=False).print(table)


def _mapping(axes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"


def _board_tag(name: str) -> str:
    """TensorBoard groups by what precedes the slash: all layers of one quantity side by side."""
    if not name.startswith("layers."):
        return name
    _, layer, quantity = name.split(".", 2)
    return f"{quantity}/layer {layer}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
