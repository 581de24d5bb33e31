"""The recorder of a rehearsal: messages, operations, memory and host syncs of a step on fake tensors.

It is a dispatch mode: torch calls it for every operation. It also follows the integers that decide shapes
(`known_integers`), and takes the shapes of results from a cache (`shape_cache`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as disable_modes

from titanmoe.rehearse import known_integers, stand_ins
from titanmoe.rehearse.assumed_routing import IntegerMessages
from titanmoe.rehearse.memory_over_step import Ledger
from titanmoe.rehearse.message_recorder import Log, Message, Recorder
from titanmoe.rehearse.operation_costs import Operations
from titanmoe.rehearse.shape_cache import Shapes


class _Dispatching(threading.local):
    """The MoE dispatch that a thread is in or was in last: layer, microbatch and half; -1 before the first."""

    microbatch = layer = -1
    exchange: IntegerMessages | None = None
    integer_messages = 0  # received in this layer and microbatch
    half = -1  # the index of the micro-half, if a microbatch is dispatched in two

    def begin(self, layer: int, microbatch: int, halves: int) -> None:
        """Note that a router starts on a microbatch, or on the second half of the one that it started before.

        A call after the last half begins the microbatch anew, as recomputation does.

        Args:
            layer: The index of the block.
            microbatch: The index of the microbatch.
            halves: 2 if moe.overlap is "halves", else 1.
        """
        goes_on = (layer, microbatch) == (self.layer, self.microbatch) and self.half + 1 < halves
        self.half = self.half + 1 if goes_on else 0
        self.layer, self.microbatch = layer, microbatch
        if not goes_on:
            self.integer_messages = 0


class FakeRecorder(Recorder):
    """A recorder that runs all operations on fake tensors, and also records memory, cost and host syncs."""

    def __init__(self, layers: dict[int, str], rank: int, on_gpu: bool, fake: FakeTensorMode):
        """Prepare a recorder.

        Args:
            layers: The names of blocks by the id of their module; the caller may add to them later.
            on_gpu: Whether FSDP communicates on streams of its own.
        """
        super().__init__(layers, on_gpu)
        self.rank, self.dispatching, self.shapes = rank, _Dispatching(), Shapes(fake)
        self.operations = Operations()
        self.ledger = Ledger(self.sites.current_site)
        self.start_up: list[Message] = []

    def begin_step(self) -> None:
        """Discard the messages, operations and memory record of the step before, and begin those of a new step.

        Storages that are alive count from its start. `start_up` stays.
        """
        self.log, self.operations = Log(), Operations()
        self.ledger.begin_step()

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        with self.ledger.recording(), super().recording():
            yield self

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "profiler":
            with disable_modes():
                return func(*args, **kwargs)
        if name == "equal":  # a test of symmetric memory compares what arrived
            self.sync()
            return True
        if name == "_local_scalar_dense":
            value = self.read_value(args[0])
            return value if not isinstance(value, list) else value[0]
        out = stand_ins.grouped_product(*args, **kwargs) if name == "_grouped_mm" else self.shapes(func, args, kwargs)
        known_integers.track(func, args, kwargs, out)
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

    def integer_values(self, x: Tensor) -> Tensor:
        return known_integers.known_values(x)

    def read_attribute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # By far the most frequent one, and slow on fake tensors.
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        return func(*args, **kwargs)

    def read_value(self, x: Tensor) -> Any:
        """Return what `x.tolist()` would, a list or a number, and record that the host waits for the device.

        Unknown floating-point values are read as zeros, which pass for a finite loss or an unset flag.

        Raises:
            RuntimeError: The values are integers and unknown.
        """
        self.sync()
        value = known_integers.known_list(x)
        if value is not None:
            return value
        if not x.dtype.is_floating_point:
            raise RuntimeError(
                f"the host reads integers of shape {tuple(x.shape)}, whose values are unknown in a rehearsal"
            )
        with disable_modes():
            return torch.zeros(x.shape).tolist()

    def after_message(self, func: Any, args: tuple, out: Any) -> None:
        name, site = func._overloadpacket.__name__, self.sites.current_site()
        self.ledger.note(out, site)
        if func.namespace == "titanmoe":  # an exchange copies out of the receive buffer
            self.operations.add(func, args, {}, out, site)
        if name == "_reduce_scatter_base_" and not self.on_gpu:
            # gloo sums all that is sent, in a copy, and takes this rank's shard of it.
            self.ledger.note(torch.empty_like(args[1]), site)
        if name == "recv_" and not (x := args[0][0]).dtype.is_floating_point:
            # Pipeline stages send each other ones to say that shapes are known.
            with disable_modes():
                known_integers.set_known(x, torch.ones(x.shape, dtype=x.dtype))
        if not isinstance(out, FakeTensor) or out.dtype.is_floating_point:
            return
        if name == "wait_tensor":
            if (value := known_integers.known_values(args[0])) is not None:
                known_integers.set_known(out, value)
        elif self.dispatching.exchange is not None and self.sites.is_in_region("dispatch"):
            with disable_modes():
                current = self.dispatching
                value = current.exchange.received_integers(
                    self.rank, current.microbatch, current.layer, current.integer_messages
                )
            known_integers.set_known(out, value)
            self.dispatching.integer_messages += 1
