"""Tells which model families have attention in every block, for tests that know no other mixer."""

from __future__ import annotations

from titanmoe.config.schema import Model
from titanmoe.models.families import mixers, preset
from titanmoe.models.mixers.grouped_query import GROUPED_QUERY
from titanmoe.models.mixers.latent import LATENT


def has_attention_only(family: str) -> bool:
    """Return whether every block of the family has grouped-query or latent attention."""
    return set(mixers(Model(**preset(family, "debug")))) <= {GROUPED_QUERY, LATENT}
