"""titanmoe generate --adapter: what the weights with adapters merged into them say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests import parity, world
from tests.checkpoint import runs
from tests.checkpoint_hf import adapted, models
from tests.checkpoint_hf.test_convert import convert
from tests.generate import saved
from tests.generate.test_generate_command import FOLDED, GREEDY, ask, lines
from titanmoe.checkpoint.hf.config_json import describe_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder, and a run of adapters on it."""
    tmp = tmp_path_factory.mktemp("adapters")
    folder = models.save(models.make("deepseek_v3", vocab_size=320), tmp / "in")
    shape = {f"model.{name}": value for name, value in dataclasses.asdict(describe_folder(folder).model).items()}
    changes = shape | {"lora.rank": 4, "lora.alpha": 64.0, "optimizer.lr": 0.1, "checkpoint.initial_hf": str(folder)}
    changes |= dict.fromkeys(parity.NUMERICS, "float32")
    world.run(1, runs.go, str(tmp), changes, 2, 2)
    return folder, tmp / "run"


PROMPTS = ["--prompt", "a", "--prompt", "héllo"]


def test_the_text_is_that_of_the_merged_model(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, run = trained
    assert convert("--to-hf", run, tmp_path / "merged") == 0
    assert convert("--to-peft", run, tmp_path / "peft") == 0
    words = [*PROMPTS, *GREEDY, "--dtype", "float32", "--tokenizer", "bytes"]
    want = lines("--checkpoint", tmp_path / "merged", *words)
    assert want != lines("--checkpoint", folder, *words)
    assert lines("--adapter", run, *words[:-2]) == want
    assert lines("--adapter", tmp_path / "peft", "--checkpoint", folder, *words) == want
    assert lines("--adapter", run, *words[:-2], *FOLDED, ranks=4) == want


def test_what_they_are_not_for_is_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, run = trained
    assert "no model: give --checkpoint RUN, or --adapter RUN" in ask("--prompt", "a")[2]
    assert "generate --adapter uses them" in ask("--checkpoint", run, "--prompt", "a")[2]
    other = models.make("deepseek_v3", vocab_size=320)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    models.save(other, tmp_path / "other")
    text = ask("--adapter", run, "--checkpoint", tmp_path / "other", "--prompt", "a", "--tokenizer", "bytes")[2]
    assert "has other weights (digest" in text and str(folder) in text


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_merged_weights_compute_the_same(name: str, tmp_path: Path) -> None:
    folder = models.save(models.make(name, torch.float64), tmp_path / "in")
    adapted.write(tmp_path / "ours", folder, param="float64")
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "merged") == 0
    rows, prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]], [9]

    def logits(path: Path | None, adapter: Path | None = None) -> torch.Tensor:
        return world.run(1, saved.forced, path, {}, rows, prompts, adapter)[0][0]

    apart, together = logits(None, tmp_path / "ours"), logits(tmp_path / "merged")
    assert apart.dtype == torch.float64 and (apart - together).abs().max() < 1e-10 * together.abs().max()
    assert (together - logits(folder)).abs().max() > 0.1
