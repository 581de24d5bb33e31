"""What the first hour on a GPU runs: scripts/bench/h200.sh has every GPU test, layers.py measures each part of a layer,
trace_step.py reads a step's trace.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import layers
import trace_step

from tests import processes

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


def test_a_tiny_run_measures_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(command: list[str], env: dict[str, str] | None = None, **_: Any) -> subprocess.CompletedProcess[str]:
        run = processes.run(command[1:], env)
        assert run.returncode == 0, run.stdout + run.stderr
        return run

    out = tmp_path / "layers.json"
    command = [str(BENCH / "layers.py"), "--tiny", "--shapes", "deepseek", "--sides", "titanmoe", "--json", str(out)]
    command += ["--steps", "1", "--times", "1", "--peak-tflops", "0.001"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(layers, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": forked}))
    layers.main()
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert {"torch", "triton", "python", "machine", "device", "command"} <= report.keys()
    for routing in ("balanced", "learned"):
        of = row[routing]
        assert of["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / of["s"])
        assert of["mfu"] == pytest.approx(of["tokens_per_s"] * row["flops_per_token"] / 1e9)
    assert row["balanced"]["imbalance"] == 1.0 < row["learned"]["imbalance"]
    parts = {part["part"]: part for part in row["parts"]}
    names = ["attention", "norms", "router", "dispatch", "permute", "experts", "combine", "head, loss", "shared"]
    assert list(parts) == names
    # 256 tokens of width 64, each to 2 of 8 experts of width 32: three products, forward and twice backward
    assert parts["experts"]["flops"] == 9 * 2 * 512 * 64 * 32
    assert parts["permute"]["bytes"] == parts["combine"]["bytes"] == 2 * (256 + 512) * 64 * 2
    assert all(part["ms"] > 0 for part in parts.values())
