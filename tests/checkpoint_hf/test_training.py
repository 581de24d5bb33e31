"""A run starts from a converted model, and what it saves can be exported again."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests import world
from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert, equal
from tests.support import processes
from titanmoe.checkpoint.hf import config_json as configs

ROOT = Path(__file__).parents[2]
RECIPE = """
enable = true
[training]
steps = 1
seq_len = 32
mixed_precision_param = "float32"
device = "cpu"
[optimizer]
lr = 1e-300
[metrics]
tensorboard = false
"""


def test_a_run_with_a_rate_of_zero_exports_what_it_imported(tmp_path, capsys):
    folder = models.save(models.make("deepseek_v3", vocab_size=320), tmp_path / "in")
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    begin = capsys.readouterr().out.split("# to train from it:")[1]
    (tmp_path / "run.toml").write_text(begin + RECIPE)
    run = processes.run([ROOT / "train.py", "--config", "run.toml"], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "weights of" in run.stdout
    assert convert("--to-hf", tmp_path / "runs/run/checkpoints/step-00000001", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), models.tensors(folder))
    again = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.max_position_embeddings == models.BASE["max_position_embeddings"]  # its config.json was kept


def train(folder: str, hf: str, changes: dict) -> str:
    from tests import parity

    words = {"job.dump_folder": folder, "job.name": "run", "checkpoint.enable": True, "checkpoint.initial_hf": hf}
    trainer = parity.make_trainer(
        words | {"training.steps": 1, "optimizer.lr": 1e-300, "data.source": "synthetic"} | changes
    )
    trainer.train()
    return (Path(folder) / "run/metrics.jsonl").read_text() if trainer.training.runtime.rank == 0 else ""


def test_a_folded_run_reads_a_hugging_face_folder_and_each_rank_its_own_pieces(tmp_path):
    """And once it has a checkpoint of its own, it resumes from that."""
    folder = models.save(models.make("qwen3_moe"), tmp_path / "in")
    (folder / "tokenizer.json").write_text("{}")
    shape = dataclasses.asdict(configs.describe_folder(folder).model)
    changes = {f"model.{name}": value for name, value in shape.items()}
    changes |= {"parallelism.pp": 2, "parallelism.experts.ep": 2, "training.global_batch_size": 4}
    changes |= {f"training.{name}": "float32" for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}
    world.run(4, train, str(tmp_path), str(folder), changes)
    assert convert("--to-hf", tmp_path / "run/checkpoints/step-00000001", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), models.tensors(folder))
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"

    world.run(2, train, str(tmp_path), str(folder), changes | {"training.steps": 2, "parallelism.experts.ep": 1})
    lines = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2]


def test_a_run_that_goes_on_refuses_another_model_to_begin_from(tmp_path):
    """It would go on from its own weights without a word."""
    folder = models.save(models.make("qwen3_moe"), tmp_path / "in")
    other = models.save(models.make("qwen3_moe"), tmp_path / "other")
    changes = {f"model.{n}": value for n, value in dataclasses.asdict(configs.describe_folder(folder).model).items()}
    world.run(1, train, str(tmp_path), str(folder), changes)
    more = changes | {"training.steps": 2}
    text = rf'checkpoint.initial_hf is "{other}", and was "{folder}" when the run began: it goes on from its own'
    with pytest.raises(world.RankError, match=text):
        world.run(1, train, str(tmp_path), str(other), more)
    (tmp_path / "elsewhere").mkdir()
    folder.rename(tmp_path / "elsewhere/in")
    with pytest.raises(world.RankError, match=text):
        world.run(1, train, str(tmp_path), str(other), more)
    world.run(1, train, str(tmp_path), str(tmp_path / "elsewhere/in"), more)
    world.run(1, train, str(tmp_path), "", more | {"training.steps": 3})
    random = changes | {"job.name": "random"}
    world.run(1, train, str(tmp_path), "", random)
    with pytest.raises(
        world.RankError, match=r"and the run began from random weights: it goes on .* \(or model.hf\) out"
    ):
        world.run(1, train, str(tmp_path), str(other), random | {"training.steps": 2})


def test_samples_beyond_what_the_model_was_made_for_are_said(tmp_path):
    model = models.make("qwen3_moe", vocab_size=320, max_position_embeddings=24)
    folder = models.save(model, tmp_path / "in")
    changes = {f"model.{n}": value for n, value in dataclasses.asdict(configs.describe_folder(folder).model).items()}
    for name, seq_len in (("long", 32), ("fits", 24)):
        run = changes | {"training.seq_len": seq_len}
        for steps in (1, 2):  # it is said of a run that goes on, too
            hf = str(folder) if steps == 1 else ""
            world.run(1, train, str(tmp_path / name), hf, run | {"training.steps": steps})
        events = [json.loads(line) for line in (tmp_path / name / "run/events.jsonl").read_text().splitlines()]
        texts = [event["text"] for event in events if event["kind"] == "data"]
        assert len(texts) == 2 * (name == "long")
        assert all("training.seq_len = 32 is above 24, the max_position_embeddings of its" in text for text in texts)
    stretched = configs.describe_folder(folder).model
    assert configs.context_note(folder, stretched, 96)
    yarn = dataclasses.replace(stretched, rope_scaling="yarn", rope_factor=4.0, rope_original_len=24)
    assert not configs.context_note(folder, yarn, 96) and configs.context_note(folder, yarn, 97)


def test_a_folder_of_another_model_is_refused_before_training(tmp_path):
    folder = models.save(models.make("qwen3_moe"), tmp_path / "in")
    with pytest.raises(
        world.RankError, match=r"model.family = 'mixtral', but .*config.json has model_type 'qwen3_moe'"
    ):
        world.run(1, train, str(tmp_path), str(folder), {})


def test_weights_alone_cannot_be_resumed(tmp_path):
    folder = models.save(models.make("mixtral"), tmp_path / "in")
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    shape = {f"model.{n}": v for n, v in dataclasses.asdict(configs.describe_folder(folder).model).items()}
    with pytest.raises(
        world.RankError, match=r"the checkpoint contains only weights .*set checkpoint.model_only = true"
    ):
        world.run(1, train, str(tmp_path), "", shape | {"checkpoint.load": str(tmp_path / "ours")})
