"""Writes into the heartbeat when the step enters a phase, a microbatch or a layer, and when it sends a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.pipelining import schedules

from titanmoe.comm.listener import ALL_GATHER, ALL_REDUCE, RECEIVE, REDUCE_SCATTER, SEND, Name, heard_by
from titanmoe.fold.degrees import Fold
from titanmoe.fold.groups import axes_of
from titanmoe.fold.meshes import Lanes
from titanmoe.models.transformer import Transformer
from titanmoe.replace import replaced
from titanmoe.watch.heartbeat import BEFORE, BEGUN, BETWEEN, FIRST, PHASES, STEP, Heartbeat, pack_position
from titanmoe.watch.step_times import HostMarks, StepTimes

AFTER = {
    "other": PHASES.index("data"),
    "data": PHASES.index("forward and backward"),
    "forward_backward": PHASES.index("norm and update"),
}
"""By the lap of the step's clock that has just ended: the phase that begins."""
COLLECTIVES = {
    "all_gather_into_tensor": (ALL_GATHER, 1),
    "all_gather_single": (ALL_GATHER, 1),
    "reduce_scatter_tensor": (REDUCE_SCATTER, 1),
    "reduce_scatter_single": (REDUCE_SCATTER, 1),
    "all_reduce": (ALL_REDUCE, 0),
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
        made = [(i, group) for i, group in enumerate(lanes.made.values()) if group is not None]
        self.groups = {key: i for i, group in made for key in (group, group.group_name)}
        self.microbatch = -1
        self.record = self.issued = heart.writer(self.groups)
        if times is not None and not isinstance(times.marks, HostMarks):
            self.issued = self._issued_on_stream
        self.waits, self.arrived, self.step_position, self.backward_of = self._functions()

    def _functions(self) -> tuple[Callable[..., Any], ...]:
        """The others of titanmoe.comm.listener.MessageListener, called as often as `issued`."""
        heart, groups = self.heart, self.groups
        times = self.times or StepTimes((), HostMarks())  # which measures nothing
        mark = times.mark

        def waits(group: Name) -> None:
            heart.since = 0
            if heart.measured and group in groups:
                heart.group, heart.since = group, mark()

        def arrived() -> None:
            if heart.since:
                times.spans.append((groups[heart.group], heart.since, mark()))
            heart.since = None

        def step_position() -> int:
            return heart.step_position

        def backward_of(step_position: int) -> None:
            heart.step_position = step_position | 1

        return waits, arrived, step_position, backward_of

    def _issued_on_stream(self, op: int, x: Tensor, group: Name) -> None:
        self.record(op, x, group)
        self.heart.since = self.times.mark() if self.heart.measured else 0

    # ---- the rest

    def waited(self) -> None:
        """For a message that may still be under way, as only its stream waits for it."""
        if self.times is not None and self.heart.since:
            self.times.waited(self.groups[self.heart.group], self.heart.since)

    def lap(self, name: str) -> None:
        """A lap of the step's clock has ended."""
        heart = self.heart
        heart.numbers[STEP] = self.step()
        if name == "other":
            heart.numbers[FIRST] = heart.numbers[FIRST] or heart.numbers[STEP]
            heart.numbers[BEFORE], heart.numbers[BEGUN] = heart.numbers[BEGUN], heart.total
            self.microbatch = -1
        heart.step_position = 0
        if self.times is not None:
            self.times.lap(name, heart.numbers[STEP])
            heart.measured = self.times.step > 0
        heart.enter_phase(AFTER.get(name, BETWEEN))

    @contextmanager
    def on(self, parts: list[Transformer], clock: Any, compiled: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            for part in parts:
                stack.callback(part.register_forward_pre_hook(self._begins).remove)
                for number, block in part.blocks().items():
                    for norm in (block.attention_norm, block.ffn_norm):
                        stack.enter_context(replaced(norm, "forward", self._enters(number, norm.forward)))
            for name, (op, sent) in COLLECTIVES.items():
                if hasattr(dist, name):
                    stack.enter_context(replaced(dist, name, self._heard(getattr(dist, name), op, sent)))
            stack.enter_context(replaced(schedules, "_batch_p2p", self._batch(schedules._batch_p2p)))
            stack.enter_context(replaced(clock, "listener", self.lap))
            stack.enter_context(heard_by(self, compiled))
            yield

    def _begins(self, module: nn.Module, args: Any) -> None:
        self.microbatch = self.microbatch + 1 & 0x7FFF
        self.heart.step_position = pack_position(self.microbatch, -1, False)

    def _enters(self, number: int, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The forward of a norm, not of a block: it also runs when a block is recomputed, and is never in a compiled
        graph. A hook would cost more: it takes the long way through torch's call of a module.
        """
        heart, layer = self.heart, pack_position(0, number, False)

        def entering(x: Tensor) -> Tensor:
            heart.step_position = heart.step_position & ~0x1FFFE | layer
            return forward(x)

        return entering

    def _heard(self, function: Callable[..., Any], op: int, sent: int) -> Callable[..., Any]:
        groups = self.groups

        @wraps(function)
        def heard(*args: Any, **kwargs: Any) -> Any:
            group, x = kwargs.get("group"), kwargs.get("input")
            if x is None:
                x = args[sent] if len(args) > sent else kwargs.get("input_tensor", kwargs.get("tensor"))
            # The saving thread's groups are others.
            if group not in groups or not isinstance(x, Tensor) or is_dynamo_compiling():
                return function(*args, **kwargs)
            self.issued(op, x, group)
            try:
                return function(*args, **kwargs)
            finally:
                self.waited()

        return heard

    def _batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The pipeline's sends and receives. torch 2.13 calls batch_isend_irecv only if both are among them."""

        @wraps(function)
        def heard(ops: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
            for one in ops:
                op = RECEIVE if one.op is dist.irecv else SEND
                self.record(op, one.tensor, one.group, one.group_peer)
            works = function(ops, *args, **kwargs)
            return [_Heard(work, ops[0].group, self) for work in works]

        return heard


class _Heard:
    """A send or receive under way."""

    def __init__(self, work: dist.Work, group: dist.ProcessGroup, listener: HeartbeatListener):
        self.work, self.group, self.listener = work, group, listener

    def wait(self, *args: Any) -> Any:
        self.listener.waits(self.group)
        try:
            return self.work.wait(*args)
        finally:
            self.listener.waited()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)
