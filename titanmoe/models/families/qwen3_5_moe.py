"""Qwen3.5 with experts, and Qwen3.6: Qwen3-Next's blocks. Only the text model is trained.

Published models also take images and video, by weights that are left out here; tokens that stand for these are refused
(model.media_tokens). Positions of text are the same in all parts of their RoPE, so it is the usual one. Exports are of
transformers' class for text.
"""

from dataclasses import replace

from titanmoe.config.schema import Model
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families import qwen3_next
from titanmoe.models.families.family import Family
from titanmoe.models.families.qwen3_next import SWITCHES, linear, weights
from titanmoe.models.mixers.gated_delta import FIELDS, GATED_DELTA

_PUBLISHED = SWITCHES | dict(vocab_size=248320, num_kv_heads=2, head_dim=256, rotary_dim=64)
_PUBLISHED |= dict(num_experts=256, top_k=8, media_tokens=[248056, 248057])

SIZES: dict[str, dict[str, object]] = {
    "debug": qwen3_next.DEBUG,
    "35b_a3b": _PUBLISHED
    | dict(dim=2048, num_layers=40, num_heads=16, expert_hidden=512, shared_hidden=512)
    | linear(16, 32, 128),
    "122b_a10b": _PUBLISHED
    | dict(dim=3072, num_layers=48, num_heads=32, expert_hidden=1024, shared_hidden=1024)
    | linear(16, 64, 128),
}

_MEDIA = "image_token_id", "video_token_id"
_OUTER = (*_MEDIA, "vision_start_token_id", "vision_end_token_id")


def _read_media(config: hf.Json) -> dict[str, object]:
    media = {key: config[key] for key in _MEDIA if config.get(key) is not None}
    if wrong := {key: token for key, token in media.items() if type(token) is not int}:
        raise hf.Unrepresentable(f"has {wrong}, which are not ids of tokens")
    return {"media_tokens": [*media.values()]}


def _write_media(model: Model) -> dict[str, object]:
    return dict(zip(_MEDIA, model.media_tokens, strict=False))


HF = replace(
    qwen3_next.HF,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    family="qwen3_5_moe",
    mixer_hf_tensors={
        GATED_DELTA.name: hf.layer(
            qwen3_next.DELTA
            | hf.fused("linear_attn.in_proj_qkv.weight", weights("wq", "wk", "wv"), qwen3_next.qkv_rows)
            | {f"attention.w{gate}.weight": f"linear_attn.in_proj_{gate}.weight" for gate in "zba"}
        )
    },
    fields=qwen3_next.FIELDS_OF_FILES,
    conversions=(
        hf.rope(1e4, rotary_fraction=0.25),
        qwen3_next.KINDS,
        hf.SHARED,
        hf.Conversion(_OUTER, _read_media, _write_media),
    ),
    defaults=qwen3_next.DEFAULTS,
    fixed=hf.FIXED
    | {"attention_bias": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    | {"mlp_only_layers": [], "mtp_use_dedicated_embeddings": False},
    mtp_key="mtp_num_hidden_layers",
    outer_type="qwen3_5_moe",
    outer_keys=_OUTER,
    outer_names={"model.language_model.": "model."},
    left_out={"model.visual.": "they read images and video, and only text is trained"},
)

FAMILY = Family(SIZES, HF, qwen3_next.mixer, FIELDS)
