"""Small random models of transformers, saved as they are published, and what they compute."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support import tolerances

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
LINEAR: dict[str, Any] = dict(
    head_dim=8,
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=8,
    num_experts_per_tok=3,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(
            intermediate_size=48,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=8,
            num_experts_per_tok=3,
            mlp_only_layers=[0],
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            head_dim=8,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            intermediate_size=48,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            num_key_value_heads=8,
            num_hidden_layers=3,
            q_lora_rank=16,
            kv_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            first_k_dense_replace=1,
            intermediate_size=48,
            moe_intermediate_size=24,
            n_shared_experts=2,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
    ),
    "olmoe": ("Olmoe", dict(intermediate_size=24, num_experts=8, num_experts_per_tok=3)),
    "glm4_moe": (
        "Glm4Moe",
        dict(
            head_dim=8,
            num_hidden_layers=3,
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=1,
            intermediate_size=48,
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
            routed_scaling_factor=2.5,
        ),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        dict(
            num_key_value_heads=8,
            num_hidden_layers=3,
            q_lora_rank=16,
            kv_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
        ),
    ),
    "qwen3_next": ("Qwen3Next", LINEAR | dict(intermediate_size=48, mlp_only_layers=[0])),
    "qwen3_5_moe": ("Qwen3_5Moe", LINEAR),
    "minimax_m2": (
        "MiniMaxM2",
        dict(
            head_dim=8,
            rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
            intermediate_size=24,
            num_local_experts=8,
            num_experts_per_tok=3,
        ),
    ),
    "gpt_oss": (
        "GptOss",
        dict(
            head_dim=8,
            num_hidden_layers=3,
            intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=7,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1.5e5,
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=32,
            ),
        ),
    ),
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(intermediate_size=64, rms_norm_eps=1e-5)),
    "qwen2": ("Qwen2", dict(intermediate_size=64)),
    "qwen3": ("Qwen3", dict(intermediate_size=64, head_dim=8, tie_word_embeddings=True)),
}


def config(name: str, **changes: Any) -> Any:
    kind, options = (FAMILIES | DENSE)[name]
    cls = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    return cls(**{**BASE, **options, **changes})


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model with every parameter random: ones or zeros of a new model could be left out unnoticed."""
    kind, _ = (FAMILIES | DENSE)[name]
    model = getattr(transformers, f"{kind}ForCausalLM")(config(name, **changes)).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
        for name, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # some add one to their weight
                parameter += 0.2 * noise
            else:
                parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 and parameter.std() == 0 else 0.3 * noise)
    return model.to(dtype)


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def add_mtp(plain: Path, folder: Path, layers: int, change: Callable[[Any], None] = lambda tensors: None) -> Path:
    """A saved model in the layout in which multi-token prediction is published: one more block, with copies of
    embedding and head."""
    folder.mkdir()
    block, last = f"model.layers.{layers}.", f"model.layers.{layers - 1}."
    config = json.loads((plain / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    for name in [name for name in tensors if name.startswith(last)]:
        tensors[name.replace(last, block)] = noise(*tensors[name].shape)
    tensors |= {f"{block}{name}.weight": noise(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{block}eh_proj.weight"] = noise(32, 64)
    tensors[f"{block}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{block}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def ids(vocab_size: int = 64, samples: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(0, vocab_size, (samples, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, ids_BL: torch.Tensor) -> torch.Tensor:
    return model(ids_BL).logits


def enlarged(name: str) -> int:
    """How many times linear attention may enlarge rounding: its norm does where the recurrence gives little."""
    return 10 if name in ("qwen3_next", "qwen3_5_moe") else 1


def close(got: torch.Tensor, want: torch.Tensor, times: int = 1) -> None:
    """In each of 3 layers at most: angles of up to 32, products of up to 64 terms, some 40 roundings. times: by which
    they are enlarged."""
    tolerances.assert_close(got, want, terms=times**2 * 3 * 8 * 64, roundings=times**2 * 3 * (32**2 + 40))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the library."""
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                assert name not in out
                out[name] = handle.get_tensor(name)
    return out
