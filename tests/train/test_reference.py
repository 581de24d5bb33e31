"""What the reference says of a run's pairs: counted once, kept beside the shards, and found again by any mapping."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import parity, world
from tests.train.test_dpo import PREFERENCES
from titanmoe.config import ConfigError
from titanmoe.data.token_scores import EXTENSION, SCORES

LN2 = 0.6931471805599453
assert math.log(2) == LN2
SIDES = "chosen", "rejected"
FOLDED = {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 4}


LENGTHS = (10, 20), (16, 10), (6, 8), (9, 5), (4, 10), (5, 5), (3, 7)
"""Lengths of the chosen and the rejected completion: pairs fit 80 positions otherwise than 64, in 3 sequences each."""


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """A run of 7 pairs in steps of all: their number is no power of 2, by which every division is exact."""
    words = "yes, that is it", "no, it never was so"
    pairs = [
        {"prompt": f"{n}+{n}:"}
        | {side: word[:size].ljust(size, "!") for side, word, size in zip(SIDES, words, sizes, strict=True)}
        for n, sizes in enumerate(LENGTHS)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    own = {"model.vocab_size": 320, "training.seq_len": 80, "training.global_batch_size": 3}
    own |= {"data.paths": [str(tmp_path / "pairs.jsonl")]}
    return PREFERENCES | own | {"job.dump_folder": str(tmp_path / "runs"), "job.name": "run"}


def first_steps(
    changes: dict[str, Any], steps: int = 1, saves: bool = False, cold: bool = False
) -> tuple[str, list[float]]:
    """On a rank: a note on the reference, and the losses; goes on from a checkpoint if there is one.

    cold: as on GPUs, where the first run of a pipeline loads its kernels.
    """
    trainer = parity.make_trainer(changes | {"checkpoint.enable": saves, "checkpoint.interval": 0})
    training = trainer.training
    training.gradients.engine.cold = cold
    with training.checkpoints.in_folder(Path(changes["job.dump_folder"], "run")) as checkpoints:
        checkpoints.begin()
        note = training.prepare(training)["reference"]
        if training.validation:
            loss, metrics = training.validation.measure()
            assert loss == pytest.approx(LN2, abs=1e-12) and metrics["preference.val_kl"] < 1e-24
        losses = [trainer.train_step()["loss"] for _ in range(steps)]
        if saves:
            checkpoints.finish()
    training.loader.close()
    return note, losses


def scores(folder: str) -> np.ndarray:
    (file,) = Path(folder).glob(f"cache/*/{SCORES}/*/*.{EXTENSION}")
    return np.fromfile(file, "<f8")


def test_the_first_loss_is_ln_2_to_the_bit_and_any_mapping_finds_the_scores(run: dict[str, Any]) -> None:
    (alone,) = world.run(1, first_steps, run, 2)
    note, losses = alone
    digest = note.removesuffix(", computed now")
    assert losses[0] == LN2 and losses[1] < LN2 and len(digest) == 16
    (again,) = world.run(1, first_steps, run, 2)
    assert again == (f"{digest}, stored before", losses)
    other_packing = run | {"training.seq_len": 64, "training.local_batch_size": 3, "data.balance_work": True}
    adapters = {"lora.rank": 2}
    for size, changes in ((1, other_packing), (1, run | adapters), (4, run | FOLDED), (4, run | FOLDED | adapters)):
        found, (loss,) = world.run(size, first_steps, changes)[0]
        assert found == f"{digest}, stored before" and loss == pytest.approx(LN2, abs=1e-12)
    for size, changes in ((1, other_packing), (4, run | FOLDED)):
        assert world.run(size, first_steps, changes, 2)[0][1] == pytest.approx(losses, abs=1e-10)


@pytest.mark.parametrize(
    "more",
    [
        {"validation.interval": 1, "validation.held_out": 3, "training.global_batch_size": 2},
        {"parallelism.cp": 1, "parallelism.pp": 2, "parallelism.experts.ep": 2, "lora.rank": 2},
    ],
    ids=["cp, some held out", "pp and adapters"],
)
def test_a_mapping_that_counts_them_has_ln_2_to_the_bit_too(run: dict[str, Any], more: dict[str, Any]) -> None:
    note, (loss,) = world.run(4, first_steps, run | FOLDED | more)[0]
    assert note.endswith(", computed now") and loss == LN2
    folded = scores(run["job.dump_folder"])
    shutil.rmtree(Path(run["job.dump_folder"]))
    world.run(1, first_steps, run)
    np.testing.assert_allclose(folded, scores(run["job.dump_folder"]), rtol=0, atol=1e-12)
    assert (folded < 0).any() and np.isnan(folded).sum() == 14  # the first token of each completion's document


@pytest.mark.parametrize("vocab", ["tensor", "pipeline"])
def test_kernels_that_are_loaded_first_change_no_score(run: dict[str, Any], vocab: str) -> None:
    pipeline = {"parallelism.pp": 2, "pipeline.schedule": "1F1B", "parallelism.vocab": vocab}
    note, (loss,) = world.run(2, first_steps, run | pipeline, 1, False, True)[1]
    assert note.endswith(", computed now") and loss == LN2


@pytest.mark.parametrize(
    "adapters",
    [{}, {"lora.rank": 2}, {"lora.rank": 2, "lora.dropout": 0.2}],
    ids=["all weights", "adapters", "adapters with dropout"],
)
def test_a_resumed_run_keeps_its_reference(run: dict[str, Any], adapters: dict[str, Any]) -> None:
    run |= adapters
    ((first, losses),) = world.run(1, first_steps, run, 3)
    shutil.rmtree(run["job.dump_folder"])
    ((begun, before),) = world.run(1, first_steps, run, 1, True)
    ((resumed, after),) = world.run(1, first_steps, run, 1, True)
    assert begun == first and resumed == first.replace("computed now", "stored before") and before + after == losses[:2]
    (made,) = Path(run["job.dump_folder"]).glob(f"cache/*/{SCORES}")
    shutil.rmtree(made)
    if adapters:  # the weights under them are still there
        ((counted, after),) = world.run(1, first_steps, run, 1, True)
        assert counted == first and after == losses[2:]
    else:
        with pytest.raises(
            world.RankError, match=r"has no scores of this run.s reference model .*titanmoe score RECIPE"
        ):
            world.run(1, first_steps, run, 1, True)


def test_scores_of_other_shards_are_refused_all_at_once(run: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(tmp_path / "pairs.jsonl", tmp_path / "more.jsonl")
    run |= {"data.paths": [str(tmp_path / "pairs.jsonl"), str(tmp_path / "more.jsonl")]}
    world.run(1, first_steps, run)
    manifests = sorted(Path(run["job.dump_folder"]).glob(f"cache/*/{SCORES}/*/manifest.json"))
    assert len(manifests) == 2
    for manifest in manifests:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"shards": "tokens:other"}))
    with pytest.raises(world.RankError) as refused:
        world.run(1, first_steps, run)
    assert str(refused.value).count("has scores of other shards (tokens:other, and ") == 2
    assert "remove that folder, and the scores are recomputed" in str(refused.value)


def test_a_run_does_not_learn_from_scores_that_have_changed(run: dict[str, Any]) -> None:
    """Zeroed, they gave a loss of 0.10 at once."""
    world.run(1, first_steps, run)
    (file,) = Path(run["job.dump_folder"]).glob(f"cache/*/{SCORES}/*/*.{EXTENSION}")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(world.RankError, match=rf"{file} has changed since it was written, between bytes 0 and "):
        world.run(1, first_steps, run)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"data.format": "jsonl"},
            "learns from pairs of a chosen and a rejected completion, and 'pairs.jsonl' has none",
        ),
        ({"data.source": "stdlib", "data.paths": []}, "'stdlib' has none: set data.format = \"preference\""),
        ({"training.objective": "cross_entropy"}, 'would train on both in the same way: set objective = "dpo"'),
        (
            {"data.packing": "documents"},
            'needs both completions of a pair in one sequence, and data.packing = "documents"',
        ),
        ({"model.mtp_depth": 1}, "cannot train multi-token prediction"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parity.read(PREFERENCES | changes, 1)
    assert says in str(refused.value)
