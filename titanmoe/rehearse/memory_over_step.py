"""A rank's memory over a step: every storage, from the operation that allocates it until nothing refers to it.

The recorder notes the results of operations in a `Ledger`, whose `memory` gives the peak by component and line. Bytes
are those that tensors request. Workspaces of kernels, NCCL's own memory, and what an allocator loses to rounding and
fragmentation are not counted.
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
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.rehearse.code_site import GATHER, RECEIVE, REDUCE, CodeSite
from titanmoe.rehearse.operation_costs import local_tensors
from titanmoe.replace import replaced

WEIGHTS, GRADIENTS, MOMENTS, SAVED_ACTIVATIONS, OTHER = "weights", "gradients", "moments", "saved activations", "other"
RECOMPUTED, DISPATCH, SYMMETRIC = "recomputed activations", "dispatch buffers", "symmetric buffers"
# The component of what a region allocates.
COMPONENT_OF_REGION = {
    GATHER: "gathered weights",
    REDUCE: GRADIENTS,
    "finish gradients": GRADIENTS,
    RECEIVE: "pipeline receive buffers",
    "head and loss": "logits",
}
COMPONENTS = (
    *(WEIGHTS, "gathered weights", GRADIENTS, MOMENTS, SAVED_ACTIVATIONS, RECOMPUTED),
    *(DISPATCH, SYMMETRIC, "logits", "pipeline receive buffers", OTHER),
)
DISPATCH_REGIONS = frozenset(("dispatch", "combine", "permute"))


class Storage:
    """A storage that an operation of the step allocated: bytes, code site, and the component that it counts as."""

    __slots__ = ("backward", "component", "needed_in_backward", "site", "size")

    def __init__(self, size: int, site: CodeSite, backward: int, component: str = ""):
        self.size, self.site, self.backward, self.component = size, site, backward, component
        self.needed_in_backward = False

    def resolved_component(self) -> str:
        """Return the memory component that the storage counts as, such as "gradients": one of `COMPONENTS`.

        An assigned component comes first, then that of its region: logits that backward needs are "logits". It is final
        only after the step, because another storage that backward still needs becomes a saved activation.
        """
        region = self.site.region
        if self.component or region in COMPONENT_OF_REGION:
            return self.component or COMPONENT_OF_REGION[region]
        if self.needed_in_backward:
            return SAVED_ACTIVATIONS
        if region in DISPATCH_REGIONS:
            return DISPATCH
        return RECOMPUTED if self.site.phase == "recomputed" else OTHER


class _StorageRef(weakref.ref):
    """A weak reference to a live storage of torch, with its record."""

    __slots__ = ("key", "storage")


@dataclass
class PeakStorages:
    """The storages alive at the peak that one line of code allocated for one component, summed over all layers."""

    component: str
    site: CodeSite
    count: int
    size: int


@dataclass
class Memory:
    """A rank's memory in a step, in bytes."""

    peak: int
    site: CodeSite
    """The site of the operation that reached the peak."""
    at_start: int
    """The bytes at the start of the step."""
    components: dict[str, int]
    """The bytes of each component at the peak."""
    at_peak: list[PeakStorages]
    """The storages at the peak, largest first."""


class Ledger(Observer):
    """Observer that records each storage from its allocation until it is freed, and the peak of their sum."""

    def __init__(self, current_site: Callable[[], CodeSite]) -> None:
        """Take a function that returns the code site of the operation that runs, for storages that FSDP reallocates."""
        self._current_site, self._live, self._not_on_device = current_site, dict[int, _StorageRef](), set[int]()
        self.backward = 0
        """The count of this step's operations so far that were in backward."""
        self.begin_step()

    def begin_step(self) -> None:
        """Discard the record of the previous step; storages that are alive count from the start of the new one."""
        self.backward = 0
        self._storages = [ref.storage for ref in self._live.values()]
        self._changes = array("q", (x.size for x in self._storages))
        self.at_start = self.current = self.peak = sum(self._changes)
        self._highest = len(self._storages)
        self._site = CodeSite()

    def assign(self, values: Iterable[Tensor], component: str) -> None:
        """Count the storages of these tensors as `component`, one of COMPONENTS, and record those that are new."""
        for x in local_tensors(list(values)):
            ref = self._live.get(x.untyped_storage()._cdata)
            if ref is not None:
                ref.storage.component = component
            else:
                self._open(x.untyped_storage(), CodeSite(), component)

    def leave_out(self, values: Iterable[Tensor]) -> None:
        """Never record the storages of these tensors, because they are in host memory; none may be recorded yet."""
        self._not_on_device |= {x.untyped_storage()._cdata for x in local_tensors(list(values))}

    def note(self, out: Any, site: CodeSite) -> None:
        """Record the new storages of an operation's results as allocated at `site`.

        Adds 1 to `backward` for an operation of the backward pass.
        """
        if site.phase in ("backward", "recomputed"):
            self.backward += 1
        for x in local_tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in self._not_on_device:
                self._open(storage, site)

    def _open(self, storage: torch.UntypedStorage, site: CodeSite, component: str = "") -> None:
        size = storage.nbytes()
        if not size:
            return
        ref = _StorageRef(storage, self._on_freed)
        ref.key, ref.storage = storage._cdata, Storage(size, site, self.backward, component)
        self._live[ref.key] = ref
        self._change(ref.storage, size)
        if self.current > self.peak:
            self.peak, self._highest, self._site = self.current, len(self._storages), site

    def _on_freed(self, ref: _StorageRef) -> None:
        if self._live.get(ref.key) is ref:
            del self._live[ref.key]
            self._close(ref.storage)

    def _close(self, storage: Storage) -> None:
        storage.needed_in_backward |= storage.site.phase == "forward" and self.backward > storage.backward
        self._change(storage, -storage.size)

    def _change(self, storage: Storage, size: int) -> None:
        self.current += size
        self._storages.append(storage)
        self._changes.append(size)

    # ---- changes that are no operations

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow FSDP's resizing of storages, and count its unsharded gradients as gradients, within this context."""
        resize, reduce = torch.UntypedStorage.resize_, FSDPParamGroup.post_backward

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            """Resize a storage. FSDP frees and reallocates unsharded weights this way."""
            ref = self._live.pop(storage._cdata, None)
            if ref is not None:
                self._close(ref.storage)
            out = resize(storage, size)
            self._open(storage, self._current_site())
            return out

        def reduces(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                grads = (None if unsharded is None else unsharded.grad, parameter.unsharded_accumulated_grad)
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
        """Return the peak of the step so far, with the components and the storages alive at the peak.

        Call it after the step: a saved activation is known as such only once backward has freed it.
        """
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
