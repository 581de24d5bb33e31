"""GLM-4.7-Flash: GLM-4.5's experts and router under latent attention, whose values are as wide as its queries and keys.

Its multi-token prediction is `mtp_depth = 1`.
"""

from dataclasses import replace

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Model
from titanmoe.models.families import deepseek_v3
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family

_LITE = deepseek_v3.SWITCHES | dict(rope_theta=1e6, norm_eps=1e-5, rope_scaling="none")
_LITE |= dict(num_groups=1, top_groups=1, route_scale=1.8, num_dense_layers=1)

SIZES: dict[str, dict[str, object]] = {
    "debug": _LITE
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=16)
    | dict(kv_lora_rank=32, q_lora_rank=48, head_dim=16, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=16)
    | dict(dense_hidden=256, num_experts=16, top_k=4, expert_hidden=64, shared_hidden=64),
    "30b_a3b": _LITE
    | dict(vocab_size=154880, dim=2048, num_layers=47, num_heads=20, num_kv_heads=20)
    | dict(kv_lora_rank=512, q_lora_rank=768, head_dim=256, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
    | dict(dense_hidden=10240, num_experts=64, top_k=4, expert_hidden=1536, shared_hidden=1536),
}


DENSE, SPARSE = "dense", "sparse"


def _read_kinds(config: hf.Json) -> dict[str, object]:
    layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or [DENSE] + [SPARSE] * (layers - 1)
    if len(kinds) != layers or set(kinds) - {DENSE, SPARSE}:
        raise hf.Unrepresentable(f"has the mlp_layer_types {kinds[:100]}, not {DENSE} or {SPARSE} for {layers} layers")
    blocks = hf.dense_blocks([kind == SPARSE for kind in kinds], "mlp_layer_types")
    first = config.get("first_k_dense_replace", blocks["num_dense_layers"])
    if first != blocks["num_dense_layers"]:  # transformers goes by the other alone
        raise hf.Unrepresentable(
            f"has first_k_dense_replace = {first}, and its mlp_layer_types begin with {blocks['num_dense_layers']} "
            f"that are {DENSE} (left out: 1)"
        )
    return blocks


def _write_kinds(model: Model) -> dict[str, object]:
    kinds = [SPARSE if has_experts(model, i) else DENSE for i in range(model.num_layers)]
    return {"mlp_layer_types": kinds, "first_k_dense_replace": model.num_dense_layers}


HF = replace(
    deepseek_v3.HF,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    family="glm4_moe_lite",
    fields={name: keys for name, keys in deepseek_v3.HF.fields.items() if name != "num_dense_layers"},
    conversions=(
        hf.rope(1e4),
        deepseek_v3.WIDTHS,
        hf.Conversion(("mlp_layer_types", "first_k_dense_replace"), _read_kinds, _write_kinds),
        hf.SHARED,
    ),
    defaults=hf.DEFAULTS
    | {"rms_norm_eps": 1e-5, "num_key_value_heads": 20, "norm_topk_prob": True}
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
)

FAMILY = Family(SIZES, HF)
