"""In float64: logits and gradients are those of transformers, whose casts to float32 are left out."""

from __future__ import annotations

import importlib
import json
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.checkpoint_hf import models, ours
from titanmoe.checkpoint.hf.config_json import describe_folder
from titanmoe.checkpoint.hf.huggingface_source import open_hf
from titanmoe.config.schema import Config
from titanmoe.models.transformer import Transformer
from titanmoe.tokens import Tokens

IDS = models.ids(samples=2, length=24)
KIMI = dict(n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, routed_scaling_factor=2.827)
KIMI |= dict(
    rope_parameters=dict(
        rope_type="yarn", rope_theta=5e4, factor=32.0, original_max_position_embeddings=16, beta_fast=1.0,
        beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    )
)  # fmt: skip
CASES = {
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe": ("glm4_moe", {}),
    "kimi_k2": ("deepseek_v3", KIMI),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe", {}),
    "minimax_m2": ("minimax_m2", {}),
}
"""By model_type, transformers' class and what config.json changes. transformers has no kimi_k2: Moonshot's own code is
DeepSeek-V3's."""


class Wide(types.ModuleType):
    """torch, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.mark.parametrize("model_type", CASES)
def test_logits_and_gradients(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = CASES[model_type]
    for module in (f"{name}.modeling_{name}", None):
        path = f"transformers.models.{module}" if module else "transformers.modeling_rope_utils"
        monkeypatch.setattr(importlib.import_module(path), "torch", Wide("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    options = changes | {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = models.make(name, torch.float64, **options)
    file = models.save(theirs, tmp_path / "in") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    source = open_hf(file.parent, describe_folder(file.parent).model)
    assert source.model.family == model_type.removesuffix("_text")
    source.check()

    part = Transformer(Config(model=source.model), 1, torch.float64)
    ours.load(part, source)
    index_T = torch.arange(IDS.numel())
    position_BS = torch.arange(IDS.shape[1]).expand(IDS.shape)
    everyone = torch.ones(IDS.numel(), dtype=torch.bool)
    got = part(IDS, Tokens(position_BS, index_T, index_T // IDS.shape[1], everyone, torch.tensor(0)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        want = theirs(IDS).logits
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)

    labels = IDS.roll(-1, 1).flatten()
    for logits in (got, want):
        F.cross_entropy(logits.flatten(0, 1), labels).backward()
    gradients = {name: parameter.grad for name, parameter in part.named_parameters()}
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    compared = models.tensors(models.save(theirs, tmp_path / "gradients"))
    trained = [name for name in compared if not name.endswith("correction_bias")]
    unused = [name for name in trained if not compared[name].any()]
    assert all(".experts." in name for name in unused) and len(unused) < len(trained) / 3
    read = lambda name, offset, shape: gradients[name][tuple(slice(o, o + n) for o, n in zip(offset, shape))]  # noqa: B905, E731
    for name in trained:
        shape = tuple(compared[name].shape)
        written = source.map.write(name, (0,) * len(shape), shape, torch.float64, read)
        torch.testing.assert_close(written, compared[name], rtol=1e-12, atol=1e-11)
