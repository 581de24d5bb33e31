"""torchrun train.py, killed or asked to stop, and restarted by the same command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import parity, processes, world
from titanmoe.checkpoint import layout

ROOT = Path(__file__).resolve().parents[2]
RECIPE = [
    "--config=train_configs/debug.toml", "--parallelism.tp=1", "--training.seq_len=16", "--checkpoint.enable",
]  # fmt: skip
STEPS = 400  # more than it is given time for


def options(folder: Path, steps: int) -> list[str]:
    return [
        *RECIPE, "--parallelism.experts.ep=2", f"--training.steps={steps}", "--checkpoint.interval=2",
        f"--job.dump_folder={folder}", "--metrics.tensorboard=false",
    ]  # fmt: skip


def start(folder: Path, steps: int = STEPS) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return subprocess.Popen(
        [*torchrun, "--nproc-per-node=2", "train.py", *options(folder, steps)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_all(torchrun: subprocess.Popen) -> None:
    """Its ranks have their own sessions and would outlive it."""
    ranks = [int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]
    assert len(ranks) == 2
    for pid in (torchrun.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    torchrun.communicate()


def latest(folder: Path) -> int:
    """A kill may come between the rename of a checkpoint and that of `latest`, which is what counts."""
    return int(layout.latest(folder / "debug/checkpoints").removeprefix("step-") or 0)


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while latest(folder) < step:
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.05)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "debug/metrics.jsonl").read_text().splitlines()]


def test_a_run_that_is_killed_or_stopped_resumes_with_the_same_command(tmp_path: Path) -> None:
    first = start(tmp_path)
    wait_for_step(tmp_path, 4)
    kill_all(first)

    killed_at = latest(tmp_path)
    second = start(tmp_path)
    wait_for_step(tmp_path, killed_at + 2)
    second.terminate()  # torchrun passes it on
    told = second.communicate(timeout=120)[0]
    assert f"{layout.name_of(killed_at)}, after step {killed_at}" in told
    assert "SIGTERM: saving after this step" in told and "\nsaved " in told
    last = steps(tmp_path)[-1]
    assert latest(tmp_path) == last, "saved at the step it stopped at"

    world.run(2, loop, options(tmp_path, last + 1))
    assert steps(tmp_path) == list(range(1, last + 2)), "every step once, however often it was begun"
    assert len(layout.steps(tmp_path / "debug/checkpoints")) == 3

    told, _ = world.run(2, loop, options(tmp_path, last + 1))
    assert "nothing is left to do" in told


def loop(argv: list[str]) -> str:
    """What a rank prints; the command's arguments again, without the seconds that a process takes to start."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        parity.train(argv)
    return said.getvalue()


def test_ctrl_c_saves_and_ends_with_its_code(tmp_path: Path) -> None:
    options = ["--parallelism.experts.ep=1", f"--training.steps={STEPS}", f"--job.dump_folder={tmp_path}"]
    run = processes.Started(["train.py", *RECIPE, *options, "--checkpoint.interval=2", "--checkpoint.save=sync"])
    wait_for_step(tmp_path, 2)
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)  # as from a terminal, where torchrun sends it again
    done = run.wait()
    told = done.stdout + done.stderr
    assert done.returncode == 130 and "SIGINT: saving" in told and "Traceback" not in told, told
    assert latest(tmp_path) == steps(tmp_path)[-1]


ANSWERS = """
import json, sys
from titanmoe.train.launch import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_bad_input_is_one_line_and_code_2(tmp_path: Path) -> None:
    cases = {
        "--checkpoint.load=7": "has no such step; it has none",
        "--checkpoint.load=nowhere": "nowhere: no such folder",
        "--checkpoint.folder=/proc/titanmoe": "/proc/titanmoe",
    }
    own = [*RECIPE, "--parallelism.experts.ep=1", "--training.steps=1", f"--job.dump_folder={tmp_path}"]
    done = processes.run(["-c", ANSWERS, json.dumps([[*own, word] for word in cases])])
    answers = done.stderr.split("\n2\n")
    assert len(answers) == 4 and answers[3] == "" and "Traceback" not in done.stderr, done.stderr
    for answer, line in zip(answers, cases.values(), strict=False):
        assert line in answer, done.stderr
