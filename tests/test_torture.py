"""The faults and the table of scripts/torture.py; the trials themselves take minutes and are not tests."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from torture import Tally, table, write  # noqa: E402
from torture_runs import INTERVAL, KINDS, Run  # noqa: E402

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
def test_a_fault_strikes_where_it_is_told_to(tmp_path, rank, fault, code, changed):
    expected = ALL | changed if isinstance(changed, dict) else dict(list(ALL.items())[: list(ALL).index(changed)])
    assert said(tmp_path, rank, fault) == (code, expected)


def test_a_slow_disk_takes_as_long_as_it_is_told_to(tmp_path):
    assert said(tmp_path, 0, {"do": "slow", "seconds": 0.2, "on": ["rename"]}, slow=0.19)[1]["rename"] == "slow"


def test_a_fault_that_strikes_once_lets_the_next_start_pass(tmp_path):
    once = {"do": "kill", "on": ["mkdir"], "once": str(tmp_path / "struck")}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert said(tmp_path / "first", 0, once) == (-signal.SIGKILL, {})
    assert said(tmp_path / "second", 0, once) == (0, ALL)


def test_the_table_adds_up():
    tallies = {
        "a": Tally(trials=3, equal=3, again=2, seconds=[5.0, 7.0, 30.0]),
        "b": Tally(trials=2, equal=1, lost=4, again=9, seconds=[6.0]),
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(tallies).splitlines()[2:]]
    assert rows == [
        ["a", "3", "3", "0", "2", "7.0", "30.0"],
        ["b", "2", "1", "4", "9", "6.0", "6.0"],
        ["all", "5", "4", "4", "9", "6.5", "30.0"],
    ]


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


def test_a_table_goes_between_the_marks_of_a_page(tmp_path):
    page, apart = tmp_path / "page.md", tmp_path / "apart.md"
    page.write_text("a\n<!-- soak -->\nold\n<!-- end of soak -->\nb\n")
    for text in ("one\n", "two\n"):
        write(page, "soak", text)
        write(apart, "soak", text)
    assert page.read_text() == "a\n<!-- soak -->\n\ntwo\n\n<!-- end of soak -->\nb\n"
    assert apart.read_text() == "two\n"
    marks = [line for line in (ROOT / "docs/reliability.md").read_text().splitlines() if line.startswith("<!-- ")]
    assert marks == ["<!-- trials -->", "<!-- end of trials -->", "<!-- soak -->", "<!-- end of soak -->"]
