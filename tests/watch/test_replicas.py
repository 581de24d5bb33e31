"""A bit that flips in one replica is found within the interval, and its rank is named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from tests.support.case_features import TRAINED
from titanmoe.observe import Observer, listening
from titanmoe.train.checks import NumericalFault
from titanmoe.watch import bit_checks
from titanmoe.watch.bit_checks import differing_ranks, fingerprint
from titanmoe.watch.number_checks import checks

TRIALS, EVERY = 20, 2
RUN = runs.RUN | {"model.num_layers": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_any_flipped_bit_changes_a_fingerprint(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_checks, "BLOCK", 4)
    x = torch.randn(21).mul(9).to(dtype)[1:]
    sound = int(fingerprint(x))
    for place in range(len(x)):
        for bit in range(8 * x.element_size()):
            flip(x, place, bit)
            assert int(fingerprint(x)) != sound, (place, bit)
            flip(x, place, bit)
    assert int(fingerprint(x)) == int(fingerprint(x.clone())) == sound != int(fingerprint(x.flip(0)))
    assert int(fingerprint(x[:0])) == 0


def flip(x: torch.Tensor, place: int, bit: int) -> None:
    x.view(-1).view(torch.uint8)[place * x.element_size() + bit // 8] ^= 1 << bit % 8


def test_the_majority_is_right() -> None:
    assert differing_ranks((0, 2, 4), [7, 7, 7]) == []
    assert differing_ranks((0, 2, 4), [7, 8, 7]) == [2]
    assert differing_ranks((0, 2), [7, 8]) == [0, 2]
    assert differing_ranks((0, 2, 4, 6), [7, 7, 8, 8]) == [0, 2, 4, 6]


def flips(changes: dict[str, Any]) -> list[str]:
    """Flip a random bit of a random tensor on a random rank, again and again. Returns which was hit, and the
    message."""
    trainer = parity.make_trainer(RUN | changes | {"debug.replicas_every": EVERY}, checks=checks)
    draw, results = random.Random(0), []
    parity.random_b(trainer)  # at 0, as it begins, moments of A are 0, in which a flipped bit is lost in rounding
    trainer.train_step()
    for _ in range(TRIALS):
        trainer.training.state.step = 1
        sound = {name: x.clone() for name, x, _ in trainer.training.guard.checks.replicas.replicated_state()}
        name, x, _ = draw.choice(list(trainer.training.guard.checks.replicas.replicated_state()))
        victim, place, bit = (
            draw.randrange(trainer.training.runtime.world),
            draw.randrange(x.numel()),
            draw.randrange(64),
        )
        if dist.get_rank() == victim:
            # The lowest bits of a moment may be lost in the rounding of its update.
            flip(x.detach(), place, 3 + bit % (8 * x.element_size() - 3))
        text = ""
        try:
            for _ in range(EVERY):
                trainer.train_step()
                trainer.training.guard.checks.after_step(saves=False)
        except NumericalFault as error:
            text = str(error)
        results.append((victim, name, bit, text))
        for name, x, _ in trainer.training.guard.checks.replicas.replicated_state():
            x.detach().copy_(sound[name])
        trainer.training.gradients.drop()
    return results


@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_a_flipped_bit_is_found_in_20_of_20_and_its_rank_named(trained: str) -> None:
    """Also in frozen weights."""
    ends = world.run(4, flips, {"parallelism.dp_replicate": 4} | TRAINED[trained])
    assert ends[0] == ends[1] == ends[2] == ends[3]
    for victim, name, bit, text in ends[0]:
        assert f"rank {victim} differs from 3 ranks that agree" in text, (victim, name, bit, text)
    assert len(ends[0]) == TRIALS


def hit(folder: str, changes: dict[str, Any], at: int, *names: str) -> dict[str, torch.Tensor] | str:
    """Returns the final state of a run in which a bit of each named weight flips on rank 1 before a step's update."""
    pending = [at]

    class Strike(Observer):
        def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
            if pending == [step] and dist.get_rank() == 1:
                pending.clear()  # not again after it was restored
                for name in names:
                    full = next(n for n in parameters if n.endswith(name))
                    flip(trainer.training.optimizer.local_shards[full].data, 3, 30)

    changes = RUN | {"job.dump_folder": folder, "training.steps": 6, "checkpoint.interval": 2} | changes
    trainer = parity.make_trainer(changes, checks=checks)
    try:
        with listening(Strike()):
            trainer.train()
    except NumericalFault as error:
        return str(error)
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in
            runs.everything(trainer).items()}  # fmt: skip


CASES = {
    "dp_replicate": ({"parallelism.dp_replicate": 2}, "attention.wq.weight", "(dp_replicate): layers.0.attention.wq"),
    "tp": ({"parallelism.tp": 2}, "attention_norm.weight", "(tp): layers.0.attention_norm.weight"),
    "routers": ({}, "router.weight", "(dp_shard x cp): layers.0.moe.router.weight"),
    "edp_replicate": ({"parallelism.dp_replicate": 2}, "experts.w1", "(edp_replicate): layers.0.moe.experts.w1"),
}


@pytest.mark.parametrize("name", CASES)
def test_of_two_both_are_named_with_the_axes_and_the_tensor(name: str, tmp_path: Path) -> None:
    changes, tensor, text = CASES[name]
    ends = world.run(2, hit, str(tmp_path), changes | {"debug.replicas_every": 2}, 3, tensor)
    assert ends[0] == ends[1]
    assert ends[0].startswith("after step 4 ranks 0, 1 should hold the same and differ, and there is no majority")
    assert text in ends[0] and ends[0].endswith("; they agreed after step 2")


def test_a_rank_is_named_although_its_replicas_of_several_kinds_differ(tmp_path: Path) -> None:
    """Two tensors differ on rank 1: a weight that tp shards, with one replica, and a norm that all ranks hold."""
    changes = {"parallelism.dp_replicate": 2, "parallelism.tp": 2, "debug.replicas_every": 2}
    texts = world.run(4, hit, str(tmp_path), changes, 3, "attention.wq.weight", "attention_norm.weight")
    assert len(set(texts)) == 1 and "rank 1 differs from 3 ranks that agree" in texts[0]
    assert ": layers.0.attention_norm.weight" in texts[0] and ": layers.0.attention.wq.weight;" in texts[0]


def test_the_last_agreement_is_restored_to_the_last_bit(tmp_path: Path) -> None:
    """Also after a validation, which leaves weights gathered."""
    changes = {"parallelism.dp_replicate": 2, "debug.replicas_every": 1, "debug.on_difference": "restore"}
    changes |= {"validation.interval": 4, "validation.steps": 1, "parallelism.reshard_after_forward": "never"}
    straight = world.run(2, hit, str(tmp_path / "straight"), changes, 0, "")
    struck = world.run(2, hit, str(tmp_path / "struck"), changes, 4, "wq.weight")
    for want, got in zip(straight, struck, strict=True):
        assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
    folder = tmp_path / "struck/run"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["kind"]) for e in events] == [
        (0, "start"), (2, "save"), (4, "restore"), (2, "restart"), (4, "save"), (6, "save")
    ]  # fmt: skip
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5, 6]
