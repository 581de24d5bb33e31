"""Calls a dispatcher in a test: dispatch now, combine by the function that is returned."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titanmoe.moe.dispatchers.dispatcher import Dispatcher


def dispatched(
    dispatcher: Dispatcher, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int = 0
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Dispatch tokens to their experts.

    Returns:
        This rank's routed tokens, their routing weights, the number of each expert, and the function that combines the
        experts' outputs.
    """
    exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
    return *exchange.receive_routed(), exchange.combine
