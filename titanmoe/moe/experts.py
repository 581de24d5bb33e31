"""The experts of this rank: a grouped SwiGLU, with biases where the family has them.

Shapes: R routed rows sorted by local expert, e local experts, D model, F this rank's hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import local
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.dispatch import Dispatcher
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.moe.fp8 import Quantised, Rounded, plain_scaled_rows, quantise, scaled_rows
from titanmoe.observe import region
from titanmoe.ops import device
from titanmoe.ops.cpu import rowwise, whole_units
from titanmoe.ops.kernels import fused
from titanmoe.ops.split_backward import gradient_wanted, with_own_node

Product = Callable[[Tensor, Tensor, Any], Tensor]


class Groups:
    """How many rows each expert has, in the forms that products take: each is made once for all products of a layer,
    those of backward too.
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
    """Rows of expert i times its matrix, one product per expert. Empty groups give exact zero gradients.

    Rows after the last expert's, which only a static buffer has, are zero here and arbitrary in `grouped_product`.
    """
    sizes = groups_of(count).sizes
    *groups, unused = x_RD.split([*sizes, x_RD.shape[0] - sum(sizes)])
    products = [x @ w.t() for x, w in zip(groups, w_eFD.unbind(), strict=True)]
    return torch.cat([*products, unused.new_zeros(unused.shape[0], w_eFD.shape[1])])


def grouped_product(x_RD: Tensor, w_eFD: Tensor, count: Tensor | Groups) -> Tensor:
    """The same in one call to torch's grouped matrix product."""
    # Traced code has no Groups.
    ends_e = count.ends_e if isinstance(count, Groups) else count.cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=ends_e)


def even_product(x_RD: Tensor, w_eFD: Tensor, count: Tensor | Groups) -> Tensor:
    """The same if all experts have equally many rows: their number is in the shape, so any dtype can be traced."""
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
    github.com/pytorch/pytorch/issues/172439. It is still open, so no version is taken to be free of it.
    """
    return device.kind(x) == "cuda" and device.capability(x.device) >= (10, 0)


def membership(count_e: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(R, e): 1 where a row belongs to an expert. Times the biases it gives each row its own; its transpose sums their
    gradients.
    """
    row_R1, end_e = torch.arange(rows, device=count_e.device).unsqueeze(1), count_e.cumsum(0)
    return ((row_R1 >= end_e - count_e) & (row_R1 < end_e)).to(dtype)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's activation: the gate is at most 7, the up projection within 7 of 0 and then shifted by 1."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def plain_swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool) -> Tensor:
    """The input of the down projection, times the routing weight: applied here, backward needs no expert's output."""
    gate, up = gate_RF.to(weight_R1.dtype), up_RF.to(weight_R1.dtype)
    h_RF = clamped_swiglu(gate, up) if clamped else F.silu(gate) * up
    return (h_RF * weight_R1).to(gate_RF.dtype)


def plain_swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool
) -> tuple[Tensor, ...]:
    """The value of `plain_swiglu`, and the gradients of its tensors."""
    leaves = [x.detach().requires_grad_() for x in (gate_RF, up_RF, weight_R1)]
    with torch.enable_grad():
        h_RF = plain_swiglu(*leaves, clamped)
    return h_RF.detach(), *torch.autograd.grad(h_RF, leaves, grad_RF)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """The down projection's input and its gradients: by a kernel on GPUs, in blocks of rows on CPUs, else plainly."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    plain = partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
    return plain if clamped else device.way(x, plain, cpu=(rowwise.swiglu, rowwise.swiglu_backward))


def plain_down(
    gate_RF: Tensor,
    up_RF: Tensor,
    weight_R1: Tensor,
    w2_eDF: Tensor,
    count: Tensor | Groups,
    grouped: bool,
    clamped: bool,
    even: bool = False,
) -> Tensor:
    product = product_of(grouped, "compute", even)
    return product(plain_swiglu(gate_RF, up_RF, weight_R1, clamped), w2_eDF, count)


def scaled_product(
    x: Tensor | Quantised, weights: Quantised, count: Tensor | Groups, kernels: str = "auto", emulated: bool = False
) -> Tensor:
    """The product in 8 bits, or by its formula; without gradients. The rows may be rounded already."""
    rows, groups = quantise(x, kernels) if isinstance(x, Tensor) else x, groups_of(count)
    return plain_scaled_rows(rows, weights, groups.sizes) if emulated else scaled_rows(rows, weights, groups.ends_e)


def product_of(grouped: bool, dtype: str, even: bool = False, kernels: str = "auto") -> Product:
    """By `[moe] expert_dtype`; those in 8 bits have no gradients."""
    if dtype != "compute":
        return partial(scaled_product, kernels=kernels, emulated=dtype == "fp8_emulated")
    if even:
        return even_product
    return grouped_product if grouped else grouped_loop


class _Products(torch.autograd.Function):
    """Products of the same rows with several weights; in 8 bits, the rows are rounded once."""

    @staticmethod
    def forward(ctx, x_RD, groups, grouped, kernels, rounded, *weights):
        ctx.save_for_backward(x_RD, *weights)
        ctx.groups, ctx.grouped, ctx.kernels, ctx.rounded = groups, grouped, kernels, rounded
        product = product_of(grouped, rounded.dtype, kernels=kernels)
        rows = x_RD if rounded.dtype == "compute" else quantise(x_RD, kernels)
        return tuple(product(rows, rounded(f"up {i}", w), groups) for i, w in enumerate(weights))

    @staticmethod
    def backward(ctx, *grads):
        x_RD, *weights = ctx.saved_tensors
        grad_x, grad_weights = None, [None] * len(weights)
        grads = [grad.contiguous() for grad in grads]
        if gradient_wanted(ctx, 0):
            product = product_of(ctx.grouped, ctx.rounded.dtype, kernels=ctx.kernels)
            across = [ctx.rounded(f"up {i}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
            grad_x, *others = (product(g, w, ctx.groups) for g, w in zip(grads, across, strict=True))
            for other in others:
                grad_x += other
        if gradient_wanted(ctx, 1):  # its index among the inputs that are tensors
            gradient = grouped_gradient if ctx.grouped else loop_gradient
            grad_weights = [gradient(g, x_RD, ctx.groups) for g in grads]
        return grad_x, None, None, None, None, *grad_weights


def products(
    x_RD: Tensor, count: Tensor | Groups, grouped: bool, kernels: str, rounded: Rounded, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Rows of expert i times each of its matrices."""
    how = (groups_of(count), grouped, kernels, rounded)
    return _Products.apply(with_own_node(x_RD), *how, *map(with_own_node, weights))


class _Down(torch.autograd.Function):
    """plain_down that saves only its inputs: 2F numbers per row instead of 5F. Backward recomputes the activation."""

    @staticmethod
    def forward(ctx, gate_RF, up_RF, weight_R1, w2_eDF, groups, grouped, clamped, kernels, rounded):
        ctx.save_for_backward(gate_RF, up_RF, weight_R1, w2_eDF)
        ctx.groups, ctx.grouped, ctx.clamped, ctx.kernels, ctx.rounded = groups, grouped, clamped, kernels, rounded
        make, _ = activation(gate_RF, clamped, kernels)
        product = product_of(grouped, rounded.dtype, kernels=kernels)
        return product(make(gate_RF, up_RF, weight_R1), rounded("down", w2_eDF), groups)

    @staticmethod
    def backward(ctx, grad_RD):
        gate_RF, up_RF, weight_R1, w2_eDF = ctx.saved_tensors
        inputs, weights = gradient_wanted(ctx, 0), gradient_wanted(ctx, 3)
        grad_RD = grad_RD.contiguous()
        product = product_of(ctx.grouped, ctx.rounded.dtype, kernels=ctx.kernels)
        gradient = grouped_gradient if ctx.grouped else loop_gradient
        make, differentiate = activation(gate_RF, ctx.clamped, ctx.kernels)
        grads, made = (None, None, None), (gate_RF, up_RF, weight_R1)
        if inputs:
            across = ctx.rounded("down, across", w2_eDF.transpose(1, 2))
            h_RF, *grads = differentiate(product(grad_RD, across, ctx.groups), *made)
        else:
            h_RF = make(*made)
        grad_w2 = gradient(grad_RD, h_RF, ctx.groups) if weights else None
        return *grads, grad_w2, None, None, None, None, None


def down(
    gate_RF: Tensor,
    up_RF: Tensor,
    weight_R1: Tensor,
    w2_eDF: Tensor,
    count: Tensor | Groups,
    grouped: bool,
    clamped: bool,
    kernels: str = "auto",
    rounded: Rounded | None = None,
    even: bool = False,
) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler fuses, and chooses what to save
        return plain_down(gate_RF, up_RF, weight_R1, w2_eDF, count, grouped, clamped, even)
    w2_eDF, groups = with_own_node(w2_eDF), groups_of(count)
    return _Down.apply(gate_RF, up_RF, weight_R1, w2_eDF, groups, grouped, clamped, kernels, rounded or Rounded())


class Experts(nn.Module):
    def __init__(self, model: Model, options: MoEOptions, dtype: torch.dtype):
        super().__init__()
        shape = (model.num_experts, model.expert_hidden, model.dim)
        self.w1 = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(shape[0], shape[2], shape[1], dtype=dtype))
        self.unused_rows = DISPATCHERS.look_up(options.dispatcher).unused_rows
        self.even_rows = options.pad_to_capacity
        self.w1_bias = self.w3_bias = self.w2_bias = None
        if model.expert_biases:
            self.w1_bias, self.w3_bias = (nn.Parameter(torch.empty(shape[:2], dtype=dtype)) for _ in range(2))
            self.w2_bias = nn.Parameter(torch.empty(shape[0], shape[2], dtype=dtype))
        self.clamped = model.expert_activation == "clamped_swiglu"
        self.grouped_mm, self.kernels, self.dtype = options.grouped_mm, options.kernels, options.expert_dtype
        self.rounded = Rounded(self.dtype, self.kernels)
        self.set_etp_rank(0)

    def set_etp_rank(self, etp_rank: int) -> None:
        """Decides the columns that this rank adds the last bias to; called when the model is placed on the meshes."""
        self.etp_rank = etp_rank

    def forward(self, parts: list, dispatcher: Dispatcher) -> list:
        """Run each part through the experts and send it back, while the next parts are still arriving.

        One call per layer, so that hooks around it, such as gathering sharded weights, run once.
        """
        back = []
        for part in parts:
            x_RD, weight_R1, count_e, splits = dispatcher.arrive(part)
            with region("experts"):
                y_RD = self.products(x_RD, weight_R1, count_e)
            back.append(dispatcher.leave(y_RD, splits))
        return back

    def uses_grouped_mm(self, x_RD: Tensor, w1_eFD: Tensor) -> bool:
        """Whether these rows go through torch's grouped product."""
        return self.grouped_mm != "loop" and can_group(x_RD, *w1_eFD.shape[1:])

    def products(self, x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        run = self.products_of_rows
        if self.dtype == "compute" and not self.unused_rows and self.uses_grouped_mm(x_RD, local(self.w1)):
            run = device.way(x_RD, run, cpu=partial(whole_units.run, run))
        return run(x_RD, weight_R1, count_e)

    def products_of_rows(self, x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        w1_eFD, w3_eFD, w2_eDF = local(self.w1), local(self.w3), local(self.w2)
        compiling = torch.compiler.is_compiling()
        # The formula of products in 8 bits is a loop.
        grouped = self.uses_grouped_mm(x_RD, w1_eFD) and self.dtype != "fp8_emulated"
        # torch's grouped product can only be traced in bfloat16, the loop not at all.
        even = self.even_rows and compiling and not (grouped and x_RD.dtype == torch.bfloat16)
        how = (grouped, self.clamped, self.kernels, self.rounded, even)
        if compiling:
            product, count = product_of(grouped, self.dtype, even), count_e
            gate_RF, up_RF = product(x_RD, w1_eFD, count), product(x_RD, w3_eFD, count)
        else:
            count = Groups(count_e)
            gate_RF, up_RF = products(x_RD, count, grouped, self.kernels, self.rounded, w1_eFD, w3_eFD)
        if self.w1_bias is None:
            return down(gate_RF, up_RF, weight_R1, w2_eDF, count, *how)
        member_Re = membership(count_e, x_RD.shape[0], gate_RF.dtype)
        gate_RF = torch.addmm(gate_RF, member_Re, local(self.w1_bias))
        up_RF = torch.addmm(up_RF, member_Re, local(self.w3_bias))
        if self.unused_rows:  # 0 * NaN is NaN: mask, do not multiply
            used_R1 = torch.arange(x_RD.shape[0], device=x_RD.device).unsqueeze(1) < count_e.sum()
            gate_RF, up_RF = gate_RF.where(used_R1, 0), up_RF.where(used_R1, 0)
        y_RD = down(gate_RF, up_RF, weight_R1, w2_eDF, count, *how)
        # The etp ranks of an expert return summands: each adds the bias to its own columns only.
        bias_ed = local(self.w2_bias)
        before = self.etp_rank * bias_ed.shape[1]
        bias_eD = F.pad(bias_ed, (before, y_RD.shape[1] - before - bias_ed.shape[1]))
        return torch.addmm(y_RD, (member_Re * weight_R1).to(y_RD.dtype), bias_eD)
