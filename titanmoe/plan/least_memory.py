"""Lower bounds of a rank's memory, by which the search leaves out mappings before it prices them.

Called by titanmoe.plan.candidates. A bound is the state of the weights, divided among all ranks, and what blocks save
of the microbatches in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from operator import add
from typing import NamedTuple

from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import SCHEDULES
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.plan.saved_bytes import Widths, saved_bytes
from titanmoe.plan.totals_by_mode import RECOMPUTE_MODES


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
        self.state = (4 * stored * trained + computed * frozen) / world
        self._attention: dict[tuple, list[float]] = {}
        self._ffn: dict[tuple, list[float]] = {}

    def variants(self, fold: Fold, samples: int, schedules: list[TriedSchedule]) -> Iterator[Variant]:
        """Yield each mode of recomputation with each schedule; "none" alone with schedules that split backward.

        Args:
            samples: samples of a microbatch.
        """
        weights = (self.count.total - self.count.experts) / fold.tp + self.count.experts / (fold.ep * fold.etp)
        gradients = 4 * weights / fold.pp if fold.pp > 1 and self.tuning.trains_all else 0.0
        for mode, saved in enumerate(self._saved_of_block(fold, samples)):
            blocks = saved * self.config.model.num_layers / fold.pp
            for schedule in schedules:
                if mode and SCHEDULES[schedule.name].zero_bubble:
                    continue  # what recomputation keeps between both halves of backward is not in the memory
                held = [blocks * in_flight + gradients * begun for in_flight, begun in schedule.loads]
                yield Variant(self.state + max(held), mode, schedule)

    def _saved_of_block(self, fold: Fold, samples: int) -> list[float]:
        """Return the bytes that a block saves of a microbatch, one number for each of RECOMPUTE_MODES, in order.

        Attention's are the mean of all blocks, those of the feed-forward network or experts the last block's.
        """
        model, training = self.config.model, replace(self.config.training, local_batch_size=samples)
        shared = fold.tp if model.shared_hidden else 1  # tp matters to experts only through the shared one
        attention_key = fold.tp, fold.cp, samples
        ffn_key = fold.tp * fold.cp, samples, shared, fold.ep * fold.etp > 1, fold.etp
        if attention_key not in self._attention:
            widths = Widths(replace(self.config, training=training), fold)
            self._attention[attention_key] = [
                sum(n * saved_bytes(widths, i, mode).attention for i, n in self.mixer_counts.items()) / model.num_layers
                for mode in RECOMPUTE_MODES
            ]
        if ffn_key not in self._ffn:
            widths = Widths(replace(self.config, training=training), fold)
            self._ffn[ffn_key] = [saved_bytes(widths, model.num_layers - 1, mode).ffn for mode in RECOMPUTE_MODES]
        return list(map(add, self._attention[attention_key], self._ffn[ffn_key]))
