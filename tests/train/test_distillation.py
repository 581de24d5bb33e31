"""Distillation from a teacher in the step: as the plain model does it, under every mapping; who may not teach."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests import parity, reference, world
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
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

    def mean(scores: reference.Scores, tokens: reference.Tokens) -> torch.Tensor:
        config, weights = teachers_weights()
        with torch.no_grad():
            logits_GSV, _, _ = reference.forward(config, weights, tokens, reference.initial_bias(config.model))
        log_p, log_q = ((x / temperature).log_softmax(-1) for x in (logits_GSV, scores.logits_GSV))
        kept = log_p.topk(top, -1).indices
        if top < log_p.shape[-1]:
            rest = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, kept, False)
            log_p, log_q = (
                torch.cat((x.gather(-1, kept), x.exp().where(rest, 0).sum(-1, keepdim=True).log()), -1)
                for x in (log_p, log_q)
            )
        has_label = tokens.labels_GS != reference.IGNORE
        apart = (log_p.exp() * (log_p - log_q)).sum(-1) * has_label
        return (weight * temperature**2 * apart.sum() + (1 - weight) * scores.loss_GS.sum()) / has_label.sum()

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
        ({"distillation.top": 49}, r"top = 49 keeps more ids than model\.vocab_size = 48: use at most 48, which keeps"),
        ({"training.objective": "cross_entropy"}, r'reads nothing of distillation\.teacher, .* or teacher = ""'),
        (
            {"model.vocab_size": 64},
            r"vocabulary of 48, and model\.vocab_size = 64: .* or set vocab_size to the teacher",
        ),
        ({"distillation.teacher": "nowhere"}, r"distillation\.teacher: .*nowhere"),
        ({"distillation.teacher": "x" * 300}, r"distillation\.teacher: .*File name too long"),
        ({"model.mtp_depth": 1}, r"says nothing of the token after next"),
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
    with pytest.raises(
        ConfigError, match=r"another tokenizer \(bytes\) than the data's \(abc\): .* set data\.tokenizer"
    ):
        check_tokenizer(whole, "abc")
