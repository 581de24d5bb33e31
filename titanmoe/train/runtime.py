"""The process of one rank: its environment, device, process groups, signals, and synchronised garbage collection.

`titanmoe.train.launch.main` calls `start` before it builds the run and `stop` at the end. torch is imported where it is
used: an illegal recipe is refused without waiting for torch to load.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.ops.cpu import process
from titanmoe.this_process import is_rank_0

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for every rank."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of PyTorch's CUDA allocator: the current name and the older one."""
PR_SET_PDEATHSIG = 1  # prctl.h
STOP_SECONDS = 5.0
"""Seconds that a failed rank waits for its process groups to end."""


@dataclass(frozen=True)
class Environment:
    """Rank, local rank and world size of this process, as torchrun sets them in its environment."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1
    """Number of ranks on this machine; local_rank + 1 if LOCAL_WORLD_SIZE is not set."""
    launched: bool = False
    """Whether a launcher started the process; plain `python train.py` is one rank without one."""


@dataclass(frozen=True)
class Runtime:
    """Rank, world size and device of a process that has joined the others."""

    rank: int
    local_rank: int
    world: int
    device: torch.device
    keep_timeouts: bool = False
    """Whether time-outs must not change, because other runs use the process groups after this one."""

    def steady_timeout(self, seconds: int, patient: Sequence[ProcessGroup] = ()) -> None:
        """Set the time-out of all process groups but the `patient` ones, once the slow first step is over.

        Waits for all ranks and the GPU first. Does nothing if `keep_timeouts` is set. Collective over the world.
        """
        if self.keep_timeouts:
            return
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        # No rank may wait with the short time-out while another is still in its first step.
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        set_timeout = (
            getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        )  # public from torch 2.14 on
        for group in set(distributed_c10d._world.pg_map).difference(patient):
            if group.size() > 1:
                set_timeout(timedelta(seconds=seconds), group)


def read_environment() -> Environment:
    """Return rank and world size from torchrun's variables; rank 0 of 1 if none of VARIABLES is set.

    Raises:
        ConfigError: if only some are set, one is not a whole number, or RANK is not below WORLD_SIZE.
    """
    present = [name for name in VARIABLES if os.environ.get(name)]
    if not present:
        return Environment()
    missing = [name for name in VARIABLES if name not in present]
    if missing:
        raise ConfigError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}: "
            "start with torchrun, which sets all of them, or unset all to run one rank"
        )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    numbers = {name: os.environ[name] for name in names if os.environ.get(name)}
    bad = [f"{name} = {value!r}" for name, value in numbers.items() if not value.isdecimal()]
    if bad:
        raise ConfigError(f"the environment has {', '.join(bad)}, not a whole number: start with torchrun")
    rank, local_rank, world = (int(numbers[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank >= world:
        raise ConfigError(f"the environment has RANK = {rank}, not below WORLD_SIZE = {world}: start with torchrun")
    local_world = int(numbers.get("LOCAL_WORLD_SIZE", local_rank + 1))
    return Environment(rank, local_rank, world, local_world, launched=True)


def world_size() -> int:
    """Return the run's number of ranks, which torchrun sets in the environment; 1 without torchrun.

    Raises:
        ConfigError: torchrun's variables are incomplete or no whole numbers.
    """
    return read_environment().world


def was_restarted() -> bool:
    """Return whether this machine's torchrun agent has restarted its ranks because one of them failed.

    False on a machine whose ranks were restarted because another machine's failed, or because a machine joined.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def die_with_launcher() -> None:
    """Ask the kernel to kill this rank when its torchrun dies; do nothing without torchrun, or not on Linux."""
    # Orphaned ranks would keep the run's folder locked and the GPUs busy. A run started by hand may outlive its shell.
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def use_expandable_segments() -> None:
    """Set expandable_segments:True for PyTorch's CUDA allocator, unless the environment has any settings of it.

    PyTorch reads the setting once, so this has no effect after the first use of CUDA (`describe_segments` tells).
    """
    # The number of routed tokens changes in every step, and segments of fixed size would leave gaps.
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def describe_segments() -> str:
    """Return text for the header on whether PyTorch's CUDA allocator uses expandable segments, and if not, why."""
    import torch

    try:
        grow = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    except (AttributeError, KeyError, RuntimeError):  # RuntimeError: an allocator that is not PyTorch's own
        return "whether segments grow is not known: this allocator does not say"
    if grow:
        return "segments grow"
    name = next((name for name in ALLOCATOR if os.environ.get(name)), "")
    if not name:
        return f"segments do not grow: {ALLOCATOR[0]} is not set"
    if "expandable_segments:True" not in os.environ[name]:
        return f"segments do not grow: {name} = {os.environ[name]}"
    return f"segments do not grow: PyTorch was in use before {name} was set, so set it before the program starts"


def start(config: Config) -> Runtime:
    """Choose the device, join the other ranks, and return this process's rank, world size and device.

    Collective over the world. Also sets the threads of a rank on CPUs, torch's deterministic algorithms if the recipe
    asks for them, and the limit of open files.

    Raises:
        ConfigError: with one line, if this machine lacks the device, MASTER_PORT cannot be used, or not all ranks join
            within training.first_step_timeout_s seconds. It may be raised on some ranks alone; the others then wait.
    """
    environment = read_environment()
    device = _choose_device(config.training.device, environment)
    if device.type == "cpu":
        process.configure_process(environment.local_world)
    if config.training.deterministic:
        _use_deterministic_algorithms()
    _raise_open_file_limit()
    _init_process_group(environment, device, timedelta(seconds=config.training.first_step_timeout_s))
    return Runtime(environment.rank, environment.local_rank, environment.world, device)


def _choose_device(choice: str, environment: Environment) -> torch.device:
    """Return this rank's device, and make a GPU the current one; "auto" is the CPU if there is no GPU.

    Raises:
        ConfigError: if `choice` is "cuda" and there is no GPU, or the machine has more ranks than GPUs.
    """
    import torch

    if not uses_gpu(choice):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if environment.local_world > gpus:
        raise ConfigError(
            f"{environment.local_world} ranks on a machine with {gpus} visible GPU{'s' * (gpus > 1)}: "
            f'use torchrun --nproc-per-node {gpus}, or training.device = "cpu"'
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def uses_gpu(choice: str) -> bool:
    """Return whether a value of training.device selects GPUs here; ConfigError if it is "cuda" and there is none."""
    import torch

    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return False
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ConfigError(
            f'training.device = "cuda" but PyTorch {torch.__version__}, {built}, finds no GPU: '
            'see nvidia-smi and CUDA_VISIBLE_DEVICES, or use training.device = "cpu"'
        )
    return True


def _raise_open_file_limit() -> None:
    """Raise this process's limit of open files to what the system allows; do nothing on systems other than Linux."""
    # On a thousand ranks gloo, the store and the data workers open more files than the usual limit of 1,024.
    if sys.platform.startswith("linux"):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _use_deterministic_algorithms() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, at the first product
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _init_process_group(environment: Environment, device: torch.device, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    # On GPUs NCCL alone: a second backend would be split with every group, and open a socket for each pair of ranks.
    backend = "gloo" if device.type == "cpu" else "nccl"
    options: dict = {"device_id": device} if device.type == "cuda" else {}
    if not environment.launched:
        # A single rank needs no rendezvous: a store in its own memory needs no port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, **options)
        return
    if environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # torchrun does not listen on MASTER_PORT, so rank 0 will.
        port = int(os.environ["MASTER_PORT"])
        if why := port_problem(port):
            raise ConfigError(f"MASTER_PORT = {port} {why}: choose another; torchrun --standalone finds one")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    ranks = {"rank": environment.rank, "world_size": environment.world}
    try:
        store, _, _ = next(rendezvous("env://", environment.rank, environment.world, timeout=timeout))
        store.set_timeout(timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(_agree_on_name(store, environment, timeout), store)
        dist.init_process_group(backend, store=store, timeout=timeout, **ranks, **options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"rank {environment.rank} of {environment.world} cannot join at {where}: {reason}") from None


def _agree_on_name(store: Store, environment: Environment, timeout: timedelta) -> str:
    """Return a prefix for keys of the store that no earlier attempt of this run has used. Collective over the world.

    Rank 0 raises a RuntimeError if not all ranks have joined after `timeout`.
    """
    # torchrun's agents keep one store for all attempts (pytorch#135712), so restarted ranks would find the addresses of
    # dead ones. No variable identifies the attempt on all nodes: each agent counts its own restarts, and does not count
    # those for a node that joined. So each rank stores a random token, and rank 0 writes the name under each token,
    # repeatedly, because the token that it read may be that of a dead rank.
    token = uuid.uuid4().hex
    store.set(f"rank {environment.rank}", token)
    if environment.rank:
        name = store.get(f"name for {token}").decode()
        store.add(f"heard {name}", 1)
        return name
    others, deadline = environment.world - 1, time.monotonic() + timeout.total_seconds()
    while (heard := store.add(f"heard {token}", 0)) < others:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"only {heard + 1} of {environment.world} ranks joined within {timeout.total_seconds():.0f} s"
            )
        tokens = store.multi_get([f"rank {rank}" for rank in range(1, environment.world)])
        store.multi_set([f"name for {other.decode()}" for other in tokens], [token] * others)
        time.sleep(0.02)
    return token


def port_problem(port: int) -> str:
    """Return why this process cannot listen on a port; "" if it can."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        return "is in use by another program" if taken else f"cannot be used ({error})"
    return ""


def stop(abandon: bool = False) -> None:
    """End the process groups; call it at the end of the process, in a `finally`.

    During an exception, or with `abandon`, a collective may be in flight that the other ranks will never join, and its
    group cannot end before its time-out. Then this gives up after STOP_SECONDS. If nothing catches the exception, the
    process exits once its traceback is printed, without waiting for groups that are still referenced.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if sys.exc_info()[0] is None and not abandon:
        dist.destroy_process_group()
        return

    def destroy() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    ending = threading.Thread(target=destroy, daemon=True)
    ending.start()
    ending.join(STOP_SECONDS)
    if not abandon:
        sys.excepthook = _print_error_and_exit


def exit_now(code: int) -> NoReturn:
    """Flush the output and exit with this code, without the interpreter's shutdown."""
    # If a gloo thread releases a Python object during the shutdown, the process dies of SIGABRT (torch 2.13, about one
    # run in ten with 4 ranks), and a run that succeeded would count as failed.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the disk behind it may be full
            stream.flush()
    os._exit(code)


def _print_error_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    exit_now(1)


def print_rank_0(*parts: object) -> None:
    """Print like `print`, but only in the process whose variable RANK is 0 or not set; ignore an OSError."""
    if is_rank_0():
        with contextlib.suppress(OSError):  # a console that fails must not end the run
            print(*parts, flush=True)


class GarbageCollection:
    """Garbage collection in the same steps on all ranks. Making one turns Python's automatic collection off."""

    def __init__(self, every: int):
        self.every = every
        gc.disable()
        gc.collect()

    def collect(self, step: int) -> None:
        """Collect garbage of generations 0 and 1 if the number of the step is a multiple of training.gc_every."""
        if step % self.every == 0:
            gc.collect(1)  # a full pass over the model's objects is slow and finds nothing new


AFTER_STEP = "saving after this step"
SECOND_CTRL_C_S = 3.0
"""Seconds after which a second Ctrl-C counts: one Ctrl-C reaches a rank twice, directly and through torchrun."""


class Signals:
    """Context in which the first SIGTERM or SIGINT only sets `number`, and on rank 0 prints a line.

    A second Ctrl-C, more than SECOND_CTRL_C_S (3) seconds later, raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the signal received, or 0."""
        self.outcome = AFTER_STEP
        """What the message says that a signal leads to, before the run ends."""
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
            hint = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
            print_rank_0(f"{signal.Signals(number).name}: {self.outcome}, then ending{hint}")
        elif number == signal.SIGINT and time.monotonic() - self._since > SECOND_CTRL_C_S:
            raise KeyboardInterrupt
