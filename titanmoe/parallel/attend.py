"""Gives every block the attention that `titanmoe.fold.attention_backend.pick_backend` picks, or its runs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Parallelism
from titanmoe.fold.attention_backend import FLEX_NARROWEST, head_widths, pick_backend
from titanmoe.mask import CAUSAL, Mask
from titanmoe.models.runs import Runs
from titanmoe.models.transformer import Transformer
from titanmoe.ops import device as hardware
from titanmoe.parallel import attention_kernel
from titanmoe.parallel.context import OVER_CP, Placement, TellLse, on_one_rank, ulysses_attention
from titanmoe.parallel.flex import Masks, flex, flex_attention_over
from titanmoe.parallel.torch_ring import missing, torch_ring_attention


def attend(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    mask: Mask = CAUSAL,
    sinks_H: Tensor | None = None,
    tell_lse: TellLse = None,
    *,
    backend: str,
    kind: str,
    placement: Placement,
    masks: Masks,
    group: Group,
    ring_lacks: str = "",
    flex: Callable[..., Tensor] = flex,
) -> Tensor:
    masked, sinks = mask.until_BL is not None or mask.window > 0, sinks_H is not None
    device, float64 = hardware.kind(q_BSHh), q_BSHh.dtype == torch.float64
    narrow = min(q_BSHh.shape[-1], v_BSGh.shape[-1]) < FLEX_NARROWEST
    implementation, why = pick_backend(backend, kind, group.size, device, float64, masked, sinks, ring_lacks, narrow)
    if backend == "torch" and why:
        raise ValueError(f'parallelism.attention_backend = "torch" cannot be used here: {why}; use "auto"')
    layout = {"placement": placement, "group": group}
    if implementation == "ring":
        return torch_ring_attention(q_BSHh, k_BSGh, v_BSGh, sinks_H, tell_lse, **layout)
    inputs = (q_BSHh, k_BSGh, v_BSGh, mask, sinks_H, tell_lse)
    if implementation == "flex" and group.size > 1 and kind == "ulysses":
        return ulysses_attention(*inputs, **layout, whole=partial(_flexed, masks=masks, flex=flex))
    if implementation == "flex":
        return flex_attention_over(*inputs, masks=masks, group=group, flex=flex)
    if mask.until_BL is not None:
        return _outside_graphs(kind, *inputs, **layout)
    return _plain(kind, *inputs, **layout)


def _plain(kind: str, *inputs, **layout) -> Tensor:
    return OVER_CP[kind](*inputs, **layout) if layout["group"].size > 1 else on_one_rank(*inputs)


_outside_graphs = torch.compiler.disable(_plain)
"""A graph cannot depend on the values of a batch, and what is computed does, where documents are kept apart."""


def _flexed(q_BLHh, k_BLGh, v_BLGh, mask: Mask, sinks_H, tell_lse, *, masks: Masks, flex) -> Tensor:
    return flex(q_BLHh, k_BLGh, v_BLGh, masks(k_BLGh.shape[1], mask, q_BLHh.device), sinks_H, tell_lse)


def context_parallel(
    model: Transformer, options: Parallelism, placement: Placement, cp: Group, flex: Callable[..., Tensor] = flex
) -> None:
    """Sets every block's attention or runs, with or without cp, and the kernel for attention."""
    widths, deterministic = head_widths(model.shape), torch.are_deterministic_algorithms_enabled()
    attention_kernel.use(attention_kernel.pick(options.attention_kernel, *widths, deterministic))
    # After the all-to-all of ulysses a rank has the whole sequence.
    split = cp.size > 1 and options.cp_kind != "ulysses"
    runs = Runs(tuple(placement.chunks_of(cp.rank)), tuple(placement.order()), cp)
    masks = Masks(placement, cp.rank) if split else Masks(Placement(1, zigzag=False), 0)
    for block in model.blocks().values():
        if hasattr(block.attention, "runs"):
            block.attention.runs = runs
        if not hasattr(block.attention, "attend"):
            continue
        block.attention.attend = partial(
            attend,
            backend=options.attention_backend,
            kind=options.cp_kind,
            placement=placement,
            masks=masks,
            group=cp,
            ring_lacks=missing(),
            flex=flex,
        )
