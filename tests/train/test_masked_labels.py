"""Balance terms are about every token that is routed, whether or not its label counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests import parity, world

TERMS = {"moe.aux_loss": 0.02, "moe.aux_loss_sequence": 0.03, "moe.aux_loss_global": 0.04, "moe.z_loss": 0.05}


class Masked(parity.Samples):
    """Only the labels of the second half of each sample count, as the assistant messages of chats do."""

    def next_step(self) -> list[Any]:
        batches = super().next_step()
        for batch in batches:
            batch.labels_BS[:, : batch.labels_BS.shape[1] // 2] = -100
        return batches


def reports(masked: bool) -> dict[str, Any]:
    trainer = parity.make_trainer(TERMS, loader=partial(Masked if masked else parity.Samples, documents=False))
    return trainer.train_step()


class Unlabelled(parity.Samples):
    def next_step(self) -> list[Any]:
        batches = super().next_step()
        for batch in batches:
            batch.labels_BS.fill_(-100)
        return batches


def step_without_labels() -> tuple[dict[str, Any], bool]:
    trainer = parity.make_trainer({}, loader=partial(Unlabelled, documents=False))
    return trainer.train_step(), all(p.isfinite().all() for p in trainer.training.parameters.values())


def test_a_step_without_labels_is_worth_nothing_and_not_nan() -> None:
    ((report, finite),) = world.run(1, step_without_labels)
    assert (report["loss"], report["grad_norm"], finite) == (0, 0, True)


def test_masked_labels_change_the_loss_and_no_balance_term() -> None:
    ((whole,), (masked,)) = (world.run(1, reports, masked) for masked in (False, True))
    assert masked["loss"] != pytest.approx(whole["loss"], rel=1e-3)
    for term in TERMS:
        name = term.removeprefix("moe.")
        assert masked[name] == whole[name] > 0, name
    assert masked["tokens"] == whole["tokens"]
