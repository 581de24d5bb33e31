"""The cost of operations: kernels launched, FLOPs, bytes read and written.

Every operation that computes counts as one kernel; views, empty tensors and queries count as none. It reads each input
once and writes each tensor that it returns or changes once. Of an expanded tensor only the stored elements are read, an
operation that selects rows reads as many as it returns, and a tensor that is only filled or copied to is not read.
Matmuls count two FLOPs for each multiply-add, like torch's own counter; elementwise operations count none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from titanmoe.rehearse.code_site import CodeSite

Key = TypeVar("Key")
PLAIN = (FakeTensor, Tensor)
NO_KERNEL = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "_unsafe_view")
)
PICKS_ROWS = frozenset(("embedding", "index_select", "gather", "index", "fetch_rows"))
FILLS = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
NOT_CHANGED = frozenset(("grads",))
"""Arguments of the fused optimizer that it changes only if there is a gradient scaler."""


@dataclass
class OperationCost:
    """Kernels launched, FLOPs, and bytes moved, of one or many operations."""

    kernels: int = 0
    flops: int = 0
    read: int = 0
    """The bytes read."""
    written: int = 0
    """The bytes written."""

    def __iadd__(self, other: OperationCost) -> OperationCost:
        self.kernels += other.kernels
        self.flops += other.flops
        self.read += other.read
        self.written += other.written
        return self

    def __mul__(self, count: int) -> OperationCost:
        return OperationCost(self.kernels * count, self.flops * count, self.read * count, self.written * count)

    @property
    def moved(self) -> int:
        """The bytes read and written."""
        return self.read + self.written


class Operation(NamedTuple):
    """A torch operation at a code site, with the FLOPs and bytes of one launch."""

    name: str
    site: CodeSite
    flops: int
    read: int
    written: int


class Operations(Counter[Operation]):
    """Counter of the launches of each operation in a step."""

    def add(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, site: CodeSite) -> None:
        """Count one launch of an operation that has returned `out`; operations that launch no kernel are ignored."""
        name = func._overloadpacket.__name__
        if func.is_view or name in NO_KERNEL:
            return
        write_only, changed = _changes(func, name)
        arguments = dict(enumerate(args)) | kwargs
        inputs = [x for key, argument in arguments.items() if key not in write_only for x in local_tensors(argument)]
        # An operation that changes tensors writes only those, whatever it returns.
        outputs = list(local_tensors([arguments[key] for key in changed if key in arguments] if changed else out))
        if not outputs:  # a query, such as the dtype that two dtypes promote to
            return
        written = sum(map(stored_bytes, outputs))
        if name in PICKS_ROWS:
            inputs[0] = outputs[0]
        self[Operation(name, site, flops(func, args, kwargs, out), sum(map(stored_bytes, inputs)), written)] += 1

    def totals_by(self, key: Callable[[Operation], Key]) -> dict[Key, OperationCost]:
        """Return the total cost of the operations that have each value of `key`."""
        totals: dict[Key, OperationCost] = defaultdict(OperationCost)
        for operation, count in self.items():
            totals[key(operation)] += cost_of(operation) * count
        return totals

    def total(self) -> OperationCost:
        """Return the cost of all operations."""
        return self.totals_by(lambda _: None)[None]


@cache
def _changes(func: Any, name: str) -> tuple[frozenset[int | str], tuple[int | str, ...]]:
    """Return the arguments of an operation that it only writes, and all arguments that it writes.

    Both are positions of positional arguments, or names of keyword arguments. `name` is without overload, as "copy_".
    """
    changed = [
        (argument.name if argument.kwarg_only else i, argument.kwarg_only)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in NOT_CHANGED
    ]
    write_only = frozenset(key for key, out in changed if out or name in FILLS)
    return write_only, tuple(key for key, _ in changed)


def cost_of(operation: Operation) -> OperationCost:
    """Return the cost of one launch of an operation: one kernel, with its FLOPs and bytes."""
    return OperationCost(1, operation.flops, operation.read, operation.written)


def local_tensors(x: Any) -> Iterator[Tensor]:
    """Yield the local tensors inside a tensor, DTensor, asynchronous collective result, or list of these; else none."""
    if isinstance(x, Tensor):
        while type(x) not in PLAIN:
            inner = getattr(x, "_local_tensor", None)
            inner = getattr(x, "elem", None) if inner is None else inner
            if inner is None:
                break
            x = inner
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from local_tensors(item)


def stored_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's stored elements: an expanded dimension counts once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def flops(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of an operation by the shapes of its arguments and result, which may be fake.

    Matmuls, the experts' products, torch's attention and what else torch's FLOP counter knows count; others are 0.
    """
    packet = func._overloadpacket
    name, count = packet.__name__, flop_registry.get(packet)
    if name == "_grouped_mm":
        x, w = args[:2]
        wide = w.shape[2] if w.dim() == 3 else w.shape[1]
        return 2 * x.shape[0] * x.shape[1] * wide
    if name == "add_gradient":
        _, grad, x = args[:3]
        return 2 * grad.shape[0] * grad.shape[1] * x.shape[1]
    if count is None:
        return 0
    if name.startswith("_scaled_dot_product"):  # torch 2.11's own count refuses heads that share keys
        backward = name.endswith("_backward")
        q, k, v = args[backward : backward + 3]
        wide = 3 * q.shape[3] + 2 * v.shape[3] if backward else q.shape[3] + v.shape[3]
        return 2 * q.shape[:3].numel() * k.shape[2] * wide
    return count(*args, **kwargs, out_val=out)
