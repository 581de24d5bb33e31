"""What only DeepSeek-V3 has: RoPE's rows in another order, an extra block for multi-token prediction, latents."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests import world
from tests.checkpoint_hf import models, ours
from tests.checkpoint_hf.test_convert import convert, equal
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.hf.config_json import describe_folder
from titanmoe.checkpoint.hf.huggingface_source import open_hf
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.models.families import preset

LAYERS = 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return models.save(models.make("deepseek_v3", torch.bfloat16), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture
def with_mtp(plain, tmp_path):
    return lambda change=lambda tensors: None: models.add_mtp(plain, tmp_path / "in", LAYERS, change)


def test_rows_that_rope_turns_are_reordered(plain, tmp_path):
    """By definition: each head's last 4 rows in the order 0 2 1 3; the latents' last 4 likewise."""
    source = open_hf(plain, describe_folder(plain).model)
    hf_tensors = load_file(plain / "model.safetensors")
    queries = hf_tensors["model.layers.1.self_attn.q_b_proj.weight"].unflatten(0, (8, 12))
    latents = hf_tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    head, rows = [*range(8), 8, 10, 9, 11], [*range(24), 24, 26, 25, 27]
    got = source.read("layers.1.attention.wq_b.weight", (0, 0), (96, 16))
    assert torch.equal(got, queries[:, head].flatten(0, 1))
    assert torch.equal(source.read("layers.1.attention.wkv_a.weight", (0, 0), (28, 32)), latents[rows])
    # a piece, as read by a tp rank
    assert torch.equal(source.read("layers.1.attention.wq_b.weight", (45, 3), (20, 5)), got[45:65, 3:8])


def test_without_query_latents_and_groups(tmp_path):
    model = models.make("deepseek_v3", q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=dict(rope_theta=5e4))
    folder = str(models.save(model, tmp_path / "in"))
    got = ours.whole(world.run(1, ours.logits, folder, models.ids(), {}, {}), models.ids())
    models.close(got, models.logits(model, models.ids()))


def test_multi_token_prediction_comes_in_and_goes_out(with_mtp, tmp_path, capsys):
    folder = with_mtp()
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert "mtp_depth = 1" in capsys.readouterr().out
    saved, hf_tensors = Checkpoint(tmp_path / "ours"), load_file(folder / "model.safetensors")
    assert torch.equal(saved.read("model.mtp.0.project.weight"), hf_tensors[f"model.layers.{LAYERS}.eh_proj.weight"])
    assert not [name for name in saved.tensors if "embed_copy" in name or name.startswith("model.layers.3.")]
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), hf_tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_multi_token_prediction_is_dropped_by_name_and_counted(with_mtp, plain, tmp_path, capsys):
    folder = with_mtp()
    dropped = len(models.tensors(folder)) - len(models.tensors(plain))
    assert convert("--from-hf", folder, tmp_path / "ours", "--drop", "mtp") == 0
    assert f"left out {dropped} tensors: multi-token prediction" in capsys.readouterr().out
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), load_file(plain / "model.safetensors"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_model_without_the_block_says_what_to_do(with_mtp, plain):
    folder = with_mtp()
    with pytest.raises(ConfigError, match="drop mtp leaves multi-token prediction out"):
        open_hf(folder, describe_folder(folder).model).check()
    open_hf(folder, describe_folder(folder).model, drop=("mtp",)).check()
    assert open_hf(plain, describe_folder(plain).model, drop=("mtp",)).notes == [
        f"{plain} has no multi-token prediction to drop"
    ]
    model = replace(describe_folder(folder).model, mtp_depth=1)
    with pytest.raises(ConfigError, match=r"mtp_after_norm = False, but Megatron .*: set it to true, or list"):
        open_hf(folder, model).check()
    open_hf(folder, replace(model, change=["mtp_after_norm"])).check()
    model = replace(model, mtp_after_norm=True)
    source = open_hf(folder, model)
    source.check()
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(source.read("embed_copy.weight", (8, 0), (8, 32)), embed[8:16])
    with pytest.raises(ConfigError, match=r"hnorm\.weight: missing"):
        open_hf(plain, model).check()


def test_a_tied_head_is_not_repeated(tmp_path):
    folder = models.save(models.make("deepseek_v3", tie_word_embeddings=True), tmp_path / "in")
    source = open_hf(folder, replace(describe_folder(folder).model, mtp_depth=1))
    assert list(source.map.copies) == [f"model.layers.{LAYERS}.embed_tokens.weight"]
    assert "lm_head.weight" not in source.map.hf_shapes


def test_a_copy_that_differs_is_reported(with_mtp, tmp_path, capsys):
    folder = with_mtp(lambda tensors: tensors[f"model.layers.{LAYERS}.embed_tokens.weight"].neg_())
    assert convert("--from-hf", folder, tmp_path / "ours") == 2
    assert "embed_tokens.weight: not equal to model.embed_tokens.weight, which it repeats" in capsys.readouterr().err


def test_published_configs_are_the_presets(tmp_path):
    """DeepSeek-V3's and Moonlight-16B-A3B's config.json, as far as they describe the model."""
    common = dict(
        model_type="deepseek_v3", attention_bias=False, hidden_act="silu", kv_lora_rank=512, moe_layer_freq=1,
        norm_topk_prob=True, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, scoring_func="sigmoid",
        tie_word_embeddings=False, topk_method="noaux_tc", ep_size=1, seq_aux=True, pretraining_tp=1,
    )  # fmt: skip
    published = {
        "671b": dict(
            first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432, max_position_embeddings=163840,
            moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1, num_attention_heads=128,
            num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1,
            q_lora_rank=1536, rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=2.5, topk_group=4,
            vocab_size=129280,
            rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                              original_max_position_embeddings=4096, type="yarn"),
        ),
        "16b": dict(
            first_k_dense_replace=1, hidden_size=2048, intermediate_size=11264, max_position_embeddings=8192,
            moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2, num_attention_heads=16,
            num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16, num_nextn_predict_layers=0,
            q_lora_rank=None, rms_norm_eps=1e-5, rope_theta=50000.0, routed_scaling_factor=2.446, topk_group=1,
            vocab_size=163840,
        ),
    }  # fmt: skip
    for size, config in published.items():
        (tmp_path / "config.json").write_text(json.dumps(common | config))
        assert describe_folder(tmp_path).model == Model(**preset("deepseek_v3", size))
        assert describe_folder(tmp_path).unknown == []
