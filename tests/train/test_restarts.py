"""Runs under the real torchrun that lose ranks or whole nodes, and continue by themselves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests import parity, world
from tests.support import processes
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.layout import folder_name
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.train import runtime
from titanmoe.train.launch import read_config

ROOT = Path(__file__).resolve().parents[2]
STEPS = 7
PATIENCE = 240.0
RUN = parity.SAVING | {"training.steps": STEPS, "model.num_layers": 1}


def options(folder: Path, **changes: Any) -> list[str]:
    return parity.arguments(RUN | {"job.dump_folder": str(folder)} | changes)


def agent(log: Path, argv: list[str], environment: dict[str, str], forks: bool) -> None:
    """torchrun, in a process that need not import torch again. forks: nor need its ranks."""
    from torch.distributed.run import main

    world.begin_in_fork()
    if forks:
        processes.fork_ranks()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(ROOT / "scripts/torture/faults"), "PYTHONUNBUFFERED": "1"} | environment
    main(argv)


class Agents:
    """The torchrun processes of a test, one per node."""

    def __init__(self, log: Path):
        self.log, self.faults, self.all = log, [], []

    def start(self, *argv: str, forks: bool = False, **environment: str) -> Any:
        environment["FAULTS"] = json.dumps(self.faults)
        process = world._forkserver().Process(target=agent, args=(self.log, list(argv), environment, forks))
        process.start()
        self.all.append(process)
        return process

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            lives = any(process.is_alive() for process in self.all)
            assert lives and time.monotonic() < end, f"{what} did not come about\n{self.said()}"
            time.sleep(0.05)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    started = Agents(tmp_path / "log")
    yield started
    for process in started.all:
        process.terminate()
        process.join(10)
        process.kill()  # its ranks die with it
        process.join()


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]


def went_on_after(run: Path) -> list[int]:
    if not (run / "events.jsonl").exists():
        return []
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["kind"] == "restart"]


def said(argv: list[str]) -> str:
    """What a rank prints in the same run on ranks of a pool, which saves the seconds that a process takes to start."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        parity.train(argv)
    return out.getvalue()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_restarted_stopped_and_started_again_and_no_bit_differs(tmp_path: Path, agents: Agents) -> None:
    """One run: a rank is killed and torchrun restarts both; it gets a signal to stop; the same command continues."""
    struck, checkpoints = tmp_path / "struck", tmp_path / "hurt/run/checkpoints"
    small = {"lr_schedule.decay": "none", "training.global_batch_size": 2}
    agents.faults += [
        {"do": "kill", "rank": 1, "on": ["write"], "path": f"{folder_name(4)}.writing", "once": str(struck)},
        # Rank 0 comes first, and must not mistake what the previous rank 1 left for the new one.
        {"do": "slow", "rank": 1, "on": ["read"], "path": "train.py", "seconds": 1},
    ]
    torchrun = agents.start(
        *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=3", "train.py"),
        *options(tmp_path / "hurt", **small, **{"training.steps": 400}),
        forks=True,
    )
    agents.wait(lambda: went_on_after(tmp_path / "hurt/run") == [3], "the restart")
    agents.wait(lambda: folder_name(5) <= layout.read_latest(checkpoints), "a checkpoint after it")
    torchrun.terminate()  # it passes the signal on
    torchrun.join(PATIENCE)
    assert (
        struck.exists()
        and "SIGTERM: saving after this step, then ending\n" in agents.said()
        and "\nsaved " in agents.said()
    )
    stopped = losses(tmp_path / "hurt")[-1][0]
    assert layout.read_latest(checkpoints) == folder_name(stopped), "saved at the step it stopped at"

    last = small | {"training.steps": stopped + 1}
    printed = world.run(2, said, options(tmp_path / "hurt", **last))[0]
    assert f"{folder_name(stopped)}, after step {stopped}" in printed
    printed = world.run(2, said, options(tmp_path / "hurt", **last))[0]
    assert f"nothing is left to do: the run in {tmp_path}/hurt/run has made {stopped + 1} steps, and" in printed
    assert f" --training.steps {2 * (stopped + 1)}\n" in printed and " --checkpoint.load none " in printed
    assert "\nsaved " not in printed, "nothing is left to save either"
    assert len(layout.checkpoints_by_step(checkpoints)) == 3, "older ones are removed"

    world.run(2, said, options(tmp_path / "calm", **last))
    assert losses(tmp_path / "hurt") == losses(tmp_path / "calm"), "every step once, however often it was begun"
    hurt, calm = (
        Checkpoint(tmp_path / name / "run/checkpoints" / folder_name(stopped + 1)) for name in ("hurt", "calm")
    )
    assert hurt.tensors == calm.tensors
    assert all(hurt.read(name).equal(calm.read(name)) for name in calm.tensors)


@pytest.mark.slow
def test_a_world_that_shrinks_and_grows_again(tmp_path: Path, agents: Agents) -> None:
    """Two nodes of one rank each: one is lost, the other continues alone, and a new one joins it."""
    shrink, grow = tmp_path / "shrink", tmp_path / "grow"
    agents.faults += [
        {"do": "wait", "rank": 0, "on": ["mkdir"], "path": f"{folder_name(3)}.writing", "until": str(shrink)},
        {"do": "wait", "rank": 0, "on": ["mkdir"], "path": f"{folder_name(5)}.writing", "until": str(grow)},
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = options(tmp_path, **{"parallelism.dp_shard": 2, "parallelism.experts.edp": 2, "training.timeout_s": 20})

    def node(host: int) -> Any:
        return agents.start(
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *(f"--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,is_host={host}", "train.py", *argv),
            # Otherwise torchrun does not tell a node that joins later where the ranks meet (torch 2.13).
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    first, second = node(1), node(0)
    folder = tmp_path / "run"
    agents.wait(lambda: (folder / "checkpoints" / folder_name(2)).exists(), "the second checkpoint")
    agents.wait(lambda: '"step": 2' in (folder / "metrics.jsonl").read_text(), "the second step's line")
    (rank,) = children(second.pid)
    second.kill()
    agents.wait(lambda: not Path(f"/proc/{rank}").exists(), "the end of the rank whose launcher is gone")
    shrink.touch()
    line = "mapping: restarted on 1 rank: parallelism.dp_shard 2 -> 1, parallelism.experts.edp 2 -> 1"
    agents.wait(lambda: line in agents.said(), "a run on one rank")
    agents.wait(lambda: (folder / "checkpoints" / folder_name(4)).exists(), "the fourth checkpoint")

    third = node(0)
    agents.wait(lambda: "SIGTERM: saving after this step" in agents.said(), "room for the new node")
    grow.touch()
    for torchrun in (first, third):
        torchrun.join(PATIENCE)
        assert torchrun.exitcode == 0, agents.said()
    assert went_on_after(folder) == [2, 6]  # the step in which it got the signal, and one more
    assert agents.said().count("mapping: ") == 1, "grown again, the recipe's own mapping holds"

    world.run(2, said, options(tmp_path / "calm"))
    assert losses(tmp_path) == [
        (step, pytest.approx(loss, rel=1e-10), pytest.approx(norm, rel=1e-10))
        for step, loss, norm in losses(tmp_path / "calm")
    ]


STANDS_IN_FOR_TORCHRUN = """
import os, time
from titanmoe.train import runtime
if child := os.fork():
    time.sleep(300)
runtime.die_with_launcher()
print(os.getpid(), flush=True)
time.sleep(99)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own means")
@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_dies_with_its_torchrun_and_a_run_by_hand_outlives_its_shell(launched: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    launcher = processes.Started(
        ["-c", STANDS_IN_FOR_TORCHRUN], environment | ({"TORCHELASTIC_RUN_ID": "x"} if launched else {})
    )
    end = time.monotonic() + PATIENCE
    while not (printed := launcher.out.read_text() if launcher.out.exists() else "").endswith("\n"):
        assert time.monotonic() < end and launcher.process.is_alive(), launcher.err.read_text()
        time.sleep(0.02)
    child = int(printed)
    launcher.kill()
    status = Path(f"/proc/{child}/stat")
    if launched:
        while status.exists() and status.read_text().split()[2] != "Z":
            assert time.monotonic() < end, "the rank outlived its launcher"
            time.sleep(0.02)
    else:
        assert status.read_text().split()[2] != "Z"
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own means")
def test_a_launcher_that_died_before_the_kernel_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, killed = iter([4711, 1]), []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(runtime.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(runtime.os, "kill", lambda *what: killed.append(what))
    runtime.die_with_launcher()
    assert killed == [(os.getpid(), signal.SIGKILL)]


# ---- the name of an attempt


def meet(port: int, ranks: int, seconds: float = 20.0, only: tuple[int, ...] = ()) -> list[str]:
    """The name that each rank gets, all in threads of this process."""

    def one(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        timeout = timedelta(seconds=seconds)
        store.set_timeout(timeout)
        return runtime._agree_on_name(store, runtime.Environment(rank, rank, ranks, ranks, True), timeout)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, only or range(ranks)))


def test_each_attempt_has_a_name_of_its_own_that_all_its_ranks_know() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("rank 1", "the word of a rank that is dead")
    names = [meet(store.port, ranks) for ranks in (2, 2, 1, 3)]
    assert all(len(set(attempt)) == 1 for attempt in names), "one name on all ranks"
    assert len({attempt[0] for attempt in names}) == len(names), "and another one each time"


def test_missing_ranks_are_counted() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("rank 1", "dead")
    store.set("rank 2", "dead")
    with pytest.raises(RuntimeError, match="only 1 of 3 ranks joined within 0 s"):
        meet(store.port, 3, 0.2, only=(0,))


# ---- when a mapping may change


def test_only_a_run_that_has_begun_takes_another_mapping(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    argv = options(tmp_path, **{"parallelism.dp_shard": 2})
    with pytest.raises(ConfigError, match=r"parallelism\.dp_shard = 2 is not what"):
        read_config(argv, 4, COMPONENTS)
    for begun in (False, True):
        if begun:
            (tmp_path / "run/checkpoints" / folder_name(3)).mkdir(parents=True)
        else:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        config = read_config(argv, 4, COMPONENTS)
        assert config.parallelism.dp_shard == 4 and config.training.global_batch_size == 4
        assert "mapping: restarted on 4 ranks: parallelism.dp_shard 2 -> 4" in capsys.readouterr().out
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert read_config(argv, 2, COMPONENTS).parallelism.dp_shard == 2 and "mapping" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"where only data parallel may change; parallelism\.tp = 2"):
        read_config([*argv, "--parallelism.tp=2"], 3, COMPONENTS)
    with pytest.raises(ConfigError, match="global_batch_size = 4 is not a multiple"):
        read_config(argv, 8, COMPONENTS)
