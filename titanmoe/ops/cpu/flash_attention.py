"""Flash attention for CPUs by torch's kernel, with log-sum-exp.

`titanmoe.parallel.attention_block` calls it, and `titanmoe.parallel.context` merges blocks of keys by the log-sum-exp.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


def _padded(width: int, *xs: Tensor) -> list[Tensor]:
    """Pad tensors with zeros to `width` along the last dim. Zeros do not change a score.

    The kernels need queries, keys and values of one width.
    """
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in xs]


def block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the attention of queries over one block of keys and values.

    Args:
        q: the queries (B, heads, S, width).
        k: the keys of the block (B, key heads, keys, width); each serves heads / key heads consecutive query heads.
        v: the values of the block, which may have another width.
        bias: what is added to the scores, such as a mask; None for nothing. Where it hides all keys of a query, the
            query's log-sum-exp is undefined.
        causal: whether a query sees only keys at its own position and before.

    Returns:
        The outputs, as wide as v, and the log-sum-exp (B, heads, S) of each query's scores, by which blocks are merged.
    """
    scale, width = 1 / math.sqrt(q.shape[-1]), max(q.shape[-1], v.shape[-1])
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_padded(width, q, k, v), 0.0, causal, attn_mask=bias, scale=scale
    )
    return out[..., : v.shape[-1]], lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v of one call of `block`.

    Args:
        grad: the gradient of the outputs.
        q: the queries (B, heads, S, width).
        bias: what was added to the scores, such as a mask; None for nothing.
        out: the outputs; after blocks are merged, the merged ones.
        lse: the log-sum-exp of the scores; after blocks are merged, the merged one.
        causal: whether a query saw only keys at its own position and before.
    """
    scale, width = 1 / math.sqrt(q.shape[-1]), max(q.shape[-1], v.shape[-1])
    grad, *qkv, out = _padded(width, grad, q, k, v, out)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *qkv, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
