"""OLMoE: many small experts, softmax scores used as they are, queries and keys normalised over all heads together.

7b_a1b is OLMoE-1B-7B of September 2024 (arXiv 2409.02060), named for 1.3B active and 6.9B parameters in all.
"""

from titanmoe.models.families import huggingface as hf
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=False,
    qk_norm="full",
    rope_theta=1e4,
    norm_eps=1e-5,
    tie_embeddings=False,
    shared_hidden=0,
    shared_gate=False,
    score_function="softmax",
    norm_topk=False,
)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=8)
    | dict(num_experts=16, top_k=4, expert_hidden=64),
    "7b_a1b": SWITCHES
    | dict(vocab_size=50304, dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128)
    | dict(num_experts=64, top_k=8, expert_hidden=1024),
}

HF = hf.HuggingFace(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    family="olmoe",
    switches=SWITCHES,
    hf_tensors=hf.ENDS | hf.layer(hf.NORMS | hf.ATTENTION | hf.EXPERTS),
    fields=hf.SHAPE
    | hf.HEADS
    | {
        "num_experts": ("num_experts", "num_local_experts"),
        "top_k": ("num_experts_per_tok",),
        "expert_hidden": ("intermediate_size",),
        "norm_topk": ("norm_topk_prob",),
    },
    conversions=(hf.rope(1e4),),
    defaults=hf.DEFAULTS | {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    fixed=hf.FIXED | {"attention_bias": False, "clip_qkv": None, "sliding_window": None},
)

FAMILY = Family(SIZES, HF)
