"""Writes into the heartbeat where the step is."""

from __future__ import annotations

import time

from titanmoe.observe import Observer
from titanmoe.watch.heartbeat import BEFORE, BEGUN, BETWEEN, FIRST, PHASE_NAMES, STEP, Heartbeat, Position

NAME_OF = {"data": "data", "forward_backward": "forward and backward", "optimizer": "norm and update"}


class HeartbeatListener(Observer):
    def __init__(self, heart: Heartbeat):
        self.heart, self.position = heart, Position()

    def phase(self, name: str, step: int) -> None:
        numbers = self.heart.numbers
        numbers[STEP] = step
        if name == "data":
            numbers[FIRST] = numbers[FIRST] or step
            numbers[BEFORE], numbers[BEGUN] = numbers[BEGUN], time.time_ns()
        self.heart.enter_phase(PHASE_NAMES.index(NAME_OF[name]) if name in NAME_OF else BETWEEN)

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        self.position = Position(stage, number, -1, backward)
        self.heart.enter(self.position)

    def layer(self, number: int) -> None:
        self.position = self.position._replace(layer=number)
        self.heart.enter(self.position)
