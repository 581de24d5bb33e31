"""What a rank sends, message by message: a mode that notes them, on fake tensors and on real ones.

A message is noted where it is issued and where its result is waited for. Its code line is that of the model which asks
for it; in backward, that of the forward whose gradients travel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch.cpu import Stream, current_stream
from torch.cpu import _default_cpu_stream as default_stream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import titanmoe

OURS = os.path.dirname(titanmoe.__file__) + os.sep
HERE = os.path.dirname(__file__) + os.sep
COMM = os.path.join(OURS, "comm") + os.sep
LAUNCH = os.path.join(OURS, "ops", "kernels", "launch.py")
"""Where every kernel is called."""
TORCH = os.path.dirname(torch.__file__) + os.sep
ASKED_BY = "_asked_by"
LAYERED = ("attend", "feed", "forward", "whole")
"""Methods of a block, one of which is on the way to whatever is done for it."""

# By the name of an operation. Functional ones name their group as text, the others hold it.
FUNCTIONAL = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
HELD = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}


class Line(NamedTuple):
    """Of the code, and the layer it works for ("" where it is of none)."""

    file: str
    number: int
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass
class Message:
    op: str
    group: str
    """torch's name of the process group."""
    dtype: torch.dtype
    sent: int
    """Bytes that enter."""
    received: int
    """Bytes that come out."""
    line: Line
    backward: bool
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of an all-to-all: rows to each rank of the group, and from each."""
    peer: int = -1
    """Of a send or receive: the other's place in the group."""
    batch: int = -1
    """Sends and receives of one batch have one number."""
    waited: str = "never"
    """"at once" where nothing is computed in between, else "later"."""


class Event(NamedTuple):
    """In the order of the host: "issue" or "wait" with the number of a message, "sync" with that of a line."""

    kind: str
    number: int


@dataclass
class Log:
    messages: list[Message] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    syncs: list[Line] = field(default_factory=list)
    """Where the host waits for the device."""
    beside: dict[Stream, list[int]] = field(default_factory=dict, repr=False)
    """What streams beside the computation's have waited for, and the computation has not."""


class Recorder(TorchDispatchMode):
    """layers: names of blocks, by their id. on_gpu: gathers and scatters of FSDP have streams of their own."""

    def __init__(self, layers: dict[int, str] | None = None, on_gpu: bool = False):
        super().__init__()
        self.log, self.layers, self.on_gpu = Log(), layers or {}, on_gpu
        self.work = 0
        """Operations that compute, so far."""
        self._works: dict[int, tuple[Any, int]] = {}  # by id of a work, which is kept so that no other gets its id
        self._results: dict[int, tuple[Any, int]] = {}  # by id of a tensor that is to be waited for
        self._issued_at: dict[int, int] = {}
        self._batch, self._batches = -1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would guard every call against a compiler, at a fifth of what it takes; nothing compiles here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("c10d", "_c10d_functional"):
            if func.namespace == "prim":
                return self.asked(func, args, kwargs)
            if not func.is_view:
                self.work += 1
            return self.compute(func, args, kwargs)
        name = func._overloadpacket.__name__
        if name == "wait_tensor":
            self.line()  # backward of what waits here may send
            self._wait(self._results.pop(id(args[0]), (None, -1))[1])
        out = self.send(func, args, kwargs)
        if name in FUNCTIONAL and func.namespace == "_c10d_functional":
            self._note(self._functional(FUNCTIONAL[name], args, out))
            self._results[id(out)] = out, len(self.log.messages) - 1
        elif name in HELD and func.namespace == "c10d":
            self._note(self._held(HELD[name], args))
            work = Work.unbox((out if isinstance(out, tuple | list) else [out])[-1])
            self._works[id(work)] = work, len(self.log.messages) - 1
        self.sent(func, args, out)
        return out

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation that is no message."""
        return func(*args, **kwargs)

    def send(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A message, or the wait for one."""
        return func(*args, **kwargs)

    def asked(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A question to a tensor, such as its device."""
        return func(*args, **kwargs)

    def sent(self, func: Any, args: tuple, out: Any) -> None:
        """A message has gone, or has been waited for."""

    def _functional(self, op: str, args: tuple, out: Tensor) -> Message:
        group = next(x for x in reversed(args) if isinstance(x, str))
        splits = (tuple(args[2]), tuple(args[1])) if op == "all-to-all" else None
        return self._message(op, group, args[0], out, splits)

    def _held(self, op: str, args: tuple) -> Message:
        boxed = [x for x in args if isinstance(x, torch.ScriptObject)]
        group = ProcessGroup.unbox(boxed[0])
        splits, enters, comes = None, args[0], args[0]
        if op in ("all-gather", "reduce-scatter", "all-to-all"):
            comes, enters = args[0], args[1]
        if op == "all-to-all":
            even = [enters.shape[0] // group.size()] * group.size()
            splits = tuple(args[4]) or tuple(even), tuple(args[3]) or tuple(even)
        if op == "barrier":
            enters = comes = torch.empty(0, dtype=torch.uint8, device="meta")
        return self._message(op, group.group_name, enters, comes, splits, args[2] if op in ("send", "receive") else -1)

    def _message(self, op: str, group: str, enters: Any, comes: Any, splits: Any, peer: int = -1) -> Message:
        enters, comes = ([x for x in tree_leaves(given) if isinstance(x, Tensor)] for given in (enters, comes))
        sent, received = (sum(x.numel() * x.element_size() for x in given) for given in (enters, comes))
        if op in ("send", "receive"):
            sent, received = (sent, 0) if op == "send" else (0, received)
        line, backward = self.line()
        return Message(op, group, enters[0].dtype, sent, received, line, backward, splits, peer, self._batch)

    def _note(self, message: Message) -> None:
        number = len(self.log.messages)
        self.log.messages.append(message)
        self.log.events.append(Event("issue", number))
        self._issued_at[number] = self.work

    def _wait(self, number: int) -> None:
        if number < 0 or self.log.messages[number].waited != "never":
            return
        if self.on_gpu and (stream := current_stream()) is not default_stream:
            self.log.beside.setdefault(stream, []).append(number)
            return
        at_once = self._issued_at[number] == self.work and self.log.events[-1] == Event("issue", number)
        self.log.messages[number].waited = "at once" if at_once else "later"
        self.log.events.append(Event("wait", number))

    def sync(self) -> None:
        """The host waits for the device."""
        self.log.syncs.append(self.line()[0])
        self.log.events.append(Event("sync", len(self.log.syncs) - 1))

    def line(self) -> tuple[Line, bool]:
        """Of the code that is at work, and whether that is backward."""
        asks, torch_asks, layer, backward = None, None, "", False
        functions = []  # of autograd, in their forward
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            if file.startswith(OURS) and not file.startswith(HERE):
                if code.co_name in ("forward", "backward") and "ctx" in code.co_varnames:
                    ctx = frame.f_locals["ctx"]
                    if code.co_name == "forward":
                        functions.append(ctx)
                    elif asks is None and hasattr(ctx, ASKED_BY):
                        return getattr(ctx, ASKED_BY), True
                elif asks is None and not file.startswith(COMM):
                    asks = file[len(OURS) :], frame.f_lineno
                if self.layers and not layer and code.co_name in LAYERED:
                    layer = self.layers.get(id(frame.f_locals.get("self")), "")
            elif file.startswith(TORCH):
                if code.co_name == "_engine_run_backward":
                    backward = True
                if "_fully_shard" in file and not layer and code.co_name in ("unshard", "post_backward"):
                    layer = getattr(frame.f_locals["self"], "_module_fqn", None) or ""
                if torch_asks is None and "distributed/pipelining" in file:
                    torch_asks = "torch/" + file[len(TORCH) :], frame.f_lineno
            frame = frame.f_back
        line = Line(*(asks or torch_asks or ("", 0)), layer)
        for ctx in functions:
            setattr(ctx, ASKED_BY, line)
        return line, backward

    # ---- what no dispatch shows

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        with ExitStack() as stack:
            for cls in (FakeWork, Work):
                stack.enter_context(mock.patch.object(cls, "wait", self._waiting(cls.wait)))
            stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", self._together(dist.batch_isend_irecv)))
            if self.on_gpu:
                for name in ("record_event", "wait_event", "wait_stream"):
                    stack.enter_context(mock.patch.object(Stream, name, self._streams(name)))
            stack.enter_context(self)
            yield self

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waits(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait(self._works.get(id(work), (None, -1))[1])
            return wait(work, *args, **kwargs)

        return waits

    def _together(self, batch: Callable[..., Any]) -> Callable[..., Any]:
        def together(ops: list) -> Any:
            self._batch, self._batches = self._batches, self._batches + 1
            try:
                return batch(ops)
            finally:
                self._batch = -1

        return together

    def _streams(self, name: str) -> Callable[..., Any]:
        """FSDP's own streams, as they would be on a GPU: what is done on one waits for what that one has waited for.

        torch gives CPUs streams that do nothing, and FSDP goes through them. An event holds the messages that are over
        when it is: only if the computation's own stream waits for it does the computation.
        """

        def reach(stream: Stream, numbers: Iterable[int]) -> None:
            if stream is default_stream:
                for number in numbers:
                    self._wait(number)
            else:
                self.log.beside.setdefault(stream, []).extend(numbers)

        def record_event(stream: Stream) -> tuple[int, ...]:
            left = [i for i in self.log.beside.pop(stream, ()) if self.log.messages[i].waited == "never"]
            if left:
                self.log.beside[stream] = left
            return tuple(left)

        def wait_event(stream: Stream, event: Any) -> None:
            reach(stream, event if isinstance(event, tuple) else ())

        def wait_stream(stream: Stream, other: Stream) -> None:
            reach(stream, record_event(other))

        return {"record_event": record_event, "wait_event": wait_event, "wait_stream": wait_stream}[name]
