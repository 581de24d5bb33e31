"""Writes into the heartbeat when the step enters a phase, a microbatch or a layer, and when it sends a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from titanmoe.comm.listener import heard_by
from titanmoe.fold.degrees import Fold
from titanmoe.fold.groups import axes_of
from titanmoe.fold.meshes import Lanes
from titanmoe.models.transformer import Transformer
from titanmoe.replace import replaced
from titanmoe.watch.heartbeat import BEGUN, BETWEEN, FIRST, PHASES, STEP, TOTAL, Heartbeat, pack_position
from titanmoe.watch.step_times import StepTimes

AFTER = {"other": "data", "data": "forward and backward", "forward_backward": "norm and update"}
"""By the lap of the step's clock that has just ended: the phase that begins."""
COLLECTIVES = {
    "all_gather_into_tensor": ("all-gather", 1),
    "all_gather_single": ("all-gather", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "all_reduce": ("all-reduce", 0),
}
"""Functions of torch.distributed that FSDP calls (the name depends on torch's version) and our code does not: the op,
and the index of the argument that is sent."""


@dataclass(frozen=True)
class LaneGroups:
    """The groups of a lane over the same axes."""

    lane: str
    parts: tuple[tuple[int, ...], ...]
    """The ranks of each group."""
    axes: str

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group that this rank is in."""
        return next((part for part in self.parts if rank in part), ())


def name_groups(lanes: Lanes, fold: Fold) -> list[LaneGroups]:
    """The same list on every rank, because all make their groups in the same order."""
    return [LaneGroups(lane, parts, axes_of(fold, lane, parts[0])) for lane, parts in lanes.made]


class HeartbeatListener:
    """Tells the heartbeat, and `times` how long this rank waits. step: returns the number of the running step."""

    def __init__(self, heart: Heartbeat, lanes: Lanes, step: Callable[[], int], times: StepTimes | None = None):
        self.heart, self.step, self.times = heart, step, times
        self.groups = {group.group_name: i for i, group in enumerate(lanes.made.values()) if group is not None}
        self.microbatch = -1

    # ---- titanmoe.comm.listener.MessageListener

    @property
    def step_position(self) -> int:
        return self.heart.step_position

    def issued(self, op: str, x: Tensor, group: str) -> None:
        number = self.groups.get(group)
        if number is not None:
            self.heart.issued(op, x, number)

    def waits(self, group: str) -> None:
        if self.times is not None and (number := self.groups.get(group)) is not None:
            self.times.waits(number)

    def arrived(self) -> None:
        self.heart.arrived()
        self.waited()

    def backward_of(self, step_position: int) -> None:
        self.heart.step_position = step_position | 1

    # ---- the rest

    def waited(self) -> None:
        if self.times is not None:
            self.times.arrived()

    def lap(self, name: str) -> None:
        """A lap of the step's clock has ended."""
        heart = self.heart
        heart.numbers[STEP] = self.step()
        if name == "other":
            heart.numbers[FIRST] = heart.numbers[FIRST] or heart.numbers[STEP]
            heart.numbers[BEGUN] = heart.numbers[TOTAL]
            self.microbatch = -1
        heart.step_position = 0
        if self.times is not None:
            self.times.lap(name, heart.numbers[STEP])
        heart.enter_phase(PHASES.index(AFTER[name]) if name in AFTER else BETWEEN)

    @contextmanager
    def on(self, parts: list[Transformer], clock: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for part in parts:
                for handle in self._hooks(part):
                    stack.callback(handle.remove)
            for name, (op, sent) in COLLECTIVES.items():
                if hasattr(dist, name):
                    stack.enter_context(replaced(dist, name, self._heard(getattr(dist, name), op, sent)))
            stack.enter_context(replaced(schedules, "_batch_p2p", self._batch(schedules._batch_p2p)))
            stack.enter_context(replaced(clock, "listener", self.lap))
            stack.enter_context(heard_by(self))
            yield

    def _hooks(self, part: Transformer) -> Iterator[Any]:
        """On the norms, not the blocks: they also run when a block is recomputed, and are never in a compiled graph."""

        def begins(module: nn.Module, args: Any) -> None:
            self.microbatch = self.microbatch + 1 & 0x7FFF
            self.heart.step_position = pack_position(self.microbatch, -1, False)

        yield part.register_forward_pre_hook(begins)
        for number, block in part.blocks().items():
            layer = pack_position(0, number, False)

            def enters(module: nn.Module, args: Any, layer: int = layer) -> None:
                before = self.heart.step_position
                self.heart.step_position = before & ~0x1FFFE | layer

            yield block.attention_norm.register_forward_pre_hook(enters)
            yield block.ffn_norm.register_forward_pre_hook(enters)

    def _heard(self, function: Callable[..., Any], op: str, sent: int) -> Callable[..., Any]:
        names = ("input_tensor", "input", "tensor")

        @wraps(function)
        def heard(*args: Any, **kwargs: Any) -> Any:
            x = args[sent] if len(args) > sent else next((kwargs[name] for name in names if name in kwargs), None)
            group = kwargs.get("group")
            if not isinstance(x, Tensor) or group is None or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            self.issued(op, x, group.group_name)
            self.waits(group.group_name)
            try:
                return function(*args, **kwargs)
            finally:
                if group.group_name in self.groups:  # the saving thread's is not
                    self.waited()

        return heard

    def _batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The pipeline's sends and receives. torch 2.13 calls batch_isend_irecv only if both are among them."""

        @wraps(function)
        def heard(ops: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
            for one in ops:
                number = self.groups.get(one.group.group_name)
                if number is not None:
                    op = "receive" if one.op is dist.irecv else "send"
                    self.heart.issued(op, one.tensor, number, one.group_peer)
            works = function(ops, *args, **kwargs)
            return [_Heard(work, ops[0].group.group_name, self) for work in works]

        return heard


class _Heard:
    """A send or receive under way."""

    def __init__(self, work: dist.Work, group: str, listener: HeartbeatListener):
        self.work, self.group, self.listener = work, group, listener

    def wait(self, *args: Any) -> Any:
        self.listener.waits(self.group)
        try:
            return self.work.wait(*args)
        finally:
            self.listener.waited()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)
