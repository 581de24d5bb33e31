"""A dispatch mode that records every message of a rank: collectives, sends and receives, and puts.

It works on fake tensors (`fake_recorder`) and on those of real ranks, with which tests compare a rehearsal. A message
is recorded when it is issued and when its result is waited for. Its line of code is the one in titanmoe that requests
it; in backward, the line of the forward pass whose gradients are sent.

Shapes: N rows that a put writes on other ranks, M rows that are written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch.cpu import Stream, current_stream
from torch.cpu import _default_cpu_stream as default_stream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_modes
from torch.utils._pytree import tree_leaves

from titanmoe.moe.dispatchers.symmetric_buffers import SymmetricBuffers
from titanmoe.rehearse.code_site import CodeSite, CodeSites
from titanmoe.replace import replaced

# The kind of message of each torch operation. Functional operations take their group's name, c10d's the group itself.
FUNCTIONAL = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
C10D = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}
PUT = "put"
"""A write of rows into the memory of other ranks, which ends when their rows have arrived here."""
ALL_TO_ALLS = ("all-to-all", PUT)


@dataclass(kw_only=True)
class Message:
    """A collective, send, receive or put that this rank issued."""

    op: str
    """A value of `FUNCTIONAL` or `C10D`, or `PUT`."""
    group: str
    """torch's name for the process group."""
    dtype: torch.dtype
    sent_bytes: int
    """The bytes of the input."""
    received_bytes: int
    """The bytes of the output."""
    site: CodeSite
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The rows (slices along dim 0) sent to each rank of the group, and those received from each; None unless it is an
    all-to-all or a put."""
    row_bytes: int = 0
    """The bytes of a row of an all-to-all or a put."""
    peer: int = -1
    """The index in the group of the other rank of a send or receive."""
    batch: int = -1
    """The number of the batch of sends and receives that the message belongs to; -1 if it is alone."""
    wait_timing: str = "never"
    """Time of the wait for the result: "at once" if nothing is computed in between, "later", or "never"."""

    @property
    def backward(self) -> bool:
        """Whether the message is issued during backward or recomputation."""
        return self.site.phase in ("backward", "recomputed")


class Event(NamedTuple):
    """One action of the host: it issues a message, makes the device wait for one, or waits for the device itself."""

    kind: str
    """"issue", "wait" or "sync"."""
    number: int
    """The index of the message, or of the sync, in the log."""


@dataclass
class Log:
    """The messages and waits of one rank in a step."""

    messages: list[Message] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """All events in the order of the host."""
    syncs: list[CodeSite] = field(default_factory=list)
    """The lines where the host waits for the device."""
    side_streams: dict[Stream, list[int]] = field(default_factory=dict, repr=False)
    """The indices of messages that another stream has waited for, and the computation's stream has not."""


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the messages of this rank in `log`, within `recording()`, which enters the mode."""

    def __init__(self, layers: dict[int, str] | None = None, on_gpu: bool = False):
        """Prepare a recorder.

        Args:
            layers: The names of blocks by the id of their module; None to record no names.
            on_gpu: Whether FSDP communicates on streams of its own.
        """
        super().__init__()
        self.log, self.sites, self.on_gpu = Log(), CodeSites({} if layers is None else layers), on_gpu
        self.computed = 0
        """The count of operations that have computed something so far."""
        self._works: dict[int, tuple[Any, int]] = {}  # by id of the work, kept alive so that its id stays unique
        self._results: dict[int, tuple[Any, int]] = {}  # by id of a tensor that has not been waited for
        self._issued_at: dict[int, int] = {}
        self._batch, self._batches = -1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch omits its guard against being compiled, a fifth of the time of a call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.titanmoe.exchange.default:
            out = self.run_message(func, args, kwargs)
            rows, *places, memory = args
            for x in rows:
                self._note(self._from_put(x, *places, memory))
                self._wait(len(self.log.messages) - 1)  # it runs on the computation's own stream
            self.after_message(func, args, out)
            return out
        if func.namespace not in ("c10d", "_c10d_functional"):
            if func.namespace == "prim":
                return self.read_attribute(func, args, kwargs)
            if not func.is_view:
                self.computed += 1
            return self.compute(func, args, kwargs)
        name = func._overloadpacket.__name__
        if name == "wait_tensor":
            self._wait(self._results.pop(id(args[0]), (None, -1))[1])
        out = self.run_message(func, args, kwargs)
        if name in FUNCTIONAL and func.namespace == "_c10d_functional":
            self._note(self._from_functional(FUNCTIONAL[name], args, out))
            self._results[id(out)] = out, len(self.log.messages) - 1
        elif name in C10D and func.namespace == "c10d":
            self._note(self._from_c10d(C10D[name], args))
            work = Work.unbox((out if isinstance(out, tuple | list) else [out])[-1])
            self._works[id(work)] = work, len(self.log.messages) - 1
        self.after_message(func, args, out)
        return out

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation that is not a message, and return its result. Subclasses override it."""
        return func(*args, **kwargs)

    def run_message(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch operation that issues or waits for a message, and return its result. Can be overridden.

        The caller records the message.
        """
        return func(*args, **kwargs)

    def read_attribute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return an attribute of a tensor, such as its device, by running torch's operation for it. Records nothing."""
        return func(*args, **kwargs)

    def after_message(self, func: Any, args: tuple, out: Any) -> None:
        """Do nothing. Subclasses override this hook, which is called after a message is issued or waited for."""

    def _from_functional(self, op: str, args: tuple, out: Tensor) -> Message:
        group = next(x for x in reversed(args) if isinstance(x, str))
        splits = (tuple(args[2]), tuple(args[1])) if op == "all-to-all" else None
        return self._message(op, group, args[0], out, splits=splits)

    def _from_c10d(self, op: str, args: tuple) -> Message:
        boxed = [x for x in args if isinstance(x, torch.ScriptObject)]
        group = ProcessGroup.unbox(boxed[0])
        splits, inputs, outputs = None, args[0], args[0]
        if op in ("all-gather", "reduce-scatter", "all-to-all"):
            outputs, inputs = args[0], args[1]
        if op == "all-to-all":
            even = [inputs.shape[0] // group.size()] * group.size()
            splits = tuple(args[4]) or tuple(even), tuple(args[3]) or tuple(even)
        if op == "barrier":
            inputs = outputs = torch.empty(0, dtype=torch.uint8, device="meta")
        return self._message(
            op, group.group_name, inputs, outputs, splits=splits, peer=args[2] if op in ("send", "receive") else -1
        )

    def _from_put(self, x: Tensor, to_N: Tensor, from_M: Tensor, memory: str) -> Message:
        buffers = SymmetricBuffers.by_name[memory]
        group, limit, ranks = buffers.group.name, buffers.limit, buffers.group.size
        with disable_modes():
            places = [self.integer_values(place) for place in (to_N, from_M)]
            rows = tuple(tuple(torch.bincount(x[x >= 0] // limit, minlength=ranks).tolist()) for x in places)
        sent_bytes, received_bytes = (sum(side) * _row_bytes(x) for side in rows)
        return Message(
            op=PUT,
            group=group,
            dtype=x.dtype,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            site=self.sites.current_site(),
            splits=rows,
            row_bytes=_row_bytes(x),
        )

    def integer_values(self, x: Tensor) -> Tensor:
        """Return x itself, an integer tensor, whose values are read. For fake tensors subclasses return a real one."""
        return x

    def _message(self, op: str, group: str, inputs: Any, outputs: Any, *, splits: Any, peer: int = -1) -> Message:
        inputs, outputs = ([x for x in tree_leaves(value) if isinstance(x, Tensor)] for value in (inputs, outputs))
        sent_bytes, received_bytes = (sum(x.numel() * x.element_size() for x in value) for value in (inputs, outputs))
        if op in ("send", "receive"):
            sent_bytes, received_bytes = (sent_bytes, 0) if op == "send" else (0, received_bytes)
        row, site = _row_bytes(inputs[0]) if splits is not None else 0, self.sites.current_site()
        return Message(
            op=op,
            group=group,
            dtype=inputs[0].dtype,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            site=site,
            splits=splits,
            row_bytes=row,
            peer=peer,
            batch=self._batch,
        )

    def _note(self, message: Message) -> None:
        number = len(self.log.messages)
        self.log.messages.append(message)
        self.log.events.append(Event("issue", number))
        self._issued_at[number] = self.computed

    def _wait(self, number: int) -> None:
        if number < 0 or self.log.messages[number].wait_timing != "never":
            return
        if self.on_gpu and (stream := current_stream()) is not default_stream:
            self.log.side_streams.setdefault(stream, []).append(number)
            return
        at_once = self._issued_at[number] == self.computed and self.log.events[-1] == Event("issue", number)
        self.log.messages[number].wait_timing = "at once" if at_once else "later"
        self.log.events.append(Event("wait", number))

    def sync(self) -> None:
        """Record that the host waits for the device. Subclasses call it; on real tensors such waits are not noticed."""
        self.log.syncs.append(self.sites.current_site())
        self.log.events.append(Event("sync", len(self.log.syncs) - 1))

    # ---- waits, batches and streams, which a dispatch mode does not see

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record messages, waits, batches and streams within this context, and yield this recorder."""
        with ExitStack() as stack:
            stack.enter_context(self.sites.recording())
            for cls in (FakeWork, Work):
                stack.enter_context(replaced(cls, "wait", self._waiting(cls.wait)))
            # FSDP asks for it if weights were gathered for a backward that never came, as of a frozen first layer.
            stack.enter_context(replaced(torch.accelerator, "current_stream", current_stream))
            stack.enter_context(replaced(dist, "batch_isend_irecv", self._batched(dist.batch_isend_irecv)))
            if self.on_gpu:
                for name in ("record_event", "wait_event", "wait_stream"):
                    stack.enter_context(replaced(Stream, name, self._stream_method(name)))
            stack.enter_context(self)
            yield self

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waits(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait(self._works.get(id(work), (None, -1))[1])
            return wait(work, *args, **kwargs)

        return waits

    def _batched(self, batch: Callable[..., Any]) -> Callable[..., Any]:
        def batched(ops: list) -> Any:
            self._batch, self._batches = self._batches, self._batches + 1
            try:
                return batch(ops)
            finally:
                self._batch = -1

        return batched

    def _stream_method(self, name: str) -> Callable[..., Any]:
        """Return a replacement for a method of `torch.cpu.Stream`, with which FSDP's streams wait as on a GPU.

        On CPUs torch's streams do nothing, but FSDP still calls them. Here an event holds the messages that its stream
        has waited for, and the computation has waited for them once its own stream waits for the event.

        Args:
            name: "record_event", "wait_event" or "wait_stream".
        """

        def pass_on(stream: Stream, numbers: Iterable[int]) -> None:
            if stream is default_stream:
                for number in numbers:
                    self._wait(number)
            else:
                self.log.side_streams.setdefault(stream, []).extend(numbers)

        def record_event(stream: Stream) -> tuple[int, ...]:
            pending = [i for i in self.log.side_streams.pop(stream, ()) if self.log.messages[i].wait_timing == "never"]
            if pending:
                self.log.side_streams[stream] = pending
            return tuple(pending)

        def wait_event(stream: Stream, event: Any) -> None:
            pass_on(stream, event if isinstance(event, tuple) else ())

        def wait_stream(stream: Stream, other: Stream) -> None:
            pass_on(stream, record_event(other))

        return {"record_event": record_event, "wait_event": wait_event, "wait_stream": wait_stream}[name]
