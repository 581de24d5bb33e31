"""Ways for rows to travel to their experts' ranks and back, a file each; `protocol` is what they have in common."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from titanmoe.config.dispatchers import DISPATCHERS

if TYPE_CHECKING:
    from titanmoe.moe.dispatchers.protocol import Dispatcher


def dispatcher_class(name: str) -> type[Dispatcher]:
    """The class for a value of `[moe] dispatcher`."""
    module, kind = DISPATCHERS[name].where.rsplit(".", 1)
    return getattr(import_module(f"titanmoe.{module}"), kind)
