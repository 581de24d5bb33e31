"""Calls a dispatcher in a test: dispatch now, combine by the function that is returned.

T tokens, D model, K top-k, E experts, e of them on this rank, R routed tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titanmoe.moe.dispatchers.dispatcher import Dispatcher


def dispatched(
    dispatcher: Dispatcher, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int = 0
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Dispatch tokens to their experts, and wait for them. Collective over the dispatch group, as is the function.

    `chosen_TK` has numbers of experts, E for none. `slots_per_expert` is the slots of each expert for each sending
    rank, 0 if buffers are not padded.

    Returns:
        The routed tokens (R, D) of this rank's experts, sorted by expert; their routing weights (R, 1); the number of
        each expert's (e,); and the function that combines the experts' outputs (R, D) to those of the tokens (T, D).
    """
    exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
    return *exchange.receive_routed(), exchange.combine
