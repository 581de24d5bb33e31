"""GLM-4.5: a part of each head turned, norms that a size may have, and its block of multi-token prediction."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert, equal
from titanmoe.checkpoint.hf.config import describe, interpret, to_config_json
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


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_configs_are_the_presets(size):
    """GLM-4.5-Air's and GLM-4.5's config.json, as far as they describe the model."""
    parsed = interpret(COMMON | PUBLISHED[size], "config.json")
    assert parsed.model == Model(**preset("glm4_moe", size)) and parsed.unknown == []
    written = to_config_json(parsed.model, None, "bfloat16", 4096)
    assert written["partial_rotary_factor"] == 0.5 and written["attention_bias"] is True


def test_whole_heads_and_odd_parts():
    config = COMMON | PUBLISHED["106b_a12b"]
    whole = interpret(config | {"partial_rotary_factor": 1.0}, "config.json").model
    assert whole.rotary_dim == 0
    assert to_config_json(whole, None, "bfloat16", 4096)["partial_rotary_factor"] == 1.0
    for share in (0.001, 0.01, 1.5):
        with pytest.raises(ConfigError, match=f"partial_rotary_factor = {share} of heads 128 wide"):
            interpret(config | {"partial_rotary_factor": share}, "config.json")


def test_multi_token_prediction_comes_in_and_goes_out(tmp_path):
    plain = models.save(models.make("glm4_moe", torch.bfloat16), tmp_path / "plain")
    folder = models.add_mtp(plain, tmp_path / "in", describe(plain).model.num_layers)
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), load_file(folder / "model.safetensors"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
