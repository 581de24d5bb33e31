"""Whatever is killed at whatever moment of a save, there is a complete checkpoint and the next start takes it."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import victims
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
from titanmoe.checkpoint.checkpoint_folder import Checkpoint

NOBODY = -1


def attempt(tmp: Path, mode: str, victim: int = NOBODY, at: int = 0) -> Path:
    folder, steps_of = tmp / "checkpoints", tmp / "seen"
    steps_of.mkdir(parents=True)
    with victims.pair(victims.save_two, str(folder), mode, victim, at, str(steps_of), log=tmp / "log") as ranks:
        if victim == NOBODY:
            for process in ranks:
                process.join(60)
                assert process.exitcode == 0
        else:
            ranks[victim].join(60)
            assert ranks[victim].exitcode == -9
            ranks[1 - victim].join(0.1)  # it may or may not notice the loss of its peer
    return folder


def check(folder: Path) -> int:
    """What the next start would take: complete, and all from one step."""
    best = layout.newest_first(folder)[0]
    assert layout.find_damage(best) == []
    checkpoint = Checkpoint(best)
    step = checkpoint.record["step"]
    for name, tensor in victims.contents(step).items():
        assert torch.equal(checkpoint.read(name), tensor), (best, name)
    layout.clean_up_interrupted(folder)
    left = (
        {path.name for path in folder.iterdir()}
        - {layout.LATEST}
        - {path.name for path in layout.checkpoints_by_step(folder).values()}
    )
    assert not left
    return step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed save, with a copy of the folder from before each disk operation of a rank: what a kill at that
    moment would leave, because what was written before it stays.
    """
    tmp = tmp_path_factory.mktemp("whole")
    assert check(attempt(tmp, "async")) == 2
    return tmp / "seen"


def steps_of(whole: Path, rank: int) -> list[str]:
    return (whole / str(rank)).read_text().splitlines()


@pytest.mark.parametrize("victim", [0, 1])
def test_what_any_moment_of_an_asynchronous_save_would_leave(whole: Path, victim: int) -> None:
    steps = steps_of(whole, victim)
    if victim == 0:
        assert {"os.mkdir", "open for writing", "write", "fsync", "os.rename", "os.remove", "os.rmdir"} <= set(steps)
    else:
        assert {"open for writing", "write", "fsync"} <= set(steps)
    surviving_steps = [check(whole / f"{victim}-{at}") for at in range(1, len(steps) + 1)]
    # The old one stays until the rename; after that rank 1 has nothing to do.
    assert surviving_steps == sorted(surviving_steps) and surviving_steps[0] == 1
    assert surviving_steps[-1] == (2 if victim == 0 else 1)


@pytest.mark.parametrize(
    "victim, what, left", [(0, "write", 1), (0, "os.rename", 1), (0, "os.rmdir", 2), (1, "open for writing", 1)]
)
def test_killed_in_an_asynchronous_save(whole: Path, tmp_path: Path, victim: int, what: str, left: int) -> None:
    steps = steps_of(whole, victim)
    at = len(steps) - steps[::-1].index(what) if what == "os.rmdir" else steps.index(what) + 1
    assert check(attempt(tmp_path, "async", victim, at)) == left


def test_killed_in_a_synchronous_save(tmp_path: Path) -> None:
    assert check(attempt(tmp_path, "sync", 0, 12)) == 1


@pytest.mark.parametrize(("when", "saved"), [("before", 1), ("after", 2)])
def test_killed_between_a_checkpoint_and_the_line_of_its_step(tmp_path: Path, when: str, saved: int) -> None:
    """The step after which a restart resumes has its line, and no step has two."""
    changes = {"checkpoint.interval": 1, "checkpoint.save": "sync", "training.steps": 3}
    changes |= {"model.num_layers": 1, "training.global_batch_size": 2}
    run, log = tmp_path / "run", tmp_path / "log"
    with victims.pair(victims.train_until_killed, str(tmp_path), changes, 2, when, log=log) as ranks:
        ranks[0].join(60)
        assert ranks[0].exitcode == -9, log.read_text()[-3000:]
    assert layout.read_manifest(layout.newest_first(run / "checkpoints")[0]).step == saved
    with victims.pair(victims.train, str(tmp_path), changes, log=log) as ranks:
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0, log.read_text()[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4, 9: 2.1}
BEST = {
    "validation.interval": 2,
    "validation.steps": 1,
    "checkpoint.interval": 3,
    "checkpoint.save": "sync",
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": "val_loss",
    "training.steps": 9,
    "model.num_layers": 1,
    "lr_schedule.decay": "none",
}


def run_with_losses(folder: Path, *death: Any) -> None:
    with victims.pair(victims.train_with_losses, str(folder), BEST, LOSSES, *death, log=folder / "log") as ranks:
        for process in ranks[:1] if death else ranks:
            process.join(60)
            assert process.exitcode == (-9 if death else 0), (folder / "log").read_text()[-3000:]


def best_of(folder: Path) -> tuple[int, Any, dict[str, torch.Tensor], list[str], list[float]]:
    """Return of a run the step that RUN:best names, the tracker in the newest checkpoint, the best one's tensors, all
    checkpoints, and the validation losses that were logged."""
    path = latest_checkpoint(folder / "run:best")
    assert layout.find_damage(path) == []
    checkpoint, kept = Checkpoint(path), layout.checkpoints_by_step(folder / "run/checkpoints")
    tracker = layout.read_manifest(layout.newest_first(folder / "run/checkpoints")[0]).record["best"]
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    return checkpoint.record["step"], tracker, tensors, [path.name for path in kept.values()], losses


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The best of a run that nothing kills."""
    folder = tmp_path_factory.mktemp("calm")
    run_with_losses(folder)
    return best_of(folder)


@pytest.mark.parametrize(("step", "when"), [(4, "before"), (4, "after"), (6, "before"), (6, "after"), (9, "before")])
def test_killed_between_a_validation_and_its_save(step: int, when: str, calm: Any, tmp_path: Path) -> None:
    """Whether the step is a new best one or not, the resumed run keeps and names the best of one without a kill."""
    run_with_losses(tmp_path, step, when)
    seen = {number: loss for number, loss in LOSSES.items() if number < step or (number == step and when == "after")}
    named, tracker, *_ = best_of(tmp_path)
    assert named == tracker["step"] == min(seen, key=seen.__getitem__)
    run_with_losses(tmp_path)
    step_of, tracker_of, tensors, *rest = calm
    named, tracker, restored, *others = best_of(tmp_path)
    assert (named, tracker, others) == (step_of, tracker_of, rest) and named == 4
    assert restored.keys() == tensors.keys() and all(torch.equal(restored[name], x) for name, x in tensors.items())


KILLS = int(os.environ.get("KILLS", "40"))


@pytest.mark.slow
def test_a_storm_of_kills(tmp_path: Path) -> None:
    """A run of two ranks that saves at every step, killed again and again at random, ends as if it had never been
    killed."""
    draw = random.Random(0)
    changes = {
        "checkpoint.interval": 1,
        "checkpoint.keep_last": 2,
        "training.steps": 100_000,
        "lr_schedule.decay": "none",
    }
    folder = tmp_path / "run/checkpoints"
    last, tally, began = 0, Counter(), time.monotonic()
    for _ in range(KILLS):
        with victims.pair(victims.train, str(tmp_path), changes, log=tmp_path / "log") as ranks:
            fresh = time.monotonic()
            # Until this start has saved. `latest` may name a step before the last if a kill came between two renames.
            while layout.read_latest(folder) <= layout.folder_name(last) and time.monotonic() - fresh < 60:
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 0.5))
            victims.kill(ranks, draw.sample([0, 1], 2), draw.choice([0, 0.05, 0.3]))
        left = [path.name for path in folder.iterdir()]
        tally["while writing"] += any(name.endswith(layout.WRITING) for name in left)
        tally["while removing"] += any(name.endswith(layout.REMOVING) for name in left)
        best = layout.newest_first(folder)[0]
        assert layout.find_damage(best) == [], best
        step = layout.read_manifest(best).step
        assert step > last, "a start went back, or got nowhere"
        tally["lost a save that was not yet whole"] += layout.folder_name(step + 1) + layout.WRITING in left
        last = step
    end = last + 3
    final = changes | {"training.steps": end}
    for name in ("storm", "calm"):
        where = tmp_path if name == "storm" else tmp_path / "calm"
        with victims.pair(victims.train, str(where), final, log=tmp_path / "log") as ranks:
            for process in ranks:
                process.join(600)
                assert process.exitcode == 0, (tmp_path / "log").read_text()[-3000:]
    stormy, calm = (
        Checkpoint(path / "run/checkpoints" / layout.folder_name(end)) for path in (tmp_path, tmp_path / "calm")
    )
    assert stormy.tensors == calm.tensors
    for name in calm.tensors:
        assert torch.equal(stormy.read(name), calm.read(name)), name
    losses = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in losses] == list(range(1, end + 1))
    print(f"\n{KILLS} kills in {time.monotonic() - began:.0f} s, {last} steps: {dict(tally)}")
