"""FP8 blocks and MXFP4, made here by hand, are read as the numbers they stand for, whole and in pieces."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_hf import models
from titanmoe.checkpoint.hf.quantised import Dequantised, fp8_block
from titanmoe.checkpoint.hf.safetensors_folder import SafetensorsFolder
from titanmoe.cli import main
from titanmoe.config import ConfigError

FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def weights(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    return Dequantised(SafetensorsFolder(folder), fp8_block(config, folder))


def to_fp8(weight, block=128):
    """e4m3 and the inverse scales of its blocks, a block at a time; and what the two stand for."""
    rows, columns = (-(-side // block) for side in weight.shape)
    values, scales = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    back = torch.zeros(weight.shape)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[at].abs().max() / 448 * (1 + i + 2 * j)
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            back[at] = values[at].float() * scales[i, j]
    return values, scales, back.bfloat16()


def test_fp8_blocks_whole_and_in_pieces(tmp_path):
    values, scales, want = to_fp8(torch.randn(300, 200, generator=torch.Generator().manual_seed(0)))
    read = weights(tmp_path, {"w": values, "w_scale_inv": scales}, FP8)
    assert read.tensors == {"w": ((300, 200), torch.bfloat16)}
    assert torch.equal(read.read("w", (0, 0), (300, 200)), want)
    for offset, shape in (((0, 0), (1, 1)), ((100, 130), (150, 7)), ((256, 0), (44, 200)), ((5, 5), (0, 3))):
        block = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        assert torch.equal(read.read("w", offset, shape), want[block])


def test_mxfp4_by_its_definition_whole_and_in_pieces(tmp_path):
    generator = torch.Generator().manual_seed(0)
    experts, rows, groups = 3, 5, 2
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (experts, rows, groups), dtype=torch.uint8, generator=generator)
    want = torch.zeros(experts, groups * 32, rows)
    for e in range(experts):
        for r in range(rows):
            for g in range(groups):
                for i in range(32):
                    code = int(blocks[e, r, g, i // 2]) >> (4 * (i % 2)) & 15
                    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
                    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                    want[e, g * 32 + i, r] = (-1) ** sign * value * 2.0 ** (int(scales[e, r, g]) - 127)
    want = want.bfloat16()
    read = weights(tmp_path, {"up_blocks": blocks, "up_scales": scales}, MXFP4)
    assert read.tensors == {"up": ((experts, groups * 32, rows), torch.bfloat16)}
    assert torch.equal(read.read("up", (0, 0, 0), want.shape), want)
    for offset, shape in (
        ((1, 0, 0), (1, 64, 5)),
        ((0, 30, 2), (3, 5, 2)),
        ((2, 32, 0), (1, 32, 5)),
        ((0, 3, 1), (1, 1, 1)),
    ):
        block = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        assert torch.equal(read.read("up", offset, shape), want[block])


def test_an_fp8_model_comes_in_and_goes_out_as_bfloat16(tmp_path, capsys):
    model = models.make("qwen3_moe", torch.bfloat16, hidden_size=160, num_hidden_layers=1)
    folder = models.save(model, tmp_path / "in")
    tensors, want = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        want[name] = tensor
        if tensor.dim() == 2 and "proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"], want[name] = to_fp8(tensor.float())
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | FP8))
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "ours")]) == 0
    assert "28 tensors of FP8 read as bfloat16" in capsys.readouterr().out
    assert main(["convert", "--to-hf", str(tmp_path / "ours"), str(tmp_path / "out")]) == 0
    got = models.tensors(tmp_path / "out")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == torch.bfloat16 for name, tensor in want.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    "tensors, config, reason",
    [
        ({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, FP8, "w is e4m3 without w_scale_inv"),
        (
            {"w": torch.zeros(130, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.zeros(1, 1)},
            FP8,
            r"w \(130, 4\) has scales \(1, 1\), blocks of \(128, 128\) make \(2, 1\)",
        ),
        ({"w": torch.zeros(4, dtype=torch.uint8)}, MXFP4, "w is U8"),
        (
            {
                "w_blocks": torch.zeros(2, 3, 1, 8, dtype=torch.uint8),
                "w_scales": torch.zeros(2, 3, 1, dtype=torch.uint8),
            },
            MXFP4,
            "is not MXFP4",
        ),
        ({"w": torch.zeros(4)}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by gptq"),
        ({"w": torch.zeros(4)}, {"quantization_config": "fp8"}, "quantization_config = 'fp8': write an object"),
        ({"w": torch.zeros(4)}, {"quantization_config": [1]}, r"quantization_config = \[1\]: write an object"),
        *(
            ({"w": torch.zeros(4)}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": sizes}}, "fp8")
            for sizes in ([0, 0], ["128", "128"], [128, None], [-128, 128])
        ),
        (
            {"w": torch.zeros(4)},
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            r"quantised by fp8 \(e4m3, blocks None\)",
        ),
    ],
)
def test_other_kinds_are_refused(tmp_path, tensors, config, reason):
    with pytest.raises(ConfigError, match=reason):
        weights(tmp_path, tensors, config)


def test_packed_integers_are_refused_before_their_files_are_opened(tmp_path, capsys):
    """As Kimi-K2-Thinking is published."""
    folder = models.save(models.make("deepseek_v3"), tmp_path / "in")
    weights = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": weights}
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2", "quantization_config": packed}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.layers.0.weight_packed": torch.zeros(4, dtype=torch.int32)}, folder / "model.safetensors")
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "is quantised by compressed-tensors (pack-quantized): supported are fp8" in error and "I32" not in error
    assert "use the unquantised model, or make one: from_pretrained of transformers with dequantize = True" in error
    assert main(["convert", "--describe", str(folder)]) == 0


def test_scales_without_weights_are_reported(tmp_path, capsys):
    folder = models.save(models.make("mixtral"), tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file(tensors | {name: torch.ones(1, 1)}, folder / "model.safetensors")
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "out")]) == 2
    assert f"{name}: not part of this model" in capsys.readouterr().err
