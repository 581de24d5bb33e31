"""What is known of each objective without torch, and the table of their names.

A new objective is a file, with its rules in it, and a line in OBJECTIVES.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from titanmoe.config.parts import Kind, Rules
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config


class ObjectiveRules(Rules):
    """What holds for an objective; these are the usual answers. Its loss is reported as `loss`; validation reports
    cross-entropy with any."""

    further_tokens = False
    """Whether the cross-entropy of multi-token prediction may get the gradients of that of the same positions."""

    entropy = False
    """Whether it reads the entropy at each label, too."""

    def kept(self, config: Config) -> tuple[int, float]:
        """Of how many ids at each position it reads the log p, besides the label's, and with which temperature."""
        return 0, 1.0

    def loss_of_a_guess(self, config: Config) -> float:
        """Of a model that gives every token the same probability; a loss that stays above is reported. Infinite if it
        is not known."""
        return math.inf

    def contradictions(self, config: Config) -> Iterator[Violation]:
        if config.model.mtp_depth and not self.further_tokens:
            yield Violation(
                ("training.objective", "model.mtp_depth"),
                f'training.objective = "{config.training.objective}" says nothing of the token after next, which '
                f"model.mtp_depth = {config.model.mtp_depth} predicts: use mtp_depth = 0, or objective = "
                '"cross_entropy"',
            )
        for name in ("teacher", "scores"):
            if getattr(config.distillation, name) and not self.kept(config)[0]:
                yield Violation(
                    ("training.objective", f"distillation.{name}"),
                    f'training.objective = "{config.training.objective}" reads nothing of distillation.{name}, which '
                    f'is set: use objective = "distillation", or {name} = ""',
                )


class WeightedCrossEntropyRules(ObjectiveRules):
    help = "weighted_cross_entropy weights each label as data.label_weights says."
    implementation = "titanmoe.train.objectives.weighted_cross_entropy:WeightedCrossEntropy"

    def loss_of_a_guess(self, config: Config) -> float:
        return math.log(config.model.vocab_size)

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        if not config.data.label_weights:
            yield Violation(
                ("training.objective", "data.label_weights"),
                'training.objective = "weighted_cross_entropy" reads the weights of labels: set data.label_weights = '
                "true",
            )


class DistillationRules(ObjectiveRules):
    help = "distillation learns from a teacher's distributions as [distillation] says."
    implementation = "titanmoe.train.objectives.distillation:Distilled"

    def kept(self, config: Config) -> tuple[int, float]:
        return config.distillation.top, config.distillation.temperature

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        options, vocabulary = config.distillation, config.model.vocab_size
        if options.top > vocabulary:
            yield Violation(
                ("distillation.top", "model.vocab_size"),
                f"distillation.top = {options.top} keeps more ids than model.vocab_size = {vocabulary}: use at most "
                f"{vocabulary}, which keeps all",
            )
        if bool(options.teacher) == bool(options.scores):
            how = "two teachers" if options.teacher else "no teacher"
            yield Violation(
                ("training.objective", "distillation.teacher", "distillation.scores"),
                f'training.objective = "distillation" has {how}: name its folder in distillation.teacher, or what it '
                "said of the data in distillation.scores",
            )
        if options.scores and config.data.source != "files":
            yield Violation(
                ("distillation.scores", "data.source"),
                f'distillation.scores lie beside token shards, and data.source = "{config.data.source}" has none: set '
                'source = "files"',
            )


class CrossEntropyRules(ObjectiveRules):
    help = "cross_entropy is the mean over all labels."
    implementation = "titanmoe.train.objectives.cross_entropy:CrossEntropy"
    further_tokens = True

    def loss_of_a_guess(self, config: Config) -> float:
        return math.log(config.model.vocab_size)


OBJECTIVES = Kind(
    "training.objective",
    {
        "cross_entropy": CrossEntropyRules(),
        "distillation": DistillationRules(),
        "weighted_cross_entropy": WeightedCrossEntropyRules(),
    },
    ObjectiveRules,
    members=("sum", "count"),
)
