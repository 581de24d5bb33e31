"""scripts/gpu/first_light.py with small parts that crash, hang and print too much, and walked through on CPUs."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
import first_light  # noqa: E402
import read_results  # noqa: E402
from first_light import Part, Result  # noqa: E402
from rows import Rows  # noqa: E402

PART = Part("part", "-c pass", 20, read_results.read_rows)


def run(tmp_path: Path, code: str, limit: float = 20, **options) -> Result:
    part = Part("part", f"-c {json.dumps(code)}", limit, options.pop("read", read_results.read_rows), **options)
    return first_light.run_part(part, tmp_path, {"PYTHONFAULTHANDLER": "1"}, 60)


def test_a_part_that_crashes_is_told_by_its_last_line(tmp_path: Path) -> None:
    result = run(tmp_path, "raise ValueError(7)")
    assert (result.state, result.note) == ("failed", "ValueError: 7")


def test_a_part_that_hangs_is_stopped_and_shows_where(tmp_path: Path) -> None:
    result = run(tmp_path, "import time; time.sleep(300)", 2 + first_light.DUMP_SECONDS)
    assert result.state == "timed out" and result.seconds < 60
    assert "Fatal Python error: Aborted" in (tmp_path / "part.log").read_text()


def test_a_part_that_will_not_stop_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_light, "DUMP_SECONDS", 1)
    code = "import signal, subprocess, time; signal.signal(6, signal.SIG_IGN); subprocess.run(['sleep', '300'])"
    result = run(tmp_path, code, 2 + first_light.DUMP_SECONDS)
    assert result.state == "timed out" and result.seconds < 60


def test_of_a_part_that_prints_too_much_begin_and_end_are_kept(tmp_path: Path) -> None:
    assert run(tmp_path, "for n in range(100000): print(n, 'x' * 20)").state == "ok"
    log = (tmp_path / "part.log").read_text()
    assert log.startswith("0 x") and log.splitlines()[-1].startswith("99999 ") and "bytes left out" in log
    assert len(log) < first_light.LOG_BYTES + 100


def test_a_program_that_is_not_installed_and_status_77_are_unsupported(tmp_path: Path) -> None:
    assert run(tmp_path, "pass", program="no-such-program --x").state == "unsupported"
    assert run(tmp_path, f"import sys; sys.exit({first_light.UNSUPPORTED})").state == "unsupported"


def test_results_that_cannot_be_read_fail_the_part(tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text('[{"name": ')
    result = run(tmp_path, "pass")
    assert result.state == "failed" and "cannot be read" in result.note


def test_one_failed_check_fails_the_part_and_keeps_the_others(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "part.json")
    rows.check("good", lambda: {"ms": 1.5, "note": "twice"})
    rows.check("bad", lambda: {"x": 1 / 0})
    rows.check("later", dict)
    assert rows.status() == 1
    result = run(tmp_path, "pass")
    assert result.state == "failed"
    assert [(row.name, row.ok, row.text) for row in result.rows] == [
        ("good", True, "ms 1.5 twice"),
        ("bad", False, "ZeroDivisionError: division by zero"),
        ("later", True, ""),
    ]


def test_no_check_begins_after_the_time_is_over() -> None:
    rows = Rows(None, seconds=-1)
    rows.check("late", lambda: pytest.fail("it ran"))
    assert not rows.rows[0]["ok"] and "left out" in rows.rows[0]["note"]


@pytest.mark.parametrize(
    "log, ok, text",
    [
        ("..\n3 passed in 1.2s\n", [True], "3 passed in 1.2s"),
        ("FAILED tests/test_a.py::b - 0\n1 failed, 2 passed in 9.0s", [False, False], "1 failed, 2 passed in 9.0s"),
        ("Fatal Python error: Aborted", [False], "no summary of pytest"),
    ],
)  # fmt: skip
def test_pytest_is_read(log: str, ok: list[bool], text: str) -> None:
    rows = read_results.read_pytest(log, "")
    assert [row.ok for row in rows] == ok and rows[-1].text == text


def test_nsight_compute_is_read() -> None:
    log = """==PROF== Connected
  _swiglu_backward (1024, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    Memory Throughput                 %        91.20
    Duration                         us       412.32
    Achieved Occupancy                        %        48.10
"""
    (row,) = read_results.read_ncu(log, "")
    expected = "memory throughput 91.20 %, duration 412.32 us, achieved occupancy 48.10 %, "
    assert (row.name, row.ok, row.text) == ("_swiglu_backward", True, expected)
    assert not read_results.read_ncu("==ERROR== no driver", "")[0].ok


def test_the_archive_leaves_out_what_is_large(tmp_path: Path) -> None:
    folder, out = tmp_path / "parts", tmp_path / "out"
    (folder / "run" / "checkpoints").mkdir(parents=True)
    out.mkdir()
    noise = os.urandom(2_900_000)
    for name in ("a.log", "b.log", "run/checkpoints/w.bin"):
        (folder / name).write_bytes(noise)
    (folder / "trace.gz").write_bytes(noise + noise)
    (folder / "c.log").write_text("short")
    first_light.write(out, folder, {"about": {}, "command": "", "results": [], "seconds": 0})
    assert (out / "first_light.tar.gz").stat().st_size <= first_light.ARCHIVE_BYTES
    with tarfile.open(out / "first_light.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"results.json", "table.md", "c.log"} < names and len(names & {"a.log", "b.log"}) == 1
    assert not names & {"w.bin", "trace.gz"}


def test_a_long_table_stays_short_and_begins_with_what_failed() -> None:
    rows = [{"name": str(n), "ok": n % 2 == 0, "text": "a | b"} for n in range(400)]
    result = {"name": "many", "state": "failed", "seconds": 1, "note": "", "figures": True, "rows": rows}
    lines = first_light.table({"about": {"card": "x"}, "command": "c", "results": [result], "seconds": 1}).splitlines()
    assert len(lines) < 80 and lines[3] == "| failed | check | why |" and "384" not in lines[-1]
    assert all(line.count("|") in (0, 4, 6) for line in lines)


def test_a_table_is_published_between_the_marks_with_the_latest_report_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(*results: tuple[str, str]) -> Path:
        rows = [
            {"name": name, "state": "ok", "seconds": 1, "note": "", "figures": True, "rows": [row(text)]}
            for name, text in results
        ]
        file = tmp_path / f"{results[0][1]}.json"
        file.write_text(json.dumps({"about": {"card": "x"}, "command": "c", "results": rows, "seconds": 1}))
        return file

    def row(text: str) -> dict[str, str | bool]:
        return {"name": "check", "ok": True, "text": text}

    page = tmp_path / "benchmarks.md"
    page.write_text(f"# Title\n\n{first_light.BEGIN}\nold\n{first_light.END}\n\nend\n")
    monkeypatch.setattr(first_light, "PAGE", page)
    first, second = report(("layers", "slow"), ("a step", "trace")), report(("layers", "fast"))
    assert first_light.main(["--publish", str(first), str(second)]) == 0
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{first_light.BEGIN}\n") and text.endswith(f"{first_light.END}\n\nend\n")
    assert "| layers | check | fast |" in text and "| a step | ok | 1 | 1 of 1 |" in text
    assert "old" not in text and "slow" not in text and "trace" not in text


def test_every_gpu_test_is_in_the_command() -> None:
    files = [file for file in ROOT.glob("tests/**/test_*.py") if re.search(r"mark\.gpu", file.read_text())]
    assert {str(file.relative_to(ROOT)) for file in files} == set(first_light.GPU_TESTS)


def test_one_of_each_is_one_of_those_that_the_marks_choose() -> None:
    """Here the first case of one test is for CPUs, and the second for GPUs."""
    words = ["-m", "pytest", "-m", "gpu", "--one-of-each", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = processes.run([*words, "tests/comm/test_interleave.py"])
    assert [line.partition("[")[2] for line in done.stdout.splitlines() if "::" in line] == ["cuda]"]


@pytest.mark.slow
def test_the_walk_on_cpus_fails_where_faults_were_planted(tmp_path: Path) -> None:
    first_light.main(["--pretend", "--minutes", "4", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "results.json").read_text())
    states = {result["name"]: result["state"] for result in report["results"]}
    assert states == {
        part.name: {"crash": "failed", "hang": "timed out", "memcheck": "unsupported"}.get(part.name, "ok")
        for part in first_light.PRETEND
    }, report
    assert len((tmp_path / "table.md").read_text().splitlines()) < 80
