"""Attention of a block of queries to a block of keys, forward and backward, for attention that merges blocks.

Forward returns the log-sum-exp by which blocks merge; backward takes the final output and log-sum-exp. Context parallel
attention calls both for each pair of blocks (titanmoe.parallel.context, titanmoe.parallel.torch_ring).

On GPUs 16-bit numbers without a mask go to the kernel that `titanmoe.parallel.attention_kernel` has chosen, float64,
which no kernel takes, to plain operations, and everything else to the memory-efficient kernel.

All tensors are (B, H, c, .): B samples, H heads, of which keys may have fewer, c positions of a block. But a
log-sum-exp is (B, H, c), and a bias (B, 1, queries, keys).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.fold.attention_backend import cudnn_takes
from titanmoe.models.layers import promote
from titanmoe.ops import device
from titanmoe.ops.cpu import flash_attention

_aten = torch.ops.aten


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    scores = promote(q) @ promote(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
    return scores if bias is None else scores + bias


def block_reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, c, .) and log-sum-exp (B, H, c) of each query, computed by plain operations.

    The output has the dtype of q, the log-sum-exp at least float32. There must be as many key heads as query heads.
    Where a query sees no key, its output is 0 and its log-sum-exp -inf.

    Args:
        bias: (B, 1, queries, keys), added to the logits; None for none.
        causal: whether a query sees only the keys up to its own position in the block.
    """
    scores = _scores(q, k, bias, causal)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    return (weights @ promote(v)).to(q.dtype), lse


def backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, computed by plain operations in float32 at least.

    With p = exp(scores - lse):  dv = p' dout,  dscores = p (dout v' - sum(dout out)). There must be as many key heads
    as query heads. `out`, whose gradient is `grad`, and `lse` are final: merged over all blocks of keys. `bias` is
    added to the logits; with `causal` a query sees the keys up to its own position in the block.
    """
    grad, k, v = promote(grad), promote(k), promote(v)
    weights = torch.exp(_scores(q, k, bias, causal) - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    dscores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return dscores @ k, dscores.mT @ promote(q), weights.mT @ grad


@torch.compiler.assume_constant_result
def _cudnn_is_chosen() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()  # compiled code cannot trace it


def _kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Literal["cudnn", "flash", "efficient", "plain"]:
    query, value = q.shape[-1], v.shape[-1]
    if q.dtype == torch.float64:
        return "plain"
    if bias is not None or q.dtype not in (torch.bfloat16, torch.float16):
        return "efficient"
    # The operation itself checks nothing. torch refuses it single keys (sdp_utils.cpp, check_cudnn_tensor_shapes).
    if cudnn_takes(query, value) and k.shape[2] > 1 and _cudnn_is_chosen():
        return "cudnn"
    return "flash" if query == value <= 256 and query % 8 == 0 else "efficient"


def _repeated(heads: int, *xs: Tensor) -> list[Tensor]:
    """Return tensors (B, key heads, c, .) with each head repeated so that there are `heads`, the query heads."""
    return [x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in xs]


def _aligned(bias: Tensor | None, heads: int) -> Tensor | None:
    """Return the bias of attention's logits with the shape and strides that torch's memory-efficient kernel needs.

    It is expanded to all heads, and each row of it begins at a multiple of 8 elements. None if there is no bias.
    """
    if bias is None:
        return None
    keys = bias.shape[-1]
    if keys % 8:
        bias = F.pad(bias, (0, -keys % 8))[..., :keys]
    return bias.expand(-1, heads, -1, -1)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    kernel = _kernel(q, k, v, bias)
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    if kernel == "cudnn":
        out, lse = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse.reshape(out.shape[:3])  # (B, H, c, 1)
    k, v = _repeated(q.shape[1], k, v)
    if kernel == "plain":
        return block_reference(q, k, v, bias, causal)
    aligned = _aligned(bias, q.shape[1])
    out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, aligned, True, 0.0, causal)[:2]
    return out, lse[..., : q.shape[2]]  # padded to the kernel's tile


def block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, c, .) and the log-sum-exp (B, H, c) of queries that see this block of keys alone.

    The log-sum-exp is -inf for a query that sees none of them.

    Args:
        bias: added to the logits, -inf where a query does not see a key; None if `causal` alone hides any.
        causal: whether a query sees the keys up to its own position in the block.
    """
    implementation = device.choose(q, _on_gpu, cpu=flash_attention.block, compiled=True)
    out, lse = implementation(q, k, v, bias, causal)
    if bias is not None:
        # The kernels leave the log-sum-exp undefined for a query that sees no key in this block.
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return out, lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through attention of this block of queries to this block of keys.

    Their dtypes may be wider than those of q, k and v.

    Args:
        grad: gradient of the final output.
        bias: added to the logits, -inf where a query does not see a key; None if `causal` alone hides any.
        out: the final output, merged over all blocks of keys.
        lse: the final log-sum-exp, of all keys that a query sees.
        causal: whether a query sees the keys up to its own position in the block.
    """
    implementation = device.choose(q, _backward_on_gpu, cpu=flash_attention.block_backward, compiled=True)
    return implementation(grad, q, k, v, bias, out=out, lse=lse, causal=causal)


def _backward_on_gpu(grad, q, k, v, bias, *, out, lse, causal) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _kernel(q, k, v, bias)
    if kernel == "cudnn":
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
    if kernel == "flash":
        state, unused = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))  # dropout's
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused
        )
    if kernel == "plain":
        dq, dk, dv = backward_reference(grad, q, *_repeated(q.shape[1], k, v), bias, out=out, lse=lse, causal=causal)
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    mask = [True, True, True, False]
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # to full tiles, as forward returned it
    # In 16 bits the kernel ignores the output's strides and expects forward's layout, heads after positions.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, *_repeated(q.shape[1], k, v), _aligned(bias, q.shape[1]), out, lse, none, none, 0.0, mask, causal
    )[:3]
    if k.shape[1] < q.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32) for x in (dk, dv))
    return dq, dk, dv
