"""The faults and the table of scripts/torture.py; the trials themselves take minutes and are not tests."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import torture  # noqa: E402
import torture_hangs  # noqa: E402
from torture import Outcome, is_flat, named_table, table  # noqa: E402
from torture_named import STRUCK, Struck, samples  # noqa: E402
from torture_runs import INTERVAL, KINDS, Missed, Run, Wrong, write  # noqa: E402

from tests import processes  # noqa: E402

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
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts/faults"), "RANK": str(rank), "FAULTS": json.dumps(faults)},
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
        (0, FULL | {"on": ["read", "list"], "path": "step", "times": 2}, 0, dict.fromkeys(("list", "read"), "28")),
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
faults = runpy.run_path("scripts/faults/sitecustomize.py")
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


# A rank alone in its world, all of whose messages go to itself.
MESSAGES = """
import os, runpy, time, torch, torch.distributed as dist
Delay = runpy.run_path("scripts/faults/sitecustomize.py")["Delay"]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for peers, once in (([1], "no"), ([0], "yes")):
    Delay(peers, 0.0, 2, 0.4, 1, os.environ["FOLDER"] + "/" + once)
    for _ in range(3):
        began = time.monotonic()
        torch.ops._c10d_functional.all_reduce(torch.zeros(1), "sum", dist.group.WORLD.group_name)
        print(round(time.monotonic() - began, 1))
"""


def test_a_slow_link_delays_messages_to_its_ranks_alone(tmp_path):
    done = processes.run(["-c", MESSAGES], dict(os.environ) | {"FOLDER": str(tmp_path)})
    assert not done.returncode, done.stderr
    took = [float(line) for line in done.stdout.split()]
    assert max(took[:4] + took[5:]) < 0.4 <= took[4] and [path.name for path in tmp_path.iterdir()] == ["yes"]


ONE, TWO, *_ = KINDS
TRIED = [
    Outcome(ONE, 0, True, 0, 2, 5.0),
    Outcome(TWO, 1, True, 4, 9, 6.0, failure="4 saved steps lost"),
    Outcome(ONE, 2, True, 0, 1, 30.0),
    Outcome(TWO, 3, failure="torchrun ended with 1"),
    Outcome(ONE, 4, True, 0, 0, 7.0),
]


def test_the_table_adds_up():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(TRIED).splitlines()[2:]]
    assert rows == [
        [ONE, "3", "3", "0", "2", "7.0", "30.0"],
        [TWO, "2", "1", "4", "9", "6.0", "6.0"],
        ["all", "5", "4", "4", "9", "6.5", "30.0"],
    ]


STOP, LINK, *_ = [kind for kind in STRUCK if kind in ("a rank stopped (SIGSTOP)", "a slow link")]
NAMED = [
    Outcome(STOP, 0, True, seconds=7.0, named_after=5.0, mapping="{}"),
    Outcome(STOP, 8, failure="rank 3 should have been named: error: hang: rank 1"),
    Outcome(STOP, 16, True, seconds=9.0, named_after=6.0, mapping="{}"),
    Outcome(LINK, 3, True, seconds=None, mapping="{}"),
]


def test_what_was_named_is_a_table_of_its_own():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in named_table(NAMED).splitlines()[2:]]
    assert rows == [
        [STOP, "3", "2", "2", "5.5", "6.0", "8.0"],
        [LINK, "1", "no false alarm", "1", "", "", ""],
        ["all", "4", "2", "3", "5.5", "6.0", "8.0"],
    ]
    assert str(NAMED[0]) == "equal, named after 5.0 s, in 0 s under {}" and str(NAMED[1]).startswith("FAILED: rank 3")


def test_hangs_have_a_table_too(tmp_path):
    torchrun, ours = torture_hangs.LAUNCHERS
    tried = [("stop", torchrun, 8.5), ("stop", torchrun, 9.5), ("stop", ours, 8.0), ("skip", torchrun, None)]
    lines = torture_hangs.table([{"kind": k, "launcher": under, "seconds": s} for k, under, s in tried]).splitlines()
    assert lines[2:] == [
        "| stopped (SIGSTOP) | torchrun | 2 | 2 | 9.0 | 9.5 |",
        "| stopped (SIGSTOP) | titanmoe train | 1 | 1 | 8.0 | 8.0 |",
        "| one rank skips a collective | torchrun | 1 | 0 |  |  |",
    ]


def test_a_trial_that_names_another_rank_or_too_late_has_failed(tmp_path, monkeypatch):
    run = Struck(tmp_path, 5)
    run.folder.mkdir(exist_ok=True)
    run.agent = SimpleNamespace(is_alive=lambda: True)
    run.log.write_text("step 1\nerror: hang: rank 1 on a is late, in step 3\n")
    run.struck_at = torture.time.monotonic()
    run.named(run.said, "hang: rank 1 ")
    assert run.named_after < 1
    with pytest.raises(Wrong, match="rank 2  should have been named: error: hang: rank 1 on a"):
        run.named(run.said, "hang: rank 2 ")
    run.struck_at -= 100
    with pytest.raises(Wrong, match="named only after 1"):
        run.named(run.said, "hang: rank 1 ")
    run.agent, run.restarts = SimpleNamespace(join=lambda s: None, exitcode=0), 0
    with pytest.raises(Wrong, match="a false alarm"):
        run.goes_on()


def test_a_trials_mapping_comes_from_its_seed_and_its_calm_run_has_the_same(tmp_path):
    assert {Struck(tmp_path, seed).mapping for seed in range(30)} == set(range(5))
    run = Struck(tmp_path, 7)
    run.skip(5)
    calm = Struck.of_calm(run.calm, tmp_path)
    assert calm.options == run.options | {"data.skip_steps": '["5"]'} and calm.folder == tmp_path / run.calm
    tp = next(one for one in (Struck(tmp_path, seed) for seed in range(30)) if "parallelism.tp" in one.options)
    tp.rank = 3
    tp.skip(5)
    assert tp.data_ranks == 2 and samples(tp, {}, 1) == ["; sample 19 of the run"]  # the last of the fifth four


def test_trials_resume_where_they_stopped(tmp_path, monkeypatch, capsys):
    made = []

    def one(kind, seed, folder, calm):
        if len(made) == stop:
            raise KeyboardInterrupt
        made.append((kind, seed))
        return Outcome(kind, seed, True, 0, 1, 5.0, 10.0)

    monkeypatch.setattr(torture, "one", one)
    results, page = tmp_path / "a" / "results.jsonl", tmp_path / "page.md"
    args = SimpleNamespace(only=None, named=False, first=0, trials=13, results=str(results), out=str(page))
    stop = 3
    with pytest.raises(KeyboardInterrupt):
        torture.torture(args, tmp_path)
    assert [(each.kind, each.seed) for each in torture.read(results)] == made and "3 trials in 30 s" in page.read_text()
    with results.open("a") as stream:
        stream.write('{"kind": "a line cut')
    stop = 99
    assert torture.torture(args, tmp_path) == 0
    assert made == [(list(KINDS)[seed % len(KINDS)], seed) for seed in range(13)]
    assert len(torture.read(results)) == 13 and "13 trials in 130 s, 0 failures" in page.read_text()
    assert torture.torture(args, tmp_path) == 0 and len(made) == 13
    assert "13 of 13 trials are already in " in capsys.readouterr().out


def test_a_failed_trial_is_kept_and_reported_with_its_command(tmp_path, monkeypatch):
    def fail(kind, seed, folder, calm):
        raise torture.Wrong("torchrun ended with 1")

    monkeypatch.setattr(torture, "trial", fail)
    failed = torture.one(TWO, 3, tmp_path, None)
    torture.note(tmp_path / "results", failed)
    assert torture.read(tmp_path / "results") == [failed] and str(failed) == "FAILED: torchrun ended with 1"
    assert failed.command == f'--only "{TWO}" --first 3 --trials 1: torchrun ended with 1'


def test_a_bit_is_flipped_only_where_a_checkpoint_before_it_can_be_taken(tmp_path, monkeypatch):
    run = Run(tmp_path)
    for name in ("start", "wait_for_a_moment", "kill_launcher"):
        monkeypatch.setattr(run, name, lambda *_: None)
    for step, ends in ((INTERVAL, pytest.raises(Missed)), (2 * INTERVAL, contextlib.nullcontext())):
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
        (run.checkpoints / f"step-{step:08}/a").write_bytes(b"a")
        with ends:
            KINDS["a bit flipped in the newest checkpoint"](run)
    assert run.committed == INTERVAL and (run.checkpoints / f"step-{INTERVAL:08}/a").read_bytes() == b"a"


def test_a_trial_reads_what_a_run_left(tmp_path):
    run = Run(tmp_path)
    run.checkpoints.mkdir(parents=True)
    (run.run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    (run.run / "events.jsonl").write_text(
        '{"step": 0, "kind": "start"}\n{"step": 1, "kind": "save"}\n{"step": 1, "kind": "restart"}\n'
    )
    for name in (f"step-{INTERVAL:08}", f"step-{2 * INTERVAL:08}", f"step-{3 * INTERVAL:08}.writing"):
        (run.checkpoints / name).mkdir()
    run.struck()
    assert (run.made, run.begun(), run.committed) == (2, [0, 1], 2 * INTERVAL)
    assert len(KINDS) == 11


def test_a_leak_is_not_flat() -> None:
    def rows(**grows: float) -> list[list[float]]:
        memory, files, threads = (grows.get(name, 0.0) for name in ("memory", "files", "threads"))
        return [
            [step, 470 + memory * step, 28 + (step % 4 == 0) + int(files * step), 15 + int(threads * step)]
            for step in range(20)
        ]

    assert is_flat(rows()) and is_flat(rows(memory=1.0))
    assert not any(is_flat(rows(**{name: rate})) for name, rate in (("memory", 5), ("files", 0.2), ("threads", 0.2)))


def test_a_table_goes_between_the_marks_of_a_page(tmp_path):
    page, apart = tmp_path / "page.md", tmp_path / "apart.md"
    page.write_text("a\n<!-- soak -->\nold\n<!-- end of soak -->\nb\n")
    for text in ("one\n", "two\n"):
        write(page, "soak", text)
        write(apart, "soak", text)
    assert page.read_text() == "a\n<!-- soak -->\n\ntwo\n\n<!-- end of soak -->\nb\n"
    assert apart.read_text() == "two\n"
    marks = [line for line in (ROOT / "docs/reliability.md").read_text().splitlines() if line.startswith("<!-- ")]
    names = [mark[5:-4] for mark in marks[::2]]
    assert {"hangs", "stragglers", "simulated stragglers", "trials", "soak", "named"} <= set(names)
    assert marks == [f"<!-- {end}{name} -->" for name in names for end in ("", "end of ")]


def test_the_page_says_what_the_trials_say() -> None:
    """If this fails: python scripts/torture.py --results docs/torture.jsonl --out docs/reliability.md"""
    outcomes = torture.read(ROOT / "docs" / "torture.jsonl")
    assert len({(each.kind, each.seed) for each in outcomes}) == len(outcomes) and {each.kind for each in outcomes} == {
        *KINDS
    }
    assert all(each.equal and not each.failure and each.lost == 0 for each in outcomes)
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert torture.table(outcomes) in page
    hangs = [json.loads(line) for line in (ROOT / "docs" / "torture_hangs.jsonl").read_text().splitlines()]
    assert torture_hangs.table(hangs) in page and not [hang for hang in hangs if hang["failure"]]
    named = torture.read(ROOT / "docs" / "torture_named.jsonl")
    assert len({(each.kind, each.seed) for each in named}) == len(named) >= 100 and {e.kind for e in named} == {*STRUCK}
    assert all(each.equal and not each.failure for each in named) and named_table(named) in page
