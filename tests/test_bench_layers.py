"""scripts/bench/layers.py runs without a GPU, on tiny shapes, and its shapes are the published ones."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import processes
from titanmoe.models.count import parameters
from titanmoe.train.launch import read

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "scripts/bench/layers.py"
spec = importlib.util.spec_from_file_location("bench_layers", FILE)
layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)


@pytest.mark.parametrize("side", sorted(layers.SIDES.keys() - {"fp8"}))  # refused without a GPU that has it
@pytest.mark.parametrize("name, total", [("mixtral", 4.62), ("qwen3", 4.36), ("qwen2", 5.11), ("deepseek", 5.13)])
def test_shapes_are_those_of_the_models_and_fit_a_gpu(name: str, total: float, side: str) -> None:
    attempts = layers.SHAPES[name].attempts
    config = read(layers.recipe(name, side, *attempts[0], False, []), 1)
    assert round(parameters(config.model).total / 1e9, 2) == total
    assert total * 16 < 139  # float32 weights, gradients and two moments, in GiB and rounded down
    assert config.training.seq_len * config.training.global_batch_size == 32768
    assert config.training.mixed_precision_param == "bfloat16" and config.activation_checkpoint.mode == "none"
    assert config.moe.capacity_factor == 0 and config.optimizer.max_grad_norm == 1.0
    assert attempts == sorted(attempts, reverse=True)


def test_a_tiny_run_measures_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(command: list[str], env: dict[str, str] | None = None, **_: Any) -> subprocess.CompletedProcess[str]:
        run = processes.run(command[1:], env)
        assert run.returncode == 0, run.stdout + run.stderr
        return run

    out = tmp_path / "layers.json"
    command = [str(FILE), "--tiny", "--shapes", "deepseek", "--sides", "titanmoe", "--json", str(out)]
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


def test_goals_are_printed_with_the_results() -> None:
    row = {"shape": "mixtral", "side": "titanmoe", "balanced": {"mfu": 0.6}, "learned": {"mfu": 0.5}}
    (line,) = layers.verdicts([row, row | {"shape": "qwen2"}])
    assert line == "goal for mixtral: MFU of at least 55.0%; titanmoe: balanced 60.0%, learned 50.0%: not met"
    row["learned"] = {"mfu": 0.55}
    assert layers.verdicts([row])[0].endswith(": met")


def test_torchtitan_is_compared_where_both_ran_the_same() -> None:
    row = {"shape": "qwen3", "side": "titanmoe", "layers": 6, "samples": 8}
    row |= {routing: {"s": 1.0, "mfu": None} for routing in layers.ROUTINGS}
    peer = row | {"side": "torchtitan", "balanced": {"s": 1.5, "mfu": None}, "learned": {"s": 1.3, "mfu": None}}
    (line,) = layers.verdicts([row, peer])
    assert line == "goal for qwen3: 1.2 times the speed of torchtitan; titanmoe: balanced 1.50, learned 1.30: met"
    assert layers.verdicts([row, peer | {"learned": {"s": 1.1, "mfu": None}}])[0].endswith("learned 1.10: not met")
    assert layers.verdicts([row, peer | {"layers": 4}]) == []
    assert layers.verdicts([row, {"shape": "qwen3", "side": "torchtitan", "not compared": "why"}]) == []


def test_torchtitan_runs_without_graphs_where_they_fail_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(eager: dict) -> None:
        monkeypatch.setattr(
            layers,
            "first_that_fits",
            lambda name, side, args: (
                {"shape": name, "side": side} | ({"failed": "A: b"} if side == "torchtitan" else eager)
            ),
        )

    answers({"balanced": {}})
    assert layers.measure("qwen3", "torchtitan", None) == {"shape": "qwen3", "side": "torchtitan-eager", "balanced": {}}
    answers({"out_of_memory": "too large"})
    row = layers.measure("qwen3", "torchtitan", None)
    layers.show(row)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "qwen3 torchtitan: with CUDA graphs: A: b"
    assert lines[-1] == "qwen3     torchtitan-eager: not compared: too large"
