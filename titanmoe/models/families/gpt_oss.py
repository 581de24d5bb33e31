"""gpt-oss: attention sinks, every other block narrow, biases on every projection, router and expert, a clamped SwiGLU.

The sizes are the published checkpoints' (arXiv 2508.10925), which YaRN takes from 4096 to 131072 positions. The softmax
is over the chosen experts only, so their weights sum to one as they are.
"""

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
    expert_biases=True,
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
