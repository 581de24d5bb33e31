"""Formulas of the product of each expert's tokens with its own weight, for all experts of a rank, and of its gradients.

Three of each, for the same numbers: by torch's grouped product, by a loop over experts, and by one batched product if
all experts have the same number of tokens. `titanmoe.moe.expert_products` chooses among them. `Groups` has the number
of each expert's tokens. The gradient of a weight in y = h w^T is grad^T h, with `grad_RD` that of y.

Shapes: R routed tokens sorted by local expert, e local experts, D model, F this rank's hidden width of an expert; H
weights side by side, N = H * F.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from titanmoe.comm.recomputation import cached
from titanmoe.ops import device
from titanmoe.ops.kernels import fused


class Groups:
    """The number of each expert's tokens, in the forms that grouped products and loops over experts take.

    Each form is computed at most once, for all products of a layer's forward and backward.
    """

    def __init__(self, count_e: Tensor):
        self.count_e = count_e

    @cached_property
    def ends_e(self) -> Tensor:
        """The index of the token after each expert's last, int32, on the device."""
        return self.count_e.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of each expert's tokens as Python numbers. On GPUs the first use makes the host wait."""
        return cached(self.count_e.tolist)


def loop_product(x_RD: Tensor, w_eFD: Tensor, groups: Groups) -> Tensor:
    """Multiply the tokens of each expert by its transposed weight, one product per expert: (R, F).

    Differentiable. An expert without tokens gets a gradient of exact zeros. Rows after the last expert's tokens, which
    only a padded buffer has, are zero in the result (in `grouped_product` they are undefined). On GPUs the host waits
    for `groups.sizes`.
    """
    sizes = groups.sizes
    *rows, unused = x_RD.split([*sizes, x_RD.shape[0] - sum(sizes)])
    products = [x @ w.t() for x, w in zip(rows, w_eFD.unbind(), strict=True)]
    return torch.cat([*products, unused.new_zeros(unused.shape[0], w_eFD.shape[1])])


def grouped_product(x_RD: Tensor, w_eFD: Tensor, groups: Groups) -> Tensor:
    """Multiply the tokens of each expert by its transposed weight, by `torch._grouped_mm`: (R, F). Differentiable.

    The tokens have a dtype and width that `can_group` allows. Rows after the last expert's tokens, which only a padded
    buffer has, are undefined in the result.
    """
    return torch._grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=groups.ends_e)


def even_product(x_RD: Tensor, w_eFD: Tensor, groups: Groups) -> Tensor:
    """Multiply the tokens of each expert by its transposed weight in one batched product: (R, F).

    Not differentiable. All experts must have R / e tokens, so `groups` is not read, and no host sync is needed.
    """
    out_RF = x_RD.new_empty(x_RD.shape[0], w_eFD.shape[1])  # no view, so that it can be changed in place
    e = len(w_eFD)
    torch.bmm(x_RD.unflatten(0, (e, -1)), w_eFD.transpose(1, 2), out=out_RF.unflatten(0, (e, -1)))
    return out_RF


def even_gradient(grad_RD: Tensor, h_RF: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of the weights (e, D, F) in one batched product, for experts with equally many tokens."""
    e = len(groups.count_e)
    return torch.bmm(grad_RD.unflatten(0, (e, -1)).transpose(1, 2), h_RF.unflatten(0, (e, -1)))


def loop_gradient(grad_RD: Tensor, h_RF: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of the weights (e, D, F) by one product per expert. On GPUs the host waits for sizes."""
    sizes = groups.sizes
    per_expert = zip(grad_RD[: sum(sizes)].split(sizes), h_RF[: sum(sizes)].split(sizes), strict=True)
    return torch.stack([g.t() @ h for g, h in per_expert])


def grouped_gradient(grad_RD: Tensor, h_RF: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of the weights (e, D, F) by torch's grouped product; zeros for experts without tokens."""
    grad_eDF = torch._grouped_mm(grad_RD.t(), h_RF, offs=groups.ends_e)
    if forgets_empty_groups(grad_RD):
        grad_eDF.masked_fill_((groups.count_e == 0).view(-1, 1, 1), 0)
    return grad_eDF


def plain_add_gradient(total_HeFD: Tensor, grad_RN: Tensor, x_RD: Tensor, sizes: list[int], add: bool) -> None:
    """Add the gradients of H weights of each expert to their sums, in place, by a loop over experts.

    The reference of a kernel.

    Args:
        total_HeFD: the sums.
        grad_RN: the gradients of the products' outputs side by side, N = H * F.
        x_RD: the products' input.
        sizes: the number of each expert's tokens.
        add: False to overwrite the sums.
    """
    wide, width = torch.promote_types(total_HeFD.dtype, torch.float32), total_HeFD.shape[3]
    used = sum(sizes)
    per_expert = zip(grad_RN[:used].split(sizes), x_RD[:used].split(sizes), total_HeFD.unbind(1), strict=True)
    for grad, x, total_HFD in per_expert:
        gradient_HFD = (grad.t().to(wide) @ x.to(wide)).view(total_HFD.shape[0], -1, width)
        total_HFD.copy_(total_HFD + gradient_HFD if add else gradient_HFD)


def add_gradient(
    total_HeFD: Tensor, grad_RN: Tensor, x_RD: Tensor, groups: Groups, *, grouped: bool, kernels: str, add: bool
) -> None:
    """Add the gradients of H weights of each expert to their sums, in place.

    Args:
        total_HeFD: the sums.
        grad_RN: the gradients of the products' outputs side by side, N = H * F.
        x_RD: the products' input.
        groups: the number of each expert's tokens.
        grouped: whether a kernel may compute them on GPUs, as where torch's grouped product multiplies; else a loop
            does.
        kernels: the option `[moe] kernels`.
        add: False to overwrite the sums.
    """
    if grouped and fused(kernels, grad_RN):
        from titanmoe.ops.kernels.add_gradient import add_gradient as by_kernel

        by_kernel(total_HeFD, grad_RN, x_RD, groups.ends_e, add)
    else:
        plain_add_gradient(total_HeFD, grad_RN, x_RD, groups.sizes, add)


# Where torch's grouped product is used on which device and version of torch: the next two functions alone say it.


def can_group(x: Tensor, *widths: int) -> bool:
    """Return whether `torch._grouped_mm` can multiply these tokens, and faster than a loop over experts.

    It needs rows of whole 16-byte units, and no float64; on CPUs that is all. On GPUs it is one kernel in bfloat16 on
    Hopper and B200 (majors 9 and 10). In float32, and on other GPUs, torch 2.11 copies the counts to the host in each
    product and loops over experts: our loop does the same, with one copy per layer. (Later versions have the kernel on
    majors 11 and 12 too: github.com/pytorch/pytorch/pull/184334.)

    Args:
        x: the tokens, whose dtype and device count.
        widths: the numbers of elements in the rows of all operands.
    """
    if x.dtype == torch.float64 or any(width * x.element_size() % 16 for width in widths):
        return False
    if device.kind(x) == "cuda":
        return x.dtype == torch.bfloat16 and device.capability(x.device)[0] in (9, 10)
    return True


def forgets_empty_groups(x: Tensor) -> bool:
    """Return whether torch's grouped product on x's device may leave an empty expert's weight gradient unwritten.

    It does on Blackwell (github.com/pytorch/pytorch/issues/172439, still open, so every version is assumed to).
    """
    return device.kind(x) == "cuda" and device.capability(x.device) >= (10, 0)
