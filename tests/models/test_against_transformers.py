"""Whole models with transformers' weights give transformers' logits: olmoe and gpt_oss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support import tolerances
from titanmoe.config.schema import Config, Model
from titanmoe.models.families import preset
from titanmoe.models.transformer import Transformer
from titanmoe.tokens import Tokens

B, S = 2, 40
Experts = dict[str, Callable[[nn.Module], Tensor]]
TINY = dict(vocab_size=64, dim=32, num_layers=3, num_heads=4, head_dim=8, num_experts=8, top_k=3, expert_hidden=24)
NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.sinks": "self_attn.sinks",
    "moe.router.weight": "mlp.{router}.weight",
    "moe.router.bias": "mlp.{router}.bias",
} | {f"attention.w{w}.{kind}": f"self_attn.{w}_proj.{kind}" for w in "qkvo" for kind in ("weight", "bias")}


def logits(model: Model, theirs: nn.Module, ids_BS: Tensor, router: str, experts: Experts) -> Tensor:
    """experts: by our name of their tensors, how to get them from transformers' module."""
    ours = Transformer(Config(model=model), 1, torch.float64)
    ours.get_submodule("embed").weight.data.copy_(theirs.model.embed_tokens.weight)
    ours.head.weight.data.copy_(theirs.lm_head.weight)
    ours.head.norm.weight.data.copy_(theirs.model.norm.weight)
    for number, block in ours.layers.items():
        layer = theirs.model.layers[int(number)]
        for name, parameter in block.named_parameters():
            if name.startswith("moe.experts."):
                tensor = experts[name.removeprefix("moe.experts.")](layer.mlp.experts)
            else:
                tensor = layer.get_parameter(NAMES[name].format(router=router))
            assert tensor.shape == parameter.shape, name
            parameter.data.copy_(tensor.detach())
    index_T = torch.arange(B * S)
    position_BS = torch.arange(S).expand(B, -1)
    tokens = Tokens(position_BS, index_T, index_T // S, torch.ones(B * S, dtype=torch.bool), torch.tensor(0))
    return ours(ids_BS, tokens)


def random_weights(theirs: nn.Module) -> None:
    """Biases, norms and sinks too, and activations large enough to be clamped."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)


def close(got: Tensor, want: Tensor, model: Model) -> None:
    """Their angles, norms and softmax are in float32: in each layer two of up to S, and some 20 roundings."""
    tolerances.assert_close(got, want, roundings=model.num_layers * (2 * S**2 + 20), dtype=torch.float32)


def test_olmoe() -> None:
    transformers = pytest.importorskip("transformers")
    model = Model(**preset("olmoe", "debug") | TINY | {"num_kv_heads": 4})
    config = transformers.OlmoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.expert_hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        num_experts=model.num_experts,
        num_experts_per_tok=model.top_k,
        norm_topk_prob=model.norm_topk,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    theirs = transformers.OlmoeForCausalLM(config).double().eval()
    random_weights(theirs)
    ids_BS = torch.randint(model.vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    experts = {
        "w1": lambda e: e.gate_up_proj.chunk(2, 1)[0],
        "w3": lambda e: e.gate_up_proj.chunk(2, 1)[1],
        "w2": lambda e: e.down_proj,
    }
    with torch.no_grad():
        close(logits(model, theirs, ids_BS, "gate", experts), theirs(ids_BS).logits, model)


def test_gpt_oss() -> None:
    """A window of 5 of 40 positions on layers 0 and 2; YaRN from 16 positions."""
    transformers = pytest.importorskip("transformers")
    own = {"num_kv_heads": 2, "sliding_window": 5, "rope_original_len": 16}
    model = Model(**preset("gpt_oss", "debug") | TINY | own)
    config = transformers.GptOssConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.expert_hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_local_experts=model.num_experts,
        num_experts_per_tok=model.top_k,
        sliding_window=model.sliding_window,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": model.rope_theta,
            "factor": model.rope_factor,
            "beta_fast": model.rope_beta_fast,
            "beta_slow": model.rope_beta_slow,
            "truncate": model.rope_truncate,
            "original_max_position_embeddings": model.rope_original_len,
        },
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    theirs = transformers.GptOssForCausalLM(config).double().eval()
    random_weights(theirs)
    ids_BS = torch.randint(model.vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    # Gate and up columns alternate, and matrices are input by output.
    experts = {
        "w1": lambda e: e.gate_up_proj[..., ::2].mT,
        "w3": lambda e: e.gate_up_proj[..., 1::2].mT,
        "w2": lambda e: e.down_proj.mT,
        "w1_bias": lambda e: e.gate_up_proj_bias[..., ::2],
        "w3_bias": lambda e: e.gate_up_proj_bias[..., 1::2],
        "w2_bias": lambda e: e.down_proj_bias,
    }
    with torch.no_grad():
        close(logits(model, theirs, ids_BS, "router", experts), theirs(ids_BS).logits, model)
