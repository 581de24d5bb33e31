"""Facts that follow from a recipe: a block's kind and attention window, and whether batches have documents.

Used by the model, the planner and the laws. Imports no torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from titanmoe.config.schema import Config, Model


def has_experts(model: Model, layer: int) -> bool:
    """Return whether a transformer block has experts rather than a dense feed-forward network.

    Args:
        layer: the index of the block; num_layers is the block of multi-token prediction, which is like the last one.
    """
    layer = min(layer, model.num_layers - 1)
    return layer >= model.num_dense_layers and (layer - model.num_dense_layers + 1) % model.moe_every == 0


def moe_blocks(model: Model) -> list[int]:
    """Return the indices of all blocks with experts, including the block of multi-token prediction."""
    return [layer for layer in range(model.num_layers + model.mtp_depth) if has_experts(model, layer)]


def has_expert_adapters(config: Config) -> bool:
    """Return whether the recipe trains adapters of routed experts."""
    model, patterns = config.model, config.lora.targets or ["*"]
    blocks = (f"layers.{i}" if i < model.num_layers else "mtp.0.block" for i in moe_blocks(model))
    matrices = [f"{block}.moe.experts.{matrix}" for block in blocks for matrix in ("w1", "w2", "w3")]
    return config.lora.rank > 0 and any(fnmatchcase(name, pattern) for name in matrices for pattern in patterns)


def moe_layers(model: Model) -> int:
    """Return how many of the num_layers blocks have experts, without the block of multi-token prediction."""
    return max(0, model.num_layers - model.num_dense_layers) // max(1, model.moe_every)


def window(model: Model, layer: int) -> int:
    """Return how many positions a token attends to in a block, including its own; 0 for all before it.

    Args:
        layer: the index of the block; num_layers is the block of multi-token prediction, which is like the last one.
    """
    every, layer = model.full_attention_every, min(layer, model.num_layers - 1)
    return 0 if every and (layer + 1) % every == 0 else model.sliding_window


def rotary_width(model: Model) -> int:
    """Return the number of dims of a head that RoPE rotates: all of them, unless the recipe has fewer."""
    return model.qk_rope_head_dim or model.rotary_dim or model.head_dim


def separates_documents(config: Config) -> bool:
    """Return whether samples of training have documents that do not attend to each other.

    They do by data.packing, but for "stream", and always in reinforcement learning, where completions are documents.
    """
    return config.data.packing != "stream" or bool(config.rl.reward)


def splits_router_product(config: Config) -> bool:
    """Return whether GPUs compute the router's float32 product as products of bfloat16 terms (`moe.router_product`).

    They do only under "auto", and with a float32 router in bfloat16 training, without moe.jitter.
    """
    moe, narrow = config.moe, config.training.mixed_precision_param == "bfloat16"
    return narrow and moe.router_dtype == "float32" and moe.router_product == "auto" and not moe.jitter
