"""MiniMax-M2: config.json and tensors as published."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert
from tests.checkpoint_hf.test_quantised import to_fp8
from titanmoe.checkpoint.hf.config_json import parse_config_json, to_config_json
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.models.count import parameters
from titanmoe.models.families import preset

FP8 = dict(
    activation_scheme="dynamic", fmt="float8_e4m3fn", quant_method="fp8", weight_block_size=[128, 128],
    modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
)  # fmt: skip
PUBLISHED = dict(
    model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], attention_dropout=0.0, attn_type_list=[1] * 62,
    dtype="bfloat16", head_dim=128, hidden_act="silu", hidden_size=3072, intermediate_size=1536,
    max_position_embeddings=204800, mlp_intermediate_size=8192, mtp_transformer_layers=1, num_attention_heads=48,
    num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8, num_local_experts=256, num_mtp_modules=3,
    qk_norm_type="per_layer", quantization_config=FP8, rms_norm_eps=1e-6, rope_theta=5000000, rotary_dim=64,
    scoring_func="sigmoid", shared_intermediate_size=0, sliding_window=None, tie_word_embeddings=False, use_cache=True,
    use_mtp=True, use_qk_norm=True, use_routing_bias=True, vocab_size=200064,
)  # fmt: skip


def test_the_published_config_is_the_preset():
    parsed = parse_config_json(PUBLISHED, "config.json")
    assert parsed.model == Model(**preset("minimax_m2", "230b_a10b")) and parsed.unknown == [] == parsed.notes
    written = to_config_json(parsed.model, None, "bfloat16", 4096)
    assert (written["rotary_dim"], written["partial_rotary_factor"]) == (64, 0.5)
    assert written["use_qk_norm"] is True and "num_mtp_modules" not in written


def test_its_files_have_exactly_our_numbers():
    """With the selection biases, and a scale for each 128 x 128 of attention and experts: no multi-token prediction."""
    model = Model(**preset("minimax_m2", "230b_a10b"))
    count = parameters(model)
    biases, scales = model.num_layers * model.num_experts, (count.attention + count.experts) // 128**2
    assert count.total + biases + scales == 228_703_644_928


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_dim": 32},
        {"rotary_dim": 128},
        {"rotary_dim": None},
        {"partial_rotary_factor": 0.5},
        {"rotary_dim": None, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ],
    ids=str,
)
def test_rope_is_as_wide_as_in_transformers(changes):
    config = {key: value for key, value in (PUBLISHED | changes).items() if value is not None}
    theirs = models.transformers.MiniMaxM2Config(**config)
    angles = models.transformers.models.minimax_m2.modeling_minimax_m2.MiniMaxM2RotaryEmbedding(theirs).inv_freq
    model = parse_config_json(config, "config.json").model
    assert (model.rotary_dim or model.head_dim) == 2 * len(angles)
    assert parse_config_json(to_config_json(model, None, "bfloat16", 4096), "it").model == model


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"partial_rotary_factor": 0.25}, "rotary_dim = 64, but partial_rotary_factor = 0.25 of head_dim = 128"),
        ({"attn_type_list": [1, 0] * 31}, "attention than 1, softmax, in the blocks [1, 3, 5"),
        ({"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta = 3.5: only 1 is followed"),
        ({"use_qk_norm": False}, "use_qk_norm = False, titanmoe's minimax_m2 only has true"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head', titanmoe's minimax_m2 only has \"per_layer\""),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax', titanmoe's minimax_m2 only has \"sigmoid\""),
        ({"use_routing_bias": False}, "use_routing_bias = False, titanmoe's minimax_m2 only has true"),
        ({"shared_intermediate_size": 1536}, "shared_intermediate_size = 1536, titanmoe's minimax_m2 only has 0"),
        ({"sliding_window": 4096}, "sliding_window = 4096, titanmoe's minimax_m2 only has null"),
    ],
)
def test_what_is_not_followed_is_refused(changes, reason):
    with pytest.raises(ConfigError) as caught:
        parse_config_json(PUBLISHED | changes, "config.json")
    assert reason in str(caught.value) and len(caught.value.problems) == 1


def test_published_blocks_of_fp8_come_in(tmp_path, capsys):
    """Attention and experts are in FP8; the router, its bias, norms, embedding and head are not."""
    model = models.make("minimax_m2", torch.bfloat16, hidden_size=160, intermediate_size=136, num_hidden_layers=1)
    folder = models.save(model, tmp_path / "in")
    stored, numbers = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        numbers[name] = tensor
        if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            stored[name], stored[f"{name}_scale_inv"], numbers[name] = to_fp8(tensor.float())
    assert "model.layers.0.block_sparse_moe.experts.7.w2.weight_scale_inv" in stored
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(config))
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert "28 tensors of FP8 read as bfloat16" in capsys.readouterr().out
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    written = models.tensors(tmp_path / "out")
    assert written.keys() == numbers.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in numbers.items())
