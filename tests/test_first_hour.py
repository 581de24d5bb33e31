"""What the first hour on a GPU runs: scripts/bench/h200.sh has every GPU test, trace_step.py reads a step's trace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import trace_step

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "scripts" / "bench"


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def operation(number: int, name: str, dims: list[list[int]], kind: str = "c10::BFloat16") -> dict[str, Any]:
    return event("cpu_op", name, 0, 1, **{"External id": number, "Input Dims": dims, "Input type": [kind] * len(dims)})


EVENTS = [
    operation(1, "aten::mm", [[64, 128], [128, 256]]),
    operation(2, "aten::_fused_rms_norm", [[64, 128]], "float"),
    operation(3, "aten::_grouped_mm", [[64, 128], [4, 128, 32], [4]]),
    event("kernel", "nvjet_tst_128x64", 100, 50, **{"External id": 1}),
    event("kernel", "rms_norm_kernel", 160, 10, **{"External id": 2}),
    event("kernel", "second_half_of_the_norm", 165, 15, **{"External id": 2}),  # on another stream, at once
    event("cuda_runtime", "cudaEventSynchronize", 150, 40),  # ends at 190; the GPU works again from 220
    event("kernel", "cutlass_grouped", 220, 80, **{"External id": 3}),
    event("gpu_memcpy", "Memcpy DtoH", 300, 20),
    {"ph": "i", "name": "a mark", "ts": 0},
]


def test_what_a_step_spent() -> None:
    found = trace_step.summary(EVENTS, layers=2, peak=1e12, bandwidth=1e9)
    assert found.step == 320  # from the first operation to the end of the copy
    assert found.busy == 50 + 20 + 80 + 20
    assert (found.waits, found.idle_after_waits) == (1, 220 - 180)
    by_name = {kernel.name: kernel for kernel in found.kernels}
    product = max(2 * 64 * 128 * 256 / 1e12, (64 * 128 + 128 * 256) * 2 / 1e9)
    assert by_name["nvjet_tst_128x64"].floor == pytest.approx(product * 1e6)
    assert by_name["rms_norm_kernel"].floor == pytest.approx(64 * 128 * 4 / 1e9 * 1e6)
    assert by_name["second_half_of_the_norm"].floor == 0
    grouped = trace_step.summary(EVENTS, 2, peak=1e9, bandwidth=1e15).kernels[3]
    assert grouped.floor == pytest.approx(2 * 64 * 128 * 32 / 1e9 * 1e6)
    assert found.shares == pytest.approx({"matrix products": 130 / 175, "norms": 25 / 175, "other": 20 / 175})
    lines = found.lines(most=1)
    assert "5 kernels, 2 per layer" in lines and "cutlass_grouped (aten::_grouped_mm)" in lines[-1]


def test_a_trace_without_a_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="no kernel"):
        trace_step.summary([operation(1, "aten::mm", [[2, 2], [2, 2]])], 1, 1e12, 1e12)


def test_the_first_stage_has_every_gpu_test() -> None:
    chosen: dict[str, list[str]] = {}
    script = (BENCH / "h200.sh").read_text().replace("$kernels", "tests/ops/test_kernels.py")
    for file, words in re.findall(r"^ +run \w+ (\S+)(?: -k '(.*)')? &", script, re.MULTILINE):
        chosen.setdefault(file, []).extend(words.split(" or ") if words else [""])
    for file in ("tests/ops/test_kernels.py", "tests/test_gpu.py", "tests/moe/test_symmetric_gpu.py"):
        tests = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
        assert tests and not [test for test in tests if not any(word in test for word in chosen[file])]


def test_a_machine_without_a_gpu_is_refused_at_once(tmp_path: Path) -> None:
    script = str(BENCH / "h200.sh")
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(["bash", script, "1", str(tmp_path)], env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and "torch finds no CUDA device" in run.stderr
    assert (tmp_path / "stage-1.tar.gz").exists()
    assert subprocess.run(["bash", script, "4"], capture_output=True).returncode == 2
