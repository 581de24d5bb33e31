"""What does not go with QK-Clip, or with measuring attention's logits. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator

from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.models.tensors import Tuning


def contradictions(config: Config) -> Iterator[Violation]:
    model, limit, options = config.model, config.optimizer.qk_clip, config.metrics
    field, value = ("optimizer.qk_clip", limit) if limit else ("metrics.max_logit_every", options.max_logit_every)
    if not limit and config.optimizer.qk_clip_every != 1:
        yield Violation(
            ("optimizer.qk_clip_every", "optimizer.qk_clip"),
            f"optimizer.qk_clip_every = {config.optimizer.qk_clip_every} does nothing with qk_clip = 0: set qk_clip, "
            "such as 100, or leave it out",
        )
    if config.optimizer.qk_clip_measure == "bound":
        yield from _bound(config, value)
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
        if limit and not mixer.clipped(model):
            yield Violation(
                (field, "model.qk_norm"),
                f'{field} = {value} has no effect with model.qk_norm = "{model.qk_norm}", which undoes what it scales '
                "and bounds logits itself: leave it out",
            )
            return
    yield from _frozen(config, field) if limit else ()


def _bound(config: Config, value: float) -> Iterator[Violation]:
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
            f'optimizer.qk_clip = {limit} would clip logits of 0, again and again: set it higher, or measure "exact"',
        )
    if config.model.attention_sinks:
        yield Violation(
            (field, "model.attention_sinks"),
            f'{field} = "bound" goes by the log-sum-exp of attention, which has sinks in it with '
            'model.attention_sinks = true: use "exact"',
        )


def _frozen(config: Config, field: str) -> Iterator[Violation]:
    tuning = Tuning.of(config)
    for layer, mixer in enumerate(mixers(config.model)):
        for leaf in mixer.clipped(config.model):
            name = f"{tensors.block_name(config.model, layer)}.attention.{leaf}"
            if tuning.freezes(name):
                yield Violation(
                    (field, "lora.rank" if config.lora.rank else "training.freeze"),
                    f"{field} = {config.optimizer.qk_clip} scales {name}, which is not trained: leave it out",
                )
                return
