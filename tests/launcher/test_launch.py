"""titanmoe train with real ranks: killed, interrupted once and twice, restarted."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import parity
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
LONG = {"training.steps": 4000, "lr_schedule.decay": "none"}
"""More than a test waits for."""


def started(
    folder: Path, *options: str, faults: list[dict[str, Any]] | None = None, forks: bool = False, **changes: Any
) -> processes.Started:
    words = parity.arguments(parity.SAVING | {"job.dump_folder": str(folder)} | changes)
    env = os.environ | {"PYTHONPATH": str(ROOT / "scripts/torture/faults"), "FAULTS": json.dumps(faults or [])}
    logs = f"--logs={folder}/logs"
    return processes.Started(["-m", "titanmoe", "train", *words, "--ranks=2", logs, *options], env, forks=forks)


def wait_for(run: processes.Started, file: Path) -> None:
    deadline = time.monotonic() + 240
    while not file.exists():
        assert time.monotonic() < deadline and run.process.is_alive(), run.out.read_text() + run.err.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("forks", [True, False], ids=["forks", "new processes"])
def test_a_killed_rank_is_the_last_thing_on_the_screen(tmp_path: Path, forks: bool) -> None:
    kill = {"do": "kill", "rank": 1, "on": ["write"], "path": "step-00000002.writing"}
    done = started(tmp_path, faults=[kill], forks=forks, **LONG).wait()
    assert done.returncode == 128 + signal.SIGKILL
    error, part, log = done.stderr.splitlines()[-3:]
    assert error == "error: rank 1 was killed by SIGKILL: from outside, or by the kernel for lack of memory (see dmesg)"
    assert re.match(r"it was in step [23], (between steps|data|forward and backward|norm and update)", part)
    assert log == f"its log: {tmp_path}/logs/rank1.log (empty)"
    assert "Traceback" not in done.stdout + done.stderr and (tmp_path / "logs/rank1.log").exists()
    assert done.stdout.startswith(f"2 ranks; logs in {tmp_path}/logs\n") and "\nstep " in done.stdout
    start = json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[0])
    assert start["environment"]["ranks"] == 2 and start["environment"]["command"].startswith("titanmoe train --")


def test_a_full_disk_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    """It has no room for a checkpoint, nor for the logs and notes of the launcher."""
    full = {"do": "fail", "errno": errno.ENOSPC, "on": ["write"], "times": 99}
    paths = ("step-00000002.writing", "logs/rank0.json", "logs/rank1.json", "agent.log")
    done = started(tmp_path, faults=[full | {"path": path} for path in paths], forks=True, **LONG).wait()
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/run/checkpoints/step-00000002.writing/rank-0000")
    assert ": No space left on device: " in line and " more bytes are needed and " in line
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step*")] == ["step-00000001"]


def test_ctrl_c_once_saves_and_ends_quietly(tmp_path: Path) -> None:
    run = started(tmp_path, forks=True, **LONG)
    wait_for(run, tmp_path / "run/checkpoints/step-00000002")
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)  # at once: from the terminal, and from make
    done = run.wait()
    assert done.returncode == 130 and "SIGINT: saving after this step" in done.stdout
    (saved,) = re.findall(r"^saved +(.*)$", done.stdout, re.MULTILINE)
    assert Path(saved).is_dir() and "Traceback" not in done.stdout and done.stderr == ""
    assert not list((tmp_path / "logs").glob("rank*")), "empty logs are removed"


@pytest.mark.slow
def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    slow = {"do": "slow", "rank": 1, "on": ["write"], "path": ".writing", "seconds": 60}
    run = started(tmp_path, faults=[slow], **LONG)
    wait_for(run, tmp_path / "run/checkpoints/step-00000001.writing")
    run.send_signal(signal.SIGINT)
    time.sleep(1)
    since = time.monotonic()
    run.send_signal(signal.SIGINT)
    done = run.wait()
    assert done.returncode == 130 and time.monotonic() - since < 5
    assert done.stderr.endswith("ended at once; checkpoints that were complete are there\n")


@pytest.mark.slow
def test_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    kill = {"do": "kill", "rank": 1, "on": ["write"], "path": "step-00000002.writing", "once": str(tmp_path / "struck")}
    done = started(tmp_path, "--max-restarts=1", faults=[kill], **{"training.steps": 4}).wait()
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "restart"] == [1]
    assert "done       step 4 of 4" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("by_number", [True, False], ids=["numbered", "rendezvous"])
def test_two_nodes(tmp_path: Path, by_number: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for number in range(2):
        if by_number:
            where = [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        else:
            where = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={1 - number}", "--local-addr=127.0.0.1"]
        logs = f"--logs={tmp_path}/logs{number}"
        nodes.append(started(tmp_path, "--ranks=2", "--nnodes=2", *where, logs, **{"training.steps": 2}))
    ends = [node.wait() for node in nodes]
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    first = max(ends, key=lambda end: len(end.stdout))
    assert first.stdout.startswith("1 rank on each of 2 nodes; logs in ") and "done       step 2 of 2" in first.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_out_of_memory_says_where_and_what_helps(tmp_path: Path) -> None:
    big = {"model.vocab_size": 2**20, "training.seq_len": 4096, "training.local_batch_size": 8}
    big |= {"training.global_batch_size": 8}  # logits of 137 GB
    done = started(
        tmp_path, "--ranks=1", "--memory=ignore", **big | {"checkpoint.enable": False, "training.loss_chunks": 0}
    ).wait()
    assert done.returncode == 1
    match = re.search(
        r"^error: .*rank 0 is out of memory: .*\nheld: weights \d.*\nwhat helps most:\n", done.stderr, re.M
    )
    assert match, done.stderr
