"""AdamW's moments on the host: they visit the device for the update, a few parameters at a time.

While one turn's parameters are updated, the moments of the next come and those of the one before go home: there are
buffers for three turns on the device, used in rotation. The operations are those of an optimizer that has its moments
on the device, on the same numbers, so every result is equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TURN = 1 << 26
"""Bytes of both moments, unless a single parameter has more. Page-locked memory comes in powers of two."""
BUFFERS = 3
ALIGNED = 64
"""Numbers: every tensor begins at a multiple of them."""

Moments = tuple[Tensor, Tensor]


class Copies:
    """On CPUs: at once."""

    page_locked = False

    def copy(self, way: str, target: Tensor, source: Tensor, *after: Any) -> Any:
        """Once the events in `after` have passed; returns the event of its end. way: "there" or "home"."""
        target.copy_(source)

    def mark(self) -> Any:
        """The event that the device has done everything up to here."""

    def hold(self, event: Any) -> None:
        """The device goes no further before the event."""

    def wait(self, event: Any) -> None:
        """The host does not."""


class CudaCopies(Copies):
    page_locked = True

    def __init__(self, device: torch.device):
        self.streams = {way: torch.cuda.Stream(device) for way in ("there", "home")}

    def copy(self, way: str, target: Tensor, source: Tensor, *after: Any) -> Any:
        stream = self.streams[way]
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
class Turn:
    shapes: dict[str, torch.Size]
    numbers: int
    """Of one moment, with what aligns the tensors."""
    host: Tensor
    home: Any = None
    """The event that the moments are back."""

    def cut(self, both: Tensor) -> dict[str, Moments]:
        out, begin = {}, 0
        for name, shape in self.shapes.items():
            mean, square = (x[begin : begin + shape.numel()].view(shape) for x in both.view(2, -1))
            out[name] = mean, square
            begin += _aligned(shape.numel())
        return out


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED


class Offload:
    def __init__(self, pieces: dict[str, nn.Parameter], copies: Copies | None = None):
        """pieces: this rank's part of every weight, in one dtype."""
        first = next(iter(pieces.values()))
        self.copies = copies or (CudaCopies(first.device) if first.device.type == "cuda" else Copies())
        self.turns: list[Turn] = []
        shapes: dict[str, torch.Size] = {}
        for name, part in pieces.items():
            if shapes and _size((*shapes.values(), part.shape)) * 2 * first.element_size() > TURN:
                self._add(shapes, first)
                shapes = {}
            shapes[name] = part.shape
        self._add(shapes, first)
        most = max(turn.numbers for turn in self.turns)
        self.buffers = [first.new_empty(2 * most) for _ in range(min(BUFFERS, len(self.turns)))]
        """Where moments are on the device."""
        self.free: list[Any] = [None] * len(self.buffers)
        """The events that the last turn of each buffer is home."""

    def _add(self, shapes: dict[str, torch.Size], like: Tensor) -> None:
        numbers = _size(shapes.values())
        host = like.new_zeros(2 * numbers, device="cpu", pin_memory=self.copies.page_locked)
        self.turns.append(Turn(shapes, numbers, host))

    def moments(self) -> dict[str, Moments]:
        """On the host, when they are all back."""
        for turn in self.turns:
            if turn.home is not None:
                self.copies.wait(turn.home)
        return {name: both for turn in self.turns for name, both in turn.cut(turn.host).items()}

    def visits(self) -> Iterator[dict[str, Moments]]:
        """The moments of each turn on the device, to be updated before the next are asked for."""
        arrived = self._fetch(0)
        for number, turn in enumerate(self.turns):
            here = arrived
            if number + 1 < len(self.turns):
                arrived = self._fetch(number + 1)
            self.copies.hold(here)
            slot = number % len(self.buffers)
            both = self.buffers[slot][: 2 * turn.numbers]
            yield turn.cut(both)
            self.free[slot] = turn.home = self.copies.copy("home", turn.host, both, self.copies.mark())

    def _fetch(self, number: int) -> Any:
        turn, slot = self.turns[number], number % len(self.buffers)
        return self.copies.copy("there", self.buffers[slot][: 2 * turn.numbers], turn.host, turn.home, self.free[slot])


def _size(shapes: Any) -> int:
    return sum(_aligned(shape.numel()) for shape in shapes)
