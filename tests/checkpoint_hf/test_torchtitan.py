"""`titanmoe convert --from-dcp`: what TorchTitan's trainer saves, from modules with its names, saved by two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests import world
from tests.checkpoint_hf import models, ours
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.cli import main

TITAN = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.experts.gate_proj.weight": "moe.routed_experts.inner_experts.w1_EFD",
    "mlp.experts.up_proj.weight": "moe.routed_experts.inner_experts.w3_EFD",
    "mlp.experts.down_proj.weight": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
}
"""TorchTitan's from_hf_map, in a block without its beginning."""
KEYS = {
    "qwen3_moe": {
        "self_attn.q_proj.weight": "attention.qkv_linear.wq.weight",
        "self_attn.k_proj.weight": "attention.qkv_linear.wk.weight",
        "self_attn.v_proj.weight": "attention.qkv_linear.wv.weight",
        "self_attn.q_norm.weight": "attention.q_norm.weight",
        "self_attn.k_norm.weight": "attention.k_norm.weight",
    },
    "deepseek_v3": {
        "self_attn.q_proj.weight": "attention.wq.weight",
        "self_attn.q_a_proj.weight": "attention.wq_a.weight",
        "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
        "self_attn.q_b_proj.weight": "attention.wq_b.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
        "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
        "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
    },
    "qwen3_5_moe": {
        "self_attn.q_proj.weight": "attn.wq.weight",
        "self_attn.k_proj.weight": "attn.wk.weight",
        "self_attn.v_proj.weight": "attn.wv.weight",
        "self_attn.o_proj.weight": "attn.wo.weight",
        "self_attn.q_norm.weight": "attn.q_norm.weight",
        "self_attn.k_norm.weight": "attn.k_norm.weight",
        "linear_attn.in_proj_z.weight": "attn.in_proj_z.weight",
        "linear_attn.in_proj_a.weight": "attn.in_proj_a.weight",
        "linear_attn.in_proj_b.weight": "attn.in_proj_b.weight",
        "linear_attn.A_log": "attn.A_log",
        "linear_attn.dt_bias": "attn.dt_bias",
        "linear_attn.norm.weight": "attn.norm.weight",
        "linear_attn.out_proj.weight": "attn.out_proj.weight",
        "mlp.shared_expert.gate_proj.weight": "moe.shared_experts.w1.weight",
        "mlp.shared_expert.up_proj.weight": "moe.shared_experts.w3.weight",
        "mlp.shared_expert.down_proj.weight": "moe.shared_experts.w2.weight",
        "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
        "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EDF",
    },
}
KEYS["gpt_oss"] = KEYS["qwen3_moe"] | {
    **{f"self_attn.{x}_proj.bias": f"attention.qkv_linear.w{x}.bias" for x in "qkv"},
    "self_attn.o_proj.bias": "attention.wo.bias",
    "self_attn.sinks": "attention.sinks",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
    "mlp.experts.gate_up_proj": "moe.routed_experts.inner_experts.mlp1_weight_EGD",
    "mlp.experts.gate_up_proj_bias": "moe.routed_experts.inner_experts.mlp1_bias_EG",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.mlp2_weight_EDF",
    "mlp.experts.down_proj_bias": "moe.routed_experts.inner_experts.mlp2_bias_ED",
}
FUSED = {
    "linear_attn.in_proj_qkv.weight": ("attn.in_proj_q.weight", "attn.in_proj_k.weight", "attn.in_proj_v.weight"),
    "linear_attn.conv1d.weight": ("attn.conv_q.weight", "attn.conv_k.weight", "attn.conv_v.weight"),
}
RELEASED = {"lm_head.": "output.", ".qkv_linear.": ".", ".routed_experts.inner_experts.": ".experts.", "_EFD": ""}
RELEASED |= {"_EDF": "", "_EGD": "", "_EG": "", "_ED": "", "expert_bias_E": "expert_bias"}
"""The names that differ in releases 0.2 of TorchTitan, by those of later ones."""


def titan(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model of transformers under TorchTitan's names."""
    keys, out, experts = TITAN | KEYS[name], {}, {}
    for key, tensor in tensors.items():
        begin, block = re.fullmatch(r"(?:model\.(layers\.\d+\.))?(.*)", key).groups()
        if numbered := re.match(r"mlp\.experts\.(\d+)\.", block):
            experts.setdefault((begin, block.replace(f".{numbered[1]}.", ".")), []).append(tensor)
        elif name == "gpt_oss" and re.fullmatch(r"mlp\.experts\.(gate_up|down)_proj", block):
            out[begin + keys[block]] = tensor.transpose(1, 2).contiguous()
        elif block == "mlp.experts.gate_up_proj":
            for end, part in zip(("w1_EFD", "w3_EFD"), tensor.chunk(2, 1), strict=True):
                out[f"{begin}moe.routed_experts.inner_experts.{end}"] = part
        elif block in FUSED:
            key_width, total = 4 * 6, len(tensor)
            parts = tensor.split([key_width, key_width, total - 2 * key_width])
            out |= {begin + theirs: part for theirs, part in zip(FUSED[block], parts, strict=True)}
        else:
            out[(begin or "") + keys[block]] = tensor
    return out | {begin + keys[block]: torch.stack(parts) for (begin, block), parts in experts.items()}


def module(tensors: dict[str, Any]) -> nn.Module:
    """Nested modules whose state dict has those names."""
    out = nn.Module()
    for name, tensor in tensors.items():
        at, (*outer, last) = out, name.split(".")
        for part in outer:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        if "expert_bias" in last:
            at.register_buffer(last, tensor)
        else:
            at.register_parameter(last, nn.Parameter(tensor))
    return out


def save_sharded(tensors: dict[str, Tensor], folder: str) -> None:
    """On ranks: as FSDP and expert parallelism divide it, with what else a trainer saves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    placed = {
        name: distribute_tensor(
            tensor, mesh, [Replicate() if tensor.dim() < 2 else Shard("_EDF" in name and name[7] == "1")]
        )
        for name, tensor in tensors.items()
    }
    state = module(placed).state_dict()
    assert state.keys() == tensors.keys()
    moments = {f"state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in state.items()}
    others = {"optimizer": moments | {"param_groups.norm.weight.lr": 0.1}, "train_state": {"step": torch.tensor(3)}}
    dcp.save(state | others, checkpoint_id=folder)


def convert(*words: Any) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(name: str, tensors: dict[str, Tensor] | None = None, **changes: Any) -> tuple[Any, Path, dict]:
        """A model, the folder where transformers saved it, and its tensors under TorchTitan's names."""
        model = models.make(name, **changes)
        folder = models.save(model, tmp_path / "hf")
        return model, folder, titan(name, models.tensors(folder))

    return make


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("released", [False, True], ids=["b5bcd76", "0.2"])
def test_it_is_the_model_that_transformers_saved(made, tmp_path, capsys, name, released):
    model, hf, tensors = made(name)
    if released:
        for new, old in RELEASED.items():
            tensors = {key.replace(new, old): tensor for key, tensor in tensors.items()}
    world.run(2, save_sharded, tensors, str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert convert("--from-hf", hf, tmp_path / "first") == 0
    capsys.readouterr()
    assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf) == 0
    assert "they are not the model's (optimizer, train_state)" in (said := capsys.readouterr().out)
    assert f'load = "{tmp_path / "ours"}"' in said
    got, want = Checkpoint(tmp_path / "ours"), Checkpoint(tmp_path / "first")
    assert got.tensors == want.tensors and got.record["config"] == want.record["config"]
    assert str(tmp_path / "dcp") in got.record["made"]
    for each in want.tensors:
        assert torch.equal(got.read(each), want.read(each)), each
    logits = ours.whole(world.run(1, ours.logits, str(tmp_path / "ours"), models.ids(), {}, {}), models.ids())
    models.close(logits, models.logits(model, models.ids()), models.enlarged(name))
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    back = models.tensors(tmp_path / "out")
    assert all(torch.equal(back[each], tensor) for each, tensor in models.tensors(hf).items())


def test_biases_that_only_torchtitan_has_are_read(made, tmp_path):
    _, hf, tensors = made("qwen3_moe")
    tensors |= {f"layers.{layer}.moe.expert_bias_E": torch.arange(8.0) + layer for layer in (0, 1)}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf) == 0
    bias = Checkpoint(tmp_path / "ours").read("model.layers.1.moe.router.expert_bias")
    assert torch.equal(bias, torch.arange(8.0) + 1)


def test_a_tied_head_is_read_once(made, tmp_path, capsys):
    _, hf, tensors = made("qwen3_moe", tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["tok_embeddings.weight"]
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf) == 0
    assert "a second copy of the tied embedding" in capsys.readouterr().out
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "other", "--hf-assets", hf) == 2
    assert "head.weight: not part of this model" in capsys.readouterr().err


def test_multi_token_prediction_is_left_out_only_if_asked(made, tmp_path, capsys):
    _, hf, tensors = made("deepseek_v3")
    tensors |= {"mtp_layers.0.enorm.weight": torch.ones(32), "mtp_layers.0.moe.expert_bias_E": torch.ones(8)}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    words = "--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf
    assert convert(*words) == 2
    assert "--drop mtp leaves it out" in capsys.readouterr().err and not (tmp_path / "ours").exists()
    assert convert(*words, "--drop", "mtp") == 0
    assert "left out 2 tensors: multi-token prediction, dropped" in capsys.readouterr().out


def test_what_does_not_fit_is_named_and_nothing_is_made(made, tmp_path, capsys):
    _, hf, tensors = made("qwen3_moe")
    del tensors["layers.1.attention.wo.weight"]
    tensors["layers.0.moe.router.gate.weight"] = torch.zeros(8, 31)
    tensors["layers.0.moe.strange"] = torch.zeros(2)
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf) == 2
    said = capsys.readouterr().err
    assert "layers.1.attention.wo.weight: missing" in said and "layers.0.moe.strange: not part of this model" in said
    assert "layers.0.moe.router.weight: shape (8, 31) in the files, (8, 32) in this model" in said
    assert str(tmp_path / "dcp") in said and not (tmp_path / "ours").exists()


def test_layers_more_or_fewer_are_one_line(made, tmp_path, capsys):
    _, hf, tensors = made("qwen3_moe")
    config = json.loads((hf / "config.json").read_text()) | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    for layers in (1, 3):
        (hf / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf) == 2
        assert f"num_hidden_layers = {layers}, and the files have 2 layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda hf, folder: (hf / "config.json").unlink(), "name TorchTitan's hf_assets_path with --hf-assets"),
        (lambda hf, folder: (folder / ".metadata").unlink(), "there is no .metadata: name the folder with .metadata"),
        (lambda hf, folder: dcp.save({"a": torch.zeros(2)}, checkpoint_id=folder), "names begin as TorchTitan's "),
        (
            lambda hf, folder: dcp.save(
                {"output.x": torch.zeros(2), "lm_head.x": torch.zeros(2)}, checkpoint_id=folder
            ),
            "has both output.x and lm_head.x",
        ),
        (
            lambda hf, folder: dcp.save({"norm.weight": torch.zeros(2, dtype=torch.int64)}, checkpoint_id=folder),
            "has norm.weight of dtype torch.int64: save the tensor as one of torch.float64",
        ),
        (
            lambda hf, folder: dcp.save({"norm.weight": torch.zeros(2).to(torch.float8_e4m3fn)}, checkpoint_id=folder),
            "is e4m3 without",
        ),
        (
            lambda hf, folder: models.save(models.make("olmoe"), hf),
            "model_type 'olmoe', and TorchTitan's checkpoints are read for deepseek_v3, kimi_k2, qwen3_moe",
        ),
    ],
    ids=["config", "metadata", "names", "both", "integers", "fp8", "family"],
)
def test_other_folders_are_refused_by_what_they_are(made, tmp_path, capsys, spoil, words):
    _, hf, tensors = made("qwen3_moe")
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    spoil(hf, tmp_path / "dcp")
    assert convert("--from-dcp", tmp_path / "dcp", tmp_path / "ours", "--hf-assets", hf) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "ours").exists()


def test_its_option_belongs_to_it(tmp_path, capsys):
    assert convert("--from-hf", tmp_path, tmp_path / "out", "--hf-assets", tmp_path) == 2
    assert "--hf-assets is an option of --from-dcp" in capsys.readouterr().err
