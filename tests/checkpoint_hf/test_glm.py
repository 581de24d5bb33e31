"""GLM-4.5, GLM-4.7-Flash and Kimi-K2: config.json as published, and blocks of multi-token prediction."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert, equal
from titanmoe.checkpoint.hf.config_json import describe_folder, parse_config_json, to_config_json
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.models.families import preset

COMMON = dict(
    model_type="glm4_moe", attention_bias=True, attention_dropout=0.0, head_dim=128, hidden_act="silu",
    initializer_range=0.02, max_position_embeddings=131072, n_group=1, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=96, num_experts_per_tok=8, num_key_value_heads=8, num_nextn_predict_layers=1,
    partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, tie_word_embeddings=False,
    topk_group=1, use_cache=True, vocab_size=151552,
)  # fmt: skip
PUBLISHED = {
    "106b_a12b": dict(
        first_k_dense_replace=1, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408,
        n_routed_experts=128, num_hidden_layers=46, routed_scaling_factor=1.0, use_qk_norm=False,
    ),
    "355b_a32b": dict(
        first_k_dense_replace=3, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
        n_routed_experts=160, num_hidden_layers=92, routed_scaling_factor=2.5, use_qk_norm=True,
    ),
}  # fmt: skip


LATENT = dict(
    attention_bias=False, attention_dropout=0.0, first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512,
    n_group=1, n_shared_experts=1, norm_topk_prob=True, qk_rope_head_dim=64, tie_word_embeddings=False, topk_group=1,
    topk_method="noaux_tc",
)  # fmt: skip
FLASH = LATENT | dict(
    model_type="glm4_moe_lite", hidden_size=2048, intermediate_size=10240, max_position_embeddings=202752,
    moe_intermediate_size=1536, n_routed_experts=64, num_attention_heads=20, num_experts_per_tok=4,
    num_hidden_layers=47, num_key_value_heads=20, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
    q_lora_rank=768, qk_nope_head_dim=192, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000,
    routed_scaling_factor=1.8, v_head_dim=256, vocab_size=154880,
)  # fmt: skip
KIMI = LATENT | dict(
    model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], aux_loss_alpha=0.001, ep_size=1, hidden_size=7168,
    initializer_range=0.02, intermediate_size=18432, max_position_embeddings=131072, moe_intermediate_size=2048,
    moe_layer_freq=1, n_routed_experts=384, num_attention_heads=64, num_experts_per_tok=8, num_hidden_layers=61,
    num_key_value_heads=64, num_nextn_predict_layers=0, pretraining_tp=1, q_lora_rank=1536, qk_nope_head_dim=128,
    rms_norm_eps=1e-6, rope_theta=50000.0, routed_scaling_factor=2.827, scoring_func="sigmoid", seq_aux=True,
    v_head_dim=128, vocab_size=163840,
    rope_scaling=dict(beta_fast=1.0, beta_slow=1.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096, type="yarn"),
)  # fmt: skip


@pytest.mark.parametrize(
    "config, family, size",
    [(FLASH, "glm4_moe_lite", "30b_a3b"), (KIMI, "kimi_k2", "1t_a32b")],
    ids=["glm4_moe_lite", "kimi_k2"],
)
def test_published_configs_with_latents_are_the_presets(config, family, size):
    """GLM-4.7-Flash's and Kimi-K2-Instruct's."""
    parsed = parse_config_json(config, "config.json")
    assert parsed.model == Model(**preset(family, size)) and parsed.unknown == []
    written = to_config_json(parsed.model, None, "bfloat16", 4096)
    assert written["model_type"] == family and written["architectures"] == [parsed.hf.architecture]


def test_which_layers_of_flash_are_dense():
    kinds = ["dense"] * 3 + ["sparse"] * 44
    three = parse_config_json(FLASH | {"mlp_layer_types": kinds, "first_k_dense_replace": 3}, "config.json").model
    assert three.num_dense_layers == 3
    assert to_config_json(three, None, "bfloat16", 4096)["mlp_layer_types"] == kinds


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_configs_are_the_presets(size):
    """GLM-4.5-Air's and GLM-4.5's config.json, as far as they describe the model."""
    parsed = parse_config_json(COMMON | PUBLISHED[size], "config.json")
    assert parsed.model == Model(**preset("glm4_moe", size)) and parsed.unknown == []
    written = to_config_json(parsed.model, None, "bfloat16", 4096)
    assert written["partial_rotary_factor"] == 0.5 and written["attention_bias"] is True


def test_whole_heads_and_odd_parts():
    config = COMMON | PUBLISHED["106b_a12b"]
    whole = parse_config_json(config | {"partial_rotary_factor": 1.0}, "config.json").model
    assert whole.rotary_dim == 0
    assert to_config_json(whole, None, "bfloat16", 4096)["partial_rotary_factor"] == 1.0
    for share in (0.001, 0.01, 1.5):
        with pytest.raises(ConfigError, match=f"partial_rotary_factor = {share} of heads 128 wide"):
            parse_config_json(config | {"partial_rotary_factor": share}, "config.json")


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite"])
def test_multi_token_prediction_comes_in_and_goes_out(name, tmp_path):
    plain = models.save(models.make(name, torch.bfloat16), tmp_path / "plain")
    folder = models.add_mtp(plain, tmp_path / "in", describe_folder(plain).model.num_layers)
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), load_file(folder / "model.safetensors"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
