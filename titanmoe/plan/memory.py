"""Peak memory of each pipeline rank by component, in closed form.

The planner and the check before a start ask for it. titanmoe.plan.peak_moments has the formulas of a step's moments, of
which the largest is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import stage_ranks
from titanmoe.models.stages import split_layers
from titanmoe.plan.peak_moments import PeakMoments
from titanmoe.plan.saved_bytes import Widths
from titanmoe.plan.sizes import ModelKey, StageLayers
from titanmoe.train.find_teacher import find_teacher, teacher_config


@dataclass(frozen=True)
class RankMemory:
    """Memory of a pipeline rank's first data rank, which has the most."""

    weights: int
    """Bytes of this rank's shards of the weights."""
    gradients: int
    """Bytes of this rank's shards of the gradients after the step's backward."""
    moments: int
    """Bytes of this rank's optimizer state."""
    components: dict[str, int]
    """Bytes at the peak, by component."""
    peak_during: str
    """Description of the moment of the peak, such as "backward of the last block's experts"."""

    @property
    def peak(self) -> int:
        return sum(self.components.values())


def rank_memories(
    config: Config, fold: Fold, imbalance: float = 1.0, only_ends: bool = False, reference: bool = False
) -> list[RankMemory]:
    """Return the memory of each pipeline rank, in ascending order of ranks.

    Args:
        config: recipe; the folder of its teacher is read.
        fold: degrees of `config`.
        imbalance: routed tokens of the busiest rank over the mean.
        only_ends: only the first rank, which has most microbatches in flight, and the last, which has the head; without
            a pipeline both are one.
        reference: whether a frozen copy of the model lies beside it. It computes between steps, in less than a step's
            memory, so its weights alone count.

    Raises:
        ConfigError: the teacher cannot be read.
    """
    s = Widths(config, fold, imbalance)
    owners = stage_ranks(config.pipeline, fold.pp)
    shared = config.parallelism.vocab == "pipeline"
    layers = stages_of(config, len(owners), tuple(config.pipeline.layers_per_stage), shared)
    ranks = sorted({0, fold.pp - 1}) if only_ends else range(fold.pp)
    teachers = _teacher_bytes(s, only_ends)
    copies = [0] * len(ranks)
    if reference:
        frozen = replace(config, training=replace(config.training, freeze=["*"]))
        copies = [memory.weights for memory in rank_memories(frozen, fold, only_ends=only_ends)]
    memories = []
    for rank, copy, teacher in zip(ranks, copies, teachers or [0] * len(ranks), strict=True):
        stages = [
            StageLayers(layers[i], i == 0, i == len(owners) - 1) for i, owner in enumerate(owners) if owner == rank
        ]
        moments = PeakMoments(s, rank, stages, teacher, copy)
        peak = max(moments.all(), key=lambda moment: sum(moment.components.values()))
        components = {name: size for name, size in peak.components.items() if size}
        memories.append(RankMemory(moments.weights, moments.trained, moments.optimizer_state, components, peak.name))
    return memories


def _teacher_bytes(s: Widths, only_ends: bool) -> list[int]:
    """Return for each pipeline rank, or its `only_ends`, the bytes of a teacher's weights and outputs; [] if none."""
    options = s.config.distillation
    if not options.teacher:
        return []
    teacher = teacher_config(s.config, find_teacher(options.teacher))
    outputs = s.microbatches * s.X * (options.top * 8 + (options.top + 1) * s.W)
    return [memory.weights + outputs for memory in rank_memories(teacher, s.fold, only_ends=only_ends)]


@lru_cache(maxsize=1024)
def _stages(key: ModelKey, seq_len: int, stages: int, explicit: tuple[int, ...], shared: bool) -> list[range]:
    return split_layers(key.model, seq_len, stages, list(explicit), shared)


def stages_of(config: Config, stages: int, explicit: tuple[int, ...], shared: bool) -> list[range]:
    """Return the range of layers of each stage, balanced by work unless `explicit` gives their numbers.

    Args:
        config: recipe, for model and seq_len; its [pipeline] is not used.
        explicit: layers of each stage, as pipeline.layers_per_stage gives them; () to balance.
        shared: whether all stages share the vocabulary.
    """
    return _stages(ModelKey.of(config.model), config.training.seq_len, stages, explicit, shared)
