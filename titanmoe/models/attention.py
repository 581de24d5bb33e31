"""Grouped-query attention.

Shapes: B samples, L sequence, S positions of the attention slice, s owned positions (S over tp), H query heads and
G key heads of this rank, h head width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm import ALONE, gather, scatter_sum
from titanmoe.config.schema import Model
from titanmoe.models.layers import Linear, RMSNorm, rotate


def causal_attention(q_BSHh: Tensor, k_BSGh: Tensor, v_BSGh: Tensor, document_BS: Tensor | None = None) -> Tensor:
    """Every position sees itself and those before it of its own document; query head i uses key head i // (H / G)."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHh, k_BSGh, v_BSGh))
    mask = None
    if document_BS is not None:
        mask = (document_BS.unsqueeze(2) == document_BS.unsqueeze(1)).tril().unsqueeze(1)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, model: Model, dtype):
        super().__init__()
        width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.wq = Linear(model.dim, width, bias=model.qkv_bias, dtype=dtype)
        self.wk = Linear(model.dim, kv_width, bias=model.qkv_bias, dtype=dtype)
        self.wv = Linear(model.dim, kv_width, bias=model.qkv_bias, dtype=dtype)
        self.wo = Linear(width, model.dim, dtype=dtype)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps, dtype) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps, dtype) if model.qk_norm else None
        self.head_dim = model.head_dim
        self.tp = ALONE
        self.attend = causal_attention

    def forward(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], document_BL: Tensor | None) -> Tensor:
        x_BSD = gather(x_BsD, 1, self.tp)
        q, k, v = (w(x_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out_BSHh = self.attend(rotate(q, rope), rotate(k, rope), v, document_BL)
        return scatter_sum(self.wo(out_BSHh.flatten(2)), 1, self.tp)
