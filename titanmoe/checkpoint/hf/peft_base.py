"""Are the weights under PEFT's adapters those that they were trained on?

A folder of PEFT has no digest of them, only a name: base_model_name_or_path. Whoever puts adapters on weights (convert,
generate, a run that begins from them) compares that name with the one that was given; where they are two names, and the
model of the first lies on this machine, it compares the weights. Shapes are compared as adapters are read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from titanmoe.checkpoint.hf.fetch import local_folder, resolve_place, short_name
from titanmoe.checkpoint.hf.peft_read import read_peft
from titanmoe.checkpoint.hf.weight_sources import NAME_BASE_HINT, Weights, open_weights, weights_digest
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks
from titanmoe.checkpoint.read_adapters import Adapters, lora_mismatches
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config, LoRA, Model

BASE_KEY = "base_model_name_or_path"


def read_first_adapters(folder: Path, model: Model, lora: LoRA) -> Adapters:
    """Return the adapters that a run begins from; ConfigError if they are not for its model, or not as its [lora]."""
    adapters = read_peft(folder.expanduser(), model)
    if problems := lora_mismatches(adapters, Config(model=model, lora=lora)):
        raise ConfigError(problems, str(adapters.path))
    return adapters


def refuse_other_base(adapters: Adapters, under: str) -> None:
    """Raise a ConfigError if adapters have a base, and not the weights of this name, as far as names tell.

    Args:
        under: the name of the weights that a run puts them on; "" for random ones.
    """
    named = adapters.base
    if named and not under:
        raise ConfigError(
            [
                f"its adapters are for {named}, and this run begins from random weights: name the model in "
                "model.hf or checkpoint.initial_hf"
            ],
            str(adapters.path),
        )
    if named and resolve_place(named) != resolve_place(under) and local_folder(named) is None:
        _refuse_other_name(adapters, under)


def _refuse_other_name(adapters: Adapters, under: str) -> None:
    named = adapters.base
    if short_name(named) != short_name(under):
        raise ConfigError(
            [
                f"its adapters are for {named} ({BASE_KEY} in adapter_config.json), which is not on this machine to be "
                f"compared, and {under} has another name: name {named}{NAME_BASE_HINT}, or, if they are the "
                f"same weights, write {under} there"
            ],
            str(adapters.path),
        )


def compare_base(adapters: Adapters, weights: Weights, under: str, group: Group) -> str:
    """Return a line on what of the weights under adapters of PEFT was compared. All ranks of the group call it.

    Args:
        weights: those under them.
        under: their name, as the user gave it.

    Raises:
        ConfigError: they are others, or have another name and cannot be compared.
    """
    named = adapters.base
    if not named:
        return f"shapes alone were compared with {under}: adapter_config.json names no base ({BASE_KEY})"
    if resolve_place(named) == resolve_place(under):
        return f"{under} is the base that adapter_config.json names"
    if all(on_all_ranks(group, lambda: local_folder(named) is not None)):
        return _compare_weights(adapters, weights, under, group)
    _refuse_other_name(adapters, under)
    return f"names and shapes were compared, not weights: adapters for {named}, on {under}"


def _compare_weights(adapters: Adapters, weights: Weights, under: str, group: Group) -> str:
    """Compare all weights with those of the base that adapter_config.json names, which is on this machine."""
    named = adapters.base

    def why_no_such_model() -> str:
        try:
            open_weights(named, adapters.model)
        except (ConfigError, CheckpointError) as error:
            return "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
        return ""

    if why := next(filter(None, on_all_ranks(group, why_no_such_model)), ""):
        raise ConfigError(
            [f"its adapters are for {named} ({BASE_KEY} in adapter_config.json), and {under} is no such model: {why}"],
            str(adapters.path),
        )
    others = open_weights(named, adapters.model)
    theirs, ours = (weights_digest(model, torch.float32, group, biases=True) for model in (others, weights))
    if ours != theirs:
        raise ConfigError(
            [
                f"{under} has other weights (digest {ours}) than {named} (digest {theirs}), for which its adapters are "
                f"({BASE_KEY} in adapter_config.json): name that{NAME_BASE_HINT}"
            ],
            str(adapters.path),
        )
    return f"{under} has the same weights (digest {ours}) as {named}, the base that adapter_config.json names"
