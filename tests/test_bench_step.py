"""scripts/bench/step.py measures what its page says: the shapes, the batch, and legal mappings."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from titanmoe.models.count import parameters
from titanmoe.train.launch import read

FILE = Path(__file__).resolve().parent.parent / "scripts/bench/step.py"
spec = importlib.util.spec_from_file_location("bench_step", FILE)
step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(step)
sys.path.append(str(FILE.parent))
import torchtitan_side  # noqa: E402


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


def test_a_folder_without_torchtitan_is_refused_in_one_line(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, FILE, "--torchtitan", tmp_path], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stdout == ""
    wanted = f"--torchtitan: no torchtitan in {tmp_path}: pip install --no-deps --target {tmp_path} torchtitan==0.3.0 "
    assert run.stderr.startswith(wanted) and run.stderr.count("\n") == 1


def test_ranks_that_cannot_import_torchtitan_say_so(tmp_path: Path) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("from torch.nn import Nothing")
    torchtitan_side.check(tmp_path)
    with pytest.raises(
        SystemExit, match=r"^torchtitan (does not import: cannot import name 'Nothing'|needs Python 3.11)"
    ):
        step.World(FILE.parents[2], 1, 1, step.recipe("ds", "1x2"), tmp_path)


def test_torchtitan_has_both_models_and_no_others() -> None:
    config = read(step.recipe("ds", "ep2tp2"), 4)
    assert torchtitan_side.likeness(config.model) == "deepseek_v3"
    assert torchtitan_side.likeness(read(step.recipe("qwen", "1x2"), 1).model) == "qwen3"
    config.model.kv_lora_rank = 0
    with pytest.raises(torchtitan_side.NotCompared, match="no model like mixtral"):
        torchtitan_side.likeness(config.model)


def test_the_last_column_is_the_ratio_to_torchtitan(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"model": "ds", "case": "ep4", "side": "here", "routing": "learned", "total": 33e6, "active": 28e6}
    row |= {"tokens/s": 900.0, "tokens/cpu-s": 450.0, "cpu-s": 9.1, "floor cpu-s": 4.2, "of peak": 0.46}
    titan = row | {"side": "titan", "tokens/cpu-s": 300.0}
    rows = step.with_ratios([row, row | {"side": "against", "routing": "balanced"}, titan])
    for row in rows:
        step.show(row)
    here, against, titan = capsys.readouterr().out.splitlines()
    assert here.split()[-2:] == ["46.0%", "1.50"]
    assert against.endswith("46.0%") and titan.endswith("46.0%")  # no row with that routing; the same row
