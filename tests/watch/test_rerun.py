"""A suspect step is repeated: a passing fault is blamed on its rank and leaves no trace; bad data is blamed on the
data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from titanmoe.config import ConfigError
from titanmoe.observe import Observer, listening
from titanmoe.train.checks import NumericalFault
from titanmoe.watch.bit_checks import describe_differences
from titanmoe.watch.number_checks import checks

RUN = runs.RUN | {"debug.rerun": True, "optimizer.skip_window": 4, "training.global_batch_size": 2}
KNOWN = 5
"""The first step in which it is known which losses are usual."""


def go(changes: dict[str, Any], faulty: int, module: str, value: float, rank: int = 1) -> tuple[Any, ...]:
    """Once, in the last step but one, the first number that a module returns on one rank is wrong."""
    struck = []

    def spoil(part: Any, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        if trainer.step != faulty or struck:
            return None
        struck.append(True)
        return torch.cat((out.flatten()[:1] * 0 + value, out.flatten()[1:])).view_as(out)

    trainer = parity.make_trainer(RUN | changes, checks=checks)
    events = []

    class Events(Observer):
        def event(self, step: int, kind: str, text: str, **more: Any) -> None:
            events.append((step, kind, text))

    named = {name: part for whole in trainer.training.stages for name, part in whole.named_modules()}
    if module in named and dist.get_rank() == rank:
        named[module].register_forward_hook(spoil)
    with listening(trainer.training.guard.checks), listening(Events()):
        losses = [trainer.train_step()["loss"] for _ in range(faulty + 1)]
    return losses, events, parity.whole(runs.everything(trainer), dist.get_rank(), trainer.training.fold)


CASES = {
    "NaN, data parallel": ({}, 2, "layers.1.ffn_norm", float("nan"), 1, "the router of layer 1"),
    "far too large, expert parallel": (
        {"parallelism.experts.ep": 2, "model.num_layers": 1},
        *(KNOWN, "head.norm", 1e30, 1, "the loss"),
    ),
    "adapters, etp": (
        {"parallelism.experts.etp": 2, "lora.rank": 4},
        *(2, "layers.1.ffn_norm", float("nan"), 1, "the router of layer 1"),
    ),
    "a stage": ({"parallelism.pp": 2}, 2, "layers.1.ffn_norm", float("nan"), 1, "the router of layer 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_passing_fault_is_blamed_on_its_rank_and_leaves_no_trace(name: str) -> None:
    changes, faulty, module, value, rank, where = CASES[name]
    straight, _, want = world.run(2, go, changes, faulty, "no module", 0.0)[0]
    ends = world.run(2, go, changes, faulty, module, value, rank)
    losses, ((step, kind, text),), got = ends[0]
    assert (step, kind) == (faulty, "suspect") and ends[0][1] == ends[1][1]
    assert f": not reproducible on rank 1, first seen in {where}" in text
    assert losses == straight and all(torch.equal(tensor, want[name]) for name, tensor in got.items())


def with_bad_data(changes: dict[str, Any]) -> str:
    trainer = parity.make_trainer(RUN | changes, loader=parity.NaNPositions, checks=checks)
    try:
        with listening(trainer.training.guard.checks):
            trainer.train_step(), trainer.train_step()
    except NumericalFault as error:
        return str(error)
    return ""


def test_data_that_gives_the_same_again_is_blamed_as_such() -> None:
    texts = world.run(2, with_bad_data, {"parallelism.tp": 2})
    assert texts[0] == texts[1] and texts[0].startswith("step 2: loss nan")
    assert "Loss nan: the data is the cause: a second forward and backward gives the same bits on all" in texts[0]


def test_the_first_difference_tells_where() -> None:
    routers = [f"the router of layer {n}" for n in range(12)]
    assert describe_differences([[], []]) == ""
    assert describe_differences([routers[10:], [*routers[9:], "the loss"], []]) == (
        "not reproducible on rank 1, first seen in the router of layer 9; "
        "what 1 other rank computed from it differs too"
    )
    assert describe_differences([["the gradient of a"], [], ["the gradient of b"]]) == (
        "not reproducible on ranks 0, 2, first seen in gradients"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"debug.rerun": True}, "training.deterministic = false lets them differ"),
        ({"debug.on_difference": "restore", "checkpoint.enable": True}, "debug.replicas_every = 0 looks for none"),
        ({"debug.on_difference": "restore", "debug.replicas_every": 9}, "checkpoint.enable = false"),
        (
            {"debug.on_difference": "restore", "debug.replicas_every": 9}
            | {"checkpoint.enable": True, "checkpoint.load": "none"},
            'checkpoint.load = "none": set enable = true',
        ),
    ],
)
def test_what_could_not_do_its_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parity.read(changes, 1)
    assert len(error.value.problems) == 1
