"""A full model in a folder: where its weights are, its config, and how to fill a sharded model with them.

Teachers, references of preference runs and text generation read models with it, from a run or from Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
from titanmoe.checkpoint.manifest import recorded_fields, refuse_adapters
from titanmoe.checkpoint.safe_files import ANOTHER, CheckpointError
from titanmoe.config.component_kinds import ComponentError
from titanmoe.config.fields import build as build_config
from titanmoe.config.schema import Config, Model
from titanmoe.models.families import family_of

if TYPE_CHECKING:
    from titanmoe.checkpoint.state import Targets


@dataclass(frozen=True)
class FullModel:
    """A model with all its weights in one folder: a checkpoint, or a Hugging Face model."""

    path: Path
    config: Config
    """Config that it was trained with. A Hugging Face folder gives [model] and seq_len, its context; else defaults."""
    step: int | None
    """Training step; None for a Hugging Face folder."""
    identity: str | None = None
    """Identity of the tokenizer of its training data; None if the checkpoint does not record it."""


def find_full_model(path: Path) -> FullModel:
    """Return the model in a run (its latest checkpoint), a checkpoint or a Hugging Face folder. Weights are not read.

    Args:
        path: the folder; RUN:best and RUN:STEP name a checkpoint of a run.

    Raises:
        CheckpointError: there is none, files are missing or of another size, or it has adapters alone.
        ConfigError: [model] cannot express the config.json of a Hugging Face folder.
    """
    if (path / "config.json").is_file() and not (path / layout.MANIFEST).is_file():
        from titanmoe.checkpoint.hf.config_json import describe_folder

        parsed = describe_folder(path)
        seq_len = parsed.json.get("max_position_embeddings") or Config().training.seq_len
        config = Config(model=parsed.model, training=replace(Config().training, seq_len=seq_len))
        return FullModel(path, config, None)
    path = layout.require_intact(latest_checkpoint(path))
    record = layout.read_manifest(path).record
    refuse_adapters(record, path)
    if "model" not in record.get("config", {}):
        raise CheckpointError(f"{path / layout.MANIFEST} has no [model] in its config", ANOTHER)
    config = build_config(recorded_fields(record, path / layout.MANIFEST))
    try:
        family_of(config.model.family)
    except ComponentError as error:
        raise CheckpointError(f"{path / layout.MANIFEST}: {error}") from None
    return FullModel(path, config, record.get("step", 0), record.get("loader", {}).get("tokenizer"))


def fill_shards(targets: Targets, source_model: FullModel, model: Model) -> None:
    """Fill this rank's shards of a model in place from the files of `source_model`. Not collective.

    Args:
        targets: (name of the stored tensor, shard to fill) by name on this rank, such as "model.embed.weight".
        source_model: the model to read.
        model: [model] to read a Hugging Face folder as; unused for a checkpoint.

    Raises:
        CheckpointError: a checkpoint lacks a tensor or cannot be read.
        ConfigError: the tensors of a Hugging Face folder do not fit `model`.
    """
    if source_model.step is not None:
        from titanmoe.checkpoint.checkpoint_folder import Checkpoint

        Checkpoint(source_model.path).fill(targets)
        return
    from titanmoe.checkpoint.hf.huggingface_source import open_checked_hf
    from titanmoe.checkpoint.move_in_blocks import fill_in_blocks

    source = open_checked_hf(source_model.path, model)
    for name, (_, shard) in targets.items():
        fill_in_blocks(shard.tensor, shard.offset, partial(source.read, name.removeprefix("model.")))
