"""The built model has the parameters that were counted, under the names checkpoints rely on; and the loss is a sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.families import has_attention_only
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config, Model
from titanmoe.models.count import parameters
from titanmoe.models.families import mixers, names, preset
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import cross_entropy
from titanmoe.tokens import IGNORE

SIZES = [(family, size) for family, sizes in names().items() for size in sizes]
LATENT = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 10}
ODD = {
    "tied": {"tie_embeddings": True},
    "dense": {"num_dense_layers": 1, "moe_every": 2, "dense_hidden": 24, "num_layers": 5},
    "everything": {"qkv_bias": True, "qk_norm": "head", "shared_hidden": 8, "shared_gate": True, "num_kv_heads": 2},
    "norms over all heads": {"qk_norm": "full", "num_kv_heads": 2},
    "multi-token": {"mtp_depth": 1, "tie_embeddings": True},
    "multi-token after a dense layer": {"mtp_depth": 1, "moe_every": 2, "num_layers": 3, "dense_hidden": 24},
    "latent": {"kv_lora_rank": 40, "q_lora_rank": 24} | LATENT,
    "latent without a query latent": {"kv_lora_rank": 40} | LATENT,
    "ungated": {"shared_hidden": 8, "shared_gate": False},
}


def build(model: Model, **stage: object) -> Transformer:
    with torch.device("meta"):
        return Transformer(Config(model=model), 1, torch.float32, **stage)


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter of the published layout."""
    D, h = model.dim, model.head_dim
    query, key = model.num_heads * h, model.num_kv_heads * h
    out = {"embed.weight": (model.vocab_size, D), "head.norm.weight": (D,)}
    if not model.tie_embeddings:
        out["head.weight"] = (model.vocab_size, D)
    for i in range(model.num_layers + model.mtp_depth):
        layer = {"attention_norm.weight": (D,), "ffn_norm.weight": (D,)}
        if model.kv_lora_rank:
            latent, value = model.kv_lora_rank, model.num_heads * model.v_head_dim
            layer["attention.wkv_a.weight"] = (latent + model.qk_rope_head_dim, D)
            layer["attention.kv_norm.weight"] = (latent,)
            layer["attention.wkv_b.weight"] = (model.num_heads * model.qk_nope_head_dim + value, latent)
            layer["attention.wo.weight"] = (D, value)
            if rank := model.q_lora_rank:
                layer |= {"attention.wq_a.weight": (rank, D), "attention.q_norm.weight": (rank,)}
                layer["attention.wq_b.weight"] = (query, rank)
            else:
                layer["attention.wq.weight"] = (query, D)
        else:
            layer["attention.wo.weight"] = (D, query)
            for w, width in (("wq", query), ("wk", key), ("wv", key)):
                layer[f"attention.{w}.weight"] = (width, D)
                if model.qkv_bias:
                    layer[f"attention.{w}.bias"] = (width,)
        if model.out_bias:
            layer["attention.wo.bias"] = (D,)
        if model.attention_sinks:
            layer["attention.sinks"] = (model.num_heads,)
        if model.qk_norm != "none":
            q, k = {"head": (h, h), "full": (query, key)}[model.qk_norm]
            layer |= {"attention.q_norm.weight": (q,), "attention.k_norm.weight": (k,)}
        if has_experts(model, i):
            E, width = model.num_experts, model.expert_hidden
            layer["moe.router.weight"] = (E, D)
            layer |= {f"moe.experts.{w}": (E, width, D) for w in ("w1", "w3")} | {"moe.experts.w2": (E, D, width)}
            if model.router_bias:
                layer["moe.router.bias"] = (E,)
            if model.expert_linear_bias:
                layer |= {f"moe.experts.{w}_bias": (E, width) for w in ("w1", "w3")} | {"moe.experts.w2_bias": (E, D)}
            if model.shared_hidden:
                layer |= {f"moe.shared.{w}.weight": (model.shared_hidden, D) for w in ("w1", "w3")}
                layer["moe.shared.w2.weight"] = (D, model.shared_hidden)
                if model.shared_gate:
                    layer["moe.shared.gate.weight"] = (1, D)
        else:
            layer |= {f"ffn.{w}.weight": (model.dense_hidden, D) for w in ("w1", "w3")}
            layer["ffn.w2.weight"] = (D, model.dense_hidden)
        block = f"layers.{i}" if i < model.num_layers else "mtp.0.block"
        out |= {f"{block}.{name}": shape for name, shape in layer.items()}
    if model.mtp_depth:
        out |= {f"mtp.0.{name}.weight": (D,) for name in ("hidden_norm", "embed_norm", "norm")}
        out["mtp.0.project.weight"] = (D, 2 * D)
    return out


def check(model: Model) -> None:
    built = build(model)
    assert sum(p.numel() for p in built.parameters()) == parameters(model).total
    assert {name: tuple(p.shape) for name, p in built.named_parameters()} == shapes(model)
    saved = set(built.state_dict()) - set(dict(built.named_parameters()))
    biases = {f"layers.{i}.moe.router.expert_bias" for i in range(model.num_layers) if has_experts(model, i)}
    if model.mtp_depth and has_experts(model, model.num_layers):
        biases.add("mtp.0.block.moe.router.expert_bias")
    assert saved == biases | ({"head.weight"} if model.tie_embeddings else set())


@pytest.mark.parametrize("family, size", [(family, size) for family, size in SIZES if has_attention_only(family)])
def test_every_size_is_built_as_counted(family: str, size: str) -> None:
    check(Model(**preset(family, size)))


@pytest.mark.parametrize("family, size", SIZES)
def test_mixers_are_built_as_their_specs_say(family: str, size: str) -> None:
    model = Model(**preset(family, size))
    built = build(model)
    assert sum(p.numel() for p in built.parameters()) == parameters(model).total
    for spec, block in zip(mixers(model), built.blocks().values(), strict=True):
        stated = {name: shape for name, (shape, _) in spec.parameters(model).items()}
        assert {name: tuple(p.shape) for name, p in block.attention.named_parameters()} == stated


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD)
def test_every_switch_is_built_as_counted(changes: dict[str, object]) -> None:
    check(Model(**changes))


def test_stages_share_the_parameters_out_under_the_same_names() -> None:
    model = Model(num_layers=4, mtp_depth=1)
    parts = [build(model, layers=range(1), last=False), build(model, layers=range(1, 3), first=False, last=False)]
    parts.append(build(model, layers=range(3, 4), first=False))
    together = [(name, tuple(p.shape)) for part in parts for name, p in part.named_parameters()]
    copy = {"embed_copy.weight": (model.vocab_size, model.dim)}
    assert len(together) == len(dict(together)) and dict(together) == shapes(model) | copy
    assert sorted(i for part in parts for i in part.moe_layers()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy_is_torchs(dtype: torch.dtype, ignored: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TV = (4 * torch.randn(20, 11, generator=generator)).to(dtype).requires_grad_()
    label_T = torch.randint(11, (20,), generator=generator)
    label_T[{"none": slice(0), "some": slice(None, None, 3), "all": slice(None)}[ignored]] = IGNORE
    wide = torch.promote_types(dtype, torch.float32)
    want = F.cross_entropy(logits_TV.to(wide), label_T, reduction="none", ignore_index=-100)
    weight_T = torch.linspace(1, 5, 20, dtype=wide)
    (want_grad,) = torch.autograd.grad(want, logits_TV, weight_T)
    got = cross_entropy(logits_TV, label_T, NO_GROUP)[0]
    assert got.dtype == wide
    torch.testing.assert_close(got, want)
    (got_grad,) = torch.autograd.grad(got, logits_TV, weight_T)
    torch.testing.assert_close(got_grad, want_grad)
    if ignored == "all":
        assert not got_grad.any()


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    logits_TV = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    got = cross_entropy(logits_TV, torch.tensor([1, 0]), NO_GROUP)[0].sum()
    got.backward()
    assert float(got.detach()) == pytest.approx(2e4 + torch.tensor(3.0).log().item())
    assert logits_TV.grad.isfinite().all()
