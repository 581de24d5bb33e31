"""Llama-3 upcycled: a dense Llama 3 whose feed-forward network is copied into each of 8 experts.

The softmax is over the chosen experts only, so their weights sum to one and equal copies add up to the dense model
(arXiv 2412.09952, eq. 2). 8x70b is the largest model of arXiv 2504.14960: Llama-3-70B, 8 experts; its top 2 follow the
upcycling recipe cited there.
"""

from dataclasses import replace

from titanmoe.models.families import mixtral
from titanmoe.models.families.family import Family

SWITCHES = dict(
    qkv_bias=False,
    qk_norm="none",
    rope_theta=5e5,
    norm_eps=1e-5,
    tie_embeddings=False,
    shared_hidden=0,
    shared_gate=False,
    score_function="softmax_after_topk",
    norm_topk=True,
)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8)
    | dict(num_experts=8, top_k=2, expert_hidden=128),
    "8x70b": SWITCHES
    | dict(vocab_size=128256, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)
    | dict(num_experts=8, top_k=2, expert_hidden=28672),
}

# To transformers it is a Mixtral: the softmax over the chosen experts is the softmax over all, scaled to sum to one.
HF = replace(mixtral.HF, family="llama3_moe", switches=SWITCHES)

FAMILY = Family(SIZES, HF)
