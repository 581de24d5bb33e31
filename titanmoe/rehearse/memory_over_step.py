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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titanmoe.observe import Observer, listening
from titanmoe.parallel.norm import local_grad
from titanmoe.rehearse.code_site import GATHER, RECEIVE, REDUCE, CodeSite
from titanmoe.rehearse.operation_costs import tensors
from titanmoe.replace import replaced

WEIGHTS, GRADIENTS, MOMENTS, KEPT_ACTIVATIONS, OTHER = "weights", "gradients", "moments", "activations kept", "other"
RECOMPUTED, DISPATCH, SYMMETRIC = "recomputed activations", "dispatch buffers", "symmetric buffers"
COMPONENT_OF_REGION = {
    GATHER: "gathered weights",
    REDUCE: GRADIENTS,
    "finish gradients": GRADIENTS,
    RECEIVE: "pipeline receive buffers",
    "head and loss": "logits",
}
COMPONENTS = (
    *(WEIGHTS, "gathered weights", GRADIENTS, MOMENTS, KEPT_ACTIVATIONS, RECOMPUTED),
    *(DISPATCH, SYMMETRIC, "logits", "pipeline receive buffers", OTHER),
)
DISPATCH_REGIONS = frozenset(("dispatch", "combine", "permute"))


class Storage:
    __slots__ = ("backward", "component", "needed_in_backward", "site", "size")

    def __init__(self, size: int, site: CodeSite, backward: int, component: str = ""):
        self.size, self.site, self.backward, self.component = size, site, backward, component
        self.needed_in_backward = False

    def resolved_component(self) -> str:
        region = self.site.region
        if self.component or region in COMPONENT_OF_REGION:
            return self.component or COMPONENT_OF_REGION[region]
        if self.needed_in_backward:
            return KEPT_ACTIVATIONS
        if region in DISPATCH_REGIONS:
            return DISPATCH
        return RECOMPUTED if self.site.phase == "recomputed" else OTHER


class _Watch(weakref.ref):
    __slots__ = ("key", "storage")


@dataclass
class PeakStorages:
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
    at_start: int
    """Bytes at the start of the step."""
    components: dict[str, int]
    """Bytes at the peak."""
    at_peak: list[PeakStorages]
    """Largest first; layers are added up."""


class Ledger(Observer):
    """Records storages as they are allocated and freed."""

    def __init__(self, where: Callable[[], CodeSite]) -> None:
        self._where, self._live, self._not_on_device = where, dict[int, _Watch](), set[int]()
        self.backward = 0
        """Operations of the step so far that were in backward."""
        self.begin_step()

    def begin_step(self) -> None:
        """A step starts with the storages that are alive."""
        self.backward = 0
        self._storages = [watch.storage for watch in self._live.values()]
        self._changes = array("q", (x.size for x in self._storages))
        self.at_start = self.current = self.peak = sum(self._changes)
        self._highest = len(self._storages)
        self._site = CodeSite()

    def assign(self, values: Iterable[Tensor], component: str) -> None:
        """Counts these tensors, which are from before the step or already recorded, as that component."""
        for x in tensors(list(values)):
            watch = self._live.get(x.untyped_storage()._cdata)
            if watch is not None:
                watch.storage.component = component
            else:
                self._open(x.untyped_storage(), CodeSite(), component)

    def leave_out(self, values: Iterable[Tensor]) -> None:
        """Does not count these tensors, which are not on the device."""
        self._not_on_device |= {x.untyped_storage()._cdata for x in tensors(list(values))}

    def note(self, out: Any, site: CodeSite) -> None:
        """Records the results of an operation."""
        if site.phase in ("backward", "recomputed"):
            self.backward += 1
        for x in tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in self._not_on_device:
                self._open(storage, site)

    def _open(self, storage: torch.UntypedStorage, site: CodeSite, component: str = "") -> None:
        size = storage.nbytes()
        if not size:
            return
        watch = _Watch(storage, self._on_freed)
        watch.key, watch.storage = storage._cdata, Storage(size, site, self.backward, component)
        self._live[watch.key] = watch
        self._change(watch.storage, size)
        if self.current > self.peak:
            self.peak, self._highest, self._site = self.current, len(self._storages), site

    def _on_freed(self, watch: _Watch) -> None:
        if self._live.get(watch.key) is watch:
            del self._live[watch.key]
            self._close(watch.storage)

    def _close(self, storage: Storage) -> None:
        storage.needed_in_backward |= storage.site.phase == "forward" and self.backward > storage.backward
        self._change(storage, -storage.size)

    def _change(self, storage: Storage, size: int) -> None:
        self.current += size
        self._storages.append(storage)
        self._changes.append(size)

    # ---- what is not seen as an operation

    @contextmanager
    def recording(self) -> Iterator[None]:
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
                grads = (None if whole is None else whole.grad, parameter.unsharded_accumulated_grad)
                self.assign([x for x in grads if x is not None], GRADIENTS)
            return reduce(group, *args, **kwargs)

        with (
            listening(self),
            replaced(torch.UntypedStorage, "resize_", resized),
            replaced(FSDPParamGroup, "post_backward", reduces),
        ):
            yield

    def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
        self.assign([local_grad(parameter) for parameter in parameters.values()], GRADIENTS)

    # ---- the result

    def memory(self) -> Memory:
        live: dict[int, Storage] = {}
        for storage, change in zip(self._storages[: self._highest], self._changes, strict=False):
            if change > 0:
                live[id(storage)] = storage
            else:
                live.pop(id(storage), None)
        components: Counter[str] = Counter()
        lines: dict[tuple, PeakStorages] = {}
        for storage in live.values():
            component, site = storage.resolved_component(), storage.site._replace(layer="")
            components[component] += storage.size
            storages = lines.setdefault((component, site), PeakStorages(component, site, 0, 0))
            storages.count += 1
            storages.size += storage.size
        return Memory(
            self.peak,
            self._site,
            self.at_start,
            {name: components[name] for name in COMPONENTS},
            sorted(lines.values(), key=lambda storages: -storages.size),
        )
