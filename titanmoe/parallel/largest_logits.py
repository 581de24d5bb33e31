"""The largest attention logit of each head in a step: over its microbatches, samples and pairs that see each other.

Attention's kernels do not return it, so it costs a product of queries and keys for itself, and with cp a message of the
keys: hence not in every step, unless that is asked for. Sinks are no logits of a pair, and are left out.

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
from titanmoe.parallel.context import Placement, _heads_first

ROWS = 512
"""Queries at a time, to limit memory."""


@torch.no_grad()
def largest(q_BSHh: Tensor, k_BSGh: Tensor, mask: Mask, placement: Placement, group: Group) -> Tensor:
    """Of each query head, over this rank's queries and the keys of all ranks."""
    q, k = _heads_first(q_BSHh, placement.natural(all_gather(k_BSGh.contiguous(), 1, group), 1))
    q, k = promote(q).unflatten(1, (k.shape[1], -1)), promote(k).unsqueeze(2)
    out = q.new_full(q.shape[1:3], -torch.inf)
    for pair in placement.pairs(mask, q[:, 0], group.rank, range(placement.chunks)):
        for begin in range(0, pair.rows.stop - pair.rows.start, ROWS):
            own = slice(begin, begin + ROWS)
            scores = q[pair.samples, :, :, pair.rows][:, :, :, own] @ k[pair.samples, :, :, pair.columns].mT
            if pair.masked or pair.causal:
                queries = slice(pair.queries.start + begin, min(pair.queries.start + begin + ROWS, pair.queries.stop))
                seen = mask.seen(pair.samples, queries, pair.keys, q.device)
                scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            out = torch.maximum(out, scores.amax((0, 3, 4)) / math.sqrt(q.shape[-1]))
    return out.flatten()


class LargestLogits:
    def __init__(self, model: Model, stages: list[Transformer], placement: Placement, meshes: Meshes, every: int):
        """Listens to the attention of this rank's blocks. every: how many steps from one measurement to the next."""
        self.shape = model.num_layers + model.mtp_depth, model.num_heads
        self.meshes, self.every, self.measures = meshes, every, False
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
        if self.measures:
            own = largest(q, k, mask, placement, self.meshes.cp)
            self.by_layer[layer] = torch.maximum(own, self.by_layer.get(layer, own))
        return attend(q, k, v, mask, sinks)

    def begin_step(self, step: int) -> None:
        self.by_layer, self.measures = {}, step % self.every == 0

    def over_ranks(self, device: torch.device) -> Tensor | None:
        """(layers, heads), on every rank, at the end of a step that measures."""
        if not self.measures:
            return None
        self.measures = False
        out = torch.full(self.shape, -torch.inf, dtype=torch.float64, device=device)
        for layer, own in self.by_layer.items():
            first = self.meshes.tp.rank * len(own)
            out[layer, first : first + len(own)] = own
        return all_reduce(out, self.meshes.world, "max")
