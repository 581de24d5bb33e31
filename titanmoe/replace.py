"""Give an attribute of a module, a class or an object another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the context. What was there before comes back, or is inherited again."""
    own = name in vars(owner)
    before = vars(owner)[name] if own else getattr(owner, name)  # a staticmethod, not the function in it
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
