"""Layers that all models are made of: linear, norm, feed-forward, rotary position embeddings.

A module with a `tp` group takes and returns the tokens that this rank owns and holds its shard of the hidden width
(titanmoe.parallel.parallel_plan). `recomputable_methods` are those that take little time for the memory of what they
save: with selective recomputation (titanmoe.parallel.recompute) backward calls them a second time. `kernels` is the
option moe.kernels: "auto" for Triton kernels on GPUs, "triton" or "torch" for one everywhere. `rope` has cos and sin of
RoPE's angles, (B, S, 1, width) each.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), D model, F hidden, H query heads,
G key heads, h head, N outputs, R rows of x flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import (
    NO_GROUP,
    Group,
    all_gather_autograd,
    all_reduce_autograd,
    reduce_scatter_autograd,
    to_local,
)
from titanmoe.config.schema import Model
from titanmoe.ops.autograd_functions import apply_function, as_non_leaf, wants_gradient
from titanmoe.ops.kernels import fused


def promote(x: Tensor) -> Tensor:
    """Return x in float32, for norms, RoPE, softmax and loss; x itself if it has that dtype or a wider one."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def use_recomputable(compute: Callable[[], tuple[Tensor, ...]], use: Callable[..., Tensor]) -> Tensor:
    """Return `use(*compute())`.

    A module calls this function through its attribute `use_recomputable`. Selective recomputation replaces the
    attribute by a function that does not save the tensors for backward, but calls `compute` a second time there.

    Args:
        compute: returns tensors that take little time to compute for the memory that they occupy.
        use: gets these tensors as arguments, such as queries, keys and values, and returns the module's result.
    """
    return use(*compute())


class _ProductAndInput(torch.autograd.Function):
    """A matrix product that also returns its input, for other products of the same input, such as keys and values.

    Autograd would add the products' gradients of the input in separate passes, each of which reads two tensors of its
    size and writes one. Here each product of backward starts from the sum so far, which costs one read.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        return F.linear(x, w, b), x

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grad_RN, grad_w, grad_b = grad_y.flatten(0, -2), None, None
        grad_x = torch.addmm(grad_x.flatten(0, -2), grad_RN, w).view(grad_x.shape) if wants_gradient(ctx, 0) else None
        if wants_gradient(ctx, 1):
            grad_w = grad_RN.t() @ x.flatten(0, -2)
        if len(ctx.next_functions) == 3 and wants_gradient(ctx, 2):
            grad_b = grad_RN.sum(0)
        return grad_x, grad_w, grad_b


def product_and_input(x: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the pair (x w^T + b, x).

    A caller that multiplies x by several weights passes the returned x to the next product. Backward then adds this
    product's gradient of x to the next one's inside one matrix product, instead of in a pass of its own.
    """
    if torch.compiler.is_compiling():  # the compiler adds gradients where it likes
        return F.linear(x, w, b), x
    return apply_function(_ProductAndInput, *(y if y is None else as_non_leaf(y) for y in (x, w, b)))


class Linear(nn.Module):
    """A linear layer, whose weight may be sharded over tp. It communicates nothing."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, pass_on: bool = False, rows: slice | None = None) -> Any:
        """Return the product of x with this rank's shard of the weight, plus bias.

        Args:
            x: input.
            pass_on: whether to return the pair (product, x), where x is for the next product of the same input
                (`product_and_input`).
            rows: the rows (outputs) of this rank's shard to multiply by; None for all.
        """
        weight, bias = local_rows(self.weight, rows), None if self.bias is None else local_rows(self.bias, rows)
        return product_and_input(x, weight, bias) if pass_on else F.linear(x, weight, bias)

    def without_bias(self, x: Tensor) -> Tensor:
        """Return the product of x with this rank's shard of the weight, without the bias."""
        return F.linear(x, to_local(self.weight))

    def effective_weight(self) -> Tensor:
        """Return this rank's shard of the matrix that x is multiplied by, (outputs, inputs), as a plain tensor.

        For code that multiplies by some rows of it. A layer with adapters adds their product to the weight.
        """
        return to_local(self.weight)


def local_rows(parameter: nn.Parameter, rows: slice | None) -> Tensor:
    """Return this rank's shard of a parameter as a plain tensor; only its rows in `rows`, unless that is None."""
    return to_local(parameter) if rows is None else to_local(parameter)[rows]


def constant(value: float) -> Callable[[int, Tensor, torch.dtype], Tensor]:
    """Return a function that returns `value` as the initial value of each element of a parameter.

    A module's `initial` has such functions by parameter name; `materialize` calls them.
    """
    return lambda key, index, dtype: torch.full_like(index, value, dtype=dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(
        self, dim: int, eps: float, dtype: torch.dtype | None = None, adds_one: bool = False, kernels: str = "auto"
    ):
        """Allocate the weight, without values.

        Args:
            dim: width.
            eps: added to the mean square.
            dtype: of the weight.
            adds_one: whether x is multiplied by one plus the weight, which begins at zero.
            kernels: moe.kernels.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype))
        self.eps, self.adds_one, self.kernels = eps, adds_one, kernels
        self.initial = {"weight": constant(0)} if adds_one else {}

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) times the weight, or one plus the weight, in x's dtype."""
        if self.by_triton(x):
            from titanmoe.ops.kernels.rms_norm import rms_norm

            return rms_norm(x, self.factor(), self.eps)
        factor = self.factor()
        if factor.dtype == x.dtype:  # a single kernel on GPUs, which needs both in one dtype
            return F.rms_norm(x, factor.shape, factor, self.eps)
        return plain_norm(x, factor, self.eps)

    def by_triton(self, x: Tensor) -> bool:
        """Return whether the Triton kernel, and not torch, computes the norm of x.

        The kernel holds a row of x in registers, which limits the width to 8192 (float64: 4096). Compiled code uses
        torch's operations, which the compiler fuses.
        """
        holds = x.shape[-1] <= (4096 if x.dtype == torch.float64 else 8192)
        return holds and fused(self.kernels, x) and not torch.compiler.is_compiling()

    def factor(self) -> Tensor:
        """Return the vector that x / rms(x) is multiplied by, in the weight's dtype: the weight, or one plus it."""
        return 1 + to_local(self.weight) if self.adds_one else to_local(self.weight)


def plain_norm(x: Tensor, weight_D: Tensor, eps: float, tp: Group = NO_GROUP) -> Tensor:
    """Return x / rms(x) * weight by plain operations in float32 at least, in x's dtype. Collective over tp.

    With tp, x and the weight are this rank's shards of the last dim, and the mean square is that of the full width.
    """
    wide = promote(x)
    mean_square = wide.square().mean(-1, keepdim=True)
    if tp.size > 1:
        mean_square = all_reduce_autograd(mean_square, tp) / tp.size
    return (wide * torch.rsqrt(mean_square + eps) * weight_D).to(x.dtype)


class SplitRMSNorm(RMSNorm):
    """Root-mean-square norm over a width that tp shards, such as all heads together."""

    def forward(self, x: Tensor, tp: Group = NO_GROUP, rows: slice | None = None) -> Tensor:
        """Return x / rms(x) times the weight, where rms is over the full width, in x's dtype. Collective over tp.

        Args:
            x: this rank's shard of the width.
            tp: the ranks that shard it.
            rows: slice of this rank's weight that belongs to x; None for the full weight. A head that several ranks
                have counts several times in the mean square, as every other head does.
        """
        if tp.size == 1 and self.by_triton(x):
            return super().forward(x)
        factor = self.factor()
        return plain_norm(x, factor if rows is None else factor[rows], self.eps, tp)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network: w2 (silu(w1 x) * w3 x)."""

    recomputable_methods = ("down",)

    def __init__(self, dim: int, hidden: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.w1 = Linear(dim, hidden, dtype=dtype)
        self.w3 = Linear(dim, hidden, dtype=dtype)
        self.w2 = Linear(hidden, dim, dtype=dtype)
        self.tp = NO_GROUP

    def forward(self, x_BsD: Tensor) -> Tensor:
        """Return the output (B, s, D) for the tokens that this rank owns. Collective over tp."""
        x_BSD = all_gather_autograd(x_BsD, 1, self.tp)
        gate_BSF, x_BSD = self.w1(x_BSD, pass_on=True)
        return reduce_scatter_autograd(self.down(gate_BSF, self.w3(x_BSD)), 1, self.tp)

    def down(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        """Return w2 (silu(gate) * up), (B, S, D); with tp this rank's summand of it: w2 is sharded by its inputs."""
        return self.w2(swiglu(gate_BSF, up_BSF))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up


class SharedExpert(FeedForward):
    """The expert that every token is sent to, scaled by a learned gate if the family has one."""

    def __init__(self, dim: int, hidden: int, gated: bool, dtype: torch.dtype | None = None):
        super().__init__(dim, hidden, dtype)
        self.gate = Linear(dim, 1, dtype=dtype) if gated else None

    def forward(self, x_BsD: Tensor) -> Tensor:
        """Return the output (B, s, D) for the tokens that this rank owns. Collective over tp."""
        y_BsD = super().forward(x_BsD)
        return y_BsD if self.gate is None else y_BsD * torch.sigmoid(self.gate(x_BsD))


def rope_frequencies(model: Model, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle per position, in radians, of each pair i of the `width` dims that RoPE rotates: (width / 2,).

    It is theta^(-2i/width), computed in `dtype`, and interpolated by YaRN if the model asks for it.
    """
    pair = torch.arange(0, width, 2, device=device, dtype=dtype)
    frequency = model.rope_theta ** -(pair / width)
    if model.rope_scaling == "none":
        return frequency

    def pair_with_turns(times: float) -> float:
        """Return the index, a fraction, of the pair with that many turns in YaRN's original context.

        arXiv 2309.00071, section 3.2.
        """
        return width * math.log(model.rope_original_len / (times * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    low, high = pair_with_turns(model.rope_beta_fast), pair_with_turns(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    # The published models clamp to the number of dims, not of pairs.
    low, high = max(low, 0), min(high, width - 1)
    slowed = ((pair / 2 - low) / (high - low or 0.001)).clamp(0, 1)
    return frequency * (1 - slowed + slowed / model.rope_factor)


def yarn_mscale(model: Model, scale: float) -> float:
    """Return YaRN's m(s) = 1 + 0.1 s ln(rope_factor), by which it scales queries and keys for a longer context.

    `scale` is s, such as model.rope_mscale.
    """
    return 1 + 0.1 * scale * math.log(model.rope_factor)


def rope_scale(model: Model) -> float:
    """Return YaRN's factor on RoPE's cos and sin, and so on both queries and keys; 1 without YaRN."""
    if model.rope_scaling == "none":
        return 1.0
    if model.rope_mscale and model.rope_mscale_all_dim:
        return yarn_mscale(model, model.rope_mscale) / yarn_mscale(model, model.rope_mscale_all_dim)
    return yarn_mscale(model, 1)


def rope_angles(position_BS: Tensor, model: Model, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE's angles, position * frequency, each (B, S, 1, width).

    Both halves of the width have the same angles. YaRN's factor is included.

    Args:
        position_BS: position of each token in its sequence or document.
        width: number of dims of a head that RoPE rotates.
        dtype: the model's; the result is in float32 at least.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angle = position_BS.unsqueeze(-1).to(wide) * rope_frequencies(model, width, wide, position_BS.device)
    angle, scale = torch.cat((angle, angle), -1).unsqueeze(2), rope_scale(model)
    return angle.cos() * scale, angle.sin() * scale


def rotate(x_BSHh: Tensor, rope: tuple[Tensor, Tensor], kernels: str = "auto") -> Tensor:
    """Return x with RoPE applied to all h dims; dims i and i + h / 2 are a pair, as in Hugging Face's checkpoints."""
    if fused(kernels, x_BSHh) and not torch.compiler.is_compiling():  # the compiler fuses these by itself
        B, S, _, h = x_BSHh.shape
        return rotate_both(x_BSHh, x_BSHh.new_empty(B, S, 0, h), rope, kernels)[0]
    return plain_rotate(x_BSHh, rope)


def rotate_both(
    q_BSHh: Tensor, k_BSGh: Tensor, rope: tuple[Tensor, Tensor], kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with RoPE applied, on GPUs in one kernel.

    Dims i and i + width / 2 are a pair. In heads wider than `rope` the last dims stay as they are.
    """
    width, head = rope[0].shape[-1], q_BSHh.shape[-1]
    if width < head:
        (q_BSHh, q_rest), (k_BSGh, k_rest) = (x.split([width, head - width], -1) for x in (q_BSHh, k_BSGh))
        q_BSHh, k_BSGh = rotate_both(q_BSHh, k_BSGh, rope, kernels)
        return torch.cat((q_BSHh, q_rest), -1), torch.cat((k_BSGh, k_rest), -1)
    if fused(kernels, q_BSHh) and not torch.compiler.is_compiling():
        from titanmoe.ops.kernels.rotate import Rotate

        return apply_function(Rotate, q_BSHh, k_BSGh, *rope)
    return plain_rotate(q_BSHh, rope), plain_rotate(k_BSGh, rope)


def plain_rotate(x_BSHh: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Return x (B, S, H, h) with RoPE applied to all h dims, by plain operations in float32 at least.

    Dims i and i + h / 2 are a pair. The result has x's dtype.
    """
    wide, (cos, sin) = promote(x_BSHh), rope
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x_BSHh.dtype)
