"""Lower bounds of a rank's memory, by which the search leaves out mappings before it prices them.

Called by titanmoe.plan.candidates. A bound is the state of the weights, divided among all ranks, and what blocks save
of the microbatches in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from titanmoe.config.blocks import has_experts, moe_layers
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import SCHEDULES
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.plan.saved_bytes import Widths, saved_bytes
from titanmoe.plan.totals_by_mode import RECOMPUTE_MODES
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS


class TriedSchedule(NamedTuple):
    """Pipeline schedule of a number of microbatches."""

    name: str
    stages: int
    """Stages per rank."""
    idle: float
    """Idle time over the busy time of one microbatch."""
    loads: list[tuple[float, float]]
    """Loads of the backward passes of the first rank that may be its peak, with equal stages: microbatches in flight in
    all stages of the rank over its stages, and the fraction of its stages that have gradients already."""


class Variant(NamedTuple):
    """Recomputation and schedule of a mapping."""

    least_bytes: float
    """Lower bound of the bytes that a rank needs."""
    mode: int
    """Index in RECOMPUTE_MODES of the mode of recomputation."""
    schedule: TriedSchedule


class LeastMemory:
    """Lower bounds of the memory of a recipe's mappings."""

    def __init__(self, config: Config, world: int, first_alike: list[int]):
        """Count the recipe's weights, and the bytes of their state divided among all ranks.

        Args:
            first_alike: for each block the index of the first one with an equal mixer.
        """
        self.config, self.tuning, self.count = config, Tuning.of(config), parameters(config.model)
        self.mixer_counts = Counter(first_alike[: config.model.num_layers])
        training, trained = config.training, trained_parameters(config.model, self.tuning)
        frozen = self.count.total - (0 if self.tuning.rank else trained)  # adapters are beside the weights
        stored, computed = WIDTHS[training.dtype], WIDTHS[training.mixed_precision_param]
        optimizer = OPTIMIZERS.look_up(config.optimizer.name)
        moments = optimizer.state_numbers(config) * optimizer.moment_width(config)
        self.state, self.gradients = (stored * trained + moments + computed * frozen) / world, stored * trained / world
        self.dense_blocks = [i for i in range(config.model.num_layers) if not has_experts(config.model, i)]
        self._attention: dict[tuple, list[float]] = {}
        self._ffn: dict[tuple, list[tuple[float, float]]] = {}

    def variants(
        self, fold: Fold, samples: int, microbatches: int, schedules: list[TriedSchedule]
    ) -> Iterator[Variant]:
        """Yield each mode of recomputation with each schedule; "none" alone with schedules that split backward.

        Args:
            samples: samples of a microbatch.
            microbatches: microbatches of a step, as many as the schedules have.
        """
        with_experts = self._blocks(fold) - self._dense_blocks(fold)
        weights = (self.count.total - self.count.experts) / (fold.tp * fold.pp)
        weights += self.count.experts / (fold.ep * fold.etp) * with_experts / max(1, moe_layers(self.config.model))
        gradients = 4 * weights if fold.pp > 1 and self.tuning.trains_all else 0.0
        for mode, blocks in enumerate(self._saved_of_blocks(fold, samples)):
            for schedule in schedules:
                if mode and SCHEDULES[schedule.name].zero_bubble:
                    continue  # what recomputation keeps between both halves of backward is not in the memory
                held = max(blocks * in_flight + gradients * begun for in_flight, begun in schedule.loads)
                # Beside them are sharded gradients from the second microbatch on; in a pipeline at the step's end.
                beside = fold.pp == 1 and microbatches > 1
                held = held + self.gradients if beside else max(held, self.gradients)
                yield Variant(self.state + held, mode, schedule)

    def _blocks(self, fold: Fold) -> int:
        """Return the number of blocks that every rank of the pipeline has at least."""
        return self.config.model.num_layers // fold.pp

    def _dense_blocks(self, fold: Fold) -> int:
        """Return the most blocks without experts that the first rank can have among its `_blocks`."""
        return sum(block < self._blocks(fold) for block in self.dense_blocks)

    def _saved_of_blocks(self, fold: Fold, samples: int) -> list[float]:
        """Return the bytes that a rank's blocks save at least of a microbatch, one number for each of RECOMPUTE_MODES.

        The rank is the first, with all the dense networks that it can have. With overlap in halves, half a block less
        is saved.
        """
        model, training = self.config.model, replace(self.config.training, local_batch_size=samples)
        shared = fold.tp if model.shared_hidden else 1  # tp matters to experts only through the shared one
        attention_key = fold.tp, fold.cp, samples
        ffn_key = fold.tp * fold.cp, samples, shared, fold.ep * fold.etp > 1, fold.etp
        widths = Widths(replace(self.config, training=training), fold)
        if attention_key not in self._attention:
            self._attention[attention_key] = [
                sum(n * saved_bytes(widths, i, mode).attention for i, n in self.mixer_counts.items()) / model.num_layers
                for mode in RECOMPUTE_MODES
            ]
        if ffn_key not in self._ffn:
            one_dense, last = next(iter(self.dense_blocks), model.num_layers - 1), model.num_layers - 1
            self._ffn[ffn_key] = [
                (saved_bytes(widths, one_dense, mode).ffn, saved_bytes(widths, last, mode).ffn)
                for mode in RECOMPUTE_MODES
            ]
        number, dense = self._blocks(fold), self._dense_blocks(fold)
        return [
            max(0.0, (number - 0.5) * (attention + last) - dense * max(0, last - one_dense))
            for attention, (one_dense, last) in zip(self._attention[attention_key], self._ffn[ffn_key], strict=True)
        ]
