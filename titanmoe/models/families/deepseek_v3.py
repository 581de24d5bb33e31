"""DeepSeek-V3: latent attention, dense first blocks, sigmoid scores, the experts chosen within groups, a shared expert.

671b is arXiv 2412.19437; its multi-token prediction is `mtp_depth = 1`. Its context is stretched by YaRN from
4,096 tokens; it was pretrained up to there with `rope_scaling = "none"` (then `rope_factor` is 1). 16b is
Moonlight-16B-A3B (arXiv 2502.16982): the same architecture without query latents, groups and YaRN, and with its own
rope_theta and norm_eps. Several shared experts of one width are one of their summed width. The selection bias, which
both have, is a matter of training: it moves by `moe.bias_update_rate`.
"""

SWITCHES = dict(
    qkv_bias=False,
    qk_norm="none",
    tie_embeddings=False,
    shared_gate=False,
    score_function="sigmoid",
    norm_topk=True,
)

_YARN = dict(rope_scaling="yarn", rope_factor=40.0, rope_original_len=4096, rope_beta_fast=32.0, rope_beta_slow=1.0)
_671B = SWITCHES | _YARN | dict(rope_theta=1e4, norm_eps=1e-6, rope_mscale=1.0, rope_mscale_all_dim=1.0)
_WIDTHS = dict(head_dim=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)

SIZES: dict[str, dict[str, object]] = {
    "debug": _671B
    | dict(vocab_size=320, dim=64, num_layers=4, num_heads=16, num_kv_heads=16)
    | dict(kv_lora_rank=32, q_lora_rank=48, head_dim=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    | dict(num_dense_layers=1, dense_hidden=256)
    | dict(num_experts=16, top_k=4, expert_hidden=64, shared_hidden=64, num_groups=4, top_groups=2, route_scale=2.5),
    "16b": SWITCHES
    | dict(rope_theta=5e4, norm_eps=1e-5, rope_scaling="none")
    | dict(vocab_size=163840, dim=2048, num_layers=27, num_heads=16, num_kv_heads=16)
    | dict(kv_lora_rank=512, q_lora_rank=0, **_WIDTHS)
    | dict(num_dense_layers=1, dense_hidden=11264)
    | dict(num_experts=64, top_k=6, expert_hidden=1408, shared_hidden=2 * 1408)
    | dict(num_groups=1, top_groups=1, route_scale=2.446),
    "671b": _671B
    | dict(vocab_size=129280, dim=7168, num_layers=61, num_heads=128, num_kv_heads=128)
    | dict(kv_lora_rank=512, q_lora_rank=1536, **_WIDTHS)
    | dict(num_dense_layers=3, dense_hidden=18432)
    | dict(num_experts=256, top_k=8, expert_hidden=2048, shared_hidden=2048)
    | dict(num_groups=8, top_groups=4, route_scale=2.5),
}
