"""The kernels without a GPU, in Triton's interpreter: line by line, and in a run. Each in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import parity, world
from tests.ops.interpret import interpret
from tests.support import processes
from tests.support.case_features import MODELS
from titanmoe.ops.kernels import installed

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_line_by_line(which: str) -> None:
    words = ["-m", "tests.ops.interpret", "-q", "-x", "-p", "no:xdist", "-m", which, "tests/ops/test_kernels.py"]
    run = processes.run(words, timeout=250)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


@pytest.fixture
def interpreted_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # what a recipe is checked for
    world.restart(2)
    world.run(2, interpret)
    yield
    world.restart(2)


@pytest.mark.usefixtures("interpreted_ranks")
@pytest.mark.parametrize(
    "changes",
    [
        MODELS["sigmoid_groups"] | PADDED | {"parallelism.experts.ep": 2, "moe.aux_loss": 0.02},
        pytest.param({"parallelism.tp": 2, "parallelism.experts.etp": 2}, marks=pytest.mark.slow),
        pytest.param(
            MODELS["deepseek_v3"] | {"model.num_dense_layers": 0, "parallelism.tp": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"parallelism.experts.ep": 2, "moe.z_loss": 0.02}, marks=pytest.mark.slow),
        pytest.param({"parallelism.experts.ep": 2, "moe.dispatcher": "symm_mem"}, marks=pytest.mark.slow),
        pytest.param(
            MODELS["gpt_oss"] | {"moe.dispatcher": "allgather", "parallelism.experts.ep": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["padded", "etp", "latents", "ep", "symm_mem", "allgather"],
)
def test_parity(changes: dict[str, Any]) -> None:
    small = {"moe.kernels": "triton", "model.num_layers": 1, "training.global_batch_size": 2}
    parity.check(2, small | changes, steps=1)
