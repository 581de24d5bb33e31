"""Compile a model with torch.compile, one module of a block at a time. Called by titanmoe.parallel.apply.

Attention, dense layers and the head are one graph each; a MoE layer is one graph from router to combine, collectives
included (`why_not_one_graph` lists the exceptions). Sizes that depend on the routing are read inside the graph, so any
number of routed tokens runs the same graph; all others are static. Norms of a block stay eager: each is one kernel, and
calling a graph costs the host several times as long.

Shapes: B samples, s owned positions, D model.
"""

from __future__ import annotations

from copy import copy

import torch

from titanmoe.config.schema import Config
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import Head
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.layer import MoE


def compile_layer(moe: MoE, backend: str) -> None:
    """Compile a MoE layer as one graph, in place. torch compiles it in its first call.

    Hooks that gather weights cannot be part of the graph. So calling the layer calls its experts, whose hooks run
    around the graph.

    Args:
        moe: the layer, whose `forward` and whose experts' `forward` are replaced.
        backend: the name of a backend of torch.compile, such as "inductor" (compile.backend).
    """
    experts = moe.experts
    graph = torch.compile(_without_hooks(moe).forward, backend=backend, fullgraph=True, dynamic=False)
    moe.forward = lambda x_BsD, tokens: experts(x_BsD, tokens)
    experts.forward = graph


def _without_hooks(moe: MoE) -> MoE:
    """Return a shallow copy of the layer that calls the experts' forward method itself, and so none of their hooks."""
    bare = copy(moe)
    bare._modules = {name: part for name, part in moe._modules.items() if name != "experts"}
    vars(bare).update(experts=moe.experts.forward)
    return bare


def why_not_one_graph(config: Config, splits: bool) -> str:
    """Return why MoE layers cannot be compiled as one graph, as text; "" if they can.

    Args:
        splits: whether the pipeline schedule splits backward into gradients of inputs and gradients of weights.
    """
    options, recomputed = config.moe, config.activation_checkpoint.mode
    if not DISPATCHERS.look_up(options.dispatcher).traceable:
        return f'torch.compile cannot trace moe.dispatcher = "{options.dispatcher}"'
    if options.expert_dtype != "compute":
        return f'products in 8 bits cannot be traced (moe.expert_dtype = "{options.expert_dtype}")'
    if options.overlap != "none":
        return f'moe.overlap = "{options.overlap}" computes attention, or another microbatch, inside the layer'
    if recomputed in ("moe", "full"):
        return (
            f'activation_checkpoint.mode = "{recomputed}" sends routed tokens to the experts twice, and a graph '
            'would send all messages twice: use "full_except_dispatch", which saves them'
        )
    if splits:
        return "a schedule that splits backward would send the gradients of routed tokens twice"
    return ""


def compile_model(model: Transformer, config: Config, splits: bool) -> None:
    """Compile the mixer and the dense or MoE layer of each block, and the head, in place, if compile.enable is true.

    Of a MoE layer that cannot be one graph only the shared expert is compiled. With `splits` it also turns off torch's
    donated buffers, for the process.

    Args:
        splits: whether the pipeline schedule splits backward into gradients of inputs and gradients of weights.
    """
    options = config.compile
    if not options.enable:
        return
    if splits:
        # Such schedules run backward twice, later for the weight gradients: saved buffers must outlive the first run.
        torch._functorch.config.donated_buffer = False
    parts = [model.head]
    if model.mtp is not None and model.shape.mtp_after_norm:
        # This head's forward computes a block too, whose parts are graphs of their own.
        if isinstance(model.head, Head):
            model.head.loss_and_entropy = torch.compile(
                model.head.loss_and_entropy, backend=options.backend, dynamic=False
            )
        parts = []
    for block in model.blocks().values():
        parts += [block.attention, block.ffn]
        if block.moe is not None and not why_not_one_graph(config, splits):
            compile_layer(block.moe, options.backend)
        elif block.moe is not None:
            parts.append(block.moe.shared)
    for part in parts:
        if part is not None:
            # The forward only: the module's hooks (FSDP's) stay outside the graph.
            part.forward = torch.compile(part.forward, backend=options.backend, dynamic=False)
