"""What does not go with QK-Clip, or with measuring attention's logits. No torch here."""

from __future__ import annotations

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
