"""A cache of the result shapes of operations on fake tensors.

For each operation fake tensors ask torch for the shape of the result, which takes a third of a millisecond. A step
repeats the same few hundred operations on the same shapes, so here torch is asked once for each operation with the same
scalars and input layouts, and later results are built from the cache. Equal layers, microbatches and ranks are traced
once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
NOT_BY_SHAPE = ("lift_fresh", "lift", "set_", "resize_", "wait_tensor")
CACHED_NAMESPACES = ("aten", "titanmoe", "rehearsal", "_c10d_functional")
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)
_CACHE: dict[Any, tuple | None] = {}
"""The layouts of results, by operation and arguments. All rehearsals in this process share them: no layout depends on
the rank."""


class _Unknown(Exception):
    """Raised for an argument that is not fully described by its layout."""


def _key(x: Any) -> Any:
    if type(x) is FakeTensor:
        return FakeTensor, x.shape, x.stride(), x.storage_offset(), x.dtype
    if isinstance(x, PLAIN):
        return type(x), x
    if isinstance(x, list | tuple):
        return tuple(map(_key, x))
    raise _Unknown


def _changes_first(func: Any) -> bool:
    """Return whether an operation writes to its first argument, keeps its shape, and returns it."""
    first, *rest = func._schema.arguments
    returns = func._schema.returns
    return (
        torch.Tag.inplace_view not in func.tags
        and first.alias_info is not None
        and all(x.alias_info is None for x in rest)
        and len(returns) == 1
        and isinstance(returns[0].type, torch.TensorType)
    )


class Shapes:
    """Runs operations on fake tensors, and takes the shapes of their results from a cache that all ranks share."""

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self._kinds: dict[Any, str] = {}
        with no_dispatch():
            template = FakeTensor(mode, torch.empty(0, device="meta"), CPU)
        self._template = dict(template.__dict__)

    def __call__(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation on fake tensors, a fake tensor or several.

        Shapes come from the cache if the operation has run with such arguments before, else from the operation.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._kind(func)
        if kind == "ask":
            return func(*args, **kwargs)
        if kind == "same":
            return args[0] if type(args[0]) is FakeTensor else func(*args, **kwargs)
        try:
            key = (func, _key(args), tuple((name, _key(x)) for name, x in kwargs.items()))
        except _Unknown:
            return func(*args, **kwargs)
        if kind == "view":
            if key not in _CACHE:
                _CACHE[key] = None
                return func(*args, **kwargs)
            with in_kernel_invocation_manager(self.mode):
                out = func(*args, **kwargs)
            return self._of(out) if isinstance(out, Tensor) else [self._of(x) for x in out]
        cached = _CACHE.get(key)
        if cached is not None:
            several, layouts = cached
            with no_dispatch():
                plain = [torch.empty_strided(*layout, dtype=dtype, device="meta") for *layout, dtype in layouts]
            out = [self._of(x) for x in plain]
            return several(out) if several is not None else out[0]
        out = func(*args, **kwargs)
        leaves = tree_leaves(out)
        if leaves and all(type(x) is FakeTensor and x.device == CPU and x.storage_offset() == 0 for x in leaves):
            several = type(out) if isinstance(out, list | tuple) else None
            _CACHE[key] = several, [(x.shape, x.stride(), x.dtype) for x in leaves]
        return out

    def _of(self, x: Tensor) -> FakeTensor:
        """Return x, a meta tensor, as a fake CPU tensor, in a fifth of the time of FakeTensor's constructor."""
        out = Tensor._make_subclass(FakeTensor, x, x.requires_grad, dispatch_device=True, device_for_backend_keys=CPU)
        out.__dict__.update(self._template)
        return out

    def _kind(self, func: Any) -> str:
        """Return how the result of an operation is made.

        "ask": torch runs it. "same": it is the first argument. "view": a view of an argument. "new": from the cache.
        """
        schema, name = func._schema, func._overloadpacket.__name__
        if name in NOT_BY_SHAPE or func.namespace not in CACHED_NAMESPACES:
            return "ask"
        if schema.is_mutable:
            return "same" if func.namespace == "aten" and _changes_first(func) else "ask"
        if func.is_view or name == "_unsafe_view":  # of a tensor that nothing else uses
            return "view"
        if any(x.alias_info is not None for x in (*schema.arguments, *schema.returns)):
            return "ask"
        return "new"
