"""Bytes of an optimizer's state on a rank."""

from __future__ import annotations

from collections.abc import Callable

from titanmoe.config.blocks import has_experts
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.models.tensors import Tuning
from titanmoe.plan.sizes import Sizes, WeightUnit, fsdp, units_of_stage
from titanmoe.train.optimizers.optimizer_rules import OPTIMIZERS

Parts = list[tuple[WeightUnit, int]]
"""Units, each with the number of data ranks that share it."""


def state_bytes(
    config: Config,
    fold: Fold,
    parts: Parts,
    stages: list[tuple[range, bool, bool]],
    blocks: list[int],
    stored: Callable[[WeightUnit, int, int], int],
) -> int:
    """parts: of the rank. stored: bytes of a unit on one of so many data ranks, given the width of a number."""
    optimizer = OPTIMIZERS.look_up(config.optimizer.name)
    as_weights, width = WIDTHS[config.training.dtype], optimizer.moment_width(config)

    def numbers(parts: Parts) -> int:
        """Bytes of one number for each trained weight."""
        if width < as_weights:  # routers' too, which are stored wider
            return sum(unit.trained.piece(n) for unit, n in parts) * width
        return sum(stored(unit.trained, n, width) for unit, n in parts)

    matrices, out = optimizer.matrices(config), 0
    if matrices:
        rest = _parts_without(config, fold, stages, blocks, matrices)
        out = optimizer.numbers_per_matrix_weight * (numbers(parts) - numbers(rest))
        parts = rest
    tensors = sum(len(unit.trained) for unit, _ in parts)
    return out + optimizer.numbers_per_weight * numbers(parts) + optimizer.bytes_per_tensor * tensors


def _parts_without(
    config: Config, fold: Fold, stages: list[tuple[range, bool, bool]], blocks: list[int], patterns: tuple[str, ...]
) -> Parts:
    """With what these patterns match left out of what is trained."""
    model, tuning = config.model, Tuning((*config.training.freeze, *patterns))
    sizes = Sizes(model, fold.tp, fold.ep, fold.etp, fold.edp, tuning)
    dense = [unit for layers, first, last in stages for unit in units_of_stage(config, sizes, layers, first, last)[0]]
    experts = [(sizes.experts_of(i), fold.edp) for i in blocks if has_experts(model, i)]
    return [(unit, fsdp(fold)) for unit in dense] + experts
