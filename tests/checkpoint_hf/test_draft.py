"""Multi-token prediction drafts what a server drafts from the exported files: a transcription of vLLM's module for
DeepSeek-V3, whose tensors are read by their published names."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint import folders
from tests.checkpoint_hf import models, ours
from tests.checkpoint_hf.test_convert import convert
from titanmoe.config.schema import Config, Model
from titanmoe.models.transformer import Transformer
from titanmoe.tokens import Tokens

IDS = models.ids(samples=2, length=12)
LAYERS = 3


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def swiglu(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def turned(x_HSh: Tensor, position_S: Tensor, theta: float) -> Tensor:
    """Pairs are neighbours, as DeepSeek-V3 stores them."""
    h = x_HSh.shape[-1]
    angle = position_S[:, None] * theta ** (-torch.arange(0, h, 2, dtype=x_HSh.dtype) / h)
    pairs = torch.view_as_complex(x_HSh.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def decoder_layer(x_SD: Tensor, position_S: Tensor, tensors: dict[str, Tensor], config: dict) -> Tensor:
    """Latent attention without latents of queries, and experts without groups; tensors: by their names in a layer."""
    heads, nope, rope = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    eps, theta, latent = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"], config["kv_lora_rank"]

    def by_head(x_SD: Tensor, name: str) -> Tensor:
        return (x_SD @ tensors[f"self_attn.{name}.weight"].T).unflatten(-1, (heads, -1)).transpose(0, 1)

    y_SD = norm(x_SD, tensors["input_layernorm.weight"], eps)
    q_HSh, both = by_head(y_SD, "q_proj"), y_SD @ tensors["self_attn.kv_a_proj_with_mqa.weight"].T
    kv_HSh = by_head(norm(both[:, :latent], tensors["self_attn.kv_a_layernorm.weight"], eps), "kv_b_proj")
    q_HSh = torch.cat((q_HSh[..., :nope], turned(q_HSh[..., nope:], position_S, theta)), -1)
    k_rope_HSh = turned(both[None, :, latent:], position_S, theta).expand(heads, -1, -1)
    k_HSh = torch.cat((kv_HSh[..., :nope], k_rope_HSh), -1)
    later = torch.ones(len(x_SD), len(x_SD), dtype=torch.bool).triu(1)
    scores = (q_HSh @ k_HSh.transpose(1, 2) / (nope + rope) ** 0.5).masked_fill(later, -torch.inf)
    seen_SD = (scores.softmax(-1) @ kv_HSh[..., nope:]).transpose(0, 1).flatten(1)
    x_SD = x_SD + seen_SD @ tensors["self_attn.o_proj.weight"].T

    y_SD = norm(x_SD, tensors["post_attention_layernorm.weight"], eps)
    scores_SE = (y_SD @ tensors["mlp.gate.weight"].T).sigmoid()
    chosen_SK = (scores_SE + tensors["mlp.gate.e_score_correction_bias"]).topk(config["num_experts_per_tok"]).indices
    out_SD = swiglu(y_SD, tensors, "mlp.shared_experts")
    for s, chosen in enumerate(chosen_SK.tolist()):
        for e in chosen:
            weight = config["routed_scaling_factor"] * scores_SE[s, e] / scores_SE[s, chosen].sum()
            out_SD[s] += weight * swiglu(y_SD[s], tensors, f"mlp.experts.{e}")
    return x_SD + out_SD


def draft(
    following_S: Tensor, position_S: Tensor, final_SD: Tensor, tensors: dict[str, Tensor], config: dict
) -> Tensor:
    """Logits of the token after the following one. final_SD: what the model's final norm gives to its head."""
    own = {n.removeprefix(f"model.layers.{LAYERS}."): t for n, t in tensors.items() if f"layers.{LAYERS}." in n}
    eps = config["rms_norm_eps"]
    seen_SD = own["embed_tokens.weight"][following_S]
    seen_SD = torch.where(position_S[:, None] == 0, 0, seen_SD)  # the first position of a prompt has none
    both = torch.cat((norm(seen_SD, own["enorm.weight"], eps), norm(final_SD, own["hnorm.weight"], eps)), -1)
    x_SD = decoder_layer(both @ own["eh_proj.weight"].T, position_S, own, config)
    return norm(x_SD, own["shared_head.norm.weight"], eps) @ own["shared_head.head.weight"].T


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported, as `ours`, and exported again, as `out`."""
    at, options = tmp_path_factory.mktemp("draft"), dict(q_lora_rank=None, n_group=1, topk_group=1)
    plain = models.make("deepseek_v3", torch.bfloat16, rope_parameters=dict(rope_theta=1e4), **options)
    models.add_mtp(models.save(plain, at / "plain"), at / "in", LAYERS)
    assert convert("--from-hf", at / "in", at / "ours") == 0
    assert convert("--to-hf", at / "ours", at / "out") == 0
    return at


def drafted(saved: ours.Saved, model: Model) -> tuple[Tensor, Tensor]:
    """In training: what the final norm gives to the head, and the logits of multi-token prediction."""
    part = Transformer(Config(model=model), 1, torch.float64)
    ours.load(part, saved)
    index_T, (B, S), following_BS = torch.arange(IDS.numel()), IDS.shape, IDS.roll(-1, 1)
    places = torch.arange(S).expand(B, S), index_T, index_T // S, torch.ones(B * S, dtype=torch.bool), torch.tensor(0)
    outputs: list[Tensor] = []
    for module in (part.head.norm, part.mtp[0]):
        module.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    for moe in part.moe_layers().values():
        moe.begin_step(1, torch.tensor(float(B * S)), B)
    part(IDS, Tokens(*places, next_BS=following_BS, later_BS=following_BS), following_BS)
    final_BSD, hidden_BSD = outputs if model.mtp_after_norm else outputs[::-1]
    return final_BSD, hidden_BSD @ part.head.weight.detach().T


def test_a_model_that_was_imported_drafts_what_its_server_drafts(folder):
    """vLLM leaves the embedding out at position 0. So positions begin at 1 here, which RoPE does not show."""
    saved = ours.Saved(str(folder / "ours"))
    assert saved.model.mtp_after_norm
    final_BSD, logits_BSV = drafted(saved, saved.model)
    tensors = {name: tensor.double() for name, tensor in models.tensors(folder / "out").items()}
    config = json.loads((folder / "out" / "config.json").read_text())
    position_S = torch.arange(1, IDS.shape[1] + 1)
    served = [
        draft(ids_S.roll(-1), position_S, final_SD, tensors, config)
        for ids_S, final_SD in zip(IDS, final_BSD, strict=True)
    ]
    assert logits_BSV.std() > 0.1
    torch.testing.assert_close(logits_BSV, torch.stack(served), rtol=0, atol=1e-11)

    same_BSD, other_BSV = drafted(saved, replace(saved.model, mtp_after_norm=False))
    assert torch.equal(same_BSD, final_BSD) and (other_BSV - logits_BSV).abs().max() > 0.01


def test_an_export_of_what_was_trained_before_the_norm_says_so(folder, tmp_path, capsys):
    assert convert("--to-hf", folder / "ours", tmp_path / "after") == 0
    assert "before the final norm" not in capsys.readouterr().out
    shutil.copytree(folder / "ours", tmp_path / "ours")
    record = folders.manifest_of(tmp_path / "ours")
    record["record"]["config"]["model"]["mtp_after_norm"] = False
    folders.rewrite(tmp_path / "ours", **record)
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "before") == 0
    assert "was trained on states before the final norm, and Megatron, vLLM and another" in capsys.readouterr().out
