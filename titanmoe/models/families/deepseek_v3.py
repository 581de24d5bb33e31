"""DeepSeek-V3: latent attention, dense first blocks, sigmoid router scores, group-limited top-k, a shared expert.

671b is arXiv 2412.19437; its multi-token prediction is `mtp_depth = 1`. Its context is stretched by YaRN from
4,096 tokens; it was pretrained up to that length with `rope_scaling = "none"` (then `rope_factor` is 1). 16b is
Moonlight-16B-A3B (arXiv 2502.16982): the same architecture without query latents, groups and YaRN, and with its own
rope_theta and norm_eps. Several shared experts of one width equal one of their summed width. The selection bias, which
both have, belongs to training: it moves by `moe.bias_update_rate`.
"""

from titanmoe.config.schema import Model
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=False, qk_norm="none", tie_embeddings=False, shared_gate=False, score_function="sigmoid", norm_topk=True
)

_YARN = dict(rope_scaling="yarn", rope_factor=40.0, rope_original_len=4096, rope_beta_fast=32.0, rope_beta_slow=1.0)
_671B = SWITCHES | _YARN | dict(rope_theta=1e4, norm_eps=1e-6, rope_mscale=1.0, rope_mscale_all_dim=1.0)
_HEADS = dict(head_dim=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)

SIZES: dict[str, dict[str, object]] = {
    "debug": _671B
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=16)
    | dict(kv_lora_rank=32, q_lora_rank=48, head_dim=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    | dict(num_dense_layers=1, dense_hidden=256)
    | dict(num_experts=16, top_k=4, expert_hidden=64, shared_hidden=64, num_groups=4, top_groups=2, route_scale=2.5),
    "16b": SWITCHES
    | dict(rope_theta=5e4, norm_eps=1e-5, rope_scaling="none")
    | dict(vocab_size=163840, dim=2048, num_layers=27, num_heads=16, num_kv_heads=16)
    | dict(kv_lora_rank=512, q_lora_rank=0, **_HEADS)
    | dict(num_dense_layers=1, dense_hidden=11264)
    | dict(num_experts=64, top_k=6, expert_hidden=1408, shared_hidden=2 * 1408)
    | dict(num_groups=1, top_groups=1, route_scale=2.446),
    "671b": _671B
    | dict(vocab_size=129280, dim=7168, num_layers=61, num_heads=128, num_kv_heads=128)
    | dict(kv_lora_rank=512, q_lora_rank=1536, **_HEADS)
    | dict(num_dense_layers=3, dense_hidden=18432)
    | dict(num_experts=256, top_k=8, expert_hidden=2048, shared_hidden=2048)
    | dict(num_groups=8, top_groups=4, route_scale=2.5),
}


def _query_head_rows(model: Model) -> tuple[int, int]:
    return model.qk_nope_head_dim + model.qk_rope_head_dim, model.qk_rope_head_dim


def _latent_rows(model: Model) -> tuple[int, int]:
    return model.kv_lora_rank + model.qk_rope_head_dim, model.qk_rope_head_dim


def _read(config: hf.Json) -> dict[str, object]:
    rotated = config["qk_rope_head_dim"]
    if config.get("head_dim", rotated) != rotated:
        raise hf.Unrepresentable(f"has head_dim = {config['head_dim']}, which is qk_rope_head_dim here, {rotated}")
    if missing := [key for key in ("q_lora_rank", "n_shared_experts") if key not in config]:
        raise hf.Unrepresentable(f"has no {' and no '.join(missing)}: null stands for none")
    return {
        "q_lora_rank": config["q_lora_rank"] or 0,
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "shared_hidden": (config["n_shared_experts"] or 0) * config["moe_intermediate_size"],
    }


def shared_experts(model: Model) -> int:
    """Return how many shared experts, each as wide as a routed one, are together model.shared_hidden wide.

    Raises:
        Unrepresentable: if model.shared_hidden is not a multiple of model.expert_hidden.
    """
    shared, rest = divmod(model.shared_hidden, model.expert_hidden)
    if rest:
        raise hf.Unrepresentable(
            f"has shared experts as wide as routed ones, {model.expert_hidden}, and model.shared_hidden = "
            f"{model.shared_hidden} is not a multiple of it"
        )
    return shared


def _write(model: Model) -> dict[str, object]:
    return {
        "q_lora_rank": model.q_lora_rank or None,
        "n_shared_experts": shared_experts(model) or None,
        "qk_head_dim": model.head_dim,
        "head_dim": model.qk_rope_head_dim,
    }


WIDTHS = hf.Conversion(("q_lora_rank", "n_shared_experts", "qk_head_dim", "head_dim"), _read, _write)
FEED_FORWARD = (
    {"moe.router.expert_bias": "mlp.gate.e_score_correction_bias"}
    | hf.DENSE
    | hf.EXPERTS
    | hf.swiglu("moe.shared.{w}.weight", "mlp.shared_experts.{w}.weight")
)
ROUTING = {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_hidden": ("moe_intermediate_size",),
    "dense_hidden": ("intermediate_size",),
    "num_dense_layers": ("first_k_dense_replace",),
    "num_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "norm_topk": ("norm_topk_prob",),
    "route_scale": ("routed_scaling_factor",),
}
MTP_KEY = "num_nextn_predict_layers"
COPIES = {
    "model.layers.{last}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{last}.shared_head.head.weight": "lm_head.weight",
}


def all_hf_tensors(block: hf.Names) -> dict[str, hf.HFTensor]:
    """Return the Hugging Face names and layouts of all tensors of a model, by our names.

    `block` has those of a block's tensors, with names within the block. The block of multi-token prediction is stored
    as a layer after the last.
    """
    mtp = {
        "hidden_norm.weight": "hnorm.weight",
        "embed_norm.weight": "enorm.weight",
        "project.weight": "eh_proj.weight",
        "norm.weight": "shared_head.norm.weight",
    }
    extra = mtp | {f"block.{name}": hf_tensor for name, hf_tensor in block.items()}
    return hf.ENDS | hf.layer(block) | hf.layer(extra, "mtp.0", "model.layers.{last}")


_BLOCK = (
    hf.NORMS
    | {
        "attention.wq.weight": hf.HFTensor("self_attn.q_proj.weight", rotated=_query_head_rows),
        "attention.wq_a.weight": "self_attn.q_a_proj.weight",
        "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
        "attention.wq_b.weight": hf.HFTensor("self_attn.q_b_proj.weight", rotated=_query_head_rows),
        "attention.wkv_a.weight": hf.HFTensor("self_attn.kv_a_proj_with_mqa.weight", rotated=_latent_rows),
        "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
    }
    | FEED_FORWARD
)

HF = hf.HuggingFace(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    family="deepseek_v3",
    switches=SWITCHES,
    hf_tensors=all_hf_tensors(_BLOCK),
    fields=hf.SHAPE
    | {
        "num_kv_heads": ("num_key_value_heads",),
        "kv_lora_rank": ("kv_lora_rank",),
        "qk_nope_head_dim": ("qk_nope_head_dim",),
        "qk_rope_head_dim": ("qk_rope_head_dim",),
        "v_head_dim": ("v_head_dim",),
    }
    | ROUTING,
    conversions=(hf.rope(1e4), WIDTHS),
    defaults=hf.DEFAULTS
    | {"num_key_value_heads": 128, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    fixed=hf.FIXED
    | {
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    copies=COPIES,
    mtp_key=MTP_KEY,
)

FAMILY = Family(SIZES, HF)
