"""Specs of the training objectives, which need no torch, and the table of their names (training.objective).

A new objective is a file with an `Objective` and its spec, and a line in OBJECTIVES.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from titanmoe.config.component_kinds import ComponentKind, Spec
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import DPO, Config
from titanmoe.data.formats import completions_in


class ObjectiveSpec(Spec):
    """Properties of an objective, with defaults. Validation measures cross-entropy, unless the objective has pairs."""

    allows_mtp = False
    """Whether multi-token prediction (model.mtp_depth) may be trained with this objective."""

    reads_entropy = False
    """Whether the objective reads the entropy of the distribution at each label."""

    reads_reference = False
    """Whether the objective reads the reference model's log-probability of each label (titanmoe.train.reference)."""

    completions_per_prompt = 1
    """Number of completions per sample: 2 for preference pairs, which are then validated by this objective too."""

    def teacher_top_k(self, config: Config) -> tuple[int, float]:
        """Return how many of a teacher's top-k ids this objective reads at each position, and the softmax temperature.

        (0, 1.0) for an objective without a teacher.
        """
        return 0, 1.0

    def uniform_guess_loss(self, config: Config) -> float:
        """Return the loss of a model that gives every token the same probability, in nats.

        The divergence alarm compares the run's loss with it, unless it is infinite (the default: unknown).
        """
        return math.inf

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from self._other_data(config)
        if config.model.mtp_depth and not self.allows_mtp:
            yield Violation(
                ("training.objective", "model.mtp_depth"),
                f'training.objective = "{config.training.objective}" cannot train multi-token prediction, '
                f"and model.mtp_depth = {config.model.mtp_depth}: use mtp_depth = 0, or objective = "
                '"cross_entropy"',
            )
        for name in ("teacher", "scores"):
            if getattr(config.distillation, name) and not self.teacher_top_k(config)[0]:
                yield Violation(
                    ("training.objective", f"distillation.{name}"),
                    f'training.objective = "{config.training.objective}" does not read distillation.{name}, which '
                    f'is set: use objective = "distillation", or {name} = ""',
                )
        if config.parallelism.vocab == "pipeline" and self.teacher_top_k(config)[0]:
            yield Violation(
                ("training.objective", "parallelism.vocab"),
                f'training.objective = "{config.training.objective}" reads the log-probabilities of other ids than '
                'the label, which parallelism.vocab = "pipeline" does not compute: use vocab = "tensor"',
            )
        if config.dpo != DPO() and not self.reads_reference:
            yield Violation(
                ("training.objective", "dpo.beta"),
                f'training.objective = "{config.training.objective}" does not read dpo.beta = {config.dpo.beta}: '
                'use objective = "dpo", or leave beta out',
            )

    def _other_data(self, config: Config) -> Iterator[Violation]:
        """Yield a violation for each data set that has preference pairs and must not, or has none and must."""
        objective, data = config.training.objective, config.data
        sources = [*data.paths, *config.validation.paths] if data.source == "files" else [data.source]
        for path in sources:
            has_pairs = data.source == "files" and completions_in(path, config) > 1
            if has_pairs and self.completions_per_prompt == 1:
                yield Violation(
                    ("training.objective", "data.paths"),
                    f"{path!r} has pairs of a chosen and a rejected completion, and training.objective = "
                    f'"{objective}" would train on both in the same way: set objective = "dpo", or name other data',
                )
            elif not has_pairs and self.completions_per_prompt > 1:
                yield Violation(
                    ("training.objective", "data.paths", "data.format"),
                    f'training.objective = "{objective}" learns from pairs of a chosen and a rejected completion, and '
                    f'{path!r} has none: set data.format = "preference" for JSONL or Parquet, or make shards with '
                    "titanmoe tokenize --format preference",
                )


class DPOSpec(ObjectiveSpec):
    help = "dpo is direct preference optimization on preference pairs, with dpo.beta."
    implementation = "titanmoe.train.objectives.dpo:DPO"
    reads_reference = True
    completions_per_prompt = 2

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        if config.data.packing != "best_fit":
            yield Violation(
                ("training.objective", "data.packing"),
                f'training.objective = "dpo" needs both completions of a pair in one sequence, and data.packing = '
                f'"{config.data.packing}" cuts documents anywhere: use "best_fit"',
            )


class WeightedCrossEntropySpec(ObjectiveSpec):
    help = "weighted_cross_entropy weights each label as data.label_weights says."
    implementation = "titanmoe.train.objectives.cross_entropy:WeightedCrossEntropy"

    def uniform_guess_loss(self, config: Config) -> float:
        return math.log(config.model.vocab_size)

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        if not config.data.label_weights:
            yield Violation(
                ("training.objective", "data.label_weights"),
                'training.objective = "weighted_cross_entropy" reads the weights of labels: set data.label_weights = '
                "true",
            )


class DistillationSpec(ObjectiveSpec):
    help = "distillation learns from a teacher's distributions as [distillation] says."
    implementation = "titanmoe.train.objectives.distillation:DistillationObjective"

    def teacher_top_k(self, config: Config) -> tuple[int, float]:
        return config.distillation.top, config.distillation.temperature

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        options, vocabulary = config.distillation, config.model.vocab_size
        if options.top > vocabulary:
            yield Violation(
                ("distillation.top", "model.vocab_size"),
                f"distillation.top = {options.top} is more than model.vocab_size = {vocabulary}: use at most "
                f"{vocabulary}, which stores all ids",
            )
        if bool(options.teacher) == bool(options.scores):
            how = "two teachers" if options.teacher else "no teacher"
            yield Violation(
                ("training.objective", "distillation.teacher", "distillation.scores"),
                f'training.objective = "distillation" has {how}: name its folder in distillation.teacher, or '
                "its stored scores in distillation.scores",
            )
        if options.scores and config.data.source != "files":
            yield Violation(
                ("distillation.scores", "data.source"),
                f'distillation.scores are stored beside token shards, and data.source = "{config.data.source}" has '
                'none: set source = "files"',
            )


class CrossEntropySpec(ObjectiveSpec):
    help = "cross_entropy is the mean over all labels."
    implementation = "titanmoe.train.objectives.cross_entropy:CrossEntropy"
    allows_mtp = True

    def uniform_guess_loss(self, config: Config) -> float:
        return math.log(config.model.vocab_size)


OBJECTIVES = ComponentKind(
    "training.objective",
    {
        "cross_entropy": CrossEntropySpec(),
        "distillation": DistillationSpec(),
        "dpo": DPOSpec(),
        "weighted_cross_entropy": WeightedCrossEntropySpec(),
    },
    ObjectiveSpec,
    members=("sum", "count"),
)
