"""Kimi-K2 (arXiv 2507.20534): DeepSeek-V3's architecture with more experts and fewer heads, and without groups.

1t_a32b is the first release, base and instruct, whose context YaRN extends from 4,096 tokens. Later ones (0905,
Thinking) have rope_factor 64, and Thinking norm_eps 1e-5: `model.hf` reads them from their files.
"""

from dataclasses import replace

from titanmoe.models.families import deepseek_v3
from titanmoe.models.families.family import Family

_K2 = deepseek_v3.SWITCHES | dict(rope_theta=5e4, norm_eps=1e-6, num_groups=1, top_groups=1, route_scale=2.827)
_K2 |= dict(rope_scaling="yarn", rope_factor=32.0, rope_original_len=4096, rope_beta_fast=1.0, rope_beta_slow=1.0)
_K2 |= dict(rope_mscale=1.0, rope_mscale_all_dim=1.0)

SIZES: dict[str, dict[str, object]] = {
    "debug": deepseek_v3.SIZES["debug"] | _K2,
    "1t_a32b": deepseek_v3.SIZES["671b"]
    | _K2
    | dict(vocab_size=163840, num_heads=64, num_kv_heads=64, num_dense_layers=1, num_experts=384),
}

HF = replace(deepseek_v3.HF, model_type="kimi_k2", family="kimi_k2")

FAMILY = Family(SIZES, HF)
