"""Which attention runs: torch's own where it works, ours elsewhere. `pick_backend` decides, for each block of a model.

docs/parallelism.md shows the same as a table.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Parallelism
from titanmoe.models.transformer import Transformer
from titanmoe.ops import device as hardware
from titanmoe.parallel.context import KINDS, Placement, on_one_rank, ulysses_attention
from titanmoe.parallel.flex import Masks, flex, flex_attention_over
from titanmoe.parallel.torch_ring import missing, torch_ring_attention

Backend = Literal["plain", "ring", "flex"]
FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def pick_backend(
    asked: str, kind: str, cp: int, device: str, dtype: torch.dtype, masked: bool, sinks: bool
) -> tuple[Backend, str]:
    """And, where that is plain, why torch's would not do.

    masked: there are documents or a window.
    """
    if asked == "plain":
        return "plain", "it was asked for"
    if cp > 1 and kind == "ring":
        if masked:
            return "plain", "torch's ring knows neither documents nor windows"
        if device == "cpu" and asked == "auto":
            return "plain", "on CPUs auto takes ours, which knows masks too"
        if device != "cpu" and dtype == torch.float64:
            return "plain", "torch's attention on GPUs has no float64"
        lack = missing()
        return ("plain", lack) if lack else ("ring", "")
    if device == "cpu":
        return "plain", "flex_attention has no backward on CPUs"
    if dtype not in FLEX_DTYPES:
        return "plain", "torch's attention on GPUs has no float64"
    if masked or sinks or (cp > 1 and kind == "allgather"):
        return "flex", ""
    return "plain", ""  # causal alone: that is torch's scaled_dot_product_attention


def attend(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    document_BL: Tensor | None = None,
    window: int = 0,
    sinks_H: Tensor | None = None,
    *,
    asked: str,
    kind: str,
    placement: Placement,
    masks: Masks,
    group: Group,
) -> Tensor:
    masked, sinks = document_BL is not None or window > 0, sinks_H is not None
    chosen, why = pick_backend(asked, kind, group.size, hardware.kind(q_BSHh), q_BSHh.dtype, masked, sinks)
    if asked == "torch" and why:
        raise ValueError(f'parallelism.attention_backend = "torch" cannot hold here: {why}; use "auto"')
    rest = {"placement": placement, "group": group}
    if chosen == "ring":
        return torch_ring_attention(q_BSHh, k_BSGh, v_BSGh, sinks_H, **rest)
    given = (q_BSHh, k_BSGh, v_BSGh, document_BL, window, sinks_H)
    if group.size > 1 and kind == "ulysses":
        return ulysses_attention(
            *given, **rest, whole=partial(_flexed, masks=masks) if chosen == "flex" else on_one_rank
        )
    if chosen == "flex":
        return flex_attention_over(*given, masks=masks, group=group)
    return KINDS[kind](*given, **rest) if group.size > 1 else on_one_rank(*given)


def _flexed(q_BLHh, k_BLGh, v_BLGh, document_BL, window, sinks_H, *, masks: Masks) -> Tensor:
    return flex(q_BLHh, k_BLGh, v_BLGh, masks(k_BLGh.shape[1], document_BL, window, q_BLHh.device), sinks_H)


def context_parallel(model: Transformer, options: Parallelism, placement: Placement, cp: Group) -> None:
    """Every block's attention, with cp or without."""
    # After ulysses' exchange a rank has the whole sequence.
    split = cp.size > 1 and options.cp_kind != "ulysses"
    masks = Masks(placement, cp.rank) if split else Masks(Placement(1, zigzag=False), 0)
    for block in model.blocks().values():
        block.attention.attend = partial(
            attend, asked=options.attention_backend, kind=options.cp_kind, placement=placement, masks=masks, group=cp
        )
