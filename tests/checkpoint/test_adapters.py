"""Checkpoints of runs that train a part: of adapters nothing but them, on the weights that they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import world
from tests.checkpoint import runs
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.hf.weight_sources import CheckpointWeights
from titanmoe.checkpoint.layout import folder_name
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.generate.model import find_model

FROZEN = {"training.freeze": ["embed.*", "layers.*.attention.*"]}
LORA = {"lora.rank": 4, "lora.experts_rank": 2}
DROPOUT = {"lora.dropout": 0.2}
MAPPINGS = {
    "etp to tp": ((2, {"parallelism.experts.etp": 2}), (2, {"parallelism.tp": 2, "parallelism.experts.ep": 2})),
    "pp to dp": ((2, {"parallelism.pp": 2}), (2, {"parallelism.experts.ep": 2})),
}


def go(size: int, folder: Path, changes: dict[str, Any], until: int, saves: int = 1) -> runs.Went:
    return world.run(size, runs.go, str(folder), changes, until, saves)[0]


def refusal(size: int, folder: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(world.RankError) as error:
        go(size, folder, changes, 2)
    return str(error.value)


def test_frozen_weights_are_saved_and_another_list_is_refused(tmp_path: Path) -> None:
    through = go(1, tmp_path, FROZEN, 2)
    resumed = go(1, tmp_path, FROZEN, 2)
    assert resumed.loss[2] == through.loss[2]
    assert all(tensor.equal(resumed.state[name]) for name, tensor in through.state.items())
    saved = Checkpoint(tmp_path / "run/checkpoints" / folder_name(1)).tensors
    assert "model.embed.weight" in saved and "optimizer.exp_avg.embed.weight" not in saved
    assert "trains other parameters than the checkpoint has moments of" in refusal(1, tmp_path, {})


@pytest.mark.parametrize("tuning", [FROZEN, LORA, LORA | DROPOUT], ids=["frozen", "adapters", "dropout"])
@pytest.mark.parametrize("case", MAPPINGS)
def test_runs_resume_under_another_mapping(case: str, tuning: dict[str, Any], tmp_path: Path) -> None:
    (size, first), (other, second) = MAPPINGS[case]
    through = go(size, tmp_path / "a", tuning | first, 2)
    resumed = go(other, tmp_path / "a", tuning | second, 2)
    assert resumed.loss[2] == pytest.approx(through.loss[2], rel=1e-12)
    assert resumed.norm[2] == pytest.approx(through.norm[2], rel=1e-10)


def test_a_base_of_its_own_is_found_again_and_another_refused(tmp_path: Path) -> None:
    """The run that makes the base trains whole weights; what adapters it is given later must be those trained on it."""
    go(1, tmp_path / "base", {}, 1)
    base = {"checkpoint.load": str(tmp_path / "base/run/checkpoints" / folder_name(1)), "checkpoint.model_only": True}
    through = go(1, tmp_path / "a", LORA | base, 2)
    assert go(1, tmp_path / "a", LORA | base, 2).loss[2] == through.loss[2]
    assert "trained on other weights" in refusal(1, tmp_path / "a", LORA)
    text = refusal(1, tmp_path / "a", LORA | base | {"lora.rank": 8, "lora.targets": ["*.attention.*"]})
    assert "lora.rank is 8 and was 4" in text and "lora.targets is" in text
    assert "the checkpoint has only adapters" in refusal(1, tmp_path / "a", {})
    for use in (CheckpointWeights, find_model):
        with pytest.raises(CheckpointError, match="has only adapters"):
            use(tmp_path / "a/run/checkpoints" / folder_name(1))
    assert "no adapters to go on with" in refusal(1, tmp_path / "base", LORA)


def test_its_bytes_are_those_of_the_adapters_and_their_moments(tmp_path: Path) -> None:
    """Of large ones: each tensor's file entry has a header of about a kilobyte."""
    model = {"model.dim": 512, "model.num_heads": 8, "model.num_kv_heads": 8, "model.head_dim": 64}
    model |= {"model.num_layers": 1, "model.num_experts": 2, "model.expert_hidden": 512, "training.seq_len": 8}
    rank, experts_rank = 64, 32
    go(1, tmp_path, model | {"lora.rank": rank, "lora.experts_rank": experts_rank}, 1)
    checkpoint = Checkpoint(tmp_path / "run/checkpoints" / folder_name(1))
    adapters = 4 * rank * (512 + 512) + 2 * 3 * experts_rank * (512 + 512)
    assert all(".lora_" in name or "_lora_" in name for name in checkpoint.tensors)
    size = sum(file.stat().st_size for file in checkpoint.path.glob("*.distcp"))
    assert size == pytest.approx(3 * 8 * adapters, rel=0.01)
