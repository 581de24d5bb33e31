"""The values of integer fake tensors, where they follow from known values: routing, and counts computed from it.

Fake tensors have shapes only, but the number of routed tokens for each rank decides shapes. So `track` follows
integers: if all inputs of an operation are known, the operation also runs on real tensors, and its result is stored
with the fake one. Whatever is computed from weights or activations is unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from titanmoe.rehearse.stand_ins import FORMULAS

MOST = 1 << 24
"""The most elements of a tracked tensor. Routing has fewer, indices into weights have more."""
_NAME = "_rehearsed"
CONSTANTS = frozenset(("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"))
"""Operations that use only the shape and dtype of their input."""


class _KnownValues:
    """The real values of a fake tensor, and a cell shared with its views that says whether they are still valid."""

    __slots__ = ("valid", "value")

    def __init__(self, value: Tensor, valid: list[bool]):
        self.value, self.valid = value, valid


def _can_be_tracked(x: Tensor) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex and x.numel() <= MOST


def set_known(x: Tensor, value: Tensor) -> None:
    """Store `value`, a real tensor of x's shape, as the known values of the fake tensor x; not copied."""
    setattr(x, _NAME, _KnownValues(value, [True]))


def known_values(x: Tensor) -> Tensor | None:
    """Return a real tensor with the values of x, or x itself if it is real; None if they are unknown."""
    if not isinstance(x, FakeTensor):
        return x
    stored = getattr(x, _NAME, None)
    return stored.value if stored is not None and stored.valid[0] else None


def _cell(x: Tensor) -> list[bool]:
    stored = getattr(x, _NAME, None)
    return [True] if stored is None else stored.valid


def track(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Store the values of an operation's results on fake tensors, `out`, if those of all its inputs are known.

    The operation has just run. If inputs are unknown, and it writes to a tensor, what was known of that tensor and its
    views is forgotten. Results of CONSTANTS, such as zeros_like, are known whatever the input is. Floating-point
    tensors, and those of more than MOST elements, are never known.
    """
    results = [out] if isinstance(out, FakeTensor) else [x for x in tree_leaves(out) if isinstance(x, FakeTensor)]
    changes = func._schema.is_mutable
    if not changes and not any(map(_can_be_tracked, results)):
        return
    if func._overloadpacket.__name__ in CONSTANTS:
        with no_dispatch():
            set_known(out, func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs))
        return
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    values = [known_values(x) for x in inputs]
    if not all(x is not None and _can_be_tracked(x) for x in values) or not all(_can_be_tracked(x) for x in results):
        if changes:
            for x in results:  # the operation has written unknown values
                _cell(x)[0] = False
        return
    before = {x.untyped_storage().data_ptr(): _cell(fake) for x, fake in zip(values, inputs, strict=True)}
    formula = FORMULAS.get(func._schema.name, func)
    with no_dispatch():
        real_out = formula(*tree_map_only(Tensor, known_values, args), **tree_map_only(Tensor, known_values, kwargs))
    for fake, value in zip(results, [x for x in tree_leaves(real_out) if isinstance(x, Tensor)], strict=True):
        if getattr(fake, _NAME, None) is None:
            cell = before.get(value.untyped_storage().data_ptr(), [True]) if value.numel() else [True]
            setattr(fake, _NAME, _KnownValues(value, cell))


def known_list(x: Tensor) -> Any:
    """Return the values of x as `x.tolist()` would; None if they are unknown."""
    value = known_values(x)
    if value is None:
        return None
    with no_dispatch():
        return value.tolist()
