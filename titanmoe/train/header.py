"""Build the header of a run: a table of labels and texts that it prints before its first step.

Called by titanmoe.train.build. One part follows from recipe, mapping and device alone, the other from the built model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.text import Text

from titanmoe.config.schema import Checkpoint, Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import splits_backward, stage_ranks
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.parallel.compiled import why_not_one_graph
from titanmoe.parallel.pipeline import Pipeline, WithoutPipeline
from titanmoe.train.alarms import warn_of_no_balancing
from titanmoe.train.console import describe_saving, format_mapping
from titanmoe.train.host_resources import checkpoint_bytes
from titanmoe.train.learning_rate import warn_of_high_rate
from titanmoe.train.runtime import describe_segments

TESTED_VERSIONS = ("2.11", "2.13", "2.14", "2.15")
"""Versions of PyTorch that the tests have run with (README.md)."""


@dataclass(frozen=True)
class Header:
    """Lines of the table that a run prints at its start, by label, which depend on recipe, mapping and device alone."""

    mapping: dict[str, str]
    batches: dict[str, str | Text]
    routing: dict[str, str]
    checkpoint: Checkpoint
    checkpoint_bytes: int

    def rows(self, notes: dict[str, str], run: Path) -> dict[str, str | Text]:
        """Return all lines of the header by label, in the order in which they are printed.

        Args:
            notes: lines that are known once the run is built and its checkpoint loaded, by label.
        """
        where = {"run folder": str(run), "checkpoint": describe_saving(self.checkpoint, self.checkpoint_bytes, run)}
        return self.mapping | notes | self.batches | where | self.routing


def make_header(config: Config, fold: Fold, device_name: str, peak: float | None) -> Header:
    """Return the lines of the header on model, mapping, devices, batch and data, and the checkpoint's estimated bytes.

    Warnings are lines too: of a model without load balancing, of a high learning rate, and of moe.force_balance.

    Args:
        device_name: the device's name as PyTorch gives it.
        peak: peak FLOP/s of one device; None if unknown.
    """
    model, training = config.model, config.training
    ranks = f"{fold.world} rank{'s' * (fold.world > 1)} on {device_name}"
    each = f", peak {peak / 1e12:,.1f} TFLOP/s each" if peak else ""
    size = parameters(model)
    count = f"{size.total:,} parameters, {size.active:,} active per token"
    tuning = Tuning.of(config)
    trained = trained_parameters(model, tuning)
    if tuning.trains_all:
        count += "; all are trained"
    else:
        count += f"; {trained:,} are trained" + ", in adapters" * bool(tuning.rank)
    balance, rate = warn_of_no_balancing(model, config.moe), warn_of_high_rate(config.optimizer)
    forced = "FORCED BALANCE: tokens go round-robin, whatever the router says. For benchmarks only."
    return Header(
        {
            "model": f"{model.family} {model.size}: {count}",
            "attention": format_mapping(fold.attention_axes),
            "experts": format_mapping(fold.expert_axes),
        },
        ({"balance": balance} if balance else {})
        | ({"learning rate": Text(rate, "bold red", overflow="fold")} if rate else {})
        | {
            "devices": f"{ranks}, computing in {training.mixed_precision_param}{each}",
            "batch": _batch(config, fold.dp),
            "data": ", ".join(_data_paths(config)) or config.data.source,
        },
        {"routing": forced} if config.moe.force_balance else {},
        config.checkpoint,
        checkpoint_bytes(config),
    )


def _batch(config: Config, dp: int) -> str:
    training, rl = config.training, config.rl
    if rl.reward:
        prompts = f"{rl.prompts_per_step} prompts x {rl.completions} completions"
        return f"{prompts} per step, packed into {training.seq_len} tokens"
    samples = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * dp
    microbatches = samples // (training.local_batch_size * dp)
    return (
        f"{samples} x {training.seq_len} = {samples * training.seq_len:,} tokens per step: "
        f"{dp} data rank{'s' * (dp > 1)} x {microbatches} microbatch{'es' * (microbatches > 1)} "
        f"of {training.local_batch_size}"
    )


def _data_paths(config: Config) -> list[str]:
    if config.rl.reward:
        return config.rl.prompts
    return config.data.paths if config.data.source == "files" else []


def setup_rows(
    config: Config, microbatches: int, engine: WithoutPipeline | Pipeline, device: torch.device
) -> dict[str, str]:
    """Return the header's lines on PyTorch, GPU memory, compilation, the pipeline and recomputation, by label.

    Only lines that apply are there: "PyTorch" for a version that is not tested, "recompute" only where a pipeline that
    splits backward makes it costly.

    Args:
        engine: runs the stages; a pipeline's knows the fraction of time in which ranks are idle.
    """
    rows, options, pp, recompute = {}, config.pipeline, config.parallelism.pp, config.activation_checkpoint.mode
    splits = splits_backward(options, pp)
    if not torch.__version__.startswith(tuple(f"{version}." for version in TESTED_VERSIONS)):
        *most, last = TESTED_VERSIONS
        rows["PyTorch"] = f"{torch.__version__}, which titanmoe was not tried with: {', '.join(most)} and {last} were"
    if device.type == "cuda":
        rows["GPU memory"] = describe_segments()
    if config.compile.enable:
        reason = why_not_one_graph(config, splits)
        rows["compile"] = f"MoE layers in parts: {reason}" if reason else "each MoE layer is one graph"
    if pp == 1:
        return rows
    name = options.schedule_csv or options.schedule
    rows["pipeline"] = (
        f"{name}: {len(stage_ranks(options, pp))} stages, {microbatches} microbatches, "
        f"bubble {engine.bubble:.1%} of the time"
        + (", pairs of forward and backward take turns" if config.moe.overlap == "pairs" else "")
    )
    if splits and recompute in ("full", "full_except_dispatch", "moe"):
        rows["recompute"] = (
            f'{name} splits backward, so with activation_checkpoint.mode = "{recompute}" a block runs up to '
            "4 times per microbatch: exact, but 1F1B or Interleaved1F1B may be faster"
        )
    return rows
