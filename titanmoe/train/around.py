"""A context around a method of one object: how parts of a step are timed and named without a word in the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from titanmoe.moe.dispatch import Dispatcher

SENDS = ("start", "parts", "arrive")
RETURNS = ("leave", "land")
"""A dispatcher's methods: the way to the experts, and the way back."""


def around(owner: Any, name: str, region: Callable[[], AbstractContextManager]) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph runs as a whole
            return method(*args, **kwargs)
        with region():
            return method(*args, **kwargs)

    setattr(owner, name, inside)


def around_dispatch(
    dispatchers: Iterable[Dispatcher], sends: Callable[[], AbstractContextManager], returns: Any = None
) -> None:
    for dispatcher in dispatchers:
        for name in SENDS:
            around(dispatcher, name, sends)
        for name in RETURNS:
            around(dispatcher, name, returns or sends)
