"""MiniMax-M2: many small experts, sigmoid router scores with a bias, norms of queries and keys over all heads together.

RoPE rotates half of each head.

230b_a10b is MiniMax-M2, and M2.1, M2.5 and M2.7, which have its sizes. Its code divides the chosen scores by their sum,
as we do: the 1e-20 that our router adds is lost in rounding for sums above 1e-12 in float32, and 2e-4 in float64. The
bias belongs to training: it moves by `moe.bias_update_rate`. Multi-token prediction, which its config.json has numbers
for, was not published.
"""

from titanmoe.config.schema import Model
from titanmoe.models.families import huggingface as hf
from titanmoe.models.families import mixtral
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=False,
    qk_norm="full",
    rope_theta=5e6,
    norm_eps=1e-6,
    tie_embeddings=False,
    shared_hidden=0,
    shared_gate=False,
    score_function="sigmoid",
    norm_topk=True,
)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8, rotary_dim=4)
    | dict(num_experts=16, top_k=4, expert_hidden=64),
    "230b_a10b": SWITCHES
    | dict(vocab_size=200064, dim=3072, num_layers=62, num_heads=48, num_kv_heads=8, head_dim=128, rotary_dim=64)
    | dict(num_experts=256, top_k=8, expert_hidden=1536),
}


# ---- config.json

_ROPE = hf.rope(5e6, rotary_fraction=1.0)
_BETAS = tuple(f"layernorm_{kind}_beta" for kind in ("full_attention", "linear_attention", "mlp"))
_UNUSED = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")


def _read_rope(config: hf.Json) -> dict[str, object]:
    """Return the fields of [model] about RoPE.

    The published config.json has RoPE's width as rotary_dim, which vLLM reads; transformers prefers
    partial_rotary_factor.

    Raises:
        Unrepresentable: if the two disagree, or [model] has no such RoPE.
    """
    config = {"head_dim": 128, **config}
    if width := config.get("rotary_dim"):
        head, rope = config["head_dim"], config.get("rope_scaling") or config.get("rope_parameters") or {}
        fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", width / head))
        if fraction * head != width:
            raise hf.Unrepresentable(
                f"has rotary_dim = {width}, but partial_rotary_factor = {fraction} of head_dim = {head}: must agree"
            )
        config["partial_rotary_factor"] = fraction
    return _ROPE.read(config)


def _write_rope(model: Model) -> dict[str, object]:
    return _ROPE.write(model) | {"rotary_dim": model.rotary_dim or model.head_dim}


def _read_others(config: hf.Json) -> dict[str, object]:
    kinds = config.get("attn_type_list") or []
    if linear := [layer for layer, kind in enumerate(kinds) if kind != 1]:
        raise hf.Unrepresentable(
            f"has attn_type_list with another attention than 1, softmax, in the blocks {linear[:100]}"
        )
    if scaled := [f"{key} = {config[key]}" for key in _BETAS if config.get(key, 1) != 1]:
        raise hf.Unrepresentable(f"has {', '.join(scaled)}: only 1 is followed, residuals are not scaled")
    return {}


HF = hf.HuggingFace(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    family="minimax_m2",
    switches=SWITCHES,
    hf_tensors=mixtral.HF.hf_tensors | hf.layer({"moe.router.expert_bias": "block_sparse_moe.e_score_correction_bias"}),
    fields=mixtral.HF.fields,
    conversions=(
        hf.Conversion((*_ROPE.keys, "rotary_dim"), _read_rope, _write_rope),
        hf.Conversion(("attn_type_list", *_BETAS, *_UNUSED), _read_others, lambda model: {}),
    ),
    defaults=hf.DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128},
    fixed=hf.FIXED
    | {"attention_bias": False, "sliding_window": None, "use_qk_norm": True, "qk_norm_type": "per_layer"}
    | {"use_routing_bias": True, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
)

FAMILY = Family(SIZES, HF)
