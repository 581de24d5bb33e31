"""Check that the base weights under PEFT's adapters are those that they were trained on.

A PEFT folder has no digest of its base weights, only a name: base_model_name_or_path. Conversion, generation and runs
that begin from adapters compare that name with the given one; if the names differ and the named model is on this
machine, they compare the weights. Shapes are compared as adapters are read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from titanmoe.checkpoint.hf.fetch import local_folder, resolve_place, short_name
from titanmoe.checkpoint.hf.peft_read import read_peft
from titanmoe.checkpoint.hf.weight_sources import NAME_BASE_HINT, Weights, open_weights, weights_digest
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks, raise_on_all_ranks
from titanmoe.checkpoint.read_adapters import Adapters, lora_mismatches
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config, LoRA, Model

BASE_KEY = "base_model_name_or_path"


def read_first_adapters(folder: Path, model: Model, lora: LoRA) -> Adapters:
    """Read the PEFT folder that a run begins from; ConfigError if it does not fit its model or its [lora].

    Base weights are not compared.
    """
    adapters = read_peft(folder.expanduser(), model)
    if problems := lora_mismatches(adapters, Config(model=model, lora=lora)):
        raise ConfigError(problems, str(adapters.path))
    return adapters


def refuse_other_base(adapters: Adapters, base_name: str) -> None:
    """Raise a ConfigError if adapters are for another base model than the run's, as far as the models' names tell.

    Compared are names in lower case without owner and revision. A base model that is on this machine is not refused
    here: `compare_base` can compare its weights. Nor are adapters that name no base.

    Args:
        adapters: the adapters.
        base_name: name of the base weights of the run; "" for random ones, refused if the adapters name a base.
    """
    named = adapters.base
    if named and not base_name:
        raise _error(
            adapters,
            f"the adapters are for {named}, and this run begins from random weights: name the model in model.hf or "
            "checkpoint.initial_hf",
        )
    if named and resolve_place(named) != resolve_place(base_name) and local_folder(named) is None:
        _refuse_other_name(adapters, base_name)


def _error(adapters: Adapters, problem: str) -> ConfigError:
    return ConfigError(problem, str(adapters.path))


def _refuse_other_name(adapters: Adapters, base_name: str) -> None:
    """Raise a ConfigError if the names of the adapters' base and of `base_name` differ, owner and revision apart."""
    named = adapters.base
    if short_name(named) != short_name(base_name):
        raise _error(
            adapters,
            f"the adapters are for {named} ({BASE_KEY} in adapter_config.json), which is not on this machine to be "
            f"compared, and {base_name} has another name: name {named}{NAME_BASE_HINT}, or, if they are the same "
            f"weights, write {base_name} there",
        )


def compare_base(adapters: Adapters, weights: Weights, base_name: str, group: Group) -> str:
    """Compare base weights with those that PEFT's adapters name, if any; return a line on what was compared.

    Collective over the group, whose ranks share the reading.

    Args:
        adapters: the adapters.
        weights: the base weights to use.
        base_name: the name of `weights`, as the user gave it.
        group: the ranks; None for a single process.

    Raises:
        ConfigError: the weights differ, or cannot be compared and have another name, owners and folders apart.
    """
    named = adapters.base
    if not named:
        return f"shapes alone were compared with {base_name}: adapter_config.json names no base ({BASE_KEY})"
    if all(on_all_ranks(group, lambda: resolve_place(named) == resolve_place(base_name))):
        return f"{base_name} is the base that adapter_config.json names"
    if all(on_all_ranks(group, lambda: local_folder(named) is not None)):
        return _compare_weights(adapters, weights, base_name, group)
    _refuse_other_name(adapters, base_name)
    return f"names and shapes were compared, not weights: adapters for {named}, on {base_name}"


def _compare_weights(adapters: Adapters, weights: Weights, base_name: str, group: Group) -> str:
    """Compare the digests of `weights`, named `base_name`, and of the base model that adapter_config.json names.

    Collective over the group, whose ranks share the reading.

    Returns:
        A line for the log that they are the same.

    Raises:
        ConfigError: they differ, or the named model cannot be read.
    """
    named = adapters.base
    try:
        others = raise_on_all_ranks(group, lambda: open_weights(named, adapters.model))
    except ConfigError as error:
        raise _error(
            adapters,
            f"the adapters are for {named} ({BASE_KEY} in adapter_config.json), which cannot be compared with "
            f"{base_name}: {'; '.join(error.problems)}: use adapters of {base_name}",
        ) from None
    theirs, ours = (weights_digest(model, torch.float32, group, biases=True) for model in (others, weights))
    if ours != theirs:
        raise _error(
            adapters,
            f"{base_name} has other weights (digest {ours}) than {named} (digest {theirs}), for which the adapters are "
            f"({BASE_KEY} in adapter_config.json): name that{NAME_BASE_HINT}",
        )
    return f"{base_name} has the same weights (digest {ours}) as {named}, the base that adapter_config.json names"
