"""A teacher's likeliest ids, counted once and kept beside the shards: they teach as the teacher itself does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import parity, world
from tests.train.test_answers import few_texts
from tests.train.test_validation import recipe, trained
from titanmoe.config import ConfigError
from titanmoe.data.loader import Loader
from titanmoe.launcher.score_command import _options

STUDENT = {"training.objective": "distillation", "distillation.top": 6, "distillation.temperature": 1.5}
STUDENT |= {"distillation.weight": 0.6}
TEACHER = {"model.dim": 24, "model.num_experts": 4, "training.seed": 5, "model.init_std": 0.4}


def counted(changes: dict[str, Any]) -> None:
    from titanmoe.train.reference import count

    trainer = parity.make_trainer(changes, likeliest=True)
    count(parity.read(changes, 2), trainer.training, likeliest=True)
    trainer.training.loader.close()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def scored(texts: Path) -> tuple[dict[str, Any], str]:
    """A recipe of the data, and the name of what the teacher says of it."""
    data = recipe(texts, **{"training.global_batch_size": 4})
    options = {"distillation.top": 6, "distillation.temperature": 1.5}
    world.run(2, counted, data | TEACHER | options | {"parallelism.tp": 2, "parallelism.experts.ep": 2})
    (folder,) = (texts / ".runs").rglob("*-top6-t1.5")
    return data, folder.name


def test_what_was_kept_teaches_like_the_teacher_itself(scored: tuple, texts: Path, tmp_path: Path) -> None:
    """Under other mappings than that of the scores; validation is not touched."""
    data, name = scored
    data = data | {"validation.held_out": 4, "validation.interval": 1, "validation.steps": 1}
    teaching = parity.TINY | parity.SAVING | data | TEACHER | {"optimizer.lr": 1e-300, "training.steps": 1}
    teaching |= {"job.dump_folder": str(tmp_path), "data.cache": str(texts / ".runs" / "cache")}
    world.run(1, parity.train, parity.arguments(teaching))
    by_teacher = {"distillation.teacher": str(tmp_path / "run"), "parallelism.cp": 2}
    by_scores = {"distillation.scores": name, "parallelism.pp": 2, "pipeline.schedule": "1F1B"}
    one, other = (world.run(2, trained, data | STUDENT | how)[0] for how in (by_teacher, by_scores))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-10) and one["loss"][0] != one["loss"][1]
    assert one["norm"] == pytest.approx(other["norm"], rel=1e-10)
    losses = [[report["val_loss"] for report in reported["validation"]] for reported in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert parity.error(one["weights"], other["weights"])[0] < 1e-10


def test_scores_that_are_not_the_recipes_are_refused(scored: tuple, texts: Path) -> None:
    data, name = scored
    (manifest,) = (texts / ".runs").rglob(f"{name}/manifest.json")
    kept = manifest.read_text()

    def refused(**more: Any) -> str:
        config = parity.read(data | STUDENT | {"distillation.scores": name} | more, 1)
        with pytest.raises(ConfigError) as error:
            Loader(config, 0, 1)
        return "\n".join(error.value.problems)

    text = refused(**{"distillation.scores": "abc-top6"})
    assert f"of other names: {name}" in text and "titanmoe score TEACHERS_RECIPE --top 6 --data" in text
    text = refused(**{"distillation.top": 5, "model.vocab_size": 320, "training.seq_len": 32})
    for part in ("--top = 6, and the recipe has distillation.top = 5", "a vocabulary = 272, and", "of 16 tokens, and"):
        assert part in text
    try:
        manifest.write_text(json.dumps(json.loads(kept) | {"shards": "others"}))
        assert "has scores of other shards (others, and" in refused()
        manifest.write_text(json.dumps(json.loads(kept) | {"model": "0123"}))
        assert "has scores of another model than its name says" in refused()
    finally:
        manifest.write_text(kept)


def test_the_words_of_the_command() -> None:
    assert _options(["a.toml", "--top", "64", "--temperature=2", "--job.name", "b"]) == (
        {"top": "64", "temperature": "2"},
        ["a.toml", "--job.name", "b"],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation.teacher": "a", "distillation.scores": "b"}, r"has two teachers: name its folder in"),
        ({"distillation.scores": "b"}, r'data\.source = "stdlib" has none: set source = "files"'),
        ({"distillation.scores": "b", "training.objective": "cross_entropy"}, r"nothing of distillation\.scores"),
    ],
)
def test_what_contradicts_scores(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parity.read(STUDENT | changes, 1)
