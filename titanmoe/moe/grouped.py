"""The product of each expert's rows with its own matrix, for all experts of a rank, and its gradients.

Shapes: R routed rows sorted by local expert, e local experts, D model, F this rank's hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from titanmoe.moe.fp8 import Quantised, Rounded, plain_scaled_rows, quantise, scaled_rows
from titanmoe.ops import device
from titanmoe.ops.kernels import fused
from titanmoe.ops.split_backward import gradient_wanted, with_own_node

Product = Callable[[Tensor, Tensor, Any], Tensor]
AddGradient = Callable[[Tensor, Tensor, "Groups", bool, str], None]
"""Adds the gradient of a weight to its sum over microbatches: as `weight_gradient`, with `grouped` and `kernels`."""


class Groups:
    """How many rows each expert has, in the two forms that products take. Each form is made once per layer, for the
    products of forward and backward.
    """

    def __init__(self, count_e: Tensor):
        self.count_e = count_e

    @cached_property
    def ends_e(self) -> Tensor:
        return self.count_e.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        return self.count_e.tolist()  # on GPUs the host waits for it


def groups_of(count: Tensor | Groups) -> Groups:
    return count if isinstance(count, Groups) else Groups(count)


def grouped_loop(x_RD: Tensor, w_eFD: Tensor, count: Tensor | Groups) -> Tensor:
    """Multiplies the rows of expert i by its matrix, one product per expert. An expert without rows gets a gradient of
    exact zeros.

    Rows after the last expert's, which only a static buffer has, are zero here, and undefined in `grouped_product`.
    """
    sizes = groups_of(count).sizes
    *groups, unused = x_RD.split([*sizes, x_RD.shape[0] - sum(sizes)])
    products = [x @ w.t() for x, w in zip(groups, w_eFD.unbind(), strict=True)]
    return torch.cat([*products, unused.new_zeros(unused.shape[0], w_eFD.shape[1])])


def grouped_product(x_RD: Tensor, w_eFD: Tensor, count: Tensor | Groups) -> Tensor:
    """The same in one call to torch's grouped matrix product."""
    # Code that is traced gets a tensor, not Groups.
    ends_e = count.ends_e if isinstance(count, Groups) else count.cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=ends_e)


def even_product(x_RD: Tensor, w_eFD: Tensor, count: Tensor | Groups) -> Tensor:
    """The same if all experts have the same number of rows: it is in the shape, so any dtype can be traced."""
    return torch.bmm(x_RD.unflatten(0, (w_eFD.shape[0], -1)), w_eFD.transpose(1, 2)).flatten(0, 1)


def loop_gradient(grad_RD: Tensor, h_RF: Tensor, count: Tensor | Groups) -> Tensor:
    """The gradient of the weights, (e, D, F): the sum of outer products over each expert's rows."""
    sizes = groups_of(count).sizes
    pieces = zip(grad_RD[: sum(sizes)].split(sizes), h_RF[: sum(sizes)].split(sizes), strict=True)
    return torch.stack([g.t() @ h for g, h in pieces])


def grouped_gradient(grad_RD: Tensor, h_RF: Tensor, count: Tensor | Groups) -> Tensor:
    groups = groups_of(count)
    grad_eDF = torch._grouped_mm(grad_RD.t(), h_RF, offs=groups.ends_e)
    if forgets_empty_groups(grad_RD):
        grad_eDF.masked_fill_((groups.count_e == 0).view(-1, 1, 1), 0)
    return grad_eDF


def plain_add_gradient(total_HeFD: Tensor, grad_RN: Tensor, x_RD: Tensor, sizes: list[int], add: bool) -> None:
    """Adds the gradients of H weights side by side, (N = H * F), to their sums, or begins these with them."""
    wide, width = torch.promote_types(total_HeFD.dtype, torch.float32), total_HeFD.shape[3]
    used = sum(sizes)
    pieces = zip(grad_RN[:used].split(sizes), x_RD[:used].split(sizes), total_HeFD.unbind(1), strict=True)
    for grad, x, total_HFD in pieces:
        gradient_HFD = (grad.t().to(wide) @ x.to(wide)).view(total_HFD.shape[0], -1, width)
        total_HFD.copy_(total_HFD + gradient_HFD if add else gradient_HFD)


def add_gradient(
    total_HeFD: Tensor, grad_RN: Tensor, x_RD: Tensor, groups: Groups, grouped: bool, kernels: str, add: bool
) -> None:
    """By a kernel where the products are grouped, else by the plain formula."""
    if grouped and fused(kernels, grad_RN):
        from titanmoe.ops.kernels.add_gradient import add_gradient as by_kernel

        by_kernel(total_HeFD, grad_RN, x_RD, groups.ends_e, add)
    else:
        plain_add_gradient(total_HeFD, grad_RN, x_RD, groups.sizes, add)


def weight_gradient(
    grad_RD: Tensor, h_RF: Tensor, groups: Groups, grouped: bool, kernels: str, add: AddGradient | None
) -> Tensor | None:
    """The gradient of the weights, (e, D, F); none if it has been added to a sum."""
    if add is not None:
        return add(grad_RD, h_RF, groups, grouped, kernels)
    return (grouped_gradient if grouped else loop_gradient)(grad_RD, h_RF, groups)


# Which product on which device and version of torch: decided by the next two functions, and nowhere else.


def can_group(x: Tensor, *widths: int) -> bool:
    """Whether torch's grouped product pays. It needs rows of whole 16-byte units, and no float64.

    On GPUs it is one kernel in bfloat16 on Hopper and B200 (majors 9 and 10). In float32, and on other GPUs, torch 2.11
    copies the counts to the host in each product and loops over experts: our loop does the same, with one copy per
    layer. (Later versions have the kernel on majors 11 and 12 too: github.com/pytorch/pytorch/pull/184334.)
    """
    if x.dtype == torch.float64 or any(width * x.element_size() % 16 for width in widths):
        return False
    if device.kind(x) == "cuda":
        return x.dtype == torch.bfloat16 and device.capability(x.device)[0] in (9, 10)
    return True


def forgets_empty_groups(x: Tensor) -> bool:
    """Whether the grouped product may leave the weight gradient of an expert without rows unwritten: on Blackwell, by
    github.com/pytorch/pytorch/issues/172439. It is still open, so every version is assumed to have it.
    """
    return device.kind(x) == "cuda" and device.capability(x.device) >= (10, 0)


def scaled_product(
    x: Tensor | Quantised, weights: Quantised, count: Tensor | Groups, kernels: str = "auto", emulated: bool = False
) -> Tensor:
    """The 8-bit product, or its plain formula, without gradients. The rows may be quantised already."""
    rows, groups = quantise(x, kernels) if isinstance(x, Tensor) else x, groups_of(count)
    return plain_scaled_rows(rows, weights, groups.sizes) if emulated else scaled_rows(rows, weights, groups.ends_e)


def product_of(grouped: bool, dtype: str, even: bool = False, kernels: str = "auto") -> Product:
    """The function that `[moe] expert_dtype` asks for; 8-bit products have no gradients."""
    if dtype != "compute":
        return partial(scaled_product, kernels=kernels, emulated=dtype == "fp8_emulated")
    if even:
        return even_product
    return grouped_product if grouped else grouped_loop


def total(summands: Iterator[Tensor]) -> Tensor:
    """Two of them exist at a time."""
    out = next(summands)
    for summand in summands:
        out += summand
    return out


class _Products(torch.autograd.Function):
    """Products of the same rows with several weights; in 8 bits, the rows are quantised once."""

    @staticmethod
    def forward(ctx, x_RD, groups, grouped, kernels, rounded, sums, *weights):
        ctx.save_for_backward(x_RD if any(ctx.needs_input_grad[-len(weights) :]) else None, *weights)
        ctx.groups, ctx.grouped, ctx.kernels, ctx.rounded, ctx.sums = groups, grouped, kernels, rounded, sums
        product = product_of(grouped, rounded.dtype, kernels=kernels)
        rows = x_RD if rounded.dtype == "compute" else quantise(x_RD, kernels)
        return tuple(product(rows, rounded(f"up {i}", w), groups) for i, w in enumerate(weights))

    @staticmethod
    def backward(ctx, *grads):
        x_RD, *weights = ctx.saved_tensors
        grad_x, grad_weights = None, [None] * len(weights)
        grads = [grad if grad.stride(1) == 1 and grad.stride(0) else grad.contiguous() for grad in grads]
        if gradient_wanted(ctx, 0):
            product = product_of(ctx.grouped, ctx.rounded.dtype, kernels=ctx.kernels)
            across = [ctx.rounded(f"up {i}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
            grad_x = total(product(g, w, ctx.groups) for g, w in zip(grads, across, strict=True))
        for i, grad in enumerate(grads):
            if gradient_wanted(ctx, 1 + i):  # its index among the inputs that are tensors
                add = ctx.sums[i] if i < len(ctx.sums) else None
                grad_weights[i] = weight_gradient(grad, x_RD, ctx.groups, ctx.grouped, ctx.kernels, add)
        return grad_x, None, None, None, None, None, *grad_weights


def products(
    x_RD: Tensor,
    count: Tensor | Groups,
    grouped: bool,
    kernels: str,
    rounded: Rounded,
    *weights: Tensor,
    sums: tuple[AddGradient | None, ...] = (),
) -> tuple[Tensor, ...]:
    """Multiplies the rows of expert i by each of its matrices. sums: where gradients go instead, of the first
    weights."""
    how = (groups_of(count), grouped, kernels, rounded, sums)
    return _Products.apply(with_own_node(x_RD), *how, *map(with_own_node, weights))
