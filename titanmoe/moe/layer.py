"""The MoE layer: route, dispatch, experts, combine.

It gets the tokens that this rank alone owns, and does not know how attention was parallelised.

Shapes: B samples, s owned positions, T = B * s owned tokens, D model, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from titanmoe.comm.recomputation import again, keep, keep_saved, kept_rows
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance import Balance
from titanmoe.moe.capacity import Capacity
from titanmoe.moe.dispatchers.protocol import KeptChunk
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.moe.experts import Experts
from titanmoe.moe.router import Router
from titanmoe.observe import region
from titanmoe.tokens import Tokens


class MoE(nn.Module):
    def __init__(
        self,
        model: Model,
        options: MoEOptions,
        shared: nn.Module | None,
        seed: int,
        layer: int,
        microbatches: int,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.router = Router(model, options, seed, layer, dtype)
        self.balance = Balance(model, options, microbatches)
        self.capacity = Capacity(model, options) if options.capacity_factor else None
        kind = DISPATCHERS.implementation(options.dispatcher)
        self.dispatcher = kind(model.num_experts, options.chunks, options.kernels)
        self.dispatcher.allows_unused_rows = not model.expert_biases
        self.experts = Experts(model, options, dtype)
        self.shared = shared
        self.pad = options.pad_to_capacity

    def begin_step(self, step: int, tokens: Tensor, samples: Tensor | int) -> None:
        """tokens, samples: how many the whole step has, on all ranks, without padding."""
        self.router.begin_step(step)
        self.balance.begin_step(tokens, samples)
        self.experts.rounded.begin_step()

    def forward(self, x_BsD: Tensor, tokens: Tokens) -> Tensor:
        (y_BsD,) = self.run([x_BsD], [tokens], tokens)
        return y_BsD

    def run(self, parts: Iterable[Tensor], of_parts: Sequence[Tokens], tokens: Tokens) -> list[Tensor]:
        """parts: the samples in as many parts as travel by themselves. Each is asked for, and so may be computed, while
        the rows of the one before it are in flight. of_parts: their tokens. tokens: of all parts together.
        """
        kept, xs, routed, exchanges = kept_rows(), [], [], []
        for x_BsD, of_part in zip(parts, of_parts, strict=True):
            xs.append(x_BsD)
            last = len(xs) == len(of_parts)
            where = self.route(x_BsD.flatten(0, 1), of_part, routed, tokens if last else None)
            if kept is None:
                with keep_saved():
                    exchanges.append(self.dispatcher.dispatch(x_BsD.flatten(0, 1), *where))  # rows leave
        shared = [self.run_shared(x_BsD) for x_BsD in xs]  # while rows are in flight
        if kept is not None:
            self.experts([KeptChunk(*rows) for rows in kept])
            return xs
        with keep_saved():
            chunks = [exchange.chunks() for exchange in exchanges]
        back = iter(self.experts([chunk for of_exchange in chunks for chunk in of_exchange]))
        if again():
            return xs
        out = []
        for x_BsD, exchange, of_exchange, shared_BsD in zip(xs, exchanges, chunks, shared, strict=True):
            with keep_saved():
                y_BsD = exchange.combine(list(islice(back, len(of_exchange)))).view_as(x_BsD)
            out.append(y_BsD if shared_BsD is None else y_BsD + shared_BsD)
        return out

    def route(
        self, x_TD: Tensor, of_part: Tokens, routed: list[tuple[Tensor, ...]], tokens: Tokens | None
    ) -> tuple[Tensor, Tensor, int]:
        """The routing weights, the chosen experts, and the rows of a padded bin (0: bins are not padded).

        routed: what the router said of earlier parts, and then of this one. tokens: of all parts, with the last one,
        whose weights the balance losses of all are attached to.
        """
        logits_TE, scores_TE, weights_TK, chosen_TK, count_BE = self.router(x_TD, of_part)
        routed.append((logits_TE, scores_TE, count_BE))
        if tokens is not None:
            whole = routed[0] if len(routed) == 1 else map(torch.cat, zip(*routed, strict=True))
            weights_TK = self.balance(weights_TK, *whole, tokens)
        if self.capacity is None:
            return weights_TK, chosen_TK, 0
        samples = count_BE.shape[0]
        within_TK = keep("choices within capacity", lambda: self.capacity(chosen_TK, weights_TK, of_part, samples))
        self.balance.dropped((within_TK != chosen_TK).sum(), of_part.microbatch)
        return weights_TK, within_TK, self.capacity.bin_rows(samples, x_TD.shape[0]) if self.pad else 0

    def run_shared(self, x_BsD: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        with region("shared expert"):
            return self.shared(x_BsD)
