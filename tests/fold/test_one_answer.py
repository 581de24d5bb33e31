"""What `fold --list` and the search for the nearest call legal, training accepts, and nothing else."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.covering_mappings import all_folds, degrees, legal_folds
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, with_degrees
from titanmoe.fold.legal_mappings import nearest
from titanmoe.fold.pipeline_schedules import single_order
from titanmoe.train import refusals

SMALL = [
    "--training.device=cpu",
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--training.global_batch_size=8",
    "--model.num_layers=4",
    "--model.num_heads=16",
    "--model.num_kv_heads=8",
    "--model.num_experts=24",
    "--model.expert_hidden=24",
    "--model.dim=64",
]
OPTIONS = {
    "nothing more": [],
    "ulysses": ["--parallelism.cp_kind=ulysses", "--model.num_heads=8"],
    "nodes of 2": ["--moe.dispatcher=hierarchical", "--parallelism.node=2"],
    "nodes of 8": ["--moe.dispatcher=hierarchical", "--parallelism.node=8"],
    "a machine of 4": ["--moe.dispatcher=hierarchical"],
    "symm_mem": ["--moe.dispatcher=symm_mem"],
    "deepep": ["--moe.dispatcher=deepep", "--training.mixed_precision_param=bfloat16"],
    "grouped products": ["--moe.grouped_mm=grouped"],
    "8 bits": ["--moe.expert_dtype=fp8_emulated", "--model.expert_hidden=32"],
    "torch's attention": ["--parallelism.attention_backend=torch"],
    "its attention on GPUs": ["--parallelism.attention_backend=torch", "--training.device=auto"],
    "no batch": ["--training.global_batch_size=-1"],
    "a V": ["--pipeline.schedule=ZBVZeroBubble"],
    "weights freed": ["--pipeline.schedule=ZBVZeroBubble", "--parallelism.reshard_after_forward=always"],
    "rounds": ["--pipeline.schedule=Interleaved1F1B", "--pipeline.virtual_stages=2"],
    "pairs": ["--pipeline.schedule=DualPipeV", "--moe.overlap=pairs"],
    "layers by hand": ["--pipeline.layers_per_stage=[1, 3]"],
    "a file": ["--pipeline.schedule_csv=FILE"],
}


@pytest.fixture
def complete_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks nothing, has GPUs, and torchrun started 4 ranks on it."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(refusals, "machine_problems", lambda config, world: [])
    monkeypatch.setattr(refusals, "_has_gpu", lambda: True)


def mapped(config: Config, fold: Fold) -> Config:
    return replace(config, parallelism=with_degrees(config.parallelism, degrees(fold)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_of_all_mappings_of_8_ranks(options: list[str], complete_machine: None, tmp_path: Path, capsys) -> None:
    recipe, path = tmp_path / "recipe.toml", tmp_path / "schedule.csv"
    with path.open("w") as file:
        csv.writer(file).writerows([[str(*cell) for cell in row] for row in single_order("1F1B", 2, 4)])
    with pytest.raises(SystemExit):
        load(
            [*SMALL, *(word.replace("FILE", str(path)) for word in options), "--print-config"], COMPONENTS, lambda _: []
        )
    recipe.write_text(capsys.readouterr().out)
    config = load(["--config", str(recipe)], COMPONENTS, lambda _: [])

    assert main(["fold", "--ranks", "8", "--node", "4", "--config", str(recipe), "--list", "--json"]) == 0
    listed = [Fold(world=8, **row) for row in json.loads(capsys.readouterr().out)]
    accepted = [fold for fold in all_folds(8) if not refusals.refusals(mapped(config, fold), 8)]
    legal_ones = set(accepted)
    assert set(listed) == legal_ones and 0 < len(listed) < 517

    here = refusals._with_machine(config)
    assert set(legal_folds(8, here)) == legal_ones
    assert all(fold in legal_ones for fold in nearest(8, here.parallelism, here))
    for fold in all_folds(8)[5::127]:
        line = [f"--{name.replace('_', '-')}={n}" for name, n in degrees(fold).items()]
        code = main(["fold", "--ranks", "8", "--node", "4", "--config", str(recipe), "--json", *line])
        assert (code == 0) == (fold in legal_ones)
