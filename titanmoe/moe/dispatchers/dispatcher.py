"""The interface of dispatchers, which send routed tokens to the ranks of their experts and bring outputs back.

    exchange = dispatcher.dispatch(x, weights, chosen, slots_per_expert)    starts to send routed tokens
    y = experts(*exchange.receive_routed())                                 waits for this rank's routed tokens
    y = exchange.combine(y)                                                 sends outputs back, sums them by token

All are differentiable. A dispatcher is a subclass of `Dispatcher`, an `Exchange` and a line in dispatcher_spec.py. What
`combine` saves has to be small, and saved inside `titanmoe.comm.recomputation.save_tensors()`.
Shapes: T tokens this rank owns, D model, K top-k, E experts (number E: "no expert"), e local experts, G ranks of the
dispatch group (ep x etp, etp innermost), S slots of this rank's send buffer, R routed tokens that it receives.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions


class Exchange(Protocol):
    """One MoE layer's routed tokens of one microbatch on this rank, from dispatch to combine."""

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the routed tokens of this rank's experts, and return them. Called once.

        Returns:
            The routed tokens (R, D), sorted by expert; the routing weight of each (R, 1); the number of each expert's
            (e,).
        """

    def combine(self, y_RD: Tensor) -> Tensor:
        """Send the experts' outputs back to their tokens' ranks; return each own token's sum of them (T, D).

        Collective over the dispatch group. Called once. The outputs `y_RD`, each already times its routing weight, are
        in the order of `receive_routed`.
        """


class SplitExchange(Exchange, Protocol):
    """An exchange whose messages can be in flight while other work runs, such as the microbatch's other half.

    `combine(y)` equals `finish_combine(start_combine(y))`. What `relay` and `start_combine` return passes into and out
    of the module that has the experts' weights, whose hooks (FSDP's) look for tensors with gradients in it. So return
    tuples, named tuples, lists or tensors, and hide nothing with a gradient in another kind of object: otherwise FSDP
    reduces the gradients of these weights only after the whole backward.
    """

    def relay(self) -> SplitExchange:
        """Forward the tokens that this rank received for other ranks, and return the next exchange. Called once.

        Call `receive_routed` and `start_combine` on the returned exchange, and `finish_combine` on this one. A
        dispatcher whose tokens go straight to their experts' ranks returns the exchange itself.
        """

    def start_combine(self, y_RD: Tensor) -> Any:
        """Start to send the experts' outputs back to their tokens' ranks; return the argument for `finish_combine`.

        Collective over the dispatch group. The outputs `y_RD`, each already times its routing weight, are in the order
        of `receive_routed`.
        """

    def finish_combine(self, in_flight: Any) -> Tensor:
        """Wait for the experts' outputs, and return each own token's sum of them (T, D).

        `in_flight` is what `start_combine` returned.
        """


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that hold the experts of one MoE layer, as this rank sees them."""

    group: Group = NO_GROUP
    """The dispatch group: ep x etp, etp innermost."""
    ep: int = 1
    etp: int = 1
    within: Group = NO_GROUP
    """The ranks of the dispatch group on this node.

    Set only if the group spans nodes and the dispatcher's spec says `works_by_node`; else NO_GROUP.
    """
    across: Group = NO_GROUP
    """One rank of each node of the dispatch group: the rank with the same position on its node as this rank.

    NO_GROUP if the group does not span nodes.
    """


class CannotReserve(Exception):
    """The error of `Dispatcher.reserve`, raised on all ranks of the world if one rank cannot use the dispatcher.

    Its text says why.
    """


class SharedBuffers:
    """Communication buffers that the dispatchers of all MoE layers of a rank share.

    The dispatchers use them in the first forward and backward of each step. If a dispatcher finds the buffers too
    small, it asks for the step to be computed once more, without them (titanmoe.train.gradients).
    """

    repeats = 0
    """The number of steps that this process computed a second time because the buffers were too small."""

    def __init__(self, device: torch.device):
        self.needs_repeat = torch.zeros((), dtype=torch.bool, device=device)
        """Whether this rank asks for the step to be repeated.

        The pass then computes void numbers, but they have to be finite.
        """

    def must_repeat(self, ranks: float) -> bool:
        """Return whether the step has to be computed once more without the buffers. The same on all ranks.

        `ranks` is the number of ranks of the world that set `needs_repeat` in this step. The caller repeats it and
        counts the repeats.
        """
        return ranks > 0

    def metrics(self) -> dict[str, float]:
        """Return metrics about the buffers by name, numbers on the host; {} here, subclasses override it.

        Called on every rank at a step's end. Rank 0's values are written as they are.
        """
        return {}

    @contextmanager
    def used_by(self, layers: Collection[nn.Module]) -> Iterator[None]:
        """Let the dispatchers of these `MoE` modules use the buffers inside the context; clear `needs_repeat` first.

        Their `dispatcher.memory` is set, and at the end None again.
        """
        self.needs_repeat.zero_()
        try:
            for layer in layers:
                layer.dispatcher.memory = self
            yield
        finally:
            for layer in layers:
                layer.dispatcher.memory = None


class Dispatcher:
    """The base class of dispatchers. Each MoE layer has a dispatcher of its own."""

    memory: SharedBuffers | None = None
    """The buffers that `reserve` returned, while layers use them in a training step; else None."""
    allows_unused_slots = False
    """Whether experts may get unused slots with arbitrary contents after their last routed token.

    Not allowed if experts have biases, because these must not be added to unused slots.
    """

    def __init__(self, num_experts: int, kernels: str = "auto"):
        """Create a dispatcher for a rank that has all experts, until `place` sets the ranks that share them.

        `num_experts` is the number of experts of the layer, on all ranks.
        """
        self.num_experts, self.kernels = num_experts, kernels
        self.place(ExpertRanks())

    def place(self, ranks: ExpertRanks) -> None:
        """Set the ranks that hold this layer's experts. Called once, when the model is distributed over the ranks."""
        self.ranks = ranks
        self.group, self.ep, self.etp = ranks.group, ranks.ep, ranks.etp
        self.local_experts = self.num_experts // ranks.ep

    @abstractmethod
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Exchange:
        """Start to send each token to the ranks of its chosen experts; return without waiting if possible.

        Collective over the dispatch group.

        Args:
            x_TD: this rank's tokens.
            weights_TK: the routing weights of each token's chosen experts.
            chosen_TK: the numbers of each token's chosen experts; E for no expert.
            slots_per_expert: if expert buffers are padded to a static size, the number of slots of an expert for each
                sending rank, which no choice exceeds (`Capacity` has dropped these); else 0.
        """
        raise NotImplementedError

    @staticmethod
    def missing(device: str) -> str:
        """Return why this machine cannot run the dispatcher; "" if it can, as here. `device` is training.device."""
        return ""

    @staticmethod
    def reserve(
        model: Model, options: MoEOptions, ranks: ExpertRanks, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> SharedBuffers | None:
        """Allocate buffers that the dispatchers of all layers of a rank share; return None if they need none, as here.

        Collective over the world. Called once, before training.

        Args:
            ranks: the ranks that hold a layer's experts.
            tokens: the number of tokens that a rank owns in a microbatch.
            dtype: the dtype of the tokens that are sent.
            device: this rank's device.

        Raises:
            CannotReserve: on all ranks, if one of them cannot use the dispatcher.
        """
        return None
