"""Grouped-query attention, by torch's kernel or plain operations; titanmoe.parallel sets faster implementations.

Shapes: B samples, L sequence, S positions of the attention slice, s owned positions (S over tp), D model, H query
heads and G key heads of this rank, h head width, X = H * h.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, all_gather_autograd, reduce_scatter_autograd, to_local
from titanmoe.config.blocks import window
from titanmoe.config.schema import Model
from titanmoe.mask import CAUSAL, Mask
from titanmoe.models.layers import Linear, RMSNorm, SplitRMSNorm, promote, rotate_both
from titanmoe.ops import device


def causal_attention(
    q_BSHh: Tensor, k_BSGh: Tensor, v_BSGh: Tensor, mask: Mask = CAUSAL, sinks_H: Tensor | None = None
) -> Tensor:
    """Return attention over full sequences on one rank, (B, S, H, v); query head i uses key head i // (H / G).

    Scores are divided by sqrt(h). Windows and documents are a dense mask here, and sinks use plain operations;
    `titanmoe.parallel.choose_attention` replaces this function with faster ones.

    Args:
        v_BSGh: values (B, S, G, v), where v may be less than h.
        sinks_H: logit of one more key of each head, whose value is zero; None for no sinks.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSHh, k_BSGh, v_BSGh))
    # torch's kernel for CPUs needs values as wide as keys, and materializes all scores otherwise.
    more = device.choose(q, 0, cpu=max(q.shape[-1] - v.shape[-1], 0), compiled=True)
    out = plain_attention(q, k, F.pad(v, (0, more)) if more else v, mask, sinks_H)
    return out[..., : v.shape[-1]].transpose(1, 2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks_H: Tensor | None = None) -> Tensor:
    """Return attention over full sequences on one rank, (B, H, S, v): by torch's kernel or, with sinks, plain code.

    Args:
        q: queries (B, H, S, h).
        k: keys (B, G, S, h); query head i uses key head i // (H / G).
        v: values (B, G, S, v), where v may be less than h.
        sinks_H: logit of one more key of each head, whose value is zero; None for no sinks.
    """
    grouped, all_places = q.shape[1] != k.shape[1], slice(0, q.shape[2])
    causal = mask.until_BL is None and not mask.window
    if sinks_H is None and causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    seen = mask.seen(slice(None), all_places, all_places, q.device).unsqueeze(1)
    if sinks_H is None:
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=grouped)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = promote(q) @ promote(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    sinks = promote(sinks_H).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores.masked_fill(~seen, -torch.inf), sinks), -1).softmax(-1)[..., :-1]
    return (weights @ promote(v)).to(q.dtype)


class Attention(nn.Module):
    """Grouped-query attention of a block, with its projections, norms of queries and keys, sinks and output gate."""

    def __init__(self, model: Model, layer: int, dtype: torch.dtype, kernels: str = "auto"):
        super().__init__()
        width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.wq = Linear(model.dim, width, bias=model.qkv_bias, dtype=dtype)
        self.wk = Linear(model.dim, kv_width, bias=model.qkv_bias, dtype=dtype)
        self.wv = Linear(model.dim, kv_width, bias=model.qkv_bias, dtype=dtype)
        self.wg = Linear(model.dim, width, dtype=dtype) if model.attention_gate else None
        self.wo = Linear(width, model.dim, bias=model.out_bias, dtype=dtype)
        self.sinks = nn.Parameter(torch.empty(model.num_heads, dtype=dtype)) if model.attention_sinks else None
        self.window = window(model, layer)
        self.qk_norm, self.q_norm, self.k_norm = model.qk_norm, None, None
        norm = model.norm_eps, dtype, model.norm_adds_one, kernels
        if model.qk_norm == "head":
            self.q_norm, self.k_norm = (RMSNorm(model.head_dim, *norm) for _ in "qk")
        elif model.qk_norm == "full":
            self.q_norm, self.k_norm = (SplitRMSNorm(w, *norm) for w in (width, kv_width))
        self.head_dim, self.key_heads, self.kernels = model.head_dim, model.num_kv_heads, kernels
        self.tp = NO_GROUP
        self.attend = causal_attention

    @property
    def key_rows(self) -> slice | None:
        """Slice of rows of the key and value weights that this rank uses where tp exceeds the number of key heads.

        All ranks have the full weights then, and the slice is one key head. None where tp shards the weights.
        """
        if self.tp.size <= self.key_heads:
            return None
        begin = self.tp.rank * self.key_heads // self.tp.size * self.head_dim
        return slice(begin, begin + self.head_dim)

    def forward(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Return the output (B, s, D) for the tokens that this rank owns. Collective over tp, and over cp by `attend`.

        The output is after the output projection, and before it is added to the residual stream.

        Args:
            x_BsD: normed hidden states of these tokens.
            rope: cos and sin of RoPE's angles for the attention slice, (B, S, 1, rotated width) each.
            mask: which positions see each other, but for the layer's own window.
        """
        x_BSD = all_gather_autograd(x_BsD, 1, self.tp)
        q, x_BSD = self.wq(x_BSD, pass_on=True)
        rows = self.key_rows
        k, x_BSD = self.wk(x_BSD, pass_on=True, rows=rows)
        if self.wg is not None:
            gate_BSX, x_BSD = self.wg(x_BSD, pass_on=True)
        v = self.wv(x_BSD, rows=rows)
        if self.qk_norm == "full":
            q, k = self.q_norm(q, self.tp), self.k_norm(k, self.tp, rows)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        sinks_H = None if self.sinks is None else to_local(self.sinks)
        q, k = rotate_both(q, k, rope, self.kernels)
        out_BSX = self.attend(q, k, v, mask.with_window(self.window), sinks_H).flatten(2)
        if self.wg is not None:
            out_BSX = out_BSX * torch.sigmoid(gate_BSX)
        y_BsD = reduce_scatter_autograd(self.wo.without_bias(out_BSX), 1, self.tp)
        # Once, to the tokens this rank owns: inside the product, every tp rank would add it.
        return y_BsD if self.wo.bias is None else y_BsD + to_local(self.wo.bias)
