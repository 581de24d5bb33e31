"""Ring attention with torch's own template, on which its context-parallel attention API is built.

That API needs DTensors and the SDPA kernels of GPUs. The template takes any kernel, so it runs on CPUs too, where it is
compared with the reference. It supports the causal mask and both placements, but neither documents nor windows. A sink
is merged at the end, as in `titanmoe.parallel.context`: backward only needs the final log-sum-exp.

The template is private to torch. `missing` says what a version of torch lacks; our own ring is used then.

Shapes: B samples, S positions of this rank, H query heads and G key heads, h head width, which may differ for values.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.parallel.attention_block import block, block_backward
from titanmoe.parallel.context import LseCallback, Placement, _sinks_grad, heads_first

try:
    from torch.distributed.tensor.experimental._context_parallel import _attention as _torch
except ImportError:
    _torch = None

_TEMPLATE = ("group", "seq_dim", "op", "query", "key", "value", "is_causal")
_TEMPLATE_BACKWARD = (*_TEMPLATE[:3], "grad_out", "grad_out_name", *_TEMPLATE[3:6], "out", "logsumexp", "is_causal")
_OPTIONS = ("convert_to_f32", "enable_load_balance", "rotate_method")


def missing() -> str:
    """Return what torch's ring template needs and this version of torch lacks, as text; "" if it lacks nothing."""
    for name, arguments in (
        ("_templated_ring_attention", _TEMPLATE),
        ("_templated_ring_attention_backward", _TEMPLATE_BACKWARD),
    ):
        function = getattr(_torch, name, None)
        if function is None or not set(arguments) <= inspect.signature(function).parameters.keys():
            return f"torch {torch.__version__} has no {name}({', '.join(arguments)})"
    if not all(hasattr(getattr(_torch, "_cp_options", None), name) for name in _OPTIONS):
        return f"torch {torch.__version__} has no _cp_options with {', '.join(_OPTIONS)}"
    return ""


@contextmanager
def _options(zigzag: bool, dtype: torch.dtype) -> Iterator[None]:
    """Set the options of torch's ring template within this context; the template reads them from a global.

    Args:
        zigzag: whether each rank has an early and a late chunk of the sequence.
        dtype: dtype of queries; the template sums in float32 unless it is float64.
    """
    options = _torch._cp_options
    before = [getattr(options, name) for name in _OPTIONS]
    # ALL_TO_ALL is the ring; torch's default gathers the keys and values of the full sequence.
    values = [dtype != torch.float64, zigzag, _torch._RotateMethod.ALL_TO_ALL]
    try:
        for name, value in zip(_OPTIONS, values, strict=True):
            setattr(options, name, value)
        yield
    finally:
        for name, value in zip(_OPTIONS, before, strict=True):
            setattr(options, name, value)


def _op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return block(q, k, v, None, is_causal)


def _op_backward(grad, query, key, value, out, logsumexp, is_causal):
    return block_backward(
        grad.contiguous(), query, key, value, None, out=out.contiguous(), lse=logsumexp, causal=is_causal
    )


class _Ring(torch.autograd.Function):
    """Causal attention by torch's ring template, with sinks merged at the end."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, zigzag, group, report_lse):
        ctx.group, ctx.zigzag = group.process_group, zigzag
        with _options(zigzag, q.dtype):
            out, lse = _torch._templated_ring_attention(ctx.group, 2, _op, q, k, v, is_causal=True)
        if report_lse is not None:
            report_lse(lse)
        if sinks is not None:
            before, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
            out = (out * (before - lse).exp().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with _options(ctx.zigzag, q.dtype):
            dq, dk, dv = _torch._templated_ring_attention_backward(
                ctx.group, 2, _op_backward, grad, "grad", q, k, v, out, lse, is_causal=True
            )
        return dq, dk, dv, _sinks_grad(grad, out, lse, sinks), None, None, None


# Its options and process groups cannot be traced; compiled attention breaks into two graphs here.
@torch.compiler.disable
def torch_ring_attention(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    sinks_H: Tensor | None,
    report_lse: LseCallback = None,
    *,
    placement: Placement,
    group: Group,
) -> Tensor:
    """Return causal attention of this rank's queries to all keys, by torch's ring template. Collective over cp.

    Only where `missing` returns "". The result is (B, S, H, width of a value). Differentiable.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query (B, H, S), sinks left out.
    """
    q, k, v = heads_first(q_BSHh, k_BSGh, v_BSGh)
    return _Ring.apply(q, k, v, sinks_H, placement.zigzag, group, report_lse).transpose(1, 2)
