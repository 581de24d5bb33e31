"""Qwen3-Next: three blocks with linear attention (Gated DeltaNet), then one with attention whose output is gated.

RoPE rotates a quarter of each head, norms add one to their weights, and a shared expert is scaled by a sigmoid gate.
The block of multi-token prediction, `mtp_depth = 1`, attends to the full sequence like the last one.
"""

from titanmoe.config.schema import Model
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family, attention
from titanmoe.models.mixers.gated_delta import FIELDS, GATED_DELTA, Heads
from titanmoe.models.mixers.grouped_query import GROUPED_QUERY
from titanmoe.models.mixers.mixer_spec import MixerSpec

SWITCHES = dict(
    full_attention_every=4,
    attention_gate=True,
    qkv_bias=False,
    qk_norm="head",
    rope_theta=1e7,
    norm_eps=1e-6,
    norm_adds_one=True,
    tie_embeddings=False,
    shared_gate=True,
    score_function="softmax",
    norm_topk=True,
)


def linear(keys: int, values: int, width: int) -> dict[str, object]:
    """Return {"own": the options of linear attention in [model.own]} for a size.

    `keys` and `values` are the numbers of key and value heads, `width` is that of each head.
    """
    heads = dict(linear_key_heads=keys, linear_value_heads=values, linear_key_dim=width, linear_value_dim=width)
    return {"own": FIELDS | heads}


DEBUG = (
    SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8, rotary_dim=2)
    | dict(num_experts=16, top_k=4, expert_hidden=64, shared_hidden=64)
    | linear(8, 16, 8)
)
SIZES: dict[str, dict[str, object]] = {
    "debug": DEBUG,
    "80b_a3b": SWITCHES
    | dict(vocab_size=151936, dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, head_dim=256, rotary_dim=64)
    | dict(num_experts=512, top_k=10, expert_hidden=512, shared_hidden=512)
    | linear(16, 32, 128),
}


def mixer(model: Model, layer: int) -> MixerSpec:
    """Return the spec of full attention for every full_attention_every-th layer, else that of linear attention.

    Layers count from 0: with 4, the first full one is layer 3. With 0 all layers have linear attention.
    """
    every = model.full_attention_every
    return attention(model, layer) if every and (layer + 1) % every == 0 else GATED_DELTA


# ---- which blocks are which

FULL, LINEAR = "full_attention", "linear_attention"


def _kinds(every: int, layers: int) -> list[str]:
    model = Model(full_attention_every=every)
    return [FULL if mixer(model, i) is GROUPED_QUERY else LINEAR for i in range(layers)]


def _read_kinds(config: hf.Json) -> dict[str, object]:
    kinds = config.get("layer_types")
    if kinds is None:
        return {"full_attention_every": config.get("full_attention_interval", 4)}
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    if kinds == _kinds(every, config["num_hidden_layers"]):
        return {"full_attention_every": every}
    raise hf.Unrepresentable(
        f"has the layer_types {kinds[:100]}: with model.full_attention_every = n the n-th, 2n-th, ... are {FULL}, the "
        f"others {LINEAR}"
    )


def _write_kinds(model: Model) -> dict[str, object]:
    every, layers = model.full_attention_every, model.num_layers
    if Heads.of(model).gate != "delta":
        raise hf.Unrepresentable('has the gated delta rule alone, and not model.own.linear_gate = "gla"')
    if model.mtp_depth and mixer(model, layers - 1) is GATED_DELTA:
        raise hf.Unrepresentable(
            f"has {FULL} in its block of multi-token prediction, and here that block is like the last of "
            f"model.num_layers = {layers}, linear attention: model.full_attention_every = {every} has to divide it"
        )
    return {"layer_types": _kinds(every, model.num_layers)} | ({"full_attention_interval": every} if every else {})


KINDS = hf.Conversion(("layer_types", "full_attention_interval"), _read_kinds, _write_kinds)


# ---- tensors


def qkv_rows(model: Model) -> tuple[int, ...]:
    """Return the numbers of rows of queries, keys and values of all heads in a DeltaNet weight that fuses the three."""
    heads = Heads.of(model)
    return heads.key_width, heads.key_width, heads.value_width


def _qkvz_rows(model: Model) -> tuple[int, ...]:
    """Return the numbers of rows of queries, keys, values and z of one key head and the value heads that share it."""
    heads = Heads.of(model)
    value = heads.values // heads.keys * heads.value_dim
    return heads.key_dim, heads.key_dim, value, value


def _ba_rows(model: Model) -> tuple[int, ...]:
    heads = Heads.of(model)
    return (heads.values // heads.keys,) * 2


def _query_and_gate_rows(model: Model) -> tuple[int, ...]:
    return model.head_dim, model.head_dim


def _gate_and_up_rows(model: Model) -> tuple[int, ...]:
    return model.expert_hidden, model.expert_hidden


def weights(*names: str) -> list[str]:
    """Return titanmoe's full names of a mixer's weights: "attention.wq.weight" for "wq"."""
    return [f"attention.{name}.weight" for name in names]


FEED_FORWARD = hf.NORMS | hf.DENSE | hf.EXPERTS | hf.GATED_SHARED
ATTENTION = hf.ATTENTION | hf.fused("self_attn.q_proj.weight", weights("wq", "wg"), _query_and_gate_rows)
CONVOLUTION = [f"attention.conv_{part}" for part in "qkv"]
DELTA = hf.fused("linear_attn.conv1d.weight", CONVOLUTION, qkv_rows, has_dim_of_1=True) | {
    "attention.dt_bias": "linear_attn.dt_bias",
    "attention.A_log": "linear_attn.A_log",
    "attention.norm.weight": "linear_attn.norm.weight",
    "attention.wo.weight": "linear_attn.out_proj.weight",
}
STACKED = hf.fused("mlp.experts.gate_up_proj", ("moe.experts.w1", "moe.experts.w3"), _gate_and_up_rows) | {
    "moe.experts.w2": "mlp.experts.down_proj"
}
EXTRA = {
    "mtp.0.hidden_norm.weight": hf.HFTensor("mtp.pre_fc_norm_hidden.weight"),
    "mtp.0.embed_norm.weight": hf.HFTensor("mtp.pre_fc_norm_embedding.weight"),
    "mtp.0.project.weight": hf.HFTensor("mtp.fc.weight"),
    "mtp.0.norm.weight": hf.HFTensor("mtp.norm.weight"),
}


def in_layers_and_mtp(block: hf.Names) -> dict[str, hf.HFTensor]:
    """Return the Hugging Face names and layouts of a block's tensors, in all layers and in multi-token prediction.

    `block` is a dict by our names within the block, the result one by our full names, with {layer} in them.
    """
    return hf.layer(block) | hf.layer(block, "mtp.0.block", "mtp.layers.0")


FIELDS_OF_FILES = (
    hf.SHAPE
    | hf.HEADS
    | {
        "num_experts": ("num_experts",),
        "top_k": ("num_experts_per_tok",),
        "expert_hidden": ("moe_intermediate_size",),
        "shared_hidden": ("shared_expert_intermediate_size",),
        "own.linear_key_heads": ("linear_num_key_heads",),
        "own.linear_value_heads": ("linear_num_value_heads",),
        "own.linear_key_dim": ("linear_key_head_dim",),
        "own.linear_value_dim": ("linear_value_head_dim",),
        "own.conv_width": ("linear_conv_kernel_dim",),
    }
)
DEFAULTS = (
    hf.DEFAULTS
    | {"num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    | {"router_aux_loss_coef": 0.001}
)

HF = hf.HuggingFace(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    family="qwen3_next",
    switches=SWITCHES,
    hf_tensors=hf.ENDS | in_layers_and_mtp(FEED_FORWARD | ATTENTION) | EXTRA,
    mixer_hf_tensors={
        GATED_DELTA.name: hf.layer(
            DELTA
            | hf.fused("linear_attn.in_proj_qkvz.weight", weights("wq", "wk", "wv", "wz"), _qkvz_rows)
            | hf.fused("linear_attn.in_proj_ba.weight", weights("wb", "wa"), _ba_rows)
        )
    },
    alternative_hf_tensors=in_layers_and_mtp(STACKED),
    fields=FIELDS_OF_FILES | {"dense_hidden": ("intermediate_size",), "norm_topk": ("norm_topk_prob",)},
    conversions=(hf.rope(1e4, rotary_fraction=0.25), hf.QWEN_BLOCKS, KINDS, hf.SHARED),
    defaults=DEFAULTS | {"norm_topk_prob": True},
    fixed=hf.FIXED | {"attention_bias": False, "use_sliding_window": False},
    mtp_key="num_nextn_predict_layers",
)

FAMILY = Family(SIZES, HF, mixer, FIELDS)
