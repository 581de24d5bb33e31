"""Gated DeltaNet and gated linear attention as their papers write them, position by position, for the reference model.

Shapes: G samples, S positions, D model, H value heads, k and v the widths of a head, C channels, W taps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titanmoe.config.schema import Model


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a block's linear attention by name."""
    own, dim = model.own, model.dim
    keys = own["linear_key_heads"] * own["linear_key_dim"]
    values = own["linear_value_heads"] * own["linear_value_dim"]
    out = {"wq.weight": (keys, dim), "wk.weight": (keys, dim), "wv.weight": (values, dim), "wz.weight": (values, dim)}
    if own["linear_gate"] == "gla":
        out |= {"wg_a.weight": (16, dim), "wg_b.weight": (keys, 16), "wg_b.bias": (keys,)}
    else:
        out |= {"wb.weight": (own["linear_value_heads"], dim), "wa.weight": (own["linear_value_heads"], dim)}
        out |= {"dt_bias": (own["linear_value_heads"],), "A_log": (own["linear_value_heads"],)}
    out |= {f"conv_{part}": (width, own["conv_width"]) for part, width in (("q", keys), ("k", keys), ("v", values))}
    return out | {"norm.weight": (own["linear_value_dim"],), "wo.weight": (dim, values)}


BEGIN = {"dt_bias": torch.ones_like, "A_log": lambda uniform: torch.log(0.01 + 15.99 * uniform)}
"""Initial values, from uniform random numbers, of the parameters with their own initialization."""


def same_document(document_GS: Tensor | None, s: int, t: int) -> Tensor | float:
    """Return 1 where positions s and t are in the same document and else 0, (G, 1); 1.0 if samples are documents."""
    return 1.0 if document_GS is None else (document_GS[:, s] == document_GS[:, t]).double()[:, None]


def convolve(x_GSC: Tensor, taps_CW: Tensor, document_GS: Tensor | None) -> Tensor:
    """Return silu of the causal depthwise convolution within documents, (G, S, C).

    `taps_CW` has each channel's weights, the last that of the position itself; `document_GS` the id of each position's
    document, or None if each sample is one.
    """
    width, out = taps_CW.shape[1], []
    for s in range(x_GSC.shape[1]):
        seen = range(max(0, s - width + 1), s + 1)
        total = sum(x_GSC[:, t] * taps_CW[:, width - 1 - (s - t)] * same_document(document_GS, s, t) for t in seen)
        out.append(total / (1 + torch.exp(-total)))
    return torch.stack(out, 1)


def normalize(x: Tensor) -> Tensor:
    """Return x divided by its L2 norm over the last dim."""
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def linear_attention(model: Model, weights: dict[str, Tensor], x_GSD: Tensor, document_GS: Tensor | None) -> Tensor:
    """Return the output of the linear attention of a block, of shape (G, S, D).

    Args:
        model: the sizes; `own` has those of linear attention, and the kind of gate.
        weights: weights of the block's attention, by the names of `shapes`.
        x_GSD: input, after the norm before attention.
        document_GS: id of each position's document; None if each sample is one.
    """
    own, gla = model.own, model.own["linear_gate"] == "gla"
    repeats = own["linear_value_heads"] // own["linear_key_heads"]

    def heads(x: Tensor, width: int, times: int) -> Tensor:
        return x.unflatten(2, (-1, width)).repeat_interleave(times, 2)

    q, k, v = (convolve(x_GSD @ weights[f"w{w}.weight"].T, weights[f"conv_{w}"], document_GS) for w in "qkv")
    q, k = (heads(x, own["linear_key_dim"], repeats) for x in (q, k))
    v = heads(v, own["linear_value_dim"], 1)
    if gla:
        gate = x_GSD @ weights["wg_a.weight"].T @ weights["wg_b.weight"].T + weights["wg_b.bias"]
        decay_GSHk = heads((1 / (1 + torch.exp(-gate))) ** (1 / 16), own["linear_key_dim"], repeats)
    else:
        q, k = normalize(q), normalize(k)
        softplus = torch.log(1 + torch.exp(x_GSD @ weights["wa.weight"].T + weights["dt_bias"]))
        decay_GSH = torch.exp(-torch.exp(weights["A_log"]) * softplus)
        beta_GSH = 1 / (1 + torch.exp(-(x_GSD @ weights["wb.weight"].T)))
    state_GHkv = x_GSD.new_zeros(len(x_GSD), *k.shape[2:], v.shape[-1])
    out = []
    for s in range(x_GSD.shape[1]):
        if s and document_GS is not None:
            state_GHkv = state_GHkv * same_document(document_GS, s, s - 1)[..., None, None]
        written = torch.einsum("ghk,ghv->ghkv", k[:, s], v[:, s])
        if gla:
            state_GHkv = decay_GSHk[:, s, :, :, None] * state_GHkv + written
        else:
            beta = beta_GSH[:, s, :, None, None]
            erased = torch.einsum("ghk,ghl,ghlv->ghkv", k[:, s], k[:, s], state_GHkv)
            state_GHkv = decay_GSH[:, s, :, None, None] * (state_GHkv - beta * erased) + beta * written
        out.append(torch.einsum("ghkv,ghk->ghv", state_GHkv, q[:, s]) / math.sqrt(own["linear_key_dim"]))
    out_GSHv = torch.stack(out, 1)
    out_GSHv = out_GSHv / torch.sqrt(out_GSHv.pow(2).mean(-1, keepdim=True) + model.norm_eps) * weights["norm.weight"]
    z = heads(x_GSD @ weights["wz.weight"].T, own["linear_value_dim"], 1)
    return (out_GSHv * z / (1 + torch.exp(-z))).flatten(2) @ weights["wo.weight"].T
