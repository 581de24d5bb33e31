"""Specs of the optimizers, which need no torch, and the table of their names (optimizer.name).

A new optimizer is a file with an `Optimizer` and its spec, and a line in OPTIMIZERS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from math import prod
from typing import NamedTuple

from titanmoe.config.component_kinds import ComponentKind, Spec
from titanmoe.config.fields import toml_value
from titanmoe.config.laws import WIDTHS
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.models import tensors
from titanmoe.models.count import trained_parameters
from titanmoe.models.families import mixers
from titanmoe.models.matrices import matrix_parameters
from titanmoe.models.tensors import Tuning, matches, shapes, stored_name, unmatched, unmatched_patterns

GROUPS = "optimizer.groups"


class GroupRates(NamedTuple):
    """Peak learning rate and weight decay that a [[optimizer.groups]] table gives to its parameters."""

    lr: float | None = None
    """Peak learning rate; None if the group has that of parameters in no group."""
    weight_decay: float | None = None
    """Weight decay; None if the group has that of parameters in no group."""


def group_rates(parameters: Iterable[str], config: Config) -> dict[str, GroupRates]:
    """Return the rates of each parameter that a group of [[optimizer.groups]] matches, by name; others are absent.

    `group_contradictions` refuses a parameter in two groups.
    """
    out, tied = {}, config.model.tie_embeddings
    for name in parameters:
        for table in config.optimizer.groups:
            if matches(stored_name(name, tied), tuple(table["match"])):
                out[name] = GroupRates(table.get("lr"), table.get("weight_decay"))
    return out


def rate_factor(rate: float | None, options: Options) -> float:
    """Return a group's peak rate over optimizer.lr, a factor for the schedule's rate; 1 if the group has none."""
    return 1.0 if rate is None else rate / options.lr


def group_contradictions(config: Config) -> Iterator[Violation]:
    """Yield a violation for each mistake in [[optimizer.groups]].

    These are malformed tables; if there are none, patterns that match no trained parameter, and the first parameter
    that is in two groups.
    """
    tuning, groups = Tuning.of(config), config.optimizer.groups
    everything = [name for name, _ in shapes(config.model, tuning)]
    known = [name for name in everything if not tuning.freezes(name)]
    texts = [text for number, table in enumerate(groups, 1) for text in _malformed(number, table)]
    yield from (Violation((GROUPS,), text) for text in texts)
    if texts or not groups:
        return
    for table in groups:
        absent = unmatched_patterns(table["match"], everything)
        yield from unmatched(GROUPS, absent, known)
        for pattern in unmatched_patterns(table["match"], known):
            if pattern not in absent:
                count = sum(matches(name, (pattern,)) for name in everything)
                frozen = f"{count} frozen parameter{'s' * (count > 1)}"
                yield from unmatched(GROUPS, [pattern], known, f"which matches {frozen} and none that is trained")
    for name in known:
        if len(of := [n for n, table in enumerate(groups, 1) if matches(name, tuple(table["match"]))]) > 1:
            yield Violation(
                (GROUPS,),
                f"{GROUPS}: {name} is in groups {' and '.join(map(str, of))}: let the patterns of only one match it",
            )
            break


def _malformed(number: int, table: dict) -> Iterator[str]:
    """Yield a message for each mistake in [[optimizer.groups]] table `number`, from 1, that shows without the model."""
    place = f"{GROUPS}, group {number}"
    for key in table.keys() - {"match", "lr", "weight_decay"}:
        yield f"{place}: unknown key {key}: a group has match, lr and weight_decay"
    match = table.get("match")
    if not isinstance(match, list) or not match or not all(isinstance(pattern, str) for pattern in match):
        yield f'{place}: match must be a list of patterns of names, as in match = ["layers.*.moe.router.weight"]'
    for key in ("lr", "weight_decay"):
        value = table.get(key, 0.0)
        rate = key == "lr" and key in table
        fits = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= (1 if rate else 100)
        if not fits or (rate and not value):
            limits = "(0, 1] (to keep weights as they are, name them in training.freeze)" if rate else "[0, 100]"
            yield f"{place}: {key} = {toml_value(value)} must be a number in {limits}"
    if not {"lr", "weight_decay"} & table.keys():
        yield f"{place} changes nothing: set its lr or its weight_decay"


def qk_clip_contradictions(config: Config) -> Iterator[Violation]:
    """Yield a violation for each setting that contradicts QK-Clip or the measurement of attention logits.

    These are compile.enable, layers without attention, norms that undo the clip, and frozen weights that it would
    scale. An option of theirs that has no effect because they are off is one too.
    """
    model, limit, options = config.model, config.optimizer.qk_clip, config.metrics
    field, value = ("optimizer.qk_clip", limit) if limit else ("metrics.max_logit_every", options.max_logit_every)
    if not limit and config.optimizer.qk_clip_every != 1:
        yield Violation(
            ("optimizer.qk_clip_every", "optimizer.qk_clip"),
            f"optimizer.qk_clip_every = {config.optimizer.qk_clip_every} does nothing with qk_clip = 0: set qk_clip, "
            "such as 100, or leave it out",
        )
    if config.optimizer.qk_clip_measure == "bound":
        yield from _bound_contradictions(config, value)
    if not value:
        return
    if config.compile.enable:
        yield Violation(
            (field, "compile.enable"),
            f"{field} = {value} measures logits beside attention, which compile.enable = true compiles: leave one out",
        )
    for mixer in mixers(model):
        if not mixer.attends:
            yield Violation(
                (field, "model.family"),
                f"{field} = {value} measures attention's logits, and the {mixer.name} of model.family = "
                f'"{model.family}" has none: leave it out',
            )
            return
        if limit and not mixer.qk_clip_rows(model):
            yield Violation(
                (field, "model.qk_norm"),
                f'{field} = {value} has no effect with model.qk_norm = "{model.qk_norm}", which undoes what it scales '
                "and bounds logits itself: leave it out",
            )
            return
    yield from _frozen_clip_contradictions(config, field) if limit else ()


def _bound_contradictions(config: Config, value: float) -> Iterator[Violation]:
    """Yield a violation for each setting that contradicts optimizer.qk_clip_measure = "bound".

    Args:
        value: optimizer.qk_clip, or metrics.max_logit_every if that is 0; 0 if logits are not measured.
    """
    field, limit, length = "optimizer.qk_clip_measure", config.optimizer.qk_clip, config.training.seq_len
    if not value:
        yield Violation(
            (field, "optimizer.qk_clip", "metrics.max_logit_every"),
            f'{field} = "bound" does nothing with optimizer.qk_clip = 0 and metrics.max_logit_every = 0: set one of '
            "them, or leave it out",
        )
    if 0 < limit <= math.log(length):
        yield Violation(
            (field, "optimizer.qk_clip", "training.seq_len"),
            f'{field} = "bound" is up to ln(seq_len) = {math.log(length):.1f} above the largest logit, so that '
            f'optimizer.qk_clip = {limit} would clip logits of 0 in every step: set it higher, or measure "exact"',
        )
    if config.model.attention_sinks:
        yield Violation(
            (field, "model.attention_sinks"),
            f'{field} = "bound" goes by the log-sum-exp of attention, which has sinks in it with '
            'model.attention_sinks = true: use "exact"',
        )


def _frozen_clip_contradictions(config: Config, field: str) -> Iterator[Violation]:
    """Yield a violation if QK-Clip would scale a weight that is not trained; one at most, of the first such weight.

    Args:
        field: name of the option that asks for QK-Clip, for the message.
    """
    tuning = Tuning.of(config)
    for layer, mixer in enumerate(mixers(config.model)):
        for leaf in mixer.qk_clip_rows(config.model):
            name = f"{tensors.block_name(config.model, layer)}.attention.{leaf}"
            if tuning.freezes(name):
                yield Violation(
                    (field, "lora.rank" if config.lora.rank else "training.freeze"),
                    f"{field} = {config.optimizer.qk_clip} scales {name}, which is not trained: leave it out",
                )
                return


COMMON_FIELDS = ("name", "lr", "max_grad_norm", "skip_spikes", "skip_window", "skip_limit")
COMMON_FIELDS += ("qk_clip", "qk_clip_every", "qk_clip_measure")
"""Fields of [optimizer] that a step reads with any optimizer."""


class OptimizerSpec(Spec):
    """Properties of an optimizer, with defaults."""

    reads: tuple[str, ...] = ()
    """Fields of [optimizer] that the optimizer itself reads. A recipe that sets any other is refused."""
    numbers_per_weight = 1
    """Numbers of optimizer state per weight element."""
    bytes_per_tensor = 0
    """Bytes of optimizer state on the device per tensor, such as a count of its updates."""
    numbers_per_matrix_weight = 0
    """Numbers of optimizer state per element of the weights named by `matrices`, in place of numbers_per_weight."""

    def matrices(self, config: Config) -> tuple[str, ...]:
        """Return patterns of the names of weights that the optimizer treats as matrices, as Muon does; () for none.

        A pattern is like "layers.*.attention.wq.weight". The state of these weights has `numbers_per_matrix_weight`
        numbers per element, that of others `numbers_per_weight`.
        """
        return ()

    def state_numbers(self, config: Config) -> int:
        """Return how many numbers of state the optimizer has for the full model's trained weights, without replicas."""
        tuning, patterns = Tuning.of(config), self.matrices(config)
        of_matrices = sum(
            prod(shape)
            for name, shape in shapes(config.model, tuning)
            if matches(name, patterns) and not tuning.freezes(name)
        )
        others = trained_parameters(config.model, tuning) - of_matrices
        return self.numbers_per_weight * others + self.numbers_per_matrix_weight * of_matrices

    def moment_width(self, config: Config) -> int:
        """Return the number of bytes that each number of the optimizer's state takes; here that of training.dtype."""
        return WIDTHS[config.training.dtype]

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from qk_clip_contradictions(config)
        name, usual = config.optimizer.name, asdict(Options())
        for field, value in asdict(config.optimizer).items():
            if field not in (*COMMON_FIELDS, *self.reads) and value != usual[field]:
                yield Violation(
                    (f"optimizer.{field}", "optimizer.name"),
                    f"optimizer.{field} = {toml_value(value)} does nothing with optimizer.name = {toml_value(name)}, "
                    f"which reads {', '.join(self.reads) or 'no field of its own'}: leave it out, or set it to "
                    f"{toml_value(usual[field])}",
                )


class AdamWSpec(OptimizerSpec):
    help = "adamw is AdamW, with decoupled weight decay."
    implementation = "titanmoe.train.optimizers.adamw:AdamW"
    of_state = ("offload", "moments_dtype", "stochastic_rounding")
    reads = ("beta1", "beta2", "eps", "weight_decay", "decay_all", "groups", "implementation", *of_state)
    numbers_per_weight = 2
    bytes_per_tensor = 4

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        yield from group_contradictions(config)
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


class MuonSpec(AdamWSpec):
    help = "muon makes all singular values of a matrix's update alike, and leaves embeddings and vectors to adamw."
    implementation = "titanmoe.train.optimizers.muon:Muon"
    of_matrices = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "ns_eps", "adjust_lr", "by_head")
    reads = (*AdamWSpec.reads, *of_matrices, "router_matrix", "adamw_lr")
    numbers_per_matrix_weight = 1

    def matrices(self, config: Config) -> tuple[str, ...]:
        names = matrix_parameters(config.model, config.optimizer.router_matrix)
        return tuple({re.sub(r"^layers\.\d+", "layers.*", name): None for name in names})

    def contradictions(self, config: Config) -> Iterator[Violation]:
        yield from super().contradictions(config)
        if config.lora.rank:
            yield Violation(
                ("optimizer.name", "lora.rank"),
                f'optimizer.name = "muon" trains full matrices, and with lora.rank = {config.lora.rank} only adapters '
                'are trained, which adamw would do: use name = "adamw"',
            )
        for name, (shape, rows) in matrix_parameters(config.model, config.optimizer.router_matrix).items():
            if rows.per_head and shape[-2] % sum(rows.per_head):
                yield Violation(
                    ("optimizer.name", "model.family"),
                    f"{name} has {shape[-2]} rows, and matrices of {' + '.join(map(str, rows.per_head))} rows for each "
                    f'head do not divide them: correct `rows` in the spec of model.family = "{config.model.family}" '
                    "(docs/extending_families.md)",
                )
                return


OPTIMIZERS = ComponentKind(
    "optimizer.name",
    {
        "adamw": AdamWSpec(),
        "muon": MuonSpec(),
    },
    OptimizerSpec,
    ("step", "moments", "resume", "device_tensors", "host_tensors"),
)
