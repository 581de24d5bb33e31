"""A rank's memory over a step: every storage, from the operation that makes it until nothing refers to it.

Bytes are those that tensors request. Workspaces of kernels, NCCL's own memory, and what an allocator loses to rounding
and fragmentation are not counted.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titanmoe.rehearse.code_site import GATHER, RECEIVE, REDUCE, CodeSite
from titanmoe.rehearse.work import tensors
from titanmoe.replace import replaced

WEIGHTS, GRADIENTS, MOMENTS, KEPT, OTHER = "weights", "gradients", "moments", "activations kept", "other"
RECOMPUTED, DISPATCH, SYMMETRIC = "recomputed activations", "dispatch buffers", "symmetric buffers"
COMPONENT_OF_REGION = {
    GATHER: "gathered weights",
    REDUCE: GRADIENTS,
    "finish gradients": GRADIENTS,
    RECEIVE: "pipeline receive buffers",
    "head and loss": "logits",
}
COMPONENTS = (
    *(WEIGHTS, "gathered weights", GRADIENTS, MOMENTS, KEPT, RECOMPUTED),
    *(DISPATCH, SYMMETRIC, "logits", "pipeline receive buffers", OTHER),
)
DISPATCH_REGIONS = frozenset(("dispatch", "combine", "permute"))
POINTS = 600
"""Points of the picture, each the highest moment since the one before."""


class Storage:
    __slots__ = ("backward", "component", "kept", "site", "size")

    def __init__(self, size: int, site: CodeSite, backward: int, component: str = ""):
        self.size, self.site, self.backward, self.component = size, site, backward, component
        self.kept = False

    def counted_as(self) -> str:
        region = self.site.region
        if self.component or region in COMPONENT_OF_REGION:
            return self.component or COMPONENT_OF_REGION[region]
        if self.kept:
            return KEPT
        if region in DISPATCH_REGIONS:
            return DISPATCH
        return RECOMPUTED if self.site.phase == "recomputed" else OTHER


class _Watch(weakref.ref):
    __slots__ = ("key", "storage")


@dataclass
class AtPeak:
    """Storages alive at the peak that one line of code made for one component."""

    component: str
    site: CodeSite
    count: int
    size: int


@dataclass
class Memory:
    peak: int
    site: CodeSite
    """Of the operation that reached the peak."""
    before: int
    """Bytes at the start of the step."""
    components: dict[str, int]
    """Bytes at the peak."""
    at_peak: list[AtPeak]
    """Largest first; layers are added up."""
    moments: list[int] = field(repr=False, default_factory=list)
    """How many operations had run at each point of the picture."""
    curves: dict[str, list[int]] = field(repr=False, default_factory=dict)
    """Bytes of each component at these points."""


class Ledger:
    """Records storages as they are allocated and freed."""

    def __init__(self, where: Callable[[], CodeSite]) -> None:
        self._where, self._live, self._elsewhere = where, dict[int, _Watch](), set[int]()
        self.operations = self.backward = 0
        """Operations of the step so far, and how many of them were in backward."""
        self.begin_step()

    def begin_step(self) -> None:
        """A step starts with the storages that are alive."""
        self.operations = self.backward = 0
        self._whose = [watch.storage for watch in self._live.values()]
        self._changes, self._when = array("q", (x.size for x in self._whose)), array("q", bytes(8 * len(self._whose)))
        self.before = self.now = self.peak = sum(self._changes)
        self._first = self._highest = len(self._whose)
        self._site = CodeSite()

    def assign(self, given: Iterable[Tensor], component: str) -> None:
        """Counts these tensors, from before the step or already recorded, as that component."""
        for x in tensors(list(given)):
            watch = self._live.get(x.untyped_storage()._cdata)
            if watch is not None:
                watch.storage.component = component
            else:
                self._open(x.untyped_storage(), CodeSite(), component)

    def leave_out(self, given: Iterable[Tensor]) -> None:
        """They are not on the device."""
        self._elsewhere |= {x.untyped_storage()._cdata for x in tensors(list(given))}

    def note(self, out: Any, site: CodeSite) -> None:
        """Records the results of an operation."""
        self.operations += 1
        if site.phase in ("backward", "recomputed"):
            self.backward += 1
        for x in tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in self._elsewhere:
                self._open(storage, site)

    def _open(self, storage: torch.UntypedStorage, site: CodeSite, component: str = "") -> None:
        size = storage.nbytes()
        if not size:
            return
        watch = _Watch(storage, self._gone)
        watch.key, watch.storage = storage._cdata, Storage(size, site, self.backward, component)
        self._live[watch.key] = watch
        self._change(watch.storage, size)
        if self.now > self.peak:
            self.peak, self._highest, self._site = self.now, len(self._whose), site

    def _gone(self, watch: _Watch) -> None:
        if self._live.get(watch.key) is watch:
            del self._live[watch.key]
            self._close(watch.storage)

    def _close(self, storage: Storage) -> None:
        storage.kept |= storage.site.phase == "forward" and self.backward > storage.backward
        self._change(storage, -storage.size)

    def _change(self, storage: Storage, size: int) -> None:
        self.now += size
        self._whose.append(storage)
        self._changes.append(size)
        self._when.append(self.operations)

    # ---- what is not seen as an operation

    @contextmanager
    def on(self) -> Iterator[None]:
        resize, reduce = torch.UntypedStorage.resize_, FSDPParamGroup.post_backward

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP frees whole weights this way, and allocates them again."""
            watch = self._live.pop(storage._cdata, None)
            if watch is not None:
                self._close(watch.storage)
            out = resize(storage, size)
            self._open(storage, self._where())
            return out

        def reduces(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                found = (None if whole is None else whole.grad, parameter.unsharded_accumulated_grad)
                self.assign([x for x in found if x is not None], GRADIENTS)
            return reduce(group, *args, **kwargs)

        with (
            replaced(torch.UntypedStorage, "resize_", resized),
            replaced(FSDPParamGroup, "post_backward", reduces),
        ):
            yield

    # ---- the result

    def memory(self) -> Memory:
        live: dict[int, Storage] = {}
        for storage, change in zip(self._whose[: self._highest], self._changes, strict=False):
            if change > 0:
                live[id(storage)] = storage
            else:
                live.pop(id(storage), None)
        components: Counter[str] = Counter()
        lines: dict[tuple, AtPeak] = {}
        for storage in live.values():
            component, site = storage.counted_as(), storage.site._replace(layer="")
            components[component] += storage.size
            one = lines.setdefault((component, site), AtPeak(component, site, 0, 0))
            one.count += 1
            one.size += storage.size
        return Memory(
            self.peak,
            self._site,
            self.before,
            {name: components[name] for name in COMPONENTS},
            sorted(lines.values(), key=lambda one: -one.size),
            *self._curves(),
        )

    def _curves(self) -> tuple[list[int], dict[str, list[int]]]:
        moments, curves = [], {name: [] for name in COMPONENTS}
        every = max(1, (len(self._whose) - self._first) // POINTS)
        now, total, most, best = Counter(), 0, -1, None
        for i, (storage, change) in enumerate(zip(self._whose, self._changes, strict=True)):
            now[storage.counted_as()] += change
            total += change
            if i < self._first - 1:
                continue
            if total > most:
                most, best = total, (self._when[i], dict(now))
            if (i - self._first) % every == every - 1 or i == len(self._whose) - 1:
                moments.append(best[0])
                for name, curve in curves.items():
                    curve.append(best[1].get(name, 0))
                most = -1
        return moments, curves
