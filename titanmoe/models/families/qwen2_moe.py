"""Qwen2-MoE: a shared expert scaled by a sigmoid gate, biased query, key and value, softmax scores used as they are.

The debug size has a dense first block, so that dense and expert blocks meet in one model.
"""

SWITCHES = dict(
    qkv_bias=True,
    qk_norm="none",
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=False,
    shared_gate=True,
    score_function="softmax",
    norm_topk=False,
)

SIZES: dict[str, dict[str, object]] = {
    "debug": SWITCHES
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=8)
    | dict(num_dense_layers=1, dense_hidden=256)
    | dict(num_experts=8, top_k=2, expert_hidden=128, shared_hidden=128),
    "57b_a14b": SWITCHES
    | dict(vocab_size=151936, dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128)
    | dict(num_experts=64, top_k=8, expert_hidden=2560, shared_hidden=20480),
}
