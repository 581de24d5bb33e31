"""Model family for tests: blocks 0, 2, 4, ... have linear attention, the others grouped-query attention."""

from __future__ import annotations

from titanmoe.config.schema import Model
from titanmoe.models.families import mixtral
from titanmoe.models.families.family import Family
from titanmoe.models.mixers.gated_delta import FIELDS, GATED_DELTA
from titanmoe.models.mixers.grouped_query import GROUPED_QUERY
from titanmoe.models.mixers.mixer_spec import MixerSpec


def is_linear(model: Model, layer: int) -> bool:
    return layer % 2 == 0


def mixer(model: Model, layer: int) -> MixerSpec:
    return GATED_DELTA if is_linear(model, layer) else GROUPED_QUERY


FAMILY = Family({"debug": mixtral.SIZES["debug"]}, mixer=mixer, own=FIELDS)
