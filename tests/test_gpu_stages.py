"""The script for the first hour on a GPU, with a Python and a GPU that are none."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench" / "h200.sh"
# Notes its arguments, names 11 tests if it is asked which there are, and fails where FAILS is among its arguments.
PYTHON = """\
#!/bin/bash
printf '%s|' "$@" >> "$0.calls"; echo >> "$0.calls"
[[ $* == *--collect-only* ]] && for n in {1..11}; do echo "tests/test_some.py::test_one[case $n]"; done
[[ -z ${FAILS:-} || $* != *"$FAILS"* ]]
"""


def stage_1(tmp_path: Path, fails: str = "") -> tuple[int, list[list[str]]]:
    """Its exit status, and the arguments of each call of Python."""
    for name, text in (("python", PYTHON), ("nvidia-smi", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    there = os.environ | {
        "PYTHON": str(tmp_path / "python"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FAILS": fails,
    }
    done = subprocess.run([SCRIPT, "1", tmp_path / "out"], env=there, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "out" / "stage-1.tar.gz").exists(), done.stderr
    return done.returncode, [line.split("|")[:-1] for line in (tmp_path / "python.calls").read_text().splitlines()]


def test_every_gpu_test_runs_once_after_a_plain_run(tmp_path: Path) -> None:
    status, calls = stage_1(tmp_path)
    runs = [call for call in calls if "train.py" in call]
    assert status == 0 and len(runs) == 3
    assert {"--training.watch", "--training.stragglers", "false"} < set(runs[0])
    assert "--training.deterministic" in runs[1] and runs[2][-1] == "fp8"
    (asked,) = [call for call in calls if "--collect-only" in call]
    files = [file for file in ROOT.glob("tests/**/test_*.py") if re.search(r"mark\.gpu", file.read_text())]
    assert {str(file.relative_to(ROOT)) for file in files} | {"-m", "gpu", "--one-of-each"} < set(asked)
    named = [word for call in calls if call is not asked for word in call if "::" in word]
    assert sorted(named) == sorted(f"tests/test_some.py::test_one[case {n}]" for n in range(1, 12))
    assert calls.index(runs[0]) < calls.index(asked)


def test_one_of_each_is_one_of_those_that_the_marks_choose() -> None:
    """Here the first case of one test is for CPUs, and the second for GPUs."""
    words = ["-m", "pytest", "-m", "gpu", "--one-of-each", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = processes.run([*words, "tests/comm/test_turns.py"])
    assert [line.partition("[")[2] for line in done.stdout.splitlines() if "::" in line] == ["cuda]"]


@pytest.mark.parametrize("fails", ["plain", "case 7", "deterministic", "fp8"])
def test_what_fails_shows_in_its_status(tmp_path: Path, fails: str) -> None:
    status, calls = stage_1(tmp_path, fails)
    assert status == 1
    if fails == "plain":  # nothing else runs
        assert len(calls) == 2
