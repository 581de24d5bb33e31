"""The host does not wait for a GPU unless it must: models on meta tensors take the GPU branches and have no values to
read. Anything that a forward and backward would wait for fails here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import parity
from tests.support.masks import mask_of
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.dispatchers.symm_mem import Symmetric
from titanmoe.moe.experts import Experts
from titanmoe.ops.kernels import installed
from titanmoe.parallel.choose_attention import apply_context_parallel
from titanmoe.parallel.recompute import apply_recomputation
from titanmoe.tokens import Tokens

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {
        "model.shared_hidden": 16,
        "model.shared_gate": True,
        "model.num_dense_layers": 1,
        "model.dense_hidden": 64,
    },
    "balance": {"moe.aux_loss": 0.1, "moe.aux_loss_sequence": 0.1, "moe.aux_loss_global": 0.1, "moe.z_loss": 0.1},
    "whole samples": {"moe.capacity_scope": "full_sequence", "moe.jitter": 0.1},
    "recomputed": {"activation_checkpoint.mode": "full"},
    "selective": {"activation_checkpoint.mode": "selective", "training.loss_chunks": 3},
    "windows and sinks": {"model.sliding_window": 8, "model.full_attention_every": 2, "model.attention_sinks": True},
    "documents": {"parallelism.attention_backend": "plain"},
}


def train(changes: dict[str, Any], documents: bool = False) -> None:
    narrow = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
    config = parity.read(narrow | {"moe.kernels": "auto", "parallelism.attention_backend": "plain"} | changes, 1)
    config.moe.kernels = "triton"  # which is refused on CPUs
    B, L = config.training.local_batch_size, config.training.seq_len
    mask = mask_of(torch.arange(L).expand(B, L) // 3 if documents else None)
    with torch.device("meta"):
        model = Transformer(config, 1, torch.bfloat16)
        apply_context_parallel(model, config.parallelism, NO_GROUP)
        apply_recomputation(model, config.activation_checkpoint)
        index = torch.arange(B * L)
        tokens = Tokens(
            index.view(B, L) % L,
            index,
            index // L,
            torch.ones_like(index, dtype=torch.bool),
            torch.zeros((), dtype=torch.int64),
            mask.to(lambda x: x.to("meta")),
        )
        for moe in model.moe_layers().values():
            moe.begin_step(1, torch.ones((), dtype=torch.float64), B)
        model(index.view(B, L), tokens, index.view(B, L)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("name", CASES)
def test_padded_bins_leave_the_host_alone(name: str) -> None:
    train(PADDED | CASES[name], name == "documents")


@pytest.mark.parametrize("name", CASES)
def test_dropless_rows_of_a_rank_with_all_experts_leave_the_host_alone(name: str) -> None:
    train(CASES[name], name == "documents")


def test_gathered_rows_do_not() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"):
        train({"moe.dispatcher": "allgather"})


def test_symmetric_memory_leaves_the_host_alone() -> None:
    config = parity.read({"training.mixed_precision_param": "bfloat16"}, 1)
    config.moe.dispatcher, config.moe.kernels, model, T = "symm_mem", "triton", config.model, 24
    with torch.device("meta"):
        dispatcher = Symmetric(model.num_experts, kernels="triton")
        sizes = ExpertRanks(), T, torch.bfloat16, torch.device("meta")
        dispatcher.memory = Symmetric.reserve(model, config.moe, *sizes)
        experts = Experts(model, config.moe, torch.bfloat16)
        x_TD = torch.empty(T, model.dim, dtype=torch.bfloat16, requires_grad=True)
        weights_TK = torch.empty(T, model.top_k, requires_grad=True)
        chosen_TK = torch.zeros(T, model.top_k, dtype=torch.int64)
        exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, 0)
        y_TD = exchange.combine(experts(*exchange.receive_routed()))
        y_TD.backward(torch.empty_like(y_TD))
    assert y_TD.shape == x_TD.shape
    assert all(x.grad is not None for x in (x_TD, weights_TK, *experts.parameters()))
