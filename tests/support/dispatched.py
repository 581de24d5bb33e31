"""A dispatcher as two calls: there, and back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titanmoe.moe.dispatchers.dispatcher import Dispatcher


def dispatched(
    dispatcher: Dispatcher, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int = 0
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The rows here, their weights, each expert's count, and what sends the experts' outputs back and sums them."""
    exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
    return *exchange.receive_routed(), exchange.combine
