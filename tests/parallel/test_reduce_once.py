"""[parallelism] reduce_once: gradients are summed over microbatches first and sent once; no number changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests import parity, world
from tests.rehearse.small import config_of
from titanmoe.rehearse.rehearsal import rehearse

ONCE = {"parallelism.reduce_once": True, "training.global_batch_size": 6}


@pytest.mark.parametrize(
    "mapping",
    [
        {"parallelism.tp": 2, "parallelism.experts.ep": 4, "model.tie_embeddings": True},
        {
            "parallelism.dp_replicate": 2,
            "parallelism.cp": 2,
            "activation_checkpoint.mode": "full",
            "model.mtp_depth": 1,
        },
    ],
    ids=["tp2 ep4", "replicate2 cp2"],
)
def test_no_number_changes(mapping: dict[str, Any]) -> None:
    parity.check(4, ONCE | mapping)


def test_narrow_gradients_are_summed_wide() -> None:
    mixed = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16", "moe.force_balance": True}
    mixed |= {"training.mixed_precision_reduce": "float32", "training.global_batch_size": 8}
    on, off = (
        world.run(2, parity.measure, mixed | {"parallelism.reduce_once": once}, False, "", 1)[0]
        for once in (True, False)
    )
    for name, grad in off.grads.items():
        assert float((on.grads[name] - grad).abs().max()) <= 1e-5 * float(grad.abs().max()), name


def sent(**changes: Any) -> Counter[str]:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    config = config_of({"training.mixed_precision_param": "bfloat16", "model.num_layers": 1} | given, 4, "h100")
    found = rehearse(config, 4, 0, "h100")
    return Counter(m.op for m in found.log.messages if found.groups[m.group].kind == "shards")


def test_gradients_are_sent_once_a_step() -> None:
    one, three, once = (
        sent(training__global_batch_size=4 * n, parallelism__reduce_once=n == 3 and once)
        for n, once in ((1, False), (3, False), (3, True))
    )
    units = 4  # embedding, block, experts, head
    assert one["reduce-scatter"] == once["reduce-scatter"] == units and three["reduce-scatter"] == 3 * units
    # In forward all, in backward neither the embedding, whose gradient needs no weights, nor the head, which is kept.
    assert once["all-gather"] == three["all-gather"] == 3 * one["all-gather"] == 3 * (units + 2)
