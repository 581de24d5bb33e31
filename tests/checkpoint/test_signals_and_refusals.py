"""train.py, asked to stop, and given a wrong checkpoint. (Killed and restarted: tests/train/test_restarts.py.)"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.support import processes
from titanmoe.checkpoint import layout

ROOT = Path(__file__).resolve().parents[2]
RECIPE = [
    "--config=train_configs/debug.toml", "--parallelism.tp=1", "--training.seq_len=16", "--checkpoint.enable",
    "--metrics.tensorboard=false",
]  # fmt: skip
STEPS = 400  # more than it is given time for


def latest(folder: Path) -> int:
    """A kill may come between the rename of a checkpoint and that of `latest`, which is what counts."""
    return int(layout.read_latest(folder / "debug/checkpoints").removeprefix("step-") or 0)


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while latest(folder) < step:
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.05)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "debug/metrics.jsonl").read_text().splitlines()]


def test_ctrl_c_saves_and_ends_with_its_code(tmp_path: Path) -> None:
    options = ["--parallelism.experts.ep=1", f"--training.steps={STEPS}", f"--job.dump_folder={tmp_path}"]
    run = processes.Started(["train.py", *RECIPE, *options, "--checkpoint.interval=2", "--checkpoint.save=sync"])
    wait_for_step(tmp_path, 2)
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)  # as from a terminal, where torchrun sends it again
    done = run.wait()
    output = done.stdout + done.stderr
    assert done.returncode == 130 and "SIGINT: saving" in output and "Traceback" not in output, output
    assert latest(tmp_path) == steps(tmp_path)[-1]


REFUSALS = """
import json, sys
from titanmoe.components import COMPONENTS
from titanmoe.train.launch import main
for words in json.loads(sys.argv[1]):
    try:
        main(words, COMPONENTS)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_bad_input_is_one_line_and_code_2(tmp_path: Path) -> None:
    cases = {
        "--checkpoint.load=7": "has no such step: there are no checkpoints yet",
        "--checkpoint.load=nowhere": "nowhere: no such folder",
        "--checkpoint.folder=/proc/titanmoe": "/proc/titanmoe",
        "--checkpoint.load=none --checkpoint.folder=/proc/titanmoe": "/proc/titanmoe",
    }
    own = [*RECIPE, "--parallelism.experts.ep=1", "--training.steps=1", f"--job.dump_folder={tmp_path}"]
    done = processes.run(["-c", REFUSALS, json.dumps([[*own, *words.split()] for words in cases])])
    messages = done.stderr.split("\n2\n")
    assert len(messages) == 5 and messages[4] == "" and "Traceback" not in done.stderr, done.stderr
    for message, line in zip(messages, cases.values(), strict=False):
        assert line in message, done.stderr
    assert list(tmp_path.iterdir()) == [], "a refused start leaves nothing behind"
