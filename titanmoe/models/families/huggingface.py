"""How a family is stored on Hugging Face: the names of its tensors and the fields of its config.json. No torch here.

Names of tensors contain {layer}, {expert} and, for the block of multi-token prediction, {last}, the number of layers.
Ours are those of titanmoe.models.transformer.
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
    """A config.json asks for something that [model] cannot express, or vice versa."""


class Part(NamedTuple):
    """Rows of a tensor there come in groups, and each group in parts, one below the other."""

    rows: Callable[[Model], tuple[int, ...]]
    """Of each part of a group."""
    number: int
    """Ours, of the parts."""


@dataclass(frozen=True)
class Home:
    """Where one of our tensors is stored. With {expert} in its name, each expert's part is a tensor of its own."""

    name: str
    transposed: bool = False
    """Its last two dims are swapped there."""
    stride: int = 1
    """Ours is every stride-th entry of the last dim there, from `phase` on; other tensors of ours have the rest."""
    phase: int = 0
    rotated: Callable[[Model], tuple[int, int]] | None = None
    """Rows that RoPE turns in pairs: pair i is rows 2i and 2i + 1 there, i and half + i in ours. Gives the rows of one
    head and how many of them, the last ones, are turned."""
    part: Part | None = None
    """Ours has the rows of that part of every group; other tensors of ours have the rest."""
    between: bool = False
    """It has a dim of 1 there before its last."""


@dataclass(frozen=True)
class Special:
    """Keys of config.json that express fields of [model] differently."""

    keys: tuple[str, ...]
    read: Callable[[Json], dict[str, object]]
    """Fields from config.json; raises Unrepresentable."""
    write: Callable[[Model], dict[str, object]]
    """The reverse; raises it too."""


@dataclass(frozen=True)
class HuggingFace:
    model_type: str
    architecture: str
    family: str
    """Of ours."""
    switches: Mapping[str, object]
    """Fields of [model] that are the same in all models of this type. What config.json says, even by omission, wins."""
    homes: Mapping[str, Home]
    """By our name."""
    fields: Mapping[str, tuple[str, ...]]
    """From a field of [model] to its key in config.json; the other keys are other spellings, which are read too."""
    special: tuple[Special, ...] = ()
    absent: Mapping[str, object] = field(default_factory=dict)
    """What leaving a key out means: the default of transformers' config class. Other keys of `fields` are required."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys with only one value that we can represent, which is also what leaving them out means."""
    mixer_homes: Mapping[str, Mapping[str, Home]] = field(default_factory=dict)
    """In blocks whose mixer has that name, in the place of `homes`."""
    other_homes: Mapping[str, Home] = field(default_factory=dict)
    """In the place of both in files that have a tensor of that name. None is written."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """With multi-token prediction: names of tensors that repeat another, by the name of the other."""
    mtp_key: str = ""
    """How many blocks of multi-token prediction there are."""
    outer_type: str = ""
    """model_type of config.json with these keys within `text_config`, beside those of what else than text it takes."""
    outer_keys: tuple[str, ...] = ()
    """Keys beside `text_config` that transformers reads there for the text model, too."""
    outer_names: Mapping[str, str] = field(default_factory=dict)
    """How names of tensors begin in its files, and how the same ones do otherwise."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """How names of tensors begin that are not read, and what these are."""
    derived: tuple[str, ...] = ()
    """Suffixes of tensors that old files contain although they follow from config.json."""
    dense: bool = False
    """No experts: only for upcycling."""


Names = Mapping[str, str | Home]


def layer(homes: Names, ours: str = "layers.{layer}", theirs: str = "model.layers.{layer}") -> dict[str, Home]:
    """Homes in a block, by names within the block."""
    whole = {name: Home(home) if isinstance(home, str) else home for name, home in homes.items()}
    return {f"{ours}.{name}": replace(home, name=f"{theirs}.{home.name}") for name, home in whole.items()}


def parts(theirs: str, ours: Sequence[str], rows: Callable[[Model], tuple[int, ...]], **more: bool) -> dict[str, Home]:
    """Several of ours that are one tensor there, as `Part` says."""
    return {name: Home(theirs, part=Part(rows, number), **more) for number, name in enumerate(ours)}


def swiglu(
    ours: str, theirs: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """gate, up and down; `ours` and `theirs` contain {w}."""
    return {ours.format(w=w): theirs.replace("{w}", name) for w, name in zip(("w1", "w3", "w2"), names, strict=True)}


ENDS = {
    "embed.weight": Home("model.embed_tokens.weight"),
    "head.norm.weight": Home("model.norm.weight"),
    "head.weight": Home("lm_head.weight"),
}
NORMS = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
ATTENTION = {
    f"attention.{ours}.{kind}": f"self_attn.{theirs}.{kind}"
    for ours, theirs in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj"))
    for kind in ("weight", "bias")
} | {f"attention.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
DENSE = swiglu("ffn.{w}.weight", "mlp.{w}.weight")
EXPERTS = {"moe.router.weight": "mlp.gate.weight"} | swiglu("moe.experts.{w}", "mlp.experts.{expert}.{w}.weight")

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
ABSENT = {"tie_word_embeddings": False, "initializer_range": 0.02, "rms_norm_eps": 1e-6}
FIXED = {"hidden_act": "silu"}


# ---- rotary positions


_ROPE = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
}


def _read_rope(config: Json, theta: float, default: Json, part: float) -> dict[str, object]:
    # Before transformers 5: rope_theta, and rope_scaling or null; since then everything is in rope_parameters.
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope = dict(default if rope is None else rope)
    base = rope.get("rope_theta", config.get("rope_theta", theta))
    kind = rope.get("rope_type", rope.get("type", "default"))
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", part or None))
    if any(isinstance(value, dict) for value in rope.values()):
        raise Unrepresentable(f"has another RoPE for each of {', '.join(rope)}, here all blocks have one")
    if not isinstance(base, int | float):
        raise Unrepresentable(f"has rope_theta = {base!r}, which is not a number")
    turned = _turned(config, rotated, part > 0)
    if kind not in ("default", "yarn"):
        way_out = "choose a model with one of these"
        if kind == "dynamic":
            way_out = (
                "up to max_position_embeddings it changes nothing, so for such a seq_len name a copy of the folder "
                'whose config.json has rope_type = "default" there'
            )
        raise Unrepresentable(f"has rope_scaling of type {kind!r}, model.rope_scaling is none or yarn: {way_out}")
    if kind == "default":
        unused = {name: getattr(Model(), name) for name in (*_ROPE, "rope_original_len", "rope_truncate")}
        return {"rope_theta": float(base), "rope_scaling": "none", **turned, **unused}
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
        **turned,
        **{ours: float(values[theirs]) for ours, theirs in _ROPE.items()},
    }


def _turned(config: Json, share: Any, in_part: bool) -> dict[str, object]:
    """in_part: whether the family can turn a part of a head."""
    if share in (None, 1):
        return {}
    if not in_part:
        raise Unrepresentable(f"has partial_rotary_factor = {share}, here RoPE turns whole heads (1.0)")
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = int(head * share)
    if not 0 < width < head or width % 2:
        raise Unrepresentable(
            f"has no whole pairs of dims to turn: partial_rotary_factor = {share} of heads {head} wide"
        )
    return {"rotary_dim": width}


def _write_rope(model: Model, default: Json, part: float) -> dict[str, object]:
    turned = {"partial_rotary_factor": (model.rotary_dim or model.head_dim) / model.head_dim} if part else {}
    return turned | _write_scaling(model, default)


def _write_scaling(model: Model, default: Json) -> dict[str, object]:
    if model.rope_scaling == "none":
        return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": "default"} if default else None}
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "original_max_position_embeddings": model.rope_original_len,
        "truncate": model.rope_truncate,
        **{theirs: getattr(model, ours) for ours, theirs in _ROPE.items() if getattr(model, ours)},
    }
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def rope(theta: float, default: Json | None = None, part: float = 0.0) -> Special:
    """What leaving them out means: theta, all of rope_parameters if the family has that, and of families in which RoPE
    may turn a part of a head, how large that is."""
    return Special(
        ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
        partial(_read_rope, theta=theta, default=default or {}, part=part),
        partial(_write_rope, default=default or {}, part=part),
    )


# ---- which blocks are dense


def dense_blocks(sparse: list[bool], keys: str = "mlp_only_layers or decoder_sparse_step") -> dict[str, object]:
    """num_dense_layers and moe_every, from which blocks have experts, as those keys say."""
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


QWEN_BLOCKS = Special(("mlp_only_layers", "decoder_sparse_step"), _read_qwen, _write_qwen)


def _read_windows(config: Json) -> dict[str, object]:
    kinds = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or kinds != {"full_attention"}:
        raise Unrepresentable(
            f"has use_sliding_window = {config.get('use_sliding_window')} and layer_types {sorted(kinds)}, "
            "this family attends to the whole sequence in every block"
        )
    return {}


NO_WINDOWS = Special(
    ("use_sliding_window", "layer_types", "sliding_window", "max_window_layers"),
    _read_windows,
    lambda model: {"use_sliding_window": False},
)


# ---- the rest


def _write_shared(model: Model) -> dict[str, object]:
    if not model.shared_hidden:
        raise Unrepresentable("has a shared expert in every block, model.shared_hidden = 0 has none")
    return {}


SHARED = Special((), lambda config: {}, _write_shared)

_CHOSEN_KEYS = "attention to those keys alone that an indexer chooses"
LATER = {
    "deepseek_v32": _CHOSEN_KEYS,
    "deepseek_v4": "attention to compressed keys, several residual streams and experts chosen by hash",
    "glm_moe_dsa": _CHOSEN_KEYS,
    "minimax_m3_vl": _CHOSEN_KEYS,
    "minimax_m3_vl_text": _CHOSEN_KEYS,
    "nemotron_h": "Mamba-2 layers and experts without a gate",
}
"""Models that are refused by name: their model_type, and what they are made of that is not here."""
