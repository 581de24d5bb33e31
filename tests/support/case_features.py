"""Features of a parity case besides its mapping; each name stands for a few recipe keys."""

from __future__ import annotations

from typing import Any

from tests.support.covering_mappings import as_changes
from titanmoe.fold.degrees import Fold

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {
        "model.num_kv_heads": 2,
        "model.qkv_bias": True,
        "model.norm_topk": False,
        "model.shared_hidden": 16,
        "model.shared_gate": True,
        "model.num_dense_layers": 1,
        "model.dense_hidden": 16,
    },
    "qwen3_moe": {"model.qk_norm": "head", "model.num_heads": 16, "model.top_k": 3, "model.score_function": "softmax"},
    "olmoe": {"model.qk_norm": "full", "model.num_heads": 16, "model.norm_topk": False},
    "gpt_oss": {
        "model.num_heads": 16,
        "model.qkv_bias": True,
        "model.out_bias": True,
        "model.attention_sinks": True,
        "model.sliding_window": 3,
        "model.full_attention_every": 2,
        "model.score_function": "softmax_after_topk",
        "model.top_k": 3,
        "model.router_bias": True,
        "model.expert_linear_bias": True,
        "model.expert_activation": "clamped_swiglu",
    },
    "top_1": {"model.top_k": 1, "model.norm_topk": False},
    "sigmoid_groups": {
        "model.score_function": "sigmoid",
        "model.num_groups": 4,
        "model.top_groups": 2,
        "model.route_scale": 2.5,
        "model.tie_embeddings": True,
    },
    "deepseek_v3": {
        "model.kv_lora_rank": 12,
        "model.q_lora_rank": 8,
        "model.qk_nope_head_dim": 2,
        "model.qk_rope_head_dim": 4,
        "model.head_dim": 6,
        "model.v_head_dim": 4,
        "model.rope_scaling": "yarn",
        "model.rope_theta": 100.0,
        "model.rope_factor": 4.0,
        "model.rope_original_len": 64,
        "model.rope_mscale": 1.0,
        "model.rope_mscale_all_dim": 0.7,
        "model.score_function": "sigmoid",
        "model.num_groups": 4,
        "model.top_groups": 2,
        "model.route_scale": 2.5,
        "model.shared_hidden": 16,
        "model.num_dense_layers": 1,
        "model.dense_hidden": 16,
    },
    "glm4_moe": {
        "model.num_heads": 16,
        "model.rotary_dim": 2,
        "model.qkv_bias": True,
        "model.qk_norm": "head",
        "model.score_function": "sigmoid",
        "model.top_k": 3,
        "model.route_scale": 2.5,
        "model.shared_hidden": 16,
        "model.num_dense_layers": 1,
        "model.dense_hidden": 16,
    },
    "qwen3_next": {
        "model.family": "qwen3_next",
        "model.full_attention_every": 2,
        "model.num_heads": 16,
        "model.top_k": 3,
        "model.shared_hidden": 16,
        "model.own": {"linear_key_dim": 4, "linear_value_dim": 6},
    },
    "minimax_m2": {
        "model.num_heads": 16,
        "model.rotary_dim": 2,
        "model.qk_norm": "full",
        "model.score_function": "sigmoid",
        "model.top_k": 3,
    },
    "gla": {
        "model.family": "qwen3_next",
        "model.full_attention_every": 2,
        "model.top_k": 3,
        "model.own": {"linear_value_heads": 16, "linear_value_dim": 4, "linear_gate": "gla"},
    },
    "after_topk": {"model.score_function": "softmax_after_topk", "model.moe_every": 2, "model.dense_hidden": 16},
}
DROPPING: dict[str, dict[str, Any]] = {"dropless": {}}
for policy in ("probability", "position"):
    for scope in ("sub_sequence", "full_sequence"):
        for pad in (False, True):
            DROPPING[f"{policy}-{scope}{'-padded' if pad else ''}"] = {
                "moe.capacity_factor": 1.0,
                "moe.drop_policy": policy,
                "moe.capacity_scope": scope,
                "moe.pad_to_capacity": pad,
            }
BALANCE: dict[str, dict[str, Any]] = {
    "none": {},
    "microbatch": {"moe.aux_loss": 0.02},
    "sequence+z": {"moe.aux_loss_sequence": 0.02, "moe.z_loss": 0.01},
    "global+bias": {"moe.aux_loss_global": 0.02, "moe.bias_update_rate": 0.05},
    "jitter": {"moe.jitter": 0.1, "moe.aux_loss": 0.01},
    "forced": {"moe.force_balance": True},
}
RECOMPUTE = {mode: {"activation_checkpoint.mode": mode} for mode in ("none", "full", "selective", "moe")}
DISPATCHERS: dict[str, dict[str, Any]] = {
    name: {"moe.dispatcher": name} for name in ("alltoall", "allgather", "hierarchical")
}
DISPATCHERS["symm_mem"] = {"moe.dispatcher": "symm_mem", "moe.symm_mem_factor": 1.5}
SCHEDULES = {
    name: {"pipeline.schedule": name}
    for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}
CP_KINDS = {
    f"{kind}-{placement}": {"parallelism.cp_kind": kind, "parallelism.cp_placement": placement}
    for kind in ("ring", "ulysses", "allgather")
    for placement in ("zigzag", "contiguous")
}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": {"lora.rank": 6, "lora.experts_rank": 3, "lora.alpha": 7.0},
    "subset": {"training.freeze": ["embed.*", "*.attention.*", "*.router.*", "*.experts.w1"]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "dispatch_saved": {"activation_checkpoint.mode": "full_except_dispatch"},
    "accumulated": {"moe.accumulate_weight_gradients": True},
    "compiled": {"compile.enable": True, "compile.backend": "aot_eager"},
}
"""Features that are not combined with the others: the sweep has mappings for each."""
BATCHES = {"1": {}, "2": {"training.local_batch_size": 2, "training.global_batch_size": 16}}
FEATURES = {
    "model": MODELS,
    "dropping": DROPPING,
    "balance": BALANCE,
    "recompute": RECOMPUTE,
    "dispatcher": DISPATCHERS,
    "schedule": SCHEDULES,
    "cp": CP_KINDS,
    "batch": BATCHES,
    "documents": {"no": {}, "yes": {}},
    "loss": {"full": {}, "sliced": {"training.loss_chunks": 5}},
    "mtp": {
        "no": {},
        "mtp": {"model.mtp_depth": 1},
        "after_norm": {"model.mtp_depth": 1, "model.mtp_after_norm": True},
    },
    "trained": TRAINED,
    "option": OPTIONS,
}


def changes(fold: Fold, choice: dict[str, str]) -> dict[str, Any]:
    """Return the recipe keys of a mapping and a choice of features, with at least two microbatches.

    A pipeline has at least as many layers and microbatches as stages: pp with GPipe and 1F1B, else 2 * pp. symm_mem
    never has moe.pad_to_capacity.

    `choice` has the name of an entry by feature, such as {"model": "gla"}; FEATURES lists both.
    """
    out = as_changes(fold)
    for feature, name in choice.items():
        out |= FEATURES[feature][name]
    if out.get("moe.dispatcher") == "symm_mem":
        out["moe.pad_to_capacity"] = False  # this combination is useless, and refused
    if out.get("moe.dispatcher") == "hierarchical":
        out["parallelism.node"] = fold.etp * max(1, fold.ep // 2)
    microbatches = 2
    if fold.pp > 1:
        one_stage = choice.get("schedule", "1F1B") in ("GPipe", "1F1B")
        out["model.num_layers"] = max(2, fold.pp if one_stage else 2 * fold.pp)
        microbatches = max(2, fold.pp if one_stage else 2 * fold.pp)
    out["training.global_batch_size"] = out.get("training.local_batch_size", 1) * fold.dp * microbatches
    return out


def steps(choice: dict[str, str]) -> int:
    """Return how many steps show a fault: 2 if state other than weights and moments carries over, else 1."""
    return 2 if choice.get("balance") == "global+bias" else 1
