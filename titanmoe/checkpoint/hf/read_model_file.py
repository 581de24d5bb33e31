"""Resolve model.hf: turn the config.json of a model's folder into fields of the recipe. Without torch.

titanmoe.components passes it to titanmoe.config.load, which may not import this room. A recipe cannot override what
config.json fixes, but it can override the defaults that follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.choose_checkpoint import checkpoint_to_resume
from titanmoe.checkpoint.hf.config_json import CONFIG, describe_folder
from titanmoe.checkpoint.hf.fetch import describing_folder, pin_revision
from titanmoe.checkpoint.manifest import recorded_fields
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config.fields import build, flatten
from titanmoe.config.load import ConfigError
from titanmoe.config.model_file import ModelFile
from titanmoe.config.schema import Config
from titanmoe.data.tokenizer import FILE

RECIPE_CHOICES = ("model.hf", "model.change", "model.mtp_depth", "model.mtp_after_norm")
"""Fields of [model] that a recipe sets itself. Whether to train a model's multi-token prediction is a choice, and no
file says whether that block sees states before or after the final norm."""


def read_model_file(values: Mapping[str, Any]) -> ModelFile:
    """Return the fields of a recipe that config.json of model.hf fixes, and defaults of fields that follow from it.

    The file is fetched if model.hf is remote. A run that has a checkpoint of its own no longer needs the model's
    folder: if that cannot be read, the checkpoint's record is used. `values` has the recipe's fields by path,
    with defaults for the others.

    Raises:
        ConfigError: there is neither a config.json nor a checkpoint, or [model] cannot express the model.
    """
    name = values["model.hf"]
    try:
        folder = describing_folder(name)
        parsed = describe_folder(folder)
    except ConfigError:
        if record := _read_from_checkpoint(values):
            return record
        raise
    fixed = _fixed(flatten(Config(model=parsed.model)))
    if parsed.aux_loss is not None:
        fixed["moe.aux_loss"] = parsed.aux_loss
    defaults = {
        "checkpoint.initial_hf": pin_revision(name, folder),
        "model.mtp_after_norm": values["model.mtp_depth"] > 0,
    }
    source = str(folder / CONFIG) if str(folder) == name else f"{CONFIG} of {name}"
    return ModelFile(source, fixed, defaults | {"data.tokenizer": str(folder)})


def _fixed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a config's values, by path, that config.json fixes: [model] without what a recipe chooses."""
    return {path: value for path, value in values.items() if path.startswith("model.") and path not in RECIPE_CHOICES}


def _read_from_checkpoint(values: Mapping[str, Any]) -> ModelFile | None:
    """Return the fixed fields and defaults from the record of the checkpoint that the run resumes from; None if none.

    `values` has the recipe's fields by path.

    Raises:
        ConfigError: its record, or the tokenizer that it carries, cannot be read.
    """
    path, record = checkpoint_to_resume(build(values))
    if path is None:
        return None
    try:
        recorded = recorded_fields(record, path / layout.MANIFEST)
        tokenizer = layout.carried_files(path).get(FILE)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    derived = ("checkpoint.initial_hf", "moe.aux_loss", "model.mtp_after_norm")
    defaults = {key: recorded[key] for key in derived if key in recorded}
    if tokenizer:
        defaults["data.tokenizer"] = str(tokenizer.parent)
    return ModelFile(str(path / layout.MANIFEST), _fixed(recorded), defaults)
