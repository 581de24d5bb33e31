"""The plain model that every mapping is compared with: one process, one autograd graph for a whole optimizer step.

It shares no code with the model, router, dispatchers, sharding or optimizer under test: only the configuration's fields
and the counted random numbers. Nothing here is fast, fused or clever. Parameter names are the model's own.

G samples of the step in the order of their global number, B of a batch, S positions, T = G * S tokens (a token's row in
(T, ...) is its global index in the step), V vocabulary, D model, H heads, h head width, v that of values, R latent
width, r its rotary part, F hidden, E experts, e those of a group, K choices per token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support import reference_linear, reference_muon
from titanmoe.config.schema import Config, LRSchedule, Model
from titanmoe.ops import counter_rng

IGNORE = -100
KEYS = ("aux_loss_sequence", "aux_loss", "aux_loss_global", "z_loss")
"""Of [moe]: the coefficients of balance losses."""
Term = Callable[["Model", "Tokens", "Routing"], Tensor]
FURTHER: dict[str, Term] = {}
"""Terms of balance losses that are not here, without coefficients, by the name of a recipe: tests add them."""
Slices = int | Sequence[int]
"""How a sequence is split over ranks: into that many contiguous pieces, or by the owner of each position."""


class Batch(NamedTuple):
    """A microbatch of one data rank. Anything with these fields will do."""

    tokens_BS: Tensor
    labels_BS: Tensor
    valid_BS: Tensor
    document_BS: Tensor | None = None
    position_BS: Tensor | None = None


@dataclass
class StepResult:
    loss: float
    """Cross-entropy per token with a label; no balance terms."""
    mtp: float
    """Cross-entropy of the token after next, divided by the same number; 0 where it is not predicted."""
    total: float
    """What is differentiated: loss and balance terms with their coefficients."""
    aux: dict[str, float]
    """The terms of balance losses without their coefficients, summed over layers."""
    grads: dict[str, Tensor]
    """Before clipping."""
    grad_norm: float
    counts: dict[int, Tensor]
    """By layer: tokens that chose each expert, before dropping."""
    chosen: dict[int, Tensor]
    """By layer: experts of each token (T, K)."""
    imbalance: dict[int, float]
    """By layer: the largest count, of the mean."""
    entropy: dict[int, float]
    """By layer: entropy of a valid token's shares of the experts, on average."""
    dropped: dict[int, float]
    """By layer: dropped fraction of the (token, expert) pairs."""
    margin: float
    """Smallest lead of a chosen over an unchosen expert (or group) in any token and layer."""
    drop_margin: float
    """The smallest relative change of weights that makes another pair be dropped; by position: infinite."""


@dataclass
class Run:
    steps: list[StepResult]
    weights: dict[str, Tensor]
    bias: dict[str, Tensor]


# ------------------------------------------------------------------------------------- a family's own layer


class OwnLayer(NamedTuple):
    """The layer that a family has in the place of attention, as plain as everything here."""

    has: Callable[[Model, int], bool]
    """Whether a block has it, by its number."""
    shapes: Callable[[Model], dict[str, tuple[int, ...]]]
    """Of its parameters."""
    mix: Callable[[Model, dict[str, Tensor], Tensor, Tensor | None], Tensor]
    """From its parameters, the block's normed input (G, S, D) and each position's document, if there are several."""
    begin: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    """How some of its parameters begin: from uniform numbers."""


OWN_LAYERS: dict[str, OwnLayer] = {
    family: OwnLayer(
        lambda model, layer: (layer + 1) % model.full_attention_every != 0,
        reference_linear.shapes,
        reference_linear.linear_attention,
        reference_linear.BEGIN,
    )
    for family in ("qwen3_next", "qwen3_5_moe")
}
"""By family. The test that brings another layer adds it."""


def own_layer(model: Model, layer: int) -> OwnLayer | None:
    own = OWN_LAYERS.get(model.family)
    return own if own and own.has(model, min(layer, model.num_layers - 1)) else None


# ---------------------------------------------------------------------------------------------------- weights


def blocks(model: Model) -> dict[int, str]:
    """Return the names of all blocks by number: the layers, followed by that of multi-token prediction."""
    out = {i: f"layers.{i}" for i in range(model.num_layers)}
    return out | ({model.num_layers: "mtp.0.block"} if model.mtp_depth else {})


def is_moe(model: Model, layer: int) -> bool:
    if layer == model.num_layers:  # multi-token prediction's is like the last
        layer -= 1
    past_dense = layer - model.num_dense_layers
    return past_dense >= 0 and (past_dense + 1) % model.moe_every == 0


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    dim, query, key_value = model.dim, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    out: dict[str, tuple[int, ...]] = {"embed.weight": (model.vocab_size, dim)}
    for i, block in blocks(model).items():
        attention = f"{block}.attention"
        out[f"{block}.attention_norm.weight"] = (dim,)
        own = own_layer(model, i)
        if own:
            out |= {f"{attention}.{name}": shape for name, shape in own.shapes(model).items()}
        elif model.kv_lora_rank:
            out |= {f"{attention}.{name}.weight": shape for name, shape in _latent_shapes(model).items()}
        else:
            for name, width in (("wq", query), ("wk", key_value), ("wv", key_value)):
                out[f"{attention}.{name}.weight"] = (width, dim)
                if model.qkv_bias:
                    out[f"{attention}.{name}.bias"] = (width,)
            out[f"{attention}.wo.weight"] = (dim, query)
            if model.attention_gate:
                out[f"{attention}.wg.weight"] = (query, dim)
        if model.out_bias and not own:
            out[f"{attention}.wo.bias"] = (dim,)
        if model.attention_sinks and not own:
            out[f"{attention}.sinks"] = (model.num_heads,)
        if model.qk_norm != "none" and not own:
            whole = model.qk_norm == "full"
            out[f"{attention}.q_norm.weight"] = (query if whole else model.head_dim,)
            out[f"{attention}.k_norm.weight"] = (key_value if whole else model.head_dim,)
        out[f"{block}.ffn_norm.weight"] = (dim,)
        if not is_moe(model, i):
            out |= _ffn_shapes(f"{block}.ffn", dim, model.dense_hidden)
            continue
        out[f"{block}.moe.router.weight"] = (model.num_experts, dim)
        if model.router_bias:
            out[f"{block}.moe.router.bias"] = (model.num_experts,)
        out[f"{block}.moe.experts.w1"] = (model.num_experts, model.expert_hidden, dim)
        out[f"{block}.moe.experts.w2"] = (model.num_experts, dim, model.expert_hidden)
        out[f"{block}.moe.experts.w3"] = (model.num_experts, model.expert_hidden, dim)
        if model.expert_linear_bias:
            for w, width in (("w1", model.expert_hidden), ("w2", dim), ("w3", model.expert_hidden)):
                out[f"{block}.moe.experts.{w}_bias"] = (model.num_experts, width)
        if model.shared_hidden:
            out |= _ffn_shapes(f"{block}.moe.shared", dim, model.shared_hidden)
            if model.shared_gate:
                out[f"{block}.moe.shared.gate.weight"] = (1, dim)
    if model.mtp_depth:
        out |= {f"mtp.0.{name}.weight": (dim,) for name in ("hidden_norm", "embed_norm", "norm")}
        out["mtp.0.project.weight"] = (dim, 2 * dim)
    out["head.norm.weight"] = (dim,)
    if not model.tie_embeddings:
        out["head.weight"] = (model.vocab_size, dim)
    return out


def _latent_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    dim, heads, rank = model.dim, model.num_heads, model.q_lora_rank
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    out: dict[str, tuple[int, ...]] = {"wq": (query, dim)}
    if rank:
        out = {"wq_a": (rank, dim), "q_norm": (rank,), "wq_b": (query, rank)}
    return out | {
        "wkv_a": (model.kv_lora_rank + model.qk_rope_head_dim, dim),
        "kv_norm": (model.kv_lora_rank,),
        "wkv_b": (heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
        "wo": (dim, heads * model.v_head_dim),
    }


def _ffn_shapes(name: str, dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.w1.weight": (hidden, dim), f"{name}.w2.weight": (dim, hidden), f"{name}.w3.weight": (hidden, dim)}


def initial_weights(model: Model, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    weights, own = {}, OWN_LAYERS.get(model.family)
    for name, shape in shapes(model).items():
        leaf = name.removesuffix(".weight").split(".")[-1]
        if own and leaf in own.begin:
            index = torch.arange(math.prod(shape)).view(shape)
            uniform = counter_rng.uniform(counter_rng.key("weight", seed, name), index, dtype)
            weights[name] = own.begin[leaf](uniform)
        elif leaf.endswith("norm"):
            gated = leaf == "norm" and ".attention." in name  # inside a family's own layer
            weights[name] = torch.full(shape, float(gated or not model.norm_adds_one), dtype=dtype)
        elif name.endswith("bias"):
            weights[name] = torch.zeros(shape, dtype=dtype)
        else:
            std = model.init_std / math.sqrt(2 * model.num_layers) if leaf in ("wo", "w2") else model.init_std
            index = torch.arange(math.prod(shape)).view(shape)
            weights[name] = std * counter_rng.normal(counter_rng.key("weight", seed, name), index, dtype)
    return weights


def adapted(config: Config) -> dict[str, tuple[str, int]]:
    """Return by matrix that has adapters the stem of their names, and their rank; {} without adapters."""
    out = {}
    for name in shapes(config.model):
        attention = ".attention.w" in name and name.endswith(".weight")
        hidden = any(f".{part}.w{n}.weight" in name for part in ("ffn", "shared") for n in "123")
        expert = ".experts." in name and not name.endswith("_bias")
        chosen = any(fnmatchcase(name, pattern) for pattern in config.lora.targets or ["*"])
        if chosen and (attention or hidden or expert):
            rank = config.lora.rank
            if expert and config.lora.experts_rank == -1:
                rank = max(1, rank // config.model.top_k)
            elif expert:
                rank = config.lora.experts_rank
            out[name] = (f"{name}_" if expert else name.removesuffix("weight")) + "lora_", rank
    return out if config.lora.rank else {}


def initial_adapters(
    config: Config, seed: int, dtype: torch.dtype = torch.float64, b: float = 0.0
) -> dict[str, Tensor]:
    """Return initial adapters: A normal, with the variance of a uniform number of at most 1 / sqrt(inputs).

    B is 0, or `b` times normal.
    """
    out = {}
    for name, (stem, rank) in adapted(config).items():
        *experts, outputs, inputs = shapes(config.model)[name]
        sizes = {"A": (*experts, rank, inputs), "B": (*experts, outputs, rank)}
        for leaf, std in (("A", (3 * inputs) ** -0.5), ("B", b)):
            index = torch.arange(math.prod(sizes[leaf])).view(sizes[leaf])
            out[stem + leaf] = std * counter_rng.normal(counter_rng.key("weight", seed, stem + leaf), index, dtype)
    return out


class Dropping(NamedTuple):
    """A matrix W with adapters: x @ W.T is x W^T + alpha / r dropout(x) A^T B^T. Rows of x are the step's tokens."""

    w: Tensor
    a: Tensor
    scaled_b: Tensor
    key: int
    rate: float

    @property
    def T(self) -> Dropping:
        return self

    def of_expert(self, e: int) -> Dropping:
        return self._replace(w=self.w[e], a=self.a[e], scaled_b=self.scaled_b[e])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Tensor:
        x, self = args
        token, feature = torch.arange(x[..., 0].numel()).view(*x.shape[:-1], 1), torch.arange(x.shape[-1])
        bits = counter_rng.bits(self.key, token * math.ceil(x.shape[-1] / 4) + feature // 4)
        u = ((bits >> 16 * (feature % 4)) + 2**15) % 2**16 / 2**16  # of signed numbers
        rate = round(self.rate * 2**16) / 2**16
        return x @ self.w.T + (x * (u >= rate) / (1 - rate)) @ self.a.T @ self.scaled_b.T


def with_adapters(config: Config, weights: dict[str, Tensor], step_number: int) -> dict[str, Any]:
    """Return the weights with W + alpha / r B A in the place of W; with dropout what computes that product."""
    merged = {name: weight for name, weight in weights.items() if "lora_" not in name}
    for name, (stem, rank) in adapted(config).items():
        a, b = weights[stem + "A"], weights[stem + "B"]
        scaled_b, rate = config.lora.alpha / (rank**0.5 if config.lora.rslora else rank) * b, config.lora.dropout
        key = counter_rng.key("dropout", config.training.seed, step_number, name)
        merged[name] = Dropping(merged[name], a, scaled_b, key, rate) if rate else merged[name] + scaled_b @ a
    return merged


def with_whole_norms(model: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with what norms multiply by in the place of theirs. A family's own layer has its own norms."""
    own = tuple(f"{block}.attention." for i, block in blocks(model).items() if own_layer(model, i))
    adds = {n for n in weights if model.norm_adds_one and n.endswith("norm.weight") and not n.startswith(own)}
    return {name: 1 + weight if name in adds else weight for name, weight in weights.items()}


def initial_bias(model: Model) -> dict[str, Tensor]:
    return {
        f"{block}.moe.router.expert_bias": torch.zeros(model.num_experts)
        for i, block in blocks(model).items()
        if is_moe(model, i)
    }


# ------------------------------------------------------------------------------------------------ transformer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def yarn(model: Model, width: int) -> tuple[list[float], float]:
    """Return the frequency of each pair, and the factor on queries and keys (arXiv 2309.00071, eq. 17 to 22)."""
    plain = [model.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    if model.rope_scaling == "none":
        return plain, 1.0
    ends = []
    for turns in (model.rope_beta_fast, model.rope_beta_slow):
        # theta^(-2i/h) * length = turns * 2 pi, solved for i
        ends.append(width / 2 * math.log(model.rope_original_len / (2 * math.pi * turns)) / math.log(model.rope_theta))
    if model.rope_truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(0, ends[0]), min(width - 1, ends[1])
    out = []
    for i, frequency in enumerate(plain):
        share = (i - low) / (high - low if high != low else 0.001)
        share = min(1.0, max(0.0, share))
        out.append((1 - share) * frequency + share * frequency / model.rope_factor)
    grown = 0.1 * math.log(model.rope_factor)
    if model.rope_mscale and model.rope_mscale_all_dim:
        return out, (grown * model.rope_mscale + 1) / (grown * model.rope_mscale_all_dim + 1)
    return out, grown + 1


def rope(x_GSHh: Tensor, model: Model, position_GS: Tensor | None = None) -> Tensor:
    """Return x with the pair (x_i, x_{i + h/2}) of position s rotated by the angle s * its frequency.

    Under YaRN it is scaled too. h may be the first part of a head.
    """
    positions, width = x_GSHh.shape[1], model.rotary_dim or x_GSHh.shape[-1]
    wide = torch.promote_types(x_GSHh.dtype, torch.float32)
    frequencies, scale = yarn(model, width)
    frequency = torch.tensor(frequencies, dtype=wide)
    if position_GS is None:
        position_GS = torch.arange(positions)[None]
    angle = (position_GS.to(wide)[:, :, None] * frequency)[:, :, None, :]
    first, second = x_GSHh[..., :width].to(wide).chunk(2, dim=-1)
    rotated = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    turned = (torch.cat(rotated, dim=-1) * scale).to(x_GSHh.dtype)
    return torch.cat((turned, x_GSHh[..., width:]), dim=-1)


def window(model: Model, layer: int) -> int | None:
    """Return the window of a block; None for every n-th, which sees the whole sequence.

    A block after the last layer is like that.
    """
    every, layer = model.full_attention_every, min(layer, model.num_layers - 1)
    sees_all = not model.sliding_window or (every > 0 and layer % every == every - 1)
    return None if sees_all else model.sliding_window


def attention(
    model: Model,
    weights: dict[str, Tensor],
    name: str,
    x_GSD: Tensor,
    document_GS: Tensor | None = None,
    narrow: int | None = None,
    position_GS: Tensor | None = None,
) -> Tensor:
    samples, positions, _ = x_GSD.shape

    def heads(part: str) -> Tensor:
        out = x_GSD @ weights[f"{name}.{part}.weight"].T
        if model.qkv_bias:
            out = out + weights[f"{name}.{part}.bias"]
        if model.qk_norm == "full" and part != "wv":
            out = rms_norm(out, weights[f"{name}.{part[1]}_norm.weight"], model.norm_eps)
        return out.view(samples, positions, -1, model.head_dim)

    q_GSHh, k_GSHh, v_GSHh = heads("wq"), heads("wk"), heads("wv")
    if model.qk_norm == "head":
        q_GSHh = rms_norm(q_GSHh, weights[f"{name}.q_norm.weight"], model.norm_eps)
        k_GSHh = rms_norm(k_GSHh, weights[f"{name}.k_norm.weight"], model.norm_eps)
    q_GSHh, k_GSHh = rope(q_GSHh, model, position_GS), rope(k_GSHh, model, position_GS)
    of_query_head = torch.arange(model.num_heads) // (model.num_heads // model.num_kv_heads)
    k_GSHh, v_GSHh = k_GSHh[:, :, of_query_head], v_GSHh[:, :, of_query_head]

    scores = torch.einsum("gqhd,gkhd->ghqk", q_GSHh, k_GSHh) * model.head_dim**-0.5
    shares = causal_softmax(scores, document_GS, narrow, weights.get(f"{name}.sinks"))
    out = torch.einsum("ghqk,gkhd->gqhd", shares.to(v_GSHh.dtype), v_GSHh)
    out = out.reshape(samples, positions, -1)
    if model.attention_gate:
        out = out * torch.sigmoid(x_GSD @ weights[f"{name}.wg.weight"].T)
    out = out @ weights[f"{name}.wo.weight"].T
    return out + weights[f"{name}.wo.bias"] if model.out_bias else out


def latent_attention(
    model: Model,
    weights: dict[str, Tensor],
    name: str,
    x_GSD: Tensor,
    document_GS: Tensor | None = None,
    position_GS: Tensor | None = None,
) -> Tensor:
    """Return the output of latent attention (arXiv 2405.04434, eq. 9 to 19); heads attend to the latent itself."""
    heads, nope, value, rank = model.num_heads, model.qk_nope_head_dim, model.v_head_dim, model.kv_lora_rank

    def matrix(part: str) -> Tensor:
        return weights[f"{name}.{part}.weight"]

    if model.q_lora_rank:
        q_GSH = rms_norm(x_GSD @ matrix("wq_a").T, matrix("q_norm"), 1e-6) @ matrix("wq_b").T
    else:
        q_GSH = x_GSD @ matrix("wq").T
    q_GSHh = q_GSH.unflatten(2, (heads, nope + model.qk_rope_head_dim))
    down_GSR = x_GSD @ matrix("wkv_a").T
    latent_GSR = rms_norm(down_GSR[..., :rank], matrix("kv_norm"), 1e-6)
    turned_GSr = rope(down_GSR[..., None, rank:], model, position_GS)[:, :, 0]
    up_HhR = matrix("wkv_b").view(heads, nope + value, rank)

    scores = torch.einsum("gqhn,hnr,gkr->ghqk", q_GSHh[..., :nope], up_HhR[:, :nope], latent_GSR)
    turned_GSHr = rope(q_GSHh[..., nope:], model, position_GS)
    scores = scores + torch.einsum("gqhp,gkp->ghqk", turned_GSHr, turned_GSr)
    scores = scores / math.sqrt(nope + model.qk_rope_head_dim)
    if model.rope_scaling == "yarn":
        scores = scores * (0.1 * model.rope_mscale_all_dim * math.log(model.rope_factor) + 1) ** 2
    shares = causal_softmax(scores, document_GS).to(latent_GSR.dtype)
    seen_GSHR = torch.einsum("ghqk,gkr->gqhr", shares, latent_GSR)
    out_GSHv = torch.einsum("gqhr,hvr->gqhv", seen_GSHR, up_HhR[:, nope:])
    return out_GSHv.flatten(2) @ matrix("wo").T


def causal_softmax(
    scores: Tensor, document_GS: Tensor | None, narrow: int | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    """Return the weights of the keys; a sink, a logit without a value, takes its part of the total.

    A query sees the last `narrow` positions, None for all.
    """
    positions = scores.shape[-1]
    hidden = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    if narrow is not None:
        position = torch.arange(positions)
        hidden = hidden | (position[:, None] - position[None, :] >= narrow)
    if document_GS is not None:
        hidden = hidden | (document_GS[:, None, :, None] != document_GS[:, None, None, :])
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.masked_fill(hidden, -torch.inf).to(wide)
    top = scores.amax(-1, keepdim=True).detach()
    parts = (scores - top).exp()
    total = parts.sum(-1, keepdim=True)
    if sinks_H is not None:
        total = total + (sinks_H.to(wide)[:, None, None] - top).exp()
    return parts / total


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.T
    return (gate * torch.sigmoid(gate) * (x @ w3.T)) @ w2.T


def expert(model: Model, weights: dict[str, Tensor], name: str, e: int, x: Tensor) -> Tensor:
    def project(w: str, x: Tensor) -> Tensor:
        matrix = weights[f"{name}.{w}"]
        out = x @ (matrix.of_expert(e) if isinstance(matrix, Dropping) else matrix[e]).T
        return out + weights[f"{name}.{w}_bias"][e] if model.expert_linear_bias else out

    gate, up = project("w1", x), project("w3", x)
    if model.expert_activation == "swiglu":
        return project("w2", gate * torch.sigmoid(gate) * up)
    gate = torch.where(gate > 7, 7.0, gate)
    up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up))
    return project("w2", gate * torch.sigmoid(1.702 * gate) * (up + 1))


def named_swiglu(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return swiglu(x, *(weights[f"{name}.{w}.weight"] for w in ("w1", "w2", "w3")))


# ---------------------------------------------------------------------------------------------------- routing


@dataclass
class Tokens:
    """Tokens of the step by global index, and how they are grouped."""

    tokens_GS: Tensor
    labels_GS: Tensor
    valid_T: Tensor
    microbatch_T: Tensor
    data_rank_T: Tensor
    sample_T: Tensor
    position_T: Tensor
    samples_per_microbatch: int
    document_GS: Tensor | None
    place_GS: Tensor | None
    """Position of each token for RoPE, if it is not its place in the sequence."""
    extra_fields: dict[str, Tensor] = field(default_factory=dict)
    """What batches have besides, by name."""

    @staticmethod
    def of(step_batches: Sequence[Sequence[Batch]]) -> Tokens:
        tokens, labels, valid = (
            torch.cat([batch[field] for row in step_batches for batch in row]) for field in range(3)
        )
        documents = [batch.document_BS for row in step_batches for batch in row if len(batch) > 3]
        places = [batch.position_BS for row in step_batches for batch in row if len(batch) > 4]
        extra_fields = [getattr(batch, "extra_fields", {}) for row in step_batches for batch in row]
        samples, positions = tokens.shape
        where = [(m, d) for m, row in enumerate(step_batches) for d, batch in enumerate(row) for _ in batch[0]]
        microbatch, data_rank = torch.tensor(where).repeat_interleave(positions, dim=0).unbind(1)
        index = torch.arange(samples * positions)
        return Tokens(
            tokens,
            labels,
            valid.reshape(-1),
            microbatch,
            data_rank,
            index // positions,
            index % positions,
            step_batches[0][0][0].shape[0],
            torch.cat(documents) if documents and documents[0] is not None else None,
            torch.cat(places) if places and places[0] is not None else None,
            {name: torch.cat([one[name] for one in extra_fields]) for name in extra_fields[0]},
        )


@dataclass
class Routing:
    logits_TE: Tensor
    scores_TE: Tensor
    chosen_TK: Tensor
    weights_TK: Tensor
    margin: float


def route(
    config: Config,
    weight_ED: Tensor,
    bias_E: Tensor,
    x_TD: Tensor,
    valid_T: Tensor,
    step_number: int,
    layer: int,
    logit_bias_E: Tensor | None = None,
) -> Routing:
    """Return the routing of all tokens, padding included, which whoever uses it leaves out.

    bias_E only affects the choice, logit_bias_E is a weight like any other.
    """
    model, moe = config.model, config.moe
    wide = torch.promote_types(x_TD.dtype, getattr(torch, moe.router_dtype))
    x_TD = x_TD.to(wide)
    if moe.jitter:
        noise_key = counter_rng.key("jitter", config.training.seed, step_number, layer)
        noise_TD = counter_rng.uniform(noise_key, torch.arange(x_TD.numel()).view(x_TD.shape), wide)
        x_TD = x_TD * (1 + moe.jitter * (2 * noise_TD - 1))
    logits_TE = x_TD @ weight_ED.to(wide).T
    if logit_bias_E is not None:
        logits_TE = logits_TE + logit_bias_E.to(wide)
    scores_TE = torch.sigmoid(logits_TE) if model.score_function == "sigmoid" else torch.softmax(logits_TE, -1)

    if moe.force_balance:
        slots_TK = torch.arange(len(x_TD) * model.top_k).view(len(x_TD), model.top_k)
        chosen_TK, margin = slots_TK % model.num_experts, math.inf
    else:
        chosen_TK, margin = choose(model, scores_TE.detach() + bias_E, valid_T)

    if model.score_function == "softmax_after_topk":
        weights_TK = torch.softmax(logits_TE.gather(1, chosen_TK), -1)
    else:
        weights_TK = scores_TE.gather(1, chosen_TK)
    if model.norm_topk:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return Routing(logits_TE, scores_TE, chosen_TK, weights_TK * model.route_scale, margin)


def choose(model: Model, scores_TE: Tensor, valid_T: Tensor) -> tuple[Tensor, float]:
    """Return the K best experts of the best groups, lower numbers first among equals; and the smallest margin."""
    margin = math.inf
    if model.num_groups > 1:
        in_group = model.num_experts // model.num_groups
        scores_TGe = scores_TE.view(-1, model.num_groups, in_group)
        summed = min(in_group, 2 if model.score_function == "sigmoid" else 1)
        of_group_TG = scores_TGe.sort(-1, descending=True).values[..., :summed].sum(-1)
        best_TG, margin = best(of_group_TG, model.top_groups, valid_T)
        allowed_TG = torch.zeros_like(of_group_TG, dtype=torch.bool).scatter(1, best_TG, True)
        scores_TE = scores_TE.masked_fill(~allowed_TG.repeat_interleave(in_group, dim=1), -torch.inf)
    chosen_TK, expert_margin = best(scores_TE, model.top_k, valid_T)
    return chosen_TK, min(margin, expert_margin)


def best(scores: Tensor, number: int, valid_T: Tensor) -> tuple[Tensor, float]:
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    margin = math.inf
    if number < scores.shape[-1] and valid_T.any():
        margin = (values[valid_T, number - 1] - values[valid_T, number]).min().item()
    return order[:, :number], margin


def owners(slices: Slices, positions: int) -> Tensor:
    """Return which rank of a sequence owns each position."""
    if isinstance(slices, int):
        return torch.arange(positions) // (positions // slices)
    return torch.tensor(slices)


class Rounded(NamedTuple):
    """A weight as one of the numbers with 8 significant bits."""

    number: int
    """In ascending order."""
    down: float
    """The fraction of itself that it has to lose to become the next lower number."""
    up: float


def rounded(weight: float) -> Rounded:
    share, power = math.frexp(max(weight, 1e-30))
    place = round(256 * share)  # 128 to 256
    beyond = 256 * share - place
    # Below 128 numbers are twice as dense. Float32 on the way to 8 bits shifts the rounding boundary by 2^-24 at most.
    down, up = ((0.25 if place == 128 else 0.5) + beyond) / (256 * share), (0.5 - beyond) / (256 * share)
    return Rounded(128 * power + place, down - 2**-24, up - 2**-24)


def lead(kept: tuple[Rounded, int, int], dropped: tuple[Rounded, int, int]) -> float:
    """Return the relative change of two weights that makes the dropped one come first; infinite if rounding cannot."""
    steps = kept[0].number - dropped[0].number + (kept[1] < dropped[1])
    if steps > 2:
        return math.inf  # more than a step of 1/256, which no rounding bridges
    return (min if steps == 1 else max)(kept[0].down, dropped[0].up)


def keep(config: Config, tokens: Tokens, routing: Routing, slices: Slices) -> tuple[Tensor, float]:
    """Return which routed pairs (T, K) are computed, at most C per scope and expert, and the smallest `lead`."""
    model, moe = config.model, config.moe
    kept_TK = tokens.valid_T[:, None].repeat(1, model.top_k)
    if not moe.capacity_factor:
        return kept_TK, math.inf
    positions = tokens.tokens_GS.shape[1]
    if moe.capacity_scope == "full_sequence":
        scope_T, size = tokens.sample_T[:, None], positions
    else:
        owner_S = owners(slices, positions)
        scope_T = torch.stack([tokens.microbatch_T, tokens.data_rank_T, owner_S[tokens.position_T]], dim=1)
        size = tokens.samples_per_microbatch * positions // len(owner_S.unique())
    capacity = math.ceil(moe.capacity_factor * model.top_k * size / model.num_experts)

    bins: dict[tuple[int, ...], list[tuple[Rounded, int, int]]] = defaultdict(list)
    scope, chosen, weight = scope_T.tolist(), routing.chosen_TK.tolist(), routing.weights_TK.tolist()
    for t in tokens.valid_T.nonzero().flatten().tolist():
        for k in range(model.top_k):
            bins[(*scope[t], chosen[t][k])].append((rounded(weight[t][k]), t, k))

    margin = math.inf
    for pairs in bins.values():
        if moe.drop_policy == "probability":
            pairs.sort(key=lambda pair: -pair[0].number)  # stable: among equals the earlier position stays first
            margin = min([margin, *(lead(a, b) for a in pairs[:capacity] for b in pairs[capacity:])])
        for _, t, k in pairs[capacity:]:
            kept_TK[t, k] = False
    return kept_TK, margin


# ---------------------------------------------------------------------------------------------------- balance


def expert_counts(routing: Routing, of: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(routing.chosen_TK[of].flatten(), minlength=num_experts).to(routing.scores_TE.dtype)


def balance_terms(model: Model, tokens: Tokens, routing: Routing) -> dict[str, Tensor]:
    """Return the balance terms by name: 1 under uniform routing, but z is then (ln E)^2. Only valid tokens count."""
    share_TE = routing.scores_TE / routing.scores_TE.sum(-1, keepdim=True)

    def valid(of_T: Tensor) -> Tensor:
        return of_T & tokens.valid_T

    def load_E(of_T: Tensor) -> Tensor:
        """Return f: 1 for an expert that is chosen as often as the average."""
        return model.num_experts * expert_counts(routing, of_T, model.num_experts) / (model.top_k * of_T.sum())

    samples = int(tokens.valid_T.view(len(tokens.tokens_GS), -1).any(1).sum())
    seq = mb = glob = share_TE.new_zeros(())
    for sample in range(len(tokens.tokens_GS)):
        own = valid(tokens.sample_T == sample)
        if own.any():
            seq = seq + (load_E(own) * share_TE[own].mean(0)).sum() / samples
    for m in tokens.microbatch_T.unique():
        for d in tokens.data_rank_T.unique():
            own = valid((tokens.microbatch_T == m) & (tokens.data_rank_T == d))
            if own.any():
                mb = mb + (load_E(own) * share_TE[own].sum(0)).sum()
        own = valid(tokens.microbatch_T == m)
        if own.any():
            glob = glob + (load_E(valid(tokens.microbatch_T <= m)) * share_TE[own].sum(0)).sum()
    z = torch.logsumexp(routing.logits_TE[tokens.valid_T], dim=-1).pow(2).sum()
    routed = tokens.valid_T.sum()
    terms = {"aux_loss_sequence": seq, "aux_loss": mb / routed, "aux_loss_global": glob / routed, "z_loss": z / routed}
    return terms | {name: term(model, tokens, routing) for name, term in FURTHER.items()}


def coefficients(config: Config) -> dict[str, float]:
    """Return the coefficients of the balance losses that are on, by the name of a recipe."""
    named = [line.split() for line in config.moe.balance_losses]
    return {name: getattr(config.moe, name) for name in KEYS if getattr(config.moe, name)} | {
        name: float(coefficient) for name, coefficient in named
    }


# ------------------------------------------------------------------------------------------------------- step


@dataclass
class MoEResult:
    out_TD: Tensor
    terms: dict[str, Tensor]
    counts_E: Tensor
    routing: Routing
    entropy: float
    dropped: float
    margin: float
    drop_margin: float


def moe_layer(
    config: Config,
    weights: dict[str, Tensor],
    bias_E: Tensor,
    x_TD: Tensor,
    tokens: Tokens,
    step_number: int,
    layer: int,
    slices: Slices,
) -> MoEResult:
    model, name = config.model, f"{blocks(config.model)[layer]}.moe"
    router = (weights[f"{name}.router.weight"], bias_E, x_TD, tokens.valid_T, step_number, layer)
    routing = route(config, *router, weights.get(f"{name}.router.bias"))
    kept_TK, drop_margin = keep(config, tokens, routing, slices)
    weights_TK = routing.weights_TK.to(x_TD.dtype)

    out_TD = torch.zeros_like(x_TD)
    for e in range(model.num_experts):
        token, slot = ((routing.chosen_TK == e) & kept_TK).nonzero(as_tuple=True)
        if config.lora.dropout:  # which counts tokens
            y = expert(model, weights, f"{name}.experts", e, x_TD)[token]
        else:
            y = expert(model, weights, f"{name}.experts", e, x_TD[token])
        out_TD = out_TD.index_add(0, token, y * weights_TK[token, slot, None])
    if model.shared_hidden:
        shared_TD = named_swiglu(weights, f"{name}.shared", x_TD)
        if model.shared_gate:
            shared_TD = shared_TD * torch.sigmoid(x_TD @ weights[f"{name}.shared.gate.weight"].T)
        out_TD = out_TD + shared_TD

    routed_pairs = tokens.valid_T.sum().item() * model.top_k
    share_TE = (routing.scores_TE / routing.scores_TE.sum(-1, keepdim=True)).detach()[tokens.valid_T]
    return MoEResult(
        out_TD,
        balance_terms(model, tokens, routing),
        expert_counts(routing, tokens.valid_T, model.num_experts),
        routing,
        torch.special.entr(share_TE).sum(-1).mean().item(),
        1 - kept_TK.sum().item() / routed_pairs,
        routing.margin,
        drop_margin,
    )


def forward(
    config: Config,
    weights: dict[str, Tensor],
    tokens: Tokens,
    bias: dict[str, Tensor],
    step_number: int = 1,
    slices: Slices = 1,
) -> tuple[Tensor, Tensor | None, dict[int, MoEResult]]:
    """Return logits (G, S, V), those of the token after next or None, and by MoE layer what it did."""
    model = config.model
    moe_results: dict[int, MoEResult] = {}

    def run(i: int, x_GSD: Tensor) -> Tensor:
        block = blocks(model)[i]
        normed_GSD = rms_norm(x_GSD, weights[f"{block}.attention_norm.weight"], model.norm_eps)
        given = model, weights, f"{block}.attention", normed_GSD, tokens.document_GS
        own = own_layer(model, i)
        if own:
            prefix = f"{block}.attention."
            mine = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            out_GSD = own.mix(model, mine, normed_GSD, tokens.document_GS)
        elif model.kv_lora_rank:
            out_GSD = latent_attention(*given, tokens.place_GS)
        else:
            out_GSD = attention(*given, window(model, i), tokens.place_GS)
        x_GSD = x_GSD + out_GSD
        normed_GSD = rms_norm(x_GSD, weights[f"{block}.ffn_norm.weight"], model.norm_eps)
        if not is_moe(model, i):
            return x_GSD + named_swiglu(weights, f"{block}.ffn", normed_GSD)
        bias_E = bias[f"{block}.moe.router.expert_bias"]
        moe_results[i] = moe_layer(config, weights, bias_E, normed_GSD.flatten(0, 1), tokens, step_number, i, slices)
        return x_GSD + moe_results[i].out_TD.view_as(x_GSD)

    x_GSD = weights["embed.weight"][tokens.tokens_GS]
    for i in range(model.num_layers):
        x_GSD = run(i, x_GSD)
    head = weights["embed.weight" if model.tie_embeddings else "head.weight"]
    final_GSD = rms_norm(x_GSD, weights["head.norm.weight"], model.norm_eps)
    logits_GSV = final_GSD @ head.T
    if not model.mtp_depth:
        return logits_GSV, None, moe_results

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, weights[f"mtp.0.{name}.weight"], model.norm_eps)

    seen_GSD = normed(weights["embed.weight"][next_tokens(tokens)], "embed_norm")
    for_seen, for_hidden = weights["mtp.0.project.weight"].chunk(2, dim=1)
    hidden_GSD = normed(final_GSD if model.mtp_after_norm else x_GSD, "hidden_norm")
    y_GSD = seen_GSD @ for_seen.T + hidden_GSD @ for_hidden.T
    return logits_GSV, normed(run(model.num_layers, y_GSD), "norm") @ head.T, moe_results


def next_tokens(tokens: Tokens) -> Tensor:
    """Return the token after each; for the last position its label, or itself if it has none."""
    out_GS = tokens.tokens_GS.clone()
    for sample, (ids, labels) in enumerate(zip(tokens.tokens_GS.tolist(), tokens.labels_GS.tolist(), strict=True)):
        last = ids[-1] if labels[-1] == IGNORE else labels[-1]
        out_GS[sample] = torch.tensor([*ids[1:], last])
    return out_GS


def later_labels(tokens: Tokens) -> Tensor:
    """Return labels for the token after next: the next position's, if there is one and it is of the same document."""
    out_GS = torch.full_like(tokens.labels_GS, IGNORE)
    samples, positions = out_GS.shape
    for sample in range(samples):
        for s in range(positions - 1):
            document = tokens.document_GS
            if document is None or document[sample, s] == document[sample, s + 1]:
                out_GS[sample, s] = tokens.labels_GS[sample, s + 1]
    return out_GS


def cross_entropies(logits_GSV: Tensor, labels_GS: Tensor) -> Tensor:
    """Return the cross-entropy of each label; 0 where there is none."""
    wide = torch.promote_types(logits_GSV.dtype, torch.float32)
    labelled = labels_GS != IGNORE
    log_p = logits_GSV.log_softmax(-1, dtype=wide).gather(-1, labels_GS.where(labelled, 0)[..., None]).squeeze(-1)
    return -log_p.where(labelled, 0)


class HeadOutput(NamedTuple):
    """The head's output for each label; 0 where there is none."""

    loss_GS: Tensor
    entropy_GS: Tensor
    logits_GSV: Tensor


def head_output(logits_GSV: Tensor, labels_GS: Tensor) -> HeadOutput:
    wide = torch.promote_types(logits_GSV.dtype, torch.float32)
    log_p = logits_GSV.log_softmax(-1, dtype=wide)
    entropy_GS = -(log_p.exp() * log_p).sum(-1)
    return HeadOutput(cross_entropies(logits_GSV, labels_GS), entropy_GS.where(labels_GS != IGNORE, 0), logits_GSV)


def cross_entropy(logits_GSV: Tensor, labels_GS: Tensor, number: Tensor | None = None) -> Tensor:
    """Return the sum over the labelled tokens, divided once by their number, or by a given one."""
    return cross_entropies(logits_GSV, labels_GS).sum() / ((labels_GS != IGNORE).sum() if number is None else number)


Objective = Callable[[HeadOutput, Tokens], Tensor]


def weighted_cross_entropy(head: HeadOutput, tokens: Tokens) -> Tensor:
    weight_GS = tokens.extra_fields["weight"] * (tokens.labels_GS != IGNORE)
    return (head.loss_GS * weight_GS).sum() / weight_GS.sum()


def dpo(beta: float) -> Objective:
    """Return the objective that computes DPO's loss of each pair of completions by itself."""

    def mean(head: HeadOutput, tokens: Tokens) -> Tensor:
        completion_GS, losses = tokens.extra_fields["completion"], []
        gain_GS = (-head.loss_GS - tokens.extra_fields["reference"]) * (tokens.labels_GS != IGNORE)
        for sample, pairs in enumerate(tokens.extra_fields["pairs"].tolist()):
            for pair in range(pairs):
                chosen, rejected = (gain_GS[sample, completion_GS[sample] == 2 * pair + side].sum() for side in (0, 1))
                losses.append(torch.log1p(torch.exp(-beta * (chosen - rejected))))
        return torch.stack(losses).sum() / len(losses)

    return mean


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": lambda head, tokens: head.loss_GS.sum() / (tokens.labels_GS != IGNORE).sum(),
    "weighted_cross_entropy": weighted_cross_entropy,
}
"""The step's loss from the head's output for each label, by name. The test that brings an objective adds it."""


def step(
    config: Config,
    weights: dict[str, Tensor],
    step_batches: Sequence[Sequence[Batch]],
    step_number: int = 1,
    bias: dict[str, Tensor] | None = None,
    slices: Slices = 1,
) -> StepResult:
    """Return loss and gradients of one optimizer step. step_batches[m][d] is microbatch m of data rank d.

    step_number counts from 1. slices are the pieces of each sequence that sub_sequence capacity is counted in. Neither
    weights nor bias are changed. Under torch.no_grad there are no gradients.
    """
    weights = {name: value.detach().requires_grad_(trains(config, name)) for name, value in weights.items()}
    merged = with_whole_norms(config.model, with_adapters(config, weights, step_number))
    tokens = Tokens.of(step_batches)
    bias = bias or initial_bias(config.model)
    logits_GSV, further_GSV, layers = forward(config, merged, tokens, bias, step_number, slices)
    objective, mtp = OBJECTIVES[config.training.objective], torch.zeros(())
    loss = objective(head_output(logits_GSV, tokens.labels_GS), tokens)
    if further_GSV is not None:
        mtp = cross_entropy(further_GSV, later_labels(tokens), (tokens.labels_GS != IGNORE).sum())
    of_layers = [layer.terms for layer in layers.values()]
    aux = {name: sum(terms[name] for terms in of_layers) for name in (of_layers[0] if of_layers else ())}
    total = loss + config.training.mtp_weight * mtp
    total = total + sum(coefficient * aux[name] for name, coefficient in coefficients(config).items() if aux)
    grads = {}
    if torch.is_grad_enabled():
        trained = {name: value for name, value in weights.items() if value.requires_grad}
        found = torch.autograd.grad(total, list(trained.values()), materialize_grads=True)
        grads = dict(zip(trained, found, strict=True))
    return StepResult(
        loss=loss.item(),
        mtp=mtp.item(),
        total=total.item(),
        aux={term: value.item() for term, value in aux.items()},
        grads=grads,
        grad_norm=grad_norm(grads),
        counts={i: layer.counts_E for i, layer in layers.items()},
        chosen={i: layer.routing.chosen_TK for i, layer in layers.items()},
        imbalance={i: (layer.counts_E.max() / layer.counts_E.mean()).item() for i, layer in layers.items()},
        entropy={i: layer.entropy for i, layer in layers.items()},
        dropped={i: layer.dropped for i, layer in layers.items()},
        margin=min((layer.margin for layer in layers.values()), default=math.inf),
        drop_margin=min((layer.drop_margin for layer in layers.values()), default=math.inf),
    )


# --------------------------------------------------------------------------------------------------- training


def trains(config: Config, name: str) -> bool:
    if config.lora.rank:
        return "lora_" in name
    return not any(fnmatchcase(name, pattern) for pattern in config.training.freeze)


def grad_norm(grads: dict[str, Tensor]) -> float:
    return math.sqrt(sum(grad.double().pow(2).sum().item() for grad in grads.values()))


def learning_rate(config: Config, step_number: int) -> float:
    return config.optimizer.lr * schedule(config.lr_schedule, step_number, config.training.steps)


def schedule(options: LRSchedule, step_number: int, steps: int) -> float:
    """Return the learning rate of a step as a fraction of the peak."""
    floor, warmup = options.min_ratio, options.warmup_steps
    if step_number <= warmup:
        return step_number / warmup
    progress = (step_number - warmup) / max(1, steps - warmup)
    if options.decay == "cosine":
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    if options.decay == "linear":
        return 1 - (1 - floor) * progress
    if options.decay == "wsd":
        last = options.decay_fraction * steps
        return 1 - (1 - floor) * max(0.0, 1 - (steps - step_number) / last) if last else 1.0
    return 1.0


def decays(name: str, weight: Tensor, decay_all: bool) -> bool:
    spared = weight.dim() < 2 or name.endswith((".router.weight", ".shared.gate.weight", "_bias"))
    return decay_all or not spared


def rate_and_decay(config: Config, name: str, weight: Tensor, step_number: int) -> tuple[float, float]:
    """Return learning rate and weight decay of a parameter: its group's, if it is in one."""
    options = config.optimizer
    groups = [group for group in options.groups if any(fnmatchcase(name, pattern) for pattern in group["match"])]
    own = {key: value for group in groups for key, value in group.items()}
    decay = options.weight_decay if decays(name, weight, options.decay_all) else 0.0
    peak = replace(config, optimizer=replace(options, lr=own.get("lr", options.lr)))
    return learning_rate(peak, step_number), own.get("weight_decay", decay)


def adamw(
    config: Config,
    weights: dict[str, Tensor],
    grads: dict[str, Tensor],
    moments: dict[str, tuple[Tensor, Tensor]],
    step_number: int,
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Return new weights and moments (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Moments start as {}."""
    options, new_weights, new_moments = config.optimizer, {}, {}
    for name, w in weights.items():
        if name not in grads:
            new_weights[name] = w
            continue
        g = grads[name]
        m, v = moments.get(name, (torch.zeros_like(w), torch.zeros_like(w)))
        m = options.beta1 * m + (1 - options.beta1) * g
        v = options.beta2 * v + (1 - options.beta2) * g * g
        m_hat, v_hat = m / (1 - options.beta1**step_number), v / (1 - options.beta2**step_number)
        lr, decay = rate_and_decay(config, name, w, step_number)
        new_weights[name] = w - lr * decay * w - lr * m_hat / (v_hat.sqrt() + options.eps)
        new_moments[name] = m, v
    return new_weights, new_moments


def clipped(grads: dict[str, Tensor], norm: float, max_norm: float) -> dict[str, Tensor]:
    scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return {name: grad * scale for name, grad in grads.items()}


def moved_bias(config: Config, bias: dict[str, Tensor], counts: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the biases moved up for experts with less than the average load, down for those with more."""
    rate = config.moe.bias_update_rate
    name = {i: f"{block}.moe.router.expert_bias" for i, block in blocks(config.model).items()}
    moves = {i: rate * trains(config, name[i].replace("expert_bias", "weight")) for i in counts}
    return {name[i]: bias[name[i]] + moves[i] * torch.sign(E.mean() - E).float() for i, E in counts.items()}


def train(
    config: Config,
    weights: dict[str, Tensor],
    batches_per_step: Sequence[Sequence[Sequence[Batch]]],
    slices: Slices = 1,
) -> Run:
    """Run steps 1, 2, ... with these batches; config.training.steps is only the length of the schedule."""
    bias, moments, results = initial_bias(config.model), {}, []
    for step_number, step_batches in enumerate(batches_per_step, start=1):
        result = step(config, weights, step_batches, step_number, bias, slices)
        grads = clipped(result.grads, result.grad_norm, config.optimizer.max_grad_norm)
        if config.optimizer.name == "muon":
            norm = grad_norm(grads)
            weights, moments = reference_muon.muon(config, weights, grads, moments, step_number, norm)
        else:
            weights, moments = adamw(config, weights, grads, moments, step_number)
        bias = moved_bias(config, bias, result.counts)
        results.append(result)
    return Run(results, weights, bias)
