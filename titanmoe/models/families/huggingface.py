"""How a family is stored on Hugging Face: the names of its tensors and the fields of its config.json. No torch here.

titanmoe.checkpoint.hf reads and writes by it. Names of tensors contain {layer}, {expert} and, for the block of
multi-token prediction, {last}, the number of layers. Our names are those of titanmoe.models.transformer, "theirs" those
of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Model

Json = Mapping[str, Any]


class Unrepresentable(ValueError):
    """An error: a config.json asks for something that [model] cannot express, or vice versa."""


class FusedRows(NamedTuple):
    """The place of one of our tensors in a fused tensor of Hugging Face's, such as queries among queries and gates.

    The rows of the fused tensor come in groups, such as heads. A group has some rows of each of our tensors.
    """

    rows: Callable[[Model], tuple[int, ...]]
    """Function that returns how many rows of a group belong to each of our tensors, in order."""
    number: int
    """Index of our tensor in that tuple."""


@dataclass(frozen=True)
class HFTensor:
    """The name and layout of one of our tensors in Hugging Face's files. With {expert} it is one tensor per expert."""

    name: str
    transposed: bool = False
    """Whether the last two dims are swapped in their file."""
    stride: int = 1
    """Step in their last dim, if it alternates between several of our tensors, such as gate and up."""
    phase: int = 0
    """First index of ours in their last dim."""
    rotated: Callable[[Model], tuple[int, int]] | None = None
    """Function that returns the rows of one head, and how many of them, the last ones, RoPE rotates.

    Set if pair i is rows 2i and 2i + 1 in their file; it is rows i and half + i in ours.
    """
    fused: FusedRows | None = None
    """The rows of ours in a fused tensor; None if it is not fused."""
    has_dim_of_1: bool = False
    """Whether it has a dim of 1 before its last in their file."""


@dataclass(frozen=True)
class Conversion:
    """A conversion between keys of config.json and fields of [model] that are not one to one."""

    keys: tuple[str, ...]
    read: Callable[[Json], dict[str, object]]
    """Function that returns fields of [model] from a config.json; raises Unrepresentable."""
    write: Callable[[Model], dict[str, object]]
    """Function that returns keys of config.json from [model]; raises Unrepresentable."""


@dataclass(frozen=True)
class HuggingFace:
    """The format in which transformers stores a family."""

    model_type: str
    """model_type of its config.json."""
    architecture: str
    """Name of its class in transformers."""
    family: str
    """Our family."""
    switches: Mapping[str, object]
    """Fields of [model] that all models of this type share. Keys of config.json, also absent ones, override them."""
    hf_tensors: Mapping[str, HFTensor]
    """Name and layout of each tensor in their files, by our name."""
    fields: Mapping[str, tuple[str, ...]]
    """Key of config.json of each field of [model]; further keys are other spellings, which are read too."""
    conversions: tuple[Conversion, ...] = ()
    """Conversions of the fields that are not one key each."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Default of transformers' config class, by key. Other keys of `fields` are required."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys of which we can represent one value only, which is also their default."""
    mixer_hf_tensors: Mapping[str, Mapping[str, HFTensor]] = field(default_factory=dict)
    """Names and layouts that replace `hf_tensors` in blocks with a mixer, by the mixer's name."""
    alternative_hf_tensors: Mapping[str, HFTensor] = field(default_factory=dict)
    """Names and layouts that replace both in files that have a tensor of that name. Read only."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Original of each tensor that is a copy of another, with multi-token prediction."""
    mtp_key: str = ""
    """Key of the number of blocks of multi-token prediction."""
    outer_type: str = ""
    """model_type of a config.json that has these keys within `text_config`, for models that also take images."""
    outer_keys: tuple[str, ...] = ()
    """Keys beside `text_config` that the text model reads too."""
    outer_names: Mapping[str, str] = field(default_factory=dict)
    """Prefix of the tensors of a text model, by their prefix in files of a model that also takes images."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reason why tensors are not read, by the prefix of their names."""
    derived: tuple[str, ...] = ()
    """Suffixes of tensors that old files contain although config.json determines them."""
    dense: bool = False
    """Whether it has no experts, and is only for upcycling."""


Names = Mapping[str, str | HFTensor]
"""Names and layouts of tensors in their files, by our names; a str if the layout is ours."""


def layer(
    hf_tensors: Names, our_prefix: str = "layers.{layer}", hf_prefix: str = "model.layers.{layer}"
) -> dict[str, HFTensor]:
    """Return the Hugging Face names and layouts of the tensors of all layers, by our names, from those within a block.

    Args:
        hf_tensors: names and layouts within a block, by our names within the block.
        our_prefix: prefix of our names, with {layer} in place of the block's number.
        hf_prefix: prefix of Hugging Face's names, likewise.
    """
    full = {
        name: HFTensor(hf_tensor) if isinstance(hf_tensor, str) else hf_tensor for name, hf_tensor in hf_tensors.items()
    }
    return {
        f"{our_prefix}.{name}": replace(hf_tensor, name=f"{hf_prefix}.{hf_tensor.name}")
        for name, hf_tensor in full.items()
    }


def fused(
    hf_name: str, our_names: Sequence[str], rows: Callable[[Model], tuple[int, ...]], **layout: bool
) -> dict[str, HFTensor]:
    """Return the layout, by our names, of tensors of ours that Hugging Face stores fused into one tensor.

    Args:
        hf_name: name of the fused tensor.
        our_names: our names, in the order in which a group of the fused tensor's rows has them.
        rows: returns how many rows of a group (such as a head) belong to each of our tensors.
        layout: other fields of HFTensor.
    """
    return {name: HFTensor(hf_name, fused=FusedRows(rows, number), **layout) for number, name in enumerate(our_names)}


def swiglu(
    our_name: str, hf_name: str, hf_weights: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Return Hugging Face's names of the weights of a SwiGLU network, by our names.

    Args:
        our_name: our name of a weight, with {w} in place of w1, w3 or w2.
        hf_name: Hugging Face's name of a weight, with {w} in place of one of `hf_weights`.
        hf_weights: what Hugging Face calls gate, up and down.
    """
    weights = zip(("w1", "w3", "w2"), hf_weights, strict=True)
    return {our_name.format(w=w): hf_name.replace("{w}", hf_weight) for w, hf_weight in weights}


ENDS = {
    "embed.weight": HFTensor("model.embed_tokens.weight"),
    "head.norm.weight": HFTensor("model.norm.weight"),
    "head.weight": HFTensor("lm_head.weight"),
}
NORMS = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
ATTENTION = {
    f"attention.{ours}.{kind}": f"self_attn.{theirs}.{kind}"
    for ours, theirs in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj"))
    for kind in ("weight", "bias")
} | {f"attention.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
DENSE = swiglu("ffn.{w}.weight", "mlp.{w}.weight")
EXPERTS = {"moe.router.weight": "mlp.gate.weight"} | swiglu("moe.experts.{w}", "mlp.experts.{expert}.{w}.weight")
GATED_SHARED = swiglu("moe.shared.{w}.weight", "mlp.shared_expert.{w}.weight") | {
    "moe.shared.gate.weight": "mlp.shared_expert_gate.weight"
}

SHAPE = {
    "vocab_size": ("vocab_size",),
    "dim": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "norm_eps": ("rms_norm_eps",),
    "tie_embeddings": ("tie_word_embeddings",),
    "init_std": ("initializer_range",),
    "num_heads": ("num_attention_heads",),
}
HEADS = {"num_kv_heads": ("num_key_value_heads",), "head_dim": ("head_dim",)}
DEFAULTS = {"tie_word_embeddings": False, "initializer_range": 0.02, "rms_norm_eps": 1e-6}
FIXED = {"hidden_act": "silu"}


# ---- rotary positions


_ROPE = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
}


def _read_rope(config: Json, theta: float, default: Json, rotary_fraction: float) -> dict[str, object]:
    # Before transformers 5: rope_theta, and rope_scaling or null; since then everything is in rope_parameters.
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope = dict(default if rope is None else rope)
    base = rope.get("rope_theta", config.get("rope_theta", theta))
    kind = rope.get("rope_type", rope.get("type", "default"))
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", rotary_fraction or None))
    if any(isinstance(value, dict) for value in rope.values()):
        raise Unrepresentable(f"has another RoPE for each of {', '.join(rope)}, here all blocks have one")
    if not isinstance(base, int | float):
        raise Unrepresentable(f"has rope_theta = {base!r}, which is not a number")
    rotary_dim = _rotary_dim(config, rotated, rotary_fraction > 0)
    if kind not in ("default", "yarn"):
        fix = "choose a model with one of these"
        if kind == "dynamic":
            fix = (
                "up to max_position_embeddings it changes nothing, so for such a seq_len name a copy of the folder "
                'whose config.json has rope_type = "default" there'
            )
        raise Unrepresentable(f"has rope_scaling of type {kind!r}, model.rope_scaling is none or yarn: {fix}")
    if kind == "default":
        unused = {name: getattr(Model(), name) for name in (*_ROPE, "rope_original_len", "rope_truncate")}
        return {"rope_theta": float(base), "rope_scaling": "none", **rotary_dim, **unused}
    if rope.get("attention_factor") is not None:
        raise Unrepresentable(
            f"has rope_scaling with attention_factor = {rope['attention_factor']}, here it follows from factor, "
            "mscale and mscale_all_dim"
        )
    context = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", context))
    if "factor" not in rope:
        raise Unrepresentable("has rope_scaling of type 'yarn' without factor")
    if original is None or (rope["factor"] is None and context is None):
        raise Unrepresentable("has neither original_max_position_embeddings for YaRN nor max_position_embeddings")
    factor = context / original if rope["factor"] is None else rope["factor"]
    values = {"beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get("beta_slow") or 1, "factor": factor}
    values |= {key: rope.get(key) or 0 for key in ("mscale", "mscale_all_dim")}
    return {
        "rope_theta": float(base),
        "rope_scaling": "yarn",
        "rope_original_len": original,
        "rope_truncate": bool(rope.get("truncate", True)),
        **rotary_dim,
        **{ours: float(values[theirs]) for ours, theirs in _ROPE.items()},
    }


def _rotary_dim(config: Json, fraction: Any, partial_rotary: bool) -> dict[str, object]:
    """Return {"rotary_dim": number of dims of a head that RoPE rotates}, or {} if it rotates full heads.

    Args:
        fraction: partial_rotary_factor of the config.json; None for full heads.
        partial_rotary: whether the family can rotate a part of a head.

    Raises:
        Unrepresentable: if the family cannot, or the part is not an even number of dims below the head's.
    """
    if fraction in (None, 1):
        return {}
    if not partial_rotary:
        raise Unrepresentable(f"has partial_rotary_factor = {fraction}, here RoPE rotates full heads (1.0)")
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = int(head * fraction)
    if not 0 < width < head or width % 2:
        raise Unrepresentable(
            f"has no pairs of dims to rotate: partial_rotary_factor = {fraction} of heads {head} wide"
        )
    return {"rotary_dim": width}


def _write_rope(model: Model, default: Json, rotary_fraction: float) -> dict[str, object]:
    factor = {"partial_rotary_factor": (model.rotary_dim or model.head_dim) / model.head_dim} if rotary_fraction else {}
    keys = factor | {"rope_theta": model.rope_theta}
    if model.rope_scaling == "none":
        return keys | {"rope_scaling": {"rope_type": "default"} if default else None}
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "original_max_position_embeddings": model.rope_original_len,
        "truncate": model.rope_truncate,
        **{theirs: getattr(model, ours) for ours, theirs in _ROPE.items() if getattr(model, ours)},
    }
    return keys | {"rope_scaling": scaling}


def rope(theta: float, default: Json | None = None, rotary_fraction: float = 0.0) -> Conversion:
    """Return the conversion between the keys of config.json about RoPE and fields of [model].

    Args:
        theta: rope_theta if config.json has none.
        default: rope_parameters if config.json has none.
        rotary_fraction: partial_rotary_factor if config.json has none; 0 for families in which RoPE rotates full heads.
    """
    return Conversion(
        ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
        partial(_read_rope, theta=theta, default=default or {}, rotary_fraction=rotary_fraction),
        partial(_write_rope, default=default or {}, rotary_fraction=rotary_fraction),
    )


# ---- which blocks are dense


def dense_blocks(sparse: list[bool], keys: str = "mlp_only_layers or decoder_sparse_step") -> dict[str, object]:
    """Return the fields num_dense_layers and moe_every of [model] that give experts to these blocks.

    Args:
        sparse: whether each block has experts.
        keys: the keys of config.json that say which blocks have experts, for the error's message.

    Raises:
        Unrepresentable: if no values of the two fields do.
    """
    layers = len(sparse)
    first, second = [*(i for i, has in enumerate(sparse) if has), layers, layers][:2]
    every = max(1, second - first)  # if there is only one, fewer follow
    dense = first - every + 1
    if first == layers:
        dense = layers
    model = Model(num_layers=layers, num_dense_layers=dense, moe_every=every)
    if dense >= 0 and [has_experts(model, i) for i in range(layers)] == sparse:
        return {"num_dense_layers": dense, "moe_every": every}
    raise Unrepresentable(
        f"has {keys}, with which it has experts in the blocks "
        f"{[i for i, has in enumerate(sparse) if has][:100]} of {len(sparse)}: model.num_dense_layers and moe_every "
        "make leading blocks dense, and give every n-th block after them experts"
    )


def _read_qwen(config: Json) -> dict[str, object]:
    dense_only, step = set(config.get("mlp_only_layers") or []), config.get("decoder_sparse_step", 1)
    return dense_blocks([i not in dense_only and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])])


def _write_qwen(model: Model) -> dict[str, object]:
    dense = [i for i in range(model.num_layers) if not has_experts(model, i)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN_BLOCKS = Conversion(("mlp_only_layers", "decoder_sparse_step"), _read_qwen, _write_qwen)


def _read_windows(config: Json) -> dict[str, object]:
    kinds = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or kinds != {"full_attention"}:
        raise Unrepresentable(
            f"has use_sliding_window = {config.get('use_sliding_window')} and layer_types {sorted(kinds)}, "
            "this family attends to the full sequence in every block"
        )
    return {}


NO_WINDOWS = Conversion(
    ("use_sliding_window", "layer_types", "sliding_window", "max_window_layers"),
    _read_windows,
    lambda model: {"use_sliding_window": False},
)


# ---- the rest


def _write_shared(model: Model) -> dict[str, object]:
    if not model.shared_hidden:
        raise Unrepresentable("has a shared expert in every block, model.shared_hidden = 0 has none")
    return {}


SHARED = Conversion((), lambda config: {}, _write_shared)

_CHOSEN_KEYS = "attention to those keys alone that an indexer chooses"
LATER = {
    "deepseek_v32": _CHOSEN_KEYS,
    "deepseek_v4": "attention to compressed keys, several residual streams and experts chosen by hash",
    "glm_moe_dsa": _CHOSEN_KEYS,
    "minimax_m3_vl": _CHOSEN_KEYS,
    "minimax_m3_vl_text": _CHOSEN_KEYS,
    "nemotron_h": "Mamba-2 layers and experts without a gate",
}
"""Features that titanmoe lacks, by the model_type of models that it refuses by name."""
