"""Weights of a run handed over: to a run under another mapping, and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import titanmoe
from tests import parity, world
from tests.checkpoint_hf.test_convert import convert
from tests.test_session import MAPPINGS, open_session, samples
from titanmoe.config import ConfigError
from titanmoe.session import Session
from titanmoe.train.launch import scoring_config
from titanmoe.train.world_batch import NoLoader

FLOAT32 = {"training.dtype": "float32", "training.mixed_precision_param": "float32"}


def handed_over(changes: dict[str, Any], after: dict[str, Any], folder: str) -> list[Any]:
    """Two steps, each followed by a copy to a run of another mapping and dtype, which gives log-probabilities."""
    session = open_session(changes)
    config = scoring_config(parity.read(after, session.training.runtime.world))
    seams = {"loader": NoLoader, "garbage": parity.no_collection}
    other = Session(config, parity.build_trainer(config, session.training.runtime, **seams).training)
    batch = samples(session, 0, 4)
    for _ in range(2):
        session.forward_backward(batch)
        session.optim_step(rate=0.1)
        session.copy_weights(other)
        log_probs = session.log_probs(batch)
        assert torch.allclose(other.log_probs(batch).double(), log_probs, rtol=0, atol=2e-5)
    session.save(f"{folder}/saved")
    weights = {name: x for name, x in session.weights(dtype=torch.bfloat16) if x is not None}
    assert session.export_hf(f"{folder}/hf", dtype=torch.bfloat16, shard_bytes=10_000) == Path(f"{folder}/hf")
    return [log_probs, weights]


def test_weights_go_to_another_mapping_and_to_a_hugging_face_folder(tmp_path: Path) -> None:
    """The folder is what `titanmoe convert --to-hf` makes from a checkpoint, byte by byte."""
    before = MAPPINGS["pp 2, dp 2, ep 2"][1]
    after = {"parallelism.tp": 2, "parallelism.experts.etp": 2} | FLOAT32
    (log_probs, weights), *others = world.run(4, handed_over, before, after, str(tmp_path))
    assert all(sent == {} for _, sent in others) and log_probs.isfinite().all()
    words = ["--dtype", "bfloat16", "--max-shard-gb", "0.00001"]
    assert convert("--to-hf", tmp_path / "saved", tmp_path / "wanted", *words) == 0
    wanted, got = ({x.name: x.read_bytes() for x in (tmp_path / name).iterdir()} for name in ("wanted", "hf"))
    assert got == wanted and len(wanted) > 3
    stored = {name: x for file in tmp_path.glob("hf/*.safetensors") for name, x in load_file(file).items()}
    assert stored.keys() == weights.keys() and all(torch.equal(x, stored[name]) for name, x in weights.items())


ELSEWHERE = """
[job]
ranks = 1
[model]
family = "mixtral"
size = "debug"
[training]
epochs = 2
seq_len = 16
device = "cpu"
[data]
source = "files"
format = "chat"
paths = ["nowhere/chats.jsonl"]
tokenizer = "nowhere"
chat_template = "nowhere/template.jinja"
[validation]
interval = 5
paths = ["nowhere/more.jsonl"]
"""


def opened_without_data(recipe: str, folder: str) -> float:
    run = titanmoe.open(recipe, {"job.dump_folder": folder})
    run.forward_backward(run.batch([[1, 2, 3]]))
    return run.optim_step()["loss"]


def test_a_run_opens_without_its_data(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(ELSEWHERE, encoding="utf-8")
    (loss,) = world.run(1, opened_without_data, str(tmp_path / "recipe.toml"), str(tmp_path / "runs"))
    assert 0 < loss < 20


def opened_with(dispatcher: str, folder: str) -> None:
    changes = {"job.dump_folder": folder, "parallelism.tp": 1, "parallelism.experts.ep": 2}
    run = titanmoe.open("debug", changes | {"moe.dispatcher": dispatcher})
    assert run.config.moe.dispatcher == "alltoall" and run.training.gradients.first_pass is None


@pytest.mark.parametrize("dispatcher", ["symm_mem", "auto"])
def test_no_buffers_are_reserved_that_a_step_cannot_use(dispatcher: str, tmp_path: Path) -> None:
    world.run(2, opened_with, dispatcher, str(tmp_path))


def not_exported(changes: dict[str, Any], folder: str) -> list[str]:
    """Messages of exports to where no folder can be, or where another kind of folder is; the run goes on."""
    session, messages = open_session(changes), []
    for name in ("missing/hf", "other"):
        with pytest.raises(ConfigError) as error:
            session.export_hf(f"{folder}/{name}")
        messages.append(str(error.value))
    with (
        mock.patch("titanmoe.checkpoint.hf.live_export.safetensors_writer", side_effect=OSError(28, "No space left")),
        pytest.raises(ConfigError) as error,
    ):
        session.export_hf(f"{folder}/full")
    session.export_hf(f"{folder}/hf")
    return [*messages, str(error.value)]


def test_an_export_that_fails_on_a_rank_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    ranks = world.run(2, not_exported, {"parallelism.experts.ep": 2}, str(tmp_path))
    assert ranks[0] == ranks[1]
    for text, words in zip(ranks[0], ("is not a folder: make it", "does not replace it", "No space left"), strict=True):
        assert words in text
    assert sorted(x.name for x in tmp_path.iterdir()) == ["hf", "other"]


def files_go_along(folder: str, changes: dict[str, Any]) -> None:
    """A run that begins from a Hugging Face folder passes its files on, to checkpoints and exports."""
    source = titanmoe.open("debug", changes).export_hf(f"{folder}/source")
    if dist.get_rank() == 0:
        (source / "tokenizer_config.json").write_text('{"model_max_length": 512}', encoding="utf-8")
    dist.barrier()
    run = titanmoe.open("debug", changes | {"checkpoint.initial_hf": str(source)})
    run.save(f"{folder}/saved")
    run.export_hf(f"{folder}/hf")


def test_config_and_tokenizer_go_along(tmp_path: Path) -> None:
    changes = {"job.ranks": 2, "job.dump_folder": str(tmp_path / "runs"), "parallelism.experts.ep": 2}
    world.run(2, files_go_along, str(tmp_path), changes)
    for folder in ("source", "saved/hf", "hf"):
        assert json.loads((tmp_path / folder / "tokenizer_config.json").read_text()) == {"model_max_length": 512}
    wanted, got = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "hf"))
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], x) for name, x in wanted.items())
