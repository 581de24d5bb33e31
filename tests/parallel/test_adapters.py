"""Adapters under every mapping against the plain formula, which merges them: W + alpha / r B A in the place of W."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests import parity, reference, world
from tests.support.case_features import MODELS, TRAINED
from tests.test_parity import in_few
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.models.families import mixers
from titanmoe.models.tensors import Tuning, block_splits, expert_splits
from titanmoe.parallel.grad_norm import replicas

LORA = TRAINED["adapters"]
MAPPINGS: dict[str, dict[str, Any]] = {
    "etp 2, tp 1, ep 1": {"parallelism.experts.etp": 2},
    "tp 4, etp 2, ep 1": {"parallelism.tp": 4, "parallelism.experts.etp": 2},
    "experts in replicas, etp 2": {
        "parallelism.dp_replicate": 4,
        "parallelism.experts.edp_replicate": 2,
        "parallelism.experts.etp": 2,
    },
    "fewer experts than edp": {"parallelism.experts.etp": 2, "model.num_experts": 3, "model.top_k": 2},
    "key heads on two ranks of tp each": {"parallelism.tp": 4, "model.num_kv_heads": 2, "model.qkv_bias": True},
    "offloaded": {"parallelism.experts.ep": 2, "parallelism.experts.etp": 2, "optimizer.offload": True},
} | {
    f"recomputed, {mode}": {
        "parallelism.experts.ep": 2,
        "parallelism.experts.etp": 2,
        "activation_checkpoint.mode": mode,
    }
    for mode in ("full", "selective", "moe")
}
"""Besides those of tests/test_parity.py, a third of which have adapters."""


def not_summed_over_etp(trainer: Any) -> None:
    parity.random_b(trainer)
    gradients = trainer.training.gradients
    gradients.meshes = replace(gradients.meshes, etp=NO_GROUP)


def summed_over_data_ranks(trainer: Any) -> None:
    parity.random_b(trainer)
    gradients = trainer.training.gradients
    gradients.meshes = replace(gradients.meshes, etp=gradients.meshes.data)


def whole_on_one_rank(trainer: Any) -> dict[str, Any]:
    """The norm takes what etp replicates for what tp does."""
    tp = trainer.training.fold.tp

    def wrong(parameter: Any) -> int:
        return tp if "etp" in parameter.device_mesh.mesh_dim_names and replicas(parameter) > 1 else replicas(parameter)

    with mock.patch("titanmoe.parallel.grad_norm.replicas", wrong):
        return trainer.train_step()


def check(size: int, changes: dict[str, Any], **seams: Any) -> None:
    parity.check(size, in_few(size, LORA | changes), **seams)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_parity_from_random_a_and_b(mapping: str) -> None:
    check(4, MAPPINGS[mapping])


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron-Bridge 5634": ("tp 4, etp 2, ep 1", {"prepare": not_summed_over_etp}),
    "Megatron-Bridge 5231": ("etp 2, tp 1, ep 1", {"prepare": summed_over_data_ranks}),
    "Megatron-LM 5916": ("tp 4, etp 2, ep 1", {"train_step": whole_on_one_rank}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_known_faults_are_seen(fault: str) -> None:
    """At ep 1, with an etp that is not tp (docs/parity.md)."""
    mapping, planted = FAULTS[fault]
    with pytest.raises((AssertionError, world.RankError), match=r"is off by|replicas of .* differ"):
        check(4, MAPPINGS[mapping], **planted)


@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss"])
def test_parity_of_latents_shared_experts_and_biases(model: str) -> None:
    few = {"parallelism.tp": 2, "parallelism.experts.etp": 2, "model.num_dense_layers": 1, "model.dense_hidden": 16}
    check(2, MODELS[model] | few)


def test_the_plain_model_has_the_same_adapters() -> None:
    config = parity.read(LORA, 1)
    tuning, ours = Tuning.of(config), {}
    for layer, mixer in enumerate(mixers(config.model)):
        block = f"layers.{layer}"
        matrices = block_splits(config.model, mixer, True) | expert_splits(config.model)
        ours |= {f"{block}.{name}": shape for name, (shape, _) in tuning.adapters(block, matrices).items()}
    assert ours == {name: tuple(x.shape) for name, x in reference.initial_adapters(config, 0).items()}


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_new_adapters_change_no_bit(param: str) -> None:
    """With the grouped product, for which ranks 6 and 3 are filled up."""
    numerics = dict(zip(parity.NUMERICS, ("float32", param, "float32"), strict=True)) | {
        "training.global_batch_size": 2
    }
    without, with_adapters = (world.run(1, parity.measure, numerics | more, False, "", 1)[0] for more in ({}, LORA))
    assert with_adapters.loss == without.loss
    for name, grad in with_adapters.grads.items():
        assert bool(grad.any()) == name.endswith("B"), name
        assert torch.isfinite(grad).all()
