"""Frozen weights: whatever is left has the gradients of the plain model, and what is frozen does not move."""

from __future__ import annotations

from typing import Any

import pytest

from tests import parity, reference, world
from tests.test_parity import in_few

PATTERNS = {
    "attention": ["layers.*.attention.*"],
    "all but experts": ["embed.*", "head.*", "layers.*norm.weight", "layers.*.attention.*", "layers.*.router.*"],
    "one of the experts' matrices, and all before them": ["embed.*", "*attention*", "layers.0.*norm*", "*.experts.w1"],
    "all but routers": ["embed.*", "head.*", "*norm.weight", "*.attention.*", "*.experts.*"],
    "all but the last layer": ["embed.*", "layers.0.*"],
    "routers": ["*.router.*"],
}
MAPPINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp_ep_etp": {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "etp alone, replicas": {"parallelism.dp_replicate": 2, "parallelism.cp": 2, "parallelism.experts.etp": 2},
    "pp": {"parallelism.pp": 2, "parallelism.experts.ep": 2},
    "zero bubble": {
        "parallelism.pp": 2,
        "parallelism.tp": 2,
        "pipeline.schedule": "ZBVZeroBubble",
        "model.num_layers": 4,
    },
    "alone, offloaded": {"optimizer.offload": True},
    "recomputed": {"parallelism.experts.ep": 4, "activation_checkpoint.mode": "full"},
}
TERMS = {"moe.aux_loss_sequence": 0.02, "moe.z_loss": 0.01, "moe.bias_update_rate": 0.05}
CASES = [
    ("attention", "tp_ep_etp"),
    ("attention", "zero bubble"),
    ("all but experts", "tp_ep_etp"),
    ("all but experts", "etp alone, replicas"),
    ("one of the experts' matrices, and all before them", "alone"),
    ("one of the experts' matrices, and all before them", "recomputed"),
    ("all but routers", "alone"),
    ("attention", "alone, offloaded"),
    ("all but routers", "tp_ep_etp"),
    ("all but the last layer", "pp"),
    ("all but the last layer", "zero bubble"),
    ("routers", "alone"),
    ("routers", "pp"),
    ("routers", "recomputed"),
]


def frozen(patterns: str, mapping: str) -> tuple[int, dict[str, Any]]:
    changes = {"training.freeze": PATTERNS[patterns]} | TERMS | MAPPINGS[mapping]
    size = 1 if mapping.startswith("alone") else 4
    return size, in_few(size, changes)


def stored(changes: dict[str, Any]) -> dict[str, str]:
    """On a rank: the dtype of each parameter."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    return {name: str(parameter.dtype) for name, parameter in trainer.training.parameters.items()}


@pytest.mark.parametrize(("patterns", "mapping"), CASES)
def test_parity_of_what_is_left(patterns: str, mapping: str) -> None:
    parity.check(*frozen(patterns, mapping))


def test_frozen_weights_keep_their_bits() -> None:
    size, changes = frozen("all but experts", "tp_ep_etp")
    config = parity.read(changes, size)
    got = world.run(size, parity.measure, changes)[0]
    before = reference.initial_weights(config.model, config.training.seed)
    still = {name for name, weight in got.weights.items() if weight.equal(before[name])}
    assert still == {name for name in before if not reference.trains(config, name)}
    assert got.grads.keys() == before.keys() - still


def test_a_frozen_weight_is_narrow_and_computes_the_same_bits() -> None:
    """By default weights are stored in float32 and computed with in bfloat16. Routers are float32 in both."""
    numerics = dict(zip(parity.NUMERICS, ("float32", "bfloat16", "float32"), strict=True)) | {"moe.z_loss": 0.01}
    changes = numerics | {"training.freeze": PATTERNS["all but experts"]}
    trained, partly = (world.run(1, parity.measure, some, False, "", 1)[0] for some in (numerics, changes))
    assert trained.loss == partly.loss
    assert all(grad.equal(trained.grads[name]) for name, grad in partly.grads.items())
    config = parity.read(changes, 1)
    for name, dtype in world.run(1, stored, changes)[0].items():
        narrow = not reference.trains(config, name) and ".router." not in name
        assert dtype == ("torch.bfloat16" if narrow else "torch.float32"), name


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_ends_of_a_pipeline(tied: bool) -> None:
    changes = {"training.freeze": ["embed.*"], "model.tie_embeddings": tied, "model.mtp_depth": 1, "parallelism.pp": 2}
    parity.check(2, in_few(2, changes))
