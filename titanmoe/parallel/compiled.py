"""torch.compile, per part of a block.

Attention, dense layers, the experts and the head compile each as one graph. The experts are an FSDP unit of their own,
whose hooks would cut a whole block's graph; the dispatch between them runs as it is.
"""

from __future__ import annotations

import torch

from titanmoe.config.schema import Compile
from titanmoe.models.transformer import Transformer


def compile_parts(model: Transformer, options: Compile, compute: torch.dtype, runs_backward_twice: bool) -> None:
    if not options.enable:
        return
    if runs_backward_twice:
        # Zero-bubble schedules come back for the weight gradients: what backward saved must outlive its first use.
        torch._functorch.config.donated_buffer = False
    parts = [model.head]
    for block in model.blocks().values():
        parts += [block.attention_norm, block.attention, block.ffn_norm, block.ffn]
        if block.moe is not None:
            parts.append(block.moe.shared)
            if compute == torch.bfloat16:  # what torch's grouped product can be traced in
                experts = block.moe.experts  # not its forward, in which rows may be under way
                experts.products = torch.compile(experts.products, backend=options.backend)
    for part in parts:
        if part is not None:
            # The forward only: the module's hooks (FSDP's) stay outside the graph.
            part.forward = torch.compile(part.forward, backend=options.backend)
