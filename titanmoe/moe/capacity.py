"""Capacity: an expert takes at most C tokens per scope, C = ceil(capacity_factor * K * L / E); the others are dropped.

L counts the scope's token positions, including padding, so C is static. The scope is the tokens that one rank owns in
one microbatch (sub_sequence), or a sample (full_sequence), which needs the choices of every rank that has some of it.

Shapes: T tokens this rank owns, N tokens of all ranks that have some of its samples, K top-k, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group, all_gather
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.tokens import Tokens


class Capacity(nn.Module):
    """Drops the choices of experts that exceed an expert's capacity, in one MoE layer.

    Capacity is counted in a scope: the tokens of one rank in a microbatch, or a sample (`[moe] capacity_scope`).
    """

    def __init__(self, model: Model, options: MoEOptions):
        super().__init__()
        self.model, self.options = model, options
        self.sequence: Group = NO_GROUP  # cp x tp, set when the model is placed on the meshes
        self.full = options.capacity_scope == "full_sequence"

    def limit(self, positions: int) -> int:
        """Return the most tokens that an expert takes from a scope (a sample, or a rank's tokens of a microbatch).

        `positions` is the number of token positions in the scope, including padding. The result is rounded up, and may
        exceed it.
        """
        return math.ceil(self.options.capacity_factor * self.model.top_k * positions / self.model.num_experts)

    def slots_per_expert(self, samples: int, own_tokens: int) -> int:
        """Return the most tokens that this rank can send to one expert: the size of a padded expert buffer.

        Args:
            samples: the number of samples in the microbatch.
            own_tokens: the number of tokens that this rank owns in the microbatch, including padding.
        """
        if not self.full:
            return min(self.limit(own_tokens), own_tokens)
        positions = own_tokens // samples
        return samples * min(self.limit(positions * self.sequence.size), positions)

    def forward(self, chosen_TK: Tensor, weights_TK: Tensor, tokens: Tokens, samples: int) -> Tensor:
        """Return a copy of chosen_TK in which each choice over capacity is E, which stands for "no expert".

        Collective over cp x tp if `[moe] capacity_scope` is full_sequence.

        Args:
            chosen_TK: the global numbers of each token's chosen experts.
            weights_TK: their routing weights. With `drop_policy` "probability" they decide who is dropped, rounded to
                bfloat16; in ties and with other policies later positions are.
            tokens: the positions and samples of this rank's tokens.
            samples: the number of samples in the microbatch.
        """
        own_tokens = chosen_TK.shape[0]
        scope_T = tokens.sample_T if self.full else torch.zeros_like(tokens.sample_T)
        group = self.sequence if self.full else NO_GROUP
        positions = own_tokens // samples * group.size if self.full else own_tokens
        chosen_NK, order_N, scope_N = (all_gather(x, 0, group) for x in (chosen_TK, tokens.index_T, scope_T))
        weight_NK = None
        if self.options.drop_policy == "probability":
            # Weights of equal tokens differ by rounding, in a different way under each mapping. In the 8 significant
            # bits of bfloat16 they are equal, so that positions decide. Viewed as integers, which sort as they do,
            # because a compiler may remove a rounding to bfloat16 that is undone later.
            weight_NK = all_gather(weights_TK.detach().to(torch.bfloat16), 0, group).view(torch.int16)
        over_NK = over_capacity(chosen_NK, weight_NK, order_N, scope_N, self.model.num_experts, self.limit(positions))
        over_TK = over_NK[group.rank * own_tokens : (group.rank + 1) * own_tokens]
        return chosen_TK.masked_fill(over_TK, self.model.num_experts)


def over_capacity(
    chosen_NK: Tensor, weights_NK: Tensor | None, order_N: Tensor, scope_N: Tensor, num_experts: int, capacity: int
) -> Tensor:
    """Return a mask (N, K) of the choices to drop: all but the first `capacity` of each expert in each scope.

    Args:
        chosen_NK: each token's chosen experts; `num_experts` for a choice of no expert, which is never in the mask.
        weights_NK: if given, choices of higher weight come first, then those of lower order_N; if None, order_N alone
            decides.
        order_N: the global positions of the tokens.
        scope_N: the number of the set of tokens that each token is counted in, such as its sample.
    """
    bucket = (scope_N.unsqueeze(1) * (num_experts + 1) + chosen_NK).flatten()
    rank = order_N.argsort(stable=True)
    # Sorted by order first; the stable sorts by weight and by bucket keep that order within equal keys.
    k = chosen_NK.shape[1]
    entry = (rank.unsqueeze(1) * k + torch.arange(k, device=rank.device)).flatten()
    if weights_NK is not None:
        entry = entry[weights_NK.flatten()[entry].argsort(descending=True, stable=True)]
    entry = entry[bucket[entry].argsort(stable=True)]
    sorted_bucket = bucket[entry]
    place = torch.arange(len(entry), device=entry.device) - torch.searchsorted(sorted_bucket, sorted_bucket)
    over = torch.empty_like(bucket, dtype=torch.bool)
    over[entry] = place >= capacity
    return over.view_as(chosen_NK) & (chosen_NK < num_experts)
