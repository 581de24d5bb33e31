"""Qwen3-MoE: queries and keys normalised per head, many small experts, chosen softmax scores scaled to sum to one.

Heads are 128 wide whatever the model's width, so num_heads * head_dim is not dim. The sizes are the first release's;
later ones (2507) have a larger rope_theta.
"""

from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=False,
    qk_norm="head",
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=False,
    shared_hidden=0,
    shared_gate=False,
    score_function="softmax",
    norm_topk=True,
)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8)
    | dict(num_experts=16, top_k=4, expert_hidden=64),
    "30b_a3b": SWITCHES
    | dict(vocab_size=151936, dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128)
    | dict(num_experts=128, top_k=8, expert_hidden=768),
    "235b_a22b": SWITCHES
    | dict(vocab_size=151936, dim=4096, num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128)
    | dict(num_experts=128, top_k=8, expert_hidden=1536),
}

HF = hf.HuggingFace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    family="qwen3_moe",
    switches=SWITCHES,
    hf_tensors=hf.ENDS | hf.layer(hf.NORMS | hf.ATTENTION | hf.DENSE | hf.EXPERTS),
    fields=hf.SHAPE
    | hf.HEADS
    | {
        "num_experts": ("num_experts", "num_local_experts"),
        "top_k": ("num_experts_per_tok",),
        "expert_hidden": ("moe_intermediate_size",),
        "dense_hidden": ("intermediate_size",),
        "norm_topk": ("norm_topk_prob",),
    },
    conversions=(hf.rope(1e4), hf.QWEN_BLOCKS, hf.NO_WINDOWS),
    defaults=hf.DEFAULTS | {"num_key_value_heads": 4, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
    fixed=hf.FIXED | {"attention_bias": False},
)

FAMILY = Family(SIZES, HF)
