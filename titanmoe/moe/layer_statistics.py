"""The statistics of MoE layers: their experts' loads, the balance losses' terms, and STATISTICS.

A layer writes the counts of a microbatch in that microbatch's row, so that a recomputed forward writes the same. Once a
step `sum_statistics` sums them over microbatches and ranks in one message, for expert_bias and metrics. A new statistic
is an entry in STATISTICS; RESERVED_METRICS of titanmoe.moe.balance_losses.balance_spec lists its metric and counts too,
so that no balance loss takes their names.

Shapes: M microbatches of a step, B samples of one, L MoE layers of the model, X counted numbers, T owned tokens, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance_losses.balance_loss import RouterOutput
from titanmoe.moe.balance_losses.balance_spec import active_losses
from titanmoe.ops.kernels import fused


@dataclass
class LayerStatistics:
    """The counts of one MoE layer over one step: tensors, or Python numbers once they are on the host."""

    load: Tensor | list[float]
    """The number of times each expert was chosen, before dropping: (E,)."""
    losses: dict[str, Tensor | float]
    """The balance losses that are on, times their coefficients, by their names in metrics."""
    counts: dict[str, Tensor | float]
    """The counts that the entries of STATISTICS declare, by name."""

    def metrics(self) -> dict[str, float | list[float]]:
        """Compute the layer's metrics by name, such as "imbalance", a float, and "load", a list of E numbers.

        "imbalance" is the largest load over the mean, 1.0 if no expert was chosen. The counts must be Python numbers.
        """
        mean = sum(self.load) / len(self.load)
        values = {**self.losses, "tokens_min": min(self.load), "tokens_mean": mean, "tokens_max": max(self.load)}
        values["imbalance"] = max(self.load) / mean if mean else 1.0
        for statistic in STATISTICS:
            values[statistic.metric] = statistic.report(self)
        return values | {"load": self.load}


class Statistic(NamedTuple):
    """A metric of MoE layers that is neither a load nor a balance loss: what is counted, and what is reported of it.

    Counts are summed over microbatches and ranks: a mean is two of them, and a maximum cannot be one.
    """

    metric: str
    report: Callable[[LayerStatistics], float]
    """Function that returns a layer's metric from the counts of the step. The step's metric is the mean over layers."""
    counts: tuple[str, ...]
    """The names of the numbers that are counted for it, keys of LayerStatistics.counts."""
    measure: Callable[[RouterOutput], Tensor] | None = None
    """Counts these numbers in this rank's tokens of a microbatch, in one tensor, one for each of `counts`, from what
    balance losses get too (titanmoe.moe.balance_losses.balance_loss). None if the layer records them, as `MoE.route`
    does."""


def entropy_and_count(scores_TE: Tensor, valid_T: Tensor, normalise: bool, kernels: str = "auto") -> Tensor:
    """Return the sum of the tokens' score entropies (nats) and the number of tokens, without padding: (2,) in float64.

    `valid_T` is 0 for padding; `normalise` says that each token's scores have to be scaled to sum to 1.
    """
    if fused(kernels, scores_TE) and not torch.compiler.is_compiling():
        from titanmoe.ops.kernels.router_entropy import entropy_and_count as sums

        return sums(scores_TE, valid_T, normalise).sum(0)
    valid_T = valid_T.to(scores_TE.dtype)
    fractions_TE = scores_TE / scores_TE.sum(-1, keepdim=True) if normalise else scores_TE
    entropy = torch.special.entr(fractions_TE).sum(-1) @ valid_T
    return torch.stack((entropy, valid_T.sum())).to(torch.float64)


def _measure_entropy(routed: RouterOutput) -> Tensor:
    return entropy_and_count(routed.scores_TE, routed.tokens.valid_T, routed.normalises, routed.kernels)


STATISTICS = [
    Statistic(
        "router_entropy",
        lambda layer: layer.counts["entropy"] / max(layer.counts["tokens"], 1.0),
        ("entropy", "tokens"),
        _measure_entropy,
    ),
    Statistic("dropped_fraction", lambda layer: layer.counts["dropped"] / max(sum(layer.load), 1.0), ("dropped",)),
]


@dataclass(frozen=True)
class RowLayout:
    """The columns of one MoE layer's counts: loads by expert, then balance losses, then counts of STATISTICS."""

    num_experts: int
    losses: tuple[str, ...]
    counts: tuple[str, ...]

    @staticmethod
    def of(num_experts: int, options: MoEOptions) -> RowLayout:
        """Return the layout for a layer with this many experts and the balance losses that [moe] switches on."""
        losses = tuple(term.metric for term in active_losses(options))
        return RowLayout(num_experts, losses, tuple(name for statistic in STATISTICS for name in statistic.counts))

    @property
    def width(self) -> int:
        """The number of columns of a layer's counts."""
        return self.num_experts + len(self.losses) + len(self.counts)

    def read(self, row: Tensor | list[float]) -> LayerStatistics:
        """Return the counts in a row (X,) with these columns by name, as tensors or numbers as the row has them."""
        values = dict(zip((*self.losses, *self.counts), row[self.num_experts :], strict=True))
        losses, counts = ({name: values[name] for name in names} for names in (self.losses, self.counts))
        return LayerStatistics(row[: self.num_experts], losses, counts)


class StepCounts(nn.Module):
    """The counts of one MoE layer on this rank in a step.

    A row for each microbatch of the current pass (a forward and backward over some microbatches), with the columns of a
    `RowLayout`, and the sum of the rows of earlier passes in the same step.
    """

    def __init__(self, layout: RowLayout, microbatches: int):
        super().__init__()
        self.layout = layout
        counts_MX = torch.zeros(microbatches, layout.width, dtype=torch.float64)
        self.register_buffer("counts_MX", counts_MX, persistent=False)
        self.register_buffer("earlier_X", torch.zeros_like(counts_MX[0]), persistent=False)

    def begin_step(self) -> None:
        """Set the counts of the step before to 0."""
        self.counts_MX.zero_()
        self.earlier_X.zero_()

    def begin_pass(self) -> None:
        """Prepare for another forward and backward within the same step, whose microbatches are numbered from 0 again.

        Moves the counts of the microbatches so far into the sum of earlier passes.
        """
        self.earlier_X += self.counts_MX.sum(0)
        self.counts_MX.zero_()

    def total(self) -> Tensor:
        """Return this rank's counts summed over all microbatches of the step so far: a row (X,)."""
        return self.earlier_X + self.counts_MX.sum(0)

    def record_load(self, microbatch: Tensor, count_BE: Tensor) -> None:
        """Write how often this rank's tokens chose each expert in a microbatch, over what was written for it before.

        Args:
            microbatch: the index of the microbatch in the pass, a scalar.
            count_BE: how often each sample's tokens chose each expert; their sum over samples is written.
        """
        count_1E = count_BE.sum(0, keepdim=True, dtype=torch.float64)
        self.counts_MX[:, : self.layout.num_experts].index_copy_(0, microbatch.view(1), count_1E)

    def record(self, microbatch: Tensor, names: tuple[str, ...], values: Tensor) -> None:
        """Write numbers of a microbatch, over what was written for it before.

        Args:
            microbatch: the index of the microbatch in the pass, a scalar.
            names: the names of adjacent columns, in their order: a balance loss, or all counts of a statistic.
            values: one value for each name.
        """
        first = self.layout.num_experts + (*self.layout.losses, *self.layout.counts).index(names[0])
        columns, row_1X = slice(first, first + len(names)), values.view(1, -1).to(torch.float64)
        self.counts_MX[:, columns].index_copy_(0, microbatch.view(1), row_1X)

    def record_routed(self, routed: RouterOutput) -> None:
        """Write how often a microbatch's tokens chose each expert, and the counts that STATISTICS measure.

        Overwrites what was written for the microbatch before. Balance losses and statistics without `measure` are not
        among them. No communication.
        """
        microbatch = routed.tokens.microbatch
        self.record_load(microbatch, routed.count_BE)
        for statistic in STATISTICS:
            if statistic.measure is not None:
                self.record(microbatch, statistic.counts, statistic.measure(routed))


@torch.no_grad()
def sum_statistics(
    counts: Mapping[int, StepCounts], blocks: Sequence[int], layout: RowLayout, world: Group, device: torch.device
) -> Tensor:
    """Sum the counts of a step over microbatches and all ranks, in one all-reduce. Collective over the world.

    Without `blocks` nothing is sent.

    Args:
        counts: the counts of this rank's MoE layers, by block number.
        blocks: the block numbers of all MoE layers of the model, on all ranks.

    Returns:
        A table (L, X) on `device`: a row for each of `blocks`, with the columns of `layout`.
    """
    table_LX = torch.zeros(len(blocks), layout.width, dtype=torch.float64, device=device)
    for row, number in enumerate(blocks):
        if number in counts:
            table_LX[row] = counts[number].total()
    return all_reduce(table_LX, world) if blocks else table_LX


def step_metrics(layers: Mapping[int, LayerStatistics]) -> dict[str, float | list[float]]:
    """Return the metrics of a step's MoE layers by name: first of all layers together, then "layers.N.NAME" of each.

    Over all layers, balance losses are sums, "imbalance" is the largest, and metrics of STATISTICS are means; loads and
    counts of tokens are of each layer only. {} without MoE layers.

    Args:
        layers: the counts of each MoE layer by block number, as Python numbers.
    """
    if not layers:
        return {}
    of_layers = {number: layer.metrics() for number, layer in layers.items()}
    first, rows = next(iter(layers.values())), of_layers.values()
    values: dict[str, float | list[float]] = {name: sum(row[name] for row in rows) for name in first.losses}
    values["imbalance"] = max(row["imbalance"] for row in rows)
    for statistic in STATISTICS:
        values[statistic.metric] = sum(row[statistic.metric] for row in rows) / len(rows)
    for number, row in of_layers.items():
        values |= {f"layers.{number}.{name}": value for name, value in row.items()}
    return values
