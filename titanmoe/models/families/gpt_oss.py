"""gpt-oss: attention sinks, windows in every other block, biases everywhere, a clamped SwiGLU.

The sizes are the published checkpoints' (arXiv 2508.10925), which YaRN stretches from 4096 to 131072 positions. The
softmax is over the chosen experts only, so their weights already sum to one.
"""

from titanmoe.config.blocks import window
from titanmoe.config.schema import Model
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families import mixtral
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=True,
    out_bias=True,
    qk_norm="none",
    attention_sinks=True,
    sliding_window=128,
    full_attention_every=2,
    rope_theta=1.5e5,
    rope_scaling="yarn",
    rope_factor=32.0,
    rope_original_len=4096,
    rope_beta_fast=32.0,
    rope_beta_slow=1.0,
    rope_truncate=False,
    norm_eps=1e-5,
    tie_embeddings=False,
    shared_hidden=0,
    shared_gate=False,
    score_function="softmax_after_topk",
    norm_topk=False,
    router_bias=True,
    expert_linear_bias=True,
    expert_activation="clamped_swiglu",
)

_PUBLISHED = SWITCHES | dict(
    vocab_size=201088, dim=2880, num_heads=64, num_kv_heads=8, head_dim=64, top_k=4, expert_hidden=2880
)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8)
    | dict(num_experts=16, top_k=4, expert_hidden=64),
    "20b": _PUBLISHED | dict(num_layers=24, num_experts=32),
    "120b": _PUBLISHED | dict(num_layers=36, num_experts=128),
}


_YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)

WINDOW, FULL = "sliding_attention", "full_attention"


def _kinds(every: int, layers: int) -> list[str]:
    narrow = Model(num_layers=layers, sliding_window=1, full_attention_every=every)
    return [WINDOW if window(narrow, i) else FULL for i in range(layers)]


def _read_kinds(config: hf.Json) -> dict[str, object]:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or _kinds(2, layers)
    if kinds == [FULL] * layers:
        return {"sliding_window": 0, "full_attention_every": 1}
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    if kinds == _kinds(every, layers):
        return {"full_attention_every": every}
    raise hf.Unrepresentable(
        f"has the layer_types {kinds[:100]}: with model.full_attention_every = n the n-th, 2n-th, ... are {FULL}, the "
        f"others {WINDOW}"
    )


def _write_kinds(model: Model) -> dict[str, object]:
    return {"layer_types": _kinds(model.full_attention_every if model.sliding_window else 1, model.num_layers)}


HF = hf.HuggingFace(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    family="gpt_oss",
    switches=SWITCHES,
    # Experts in one tensor, input dim first; its columns alternate between gate and up.
    hf_tensors=hf.ENDS
    | hf.layer(
        hf.NORMS
        | hf.ATTENTION
        | {
            "attention.sinks": "self_attn.sinks",
            "moe.router.weight": "mlp.router.weight",
            "moe.router.bias": "mlp.router.bias",
            "moe.experts.w1": hf.HFTensor("mlp.experts.gate_up_proj", transposed=True, stride=2, phase=0),
            "moe.experts.w3": hf.HFTensor("mlp.experts.gate_up_proj", transposed=True, stride=2, phase=1),
            "moe.experts.w2": hf.HFTensor("mlp.experts.down_proj", transposed=True),
            "moe.experts.w1_bias": hf.HFTensor("mlp.experts.gate_up_proj_bias", stride=2, phase=0),
            "moe.experts.w3_bias": hf.HFTensor("mlp.experts.gate_up_proj_bias", stride=2, phase=1),
            "moe.experts.w2_bias": "mlp.experts.down_proj_bias",
        }
    ),
    fields=mixtral.HF.fields | {"sliding_window": ("sliding_window",)},
    conversions=(hf.rope(1.5e5, _YARN), hf.Conversion(("layer_types",), _read_kinds, _write_kinds)),
    defaults=hf.DEFAULTS
    | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    | {"router_aux_loss_coef": 0.001},
    fixed=hf.FIXED | {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
)

FAMILY = Family(SIZES, HF)
