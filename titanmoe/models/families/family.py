"""A model family: its sizes, the mixer of each block, and how Hugging Face stores it. No torch here.

Made by the modules beside this one, one `Family` each; read by config, planner, checkpoints and the transformer.
"""

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
"""Options that an error about a family names."""


def attention(model: Model, layer: int) -> MixerSpec:
    """Return the spec of latent attention if the model has latents, else of grouped-query attention, for any layer."""
    return LATENT if model.kv_lora_rank else GROUPED_QUERY


@dataclass(frozen=True)
class Family(Spec):
    """A family of models, a component of kind model.family."""

    sizes: Mapping[str, Mapping[str, Any]]
    """[model] fields of each size, by its name; fields left out keep their defaults."""
    hf: HuggingFace | None = None
    """Format of the family on Hugging Face; None if it cannot be converted."""
    mixer: Callable[[Model, int], MixerSpec] = attention
    """Function that returns the mixer of a block by its number: the same object for equal blocks."""
    own: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    """The family's own options, with defaults: a recipe sets them in [model.own], a size as `own`."""
    plan: Mapping[str, int | None] = field(default_factory=dict)
    """Dim along which tp shards a parameter, None to replicate it, by pattern of the parameter's name within a block.

    Replaces rows of the default plan in `titanmoe.models.tensors`, such as that of "moe.shared.w?.weight". Routers and
    experts cannot be replaced. The planner counts the weights by it, but times them by the default plan.
    """

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a family and a size give to options, by the option's path, such as "model.dim".

        The family's own options are among them, such as "model.own.conv_width", by default if the size has none.

        Args:
            values: "model.family" and "model.size", by path; may have more.

        Raises:
            ComponentError: if the size is unknown, or the family is inconsistent.
        """
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
        """Yield a Violation for each option of a recipe that contradicts the family or one of its mixers.

        With the default mixers, full_attention_every needs a sliding window.
        """
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
        """Return the mixers' numbers that a degree of parallelism must divide, as {"tp": {"model.num_heads": 16}}.

        A degree may also be a multiple of a number that is `Replicable`.
        """
        divided: dict[str, dict[str, int]] = {}
        for mixer in self._mixers(config.model):
            for degree, numbers in mixer.divided(config).items():
                divided.setdefault(degree, {}).update(numbers)
        return divided

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Yield a message for each reason why the mixers cannot run with these degrees of parallelism.

        `degrees` has numbers of ranks by axis, such as {"cp": 2}; an axis may be missing.
        """
        for mixer in self._mixers(config.model):
            yield from mixer.violations(config, degrees)

    def _mixers(self, model: Model) -> list[MixerSpec]:
        """Return the specs of the mixers that the model's layers have, each once."""
        return list(dict.fromkeys(self.mixer(model, layer) for layer in range(model.num_layers)))
