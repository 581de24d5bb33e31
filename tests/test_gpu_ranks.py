"""A check of scripts/gpu/ranks.py ends in its time whatever its ranks do, and says why it failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import json, os, time
import torch, torch.distributed as dist
from ranks import Unsupported, run

def good(here):
    x = torch.ones(1)
    dist.all_reduce(x)
    return {"sum": float(x)}

def hangs(here):
    here.reached("the long wait")
    time.sleep(100 * here.group.rank)
    return {}

def dies(here):
    os._exit(7)

def refuses(here):
    if here.group.rank:
        raise Unsupported("not here")
    raise ValueError("the other rank has gone")

def fails(here):
    raise ValueError("wrong" + chr(10) + "and more")

def fails_first(here):
    time.sleep(1 - here.group.rank)
    raise ValueError(f"rank {here.group.rank}")

for check, ranks in ((good, 2), (hangs, 2), (dies, 1), (refuses, 2), (fails, 1), (fails_first, 2)):
    begin = time.monotonic()
    print(json.dumps([run(check, "cpu", ranks, 40.0, {}), time.monotonic() - begin]), flush=True)
"""


def test_ranks_that_hang_die_or_refuse() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT / "scripts/gpu",
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [of for of, _ in found] == [
        {"figures": {"sum": 2.0}},
        {"error": "rank 1: not done in time, in: the long wait"},
        {"error": "rank 0: exit status 7, in: start of the process group"},
        {"unsupported": "not here"},
        {"error": "ValueError: wrong"},
        {"error": "ValueError: rank 1"},
    ]
    assert all(seconds < 30 for _, seconds in found), "a rank that ended did not end the check"
