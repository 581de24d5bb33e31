"""The specs of balance losses, without torch; the table of their names; and which of them a recipe switches on.

A new balance loss is a file that has its spec too, and a line in BALANCE_LOSSES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from titanmoe.config.component_kinds import ComponentError, ComponentKind, Spec
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, MoE

FIELD = "moe.balance_losses"
KEYS = frozenset(field.name for field in fields(MoE))
"""The keys of [moe]. A balance loss of the table that is named like one of them has its coefficient there."""

RESERVED_METRICS = {
    "step", "loss", "mtp_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "mfu", "memory_gib",
    "imbalance", "overflow_reruns", "skipped_steps", "dropped_fraction", "router_entropy", "data_wait_s", "val_loss",
    "val_perplexity", "val_best", "val_s", "checkpoint_blocked_s", "nonfinite", "quiz", "quiz_s", "samples",
    "samples_s", "val_reward", "val_length", "flops", "max_logit", "tokens_min", "tokens_mean", "tokens_max", "load",
    "entropy", "dropped",
}  # fmt: skip
"""Names of other reported numbers, and of the counts behind them, which no balance loss may have (`contradictions`).

Those of MoE layers are measured by titanmoe.moe.layer_statistics, which this file, without torch, cannot import."""


class BalanceSpec(Spec):
    """The spec of a balance loss: help, metric and what it does, without torch. The values here are the defaults."""

    evens_loads = True
    """Whether the loss keeps experts evenly busy. A run in which nothing does is told so in its header."""
    by_microbatch = False
    """Whether the loss depends on which samples form a microbatch."""
    metric = ""
    """The loss's name in reports; "" for the name of the loss, without a module."""


class SequenceSpec(BalanceSpec):
    help = "aux_loss_sequence evens out loads within each sample."
    implementation = "titanmoe.moe.balance_losses.aux_losses:AuxLossSequence"


class MicrobatchSpec(BalanceSpec):
    help = "aux_loss evens out loads within each microbatch."
    implementation = "titanmoe.moe.balance_losses.aux_losses:AuxLoss"
    by_microbatch = True


class GlobalSpec(BalanceSpec):
    help = "aux_loss_global evens out loads over the whole step."
    implementation = "titanmoe.moe.balance_losses.aux_losses:AuxLossGlobal"
    by_microbatch = True


class ZSpec(BalanceSpec):
    help = "z_loss keeps logits small."
    implementation = "titanmoe.moe.balance_losses.aux_losses:ZLoss"
    evens_loads = False


class Entry(NamedTuple):
    """A line of `[moe] balance_losses`: the name of a loss and its coefficient."""

    name: str
    coefficient: float


def parse_entries(lines: list[str]) -> list[Entry]:
    """Return the entries of the lines of `[moe] balance_losses`, each "NAME COEFFICIENT", in order.

    Raises:
        ComponentError: with everything that is wrong with the lines: their form, a name that is a key of [moe] or comes
            twice, or a coefficient that is negative or not finite. Whether a loss of this name exists is not checked.
    """
    parsed: list[Entry] = []
    problems = []
    for line in lines:
        name, _, number = line.strip().partition(" ")
        try:
            entry = Entry(name, float(number))
        except ValueError:
            problems.append(f'write {json.dumps(line)} as a name and a coefficient, such as "{name or "NAME"} 0.01"')
            continue
        if name in KEYS:
            problems.append(f"{name} has a key of its own: write moe.{name} = {number.strip()}")
        elif not (entry.coefficient >= 0 and math.isfinite(entry.coefficient)):
            problems.append(f"the coefficient of {name} is {number.strip()}: it must be at least 0")
        elif any(name == other.name for other in parsed):
            problems.append(f"{name} is listed twice: remove one")
        parsed.append(entry)
    if problems:
        raise ComponentError((FIELD,), f"{FIELD} cannot be used: {'; '.join(problems)}")
    return parsed


def entry_names(lines: list[str]) -> list[str]:
    """Return the names of the losses that the lines of `[moe] balance_losses`, each "NAME COEFFICIENT", list.

    Raises:
        ComponentError: if `parse_entries` refuses the lines.
    """
    return [entry.name for entry in parse_entries(lines)]


BALANCE_LOSSES = ComponentKind(
    FIELD,
    {  # in the order in which they are reported
        "aux_loss_sequence": SequenceSpec(),
        "aux_loss": MicrobatchSpec(),
        "aux_loss_global": GlobalSpec(),
        "z_loss": ZSpec(),
    },
    BalanceSpec,
    ("begin_step",),
    entry_names,
)


class Term(NamedTuple):
    """A balance loss that a recipe switches on, with its coefficient."""

    name: str
    coefficient: float
    spec: BalanceSpec

    @property
    def metric(self) -> str:
        """The name under which the loss is reported as a metric."""
        return self.spec.metric or self.name.rpartition(":")[2]


def active_losses(moe: MoE) -> list[Term]:
    """Return the balance losses whose coefficient is not 0, in the order in which metrics report them.

    Raises:
        ComponentError: if a line of `balance_losses` is wrong, or names an unknown loss.
    """
    keys = [Entry(name, getattr(moe, name)) for name in BALANCE_LOSSES.table if name in KEYS]
    return [
        Term(*entry, BALANCE_LOSSES.look_up(entry.name))
        for entry in [*keys, *parse_entries(moe.balance_losses)]
        if entry.coefficient
    ]


def contradictions(config: Config) -> Iterator[Violation]:
    """Yield a violation for each metric name that active balance losses share or that is taken, or has a dot in it.

    Raises:
        ComponentError: if a line of `balance_losses` is wrong, or names an unknown loss.
    """
    names: dict[str, list[str]] = {}
    for term in active_losses(config.moe):
        names.setdefault(term.metric, []).append(term.name)
    for metric, losses in names.items():
        if metric in RESERVED_METRICS or "." in metric:
            text = f"{losses[0]} would be reported as {metric}, a name that other numbers have: give it another metric"
            yield Violation((FIELD,), text)
        elif len(losses) > 1:
            text = f"{' and '.join(losses)} are both reported as {metric}: use one, or give one another metric"
            yield Violation((FIELD,), text)
