"""Are the weights under PEFT's adapters those that they were trained on?

A folder of PEFT has no digest of them, only a name: base_model_name_or_path. Whoever puts adapters on weights (convert,
generate, a run that begins from them) compares that name with the one that was given; where they are two names, and the
model of the first lies on this machine, it compares the weights. Shapes are compared as adapters are read.
"""

from __future__ import annotations

import torch

from titanmoe.checkpoint.adapters import Adapters
from titanmoe.checkpoint.hf.fetch import last_name, local_folder, place_of
from titanmoe.checkpoint.hf.merge import BASE, Weights, digest_of, open_weights
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config.load import ConfigError

KEY = "base_model_name_or_path"


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
        return f"shapes alone were compared with {under}: adapter_config.json names no base ({KEY})"
    if place_of(named) == place_of(under):
        return f"{under} is the base that adapter_config.json names"
    if all(on_all_ranks(group, lambda: local_folder(named) is not None)):
        return _compare_weights(adapters, weights, under, group)
    if last_name(named) != last_name(under):
        raise ConfigError(
            [
                f"its adapters are for {named} ({KEY} in adapter_config.json), which is not on this machine to be "
                f"compared, and {under} has another name: name {named}{BASE}, or, if they are the same weights, write "
                f"{under} there"
            ],
            str(adapters.path),
        )
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
            [f"its adapters are for {named} ({KEY} in adapter_config.json), and {under} is no such model: {why}"],
            str(adapters.path),
        )
    others = open_weights(named, adapters.model)
    theirs, ours = (digest_of(model, torch.float32, group, biases=True) for model in (others, weights))
    if ours != theirs:
        raise ConfigError(
            [
                f"{under} has other weights (digest {ours}) than {named} (digest {theirs}), for which its adapters are "
                f"({KEY} in adapter_config.json): name that{BASE}"
            ],
            str(adapters.path),
        )
    return f"{under} has the same weights (digest {ours}) as {named}, the base that adapter_config.json names"
