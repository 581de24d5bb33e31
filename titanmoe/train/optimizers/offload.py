"""An optimizer's moments in host memory, copied to the device for the update, a few parameters at a time.

While the parameters of one bucket are updated, the moments of the next are copied in and those of the one before are
copied out: the device has room for three buckets, used in rotation. The operations are those of an optimizer that
keeps its moments on the device, on the same numbers, so every result is equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TURN = 1 << 26
"""Bytes of all moments, unless a single parameter has more. Page-locked memory comes in powers of two."""
BUFFERS = 3
ALIGNED = 256
"""Bytes: every tensor begins at a multiple of them."""

Moments = tuple[Tensor, ...]


class Copies:
    """Copies on CPUs, where a copy is done when the call returns."""

    page_locked = False

    def copy(self, to: str, target: Tensor, source: Tensor, *after: Any) -> Any:
        """Copies after the events in `after`; returns the event of its own end. to: "device" or "host"."""
        target.copy_(source)

    def mark(self) -> Any:
        """The event that ends everything the device was given so far."""

    def hold(self, event: Any) -> None:
        """Make the device wait for the event."""

    def wait(self, event: Any) -> None:
        """Make the host wait for it."""


class CudaCopies(Copies):
    page_locked = True

    def __init__(self, device: torch.device):
        self.streams = {to: torch.cuda.Stream(device) for to in ("device", "host")}

    def copy(self, to: str, target: Tensor, source: Tensor, *after: Any) -> Any:
        stream = self.streams[to]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def mark(self) -> Any:
        return torch.cuda.current_stream().record_event()

    def hold(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()


@dataclass
class Bucket:
    like: dict[str, Tensor]
    """Tensors without memory, of the shape and dtype of each parameter's moments."""
    count: int
    """Of moments of a parameter."""
    host: Tensor
    """Bytes."""
    copied_out: Any = None
    """The event that ends their last copy to the host."""

    def unpack(self, every: Tensor) -> dict[str, Moments]:
        out, begin = {}, 0
        for name, like in self.like.items():
            end = begin + like.nbytes
            out[name] = tuple(x[begin:end].view(like.dtype).view(like.shape) for x in every.view(self.count, -1))
            begin += _aligned(like.nbytes)
        return out


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Offload:
    def __init__(
        self,
        local_shards: dict[str, nn.Parameter],
        copies: Copies | None = None,
        count: int = 2,
        dtype: torch.dtype | None = None,
        together: Iterable[Iterable[str]] | None = None,
    ):
        """local_shards: this rank's shard of every weight. count: moments of each. dtype: theirs, if not that of the
        weight. together: names for each bucket, if it is not for this class to choose."""
        first = next(iter(local_shards.values()))
        self.copies = copies or (CudaCopies(first.device) if first.device.type == "cuda" else Copies())
        like = {name: torch.empty_like(x, dtype=dtype, device="meta") for name, x in local_shards.items()}
        groups = self._turns(like, count) if together is None else together
        self.buckets = [self._bucket({name: like[name] for name in names}, count) for names in groups]
        most = max(bucket.host.nbytes for bucket in self.buckets)
        self.buffers = [first.new_empty(most, dtype=torch.uint8) for _ in range(min(BUFFERS, len(self.buckets)))]
        """Where moments are on the device."""
        self.free: list[Any] = [None] * len(self.buffers)
        """The event after which each buffer may be overwritten."""

    @staticmethod
    def _turns(like: dict[str, Tensor], count: int) -> Iterator[list[str]]:
        """Names whose moments have TURN bytes, or a single one."""
        names: list[str] = []
        for name in like:
            if names and count * _size(like[n] for n in (*names, name)) > TURN:
                yield names
                names = []
            names = [*names, name]
        yield names

    def _bucket(self, like: dict[str, Tensor], count: int) -> Bucket:
        where = {"device": "cpu", "pin_memory": self.copies.page_locked}
        return Bucket(like, count, torch.zeros(count * _size(like.values()), dtype=torch.uint8, **where))

    def moments(self) -> dict[str, Moments]:
        """On the host, once every copy to it is done."""
        for bucket in self.buckets:
            if bucket.copied_out is not None:
                self.copies.wait(bucket.copied_out)
        return {name: every for bucket in self.buckets for name, every in bucket.unpack(bucket.host).items()}

    def visits(self) -> Iterator[dict[str, Moments]]:
        """The moments of each bucket on the device, to be updated before the next are asked for."""
        arrived = self._fetch(0)
        for number, bucket in enumerate(self.buckets):
            here = arrived
            if number + 1 < len(self.buckets):
                arrived = self._fetch(number + 1)
            self.copies.hold(here)
            slot = number % len(self.buffers)
            every = self.buffers[slot][: bucket.host.nbytes]
            yield bucket.unpack(every)
            self.free[slot] = bucket.copied_out = self.copies.copy("host", bucket.host, every, self.copies.mark())

    def _fetch(self, number: int) -> Any:
        bucket, slot = self.buckets[number], number % len(self.buffers)
        target, after = self.buffers[slot][: bucket.host.nbytes], (bucket.copied_out, self.free[slot])
        return self.copies.copy("device", target, bucket.host, *after)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(x.nbytes) for x in tensors)
