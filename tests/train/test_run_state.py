"""Steps whose update is skipped: decided alike under every mapping, with no trace in the state, after a resume too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests import parity, world
from tests.checkpoint import runs
from titanmoe.config.schema import Checkpoint, Optimizer, Training
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.observe import Observer, listening
from titanmoe.train.checks import NumericalFault
from titanmoe.train.run_state import SkipRule
from titanmoe.watch.heartbeat import FIRST_STEP
from titanmoe.watch.run_watch import HeartbeatListener, Watch

NAN, SPIKE, SAVED, LAST = 2, 6, 5, 7
RUN = runs.RUN | {"checkpoint.interval": SAVED, "training.steps": LAST, "optimizer.skip_window": 8}
SKIP = {"optimizer.skip_spikes": 6.0}


class BadBatches(Loader):
    """Positions of one step are NaN; the labels of another are all the same."""

    def next_step(self) -> list[Batch]:
        batches, step = super().next_step(), self.consumed // self.global_batch_size
        if step == NAN:
            return [batch._replace(position_BS=torch.full(batch.tokens_BS.shape, torch.nan)) for batch in batches]
        return [b._replace(labels_BS=torch.zeros_like(b.labels_BS)) for b in batches] if step == SPIKE else batches


def state(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's pieces of weights and buffers, and what the optimizer keeps."""
    held = {name: tensor.detach() for name, tensor in (trainer.training.parameters | trainer.training.buffers).items()}
    kept = {
        f"{key}.{name}": tensor
        for name, tensors in trainer.training.optimizer._states().items()
        for key, tensor in tensors.items()
    }
    return {name: (x.to_local() if isinstance(x, DTensor) else x).clone() for name, x in (held | kept).items()}


def go(folder: str, changes: dict[str, Any], until: int = LAST) -> dict[str, Any]:
    """Train. Returns which steps left the state unchanged, what was logged, and the state at the end."""
    trainer = parity.make_trainer(RUN | {"job.dump_folder": folder} | changes, loader=BadBatches)
    still, events, reports = [], [], {}

    class Events(Observer):
        def event(self, step: int, kind: str, text: str, **more: Any) -> None:
            if kind == "skip":
                events.append((step, kind, text, more))

    with trainer.training.checkpoints.in_folder(Path(folder) / "run") as checkpoints, listening(Events()):
        checkpoints.begin()
        before = state(trainer)
        while trainer.step < until:
            reports[trainer.step] = trainer.train_step()
            after = state(trainer)
            if all(torch.equal(tensor, before[name]) for name, tensor in after.items()):
                still.append(trainer.step)
            before = after
            checkpoints.after_step()
        checkpoints.wait()
    return {
        "still": still,
        "events": events,
        "reports": reports,
        "state": state(trainer),
        "skips": trainer.training.state.skips,
    }


MAPPINGS = {
    "tp2 cp2, ep4": (
        4,
        {"parallelism.tp": 2, "parallelism.cp": 2, "parallelism.experts.ep": 4, "training.local_batch_size": 4},
    ),
    "cp2, ep2": (2, {"parallelism.cp": 2, "parallelism.experts.ep": 2, "training.local_batch_size": 4}),
    "pp2 dp2, etp2": (4, {"parallelism.pp": 2, "parallelism.experts.etp": 2}),
    "one rank": (1, {"training.local_batch_size": 4}),
}


@pytest.mark.parametrize(
    "names",
    [("cp2, ep2", "pp2 dp2, etp2", "one rank"), ("tp2 cp2, ep4", "one rank")],
    ids=["of 2 and of 4 ranks", "of three axes"],
)
def test_every_mapping_skips_the_same_steps_and_leaves_no_trace(tmp_path: Path, names: tuple[str, ...]) -> None:
    samples, losses = [], []
    for name in names:
        size, mapping = MAPPINGS[name]
        ends = world.run(size, go, str(tmp_path / name), mapping | SKIP)
        for end in ends:
            assert end["still"] == [NAN, SPIKE], name
            assert [step for step, *_ in end["events"]] == [NAN, SPIKE]
            assert end["events"] == ends[0]["events"]
        (_, kind, text, first), (_, _, later, _) = ends[0]["events"]
        # torch's attention on CPUs makes 0 of a row of NaN scores that is shorter than a vector; backward shows it.
        assert kind == "skip"
        assert re.fullmatch(r"no update, because of (loss|gradient norm) nan; samples 4 to 7 of the run", text)
        assert "gradient norm " in later and "deviations above" in later and "samples 20 to 23" in later
        samples.append(first["samples"])
        losses.append([report["loss"] for step, report in ends[0]["reports"].items() if step != NAN])
        assert ends[0]["reports"][LAST]["skipped_steps"] == 2
    assert len({digest for _, digest in samples[0]}) == 4
    for identified, others in zip(samples[1:], losses[1:], strict=True):
        assert identified == samples[0]
        assert others == pytest.approx(losses[0], rel=1e-9)


def test_skipping_resumes_to_the_last_bit_and_equals_passing_over(tmp_path: Path) -> None:
    size, changes = 2, {"parallelism.tp": 2, "parallelism.experts.ep": 2, "model.num_layers": 1}
    changes |= {"training.local_batch_size": 2}
    straight = world.run(size, go, str(tmp_path / "straight"), changes | SKIP)
    resumed = world.run(size, go, str(tmp_path / "straight"), changes | SKIP)
    told = {"data.skip_steps": [str(NAN), f"{SPIKE}-{SPIKE}"]}
    passed = world.run(size, go, str(tmp_path / "passed"), changes | told, SAVED)
    assert passed[0]["events"] == [(NAN, "skip", "its batch is skipped (data.skip_steps)", {})]
    passed = world.run(size, go, str(tmp_path / "passed"), changes | told)
    for want, *others in zip(straight, resumed, passed, strict=True):
        for got in others:
            assert [step for step, *_ in got["events"]] == [SPIKE]
            assert got["skips"].skipped == 2
            assert all(torch.equal(tensor, want["state"][name]) for name, tensor in got["state"].items())
    assert resumed[0]["skips"].state_dict() == straight[0]["skips"].state_dict()


def end(folder: str) -> str:
    changes = (
        runs.RUN
        | SKIP
        | {"model.num_layers": 1, "optimizer.skip_limit": 3, "job.dump_folder": folder, "training.steps": 20}
    )
    try:
        parity.make_trainer(changes, loader=parity.NaNPositions).train()
    except NumericalFault as error:
        return str(error)
    return ""


def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    texts = world.run(2, end, str(tmp_path))
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "step 4: 3 updates in a row were skipped (optimizer.skip_limit), the last because of loss"
    )
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["kind"]) for e in events if e["kind"] != "save"] == [
        (0, "start"), (2, "skip"), (3, "skip"), (4, "skip"), (4, "stop")
    ]  # fmt: skip
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[1]["nonfinite"]["loss"] == "nan" and [s["skipped_steps"] for s in steps] == [0, 1, 2]


def test_what_is_usual_is_known_first_and_what_was_skipped_is_no_part_of_it() -> None:
    skips = SkipRule(Optimizer(skip_window=8))
    for loss in (3.0, 9.0, 3.1, 2.9):
        assert not skips.find_outlier(loss, 1.0, 6.0)
        skips.accept(loss, 1.0)
    skips = SkipRule(Optimizer(skip_window=8))
    for loss in (3.0, 3.2, 3.1, 2.9):
        skips.accept(loss, 1.0)
    assert skips.find_outlier(5.0, 1.0, 6.0).startswith("loss 5, which is 17.4 deviations above 3.05")
    assert skips.find_outlier(3.0, 1.1, 6.0).startswith("gradient norm 1.1, ") and not skips.find_outlier(
        -5.0, 0.1, 6.0
    )
    assert skips.find_outlier(5.0, 1.0, 6.0) and skips.find_outlier(float("inf"), 1.0, 6.0) == "loss inf"


def first_steps_skipped(folder: str) -> tuple[list[int], list[int], int]:
    """Train while rank 1 asks to stop in step 4, which is skipped.

    Returns the steps after which time-outs became short, the first steps by the heartbeat, and the last step.
    """
    changes = {"job.dump_folder": folder, "data.skip_steps": ["1-2", "4-6"], "training.steps": 9}
    trainer = parity.make_trainer(runs.RUN | changes)
    training, short, first = trainer.training, [], []
    runtime, watch = training.runtime, Watch(Training(), Checkpoint(), training)
    training.checkpoints.wants_to_stop = lambda: runtime.rank == 1 and trainer.step == 4
    training.metrics.log = lambda step, report: first.append(int(watch.heart.numbers[FIRST_STEP]))
    becomes_short = mock.patch.object(type(runtime), "steady_timeout", lambda *_: short.append(trainer.step))
    with becomes_short, listening(HeartbeatListener(watch.heart)):
        trainer.train()
    return short, first, trainer.step


def test_skipped_steps_are_no_first_steps_and_can_be_stopped(tmp_path: Path) -> None:
    assert world.run(2, first_steps_skipped, str(tmp_path)) == [([3], [3], 4)] * 2


def test_a_run_is_told_of_steps_that_are_none() -> None:
    from titanmoe.config import ConfigError

    for text in ("0", "7-5", "a", "3-", "1,2", ""):
        with pytest.raises(ConfigError, match="which is neither a step nor a range"):
            parity.read({"data.skip_steps": [text, text]}, 1)
