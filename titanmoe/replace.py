"""A context manager that sets an attribute of a module, a class or an object for a while.

Used by rehearsals, on functions of torch and Python alone: our own take stand-ins as arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the context. Afterwards the old value is restored, or inherited again."""
    is_own = name in vars(owner)
    before = vars(owner)[name] if is_own else getattr(owner, name)  # a staticmethod, not the function in it
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
