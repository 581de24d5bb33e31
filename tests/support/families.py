"""Which families have only layers that this repository's tests know."""

from __future__ import annotations

from titanmoe.config.schema import Model
from titanmoe.models.families import mixers, preset
from titanmoe.models.mixers.grouped_query import GROUPED_QUERY
from titanmoe.models.mixers.latent import LATENT


def attends(family: str) -> bool:
    """Whether every block has one of the two kinds of attention."""
    return set(mixers(Model(**preset(family, "debug")))) <= {GROUPED_QUERY, LATENT}
