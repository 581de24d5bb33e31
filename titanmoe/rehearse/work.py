"""What operations cost: kernels launched, FLOPs, bytes read and written.

Every operation that computes counts as one kernel; views, empty tensors and questions count as none. It reads each
tensor that enters it once and writes each that comes out or is changed once; an expanded tensor is read as often as it
lies in memory, an operation that picks rows reads as many as it gives, and what is only filled or copied to is not
read. Products count two FLOPs for each pair of numbers, as torch's own counter has it; what is element by element
counts none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from titanmoe.rehearse.place import Place

PLAIN = (FakeTensor, Tensor)
NOTHING = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "_unsafe_view")
)
PICKS = frozenset(("embedding", "index_select", "gather", "index", "fetch_rows"))
FILLS = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
NOT_CHANGED = frozenset(("grads",))
"""Of the fused optimizer, which only a gradient scaler lets it change."""


@dataclass
class Work:
    kernels: int = 0
    flops: int = 0
    read: int = 0
    written: int = 0

    def __iadd__(self, other: Work) -> Work:
        self.kernels += other.kernels
        self.flops += other.flops
        self.read += other.read
        self.written += other.written
        return self

    def __mul__(self, count: int) -> Work:
        return Work(self.kernels * count, self.flops * count, self.read * count, self.written * count)

    @property
    def moved(self) -> int:
        return self.read + self.written


class Operation(NamedTuple):
    """What one launch does, and where it stands."""

    name: str
    place: Place
    flops: int
    read: int
    written: int


class Operations(Counter[Operation]):
    """How often a step does each."""

    def add(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, place: Place) -> None:
        name = func._overloadpacket.__name__
        if func.is_view or name in NOTHING:
            return
        only, changed = _changes(func, name)
        given = dict(enumerate(args)) | kwargs
        enters = [x for key, one in given.items() if key not in only for x in tensors(one)]
        # Where something is changed, that is what comes out.
        comes = list(tensors([given[key] for key in changed if key in given] if changed else out))
        if not comes:  # a question, such as which dtype two others make
            return
        written = sum(map(weight, comes))
        if name in PICKS:
            enters[0] = comes[0]
        self[Operation(name, place, flops(func, args, kwargs, out), sum(map(weight, enters)), written)] += 1

    def by(self, what: str) -> dict[str, Work]:
        """Added up by a field of their places."""
        found: dict[str, Work] = {}
        for one, count in self.items():
            found.setdefault(getattr(one.place, what), Work()).__iadd__(work_of(one) * count)
        return found

    def total(self) -> Work:
        found = Work()
        for one, count in self.items():
            found += work_of(one) * count
        return found


@cache
def _changes(func: Any, name: str) -> tuple[frozenset[int | str], tuple[int | str, ...]]:
    """Which arguments an operation only writes, and which it writes: by place, or by name where they go by it."""
    changed = [
        (argument.name if argument.kwarg_only else i, argument.kwarg_only)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in NOT_CHANGED
    ]
    only = frozenset(key for key, out in changed if out or name in FILLS)
    return only, tuple(key for key, _ in changed)


def work_of(one: Operation) -> Work:
    return Work(1, one.flops, one.read, one.written)


def tensors(x: Any) -> Iterator[Tensor]:
    """This rank's, of what may be pieces of a whole or still under way."""
    if isinstance(x, Tensor):
        while type(x) not in PLAIN:
            inner = getattr(x, "_local_tensor", None)
            inner = getattr(x, "elem", None) if inner is None else inner
            if inner is None:
                break
            x = inner
        yield x
    elif isinstance(x, list | tuple):
        for one in x:
            yield from tensors(one)


def weight(x: Tensor) -> int:
    """Bytes that it lies in."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def flops(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    if packet.__name__ == "_grouped_mm":
        x, w = args[:2]
        wide = w.shape[2] if w.dim() == 3 else w.shape[1]
        return 2 * x.shape[0] * x.shape[1] * wide
    count = flop_registry.get(packet)
    return 0 if count is None else count(*args, **kwargs, out_val=out)
