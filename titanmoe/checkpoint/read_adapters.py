"""LoRA adapters by our tensor names, from a checkpoint or a PEFT folder, and whether they match a recipe's [lora].

Callers: conversion, generation, and runs that begin from adapters. A is (rank, inputs), B is (outputs, rank), both with
a leading dim of experts where a weight has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.choose_checkpoint import base_weights_name
from titanmoe.checkpoint.manifest import recorded_fields
from titanmoe.checkpoint.safe_files import ANOTHER, CheckpointError
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.fields import build, toml_value
from titanmoe.config.schema import Config, LoRA, Model
from titanmoe.models import tensors as names
from titanmoe.models.lora_spec import adapter_names, is_adapter
from titanmoe.models.tensors import Tuning

MODEL = "model."


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The LoRA adapters in a checkpoint or a PEFT folder, and what is known about their base weights."""

    path: Path
    model: Model
    lora: LoRA
    tensors: Mapping[str, LazyTensor]
    """A and B of each matrix by our names, experts stacked."""
    base: str = ""
    """Name of the base weights: a Hugging Face model, or a checkpoint; "" if their file does not say."""
    digest: str = ""
    """Digest of the base weights (weight_digest); "" if their file has none."""
    config: Config | None = None
    """Config of the run that trained them; None for a PEFT folder."""
    dropout: float = 0.0
    """Dropout with which they were trained."""

    @cached_property
    def matrices(self) -> list[str]:
        """Names of the weights that have adapters, in the model's order."""
        return [name for name in names.names(self.model) if adapter_names(name)[0] in self.tensors]

    def rank(self, matrix: str) -> int:
        """Return the LoRA rank of a weight's adapter, by the weight's name in `matrices`."""
        return self.tensors[adapter_names(matrix)[0]].shape[-2]


def read_checkpoint_adapters(path: Path) -> Adapters:
    """Open the adapters in a checkpoint; CheckpointError if it has full weights instead, or lacks some adapters.

    Tensors are read later, and their shapes are not compared with the model's.
    """
    saved = Checkpoint(path)
    if "base" not in saved.record:
        raise CheckpointError(f"{path} has full weights and no adapters: a run with lora.rank above 0 makes them")
    config = build(recorded_fields(saved.record, path / layout.MANIFEST))
    shapes = dict(names.shapes(config.model, Tuning.of(config)))
    missing = [name for name in shapes if is_adapter(name) and f"{MODEL}{name}" not in saved.tensors]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise CheckpointError(f"{path} lacks {', '.join(missing[:8])}{more}", ANOTHER)
    tensors = {
        name.removeprefix(MODEL): LazyTensor(shape, dtype, partial(saved.read, name))
        for name, (shape, dtype) in saved.tensors.items()
        if name.startswith(MODEL)
    }
    return Adapters(
        path=path,
        model=config.model,
        lora=config.lora,
        tensors=tensors,
        base=base_weights_name(config.checkpoint),
        digest=saved.record["base"],
        config=config,
        dropout=config.lora.dropout,
    )


def lora_mismatches(adapters: Adapters, config: Config) -> list[str]:
    """Return a line for each way in which a config's [lora] does not fit the adapters; [] if it fits.

    Scale, ranks and the choice of weights (lora.targets) are compared, dropout is not. Each line has the value to set.
    """
    tuning, matrices = Tuning.of(config), adapters.matrices
    theirs: dict[str, float] = {"lora.alpha": adapters.lora.alpha, "lora.rslora": adapters.lora.rslora}
    ours: dict[str, float] = {"lora.alpha": config.lora.alpha, "lora.rslora": config.lora.rslora}
    ours |= {"lora.rank": tuning.rank, "lora.experts_rank": tuning.experts_rank}
    for name in matrices:
        theirs["lora.experts_rank" if ".experts." in name else "lora.rank"] = adapters.rank(name)
    lines = [
        f"{field} = {toml_value(ours[field])}, and the adapters have {toml_value(value)}: use that"
        for field, value in theirs.items()
        if ours[field] != value
    ]
    chosen = [name for name in names.names(config.model) if tuning.rank_of(name)]
    if chosen != matrices:
        targets = toml_value(targets_choosing(config.model, matrices))
        more, fewer = _list_matrices(set(chosen) - set(matrices)), _list_matrices(set(matrices) - set(chosen))
        lines.append(
            f"lora.targets chooses {more} that have no adapters there, and leaves out {fewer} that have: use targets = "
            f"{targets}"
        )
    return lines


def _list_matrices(matrices: set[str]) -> str:
    """Return a number of names as text with up to three of them, such as "4 matrices (a, b, c, ...)"."""
    some = ", ".join(sorted(matrices)[:3])
    return f"{len(matrices)} matrices{f' ({some}, ...)' if len(matrices) > 3 else f' ({some})' if matrices else ''}"


def name_in_block(name: str) -> str:
    """Return a weight's name without the prefix of its layer: attention.wq.weight for layers.3.attention.wq.weight.

    The block of multi-token prediction (mtp.0.block.) counts as a layer. Names outside layers are returned unchanged.
    """
    return re.sub(r"^(layers\.\d+|mtp\.\d+\.block)\.", "", name)


def targets_choosing(model: Model, matrices: list[str]) -> list[str]:
    """Return patterns for the option lora.targets that choose the weights named in `matrices` and no others.

    A pattern is a full name, or *.NAME if all layers with such a weight are chosen.
    """
    everything, chosen, out = names.names(model), set(matrices), {}
    for name in matrices:
        alike = [other for other in everything if name_in_block(other) == name_in_block(name)]
        out |= {f"*.{name_in_block(name)}" if chosen.issuperset(alike) else name: None}
    return list(out)
