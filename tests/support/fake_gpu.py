"""Fake GPU for programs on a CPU: tensors on "cuda" are in the CPU's memory; streams and events only record.

    with FakeGPU() as gpu:
        x = torch.ones(3, device="cuda")    # x.is_cuda is True; computed at once, on the CPU
        ...
    gpu.races                               # accesses that no event orders (tests.support.stream_order)

Operations run when they are called, so numbers are those of the CPU. Recorded is the order that the program's streams
and events would enforce on a GPU. One difference: backward runs in the thread that calls it, on that thread's current
stream; on a GPU autograd would use the stream of each forward operation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.stream_order import HOST, Clocks, StreamOrder
from titanmoe.replace import replaced

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOM, FREE, RESERVED = 80 << 30, 50 << 30, 20 << 30
DEVICE, IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
"""Operations whose result the host needs, so that it waits for the stream."""


class Copy(NamedTuple):
    """Recorded copy between host and device."""

    to: str
    """"device" or "host"."""
    stream: Stream
    waits: bool
    """Whether the host waits for the copy."""
    page_locked: bool
    place: str


class Stream:
    stream_id, device_index, device_type = 0, 0, 1  # FSDP of torch 2.15 hands them to an operation that does nothing

    def is_capturing(self) -> bool:
        return False

    def __init__(self, device: Any = None, priority: int = 0):
        self.device, self.priority, self.order = GPU, priority, FakeGPU.active.order

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False):
        self.gpu, self.timed, self.at, self.clocks = FakeGPU.active, enable_timing, -1.0, Clocks()
        self.stream: Stream | None = None
        self.gpu.events.append(self)

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.at = stream or self.gpu.stream, self.gpu.now
        self.clocks = self.gpu.order.reached(self.stream)

    def wait(self, stream: Stream | None = None) -> None:
        self.gpu.order.join(stream or self.gpu.stream, self.clocks)

    def synchronize(self) -> None:
        self.gpu.order.join(HOST, self.clocks)
        self.gpu.host_waits += 1

    def query(self) -> bool:
        passed = self.at <= self.gpu.passed
        if passed:
            self.gpu.order.join(HOST, self.clocks)
        return passed

    def elapsed_time(self, end: Event) -> float:
        assert self.timed and end.timed and min(self.at, end.at) >= 0 and end.at <= self.gpu.passed
        return 1e3 * (end.at - self.at)


class Generator(torch.Generator):
    """Generator on the CPU, whatever device is asked for: a CUDA generator needs torch's CUDA library."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


class FakeGPU:
    """Context in which torch sees GPUs. `now` and `passed` are seconds on the device's clock.

    An operation that is launched now runs at `now`; the device has completed everything up to `passed`.
    """

    active: FakeGPU

    def __init__(self, ranks: int = 1) -> None:
        """Prepare a machine with this many GPUs, one for each rank."""
        self.ranks, self.now, self.passed, self.host_waits = ranks, 0.0, float("inf"), 0
        self.order = StreamOrder()
        self.events: list[Event] = []
        self.copies: list[Copy] = []
        self.calls: list[tuple] = []
        """Calls of set_device and of the memory history's functions, with their arguments."""
        self.registered: dict[int, int] = {}
        """Host memory that the driver has page-locked: bytes by address."""
        self.on_gpu, self.page_locked = set[int](), set[int]()
        self.flying: dict[int, Any] = {}
        self.works: dict[int, Any] = {}
        self.thread = threading.local()
        FakeGPU.active = self
        self.default = Stream()

    @property
    def stream(self) -> Stream:
        return getattr(self.thread, "stream", self.default)

    @contextmanager
    def _within(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self.thread, name, None)
        setattr(self.thread, name, value)
        try:
            yield
        finally:
            setattr(self.thread, name, before) if before is not None else delattr(self.thread, name)

    @property
    def races(self) -> list[str]:
        return self.order.races

    def __enter__(self) -> FakeGPU:
        self.stack = ExitStack()
        for name, value in self._cuda().items():
            module, _, name = ("torch.cuda." + name).rpartition(".")
            self.stack.enter_context(replaced(sys.modules[module], name, value))
        self.stack.enter_context(replaced(torch.accelerator, "current_stream", lambda device=None: self.stream))
        record = lambda x, stream: self.order.record_stream(x.untyped_storage()._cdata, stream)  # noqa: E731
        self.stack.enter_context(replaced(Tensor, "record_stream", record))
        self.stack.enter_context(replaced(torch, "Generator", Generator))
        # Autograd saves tensors inside an operation, where no mode answers for their device.
        alike = {"default": lambda x: {"shape": x.shape, "dtype": x.dtype}}
        self.stack.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, alike))
        run = torch.autograd._engine_run_backward  # a call of Tensor.backward would leave the mode outside
        self.stack.enter_context(replaced(torch.autograd, "_engine_run_backward", self.asking(run)))
        changed = (torch.UntypedStorage, "resize_", self._resizing), (Work, "wait", self._waiting)
        for owner, name, around in (*changed, (FakeWork, "wait", self._waiting)):
            self.stack.enter_context(replaced(owner, name, around(getattr(owner, name))))
        self.stack.enter_context(self.order.sites.recording())
        self.stack.enter_context(_Calls(self))
        self.stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def asking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with the fake GPU's mode around it, for threads in which no mode is active."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Calls(self):
                return function(*args, **kwargs)

        return run

    def _cuda(self) -> dict[str, Any]:
        """Return the replacements of attributes of torch.cuda, by name."""

        def called(name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))

        def synchronize(device: Any = None) -> None:
            self.host_waits += 1
            for actor in list(self.order.clocks):
                self.order.join(HOST, self.order.reached(actor))

        def register(address: int, size: int, flags: int) -> int:
            self.registered[address] = size
            return 0

        runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda at: self.registered.pop(at))
        return {
            "Event": Event,
            "Stream": Stream,
            "stream": lambda stream: self._within("stream", stream),
            "device": lambda device: nullcontext(),
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: self.default,
            "synchronize": synchronize,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "graphs.is_current_stream_capturing": lambda: False,
            "device_count": lambda: self.ranks,
            "current_device": lambda: 0,
            "set_device": called("set_device"),
            "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(total_memory=ROOM, name="NVIDIA H100 80GB HBM3"),
            "mem_get_info": lambda device=None: (FREE, ROOM),
            "memory_reserved": lambda device=None: RESERVED,
            "max_memory_reserved": lambda device=None: RESERVED,
            "cudart": lambda: runtime,
            "get_rng_state": lambda device=None: torch.empty(0),
            "set_rng_state": lambda state, device=None: None,
            "nccl.version": lambda: (2, 28, 9),
            "memory._record_memory_history": called("record"),
            "memory._dump_snapshot": called("snapshot"),
        }

    # ---- where tensors are

    def has(self, x: Tensor) -> bool:
        x = x._local_tensor if isinstance(x, DTensor) else x
        return not x.is_meta and x.untyped_storage()._cdata in self.on_gpu

    def place(self, out: Any, on_gpu: bool, page_locked: bool = False) -> None:
        """Record the place of those tensors in `out`, nested or not, whose storage is new.

        They are on the fake GPU if `on_gpu`, else in host memory, which may be page-locked.
        """
        for x in tensors(out):
            if not x.is_meta and (key := x.untyped_storage()._cdata) not in self.order.storages:
                self.order.allocate(x.untyped_storage(), self.stream if on_gpu else HOST, self._forget)
                if on_gpu:
                    self.on_gpu.add(key)
                elif page_locked:
                    self.page_locked.add(key)

    def _forget(self, key: int) -> None:
        self.on_gpu.discard(key)
        self.page_locked.discard(key)

    def is_page_locked(self, x: Tensor) -> bool:
        address = x.data_ptr()
        inside = any(begin <= address < begin + size for begin, size in self.registered.items())
        return inside or not x.numel() or x.untyped_storage()._cdata in self.page_locked

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Return `resize_` of a storage with recording: FSDP frees and allocates unsharded weights by it."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if (key := storage._cdata) in self.on_gpu:
                self.order.free(key)
                self.order.allocate(storage, self.stream, self._forget)
            return resize(storage, size)

        return resized

    # ---- what Python asks for

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if isinstance(func, torch._ops.OpOverload):  # dispatched already: a CPU's device says nothing here
            return func(*args, **kwargs)
        if func == IS_CUDA or (func == DEVICE and self.has(args[0])):
            return GPU if func == DEVICE else self.has(args[0])
        if func in (Tensor.tolist, Tensor.numpy):
            self.host_reads(args[0])
        if func in (Tensor.cpu, Tensor.cuda):
            return self._move(args[0], CPU if func is Tensor.cpu else GPU, (), kwargs)
        if func is Tensor.pin_memory:
            with self._within("making", False):
                out = args[0].clone()
            self.page_locked.add(out.untyped_storage()._cdata)
            return out
        if func is Tensor.to:
            kwargs = {"device": args[1], **kwargs} if len(args) > 1 else kwargs
            where, rest = kwargs.get("device", kwargs.get("other")), args[2:]
            if isinstance(where, Tensor):
                where, rest = GPU if self.has(where) else where.device, (where.dtype, *rest)
            if isinstance(where, str | torch.device):
                kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "other")}
                return self._move(args[0], torch.device(where), rest, kwargs)
            return func(*args, **{name: value for name, value in kwargs.items() if len(args) == 1 or name != "device"})
        where = kwargs.get("device")
        if where is None or torch.device(where).type == "meta":
            return func(*args, **kwargs)
        on_gpu, kwargs = torch.device(where).type == "cuda", {**kwargs, "device": CPU}
        page_locked = kwargs.pop("pin_memory", False)
        with self._within("making", on_gpu):
            out = func(*args, **kwargs)
        self.place(out, on_gpu)
        if page_locked:
            self.page_locked.add(out.untyped_storage()._cdata)
        return out

    def _move(self, x: Tensor, where: torch.device, rest: tuple, kwargs: dict) -> Tensor:
        if where.type == "meta" or x.is_meta:
            return x.to(where, *rest, **kwargs)
        on_gpu = where.type == "cuda"
        kwargs = kwargs | ({"copy": True} if on_gpu != self.has(x) else {})
        with self._within("making", on_gpu):
            return x.to(CPU, *rest, **kwargs)

    def host_reads(self, x: Tensor) -> None:
        if self.has(x):
            self.stream.synchronize()
        self.order.access(HOST, [x], [])

    # ---- operations

    def computed(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Record an operation that has run, with its result `out`, as `__torch_dispatch__` gets it.

        Records the place of the result, what is read and written by the stream or the host, copies between them, and
        waits of the host for a result; of views and allocations only the place. An operation with a tensor on the fake
        GPU moves its clock by a microsecond.
        """
        name, making = func._overloadpacket.__name__, getattr(self.thread, "making", None)
        given, results = tensors((args, kwargs)), tensors(out)
        goes = any(map(self.has, given)) if making is None else making
        copies = name == "copy_" or (name == "_to_copy" and making is not None)
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        self.place(results, goes, page_locked=copies and not goes and not waits)
        if func.is_view or name in ALLOCATES:
            return
        old = {x.untyped_storage()._cdata for x in given if not x.is_meta}
        written = [x for x in results if not x.is_meta and x.untyped_storage()._cdata not in old]
        written += written_by(func, args, kwargs)
        everything = [*given, *results]
        on_host = [x for x in everything if not self.has(x)]
        if len(on_host) == len(everything):
            self.order.access(HOST, given, written)
            return
        self.now += 1e-6
        if copies and on_host:
            to = "device" if self.has(results[0]) else "host"
            locked = all(map(self.is_page_locked, on_host))
            self.copies.append(Copy(to, self.stream, waits, locked, self.order.place()))
        elif on_host:  # numbers, which the host reads when it launches
            self.order.access(HOST, on_host, [])
            given = [x for x in given if self.has(x)]
        self.order.launch(self.stream, given, written)
        if name in WAITS or (copies and on_host and waits):
            self.stream.synchronize()

    def message(self, name: str, args: tuple, out: Any) -> None:
        """Record a collective that was issued: it runs on its group's stream, after the current stream's operations.

        Args:
            name: name of the operation without overload; one that ends in "_" writes its first argument.
            args: its positional arguments, among them the group.
            out: its result: tensors, or a Work.
        """
        given, results = tensors(args), tensors(out)
        self.place(results, any(map(self.has, given)))
        if not any(map(self.has, given)):
            self.order.access(HOST, given, results)
            return
        group = next((x for x in reversed(args) if isinstance(x, str)), None)
        if group is None and (boxed := [x for x in args if isinstance(x, torch.ScriptObject)]):
            group = ProcessGroup.unbox(boxed[0]).group_name
        written = tensors(args[0]) if name.endswith("_") and name != "send" else results
        actor = f"messages of {group}"
        self.order.join(actor, self.order.reached(self.stream))
        self.order.launch(actor, given, written)
        end = self.order.reached(actor), given, results  # NCCL keeps its tensors until somebody waits
        works = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.ScriptObject)]
        if works:
            work = Work.unbox(works[-1])
            self.works[id(work)] = work, end
        else:
            self.flying[out.untyped_storage()._cdata] = end

    def arrived(self, end: Any) -> None:
        if end is not None:
            self.order.join(self.stream, end[0])

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waits(work: Any, *args: Any, **kwargs: Any) -> Any:
            _, end = self.works.pop(id(work), (None, None))
            self.arrived(end)
            return wait(work, *args, **kwargs)

        return waits


class _Calls(TorchFunctionMode):
    def __init__(self, gpu: FakeGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, gpu: FakeGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs, name = self.gpu, kwargs or {}, func._overloadpacket.__name__
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if name == "wait_tensor":
            gpu.arrived(gpu.flying.pop(args[0].untyped_storage()._cdata, None))
        mixed = func is torch.ops.aten.mm.dtype  # which CPUs lack
        out = args[0].to(args[2]) @ args[1].to(args[2]) if mixed else func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            if name != "wait_tensor":
                gpu.message(name, args, out)
        elif func.namespace not in ("prim", "profiler"):
            gpu.computed(func, args, kwargs, out)
        return out


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and not isinstance(x, DTensor)]


def written_by(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    if func._overloadpacket.__name__ == "all_gather_copy_in":  # its schema does not say so
        return [args[1]]
    writes = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in writes])
