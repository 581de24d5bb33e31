"""Distillation from a teacher in the step: as the plain model does it, under every mapping; who may not teach."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity, reference, world
from tests.train.test_quiz import few_texts
from tests.train.test_validation import recipe, trained
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader
from titanmoe.fold.degrees import derive
from titanmoe.launcher.train_command import take_options
from titanmoe.plan.memory import rank_memories
from titanmoe.train.find_teacher import check_tokenizer, find_teacher

TEACHER = {"model.dim": 24, "model.num_layers": 4, "model.num_experts": 4, "training.seed": 5, "model.init_std": 0.4}


@functools.cache
def teachers_weights() -> tuple[Config, dict[str, torch.Tensor]]:
    config = parity.read(parity.SAVING | TEACHER, 1)
    return config, reference.initial_weights(config.model, 5, torch.float64)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that has learned nothing yet, with another width and other experts than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    changes = parity.TINY | parity.SAVING | TEACHER | {"job.dump_folder": str(folder), "optimizer.lr": 1e-300}
    world.run(1, parity.train, parity.arguments(changes | {"training.steps": 1}))
    return str(folder / "run")


def divergence(top: int, temperature: float, weight: float) -> reference.Objective:
    """With every id kept, the whole one."""

    def mean(head: reference.HeadOutput, tokens: reference.Tokens) -> torch.Tensor:
        config, weights = teachers_weights()
        with torch.no_grad():
            logits_GSV, _, _ = reference.forward(config, weights, tokens, reference.initial_bias(config.model))
        log_p, log_q = ((x / temperature).log_softmax(-1) for x in (logits_GSV, head.logits_GSV))
        kept = log_p.topk(top, -1).indices
        if top < log_p.shape[-1]:
            rest = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, kept, False)
            log_p, log_q = (
                torch.cat((x.gather(-1, kept), x.exp().where(rest, 0).sum(-1, keepdim=True).log()), -1)
                for x in (log_p, log_q)
            )
        has_label = tokens.labels_GS != reference.IGNORE
        apart = (log_p.exp() * (log_p - log_q)).sum(-1) * has_label
        return (weight * temperature**2 * apart.sum() + (1 - weight) * head.loss_GS.sum()) / has_label.sum()

    return mean


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        ({"parallelism.cp": 2, "parallelism.tp": 2, "training.loss_chunks": 3}, (5, 2.0, 0.7)),
        ({"parallelism.pp": 2, "parallelism.experts.ep": 2, "pipeline.schedule": "1F1B"}, (48, 1.5, 1.0)),
        ({"parallelism.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4}, (3, 1.0, 0.5)),
        ({"parallelism.tp": 2, "parallelism.experts.ep": 4}, (48, 1.0, 1.0)),
    ],
    ids=["cp and tp", "a pipeline and ep, all ids", "a pipeline in a V", "tp and ep, all ids"],
)
def test_no_mapping_changes_a_loss_from_a_teacher(
    teacher: str, mapping: dict[str, Any], options: tuple[int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference.OBJECTIVES, "distillation", divergence(*options))
    names = ("distillation.top", "distillation.temperature", "distillation.weight")
    distilled = {"training.objective": "distillation", "distillation.teacher": teacher}
    distilled |= dict(zip(names, options, strict=True)) | {"training.global_batch_size": 8}
    size = 2 if mapping.get("pipeline.schedule") == "ZBVZeroBubble" else 4
    parity.check(size, distilled | mapping, steps=1)


def test_memory_has_room_for_the_teacher(teacher: str) -> None:
    alone = parity.read({}, 1)
    asked = {"training.objective": "distillation", "distillation.teacher": teacher, "distillation.top": 7}
    (plain,), (distilled,) = (rank_memories(x, derive(1, x.parallelism)) for x in (alone, parity.read(asked, 1)))
    weights = 8 * sum(x.numel() for x in teachers_weights()[1].values())
    said = alone.training.global_batch_size * 16 * (7 * 8 + 8 * 8)
    assert distilled.components["teacher"] == weights + said and "teacher" not in plain.components


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation.teacher": ""}, r'"distillation" has no teacher: name its folder in distillation\.teacher'),
        ({"distillation.top": 49}, r"top = 49 is more than model\.vocab_size = 48: use at most 48, which stores"),
        ({"training.objective": "cross_entropy"}, r'does not read distillation\.teacher, .* or teacher = ""'),
        (
            {"model.vocab_size": 64},
            r"vocabulary of 48, and model\.vocab_size = 64: .* or set vocab_size to the teacher",
        ),
        ({"distillation.teacher": "nowhere"}, r"distillation\.teacher: .*nowhere"),
        ({"distillation.teacher": "x" * 300}, r"distillation\.teacher: .*File name too long"),
        ({"model.mtp_depth": 1}, r"cannot train multi-token prediction"),
    ],
)
def test_teachers_that_are_refused(teacher: str, changes: dict[str, Any], message: str) -> None:
    asked = {"training.objective": "distillation", "distillation.teacher": teacher, "distillation.top": 7}
    with pytest.raises(ConfigError, match=message):
        parity.read(asked | changes, 1)


def test_a_teacher_has_to_fit_the_mapping(teacher: str) -> None:
    """4 experts, where the student has 8."""
    asked = {"training.objective": "distillation", "distillation.teacher": teacher, "distillation.top": 7}
    with pytest.raises(ConfigError, match=r"distillation\.teacher, under the run's mapping: .*num_experts"):
        parity.read(asked | {"parallelism.experts.ep": 8}, 8)


def test_a_teacher_of_another_tokenizer_is_refused(teacher: str) -> None:
    whole = dataclasses.replace(find_teacher(teacher), identity="bytes")
    check_tokenizer(whole, "bytes")
    with pytest.raises(ConfigError, match=r"another tokenizer \(bytes\) than the data's \(abc\).* set data\.tokenizer"):
        check_tokenizer(whole, "abc")


# ---- a teacher's top-k log-probabilities, computed once and stored beside the shards

STUDENT = {"training.objective": "distillation", "distillation.top": 6, "distillation.temperature": 1.5}
STUDENT |= {"distillation.weight": 0.6}
SCORING_TEACHER = {"model.dim": 24, "model.num_experts": 4, "training.seed": 5, "model.init_std": 0.4}


def counted(changes: dict[str, Any]) -> None:
    from titanmoe.train.reference import run_scoring

    trainer = parity.make_trainer(changes, returns_top_k=True)
    run_scoring(parity.read(changes, 2), trainer.training, top_k=True)
    trainer.training.loader.close()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def scored(texts: Path) -> tuple[dict[str, Any], str]:
    """A recipe of the data, and the name of what the teacher says of it."""
    data = recipe(texts, **{"training.global_batch_size": 4})
    options = {"distillation.top": 6, "distillation.temperature": 1.5}
    world.run(2, counted, data | SCORING_TEACHER | options | {"parallelism.tp": 2, "parallelism.experts.ep": 2})
    (folder,) = (texts / ".runs").rglob("*-top6-t1.5")
    return data, folder.name


def test_what_was_kept_teaches_like_the_teacher_itself(scored: tuple, texts: Path, tmp_path: Path) -> None:
    """Training on the scores runs under other mappings than scoring did; validation is not touched."""
    data, name = scored
    data = data | {"validation.held_out": 4, "validation.interval": 1, "validation.steps": 1}
    teaching = parity.TINY | parity.SAVING | data | SCORING_TEACHER | {"optimizer.lr": 1e-300, "training.steps": 1}
    teaching |= {"job.dump_folder": str(tmp_path), "data.cache": str(texts / ".runs" / "cache")}
    world.run(1, parity.train, parity.arguments(teaching))
    by_teacher = {"distillation.teacher": str(tmp_path / "run"), "parallelism.cp": 2}
    by_scores = {"distillation.scores": name, "parallelism.pp": 2, "pipeline.schedule": "1F1B"}
    one, other = (world.run(2, trained, data | STUDENT | how)[0] for how in (by_teacher, by_scores))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-10) and one["loss"][0] != one["loss"][1]
    assert one["norm"] == pytest.approx(other["norm"], rel=1e-10)
    losses = [[report["val_loss"] for report in reported["validation"]] for reported in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert parity.worst_error(one["weights"], other["weights"])[0] < 1e-10


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
    words = ["a.toml", "--top", "64", "--temperature=2", "--job.name", "b"]
    assert take_options(words, "top", "temperature") == (
        {"top": "64", "temperature": "2"},
        ["a.toml", "--job.name", "b"],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation.teacher": "a", "distillation.scores": "b"}, r"has two teachers: name its folder in"),
        ({"distillation.scores": "b"}, r'data\.source = "stdlib" has none: set source = "files"'),
        ({"distillation.scores": "b", "training.objective": "cross_entropy"}, r"does not read distillation\.scores"),
    ],
)
def test_what_contradicts_scores(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parity.read(STUDENT | changes, 1)
