"""Packed samples of the real loader, distributed by work, and validation: under mappings, against the plain model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, reference, world
from tests.support import pair_objective
from titanmoe import observe
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.observe import listening

WORDS = ("sphinx", "of", "black", "quartz", "judge", "my", "vow", "the", "quick", "brown", "fox", "jumps")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short documents and few long ones."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(80):
        length = 60 if i % 9 == 0 else 1 + i % 4
        (folder / f"{i:02}.txt").write_text(" ".join(WORDS[(i * 5 + j * j) % 12] for j in range(length)))
    return folder


def recipe(texts: Path, **more: Any) -> dict[str, Any]:
    return {
        "data.source": "files",
        "data.paths": [str(texts)],
        "job.dump_folder": str(texts / ".runs"),
        "data.packing": "best_fit",
        "model.vocab_size": 272,
        "moe.aux_loss_sequence": 0.02,
        "moe.z_loss": 0.01,
    } | more


MAPPINGS = {
    "dp4": {"parallelism.experts.ep": 4},
    "dp2 tp2": {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "cp2 pp2": {"parallelism.cp": 2, "parallelism.pp": 2, "parallelism.experts.ep": 2},
    "shared vocabulary": {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.vocab": "pipeline"},
}


LAYERS = {"cp2 pp2": 2, "shared vocabulary": 2}


def trained(changes: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Losses, norms and whole weights of a run with its own loader, and the reports of its validations."""
    trainer = parity.make_trainer(changes)
    reported: dict[str, Any] = {"loss": [], "norm": [], "validation": []}
    for _ in range(steps):
        with listening(trainer.training.clock):
            report = trainer.train_step()
            observe.active.phase("validation", trainer.step)
        reported["loss"].append(report["loss"])
        reported["norm"].append(report["grad_norm"])
        reported["tokens"] = report["tokens"]
        if trainer.training.validation:
            trainer.training.clock.take(1)
            with listening(trainer.training.clock):
                reported["validation"].append(trainer.training.validation.after_step())
            assert not trainer.training.clock.take(1), "validation's dispatch is none of training's"
    trainer.training.loader.close()
    buffers = {
        name: b.clone() for part in trainer.training.stages for name, b in part.named_buffers() if "bias" in name
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, buffers)
    reported["weights"] = parity.whole(trainer.training.parameters, dist.get_rank(), trainer.training.fold)
    reported["bias"] = {name: b for part in gathered for name, b in part.items()}
    return reported


@pytest.mark.parametrize(
    ("packing", "mapping"), [("best_fit", "dp4"), ("documents", "dp2 tp2"), ("best_fit", "cp2 pp2")]
)
def test_packed_samples_distributed_by_work_change_no_number(texts: Path, packing: str, mapping: str) -> None:
    """Jitter depends on the sample's number in the step, not on where the sample goes."""
    layers = {"model.num_layers": LAYERS.get(mapping, 1)}
    changes = recipe(texts, **layers, **{"data.packing": packing, "moe.jitter": 0.1})
    got = world.run(4, trained, changes | MAPPINGS[mapping] | {"data.balance_work": True})[0]
    config = parity.read(changes, 1)
    loader = Loader(config, 0, 1)
    batches = [[[batch] for batch in loader.next_step()] for _ in range(2)]
    padded = sum(int((~batch.valid_BS).sum()) for step in batches for (batch,) in step)
    assert padded > 0 or packing == "documents"
    weights = reference.initial_weights(config.model, config.training.seed, torch.float64)
    want = reference.train(config, weights, batches, 1)
    for loss, norm, step in zip(got["loss"], got["norm"], want.steps, strict=True):
        assert loss == pytest.approx(step.loss, rel=1e-10)
        assert norm == pytest.approx(step.grad_norm, rel=1e-10)
    assert parity.worst_error(got["weights"], want.weights)[0] < 1e-10
    assert got["tokens"] == sum(int(batch.valid_BS.sum()) for (batch,) in batches[1])


@pytest.mark.parametrize("mapping", ["dp4", "cp2 pp2"])
def test_padding_that_fills_the_last_batch_of_a_run_counts_nothing(texts: Path, mapping: str) -> None:
    """Neither in the loss nor in the balance terms: the plain model gets the samples without it."""
    changes = recipe(texts, **{"training.epochs": 1, "training.steps": -1, "training.global_batch_size": 120})
    changes |= {"model.num_layers": LAYERS.get(mapping, 1), "moe.aux_loss": 0.01, "optimizer.max_grad_norm": 0}
    changes |= {"training.local_batch_size": 10}
    config = parity.read(changes, 4)
    got = world.run(4, trained, changes | MAPPINGS[mapping], config.training.steps)[0]
    loader = Loader(config, 0, 1)
    batches = [[[batch] for batch in loader.next_step()] for _ in range(config.training.steps)]
    filled = [sum(int(batch.valid_BS.any(1).sum()) for (batch,) in step) for step in batches]
    assert filled[:-1] == [120] * (len(filled) - 1) and 0 < filled[-1] < 116
    weights = reference.initial_weights(config.model, config.training.seed, torch.float64)
    want = reference.train(config, weights, batches, 1)
    for loss, norm, step in zip(got["loss"], got["norm"], want.steps, strict=True):
        assert loss == pytest.approx(step.loss, rel=1e-10)
        assert norm == pytest.approx(step.grad_norm, rel=1e-10)
    assert parity.worst_error(got["weights"], want.weights)[0] < 1e-10


@pytest.mark.parametrize(
    "mapping, objective",
    [("dp2 tp2", "cross_entropy"), ("cp2 pp2", pair_objective.NAME), ("shared vocabulary", "cross_entropy")],
)
def test_the_loss_of_a_validation_is_the_mean_over_its_labels(texts: Path, mapping: str, objective: str) -> None:
    """Over several steps with unequal numbers of labels, the last filled up with padding. With optimizer.lr = 0 the
    weights stay equal to the plain model's initial ones."""
    own = {"validation.interval": 2, "validation.steps": 0, "validation.held_out": 3, "optimizer.lr": 1e-300}
    if objective == pair_objective.NAME:
        own |= {"training.objective": objective, "training.local_batch_size": 2}
    changes = recipe(texts, **own, **{"moe.jitter": 0.1, "training.global_batch_size": 4})
    got = world.run(4, trained, changes | MAPPINGS[mapping])[0]["validation"]
    assert got[0] == {} and len(got) == 2
    config = parity.read(changes | {"moe.jitter": 0.0}, 1)
    weights = reference.initial_weights(config.model, config.training.seed, torch.float64)
    bias = reference.initial_bias(config.model)
    total, labels, padding = 0.0, 0, []
    for batches in ValidationSet(config, 0, 1, Loader(config, 0, 1).held_out):
        tokens = reference.Tokens.of([[batch] for batch in batches])
        logits_GSV, _, _ = reference.forward(config, weights, tokens, bias)
        number = int((tokens.labels_GS != reference.IGNORE).sum())
        total += float(reference.cross_entropy(logits_GSV, tokens.labels_GS)) * number
        labels += number
        padding.append(sum(int((~batch.valid_BS.any(1)).sum()) for batch in batches))
    assert len(padding) > 2 and padding[-1] > 0
    assert got[1]["val_loss"] == pytest.approx(total / labels, rel=1e-10)
    assert got[1]["val_perplexity"] == pytest.approx(math.exp(total / labels), rel=1e-9)


def test_validation_is_due_every_interval_and_after_the_last_step(texts: Path) -> None:
    own = {"validation.interval": 2, "validation.steps": 1, "validation.held_out": 3, "training.steps": 3}
    changes = recipe(texts, **own, **{"model.num_layers": 1, "training.global_batch_size": 1})
    (run,) = world.run(1, trained, changes, 3)
    assert [bool(report) for report in run["validation"]] == [False, True, True]


def _stopped_and_resumed(folder: str, changes: dict[str, Any]) -> tuple[float, float]:
    """The best loss before a save, and the one that a trainer has after resuming."""
    own = {"job.dump_folder": folder, "job.name": "run", "checkpoint.enable": True, "checkpoint.interval": 1}
    best = []
    for until in (1, 1):
        trainer = parity.make_trainer(changes | own)
        with trainer.training.checkpoints.in_folder(Path(folder) / "run") as checkpoints:
            checkpoints.begin()
            while trainer.step < until:
                trainer.train_step()
                trainer.training.validation.after_step()
                checkpoints.after_step()
            checkpoints.wait()
        trainer.training.loader.close()
        best.append(trainer.training.validation.best)
    return best[0], best[1]


def test_the_best_loss_so_far_outlives_the_run(texts: Path, tmp_path: Path) -> None:
    changes = recipe(texts, **{"validation.interval": 1, "validation.steps": 1, "validation.held_out": 3})
    changes.pop("job.dump_folder")
    ((before, after),) = world.run(1, _stopped_and_resumed, str(tmp_path), changes | {"data.cache": str(texts / ".c")})
    assert before == after < math.inf


SHAPES = {
    "tp2 ep4": {
        "parallelism.tp": 2,
        "parallelism.experts.ep": 4,
        "training.global_batch_size": 2,
        "model.num_layers": 1,
    },
    "a V": {
        "parallelism.pp": 2,
        "pipeline.schedule": "ZBVZeroBubble",
        "model.num_layers": 4,
        "moe.aux_loss_global": 0.1,
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_run_with_validation_is_one_without(texts: Path, shape: dict[str, Any]) -> None:
    """Bit-equal, including everything that a forward might leave behind."""
    changes = recipe(texts, **shape) | {"moe.bias_update_rate": 0.05, "moe.jitter": 0.1, "model.mtp_depth": 1}
    changes |= {"training.deterministic": True, "data.packing": "stream"}
    apart = {"validation.paths": [str(texts)], "validation.interval": 1, "validation.steps": 2}
    without, beside = (world.run(4, trained, changes | more)[0] for more in ({}, apart))
    assert [set(report) for report in beside["validation"]] == [{"val_loss", "val_perplexity", "val_best", "val_s"}] * 2
    losses = [report["val_loss"] for report in beside["validation"]]
    assert len(set(losses)) == 2
    assert [report["val_best"] for report in beside["validation"]] == [min(losses[: i + 1]) for i in range(2)]
    for name in ("loss", "norm"):
        assert without[name] == beside[name]
    for name in ("weights", "bias"):
        assert without[name].keys() == beside[name].keys()
        assert all(torch.equal(without[name][key], beside[name][key]) for key in without[name])
