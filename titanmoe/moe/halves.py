"""[moe] overlap = "halves": a block takes the samples of its microbatch in two halves, whose waits cover each other.

While routed tokens of the first half are in flight, attention of the second is computed; then each half is in flight
while the experts compute the other:

    attend 1 | route 1, dispatch 1 | attend 2 | route 2, dispatch 2 | shared 1, 2 | experts 1 | experts 2 | combine 1, 2

Shapes: h samples and t = h * s owned tokens of a half, s owned positions, D model, E experts, K top-k, R routed tokens
of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanmoe.moe.experts import Experts
from titanmoe.observe import region
from titanmoe.tokens import Tokens

if TYPE_CHECKING:
    from titanmoe.moe.layer import MoE


def accept_exchanges(experts: Experts) -> None:
    """Replace `experts.forward` so that it also takes the exchanges of a microbatch's two halves, instead of tensors.

    Such a call takes what `SplitExchange.relay` returned, waits for the routed tokens of each exchange, computes them,
    and starts to send the outputs back; it returns a list with what `start_combine` returned for each. It is one call,
    so that hooks around it, such as FSDP's that gather weights, run once.
    """
    plain = experts.forward

    def forward(*routed: Any) -> Any:
        if isinstance(routed[0], Tensor):
            return plain(*routed)
        return [exchange.start_combine(plain(*exchange.receive_routed())) for exchange in routed]

    experts.forward = forward


def forward_in_halves(
    moe: MoE, norm: Callable[[Tensor], Tensor], first_hsD: Tensor, attend: Callable[[], Tensor], tokens: Tokens
) -> Tensor:
    """Compute a MoE block for a microbatch in two halves; messages of one overlap with computation of the other.

    Called after attention of the first half. The first half's routed tokens are in flight while `attend` runs.
    Collective over the dispatch group, and where the layer has a shared expert or balance losses, over their groups.

    Args:
        moe: the block's MoE layer, without capacity.
        norm: the block's norm before the MoE layer.
        first_hsD: the hidden states of the first half of the samples, after attention.
        attend: computes attention of the second half, and returns its hidden states.
        tokens: the metadata of both halves' tokens.

    Returns:
        The block's output, residual included, for both halves, (B, s, D).
    """
    first, second = tokens.halves()
    with region("MoE layer"):
        x_hsD = norm(first_hsD)
        logits_tE, scores_tE, weights_tK, chosen_tK, count_hE = moe.router(x_hsD.flatten(0, 1), first)
        exchanges = [moe.dispatch(x_hsD.flatten(0, 1), first, weights_tK, chosen_tK, 0)]

        second_hsD = attend()
        z_hsD = norm(second_hsD)
        *seen, weights_tK, chosen_tK, count = moe.router(z_hsD.flatten(0, 1), second)
        both = zip((logits_tE, scores_tE, count_hE), (*seen, count), strict=True)
        weights_tK = moe.balance(weights_tK, *map(torch.cat, both), tokens)  # the losses of both halves
        exchanges.append(moe.dispatch(z_hsD.flatten(0, 1), second, weights_tK, chosen_tK, 0))

        shared = [moe.run_shared(x, half) for x, half in ((x_hsD, first), (z_hsD, second))]
        in_flight = moe.experts(*[exchange.relay() for exchange in exchanges])
        out = [exchange.finish_combine(sent) for exchange, sent in zip(exchanges, in_flight, strict=True)]
    halves = zip((first_hsD, second_hsD), out, shared, strict=True)
    return torch.cat([x + (y.view_as(x) if z is None else y.view_as(x) + z) for x, y, z in halves])
