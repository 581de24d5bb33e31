"""What is known of each optimizer without torch, and the table of their names.

A new optimizer is a file, with its rules in it, and a line in OPTIMIZERS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from math import prod

from titanmoe.config.fields import toml_value
from titanmoe.config.laws import WIDTHS
from titanmoe.config.parts import Kind, Rules
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.models.count import trained_parameters
from titanmoe.models.matrices import declared
from titanmoe.models.tensors import Tuning, matches, shapes
from titanmoe.train.optimizers import groups, qk_clip_rules

SHARED = ("name", "lr", "max_grad_norm", "skip_spikes", "skip_window", "skip_limit")
SHARED += ("qk_clip", "qk_clip_every", "qk_clip_measure")
"""Fields of [optimizer] that a step reads whatever the optimizer is."""


class OptimizerRules(Rules):
    """What holds for an optimizer; these are the usual answers."""

    reads: tuple[str, ...] = ()
    """Fields of [optimizer] that it reads itself. Another that a recipe sets is refused: it would do nothing."""
    numbers_per_weight = 1
    """How many numbers it keeps for each weight."""
    bytes_per_tensor = 0
    """What it keeps on the device for each tensor besides, such as a count of its updates."""
    numbers_per_matrix_weight = 0
    """How many numbers, and no more, it keeps for each weight of `matrices`."""

    def matrices(self, config: Config) -> tuple[str, ...]:
        """Patterns of the names of weights that it treats otherwise."""
        return ()

    def state_numbers(self, config: Config) -> int:
        """How many numbers it keeps for the whole model."""
        tuning, patterns = Tuning.of(config), self.matrices(config)
        of_matrices = sum(
            prod(shape)
            for name, shape in shapes(config.model, tuning)
            if matches(name, patterns) and not tuning.freezes(name)
        )
        others = trained_parameters(config.model, tuning) - of_matrices
        return self.numbers_per_weight * others + self.numbers_per_matrix_weight * of_matrices

    def moment_width(self, config: Config) -> int:
        """Bytes of each of these numbers."""
        return WIDTHS[config.training.dtype]

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from qk_clip_rules.contradictions(config)
        name, usual = config.optimizer.name, asdict(Options())
        for field, value in asdict(config.optimizer).items():
            if field not in (*SHARED, *self.reads) and value != usual[field]:
                yield Violation(
                    (f"optimizer.{field}", "optimizer.name"),
                    f"optimizer.{field} = {toml_value(value)} does nothing with optimizer.name = {toml_value(name)}, "
                    f"which reads {', '.join(self.reads) or 'no field of its own'}: leave it out, or set it to "
                    f"{toml_value(usual[field])}",
                )


class AdamWRules(OptimizerRules):
    help = "adamw is AdamW, with decoupled weight decay."
    implementation = "titanmoe.train.optimizers.adamw:AdamW"
    of_state = ("offload", "moments_dtype", "stochastic_rounding")
    reads = ("beta1", "beta2", "eps", "weight_decay", "decay_all", "groups", "implementation", *of_state)
    numbers_per_weight = 2
    bytes_per_tensor = 4

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        yield from groups.contradictions(config)
        options, dtype = config.optimizer, config.training.dtype
        if options.stochastic_rounding and "bfloat16" not in (options.moments_dtype, dtype):
            yield Violation(
                ("optimizer.stochastic_rounding", "training.dtype", "optimizer.moments_dtype"),
                f'optimizer.stochastic_rounding = true rounds to bfloat16, and training.dtype = "{dtype}" and '
                f'optimizer.moments_dtype = "{options.moments_dtype}" keep nothing in it: set one of them to '
                '"bfloat16", or leave it out',
            )
        if options.moments_dtype == "bfloat16" and dtype == "float64":
            yield Violation(
                ("optimizer.moments_dtype", "training.dtype"),
                'optimizer.moments_dtype = "bfloat16" goes with weights in float32 or bfloat16, and training.dtype = '
                '"float64": leave one out',
            )

    def moment_width(self, config: Config) -> int:
        return 2 if config.optimizer.moments_dtype == "bfloat16" else super().moment_width(config)


class MuonRules(AdamWRules):
    help = "muon makes all singular values of a matrix's update alike, and leaves embeddings and vectors to adamw."
    implementation = "titanmoe.train.optimizers.muon:Muon"
    of_matrices = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "ns_eps", "adjust_lr", "by_head")
    reads = (*AdamWRules.reads, *of_matrices, "router_matrix", "adamw_lr")
    numbers_per_matrix_weight = 1

    def matrices(self, config: Config) -> tuple[str, ...]:
        names = declared(config.model, config.optimizer.router_matrix)
        return tuple({re.sub(r"^layers\.\d+", "layers.*", name): None for name in names})

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        if config.lora.rank:
            yield Violation(
                ("optimizer.name", "lora.rank"),
                f'optimizer.name = "muon" trains whole matrices, and with lora.rank = {config.lora.rank} only adapters '
                'are trained, which adamw would do: use name = "adamw"',
            )
        for name, (shape, rows) in declared(config.model, config.optimizer.router_matrix).items():
            if rows.parts and shape[-2] % sum(rows.parts):
                yield Violation(
                    ("optimizer.name", "model.family"),
                    f"{name} has {shape[-2]} rows, and matrices of {' + '.join(map(str, rows.parts))} rows for each "
                    f'head do not divide them: correct `rows` in the rules of model.family = "{config.model.family}" '
                    "(docs/extending.md)",
                )
                return


OPTIMIZERS = Kind(
    "optimizer.name",
    {
        "adamw": AdamWRules(),
        "muon": MuonRules(),
    },
    OptimizerRules,
    ("step", "moments", "resume", "on_device", "on_host"),
)
