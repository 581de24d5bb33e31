"""Qwen3-Next and Qwen3.5 as published: text_config, stacked experts, multi-token prediction, what reads images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert, equal
from titanmoe.checkpoint.hf.config_json import describe_folder, hf_format_of, parse_config_json, to_config_json
from titanmoe.checkpoint.hf.huggingface_source import open_hf
from titanmoe.checkpoint.hf.tensor_map import TensorMap
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model, Own
from titanmoe.models.families import preset

NEXT = dict(
    architectures=["Qwen3NextForCausalLM"], attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1,
    full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
    intermediate_size=5120, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144, mlp_only_layers=[],
    model_type="qwen3_next", moe_intermediate_size=512, norm_topk_prob=True, num_attention_heads=16, num_experts=512,
    num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2, output_router_logits=False,
    partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512, tie_word_embeddings=False, use_cache=True, use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
TEXT = dict(
    attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
    full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
    layer_types=[*["linear_attention"] * 3, "full_attention"] * 10, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144,
    mlp_only_layers=[], model_type="qwen3_5_moe_text", moe_intermediate_size=512, mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, num_attention_heads=16, num_experts=256, num_experts_per_tok=8,
    num_hidden_layers=40, num_key_value_heads=2, rms_norm_eps=1e-6, router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512, use_cache=True, vocab_size=248320, mamba_ssm_dtype="float32",
    rope_parameters=dict(mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default", rope_theta=10000000,
                         partial_rotary_factor=0.25),
)  # fmt: skip
OUTER = dict(
    architectures=["Qwen3_5MoeForConditionalGeneration"], image_token_id=248056, model_type="qwen3_5_moe",
    text_config=TEXT, tie_word_embeddings=False, video_token_id=248057, vision_config=dict(depth=27, hidden_size=1152),
    vision_end_token_id=248054, vision_start_token_id=248053,
)  # fmt: skip


@pytest.mark.parametrize(
    "config, family, size", [(NEXT, "qwen3_next", "80b_a3b"), (OUTER, "qwen3_5_moe", "35b_a3b")], ids=["next", "3.5"]
)
def test_published_configs_are_the_presets(config, family, size):
    parsed = parse_config_json(config, "config.json")
    assert parsed.model == Model(**preset(family, size)) and parsed.unknown == []
    for carried in (None, config):
        written = to_config_json(parsed.model, carried, "bfloat16", 4096)
        assert written["model_type"] == parsed.hf.model_type and written["architectures"] == [parsed.hf.architecture]
        assert "text_config" not in written and "vision_config" not in written
        assert parse_config_json(written, "config.json").model == parsed.model


def test_which_blocks_are_linear():
    kinds = ["linear_attention", "full_attention"] * 24
    every_other = parse_config_json(NEXT | {"layer_types": kinds}, "config.json").model
    assert every_other.full_attention_every == 2
    assert to_config_json(every_other, None, "bfloat16", 4096)["layer_types"] == kinds
    none = parse_config_json(NEXT | {"layer_types": ["linear_attention"] * 48}, "config.json").model
    assert none.full_attention_every == 0
    with pytest.raises(ConfigError, match=r"has the layer_types \['full_attention', 'linear_attention'"):
        parse_config_json(NEXT | {"layer_types": kinds[1:] + kinds[:1]}, "config.json")


@pytest.mark.parametrize(
    "change, text",
    [
        ({"attn_output_gate": False}, "has attn_output_gate = False, titanmoe's qwen3_5_moe only has true"),
        ({"mtp_use_dedicated_embeddings": True}, "has mtp_use_dedicated_embeddings = True, .* only has false"),
        ({"tie_word_embeddings": True}, "has tie_word_embeddings = False, and True in text_config: set one value"),
        ({"attention_bias": True}, "has attention_bias = True"),
        ({"image_token_id": "<image>"}, "has {'image_token_id': '<image>'}, which are not ids of tokens"),
    ],
    ids=str,
)
def test_what_is_not_followed_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        parse_config_json(OUTER | {"text_config": TEXT | change}, "config.json")
    with pytest.raises(ConfigError, match="has no object text_config"):
        parse_config_json(OUTER | {"text_config": 7}, "config.json")


LEFT_OUT = {"rms_norm_eps": 1e-5, "head_dim": 128, "initializer_range": 0.1, "max_position_embeddings": 4096}


def test_keys_beside_text_config_are_no_keys_of_the_text_model():
    """transformers takes the default of its class where text_config leaves one out."""
    text = {key: value for key, value in TEXT.items() if key not in LEFT_OUT}
    parsed, plain = (parse_config_json(OUTER | {"text_config": text} | more, "config.json") for more in (LEFT_OUT, {}))
    theirs = models.transformers.Qwen3_5MoeConfig(**OUTER | {"text_config": dict(text)} | LEFT_OUT).text_config
    assert parsed.model == plain.model and parsed.model.norm_eps == theirs.rms_norm_eps == 1e-6
    assert parsed.model.head_dim == theirs.head_dim == 256 and parsed.model.init_std == theirs.initializer_range
    assert parsed.unknown == [f"{key} (beside text_config)" for key in sorted(LEFT_OUT)]
    assert parsed.model.media_tokens == [248056, 248057]  # which transformers reads there


def test_all_that_is_wrong_is_said_at_once():
    wrong = {"tie_word_embeddings": True, "attn_output_gate": False, "hidden_size": None}
    with pytest.raises(ConfigError) as refused:
        parse_config_json(OUTER | {"text_config": TEXT | wrong, "image_token_id": "x"}, "config.json")
    text = "\n".join(refused.value.problems)
    assert all(key in text for key in (*wrong, "image_token_id"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(num_layers=5, mtp_depth=1), "here that block is like the last of model.num_layers = 5"),
        (
            dict(own=Own(preset("qwen3_next", "debug")["own"] | {"linear_gate": "gla"})),
            'not model.own.linear_gate = "gla"',
        ),
    ],
)
def test_what_transformers_lacks_is_said_by_field(change, text):
    model = replace(Model(**preset("qwen3_next", "debug")), **change)
    with pytest.raises(ConfigError) as refused:
        TensorMap(model, hf_format_of("qwen3_next"))
    assert text in str(refused.value) and len(refused.value.problems) == 1


def stacked(tensors: dict[str, Tensor], block: str) -> dict[str, Tensor]:
    """The block's experts as one tensor of gates and ups, and one of downs."""

    def stack(name: str) -> Tensor:
        return torch.stack([tensors[f"{block}.mlp.experts.{expert}.{name}.weight"] for expert in range(8)])

    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{block}.mlp.experts.")}
    both = torch.cat((stack("gate_proj"), stack("up_proj")), 1)
    return rest | {f"{block}.mlp.experts.gate_up_proj": both, f"{block}.mlp.experts.down_proj": stack("down_proj")}


def with_mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last layer is one with attention, as the block of multi-token prediction is."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    block = {name.replace("model.layers.3.", "mtp.layers.0."): x for name, x in tensors.items() if ".layers.3." in name}
    extra = {name: noise(*tensor.shape) for name, tensor in block.items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return tensors | extra | {f"mtp.{name}.weight": noise(32) for name in norms} | {"mtp.fc.weight": noise(32, 64)}


def publish(plain: Path, folder: Path, experts: str, mtp: str) -> dict[str, Tensor]:
    """A saved text model in the layout of the published ones. experts, mtp: "stacked" or "apart"."""
    folder.mkdir()
    text: dict[str, Any] = json.loads((plain / "config.json").read_text())
    outer = OUTER | {"text_config": text | {"mtp_num_hidden_layers": 1}, "image_token_id": 62, "video_token_id": 63}
    (folder / "config.json").write_text(json.dumps(outer))
    want = tensors = with_mtp(load_file(plain / "model.safetensors"))
    for block in [f"model.layers.{layer}" for layer in range(4)] if experts == "stacked" else []:
        tensors = stacked(tensors, block)
    if mtp == "stacked":
        tensors = stacked(tensors, "mtp.layers.0")
    begin = "model.language_model."
    renamed = {
        begin + name.removeprefix("model.") if name.startswith("model.") else name: x for name, x in tensors.items()
    }
    renamed["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(3, 3)
    renamed["model.visual.merger.norm.bias"] = torch.ones(3)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return want


@pytest.mark.parametrize("experts", ["stacked", "apart"])
@pytest.mark.parametrize("mtp", ["stacked", "apart"])
def test_published_layouts_come_in_and_go_out_as_text(tmp_path, experts, mtp, capsys):
    model = models.make("qwen3_5_moe", torch.bfloat16)
    plain = models.save(model, tmp_path / "plain")
    want = publish(plain, tmp_path / "in", experts, mtp)
    assert convert("--from-hf", tmp_path / "in", tmp_path / "ours") == 0
    assert "left out 2 tensors: they read images and video, and only text is trained" in capsys.readouterr().out
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), want)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["mtp_num_hidden_layers"] == 1 and written["image_token_id"] == 62
    assert describe_folder(tmp_path / "out").model.media_tokens == [62, 63]
    again = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model)
    assert torch.equal(models.logits(again, models.ids()), models.logits(model, models.ids()))
    source = open_hf(tmp_path / "in", describe_folder(tmp_path / "in").model, drop=("mtp",))
    ups = torch.stack([want[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in range(8)])
    assert torch.equal(source.read("layers.1.moe.experts.w3", (2, 5, 3), (4, 7, 9)), ups[2:6, 5:12, 3:12])
    assert convert("--from-hf", tmp_path / "in", tmp_path / "dropped", "--drop", "mtp") == 0
    assert "tensors: multi-token prediction, dropped" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_pieces_of_tensors_that_have_several_of_ours(name, tmp_path):
    """Rows of a rank may begin within a group of rows there, and end in another."""
    folder = models.save(models.make(name), tmp_path / "in")
    source = open_hf(folder, describe_folder(folder).model)
    for layer, names in (
        (2, ("wq.weight", "wv.weight", "wz.weight", "wb.weight", "conv_v")),
        (1, ("wq.weight", "wg.weight")),
    ):
        for our_name in (f"layers.{layer}.attention.{x}" for x in names):
            rows, columns = source.tensors[our_name][0]
            whole = source.read(our_name, (0, 0), (rows, columns))
            for first, count in ((0, 1), (3, 4), (rows - 2, 2), (rows, 0)):
                piece = source.read(our_name, (first, 1), (count, 2))
                assert torch.equal(piece, whole[first : first + count, 1:3])


def test_transformers_own_class_for_text_and_images_comes_in(tmp_path, capsys):
    eye = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=24, out_hidden_size=32, patch_size=4)
    media = {key: 58 + n for n, key in enumerate(key for key in OUTER if key.endswith("_token_id"))}
    text = models.config("qwen3_5_moe").to_dict()
    config = models.transformers.Qwen3_5MoeConfig(text_config=text, vision_config=eye, **media)
    model = models.transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    assert convert("--from-hf", models.save(model, tmp_path / "in"), tmp_path / "ours") == 0
    assert "they read images and video" in capsys.readouterr().out
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    again = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids_BL = models.ids(vocab_size=58)
    assert torch.equal(models.logits(again, ids_BL), models.logits(model, ids_BL))
