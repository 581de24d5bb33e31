"""Records a step on fake tensors: the integers that decide shapes, operations, memory, and host syncs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as outside

from titanmoe.rehearse import known_integers, stand_ins
from titanmoe.rehearse.assumed_routing import IntegerMessages
from titanmoe.rehearse.memory_over_step import Ledger
from titanmoe.rehearse.message_recorder import Log, Message, Recorder
from titanmoe.rehearse.operation_costs import Operations
from titanmoe.rehearse.shape_cache import Shapes


class _Dispatching(threading.local):
    """What the thread's dispatcher is working on."""

    microbatch = layer = -1
    exchange: IntegerMessages | None = None
    integer_messages = 0  # received in this layer and microbatch
    part = -1  # of the microbatch, where it is sent in several

    def begin(self, layer: int, microbatch: int, parts: int) -> None:
        """The router has a part of a microbatch: the first, or the one that follows it in the same layer."""
        goes_on = (layer, microbatch) == (self.layer, self.microbatch) and self.part + 1 < parts
        self.part = self.part + 1 if goes_on else 0
        self.layer, self.microbatch = layer, microbatch
        if not goes_on:
            self.integer_messages = 0


class FakeRecorder(Recorder):
    """Records a step on fake tensors: tracks the integers that decide shapes, and where the host reads a value."""

    def __init__(self, layers: dict[int, str], rank: int, on_gpu: bool, fake: FakeTensorMode):
        super().__init__(layers, on_gpu)
        self.rank, self.dispatching, self.shapes = rank, _Dispatching(), Shapes(fake)
        self.operations = Operations()
        self.ledger = Ledger(self.sites.current_site)
        self.start_up: list[Message] = []

    def begin_step(self) -> None:
        """Starts a new record."""
        self.log, self.operations = Log(), Operations()
        self.ledger.begin_step()

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        with self.ledger.recording(), super().recording():
            yield self

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "profiler":
            with outside():
                return func(*args, **kwargs)
        if name == "equal":  # rows that came through symmetric memory are compared
            self.sync()
            return True
        if name == "_local_scalar_dense":
            value = self.number(args[0])
            return value if not isinstance(value, list) else value[0]
        out = stand_ins.grouped_product(*args, **kwargs) if name == "_grouped_mm" else self.shapes(func, args, kwargs)
        known_integers.follow(func, args, kwargs, out)
        if not func.is_view:
            site = self.sites.current_site()
            self.operations.add(func, args, kwargs, out, site)
            self.ledger.note(out, site)
        return out

    def run_message(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # torch's fake implementation of the wait would allocate a copy.
        if func._overloadpacket.__name__ == "wait_tensor":
            return args[0]
        return self.shapes(func, args, kwargs)

    def whole_numbers(self, x: Tensor) -> Tensor:
        return known_integers.known_values(x)

    def query(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # By far the most frequent query, and slow on fake tensors.
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        return func(*args, **kwargs)

    def number(self, x: Tensor) -> Any:
        """What the host reads: the value if it is known, otherwise 0, for a finite loss or a flag that is not set."""
        self.sync()
        value = known_integers.numbers(x)
        if value is not None:
            return value
        if not x.dtype.is_floating_point:
            raise RuntimeError(
                f"the host reads integers of shape {tuple(x.shape)}, whose values are unknown in a rehearsal"
            )
        with outside():
            return torch.zeros(x.shape).tolist()

    def agree_on_shapes(self, x: Tensor) -> None:
        """Before the first step stages ask each other whether they know their shapes: all of ours do."""
        if not x.dtype.is_floating_point:
            with outside():
                known_integers.set_known(x, torch.ones(x.shape, dtype=x.dtype))

    def after_message(self, func: Any, args: tuple, out: Any) -> None:
        site = self.sites.current_site()
        self.ledger.note(out, site)
        if func.namespace == "titanmoe":  # rows are copied out of the receive buffer
            self.operations.add(func, args, {}, out, site)
        if func._overloadpacket.__name__ == "_reduce_scatter_base_" and not self.on_gpu:
            # gloo sums all that is sent, in a copy, and takes this rank's shard of it.
            self.ledger.note(torch.empty_like(args[1]), site)
        if func._overloadpacket.__name__ == "recv_":
            self.agree_on_shapes(*args[0])
        if not isinstance(out, FakeTensor) or out.dtype.is_floating_point:
            return
        if func._overloadpacket.__name__ == "wait_tensor":
            if (value := known_integers.known_values(args[0])) is not None:
                known_integers.set_known(out, value)
        elif self.dispatching.exchange is not None and self.sites.in_region("dispatch"):
            with outside():
                current = self.dispatching
                value = current.exchange.received_integers(
                    self.rank, current.microbatch, current.layer, current.integer_messages
                )
            known_integers.set_known(out, value)
            self.dispatching.integer_messages += 1
