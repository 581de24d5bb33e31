"""What a run's header says besides its mapping: compilation, pipeline, recomputation."""

from __future__ import annotations

import torch

from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader
from titanmoe.fold.pipeline_schedules import splits_backward, stage_ranks
from titanmoe.parallel.compiled import why_in_parts
from titanmoe.parallel.pipeline import Pipeline, WithoutPipeline

TRIED = ("2.11", "2.13")
"""Versions of PyTorch that the tests were run with (README.md)."""


def header_notes(config: Config, pp: int, loader: Loader, engine: WithoutPipeline | Pipeline) -> dict[str, str]:
    notes = loader.notes()
    options, recompute = config.pipeline, config.activation_checkpoint.mode
    splits = splits_backward(options, pp)
    if not torch.__version__.startswith(tuple(f"{version}." for version in TRIED)):
        notes["PyTorch"] = f"{torch.__version__}, which titanmoe was not tried with: {' and '.join(TRIED)} were"
    if config.compile.enable:
        reason = why_in_parts(config.moe, splits)
        notes["compile"] = f"MoE layers in parts: {reason}" if reason else "each MoE layer is one graph"
    if pp == 1:
        return notes
    name = options.schedule_csv or options.schedule
    notes["pipeline"] = (
        f"{name}: {len(stage_ranks(options, pp))} stages, {loader.microbatches} microbatches, "
        f"bubble {engine.bubble:.1%} of the time"
        + (", pairs of forward and backward take turns" if options.overlap_pairs else "")
    )
    if splits and recompute in ("full", "moe"):
        notes["recompute"] = (
            f'{name} splits backward, so with activation_checkpoint.mode = "{recompute}" a block runs up to '
            "4 times per microbatch: exact, but 1F1B or Interleaved1F1B may be faster"
        )
    return notes
