"""The numbers behind fake tensors, as far as they follow from numbers that are known: routing's, and what is counted.

Fake tensors have shapes alone, but how many rows go where decides shapes. So whole numbers are followed: where all that
enters an operation is known and whole, it is done once more for real, and the result stands beside the fake one.
What comes of weights and activations is not known, and nothing that comes of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from titanmoe.rehearse.stand_ins import FORMULAS

MOST = 1 << 24
"""Numbers of a tensor: routing's have fewer, indices of weights more."""
_NAME = "_rehearsed"


class _Kept:
    """A value, and whether it still holds: its views share that."""

    __slots__ = ("sound", "value")

    def __init__(self, value: Tensor, sound: list[bool]):
        self.value, self.sound = value, sound


def _whole(x: Tensor) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex and x.numel() <= MOST


def give(x: Tensor, value: Tensor) -> None:
    """From now on x is known."""
    setattr(x, _NAME, _Kept(value, [True]))


def known(x: Tensor) -> Tensor | None:
    """The numbers of a tensor, None if they are not known."""
    if not isinstance(x, FakeTensor):
        return x
    kept = getattr(x, _NAME, None)
    return kept.value if kept is not None and kept.sound[0] else None


def _cell(x: Tensor) -> list[bool]:
    kept = getattr(x, _NAME, None)
    return [True] if kept is None else kept.sound


def follow(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """After func(*args, **kwargs) has given the fake `out`: do it again with the numbers, where they are known."""
    if isinstance(out, FakeTensor) and not _whole(out) and not func._schema.is_mutable:
        return
    results = [out] if isinstance(out, FakeTensor) else [x for x in tree_leaves(out) if isinstance(x, FakeTensor)]
    changes = func._schema.is_mutable
    if not changes and not any(map(_whole, results)):
        return
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    values = [known(x) for x in inputs]
    if not all(x is not None and _whole(x) for x in values) or not all(_whole(x) for x in results):
        if changes:
            for x in results:  # what was written is not known
                _cell(x)[0] = False
        return
    before = {x.untyped_storage().data_ptr(): _cell(fake) for x, fake in zip(values, inputs, strict=True)}
    again = FORMULAS.get(func._schema.name, func)
    with no_dispatch():
        found = again(*tree_map_only(Tensor, known, args), **tree_map_only(Tensor, known, kwargs))
    for fake, value in zip(results, [x for x in tree_leaves(found) if isinstance(x, Tensor)], strict=True):
        if getattr(fake, _NAME, None) is None:
            cell = before.get(value.untyped_storage().data_ptr(), [True]) if value.numel() else [True]
            setattr(fake, _NAME, _Kept(value, cell))


def numbers(x: Tensor) -> Any:
    """As `tolist` has them, None if they are not known."""
    value = known(x)
    if value is None:
        return None
    with no_dispatch():
        return value.tolist()
