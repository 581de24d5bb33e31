"""scripts/test_cpus.sh with a file of two tests: what each kind of run gets, the table, what differs."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "test_cpus.sh"
TESTS = """\
import os, pathlib

def test_always():
    parent = os.getppid()
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with open(os.environ["SEEN"], "a") as file:
        print(*(os.environ.get(name, "-") for name in names), len(children) - 1, *children, file=file)

def test_not_under_avx2():
    assert os.environ.get("ATEN_CPU_CAPABILITY") != "avx2"
"""


def run(folder: Path, kinds: str, *options: str, flags: str = "avx2 fma") -> tuple[subprocess.CompletedProcess, list]:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "cpuinfo").write_text(f"flags : {flags}\n")
    seen = folder / "seen"
    seen.write_text("")
    given = {
        "KINDS": kinds,
        "LOGS": str(folder / "logs"),
        "CPUINFO": str(folder / "cpuinfo"),
        "PYTEST": f"{sys.executable} -m pytest -c {os.devnull} --rootdir {folder} -p no:cacheprovider {folder}",
        "SEEN": str(seen),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "ATEN_CPU_CAPABILITY": "default",  # set outside: must not reach any of the runs
    }
    done = subprocess.run([SCRIPT, *options], env=os.environ | given, capture_output=True, text=True, timeout=300)
    return done, [line.split() for line in seen.read_text().splitlines()]


def test_each_run_has_its_kind_and_compiled_code_of_its_own(tmp_path: Path) -> None:
    done, (avx2, busy) = run(tmp_path, "avx2 avx512 busy")
    assert "avx512: not run, this processor lacks one of avx512f" in done.stdout
    code = tmp_path / "logs"
    assert avx2[:4] == ["AVX2", "avx2", f"{code}/code-avx2/inductor", f"{code}/code-avx2/triton"]
    assert busy[:4] == ["-", "-", f"{code}/code-own/inductor", f"{code}/code-own/triton"]
    assert [int(row[4]) for row in (avx2, busy)] == [0, len(os.sched_getaffinity(0))]
    assert not [pid for pid in busy[5:] if Path("/proc", pid).exists()], "a loop goes on"
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows[:2] == ["| as | passed | failed | minutes |", "|---|---|---|---|"]
    assert [row.rpartition(" | ")[0] for row in rows[2:]] == ["| avx2 | 1 | 1", "| busy | 2 | 0"]
    assert "test_it::test_not_under_avx2: avx2 failed, busy passed" in done.stdout
    assert done.returncode == 1


def test_options_reach_pytest_and_passes_end_well(tmp_path: Path) -> None:
    done, seen = run(tmp_path, "avx2", "-k", "always")
    assert len(seen) == 1
    assert done.stdout.endswith("The runs passed the same tests.\n")
    assert done.returncode == 0, done.stderr


def test_an_unknown_kind_is_reported(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "avx1024")
    assert done.returncode == 2
    assert "KINDS holds 'avx1024'; it may hold avx2 avx512 avx512_bf16 own busy" in done.stderr
