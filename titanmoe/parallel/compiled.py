"""torch.compile, per part of a block.

Attention, dense layers and the head compile each as one graph. A MoE layer whose bins are padded does too, from router
to combine, its all-to-alls within: experts and router are FSDP units of their own, but their hooks run around the graph
(`titanmoe.moe.layer.MoE.forward`). Where sizes follow the routing the dispatch runs as it is, beside graphs of the
experts and the shared expert. However many rows a rank's experts are sent then, none and one as well, they run the one
graph of their first call. Layers that are alike share their graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titanmoe.config.schema import Config
from titanmoe.fold.schedules import splits_backward
from titanmoe.models.transformer import Transformer
from titanmoe.moe.experts import Experts


def compile_products(experts: Experts, backend: str, static: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts' products as one graph. static: every call has as many rows, as where bins are padded."""
    plain = experts.products

    def products(x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        torch._check(x_RD.shape[0] == weight_R1.shape[0])
        return plain(x_RD, weight_R1, count_e)

    compiled = torch.compile(products, backend=backend, fullgraph=True)

    def run(x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        if not experts.groups(x_RD):  # a loop over the experts asks the host for each one's rows
            return plain(x_RD, weight_R1, count_e)
        if not static:
            for rows in (x_RD, weight_R1):
                torch._dynamo.decorators.mark_unbacked(rows, 0)
        return compiled(x_RD, weight_R1, count_e)

    return run


def why_in_parts(config: Config) -> str:
    """Why a MoE layer is not compiled as one graph; "" where it is."""
    if not config.moe.pad_to_capacity:
        return "sizes follow the routing (moe.pad_to_capacity = false)"
    if config.moe.expert_dtype != "compute":
        return f'products in 8 bits are not traced (moe.expert_dtype = "{config.moe.expert_dtype}")'
    if splits_backward(config):
        return "a schedule that splits backward would send every gradient's rows twice"
    return ""


def compile_parts(model: Transformer, config: Config) -> None:
    options, compute = config.compile, getattr(torch, config.training.mixed_precision_param)
    if not options.enable:
        return
    if splits_backward(config):
        # Zero-bubble schedules come back for the weight gradients: what backward saved must outlive its first use.
        torch._functorch.config.donated_buffer = False
    parts = [model.head]
    for block in model.blocks().values():
        parts += [block.attention_norm, block.attention, block.ffn_norm, block.ffn]
        if block.moe is not None and not why_in_parts(config):
            block.moe.graph = torch.compile(block.moe.whole, backend=options.backend, fullgraph=True)
        elif block.moe is not None:
            parts.append(block.moe.shared)
            experts = block.moe.experts
            # what torch's grouped product can be traced in; not its forward, in which rows may be under way
            if compute == torch.bfloat16 and experts.dtype == "compute":
                experts.products = compile_products(experts, options.backend, block.moe.pad)
    for part in parts:
        if part is not None:
            # The forward only: the module's hooks (FSDP's) stay outside the graph.
            part.forward = torch.compile(part.forward, backend=options.backend)
