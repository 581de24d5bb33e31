"""What operations cost: kernels launched, FLOPs, bytes read and written.

Every operation that computes counts as one kernel; views, empty tensors and copies that copy nothing count as none. It
reads each tensor that enters it once and writes each that comes out once; an expanded tensor is read as often as it
lies in memory, and an operation that picks rows reads as many as it gives. Products count two FLOPs for each pair of
numbers, as torch's own counter has it; what is element by element counts none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

NOTHING = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "_unsafe_view")
)
PICKS = frozenset(("embedding", "index_select", "gather", "index", "fetch_rows"))


@dataclass
class Work:
    kernels: int = 0
    flops: int = 0
    read: int = 0
    written: int = 0

    def add(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        name = func._overloadpacket.__name__
        if func.is_view or name in NOTHING:
            return
        enters = list(tensors((args, tuple(kwargs.values()))))
        comes = list(tensors(out)) or enters[:1]  # in place, and nothing given back
        self.kernels += 1
        written = sum(map(weight, comes))
        if name in PICKS:
            enters[0] = comes[0]
        self.read += sum(map(weight, enters))
        self.written += written
        self.flops += flops(func, args, kwargs, out)


def tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
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
