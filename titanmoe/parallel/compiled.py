"""torch.compile, one part of a block at a time.

Attention, dense layers and the head are one graph each, but of a head whose loss goes through slices of the vocabulary
only the norm is compiled, and of one that computes multi-token prediction after its norm only the loss. A block's own
norms are not: on GPUs they are one kernel anyway, and calling a graph takes the host several times as long. A MoE layer
is one graph, from router to combine and including its messages (`why_in_parts` says where it cannot be): sizes that
depend on the routing are read once, inside the graph, and any number of rows, none included, runs the same one. Experts
are an FSDP unit of their own, but their hooks run around the graph (`compile_layer`). Identical layers share their
graphs.

All sizes else are declared static (`dynamic=False`). Otherwise torch, which remembers all sizes that a function has
had in this process, would compile them as variables after a model with other sizes, and capacity_factor too.
"""

from __future__ import annotations

from copy import copy

import torch

from titanmoe.config.schema import Config
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.layer import MoE


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


def why_in_parts(config: Config, splits: bool) -> str:
    """Return why MoE layers are not compiled as one graph; "" if they are.

    Args:
        splits: whether the schedule splits backward.
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
            f'activation_checkpoint.mode = "{recomputed}" sends routed tokens to the experts again, and a graph would '
            'send all messages again; "full_except_dispatch" saves them'
        )
    if splits:
        return "a schedule that splits backward would send every gradient's rows twice"
    return ""


def compile_parts(model: Transformer, config: Config, splits: bool) -> None:
    """Compile each block's parts, and the head.

    Args:
        splits: whether the schedule splits backward.
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
        model.head.scores = torch.compile(model.head.scores, backend=options.backend, dynamic=False)
        parts = []
    for block in model.blocks().values():
        parts += [block.attention, block.ffn]
        if block.moe is not None and not why_in_parts(config, splits):
            compile_layer(block.moe, options.backend)
        elif block.moe is not None:
            parts.append(block.moe.shared)
    for part in parts:
        if part is not None:
            # The forward only: the module's hooks (FSDP's) stay outside the graph.
            part.forward = torch.compile(part.forward, backend=options.backend, dynamic=False)
