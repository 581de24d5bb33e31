"""Where numbers were first not finite: layer, direction, rank and samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.train.checks import NumericalFault
from titanmoe.watch.first_nonfinite import beginning_of_text, text_tokenizer
from titanmoe.watch.number_checks import checks

NAN, BAD = float("nan"), 6
RUN = runs.RUN | {"debug.culprit": "name", "training.steps": 4, "checkpoint.enable": False}


class BadSample(Loader):
    """Positions of one sample of step 2 are NaN."""

    def next_step(self) -> list[Batch]:
        batches = super().next_step()
        numbers = iter(self.digest_samples(batches))
        out = []
        for batch in batches:
            place = torch.arange(batch.tokens_BS.shape[1]).expand(batch.tokens_BS.shape).double()
            bad = torch.tensor([next(numbers) == BAD for _ in place])
            out.append(batch._replace(position_BS=place.masked_fill(bad.unsqueeze(1), NAN)))
        return out


def with_bad_data(changes: dict[str, Any]) -> str:
    return train(parity.make_trainer(RUN | changes, loader=BadSample, checks=checks))


def train(trainer: Any) -> str:
    try:
        trainer.train_step(), trainer.train_step()
    except NumericalFault as error:
        return str(error)
    return ""


MAPPINGS = {
    "tp2 ep2": ({"parallelism.tp": 2, "parallelism.experts.ep": 2}, "ranks 0, 1", 2),
    "pp2": ({"parallelism.pp": 2, "activation_checkpoint.mode": "full"}, "rank 0", 2),
    "shared vocabulary": ({"parallelism.pp": 2, "parallelism.vocab": "pipeline"}, "rank 0", 2),
    "dp2, two samples at a time": ({"training.local_batch_size": 2}, "rank 1", 0),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_bad_data_are_named_by_their_number(name: str) -> None:
    changes, ranks, microbatch = MAPPINGS[name]
    texts = world.run(2, with_bad_data, changes)
    assert texts[0] == texts[1] and texts[0].startswith("step 2: loss nan, gradient norm nan; first parameter")
    assert f"First not finite: the output of layers.0.attention, microbatch {microbatch}, on {ranks} (" in texts[0]
    assert texts[0].count("; sample 6 of the run. ") == 1


def with_a_bad_weight(changes: dict[str, Any], name: str, rank: int) -> str:
    trainer = parity.make_trainer(RUN | changes, checks=checks)
    if dist.get_rank() == rank:
        trainer.training.optimizer.local_shards[name].data.view(-1)[0] = float("inf")
    return train(trainer)


def test_the_rank_of_a_bad_expert_is_named_and_not_those_that_got_its_rows() -> None:
    texts = world.run(2, with_a_bad_weight, {"parallelism.experts.ep": 2}, "layers.1.moe.experts.w2", 1)
    assert texts[0] == texts[1]
    assert "First not finite: the output of layers.1.moe.experts, microbatch 1, on rank 1 (" in texts[0]


def with_a_bad_gradient(changes: dict[str, Any], rank: int) -> str:
    """The gradient that flows back into the first layer's attention norm is NaN."""

    def spoil(part: Any, args: Any, out: torch.Tensor) -> None:
        if trainer.step == 1:
            out.register_hook(lambda grad: grad * NAN)

    trainer = parity.make_trainer(RUN | changes, checks=checks)
    if dist.get_rank() == rank:
        trainer.training.stages[0].get_submodule("layers.0.attention_norm").register_forward_hook(spoil)
    return train(trainer)


def test_a_gradient_is_named_with_its_direction() -> None:
    texts = world.run(2, with_a_bad_gradient, {}, 1)
    assert texts[0] == texts[1] and texts[0].startswith("step 1: loss 4.1")
    assert "First not finite: the gradient that leaves the backward of layers.0.attention." in texts[0]
    assert "on rank 1 (" in texts[0]


def with_a_bad_weight_gradient(changes: dict[str, Any], rank: int) -> str:
    """That of microbatch 1 in layer 1, which spoils no other tensor."""
    arrived = 0

    def spoil(grad: torch.Tensor) -> torch.Tensor | None:
        nonlocal arrived
        arrived += 1
        return grad * NAN if arrived % trainer.training.loader.microbatches == 2 else None

    def hook(module: Any, args: Any) -> None:
        if not arrived:
            module.weight.register_hook(spoil)
            before.remove()

    trainer = parity.make_trainer(RUN | changes, checks=checks)
    module = trainer.training.stages[-1].get_submodule("layers.1.attention.wq")
    before = module.register_forward_pre_hook(hook)
    if dist.get_rank() != rank:
        before.remove()
    return train(trainer)


@pytest.mark.parametrize(
    "changes", [{"training.global_batch_size": 8}, {"parallelism.tp": 2, "parallelism.experts.ep": 2}]
)
def test_a_weights_gradient_is_named_with_the_rank_that_computed_it(changes: dict[str, Any]) -> None:
    texts = world.run(2, with_a_bad_weight_gradient, changes, 1)
    assert texts[0] == texts[1] and texts[0].startswith("step 1: loss 4.1")
    assert "First not finite: the gradient of layers.1.attention.wq.weight, microbatch 1, on rank 1 (" in texts[0]


def test_a_sample_is_shown_by_its_beginning() -> None:
    text = "A  sample\nbegins here, " + "and goes on " * 9
    batch = Batch(torch.tensor([[0] * 120, [256, *text.encode()[:119]]]), *[torch.empty(0)] * 2)
    assert (
        beginning_of_text(batch, 1, text_tokenizer(parity.read({}, 1).data))
        == "A sample begins here, and goes on and goes on and goes on"
    )
    assert (
        text_tokenizer(parity.read({"data.source": "synthetic"}, 1).data) is None
        and beginning_of_text(batch, 1, None) == ""
    )
