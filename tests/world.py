"""Gives a test N real gloo ranks, started once per session and size, then reused (0.01 s per call).

    results = world.run(4, function, *arguments)     # function(*arguments) on 4 ranks; their results by rank

`function` is at the top level of a module; arguments and results are pickled by value. torch.distributed is
initialised, with the environment of torchrun. Ranks persist: process groups, caches and all that a function leaves
behind are there at the next call, until the pool is renewed: after any failure, when a function destroyed the default
group, when a rank is in MAX_GROUPS groups, and by `restart`. A failing rank ends the call with a RankError that shows
its traceback; ranks that then wait for it in a collective are killed, and their stacks shown.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MAX_GROUPS = 150
"""Process groups of a rank after which its pool is renewed: each has 2 threads, and a socket for each other rank. A new
pool of 8 takes 2 CPU-seconds."""
CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE)
GRACE_S = 1.5
"""How long the other ranks have to finish or fail by themselves once one has failed."""
START_S = 120.0
PR_SET_PDEATHSIG = 1

ROOT = Path(__file__).resolve().parent.parent
# Each takes a fraction of a second to import, and 8 ranks on 2 cores would otherwise import it 8 times.
PRELOAD = (
    "tests.support.no_garbage",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "titanmoe.train.launch",
    "titanmoe.train.build",
    "titanmoe.train.trainer",
    "titanmoe.models.families",
    "pytest",
    "hypothesis",
    "tests.parity",
    "tests.world",
)


class RankError(Exception):
    """Error of ranks that failed or hung. `failures` and `stuck` have the traceback or stack of each, by rank."""

    def __init__(self, message: str, failures: dict[int, str], stuck: dict[int, str]):
        super().__init__(message)
        self.failures = failures
        self.stuck = stuck
        self.crash = ""
        """How a rank died in compiled code, if one did: Python's own errors never end a process so."""


@dataclass
class Answer:
    """Reply of a rank to a call."""

    value: bytes = b""
    error: str = ""
    crash: str = ""
    when: float = 0.0  # monotonic, one clock for all processes of a machine: the earliest error is the cause
    groups: int = 0
    intact: bool = True


_pools: dict[int, Pool] = {}


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """Run fn(*args) on each of `world_size` ranks; return the results in the order of the ranks.

    Raises RankError if a rank fails or takes longer than `timeout` seconds. A rank that crashes in compiled code (torch
    2.13 on gloo does, about once in ten thousand calls) gets a second try on fresh ranks, and pytest's summary reports
    it.
    """
    request, name = dumps((fn, args)), f"{fn.__module__}.{fn.__qualname__}"
    try:
        return _call(world_size, request, name, timeout)
    except RankError as error:
        if not error.crash:
            raise
        warnings.warn(f"a rank of {world_size} crashed in {name} and it was run again: {error.crash}", stacklevel=2)
        return _call(world_size, request, name, timeout)


class _Pickler(pickle.Pickler):
    """Pickler that sends tensors as numpy arrays: a tenth of the time if there are hundreds of small ones."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout == torch.strided:
            as_bits = obj.detach().contiguous().view(torch.int16) if obj.dtype == torch.bfloat16 else obj.detach()
            if obj.dtype in _ARRAYS:
                return _tensor, (as_bits.numpy(), obj.dtype, obj.requires_grad)
        return NotImplemented


_ARRAYS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def _tensor(array: Any, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return (tensor if tensor.dtype == dtype else tensor.view(dtype)).requires_grad_(requires_grad)


def dumps(obj: Any) -> bytes:
    """Return pickled bytes with tensors by value. (The pickler of multiprocessing would send shared-memory handles.)"""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def _call(world_size: int, request: bytes, name: str, timeout: float) -> list[Any]:
    if world_size in _pools and _pools[world_size].worn:
        restart(world_size)
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    try:
        return _pools[world_size].call(request, name, timeout)
    except BaseException:
        restart(world_size)
        raise


def restart(world_size: int) -> None:
    """End these ranks, if there are any; the next `run` starts fresh ones."""
    if world_size in _pools:
        _pools.pop(world_size).stop()


@atexit.register
def shutdown() -> None:
    """End all ranks of all sizes."""
    for world_size in list(_pools):
        restart(world_size)


class Pool:
    """Processes, `size` of them, that share one default process group."""

    def __init__(self, size: int):
        self.size = size
        self.worn = False
        self.folder = tempfile.TemporaryDirectory(prefix="titanmoe-world-")
        # Hosted here and not by rank 0, so that the operating system can choose the port.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _forkserver()
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[multiprocessing.connection.Connection] = []
        try:
            for rank in range(size):
                pipe, far_end = context.Pipe()
                process = context.Process(
                    target=_serve, args=(far_end, rank, size, self.store.port, self._stack_file(rank))
                )
                process.start()
                far_end.close()
                self.processes.append(process)
                self.pipes.append(pipe)
            self.call(dumps((_join_world, ())), "the start of the world", START_S)
        except BaseException:
            self.stop()
            raise

    def call(self, request: bytes, name: str, timeout: float) -> list[Any]:
        self._signal(signal.SIGCONT)
        answers = self._exchange(request, timeout)
        failed = sorted((rank for rank in answers if answers[rank].error), key=lambda rank: answers[rank].when)
        stuck = self._stacks([rank for rank in range(self.size) if rank not in answers])
        if failed or stuck:
            failures = {rank: answers[rank].error for rank in failed}
            error = RankError(_report(name, self.size, timeout, failures, stuck), failures, stuck)
            error.crash = "; ".join(answers[rank].crash for rank in failed if answers[rank].crash)
            raise error
        self.worn = any(a.groups >= MAX_GROUPS or not a.intact for a in answers.values())
        self._signal(signal.SIGSTOP)
        return [pickle.loads(answers[rank].value) for rank in range(self.size)]

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks. Idle ranks are stopped: each has a thread that wakes a hundred times a second."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _exchange(self, request: bytes, timeout: float) -> dict[int, Answer]:
        """Send the request to all ranks and return the answers, by rank, that come within `timeout` seconds.

        Once a rank has failed, the others have GRACE_S seconds.
        """
        message = pickle.dumps((sys.path, request))
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead rank; receiving shows how it died
                pipe.send_bytes(message)
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {self.pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting[pipe]
                answers[rank] = self._receive(rank)
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _receive(self, rank: int) -> Answer:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            crash = f"rank {rank}, {signal.Signals(-code).name}" if code in CRASHES else ""
            return Answer(error=f"the process ended with exit code {code}\n", crash=crash, when=time.monotonic())

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the stacks of all threads of these ranks, by rank; faulthandler writes them, even for stuck code."""
        files = {rank: Path(self._stack_file(rank)) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        give_up = time.monotonic() + 2
        while time.monotonic() < give_up and not all(f.exists() and f.stat().st_size for f in files.values()):
            time.sleep(0.02)
        if ranks:
            time.sleep(0.1)  # a dump that has begun ends well within this
        return {rank: _readable(file.read_text() if file.exists() else "") for rank, file in files.items()}

    def _stack_file(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"stack-{rank}")

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self.folder.cleanup()


def _report(name: str, size: int, timeout: float, failures: dict[int, str], stuck: dict[int, str]) -> str:
    """Return the text of a RankError; `failures` are in chronological order."""
    lines = []
    for rank, error in failures.items():
        if not lines:
            lines.append(f"rank {rank} of {size} failed in {name}:\n\n{error}")
        else:
            lines.append(f"then rank {rank} failed: {error.strip().splitlines()[-1]}")
    if stuck:
        since = f"{GRACE_S} s after that failure" if failures else f"after {timeout} s in {name}"
        returned = [rank for rank in range(size) if rank not in failures and rank not in stuck]
        lines.append(f"ranks {list(stuck)} of {size} had not returned {since}; ranks {returned} had. Stacks:")
        lines += [f"\nrank {rank}:\n{stack}" for rank, stack in stuck.items()]
    return "\n".join(lines)


def _readable(dump: str) -> str:
    return dump.strip() or "(no stack: the process did not react to SIGUSR1)"


@functools.cache
def _forkserver() -> multiprocessing.context.BaseContext:
    """Return the context whose processes are forks of a clean process with the slow imports done.

    A plain fork of this process would hang as soon as it has used OpenMP; a spawn would import torch in every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module for module in PRELOAD if _importable(module)])
    # Preloading does not see sys.path before Python 3.13, and OpenMP reads its variable when torch is imported.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _environment(PYTHONPATH=path, OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


def _importable(module: str) -> bool:
    """Return whether a module can be imported; only ours are tried, because an error would end the fork server."""
    if not module.startswith(("titanmoe", "tests")):
        return True
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: multiprocessing.connection.Connection, rank: int, size: int, port: int, stack_file: str) -> None:
    """Answer calls as a rank until the pool kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the pool
    begin_in_fork()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=open(stack_file, "w"), all_threads=True)  # noqa: SIM115 (stays open)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # MAX_GROUPS groups exceed the usual 1,024
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    begin_call = _keep_groups()
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        begin_call()
        pipe.send_bytes(pickle.dumps(_answer(message)))


def begin_in_fork() -> None:
    """Let this fork of the fork server end with it, and collect no garbage of its imports.

    The fork server ends with pytest once no other process has its pipe open, which this closes.
    """
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # no fork needs to collect what the fork server imported
    gc.enable()


def _answer(message: bytes) -> Answer:
    try:
        sys.path[:], request = pickle.loads(message)
        fn, args = pickle.loads(request)
        answer = Answer(value=dumps(fn(*args)))
    except BaseException as error:
        own_frames = error.__traceback__.tb_next
        answer = Answer(
            error="".join(traceback.format_exception(type(error), error, own_frames)), when=time.monotonic()
        )
    answer.intact = dist.is_initialized()
    answer.groups = sum(group.size() > 1 for group in dist.distributed_c10d._world.pg_map)
    return answer


def _keep_groups() -> Callable[[], None]:
    """Replace dist.new_group: the n-th new group of some ranks in a call is the n-th that an earlier call made of them.

    If there is none, it is new; within a call all groups are distinct. A mapping of 8 ranks makes 60 groups, in up to
    0.3 s. Returns a function that begins a call.
    """
    kept: dict[Any, Any] = {}
    asked: Counter[Any] = Counter()
    make = dist.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        if any(value for name, value in options.items() if name != "group_desc"):
            return make(ranks, timeout, backend, **options)
        like = None if ranks is None else tuple(sorted(ranks)), timeout, backend
        asked[like] += 1
        number = like, asked[like]
        if number not in kept:
            kept[number] = make(ranks, timeout, backend)
        return kept[number]

    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        module.new_group = new_group
    return asked.clear


def _share_device() -> None:
    """Let all later groups of this rank share one of gloo's devices: a thread that wakes a hundred times a second.

    With a device for each group a step on 8 ranks takes 1.1 times the CPU time with 7 groups, and 1.6 times with 37.
    """
    gloo = dist.ProcessGroupGloo
    device, make = gloo.create_device(hostname="127.0.0.1"), gloo.__init__

    def init(
        group: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta, **further: bool
    ) -> None:
        assert not any(further.values())  # torch 2.15 says that this group will not change its ranks
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        make(group, store, rank, size, options)

    gloo.__init__ = init


def _join_world() -> None:
    _share_device()
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
