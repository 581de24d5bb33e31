"""What each block of a model is: whether it has experts and how they are chosen, and how far its attention sees."""

from __future__ import annotations

from titanmoe.config.schema import Config, Model


def has_experts(model: Model, layer: int) -> bool:
    """Whether a block has experts rather than a dense feed-forward network. The block of multi-token prediction, which
    comes after the last layer, is like the last."""
    layer = min(layer, model.num_layers - 1)
    return layer >= model.num_dense_layers and (layer - model.num_dense_layers + 1) % model.moe_every == 0


def moe_blocks(model: Model) -> list[int]:
    """Numbers of all blocks with experts, including that of multi-token prediction."""
    return [layer for layer in range(model.num_layers + model.mtp_depth) if has_experts(model, layer)]


def moe_layers(model: Model) -> int:
    """How many of the num_layers blocks have experts: after the dense ones, every moe_every-th."""
    return max(0, model.num_layers - model.num_dense_layers) // max(1, model.moe_every)


def window(model: Model, layer: int) -> int:
    """Positions that a token of the block sees, including its own; 0: all. A block after the last is like the last."""
    every, layer = model.full_attention_every, min(layer, model.num_layers - 1)
    return 0 if every and (layer + 1) % every == 0 else model.sliding_window


def rotary_width(model: Model) -> int:
    """How many dims of a head RoPE turns."""
    return model.qk_rope_head_dim or model.rotary_dim or model.head_dim


def splits_router_product(config: Config) -> bool:
    """Whether GPUs compute the router's product by bfloat16 parts: titanmoe.moe.router_product.takes_parts."""
    moe, narrow = config.moe, config.training.mixed_precision_param == "bfloat16"
    return narrow and moe.router_dtype == "float32" and moe.router_product == "auto" and not moe.jitter
