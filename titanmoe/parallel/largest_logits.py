"""Measure the largest attention logit of each head in a step, for QK-Clip and metrics.

The maximum is over the step's microbatches, samples and pairs that see each other. Attention's kernels do not return
it, so it costs one more product of queries and keys, and with cp a gather of the keys: it is measured every so many
steps. Or it is bounded by the log-sum-exp of each query, which the kernels save for backward:
largest <= log-sum-exp <= largest + ln(keys). Sinks are no logits of a pair, and are left out.

Shapes: B samples, S positions of the attention slice, H query heads and G key heads of this rank, h head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group, all_gather, all_reduce
from titanmoe.config.schema import Model
from titanmoe.fold.meshes import Meshes
from titanmoe.mask import CAUSAL, Mask
from titanmoe.models.layers import promote
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.context import Placement, heads_first

SCORES = 1 << 25
"""Largest number of logits at a time, unless one query sees more keys: 128 MiB in float32 for any sequence length."""


@torch.no_grad()
def largest(q_BSHh: Tensor, k_BSGh: Tensor, mask: Mask, placement: Placement, group: Group) -> Tensor:
    """Return the largest attention logit of each query head (H,), over this rank's queries and all keys they see.

    Logits are divided by sqrt(h); sinks are none. Collective over cp, whose ranks' results differ. Not differentiable.

    Args:
        q_BSHh: queries of this rank's positions, as attention gets them.
    """
    q, k = heads_first(q_BSHh, placement.to_sequence_order(all_gather(k_BSGh.contiguous(), 1, group)))
    q, k = promote(q).unflatten(1, (k.shape[1], -1)), promote(k).unsqueeze(2)
    out = q.new_full(q.shape[1:3], -torch.inf)
    for pair in placement.pairs(mask, q[:, 0], group.rank, range(placement.chunks)):
        mine, keys = q[pair.samples, :, :, pair.rows], k[pair.samples, :, :, pair.columns]
        step = max(1, SCORES // (mine[:, :, :, 0, 0].numel() * keys.shape[3]))
        for begin in range(0, mine.shape[3], step):
            scores = (mine[:, :, :, begin : begin + step] @ keys.mT).div_(math.sqrt(q.shape[-1]))
            if pair.masked or pair.causal:
                first = pair.queries.start + begin
                queries = slice(first, min(first + step, pair.queries.stop))
                seen = mask.seen(pair.samples, queries, pair.keys, q.device)
                scores.masked_fill_(~seen[:, None, None], -torch.inf)
            out = torch.maximum(out, scores.amax((0, 3, 4)))
    return out.flatten()


class LargestLogits:
    """A meter of the largest attention logit of each head in a step, over all blocks of this rank and all ranks."""

    def __init__(
        self,
        *,
        model: Model,
        stages: list[Transformer],
        placement: Placement,
        meshes: Meshes,
        every: int,
        by_bound: bool = False,
    ):
        """Wrap the attention of this rank's blocks.

        Args:
            stages: this rank's stages of the model, which are changed in place.
            every: number of steps from one measurement to the next.
            by_bound: whether to take the log-sum-exp, an upper bound of the largest logit, instead of computing it.
                Not for models with sinks, which may be in it.
        """
        self.shape = model.num_layers + model.mtp_depth, model.num_heads
        self.meshes, self.every, self.by_bound, self.measures = meshes, every, by_bound, False
        self.by_layer: dict[int, Tensor] = {}
        for stage in stages:
            for layer, block in stage.blocks().items():
                inner = block.attention.attend
                block.attention.attend = partial(self._attend, inner, layer, placement)

    def _attend(
        self,
        attend: Callable[..., Tensor],
        layer: int,
        placement: Placement,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask = CAUSAL,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not self.measures:
            return attend(q, k, v, mask, sinks)
        if self.by_bound:
            return attend(q, k, v, mask, sinks, lambda lse: self._note(layer, lse.amax((0, 2))))
        self._note(layer, largest(q, k, mask, placement, self.meshes.cp))
        return attend(q, k, v, mask, sinks)

    def _note(self, layer: int, largest_H: Tensor) -> None:
        self.by_layer[layer] = torch.maximum(largest_H, self.by_layer.get(layer, largest_H))

    def begin_step(self, step: int) -> None:
        """Drop the logits of the last step, and measure in this step if `every` divides its number."""
        self.by_layer, self.measures = {}, step % self.every == 0

    def reduce_over_ranks(self, device: torch.device) -> Tensor | None:
        """Return the largest logits (layers, heads), float64, at the end of a step; None if it was not measured.

        Rows are all blocks of the model, those of multi-token prediction last; -inf where nothing was computed.
        Collective over the world in steps that are measured. Called once per step: a second call returns None.
        """
        if not self.measures:
            return None
        self.measures = False
        out = torch.full(self.shape, -torch.inf, dtype=torch.float64, device=device)
        heads, cp = self.shape[1] // self.meshes.tp.size, self.meshes.cp.rank
        for layer, largest_H in self.by_layer.items():
            # With ulysses each rank of cp has a part of the heads.
            first = self.meshes.tp.rank * heads + cp * len(largest_H) * (len(largest_H) < heads)
            out[layer, first : first + len(largest_H)] = largest_H
        return all_reduce(out, self.meshes.world, "max")
