"""The statistics of MoE layers: their experts' loads, the balance losses' terms, and STATISTICS.

A layer writes the counts of a microbatch in that microbatch's row, so that a recomputed forward writes the same values.
Once a step the counts of all layers are summed over microbatches and ranks, in one message (`sum_statistics`), for the
expert_bias updates and the metrics.

A new statistic is an entry in STATISTICS: how it is measured in a microbatch, and what is reported of its sum.

Shapes: M microbatches of a step, L MoE layers of the model, X counted numbers, T owned tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance_losses.balance_loss import RouterOutput
from titanmoe.moe.balance_losses.balance_spec import active_losses
from titanmoe.ops.kernels import fused


@dataclass
class LayerStatistics:
    """One layer's counts of one step: tensors, or numbers once they are on the host."""

    load: Any
    """The number of times each expert was chosen, before dropping: (E,)."""
    losses: dict[str, Any]
    """The terms of the balance losses that are on, times their coefficients, by metric."""
    counts: dict[str, Any]
    """The counts that STATISTICS names, by name."""

    def metrics(self) -> dict[str, Any]:
        """Return the layer's metrics by name. The counts must be numbers on the host."""
        mean = sum(self.load) / len(self.load)
        values = {**self.losses, "tokens_min": min(self.load), "tokens_mean": mean, "tokens_max": max(self.load)}
        values["imbalance"] = max(self.load) / mean if mean else 1.0
        for statistic in STATISTICS:
            values[statistic.metric] = statistic.report(self)
        return values | {"load": self.load}


class Statistic(NamedTuple):
    """A reported number of MoE layers besides loads and balance losses."""

    metric: str
    report: Callable[[LayerStatistics], float]
    """Returns a layer's metric. The step's metric is the mean over layers."""
    counts: tuple[str, ...]
    """The names of the numbers that it adds to LayerStatistics.counts."""
    measure: Callable[[RouterOutput], Tensor] | None = None
    """Returns these numbers for this rank's tokens of a microbatch, in one tensor. None: the layer records them."""


def entropy_and_count(scores_TE: Tensor, valid_T: Tensor, normalise: bool, kernels: str = "auto") -> Tensor:
    """Return the summed entropy of the scores of tokens that are not padding, and their number, as (2,) in float64.

    Args:
        normalise: whether each token's scores have to be scaled to sum to 1.
    """
    if fused(kernels, scores_TE) and not torch.compiler.is_compiling():
        from titanmoe.ops.kernels.router_entropy import entropy_and_count as sums

        return sums(scores_TE, valid_T, normalise).sum(0)
    valid_T = valid_T.to(scores_TE.dtype)
    shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True) if normalise else scores_TE
    entropy = torch.special.entr(shares_TE).sum(-1) @ valid_T
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
    """The columns of a layer's row of counts: the loads, the balance losses, and what STATISTICS counts."""

    num_experts: int
    losses: tuple[str, ...]
    counts: tuple[str, ...]

    @staticmethod
    def of(num_experts: int, options: MoEOptions) -> RowLayout:
        """Return the layout for the balance losses that are on."""
        losses = tuple(term.metric for term in active_losses(options))
        return RowLayout(num_experts, losses, tuple(name for statistic in STATISTICS for name in statistic.counts))

    @property
    def width(self) -> int:
        """The number of columns of a row."""
        return self.num_experts + len(self.losses) + len(self.counts)

    def columns(self, names: tuple[str, ...]) -> slice:
        """Return the columns of these numbers, which are adjacent in a row."""
        first = self.num_experts + (*self.losses, *self.counts).index(names[0])
        return slice(first, first + len(names))

    def read(self, row: Any) -> LayerStatistics:
        """Return the numbers of a row, a tensor or a list, by name."""
        values = dict(zip((*self.losses, *self.counts), row[self.num_experts :], strict=True))
        losses, counts = ({name: values[name] for name in names} for names in (self.losses, self.counts))
        return LayerStatistics(row[: self.num_experts], losses, counts)


class StepCounts(nn.Module):
    """One layer's counts on this rank in a step: a row for each microbatch of a pass, and the sum of earlier passes."""

    def __init__(self, layout: RowLayout, microbatches: int):
        super().__init__()
        self.layout = layout
        counts_MX = torch.zeros(microbatches, layout.width, dtype=torch.float64)
        self.register_buffer("counts_MX", counts_MX, persistent=False)
        self.register_buffer("earlier_X", torch.zeros_like(counts_MX[0]), persistent=False)

    def begin_step(self) -> None:
        """Set all counts to 0."""
        self.counts_MX.zero_()
        self.earlier_X.zero_()

    def begin_pass(self) -> None:
        """Add the rows to the sum of earlier passes, and set them to 0 for the microbatches of the next pass."""
        self.earlier_X += self.counts_MX.sum(0)
        self.counts_MX.zero_()

    def total(self) -> Tensor:
        """Return the sum over the microbatches of all passes of the step: (X,)."""
        return self.earlier_X + self.counts_MX.sum(0)

    def record_load(self, microbatch: Tensor, count_BE: Tensor) -> None:
        """Write how often each expert was chosen in a microbatch."""
        count_1E = count_BE.sum(0, keepdim=True, dtype=torch.float64)
        self.counts_MX[:, : self.layout.num_experts].index_copy_(0, microbatch.view(1), count_1E)

    def record(self, microbatch: Tensor, names: tuple[str, ...], values: Tensor) -> None:
        """Write numbers of a microbatch: a balance loss, or all that one of STATISTICS counts."""
        columns, row_1X = self.layout.columns(names), values.view(1, -1).to(torch.float64)
        self.counts_MX[:, columns].index_copy_(0, microbatch.view(1), row_1X)

    def record_routed(self, routed: RouterOutput) -> None:
        """Write the load of a microbatch, and what STATISTICS measure in it."""
        microbatch = routed.tokens.microbatch
        self.record_load(microbatch, routed.count_BE)
        for statistic in STATISTICS:
            if statistic.measure is not None:
                self.record(microbatch, statistic.counts, statistic.measure(routed))


@torch.no_grad()
def sum_statistics(
    counts: Mapping[int, StepCounts], blocks: Sequence[int], layout: RowLayout, world: Group, device: torch.device
) -> Tensor:
    """Sum the counts of a step over microbatches and all ranks: (L, X). One message; collective over the world.

    Args:
        counts: the counts of this rank's layers, by block.
        blocks: the blocks of all MoE layers of the model, in the order of the rows.
    """
    table_LX = torch.zeros(len(blocks), layout.width, dtype=torch.float64, device=device)
    for row, number in enumerate(blocks):
        if number in counts:
            table_LX[row] = counts[number].total()
    return all_reduce(table_LX, world) if blocks else table_LX


def step_metrics(layers: Mapping[int, LayerStatistics]) -> dict[str, Any]:
    """Return the metrics of a step's MoE layers, of all together, then of each. Their counts must be on the host."""
    if not layers:
        return {}
    of_layers = {number: layer.metrics() for number, layer in layers.items()}
    first, rows = next(iter(layers.values())), of_layers.values()
    values: dict[str, Any] = {name: sum(row[name] for row in rows) for name in first.losses}
    values["imbalance"] = max(row["imbalance"] for row in rows)
    for statistic in STATISTICS:
        values[statistic.metric] = sum(row[statistic.metric] for row in rows) / len(rows)
    for number, row in of_layers.items():
        values |= {f"layers.{number}.{name}": value for name, value in row.items()}
    return values
