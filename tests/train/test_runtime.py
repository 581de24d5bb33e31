"""Start and stop of the process; anything beyond a refusal runs in a process of its own."""

import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from tests.support import processes
from tests.support.fake_gpu import FakeGPU
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.ops.cpu import process as cpu_process
from titanmoe.train import header, runtime
from titanmoe.train.runtime import ALLOCATOR, VARIABLES, use_expandable_segments

PATIENCE = 240  # seconds; the groups of a first step wait for 600
WAIT = "time.sleep(999)"  # until the test ends it
PRELUDE = """
import time
from titanmoe.config.schema import Config
from titanmoe.train import runtime
config = Config()
config.training.device = "cpu"
"""


def words(body: str) -> list[str]:
    return ["-c", PRELUDE + textwrap.dedent(body)]


def clean(**environment: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "LOCAL_WORLD_SIZE")}
    return kept | environment


def launch(body: str, **environment: str) -> processes.Started:
    return processes.Started(words(body), clean(**environment))


def as_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], device: str = "cpu") -> str:
    """The one problem that `start` reports, before it has started anything."""
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cpu_process, "reuse_freed_memory", lambda: None)  # it cannot be undone
    config = Config()
    config.training.device = device
    with pytest.raises(ConfigError) as refusal:
        runtime.start(config)
    (problem,) = refusal.value.problems
    assert "\n" not in problem
    return problem


def test_plain_python_is_one_rank_without_a_port():
    process = launch("""
        import os, resource, torch, torch.distributed as dist
        if linux := hasattr(os, "SCHED_BATCH"):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        few, most = 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        started = runtime.start(config)
        assert (started.rank, started.world, started.device.type) == (0, 1, "cpu"), started
        assert dist.get_backend() == "gloo"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
        assert not linux or os.sched_getscheduler(0) == os.SCHED_BATCH
        dist.all_reduce(torch.ones(1))
        started.steady_timeout(30)
        runtime.stop()
        assert not dist.is_initialized()
    """)
    done = process.wait(PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "sets RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (as_torchrun(0, 1, 29500) | {"RANK": "x"}, "RANK = 'x', not a whole number"),
        (as_torchrun(3, 2, 29500), "RANK = 3, not below WORLD_SIZE = 2"),
    ],
)
def test_a_broken_environment_is_one_line(environment, said, monkeypatch):
    assert said in refused(monkeypatch, environment)


def test_a_port_in_use_is_one_line(monkeypatch, capfd):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused(monkeypatch, as_torchrun(0, 2, port)).startswith(f"MASTER_PORT = {port} is in use")
    assert capfd.readouterr().err == ""


def test_cuda_asked_for_and_absent_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(monkeypatch, {}, "cuda").startswith('training.device = "cuda" but PyTorch')


def test_a_failing_rank_leaves_at_once_although_a_collective_is_in_flight():
    port = free_port()
    waits = launch(
        f"import torch.distributed as dist; runtime.start(config); dist.new_group([0, 1]); {WAIT}",
        **as_torchrun(1, 2, port),
    )
    body = """
        import torch, torch.distributed as dist
        runtime.STOP_SECONDS = 0.5
        runtime.start(config)
        group = dist.new_group([0, 1])
        try:
            work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
            raise ValueError("what went wrong")
        finally:
            runtime.stop()
    """
    # Not a fork: it would leave in multiprocessing's way.
    command, environment = [sys.executable, *words(body)], clean(**as_torchrun(0, 2, port))
    try:
        done = subprocess.run(
            command, env=environment, cwd=processes.ROOT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert "ValueError: what went wrong" in done.stderr
        assert done.returncode == 1
        assert waits.process.is_alive()
    finally:
        waits.kill()


def test_the_steady_timeout_replaces_the_one_of_the_first_step_on_every_group():
    port = free_port()
    body = """
        import torch, torch.distributed as dist
        started = runtime.start(config)
        group = dist.new_group([0, 1])
        started.steady_timeout(1)
        if started.rank == 1:
            time.sleep(999)
        for which in (None, group):
            since = time.monotonic()
            try:
                dist.all_reduce(torch.ones(1), group=which)
            except RuntimeError:
                print("gave up" if time.monotonic() - since > 0.5 else "failed")
        runtime.stop()
    """
    first, second = (launch(body, **as_torchrun(rank, 2, port)) for rank in (0, 1))
    try:
        assert first.wait(PATIENCE).stdout == "gave up\ngave up\n"
    finally:
        second.kill()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
@pytest.mark.parametrize(("before", "after"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_threads_push_no_other_off_its_core_unless_a_policy_was_chosen(before, after):
    def policies():
        os.sched_setscheduler(0, getattr(os, before), os.sched_param(0))
        cpu_process.use_batch_scheduling()
        yield os.sched_getscheduler(0)
        with ThreadPoolExecutor(1) as later:  # as gloo's thread starts
            yield later.submit(os.sched_getscheduler, 0).result()

    with ThreadPoolExecutor(1) as thread:  # a policy is that of a thread
        assert thread.submit(lambda: set(policies())).result() == {getattr(os, after)}


def without_settings(monkeypatch):
    for known in ALLOCATOR:
        monkeypatch.setenv(known, "")
        monkeypatch.delenv(known)


@pytest.mark.parametrize("name", ["", *ALLOCATOR])
def test_memory_of_gpus_grows_in_place_unless_the_environment_says_otherwise(name, monkeypatch):
    without_settings(monkeypatch)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    given = {known: os.environ.get(known) for known in ALLOCATOR}
    want = {name: "max_split_size_mb:64"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert {known: value for known, value in given.items() if value} == want


ASKED = "expandable_segments:True"


def answers(**settings):
    return lambda: {"segments": [], "allocator_settings": settings}


def not_its_own():
    raise RuntimeError("cudaMallocAsync does not yet support snapshot")


@pytest.mark.parametrize(
    ("setting", "allocator", "row"),
    [
        (ASKED, answers(expandable_segments=True), "segments grow"),
        ("", answers(expandable_segments=True), "segments grow"),
        (ASKED, answers(expandable_segments=False), "segments do not grow: PyTorch was in use before {} was set"),
        ("backend:native", answers(expandable_segments=False), "segments do not grow: {} = backend:native"),
        ("", answers(expandable_segments=False), "segments do not grow: PYTORCH_ALLOC_CONF is not set"),
        (ASKED, answers(), "whether segments grow is not known"),
        (ASKED, not_its_own, "whether segments grow is not known"),
        (ASKED, None, "whether segments grow is not known"),
    ],
)
@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_header_says_whether_the_allocator_grows_segments(name, setting, allocator, row, monkeypatch):
    """With stand-ins for the allocator's answer, None for a torch that has none."""
    without_settings(monkeypatch)
    if setting:
        monkeypatch.setenv(name, setting)
    monkeypatch.delattr(torch.cuda.memory, "_snapshot")
    if allocator:
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator, raising=False)
    rows = header.setup_rows(Config(), 1, None, torch.device("cuda"))
    assert rows["GPU memory"].startswith(row.format(name))
    assert "GPU memory" not in header.setup_rows(Config(), 1, None, torch.device("cpu"))


def test_a_machine_has_no_more_ranks_than_gpus(monkeypatch):
    environment = as_torchrun(1, 2, 0)
    with FakeGPU(1):
        assert refused(monkeypatch, environment, "cuda").startswith("2 ranks on a machine with 1 visible GPU: use")


def test_a_gpus_rank_joins_by_nccl_alone_and_its_first_step_may_take_long(monkeypatch):
    """NCCL itself is left out: this machine has none."""
    joined = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *args, **options: joined.append((*args, options))
    )
    monkeypatch.setattr(cpu_process, "configure_process", None)  # for CPUs alone
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in as_torchrun(1, 2, store.port).items():
        monkeypatch.setenv(name, value)
    config = Config()
    with FakeGPU(2) as gpu:
        started = runtime.start(config)
        assert gpu.calls == [("set_device", torch.device("cuda", 1))]
    ((backend, options),) = joined
    assert backend == "nccl" and started.device == options["device_id"] == torch.device("cuda", 1)
    assert options["timeout"] == timedelta(seconds=config.training.first_step_timeout_s)
    assert (options["rank"], options["world_size"]) == (started.rank, started.world) == (1, 2)


def test_the_time_outs_change_when_the_gpu_has_ended_its_first_step():
    process = launch("""
        from tests.support.fake_gpu import GPU, FakeGPU
        runtime.start(config)
        with FakeGPU() as gpu:
            runtime.Runtime(0, 0, 1, GPU).steady_timeout(30)
            assert gpu.host_waits == 1
        runtime.stop()
    """)
    done = process.wait(PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the memory that a step frees is reused by the next one: no page is cleared twice

FILL = """
import ctypes, resource, sys
from titanmoe.ops.cpu.process import reuse_freed_memory
if sys.argv[1] == "kept":
    reuse_freed_memory()
libc, at = ctypes.CDLL(None), ctypes.c_void_p()

def fill():
    assert libc.posix_memalign(ctypes.byref(at), ctypes.c_size_t(64), ctypes.c_size_t(2**26)) == 0
    ctypes.memset(at, 1, 2**26)
    libc.free(at)

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    fill()
before = faults()
for _ in range(8):
    fill()
print(faults() - before)
"""
"""With the C library's own functions, as torch calls them for a tensor: importing it takes four CPU-seconds.

Before version 2.38, glibc puts what alignment leaves over beside a tensor into a cache of 7 pieces per size, and the
freed tensor is too short for the next one until that cache is full: the first rounds do not count.
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_memory_that_was_freed_is_touched_without_page_faults() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(how: str) -> int:
        run = [sys.executable, "-c", FILL, how]
        return int(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)

    pages = 2**26 // os.sysconf("SC_PAGE_SIZE")
    assert faults("left") > 7 * pages and faults("kept") < pages
