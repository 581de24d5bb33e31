"""What a family of models is: its sizes, the mixer of each block, and how Hugging Face stores it. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from titanmoe.config.component_kinds import ComponentError, Spec
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import OWN, Config, Model
from titanmoe.models.families.huggingface import HuggingFace
from titanmoe.models.mixers.grouped_query import GROUPED_QUERY
from titanmoe.models.mixers.latent import LATENT
from titanmoe.models.mixers.mixer_spec import MixerSpec

NAMED = ("model.family", "model.size")


def attention(model: Model, layer: int) -> MixerSpec:
    return LATENT if model.kv_lora_rank else GROUPED_QUERY


@dataclass(frozen=True)
class Family(Spec):
    sizes: Mapping[str, Mapping[str, Any]]
    """Each with the [model] fields that it stands for; those left out keep their defaults."""
    hf: HuggingFace | None = None
    """How it is written for transformers; None: it cannot be converted."""
    mixer: Callable[[Model, int], MixerSpec] = attention
    """Gives the mixer of a block, by its number; the same object for blocks that are alike."""
    own: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    """What [model] has no field for, with defaults: a recipe sets it in [model.own], a size as `own`."""
    plan: Mapping[str, int | None] = field(default_factory=dict)
    """Rows of the parallel plan (titanmoe.parallel.tensor) that differ from those in `titanmoe.models.tensors`: the dim
    along which tp shards a parameter, None to replicate it, by pattern of its name within a block, such as
    "moe.shared.w?.weight". Not for routers and experts. The planner counts such weights so, and times as without it."""

    def mixer_of(self, model: Model, layer: int) -> MixerSpec:
        """The block of multi-token prediction, which comes after the last layer, is like the last."""
        return self.mixer(model, min(layer, model.num_layers - 1))

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        family, size = (values[path] for path in NAMED)
        if self.hf and self.hf.family != family:
            raise ComponentError(
                NAMED, f"model.family = {family!r} cannot be used: its hf says family = {self.hf.family!r}"
            )
        if size not in self.sizes:
            near = get_close_matches(size.lower(), self.sizes, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(self.sizes)
            raise ComponentError(NAMED, f"model.size = {size!r} is not a size of {family}.{hint} Known: {known}")
        shape = dict(self.sizes[size])
        own = shape.pop("own", {})
        unknown = {
            *shape.keys() - {field.name for field in fields(Model)},
            *(f"own.{n}" for n in own.keys() - self.own),
        }
        if unknown:
            text = f"its size {size!r} has {', '.join(sorted(unknown))}, no field of [model]"
            raise ComponentError(NAMED, f"model.family = {family!r} cannot be used: {text}")
        own_values = {f"{OWN}.{name}": own.get(name, default) for name, default in self.own.items()}
        return {f"model.{name}": value for name, value in shape.items()} | own_values

    def contradictions(self, config: Config) -> Iterator[Violation]:
        every = config.model.full_attention_every
        if self.mixer is attention and not config.model.sliding_window and every != 1:
            yield Violation(
                ("model.full_attention_every", "model.sliding_window"),
                f"model.full_attention_every = {every} gives blocks a sliding window, but model.sliding_window = 0 is "
                "not a width: set it, such as sliding_window = 128, or set full_attention_every = 1",
            )
        for mixer in self._mixers(config.model):
            yield from mixer.contradictions(config)

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        divided: dict[str, dict[str, int]] = {}
        for mixer in self._mixers(config.model):
            for degree, numbers in mixer.divided(config).items():
                divided.setdefault(degree, {}).update(numbers)
        return divided

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        for mixer in self._mixers(config.model):
            yield from mixer.violations(config, degrees)

    def _mixers(self, model: Model) -> list[MixerSpec]:
        """Each kind once."""
        return list(dict.fromkeys(self.mixer(model, layer) for layer in range(model.num_layers)))
