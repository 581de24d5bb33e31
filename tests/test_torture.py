"""The faults and the judgement of scripts/torture, and the page's table; trials take minutes and are not tests."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.torture import judge
from scripts.torture.judge import read, table
from scripts.torture.runs import TIMEOUT_S, Run, Wrong
from scripts.torture.trials import GROUPS
from tests.support import processes

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "scripts/torture/faults"

# What a rank does with the disk, in the order of a save; it reports how far it got.
RANK = """
import os, sys, time
def do(name, what, *args):
    began = time.monotonic()
    try:
        what(*args)
        took = time.monotonic() - began
        print(name, "done" if took < float(sys.argv[1]) else "slow", flush=True)
    except OSError as error:
        print(name, error.errno, flush=True)
def write(path):
    with open(path, "w") as stream:
        stream.write("x")
        os.fsync(stream.fileno())
do("mkdir", os.mkdir, "step.writing")
do("write", write, "step.writing/a")
do("again", write, "step.writing/a")
do("rename", os.rename, "step.writing", "step")
do("list", os.listdir, "step")
do("read", lambda: open("step/a").read())
"""


def said(tmp_path, rank, *faults, slow=1e9):
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(slow)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(FAULTS), "RANK": str(rank), "FAULTS": json.dumps(faults)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, dict(line.split() for line in done.stdout.splitlines())


ALL = dict.fromkeys(("mkdir", "write", "again", "rename", "list", "read"), "done")
FULL = {"do": "fail", "errno": errno.ENOSPC}


@pytest.mark.parametrize(
    ("rank", "fault", "code", "changed"),
    [
        (0, FULL | {"on": ["write"], "path": "step", "at": 2}, 0, {"again": str(errno.ENOSPC)}),
        # so there is no such file
        (0, FULL | {"on": ["write"], "path": "step", "times": 2}, 0, {"write": "28", "again": "28", "read": "2"}),
        (0, FULL | {"on": ["fsync"], "path": "writing/a"}, 0, {"write": str(errno.ENOSPC)}),
        (0, FULL | {"on": ["read", "listdir"], "path": "step", "times": 2}, 0, dict.fromkeys(("list", "read"), "28")),
        (0, FULL | {"path": "elsewhere"}, 0, {}),
        (1, FULL | {"rank": 0}, 0, {}),
        (1, {"do": "kill", "rank": 1, "on": ["rename"], "path": "step"}, -signal.SIGKILL, "rename"),
    ],
)
def test_a_fault_strikes_where_it_is_set(tmp_path, rank, fault, code, changed):
    expected = ALL | changed if isinstance(changed, dict) else dict(list(ALL.items())[: list(ALL).index(changed)])
    assert said(tmp_path, rank, fault) == (code, expected)


def test_a_slow_disk_takes_as_long_as_set(tmp_path):
    assert said(tmp_path, 0, {"do": "slow", "seconds": 0.2, "on": ["rename"]}, slow=0.19)[1]["rename"] == "slow"


def test_a_fault_that_strikes_once_lets_the_next_start_pass(tmp_path):
    once = {"do": "kill", "on": ["mkdir"], "once": str(tmp_path / "struck")}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert said(tmp_path / "first", 0, once) == (-signal.SIGKILL, {})
    assert said(tmp_path / "second", 0, once) == (0, ALL)


# Three steps under a fault as sitecustomize.py installs it, each of two microbatches and computed twice; what became of
# their numbers.
STEPS = """
import json, os, runpy, torch
faults = runpy.run_path("scripts/torture/faults/sitecustomize.py")
class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.inner(x).sum()
part = Part()
torch.nn.init.ones_(part.inner.weight)
fault = json.loads(os.environ["FAULT"])
faults["WITH_TORCH"][fault["do"]](**fault)
weight, optimizer = part.inner.weight, torch.optim.AdamW(part.parameters(), lr=0.1)
for step in range(3):
    for run in range(4):
        weight.grad = None
        loss = part(torch.ones(1, 2))
        loss.backward()
        print(step, run, "loss" * (not loss.isfinite()) + "grad" * (not weight.grad.isfinite().all()))
    weight.grad.fill_(1)
    optimizer.step()
    print("after", step, weight[0, 1].item(), optimizer.state[weight]["exp_avg"][0, 1].item())
"""


def after(tmp_path, **fault):
    """The lines of runs that have numbers that are not finite, and weight and moment after each step."""
    env = dict(os.environ) | {"FAULT": json.dumps(fault | {"once": str(tmp_path / "struck")})}
    done = processes.run(["-c", STEPS], env)
    assert not done.returncode, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    states = [(float(line[2]), float(line[3])) for line in lines if line[0] == "after"]
    return [line for line in lines if line[0] != "after" and len(line) == 3], states


@pytest.mark.parametrize(("more", "what"), [({}, "loss"), ({"parameter": "weight"}, "grad")])
def test_a_number_becomes_nan_in_one_microbatch_and_when_its_step_is_repeated(tmp_path, more, what):
    more = more | {"do": "nan", "module": "inner", "place": 1, "at": 1, "microbatch": 1, "of": 2}
    odd, _ = after(tmp_path, **more)
    assert odd == [["1", "1", what], ["1", "3", what]] and (tmp_path / "struck").exists()


@pytest.mark.parametrize("of", ["", "exp_avg"])
def test_a_flipped_bit_of_a_weight_or_moment(tmp_path, of):
    odd, states = after(tmp_path, do="flip", shape=[2, 2], place=1, bit=31, at=2, of=of)
    assert not odd and [[x < 0 for x in state] for state in states[:2]] == [[False] * 2, [of == "", of != ""]]


# Calls of a function before and after a signal.
CALLS = """
import json, os, signal, time
for number in range(4):
    began = time.monotonic()
    said = json.dumps(1.5)
    print(number, type(said).__name__, time.monotonic() - began > 0.1)
    if number == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.parametrize(
    ("do", "third", "fourth"), [("slow", "str True", "str True"), ("skip", "float False", "str False")]
)
def test_at_a_signal_calls_become_slow_or_one_is_skipped(do, third, fourth):
    faults = [{"do": do, "on": ["signal"], "rank": 0, "path": "json:dumps", "seconds": 0.2}]
    env = os.environ | {"PYTHONPATH": str(FAULTS), "RANK": "0", "FAULTS": json.dumps(faults)}
    done = subprocess.run([sys.executable, "-c", CALLS], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 str False", "1 str False", f"2 {third}", f"3 {fourth}"]


@pytest.mark.parametrize("launcher", ["torchrun", "titanmoe train"])
def test_a_hang_that_names_another_rank_or_ends_late_has_failed(tmp_path, monkeypatch, launcher):
    run = Run(tmp_path, 5, launcher)
    run.agent, run.rank = SimpleNamespace(is_alive=lambda: False), 2
    again = []
    monkeypatch.setattr(run, "start", lambda: again.append(1))

    def ends(text, ago=0.0):
        run.log.write_text(f"step 1\n{text}\n")
        run.struck_at = time.monotonic() - ago
        judge.expect_end_and_restart(run)

    ends("error: hang: rank 2 on a is late, in step 3")
    ends("error: hang: rank 2 on a cannot be reached, in step 3")
    ends("error: rank 0 failed first, with exit code 1: not saved after 6 s: rank 2 is still writing a")
    assert len(again) == 3 * (launcher != "torchrun") and run.figures["seconds until all had ended"] < 1
    others = "error: hang: rank 2 on a is late (and rank 3), in step 3"
    for text in (others, "error: hang: rank 1 on a is late, in step 3", "error: rank 2 was killed by SIGKILL", "done"):
        with pytest.raises(Wrong, match="rank 2 was struck, and the last report is: "):
            ends(text)
    with pytest.raises(Wrong, match="a traceback before the report"):
        ends("Traceback\nerror: hang: rank 2 on a is late, in step 3")
    with pytest.raises(Wrong, match="all had ended only after 1"):
        ends("error: hang: rank 2 on a is late, in step 3", TIMEOUT_S + 11)


def events(run, *events):
    run.run_folder.mkdir(parents=True, exist_ok=True)
    (run.run_folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_what_an_event_must_name_and_a_false_alarm(tmp_path):
    run = Run(tmp_path)
    run.agent = SimpleNamespace(join=lambda s: None, exitcode=0, is_alive=lambda: True)
    events(run, {"kind": "suspect", "step": 4, "text": "the output of layers.1.moe, on rank 1"})
    judge.expect_event(run, "suspect", "layers.1.moe", "on rank 1")
    with pytest.raises(Wrong, match="on rank 2 should have been named: the output of"):
        judge.expect_event(run, "suspect", "layers.1.moe", "on rank 2")
    judge.expect_no_alarm(run)
    events(run, {"kind": "hang", "step": 4, "text": "rank 1 is late"})
    with pytest.raises(Wrong, match="a false alarm: rank 1"):
        judge.expect_no_alarm(run)


def test_whom_a_slow_run_must_name(tmp_path):
    first, second = (
        {"kind": "straggler", "step": 99, "ranks": [r], "cause": "data", "text": f"rank {r}"} for r in (2, 1)
    )
    run = Run(tmp_path)
    run.agent = SimpleNamespace(is_alive=lambda: False)
    events(run)
    (run.run_folder / "metrics.jsonl").write_text('{"step": 70}\n{"step": 120}\n')

    def judged(*named, ranks=(2,)):
        def slow():
            events(run, *named)
            return list(ranks), "data"

        events(run)
        judge.expect_straggler(run, slow)

    judged(first)
    assert run.figures == {"calm steps before": 120, "steps until named": -21}
    for named, ranks, why in (
        ([first], [1], r"\(\[1\], 'data'\) should have been named: rank 2"),
        ([first, second], [2], "named too: rank 1"),
        ([], [2], "a name .* did not happen"),
    ):
        with pytest.raises(Wrong, match=why):
            judged(*named, ranks=ranks)
    events(run, first)
    with pytest.raises(Wrong, match="named without a fault: rank 2"):
        judge.expect_straggler(run, lambda: ([2], "data"))


def test_a_leak_is_not_flat(tmp_path) -> None:
    def flat(memory: float = 0.0, files: float = 0.0, threads: float = 0.0) -> None:
        judge.expect_no_growth(
            Run(tmp_path),
            [[470 + memory * n, 28 + (n % 4 == 0) + int(files * n), 15 + int(threads * n)] for n in range(20)],
        )

    flat()
    flat(memory=1.0)
    for grown, rates in (("MiB", {"memory": 5}), ("open files", {"files": 0.2}), ("threads", {"threads": 0.2})):
        with pytest.raises(Wrong, match=f"{grown} grew"):
            flat(**rates)


def test_the_page_says_what_the_trials_say() -> None:
    """If this fails, put this table of docs/torture.jsonl on the page: all kinds of a group in a row."""
    outcomes, page = read(ROOT / "docs/torture.jsonl"), (ROOT / "docs/reliability.md").read_text()
    assert not [each for each in outcomes if each.failure]
    by_group = []
    for name, group in GROUPS.items():
        some = [each for each in outcomes if each.kind in group.kinds]
        assert {each.kind for each in some} == ({*group.kinds} if name != "stragglers" else set())
        by_group += [replace(each, kind=f"`{name}`") for each in some if name != "soak"]
    assert table(by_group) in page
