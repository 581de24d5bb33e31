"""Names in exported folders against vLLM's mapping of names, transcribed as facts from its public sources.

Sources: load_weights of vllm/model_executor/models/{qwen3_moe,deepseek_v2,minimax_m2}.py at commits 002456df, 002d6073
and 01d99586; w13 and w2 of vllm/lora/layers/fused_moe.py at 0002540c; _stack_moe_lora_weights of
vllm/lora/model_manager.py at 01533aa8. vLLM itself is not run.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.checkpoint_hf import adapted, models
from tests.checkpoint_hf.test_convert import convert

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""vLLM's parameter for the matrices that it fuses outside experts; others keep their names."""
LATENT = {"q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj"}
PROJECTIONS = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
MINIMAX = {"w1": "w13", "w3": "w13", "w2": "w2"}
EXPERTS = {
    "qwen3_moe": ("mlp", PROJECTIONS),
    "deepseek_v3": ("mlp", PROJECTIONS),
    "minimax_m2": ("block_sparse_moe", MINIMAX),
}
"""The module of a layer's experts in a checkpoint, and vLLM's parameter w13 or w2 for each expert's matrices."""


def vllm_parameter(family: str, name: str) -> str:
    """Return vLLM's parameter (within a layer) for a tensor of a layer; "" if nothing there takes it."""
    module, matrices = EXPERTS[family]
    if expert := re.fullmatch(rf"{module}\.experts\.\d+\.(\w+)\.weight", name):
        return f"experts.{matrices[expert[1]]}_weight" if expert[1] in matrices else ""
    if ".experts." in name:
        return ""
    path, _, leaf = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    return f"{parent}.{({**FUSED, **LATENT} if family == 'deepseek_v3' else FUSED).get(last, last)}.{leaf}"


@pytest.mark.parametrize("family", EXPERTS)
def test_every_expert_fills_w13_twice_and_w2_once(tmp_path, family):
    folder = models.save(models.make(family), tmp_path / "in")
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    names = [m[1] for name in models.tensors(tmp_path / "out") if (m := re.fullmatch(r"model\.layers\.1\.(.*)", name))]
    taken = [vllm_parameter(family, name) for name in names]
    assert all(taken), [name for name, parameter in zip(names, taken, strict=True) if not parameter]
    experts = len({m[1] for name in names if (m := re.search(r"\.experts\.(\d+)\.", name))})
    assert taken.count("experts.w13_weight") == 2 * experts and taken.count("experts.w2_weight") == experts > 1
    fused = [name for name in taken if "fused_qkv_a_proj" in name or "qkv_proj.weight" in name]
    assert len(fused) == (2 if family == "deepseek_v3" else 3)


def test_stacked_adapters_are_cut_into_experts_as_vllm_does(tmp_path):
    """A is (experts, rank, inputs), B (outputs, rank, experts); gate and up rows of gpt-oss alternate."""
    folder = models.save(models.make("gpt_oss"), tmp_path / "in")
    ours = adapted.write(tmp_path / "ours", folder)
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    tensors = models.tensors(tmp_path / "peft")
    block, rank = "layers.0.moe.experts", adapted.LORA.experts_rank
    experts = len(ours[f"{block}.w2_lora_A"])
    outer = "base_model.model.model.layers.0.mlp.experts"
    for module, rows, matrices in (
        (outer, (slice(None),), ("w2",)),
        (f"{outer}.base_layer", (slice(0, None, 2), slice(1, None, 2)), ("w1", "w3")),
    ):
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        down = a.reshape(experts, -1, a.shape[-1])
        up = b.reshape(len(b), -1, experts).permute(2, 0, 1)
        assert down.shape[1] == rank * len(matrices)
        for part, matrix in zip(rows, matrices, strict=True):
            want = ours[f"{block}.{matrix}_lora_B"] @ ours[f"{block}.{matrix}_lora_A"]
            torch.testing.assert_close((up @ down)[:, part], want)


def test_adapters_of_single_experts_have_the_names_that_vllm_packs(tmp_path):
    folder = models.save(models.make("qwen3_moe"), tmp_path / "in")
    adapted.write(tmp_path / "ours", folder)
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    pattern = r"base_model\.model\.model\.layers\.\d+\.(.*)\.lora_[AB]\.weight"
    modules = [re.fullmatch(pattern, name)[1] for name in models.tensors(tmp_path / "peft")]
    taken = {vllm_parameter("qwen3_moe", f"{module}.weight") for module in modules}
    attention = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
    assert taken == attention | {"experts.w13_weight", "experts.w2_weight"}
