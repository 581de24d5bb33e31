"""Every script of scripts/bench runs with --tiny: whoever borrows a GPU for minutes must not find one broken."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse
from titanmoe.train.metrics import peak_flops

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "scripts" / "bench"
NOT_RUN = {"torchtitan_side.py": "layers.py and step.py import it, and TorchTitan is no dependency"}
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if path.name not in NOT_RUN)
FURTHER = {
    "compile_time.py": ["--one", "qwen3", "aot_eager"],
    "host.py": ["--profile", "1"],
    "layers.py": ["--shapes", "gpt_oss", "--sides", "titanmoe", "--steps", "1", "--times", "1"],
}
"""Options of scripts. With those of the first two what they measure runs in the process that a test forks."""
MEASURED_APART = {"compile_time.py": ["--shapes", "deepseek", "--cases", "aot_eager"], "host.py": []}
"""Options with which these scripts start Python anew for what they measure."""


def run(script: str, *options: str) -> str:
    ended = processes.run([BENCH / script, "--tiny", *options], timeout=120)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(script: str) -> None:
    said = run(script, *FURTHER.get(script, [])).strip()
    assert said and '"failed"' not in said


@pytest.mark.parametrize("script", MEASURED_APART)
def test_it_measures_in_processes_of_its_own(script: str) -> None:
    assert run(script, *MEASURED_APART[script]).strip()


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt_oss", "qwen2", "deepseek"])
def test_the_first_attempt_fits_an_h100(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """79.6 GiB, of which 6 stay free, by rehearsal."""
    monkeypatch.syspath_prepend(str(BENCH))
    import layers as bench

    count, samples = bench.SHAPES[name].attempts[0]
    for side in ("titanmoe", "fp8"):
        config = recipe_to_rehearse(
            bench.recipe(name, side, layers=count, batch=samples, tiny=False, overrides=[]), 1, "h100"
        )
        assert rehearse(config, 1, 0, "h100").memory.peak < (79.6 - 6) * 2**30


def kernels_of(path: Path) -> list[str]:
    """Return the names of a file's Triton kernels: the functions that it launches with a grid."""
    text = path.read_text()
    jitted = [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list)
    ]
    return [name for name in jitted if f"{name}[" in text or f"_launch({name}" in text]


def test_a_trace_tells_all_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import trace_step

    kernels = [name for path in (ROOT / "titanmoe/ops/kernels").glob("*.py") for name in kernels_of(path)]
    assert len(kernels) == len(set(kernels)) > 15
    groups = {name: trace_step.group_of(name, "titanmoe::any") for name in kernels}
    assert "other" not in groups.values(), groups
    for kernel, operation, group in (
        ("_swiglu_forward", "", "swiglu"),
        ("_route_backward", "", "router"),
        ("_loss_forward", "", "loss"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "", "attention"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "aten::mm", "matrix products"),
        ("ncclDevKernel_AllGather_RING_LL", "", "messages"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "aten::_fused_adamw_", "optimizer"),
        ("triton_poi_fused_add_0", "", "other"),
    ):
        assert trace_step.group_of(kernel, operation) == group


def test_the_summary_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 4 us on the host and 10 us on the device, a swiglu after it, and the profiler's own span."""
    monkeypatch.syspath_prepend(str(BENCH))
    import trace_step

    def event(cat: str, name: str, begin: float, time: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": time, "args": args}

    shapes = {"Input Dims": [[1024, 512], [512, 256]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        event("Trace", "PyTorch Profiler (0)", 0, 1000),
        {**event("cpu_op", "aten::mm", 100, 4), "args": {"External id": 1, **shapes}},
        {**event("kernel", "nvjet_hsh", 105, 10), "args": {"External id": 1}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::view", "ts": 110, "dur": 1},
        event("kernel", "_swiglu_forward", 120, 5),
    ]
    found = trace_step.summary(events, layers=1, peak=1e14, bandwidth=1e12)
    assert (found.step, found.busy) == (25, 15)
    assert found.kernels[0].floor == pytest.approx(2 * 1024 * 512 * 256 / 1e14 * 1e6)
    text = "\n".join(found.lines())
    assert re.search(r"0\.010 +66\.7% +1 +27% +matrix products", text) and re.search(r"33\.3% +1 +- +swiglu", text)


def test_rates_come_from_the_hardware_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import layers as bench

    monkeypatch.setattr(bench, "gpu_name", lambda device: device)
    assert bench.rates("NVIDIA H100 80GB HBM3").bandwidth == 3.35e12
    assert bench.rates("NVIDIA H200").bandwidth == 4.8e12
    assert bench.rates("NVIDIA H100 80GB HBM3").peak_bfloat16 == peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert bench.rates("") is None and bench.rates("Tesla T4") is None


def test_a_process_that_hangs_or_dies_loses_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import layers as bench

    for rest, error in (("time.sleep(60)", TimeoutError), ("sys.exit(3)", ChildProcessError)):
        lines = []
        with pytest.raises(error):
            code = f"import sys, time; print('first', flush=True); {rest}"
            for line in bench.lines_of([sys.executable, "-c", code], 2):
                lines.append(line)
        assert lines == ["first"]
