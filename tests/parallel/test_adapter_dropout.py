"""Dropout of adapters' inputs: the same mask under every mapping and in recomputation, and none outside of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import parity, world
from tests.support.case_features import MODELS
from tests.support.parity_errors import worst_error
from tests.test_parity import in_few
from titanmoe.config import ConfigError
from titanmoe.models.lora_dropout import InputDropout

DROPOUT: dict[str, Any] = {
    "lora.rank": 6,
    "lora.experts_rank": 3,
    "lora.alpha": 7.0,
    "lora.dropout": 0.3,
    "model.shared_hidden": 16,
    "model.num_dense_layers": 1,
    "model.dense_hidden": 16,
}
MAPPINGS: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp, two samples in a microbatch": {"training.local_batch_size": 2, "training.global_batch_size": 8},
    "tp": {"parallelism.tp": 4},
    "cp zigzag": {"parallelism.cp": 4},
    "cp contiguous, tp": {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.cp_placement": "contiguous"},
    "pp": {"parallelism.pp": 2, "parallelism.tp": 2, "model.num_layers": 2},
    "zero bubble": {"parallelism.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4},
    "key heads on two ranks of tp each": {"parallelism.tp": 4, "model.num_kv_heads": 2},
    "etp, tp": {"parallelism.tp": 4, "parallelism.experts.etp": 2, "parallelism.experts.ep": 2},
    "allgather": {"parallelism.experts.ep": 4, "moe.dispatcher": "allgather"},
    "hierarchical": {"parallelism.experts.ep": 4, "moe.dispatcher": "hierarchical", "parallelism.node": 2},
    "padded": {"parallelism.experts.ep": 2, "moe.capacity_factor": 1.0, "moe.pad_to_capacity": True},
    "halves": {"parallelism.experts.ep": 4, "moe.overlap": "halves", "training.local_batch_size": 2},
    "pairs": {
        "parallelism.pp": 2,
        "parallelism.experts.ep": 2,
        "pipeline.schedule": "DualPipeV",
        "moe.overlap": "pairs",
        "model.num_layers": 4,
        "training.global_batch_size": 8,
    },
    "multi-token prediction": {"parallelism.pp": 2, "parallelism.cp": 2, "model.mtp_depth": 1},
} | {
    f"recomputed, {mode}": {"parallelism.tp": 2, "parallelism.experts.ep": 2, "activation_checkpoint.mode": mode}
    for mode in ("full", "selective", "moe", "full_except_dispatch")
}


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_parity(mapping: str) -> None:
    parity.check(4, in_few(4, DROPOUT | MAPPINGS[mapping]))


def test_parity_of_grouped_products_in_float32() -> None:
    """The router's choice, which is close to rounding, is the plain model's."""
    numerics = dict.fromkeys(parity.NUMERICS, "float32")
    parity.check(4, in_few(4, DROPOUT | numerics | {"parallelism.experts.ep": 4}), freeze=True)


def step_with_known_graphs(trainer: Any) -> dict[str, Any]:
    """Only the first step may compile."""
    with torch._dynamo.config.patch(error_on_recompile=trainer.step > 0):
        return trainer.train_step()


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiled_model_has_the_same_graphs_in_every_step(tp: int) -> None:
    """One layer, with a shared expert: compiling takes each rank eight seconds."""
    compiled = {"compile.enable": True, "compile.backend": "aot_eager", "activation_checkpoint.mode": "selective"}
    small = {"model.num_layers": 1, "model.num_dense_layers": 0, "parallelism.tp": tp}
    parity.check(tp, in_few(tp, DROPOUT | small | compiled), train_step=step_with_known_graphs)


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_next", "gla", "gpt_oss"])
def test_parity_of_other_mixers_and_of_biases(model: str, mode: str) -> None:
    """The plain model merges wkv_b, which one process stands for here."""
    changes = MODELS[model] | DROPOUT | {"activation_checkpoint.mode": mode, "model.num_dense_layers": 0}
    mapping = {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 2}
    if model != "deepseek_v3":
        parity.check(4, in_few(4, changes | mapping))
        return
    others = {"lora.targets": ["*.attention.w[qo]*", "*.attention.wkv_a.*", "*.moe.*"]}
    parity.check(4, in_few(4, changes | mapping | others))
    case = in_few(4, changes | {"training.local_batch_size": 2})
    how = False, "", 1, None, parity.random_b
    want, got = (world.run(size, parity.measure, case | more, *how)[0] for size, more in ((1, {}), (4, mapping)))
    assert worst_error(got.grads, want.grads)[0] <= 1e-10


def losses(changes: dict[str, Any]) -> tuple[float, float, int]:
    """On a rank: of a step, and of the validation data before it, from random adapters; and how many modules drop."""
    trainer = parity.make_trainer(changes)
    parity.random_b(trainer)
    training = trainer.training
    validation = training.validation.measure()[0]
    dropping = sum(isinstance(module, InputDropout) for stage in training.stages for module in stage.modules())
    return trainer.train_step()["loss"], validation, dropping


@pytest.mark.parametrize("mapping", [{}, {"parallelism.pp": 2}], ids=["one process", "pp"])
def test_only_training_drops_and_at_0_nothing_does(mapping: dict[str, Any]) -> None:
    data = {"data.source": "synthetic", "validation.interval": 1, "validation.steps": 1}
    size, changes = 1 + len(mapping), DROPOUT | data | mapping
    dropped, none, default = (
        world.run(size, losses, changes | {"lora.dropout": rate} if rate is not None else changes)[0]
        for rate in (0.3, 0.0, None)
    )
    assert dropped == default and dropped[0] != none[0]
    assert dropped[1] == none[1] and none[2] == 0 < dropped[2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all": ({"lora.dropout": 1.0}, "lora.dropout = 1.0"),
    "a negative number": ({"lora.dropout": -0.1}, "lora.dropout = -0.1"),
    "no adapters": ({"lora.rank": 0, "lora.experts_rank": -1, "lora.alpha": 32.0}, "dropout = 0.3 does nothing with"),
    "symm_mem": ({"moe.dispatcher": "symm_mem"}, r'sends tokens alone: use dispatcher = "alltoall", or leave experts'),
    "deepep": ({"moe.dispatcher": "deepep"}, r'sends tokens alone: use dispatcher = "alltoall", or leave experts'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    changes, says = REFUSED[case]
    with pytest.raises(ConfigError, match=says):
        parity.read(DROPOUT | changes, 2)


def test_symm_mem_sends_the_tokens_of_experts_without_adapters() -> None:
    parity.read(DROPOUT | {"moe.dispatcher": "symm_mem", "lora.targets": ["*.attention.*"]}, 2)
