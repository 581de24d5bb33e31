"""The trainer as a whole: bit-equal repeats, compiled parts, non-finite numbers, train.py's answers to mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.support import processes
from tests.support.case_features import MODELS
from titanmoe.parallel.batch_slice import check_alike
from titanmoe.replace import replaced


def test_deterministic_runs_are_bit_equal() -> None:
    changes = {
        "parallelism.tp": 2,
        "parallelism.experts.ep": 4,
        "training.deterministic": True,
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "training.global_batch_size": 4,
        "model.num_layers": 1,
    }
    first, second = (world.run(4, parity.measure, changes, False, "", 1)[0] for _ in range(2))
    assert first.loss == second.loss and first.norm == second.norm
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_mixed_precision_keeps_router_and_sums_wide(stored: str) -> None:
    """Parity does not cover bfloat16, but the first loss is right up to its rounding, and routers stay float32."""
    mixed = {"training.dtype": stored, "training.mixed_precision_param": "bfloat16", "moe.force_balance": True}
    mixed |= {"training.mixed_precision_reduce": "float32", "parallelism.experts.ep": 2, "parallelism.tp": 2}
    got = world.run(4, parity.measure, mixed, False, "", 1)[0]
    want = parity.expected(mixed, 4, steps=1)
    assert got.loss[0] == pytest.approx(want.steps[0].loss, rel=0.02)
    assert got.norm[0] == pytest.approx(want.steps[0].grad_norm, rel=0.05)
    router = "layers.0.moe.router.weight"
    assert got.grads[router].dtype == got.weights[router].dtype == torch.float32
    rounded = got.weights[router].bfloat16().float()
    assert not torch.equal(rounded, got.weights[router])
    assert not torch.equal(got.grads[router].bfloat16().float(), got.grads[router])  # computed in float32 too


TP2 = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "model.num_layers": 1, "training.global_batch_size": 2}
COMPILED = {
    "gpt_oss": MODELS["gpt_oss"]
    | {"parallelism.tp": 2, "parallelism.experts.etp": 2, "model.qk_norm": "full", "model.num_layers": 1},
    "deepseek_v3": MODELS["deepseek_v3"]
    | {"parallelism.tp": 2, "activation_checkpoint.mode": "selective", "training.loss_chunks": 3},
    "V": {"parallelism.pp": 2, "pipeline.schedule": "DualPipeV", "model.num_layers": 4},
}


@pytest.mark.parametrize(
    "mapping",
    [
        pytest.param(TP2, id="tp"),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in COMPILED.items()),
    ],
)
def test_compiled_parts_change_no_number(mapping: dict[str, Any]) -> None:
    parity.check(2, mapping | {"compile.enable": True, "compile.backend": "aot_eager"}, steps=1, timeout=600)


@pytest.mark.slow
def test_compiled_experts_take_halves_that_have_arrived() -> None:
    """In bfloat16, the only dtype in which they compile; rows in flight stay outside the graph."""
    changes = {"parallelism.experts.ep": 2, "moe.overlap": "halves", "model.shared_hidden": 16}
    changes |= {"training.local_batch_size": 2, "training.global_batch_size": 8}
    changes |= {"training.mixed_precision_param": "bfloat16", "model.num_layers": 1}
    compiled = changes | {"compile.enable": True, "compile.backend": "aot_eager"}
    plain, traced = (world.run(2, parity.measure, case, timeout=200)[0] for case in (changes, compiled))
    assert traced.loss[0] == pytest.approx(plain.loss[0], rel=1e-3)
    for name, grad in plain.grads.items():
        torch.testing.assert_close(traced.grads[name], grad, rtol=0, atol=0.05 * float(grad.abs().max()), msg=name)


@pytest.mark.slow
def test_inductor_changes_no_number() -> None:
    parity.check(1, {"compile.enable": True, "model.num_layers": 1}, steps=1, timeout=900)


def _with_nan(changes: dict[str, Any]) -> str:
    from titanmoe.train.guard import NonFinite

    def poison(trainer: Any) -> None:
        if (router := trainer.training.parameters.get("layers.1.moe.router.weight")) is not None:
            router.data.to_local().fill_(float("nan"))

    try:
        parity.measure(changes, prepare=poison)
    except NonFinite as error:
        return str(error)
    return ""


def test_a_nan_stops_every_rank_and_names_step_and_parameter() -> None:
    results = world.run(4, _with_nan, {"parallelism.pp": 2, "parallelism.experts.ep": 2})
    assert len(set(results)) == 1
    assert results[0].startswith("step 1: loss nan")
    assert "first parameter with a non-finite gradient:" in results[0]
    assert "The weights were already not finite after step 0: on rank 2 layers.1.moe.router.weight (" in results[0]
    assert "They were not finite when they were loaded (model.hf, checkpoint.load): look at those files." in results[0]
    assert "Lower optimizer.lr" not in results[0]


def _with_a_nan_in_a_buffer(changes: dict[str, Any]) -> str:
    """Of the router's biases on rank 1, which no gradient and no weight show."""
    from titanmoe.train.guard import NonFinite

    trainer = parity.make_trainer(changes)
    trainer.train_step()
    trainer.training.buffers["layers.1.moe.router.expert_bias"][3] = float("nan") if dist.get_rank() == 1 else 0.0
    for parameter in trainer.training.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trainer.training.state.step, nothing = 2, float("nan")
    try:
        trainer.training.guard.check_finite(nothing, nothing)
    except NonFinite as error:
        return str(error)
    return ""


def test_a_nan_in_a_buffer_is_no_sound_weight() -> None:
    results = world.run(2, _with_a_nan_in_a_buffer, {"parallelism.experts.ep": 2, "data.source": "synthetic"})
    assert results[0] == results[1]
    assert "were already not finite after step 1: on rank 1 layers.1.moe.router.expert_bias (1 of" in results[0]
    assert "Lower optimizer.lr or raise lr_schedule.warmup_steps" in results[0]


def _with_a_nan_in_the_batch(changes: dict[str, Any]) -> str:
    from titanmoe.train.guard import NonFinite

    trainer = parity.make_trainer(changes, loader=parity.NaNPositions)
    trainer.train_step()
    try:
        trainer.train_step()
    except NonFinite as error:
        return str(error)
    return ""


def test_the_message_says_whether_weights_are_still_finite() -> None:
    (result,) = world.run(1, _with_a_nan_in_the_batch, {"model.num_layers": 1, "data.source": "synthetic"})
    assert "step 2: loss nan" in result and "The weights are still those of step 1. " in result


def train_py(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return processes.run(["train.py", *arguments], environment | variables)


def test_plain_python_runs_one_rank(tmp_path: Path) -> None:
    recipe = ["--config", "train_configs/debug.toml", "--parallelism.tp", "1", "--parallelism.experts.ep", "1"]
    small = ["--training.steps", "2", "--training.seq_len", "32", "--model.num_layers", "1"]
    run = train_py(*recipe, *small, "--job.dump_folder", str(tmp_path), "--metrics.tensorboard", "false")
    assert run.returncode == 0, run.stderr
    log = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "imbalance", "layers.0.imbalance"} <= log[0].keys()


OVERLAP = """
import sys
from dataclasses import replace
from titanmoe.components import COMPONENTS
from titanmoe.train import launch

def overlap(config, runtime):
    assert runtime.world == 1 and config.moe.overlap == "auto"
    return replace(config, moe=replace(config.moe, overlap="halves")), f"halves, because of {runtime.device}"

launch.main(sys.argv[1:], COMPONENTS, overlap=overlap)
"""


def test_a_run_overlaps_as_it_is_told_and_its_header_says_why(tmp_path: Path) -> None:
    changes = {"model.num_layers": 1, "training.steps": 1, "data.source": "synthetic", "metrics.console": "lines"}
    changes["moe.overlap"] = "auto"
    words = parity.arguments(parity.TINY | changes | {"job.dump_folder": str(tmp_path)})
    run = processes.run(["-c", OVERLAP, *words])
    assert run.returncode == 0, run.stderr
    assert re.search(r"^overlap +halves, because of cpu *$", run.stdout, re.MULTILINE), run.stdout


def test_three_mistakes_are_three_problems(tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text('[training]\nstep = 5\nseed = "long"\n\n[parallelism.experts]\nep = 2\n')
    run = train_py("--config", str(recipe))
    assert run.returncode == 2
    assert "3 problems" in run.stderr and "training.steps" in run.stderr and "ep = 2" in run.stderr
    assert "Traceback" not in run.stderr


def notes_under(version: str) -> dict[str, str]:
    with replaced(torch, "__version__", version):
        return parity.make_trainer({"model.vocab_size": 320}).training.setup_rows


def test_a_version_of_torch_that_was_not_tried_is_named() -> None:
    (new,) = world.run(1, notes_under, "2.99.0+cpu")
    assert new["PyTorch"] == "2.99.0+cpu, which titanmoe was not tried with: 2.11, 2.13, 2.14 and 2.15 were"
    assert "PyTorch" not in world.run(1, notes_under, "2.13.0+cpu")[0]


def samples_compared(odd: int) -> str:
    """tp 2 of dp 2: ranks 0 and 1 have the same samples, ranks 2 and 3 others. odd: a rank with a token of its own."""
    training = parity.make_trainer(parity.TINY | {"parallelism.tp": 2}, loader=parity.samples()).training
    batches = training.loader.peek()
    if dist.get_rank() == odd:
        batches[-1].tokens_BS[-1, -1] += 1
    try:
        check_alike(batches, training.meshes, training.device)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("odd", [-1, 1, 2])
def test_ranks_of_one_data_index_must_have_the_same_samples(odd: int) -> None:
    said = world.run(4, samples_compared, odd)
    assert said == [said[0]] * 4 and ("have different samples" in said[0]) == (odd >= 0)
