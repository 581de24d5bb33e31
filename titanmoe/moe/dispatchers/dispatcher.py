"""The interface of dispatchers, which send routed tokens to the ranks of their experts and bring outputs back.

A dispatcher knows tokens and ranks, not what experts compute. The MoE layer calls it in this order:

    exchange = dispatcher.dispatch(x, weights, chosen, slots_per_expert)    starts to send routed tokens
    ...                                                                     other work, while they are in flight
    y = experts(*exchange.receive_routed())                                 waits for this rank's routed tokens
    y = exchange.combine(y)                                                 sends outputs back, sums them by token

Backward may recompute a layer, up to the experts' inputs (titanmoe.parallel.recompute). The recomputation repeats
neither messages by titanmoe.comm that tell sizes and positions, nor those sent as `small`. What `combine` saves for
backward has to be small, and saved inside `titanmoe.comm.recomputation.save_tensors()`.

A new dispatcher is a subclass of `Dispatcher` with its own `dispatch` and `spec`, a class with the methods of
`Exchange`, and a line in `titanmoe/moe/dispatchers/dispatcher_spec.py`. `allgather.py` is the shortest.

Shapes: T tokens this rank owns, D model, K top-k, E experts, e local experts, G ranks of the dispatch group (ep x etp,
etp innermost), R routed tokens of this rank's experts. Expert number E stands for "no expert".
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
    """One layer's routed tokens, from dispatch to combine."""

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the routed tokens of this rank's experts, and return them. Called once.

        Returns:
            The routed tokens (R, D), sorted by expert; the routing weight of each (R, 1); the number of each expert's
            (e,).
        """
        ...

    def combine(self, y_RD: Tensor) -> Tensor:
        """Send the experts' outputs back to their tokens' ranks; return each token's sum of them (T, D)."""
        ...


class SplitExchange(Exchange, Protocol):
    """An exchange whose messages can be in flight while something else is computed, such as the other half.

    `combine(y)` equals `finish_combine(start_combine(y))`. What `relay` and `start_combine` return passes into and out
    of the module that has the experts' weights, whose hooks (FSDP's) look for tensors with gradients in it. So return
    tuples, named tuples, lists or tensors, and hide nothing with a gradient in another kind of object: otherwise FSDP
    reduces the gradients of these weights only after the whole backward.
    """

    def relay(self) -> SplitExchange:
        """Wait for what ranks in between have to forward; return the exchange that brings tokens to the experts.

        `receive_routed` and `start_combine` are called on the exchange that it returns.
        """
        ...

    def start_combine(self, y_RD: Tensor) -> Any:
        """Start to send the experts' outputs back; return what `finish_combine` takes."""
        ...

    def finish_combine(self, in_flight: Any) -> Tensor:
        """Wait for the outputs in flight, and return each token's sum of them (T, D)."""
        ...


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that hold one layer's experts, as this rank sees them."""

    group: Group = NO_GROUP
    """The dispatch group: ep x etp, etp innermost."""
    ep: int = 1
    etp: int = 1
    within: Group = NO_GROUP
    """The group's ranks on this node, if it spans nodes and the dispatcher's spec says `works_by_node`."""
    across: Group = NO_GROUP
    """The rank with this rank's position on each node of the group; only this rank if the group does not span nodes."""


class CannotReserve(Exception):
    """The reason why `Dispatcher.reserve` failed on a rank. Raised on all ranks of the world."""


class SharedBuffers:
    """Buffers that all dispatchers of a rank share, attached to them during the first forward and backward of a step.

    A dispatcher that finds them too small asks for the step to be repeated without them (titanmoe.train.gradients).
    """

    repeats = 0
    """The number of steps of this process that were repeated."""

    def __init__(self, device: torch.device):
        self.needs_repeat = torch.zeros((), dtype=torch.bool, device=device)
        """Whether this rank asks for the step to be repeated.

        The pass then computes void numbers, but they have to be finite.
        """

    def must_repeat(self, ranks: float) -> bool:
        """Return whether the step has to be repeated.

        Args:
            ranks: the number of ranks that ask for it.
        """
        return ranks > 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of these buffers, which every step reports."""
        return {}

    @contextmanager
    def attached(self, layers: Collection[nn.Module]) -> Iterator[None]:
        """Attach the buffers to the dispatchers of these MoE layers while the context lasts."""
        self.needs_repeat.zero_()
        try:
            for layer in layers:
                layer.dispatcher.memory = self
            yield
        finally:
            for layer in layers:
                layer.dispatcher.memory = None


class Dispatcher:
    """The base class of dispatchers. Each MoE layer has one."""

    memory: SharedBuffers | None = None
    """The buffers that `reserve` returned, during a training step; None outside of one."""
    allows_unused_slots = False
    """Whether slots after those of the last expert may hold anything; with biases, experts need to know which are used.
    """

    def __init__(self, num_experts: int, kernels: str = "auto"):
        """Place all experts on this rank; `place` is called when the model is laid on the meshes.

        Args:
            kernels: the option `[moe] kernels`.
        """
        self.num_experts, self.kernels = num_experts, kernels
        self.place(ExpertRanks())

    def place(self, ranks: ExpertRanks) -> None:
        """Set the ranks that hold this layer's experts. Called when the model is laid on the meshes."""
        self.ranks = ranks
        self.group, self.ep, self.etp = ranks.group, ranks.ep, ranks.etp
        self.local_experts = self.num_experts // ranks.ep

    @abstractmethod
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Exchange:
        """Start to send each token to the ranks of its chosen experts; return without waiting if possible.

        Args:
            chosen_TK: each token's experts; E for no expert.
            slots_per_expert: the capacity slots of an expert for each sender, if its buffer is padded to a static size;
            0 without padding.
        """
        raise NotImplementedError

    @staticmethod
    def missing(device: str) -> str:
        """Return why this machine cannot run the dispatcher; "" if it can.

        Args:
            device: the value of training.device.
        """
        return ""

    @staticmethod
    def reserve(
        model: Model, options: MoEOptions, ranks: ExpertRanks, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> SharedBuffers | None:
        """Make what the dispatchers of all layers of a rank share; None if nothing is needed.

        Collective over the world.

        Args:
            tokens: the number that a rank owns in a microbatch.
            dtype: the dtype of the tokens that are sent.

        Raises:
            CannotReserve: on all ranks, if one of them cannot use the dispatcher.
        """
        return None
