"""Connect every block's mixer to context parallelism, and compute attention by the backend that is picked for it.

`titanmoe.fold.attention_backend.pick_backend` picks the backend in each call, because it depends on the mask and the
device. Mixers without attention get the segments of the sequence that this rank has.

Shapes: B samples, S positions of this rank, L sequence, H query heads, G key heads, h head width, which may differ for
values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config.schema import Parallelism
from titanmoe.fold.attention_backend import FLEX_NARROWEST, head_widths, pick_backend
from titanmoe.mask import CAUSAL, Mask
from titanmoe.models.sequence_segments import SequenceSegments
from titanmoe.models.transformer import Transformer
from titanmoe.ops import device as hardware
from titanmoe.parallel import attention_kernel
from titanmoe.parallel.context import (
    OVER_CP,
    LseCallback,
    Placement,
    full_sequence_attention,
    placement,
    ulysses_attention,
)
from titanmoe.parallel.flex import Masks, flex, flex_attention_over
from titanmoe.parallel.torch_ring import missing, torch_ring_attention


def attend(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    mask: Mask = CAUSAL,
    sinks_H: Tensor | None = None,
    report_lse: LseCallback = None,
    *,
    backend: str,
    cp_kind: str,
    placement: Placement,
    masks: Masks,
    group: Group,
    ring_lacks: str = "",
    flex: Callable[..., Tensor] = flex,
) -> Tensor:
    """Return attention of this rank's queries to the full sequence, (B, S, H, width of a value). Collective over cp.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query that this rank computes, (B, H, S), with ulysses (B, H / cp, L)
            of the full sequence. Sinks are in it only in the "plain" implementation.
        backend: parallelism.attention_backend.
        cp_kind: parallelism.cp_kind, "ring", "allgather" or "ulysses".
        ring_lacks: what this version of torch lacks for its ring attention, as text; "" if nothing.
        flex: computes attention in place of `titanmoe.parallel.flex.flex`, with its arguments.

    Raises:
        ValueError: if the backend is "torch" and torch's own attention cannot compute this, with the reason.
    """
    implementation, why = pick_backend(
        backend,
        cp_kind,
        group.size,
        device=hardware.kind(q_BSHh),
        float64=q_BSHh.dtype == torch.float64,
        masked=mask.until_BL is not None or mask.window > 0,
        sinks=sinks_H is not None,
        ring_lacks=ring_lacks,
        narrow=min(q_BSHh.shape[-1], v_BSGh.shape[-1]) < FLEX_NARROWEST,
    )
    if backend == "torch" and why:
        raise ValueError(f'parallelism.attention_backend = "torch" cannot be used here: {why}; use "auto"')
    layout = {"placement": placement, "group": group}
    if implementation == "ring":
        return torch_ring_attention(q_BSHh, k_BSGh, v_BSGh, sinks_H, report_lse, **layout)
    inputs = (q_BSHh, k_BSGh, v_BSGh, mask, sinks_H, report_lse)
    if implementation == "flex" and group.size > 1 and cp_kind == "ulysses":
        over_heads = partial(flex_attention_over, masks=masks, group=NO_GROUP, flex=flex)
        return ulysses_attention(*inputs, **layout, full_attention=over_heads)
    if implementation == "flex":
        return flex_attention_over(*inputs, masks=masks, group=group, flex=flex)
    if mask.until_BL is not None:
        return _outside_graphs(cp_kind, *inputs, **layout)
    return _plain(cp_kind, *inputs, **layout)


def _plain(cp_kind: str, *inputs, **layout) -> Tensor:
    return OVER_CP[cp_kind](*inputs, **layout) if layout["group"].size > 1 else full_sequence_attention(*inputs)


_outside_graphs = torch.compiler.disable(_plain)
"""`_plain` outside compiled graphs: where documents are separate, the batch's values decide what is computed."""


def apply_context_parallel(
    model: Transformer, options: Parallelism, cp: Group, flex: Callable[..., Tensor] = flex
) -> None:
    """Set the function that computes attention in each block, or a mixer's sequence segments, in place.

    Also switches this process to the attention kernel that the recipe asks for. No communication.

    Args:
        model: a pipeline stage, which is changed in place.
        cp: the ranks of context parallelism, also where there is only one.
        flex: computes attention in place of `titanmoe.parallel.flex.flex`, with its arguments.
    """
    widths, deterministic = head_widths(model.shape), torch.are_deterministic_algorithms_enabled()
    attention_kernel.use(attention_kernel.pick(options.attention_kernel, *widths, deterministic))
    placed = placement(options)
    # After the all-to-all of ulysses a rank has the full sequence.
    split = cp.size > 1 and options.cp_kind != "ulysses"
    segments = SequenceSegments(tuple(placed.chunks_of(cp.rank)), tuple(placed.order()), cp)
    masks = Masks(placed, cp.rank) if split else Masks(Placement(1, zigzag=False), 0)
    compute = partial(
        attend,
        backend=options.attention_backend,
        cp_kind=options.cp_kind,
        placement=placed,
        masks=masks,
        group=cp,
        ring_lacks=missing(),
        flex=flex,
    )
    for block in model.blocks().values():
        if hasattr(block.attention, "segments"):
            block.attention.segments = segments
        if hasattr(block.attention, "attend"):
            block.attention.attend = compute
