"""Selective recomputation of latent attention: the same numbers, and queries, keys and values are not saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.live_bytes import Live
from titanmoe.config.schema import ActivationCheckpoint, Config, Model
from titanmoe.models.layers import rope_angles
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.recompute import recompute

B, S = 2, 16
MODEL = Model(
    dim=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    head_dim=16,
    v_head_dim=16,
)


def attention(model: Model, mode: str):
    made = Transformer(replace(Config(), model=model), 1, torch.float64)
    for seed, weight in enumerate(made.parameters()):
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    recompute(made, ActivationCheckpoint(mode=mode))
    return made.layers["0"].attention


def run(model: Model, mode: str) -> tuple[list[Tensor], int]:
    module = attention(model, mode)
    x_BSD = torch.randn(B, S, model.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = rope_angles(torch.arange(S).expand(B, S), model, model.qk_rope_head_dim, torch.float64)
    leaves = [x_BSD.requires_grad_(), *module.parameters()]
    document_BS = (torch.arange(S) // 5).expand(B, S)
    with Live() as live:
        y_BSD = module(x_BSD, rope, document_BS)
    kept = live.now
    first = torch.autograd.grad(y_BSD.square().sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y_BSD.square().sum(), leaves)  # schedules that split backward run it twice
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [y_BSD.detach(), *first], kept


@pytest.mark.parametrize("latent", [20, 0])
def test_what_is_made_of_latents_is_not_kept(latent: int) -> None:
    model = replace(MODEL, q_lora_rank=latent)
    want, whole = run(model, "none")
    got, kept = run(model, "selective")
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    query, key, key_value = 16, 16, 8 + 16
    forgotten = key + key_value + (query if latent else 0)
    assert whole - kept >= B * S * 8 * model.num_heads * forgotten, f"{kept} of {whole} bytes"
