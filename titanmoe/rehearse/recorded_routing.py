"""Routing from the `experts.jsonl` of a run, which has the count of routed tokens of each expert (`--routing`).

The counts are sums over all ranks. So each token's experts are chosen from them, deterministically: the fractions of
tokens that visit each expert are placed end to end on a line of length K, and token t takes the experts at the K points
u_t, u_t + 1, ... No fraction exceeds 1, so these are K different experts. With u_t = t times the golden ratio, modulo
1, any range of consecutive tokens nearly follows the fractions.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanmoe.checkpoint.safe_files import CheckpointError, refuse_link
from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_blocks
from titanmoe.config.parse_json import parse_json
from titanmoe.config.schema import Config
from titanmoe.rehearse.assumed_routing import AssumedRouting
from titanmoe.train.run_folder import EXPERTS

GOLDEN = (5**0.5 - 1) / 2
ESTIMATES = "loads are sums over all ranks: what two ranks send each other, and all that depends on it, is estimated"


def assign_experts(index_T: Tensor, fraction_E: Tensor, top_k: int) -> Tensor:
    """Return the experts (tokens, top_k) of tokens, such that each expert is visited by its fraction of the tokens.

    Args:
        index_T: The indices of the tokens within the step.
        fraction_E: The fraction of tokens that visit each expert; their sum is top_k.
    """
    ends_E = fraction_E.double().cumsum(0)
    ends_E *= top_k / ends_E[-1]
    point_TK = (index_T.double() * GOLDEN % 1).unsqueeze(1) + torch.arange(top_k)
    return torch.searchsorted(ends_E, point_TK, right=True).clamp_(max=len(fraction_E) - 1)


def recorded_routing(config: Config, file: Path, step: int | None = None) -> AssumedRouting:
    """Return a routing in which each expert has the load that an earlier training run recorded at a step.

    Args:
        config: The resolved config of the recipe to rehearse.
        file: The `experts.jsonl`, or the run folder that holds one.
        step: The step; None for the largest in the file.

    Raises:
        ConfigError: The file cannot be read, lacks the step, or does not fit the recipe; has all reasons.
    """
    try:
        file = refuse_link(file / EXPERTS) if file.is_dir() else file
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    step, load = _read_line(file, step)
    model = config.model
    layers = moe_blocks(model)
    if sorted(load) != sorted(layers):
        raise ConfigError(
            f"{file} has loads for layers {_layers_text(load)}; the recipe has experts in {_layers_text(layers)}"
        )
    fractions, problems = {}, []
    for layer, counts in load.items():
        if len(counts) != model.num_experts:
            problems.append(
                f"{file}: layer {layer} has {len(counts)} experts, but the recipe has model.num_experts = "
                f"{model.num_experts}"
            )
            continue
        fraction_E = torch.tensor(counts, dtype=torch.float64)
        fraction_E *= model.top_k / fraction_E.sum()
        if fraction_E.max() > 1 + 1e-6:
            busiest = int(fraction_E.argmax())
            problems.append(
                f"{file}: expert {busiest} of layer {layer} has {counts[busiest]:,} of {sum(counts):,} routed tokens, "
                f"but with model.top_k = {model.top_k} no expert can have more than 1 in {model.top_k}"
            )
        fractions[layer] = fraction_E.tolist()
    if problems:
        raise ConfigError(problems)
    text = f"as in step {step} of {file}"
    return AssumedRouting(text, partial(_experts_of, fractions, model.top_k), True, ESTIMATES)


def _experts_of(fractions: dict[int, list[float]], top_k: int, layer: int, index_T: Tensor) -> Tensor:
    return assign_experts(index_T, torch.tensor(fractions[layer], dtype=torch.float64), top_k)


def _layers_text(layers: Any) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"


def _read_line(file: Path, step: int | None) -> tuple[int, dict[int, list[int]]]:
    """Return a step and the routed tokens of each expert by block, from the line of `file`, an `experts.jsonl`.

    Without `step`, the largest in the file.

    Raises:
        ConfigError: The file cannot be read, or has no loads for the step.
    """
    try:
        texts = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    loads = {}
    for text in texts:
        try:
            line = parse_json(text)
        except ValueError:  # the run may still be writing its last line
            continue
        if (load := _load(line)) is not None:
            loads[line["step"]] = load
    if not loads:
        raise ConfigError(f"{file} has no line with expert loads: name the {EXPERTS} of a run, or its folder")
    if step is None:
        step = max(loads)
    if step not in loads:
        nearest = sorted(loads, key=lambda other_step: abs(other_step - step))[:3]
        raise ConfigError(
            f"{file} has no line for step {step}: the nearest steps are {', '.join(map(str, sorted(nearest)))}"
        )
    return step, loads[step]


def _load(line: Any) -> dict[int, list[int]] | None:
    """Return the routed tokens of each expert by block in a parsed line; None unless it has a step and valid loads.

    One block with no routed tokens, or a count that is no whole number, makes the line invalid.
    """
    if not isinstance(line, dict) or type(line.get("step")) is not int or not isinstance(line.get("load"), dict):
        return None
    load = line["load"]
    valid = all(
        layer.isdecimal()
        and len(layer) < 9
        and isinstance(counts, list)
        and all(type(count) is int and 0 <= count < 1 << 50 for count in counts)
        and sum(counts) > 0
        for layer, counts in load.items()
    )
    return {int(layer): counts for layer, counts in load.items()} if valid and load else None
