"""torch.compile, one part of a block at a time.

Attention, dense layers and the head are one graph each, but of a head whose loss goes through slices of the vocabulary
only the norm is compiled, and of one that computes multi-token prediction after its norm only the loss. A block's own
norms are not: on GPUs they are one kernel anyway, and calling a graph takes the host several times as long. A MoE layer
with padded bins is one graph too, from router to combine and including its all-to-alls: experts are an FSDP unit of
their own, but their hooks run around the graph (`compile_layer`). If sizes depend on the routing, dispatch is not
compiled, only the experts and the shared expert. Any number of rows, including none and one, then runs the graph of the
experts' first call. Identical layers share their graphs.

All other sizes are declared static (`dynamic=False`). Otherwise torch, which remembers all sizes that a function has
had in this process, would compile them as variables after a model with other sizes, and capacity_factor too.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import local
from titanmoe.config.schema import Compile as Options
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.models.transformer import Transformer
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped import forgets_empty_groups
from titanmoe.moe.layer import MoE


def compile_products(experts: Experts, backend: str, static: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts' products as one graph. static: whether every call has as many rows, as with padded bins."""
    plain = experts.products

    def products(x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        torch._check(x_RD.shape[0] == weight_R1.shape[0])
        return plain(x_RD, weight_R1, count_e)

    compiled = torch.compile(products, backend=backend, fullgraph=True, dynamic=False if static else None)

    def run(x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        # The loop over experts reads each one's number of rows on the host, and a graph cannot zero the gradients that
        # the grouped product leaves unwritten.
        if not experts.uses_grouped_mm(x_RD, local(experts.w1)) or (forgets_empty_groups(x_RD) and not static):
            return plain(x_RD, weight_R1, count_e)
        if static:
            return compiled(x_RD, weight_R1, count_e)
        rows = x_RD.shape[0]
        if rows == 0:  # inductor refuses an empty operand of a weight gradient; a row of zeros adds exact zeros
            x_RD, weight_R1 = F.pad(x_RD, (0, 0, 0, 1)), F.pad(weight_R1, (0, 0, 0, 1))
            count_e = (torch.arange(count_e.shape[0], device=count_e.device) == 0).to(count_e.dtype)
        for x in (x_RD, weight_R1):
            torch._dynamo.decorators.mark_unbacked(x, 0)
        y_RD = compiled(x_RD, weight_R1, count_e)
        return y_RD if rows else y_RD[:0]

    return run


def compile_layer(moe: MoE, backend: str) -> None:
    """A MoE layer as one graph.

    Hooks that gather weights cannot be part of it. So calling the layer calls the experts, whose hooks run around the
    graph.
    """
    experts = moe.experts
    graph = torch.compile(_without_hooks(moe).forward, backend=backend, fullgraph=True, dynamic=False)
    moe.forward = lambda x_BsD, tokens: experts(x_BsD, tokens)
    experts.forward = graph


def _without_hooks(moe: MoE) -> MoE:
    """The same layer, with the plain forward function instead of the experts module, which has hooks."""
    bare = copy(moe)
    bare._modules = {name: part for name, part in moe._modules.items() if name != "experts"}
    vars(bare).update(experts=moe.experts.forward)
    return bare


def why_in_parts(options: MoEOptions, splits: bool) -> str:
    """Why MoE layers are not compiled as one graph; "" if they are. splits: whether the schedule splits backward."""
    if not options.pad_to_capacity:
        return "sizes depend on the routing (moe.pad_to_capacity = false)"
    if options.expert_dtype != "compute":
        return f'products in 8 bits cannot be traced (moe.expert_dtype = "{options.expert_dtype}")'
    if splits:
        return "a schedule that splits backward would send every gradient's rows twice"
    return ""


def compile_parts(model: Transformer, options: Options, moe: MoEOptions, compute: torch.dtype, splits: bool) -> None:
    """Compiles each block's parts, and the head. splits: whether the schedule splits backward."""
    if not options.enable:
        return
    if splits:
        # Such schedules run backward twice, later for the weight gradients: saved buffers must outlive the first run.
        torch._functorch.config.donated_buffer = False
    parts = [model.head]
    if model.mtp is not None and model.shape.mtp_after_norm:
        # This head's forward computes a block too, whose parts are graphs of their own.
        model.head.scores = torch.compile(model.head.scores, backend=options.backend, dynamic=False)
        parts = []
    for block in model.blocks().values():
        parts += [block.attention, block.ffn]
        if block.moe is not None and not why_in_parts(moe, splits):
            compile_layer(block.moe, options.backend)
        elif block.moe is not None:
            parts.append(block.moe.shared)
            experts = block.moe.experts
            # Only the products: rows may be in flight in forward. torch's grouped product only traces in bfloat16.
            if compute == torch.bfloat16 and experts.dtype == "compute":
                experts.products = compile_products(experts, options.backend, block.moe.pad)
    for part in parts:
        if part is not None:
            # The forward only: the module's hooks (FSDP's) stay outside the graph.
            part.forward = torch.compile(part.forward, backend=options.backend, dynamic=False)
