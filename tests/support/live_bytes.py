"""Counts bytes of live tensors on a CPU, which torch's CPU allocator does not report."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of storages written in it and still referenced: `now`, and at most `peak`.

    Scratch memory inside a kernel is not counted. That a storage was resized is noticed when it is written, or `now` is
    read.
    """

    def __init__(self, but: Iterable[torch.Tensor] = ()) -> None:
        """Leave out the storages of the tensors `but`, and views of them."""
        super().__init__()
        self.peak = self._now = 0
        self._but = {x.untyped_storage()._cdata for x in but}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor:
                self._note(tensor.untyped_storage())
        return out

    @property
    def now(self) -> int:
        """Bytes of the storages that are referenced now."""
        for ref, _ in list(self._live.values()):
            if (storage := ref()) is not None:
                self._note(storage)
        return self._now

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        ref, before = self._live.get(key, (None, 0))
        if key in self._but or size == before:
            return
        self._live[key] = ref or weakref.ref(storage), size
        self._now += size - before
        self.peak = max(self.peak, self._now)
        if ref is None:
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._live.pop(key)[1]


def saved_bytes(function: Callable[[], torch.Tensor], but: Iterable[torch.Tensor] = ()) -> tuple[torch.Tensor, int]:
    """Return the function's result, and the bytes of storages that autograd saves for it, without those of `but`."""
    known, saved = {x.untyped_storage()._cdata for x in but}, {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # referenced, so that its address is not reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function()
    return out, sum(storage.nbytes() for storage in saved.values())


def bytes_alive() -> int:
    """Return the bytes of the storages of all CPU tensors and parameters that Python code of this process refers to.

    Tensors that only C++ holds, such as those saved for backward, and tensors of subclasses are left out.
    """
    plain = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu")
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in plain}.values())
