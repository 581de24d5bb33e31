"""What only gpt-oss has: experts fused and published in MXFP4, blocks of two kinds."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_hf import models
from tests.checkpoint_hf.test_convert import convert, equal
from titanmoe.checkpoint.hf.config_json import describe_folder, to_config_json
from titanmoe.checkpoint.hf.huggingface_source import open_hf
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.models.families import preset


def test_gate_and_up_take_turns_and_pieces_are_parts(tmp_path):
    folder = models.save(models.make("gpt_oss"), tmp_path / "in")
    source, hf_tensors = open_hf(folder, describe_folder(folder).model), load_file(folder / "model.safetensors")
    fused = hf_tensors["model.layers.1.mlp.experts.gate_up_proj"]
    for name, phase in (("w1", 0), ("w3", 1)):
        whole = source.read(f"layers.1.moe.experts.{name}", (0, 0, 0), (8, 32, 32))
        assert torch.equal(whole, fused[:, :, phase::2].transpose(1, 2))
        assert torch.equal(source.read(f"layers.1.moe.experts.{name}", (2, 8, 3), (4, 16, 9)), whole[2:6, 8:24, 3:12])
        biases = source.read(f"layers.1.moe.experts.{name}_bias", (3, 5), (2, 8))
        assert torch.equal(biases, hf_tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][3:5, phase::2][:, 5:13])


def test_mxfp4_comes_in_as_its_values_and_goes_out_as_bfloat16(tmp_path, capsys):
    folder = models.save(models.make("gpt_oss", torch.bfloat16), tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    want, generator = dict(tensors), torch.Generator().manual_seed(0)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 16, 2), generator=generator)
        powers = torch.randint(-6, 1, (experts, outputs, inputs // 32), generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)
        tensors[f"{name}_scales"] = (powers + 127).to(torch.uint8)
        values = table[codes].flatten(-2) * 2.0 ** powers.unsqueeze(-1)
        want[name] = values.flatten(-2).transpose(1, 2).bfloat16().contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert "6 tensors of MXFP4 read as bfloat16" in capsys.readouterr().out
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), want)
    assert models.transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict().get("quantization_config") is None


@pytest.mark.parametrize("every, kinds", [(0, "sss"), (1, "fff"), (2, "sfs"), (3, "ssf")])
def test_which_blocks_are_narrow(tmp_path, every, kinds):
    config = models.make("gpt_oss").config.to_dict()
    config["layer_types"] = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = describe_folder(tmp_path).model
    assert (model.sliding_window, model.full_attention_every) == (7 if every != 1 else 0, every)
    assert to_config_json(model, None, "float32", 64)["layer_types"] == config["layer_types"]


def test_blocks_in_another_order_are_refused(tmp_path):
    config = models.make("gpt_oss").config.to_dict()
    config["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has the layer_types \['full_attention', 'sliding_attention'"):
        describe_folder(tmp_path)


def test_the_published_config_is_the_preset(tmp_path):
    config = dict(
        model_type="gpt_oss", attention_bias=True, experts_per_token=4, head_dim=64, hidden_act="silu",
        hidden_size=2880, initial_context_length=4096, intermediate_size=2880, max_position_embeddings=131072,
        layer_types=["sliding_attention", "full_attention"] * 12, num_attention_heads=64, num_experts_per_tok=4,
        num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, rms_norm_eps=1e-5, rope_theta=150000,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                          rope_type="yarn", truncate=False),
        sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, vocab_size=201088,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe_folder(tmp_path).model == Model(**preset("gpt_oss", "20b"))
    assert describe_folder(tmp_path).unknown == []
