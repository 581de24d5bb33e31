"""Optimizer moments in host memory, copied to the device for the update one bucket of parameters at a time.

While one bucket is updated, the moments of the next are copied in and those of the one before are copied out; the
device has three buffers, used in rotation. The operations and numbers are those of an optimizer with its moments on the
device, so results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BUCKET_BYTES = 1 << 26
"""Largest number of bytes of a bucket's moments; a single parameter may have more. Page-locked memory is allocated in
powers of two."""
BUFFERS = 3
"""Largest number of buckets on the device at one time."""
ALIGNED = 256
"""Bytes to a multiple of which every tensor of a bucket is aligned."""

Moments = tuple[Tensor, ...]
"""Moments of one parameter."""
Event = torch.cuda.Event | None
"""Event of a CUDA stream; None on a machine without GPU."""


class Copies:
    """Copies between host and device on a machine without GPU: done when the call returns; all events are None."""

    page_locked = False
    """Whether host memory has to be page-locked for these copies."""

    def copy(self, to: str, target: Tensor, source: Tensor, *after: Event) -> Event:
        """Start to copy a tensor; return a CUDA event that is complete when the copy is done.

        Here the copy is done at once, `after` is ignored, and None is returned.

        Args:
            to: side that the copy goes to, "device" or "host".
            target: the tensor to write.
            source: the tensor to read.
            after: events that must be complete before the copy begins; None is ignored.
        """
        target.copy_(source)

    def mark(self) -> Event:
        """Return a CUDA event that is complete when the current stream has done all its work so far; here None."""

    def wait_on_device(self, event: Event) -> None:
        """Make later work on the current stream wait for the event; here do nothing. Never blocks the host."""

    def wait_on_host(self, event: Event) -> None:
        """Block this thread until the event is complete; here do nothing."""


class CudaCopies(Copies):
    """Asynchronous copies on two CUDA streams, one for each direction."""

    page_locked = True

    def __init__(self, device: torch.device):
        self.streams = {to: torch.cuda.Stream(device) for to in ("device", "host")}

    def copy(self, to: str, target: Tensor, source: Tensor, *after: Event) -> Event:
        stream = self.streams[to]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def mark(self) -> Event:
        return torch.cuda.current_stream().record_event()

    def wait_on_device(self, event: Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        event.synchronize()


@dataclass
class Bucket:
    """The moments of a few parameters in one buffer of host memory, copied to the device and back together."""

    templates: dict[str, Tensor]
    """Meta tensors with the shape and dtype of each parameter's moments."""
    count: int
    """Number of moments of each parameter."""
    host: Tensor
    """Bytes of all moments in host memory."""
    copied_out: Event = None
    """Event that ends the last copy to the host; None before the first."""

    def unpack(self, data: Tensor) -> dict[str, Moments]:
        """Return the moments of each parameter as views of the bucket's bytes, on the host or the device, by name."""
        out, begin = {}, 0
        for name, template in self.templates.items():
            end = begin + template.nbytes
            out[name] = tuple(x[begin:end].view(template.dtype).view(template.shape) for x in data.view(self.count, -1))
            begin += _align(template.nbytes)
        return out


def _align(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Offload:
    """Optimizer moments in host memory, in buckets of a few parameters that are copied to the device together."""

    def __init__(
        self,
        local_shards: dict[str, nn.Parameter],
        copies: Copies | None = None,
        count: int = 2,
        dtype: torch.dtype | None = None,
        bucket_names: Iterable[Iterable[str]] | None = None,
    ):
        """Allocate zeros for all moments in host memory, and the buffers on the device.

        Args:
            local_shards: this rank's shard of every weight, by name; at least one.
            copies: how to copy; None to choose by the device of the weights.
            count: number of moments of each weight.
            dtype: dtype of the moments; None for the dtype of each weight.
            bucket_names: names of the parameters of each bucket, in the order of visits; None for buckets of at most
                BUCKET_BYTES bytes, in the order of `local_shards`.
        """
        first = next(iter(local_shards.values()))
        self.copies = copies or (CudaCopies(first.device) if first.device.type == "cuda" else Copies())
        templates = {name: torch.empty_like(x, dtype=dtype, device="meta") for name, x in local_shards.items()}
        groups = self._group_names(templates, count) if bucket_names is None else bucket_names
        self.buckets: list[Bucket] = []
        where = {"device": "cpu", "pin_memory": self.copies.page_locked}
        for names in groups:
            some = {name: templates[name] for name in names}
            host = torch.zeros(count * _aligned_bytes(some.values()), dtype=torch.uint8, **where)
            self.buckets.append(Bucket(some, count, host))
        most = max(bucket.host.nbytes for bucket in self.buckets)
        self.buffers = [first.new_empty(most, dtype=torch.uint8) for _ in range(min(BUFFERS, len(self.buckets)))]
        """Buffers on the device, each large enough for the moments of any bucket."""
        self.free: list[Event] = [None] * len(self.buffers)
        """Event after which each buffer may be overwritten."""

    @staticmethod
    def _group_names(templates: dict[str, Tensor], count: int) -> Iterator[list[str]]:
        """Yield the names of the parameters of each bucket: at most BUCKET_BYTES bytes of moments, or one parameter.

        A parameter has `count` moments like its meta tensor in `templates`.
        """
        names: list[str] = []
        for name in templates:
            if names and count * _aligned_bytes(templates[n] for n in (*names, name)) > BUCKET_BYTES:
                yield names
                names = []
            names = [*names, name]
        yield names

    def moments(self) -> dict[str, Moments]:
        """Wait for all copies to the host; return the moments of each parameter in host memory, not copied, by name."""
        for bucket in self.buckets:
            if bucket.copied_out is not None:
                self.copies.wait_on_host(bucket.copied_out)
        return {name: every for bucket in self.buckets for name, every in bucket.unpack(bucket.host).items()}

    def visit_buckets(self) -> Iterator[dict[str, Moments]]:
        """Yield the moments of one bucket after another, on the device: a tuple of tensors by name of the parameter.

        The caller updates them in place before it asks for the next bucket; then they are copied to the host, without
        waiting. It has to go on until the iterator ends, or the last bucket is not copied.
        """
        arrived = self._fetch(0)
        for number, bucket in enumerate(self.buckets):
            copied_in = arrived
            if number + 1 < len(self.buckets):
                arrived = self._fetch(number + 1)
            self.copies.wait_on_device(copied_in)
            slot = number % len(self.buffers)
            every = self.buffers[slot][: bucket.host.nbytes]
            yield bucket.unpack(every)
            self.free[slot] = bucket.copied_out = self.copies.copy("host", bucket.host, every, self.copies.mark())

    def _fetch(self, number: int) -> Event:
        """Start to copy the moments of bucket `number` to a buffer on the device; return the event that ends it.

        The copy begins once this bucket, and the bucket that had the buffer before, are copied out to the host.
        """
        bucket, slot = self.buckets[number], number % len(self.buffers)
        target, after = self.buffers[slot][: bucket.host.nbytes], (bucket.copied_out, self.free[slot])
        return self.copies.copy("device", target, bucket.host, *after)


def _aligned_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_align(x.nbytes) for x in tensors)
