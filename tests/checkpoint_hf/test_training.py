"""A run begins from a converted model, and what it saves goes out again."""

import os
import subprocess
import sys
from pathlib import Path

from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert, equal

ROOT = Path(__file__).parents[2]
RECIPE = """
enable = true
[training]
steps = 1
seq_len = 32
mixed_precision_param = "float32"
device = "cpu"
[optimizer]
lr = 0.0
[metrics]
tensorboard = false
"""


def test_a_run_that_learns_nothing_gives_back_what_it_was_given(tmp_path, capsys):
    folder = models.save(models.make("deepseek_v3", vocab_size=320), tmp_path / "in")
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    begin = capsys.readouterr().out.split("# to train from it:")[1]
    (tmp_path / "run.toml").write_text(begin + RECIPE)
    run = subprocess.run(
        [sys.executable, ROOT / "train.py", "--config", "run.toml"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "weights of" in run.stdout
    assert convert("--to-hf", tmp_path / "runs/run/checkpoints/step-00000001", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), models.tensors(folder))
    again = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.max_position_embeddings == 4 * 16  # the context that YaRN was made for
