"""Latent attention equals transformers' DeepSeek-V3, with its neighbouring RoPE pairs moved to two halves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support import tolerances
from titanmoe.config.schema import Model
from titanmoe.mask import Mask
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import rope_angles

MODEL = Model(
    dim=32,
    num_heads=4,
    num_kv_heads=4,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    head_dim=14,
    v_head_dim=10,
    rope_theta=100.0,
    rope_original_len=64,
    norm_eps=1e-5,
)
YARN = replace(MODEL, rope_scaling="yarn", rope_factor=4.0, rope_mscale=1.0, rope_mscale_all_dim=0.7)


def halves(weight: Tensor, heads: int, rope: int) -> Tensor:
    """The last `rope` rows of each head, in neighbouring pairs, to two halves."""
    rows = weight.unflatten(0, (heads, -1)).clone()
    rows[:, -rope:] = rows[:, -rope:].unflatten(1, (rope // 2, 2)).transpose(1, 2).flatten(1, 2)
    return rows.flatten(0, 1)


@pytest.mark.parametrize("model", [MODEL, YARN, replace(YARN, q_lora_rank=0)], ids=["plain", "yarn", "no query latent"])
def test_equals_transformers(model: Model) -> None:
    theirs_module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling == "yarn":
        rope = {"rope_type": "yarn", "rope_theta": model.rope_theta, "factor": model.rope_factor, "mscale": 1.0}
        rope |= {"mscale_all_dim": model.rope_mscale_all_dim, "original_max_position_embeddings": 64}
        rope |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
    config = DeepseekV3Config(
        hidden_size=model.dim,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_heads,
        kv_lora_rank=model.kv_lora_rank,
        q_lora_rank=model.q_lora_rank or None,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=256,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = theirs_module.DeepseekV3Attention(config, 0).double()
    turn = theirs_module.DeepseekV3RotaryEmbedding(config)
    ours = LatentAttention(model, 0, torch.float64)
    names = {"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wo": "o_proj"}
    names |= {"wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj"} if model.q_lora_rank else {}
    names |= {} if model.q_lora_rank else {"wq": "q_proj"}
    for mine, name in names.items():
        weight = theirs.get_submodule(name).weight
        if name.endswith("layernorm"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        heads = {"wq": model.num_heads, "wq_b": model.num_heads, "wkv_a": 1}.get(mine)
        weight = halves(weight.detach(), heads, model.qk_rope_head_dim) if heads else weight.detach()
        ours.get_submodule(mine).weight.data.copy_(weight)
    assert {name for name, _ in ours.named_parameters()} == {f"{name}.weight" for name in names}

    x_BSD = torch.randn(2, 24, model.dim, dtype=torch.float64)
    position_BS = torch.arange(24).expand(2, -1)
    mask = torch.full((24, 24), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = theirs(x_BSD, turn(x_BSD, position_BS), mask)
    got = ours(x_BSD, rope_angles(position_BS, model, model.qk_rope_head_dim, torch.float64), Mask())
    tolerances.assert_close(
        got, want, roundings=24**2, dtype=torch.float32
    )  # their angles, of up to 24, are in float32
