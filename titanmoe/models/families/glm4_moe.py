"""GLM-4.5: RoPE on half of each head, biased query, key and value, DeepSeek-V3's router without groups.

355b_a32b is GLM-4.5 (arXiv 2508.06471), and GLM-4.6 and 4.7, which have its sizes: it has norms of queries and keys.
106b_a12b is GLM-4.5-Air, without these. Their multi-token prediction is `mtp_depth = 1`, a block behind the last as
DeepSeek-V3 stores it. The selection bias belongs to training: it moves by `moe.bias_update_rate`.
"""

from titanmoe.config.schema import Model
from titanmoe.models.families import deepseek_v3
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=True,
    rope_theta=1e6,
    norm_eps=1e-5,
    tie_embeddings=False,
    shared_gate=False,
    score_function="sigmoid",
    norm_topk=True,
)
_HEADS = dict(num_heads=96, num_kv_heads=8, head_dim=128, rotary_dim=64)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8, rotary_dim=4)
    | dict(qk_norm="head", num_dense_layers=1, dense_hidden=256)
    | dict(num_experts=16, top_k=4, expert_hidden=64, shared_hidden=64, route_scale=2.5),
    "106b_a12b": SWITCHES
    | dict(vocab_size=151552, dim=4096, num_layers=46, **_HEADS)
    | dict(qk_norm="none", num_dense_layers=1, dense_hidden=10944)
    | dict(num_experts=128, top_k=8, expert_hidden=1408, shared_hidden=1408, route_scale=1.0),
    "355b_a32b": SWITCHES
    | dict(vocab_size=151552, dim=5120, num_layers=92, **_HEADS)
    | dict(qk_norm="head", num_dense_layers=3, dense_hidden=12288)
    | dict(num_experts=160, top_k=8, expert_hidden=1536, shared_hidden=1536, route_scale=2.5),
}


def _read(config: hf.Json) -> dict[str, object]:
    return {
        "qk_norm": "head" if config.get("use_qk_norm", False) else "none",
        "shared_hidden": config.get("n_shared_experts", 1) * config["moe_intermediate_size"],
    }


def _write(model: Model) -> dict[str, object]:
    return {"use_qk_norm": model.qk_norm == "head", "n_shared_experts": deepseek_v3.shared_experts(model)}


HF = hf.HuggingFace(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    family="glm4_moe",
    switches=SWITCHES,
    hf_tensors=deepseek_v3.all_hf_tensors(hf.NORMS | hf.ATTENTION | deepseek_v3.FEED_FORWARD),
    fields=hf.SHAPE | hf.HEADS | {"qkv_bias": ("attention_bias",)} | deepseek_v3.ROUTING,
    conversions=(
        hf.rope(1e4, rotary_fraction=0.5),
        hf.Conversion(("use_qk_norm", "n_shared_experts"), _read, _write),
        hf.SHARED,
    ),
    defaults=hf.DEFAULTS
    | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "attention_bias": False, "norm_topk_prob": True}
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    fixed=hf.FIXED,
    copies=deepseek_v3.COPIES,
    mtp_key=deepseek_v3.MTP_KEY,
)

FAMILY = Family(SIZES, HF)
