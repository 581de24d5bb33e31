"""Errors of a run against the reference model of tests/reference.py, and the errors that are allowed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tests import reference
from tests.support import tolerances
from titanmoe.config.schema import Config
from titanmoe.moe.balance_losses.balance_spec import active_losses
from titanmoe.ops.newton_schulz import CLASSIC, Coefficients, step_coefficients

if TYPE_CHECKING:
    from tests.parity import Outcome

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
NUMERICS = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")
LAYER = ("load", "dropped_fraction", "imbalance", "router_entropy")
"""Metrics of each layer that the reference model has too."""


def nan_to_inf(error: float) -> float:
    """Return the error, infinite for a NaN: `max` of floats skips a NaN that is not the first."""
    return math.inf if math.isnan(error) else error


def relative_error(got: float, want: float, scale: float | None = None) -> float:
    """Return the error relative to `want`, or to `scale` if it is given; infinity for NaN."""
    return nan_to_inf(abs(got - want) / max(abs(want) if scale is None else scale, 1e-300))


def worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest over tensors of max|got - want| / max(max|want|, 1e-8 * max over all of want), and its name.

    Both have full tensors by the same names, else it raises AssertionError. A NaN counts as infinite.
    """
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    floor = 1e-8 * max(float(w.abs().max()) for w in want.values())
    errors = {}
    for name, w in want.items():
        scale = max(float(w.abs().max()), floor, 1e-300)
        errors[name] = nan_to_inf(float((got[name].double() - w.double()).abs().max()) / scale)
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def compare(got: Outcome, want: reference.Run, config: Config) -> dict[str, float]:
    """Return the largest relative errors, over steps and layers, of a run's metrics, gradients and weights, by name.

    "grads" are those of the first step, "weights" and "bias" those after the last; "dropped" is an absolute error.
    `config`, the recipe of both, says what there is to compare.
    """
    errors: dict[str, float] = {}

    def note(name: str, off: float) -> None:
        errors[name] = max(errors.get(name, 0.0), off)

    for loss, norm, report, step in zip(got.loss, got.norm, got.reports, want.steps, strict=True):
        note("loss", relative_error(loss, step.loss))
        note("norm", relative_error(norm, step.grad_norm))
        for term in active_losses(config.moe):
            note(term.metric, relative_error(report[term.metric], term.coefficient * step.aux[term.name]))
        if config.model.mtp_depth:
            note("mtp_loss", relative_error(report["mtp_loss"], step.mtp))
        for layer, count in step.counts.items():
            reported = {key: report[f"layers.{layer}.{key}"] for key in LAYER}
            note("dropped", relative_error(reported["dropped_fraction"], step.dropped[layer], scale=1.0))
            note("imbalance", relative_error(reported["imbalance"], step.imbalance[layer]))
            note("entropy", relative_error(reported["router_entropy"], step.entropy[layer]))
            for a, b in zip(reported["load"], count.tolist(), strict=True):
                note("load", relative_error(a, b, scale=float(count.sum())))
    note("grads", worst_error(got.grads, want.steps[0].grads)[0])
    note("weights", worst_error(got.weights, want.weights)[0])
    if config.moe.bias_update_rate:
        note("bias", worst_error(got.bias, want.bias)[0])
    return errors


ROUNDINGS = 3 * 20 + 4
"""Roundings to bfloat16 in a block, of forward and twice as many of backward.

Attention: a norm's result and weight, queries, keys, values, two of each rotation, logits, probabilities, their
weighted sum and its projection, the residual sum. MoE: a norm, gate, up, activation, product, the sum over experts, two
all-to-alls, the residual sum. Four are for weights that were narrowed. Embedding and head count as one more block.
"""


def largest_gain(steps: Coefficients) -> float:
    """Return the factor by which Newton-Schulz steps enlarge a tiny singular value: the product of their a.

    Rounding errors grow at most by this factor.
    """
    return math.prod(a for a, _, _ in steps)


def tolerance(config: Config) -> float:
    """Return the relative error that is allowed, by the narrowest dtype involved; the reference model's is negligible.

    Newton-Schulz steps of Muon amplify rounding errors: in float64 alone, TOLERANCE, which is for five classic ones,
    grows with their gain.
    """
    dtypes = {getattr(config.training, key.removeprefix("training.")) for key in NUMERICS}
    if "bfloat16" in dtypes:
        return tolerances.bound(torch.bfloat16, roundings=ROUNDINGS * (config.model.num_layers + 1)) / 2
    if "float32" in dtypes:
        return TOLERANCE["float32"]
    options, usual = config.optimizer, CLASSIC[0] ** 5
    steps = step_coefficients(options.ns_coefficients, options.ns_steps) if options.name == "muon" else ()
    return TOLERANCE["float64"] * max(1.0, largest_gain(steps) / usual)
