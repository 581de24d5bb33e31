"""Who is told of a message, and when."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titanmoe.comm import listener


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def issued(self, op: int, x: Tensor, group: str) -> None:
        self.heard.append((op, group))

    def waits(self, group: str) -> None:
        self.heard.append("waits")

    def arrived(self) -> None:
        self.heard.append("arrived")

    def step_position(self) -> int:
        return 7

    def backward_of(self, step_position: int) -> None:
        self.heard.append(step_position)


def send(x: Tensor) -> Tensor:
    listener.issued(listener.ALL_REDUCE, x, "tp")
    listener.waits("tp")
    listener.arrived()
    listener.backward_of(listener.step_position())
    return x + listener.step_position()


def test_messages_of_a_graph_are_not_heard() -> None:
    compiled: Callable[[Tensor], Tensor] = torch.compile(send, backend="eager", fullgraph=True)
    x, told = torch.zeros(2), Listener()
    with listener.heard_by(told, compiled=True):
        assert compiled(x).tolist() == [0, 0] and told.heard == []
        assert send(x).tolist() == [7, 7]
    assert told.heard == [(listener.ALL_REDUCE, "tp"), "waits", "arrived", 7]
    assert send(x).tolist() == [0, 0] and len(told.heard) == 4, "nobody listens any more"
