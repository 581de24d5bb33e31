"""Mixtral: every block has experts, the chosen softmax scores are scaled to sum to one, nothing is shared or biased.

8x7b and 8x22b are the published base models (v0.1). 8x22b_g8t8 is the fine-grained variant of arXiv 2504.14960:
granularity 8, top 8, that is each expert split into 8 of an eighth of the width, 8 of the 64 chosen.
"""

from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=False,
    qk_norm="none",
    rope_theta=1e6,
    norm_eps=1e-5,
    tie_embeddings=False,
    shared_hidden=0,
    shared_gate=False,
    score_function="softmax",
    norm_topk=True,
)

_8X22B = SWITCHES | dict(vocab_size=32000, dim=6144, num_layers=56, num_heads=48, num_kv_heads=8, head_dim=128)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=8)
    | dict(num_experts=8, top_k=2, expert_hidden=128),
    "8x7b": SWITCHES
    | dict(vocab_size=32000, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    | dict(num_experts=8, top_k=2, expert_hidden=14336),
    "8x22b": _8X22B | dict(num_experts=8, top_k=2, expert_hidden=16384),
    "8x22b_g8t8": _8X22B | dict(num_experts=64, top_k=8, expert_hidden=2048),
}

HF = hf.HuggingFace(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    family="mixtral",
    switches=SWITCHES,
    hf_tensors=hf.ENDS
    | hf.layer(
        hf.NORMS
        | hf.ATTENTION
        | {"moe.router.weight": "block_sparse_moe.gate.weight"}
        | hf.swiglu("moe.experts.{w}", "block_sparse_moe.experts.{expert}.{w}.weight", ("w1", "w3", "w2"))
    ),
    fields=hf.SHAPE
    | hf.HEADS
    | {
        "num_experts": ("num_local_experts", "num_experts"),
        "top_k": ("num_experts_per_tok",),
        "expert_hidden": ("intermediate_size",),
    },
    conversions=(hf.rope(1e6),),
    defaults=hf.DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "router_aux_loss_coef": 0.001},
    fixed=hf.FIXED | {"sliding_window": None},
)

FAMILY = Family(SIZES, HF)
