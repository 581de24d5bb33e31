"""What scripts/bench/step.py measures is what its page says: the shapes, the batch, and mappings that are legal."""

import importlib.util
from pathlib import Path

import pytest

from titanmoe.models.count import parameters
from titanmoe.train.launch import read

FILE = Path(__file__).resolve().parent.parent / "scripts/bench/step.py"
spec = importlib.util.spec_from_file_location("bench_step", FILE)
step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(step)


@pytest.mark.parametrize("case", step.CASES)
@pytest.mark.parametrize(("model", "total", "active"), [("ds", 33.0, 28.1), ("qwen", 315.8, 51.5)])
def test_shapes_batch_and_mappings(model: str, total: float, active: float, case: str) -> None:
    ranks, _, _ = step.CASES[case]
    config = read(step.recipe(model, case), ranks)
    count = parameters(config.model)
    assert (round(count.total / 1e6, 1), round(count.active / 1e6, 1)) == (total, active)
    assert config.training.global_batch_size * config.training.seq_len == step.TOKENS
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.activation_checkpoint.mode == "none"
    assert config.optimizer.max_grad_norm == 1.0
    assert config.moe.capacity_factor == 0
