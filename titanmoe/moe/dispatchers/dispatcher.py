"""What a dispatcher is. It knows tokens and ranks, not what experts do; the layer calls it in this order:

    exchange = dispatcher.dispatch(x, weights, chosen, bin_rows)    routed tokens leave
    ...                                                             other work, while they are in flight
    y = experts(*exchange.rows())                                   waits for the routed tokens of this rank's experts
    y = exchange.combine(y)                                         sends outputs back, and sums those of each token

Backward may recompute a layer, up to what its experts got (titanmoe.parallel.recompute). What a dispatcher sends by
titanmoe.comm to learn sizes and places is not sent a second time then, nor what it sends as `small`. What `combine`
saves for backward has to be small, and saved inside `titanmoe.comm.recomputation.saved()`.

A new dispatcher is a subclass of `Dispatcher` with its own `dispatch` and `spec`, a class with the methods of
`Exchange`, and a line in `titanmoe/moe/dispatchers/dispatcher_spec.py`. `allgather.py` is the shortest.

Shapes: T tokens this rank owns, D model, K top-k, E experts, e local experts, G ranks of the dispatch group (ep x etp,
etp innermost), R routed tokens that this rank's experts work on. Expert number E stands for "no expert".
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
    """A layer's routed tokens, from dispatch to combine."""

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the routed tokens of this rank's experts (R, D), sorted by expert; the routing weight of each (R, 1);
        and the number of each expert (e,).

        Waits for them. Called once.
        """
        ...

    def combine(self, y_RD: Tensor) -> Tensor:
        """Send the experts' outputs back to their tokens' ranks; return each token's sum of them (T, D)."""
        ...


class SplitExchange(Exchange, Protocol):
    """An exchange that can wait while something else is computed: two halves of a microbatch overlap by it.

    `combine` is `receive` of `send_back`. What `relay` and `send_back` return passes into and out of the module that
    has the experts' weights, whose hooks (FSDP's) look for tensors with gradients in them: so use tuples, named tuples,
    lists or tensors, and hide nothing with a gradient in another kind of object. Otherwise FSDP would not reduce the
    gradients of these weights before the whole backward has ended.
    """

    def relay(self) -> SplitExchange:
        """Return the exchange whose routed tokens are on their way to this rank's experts, and whose `rows` and
        `send_back` are called. Waits for what has to be sent on by ranks in between."""
        ...

    def send_back(self, y_RD: Tensor) -> Any:
        """Send the experts' outputs back without waiting; return what `receive` takes."""
        ...

    def receive(self, back: Any) -> Tensor:
        """Wait for what is sent back, and return each token's sum (T, D)."""
        ...


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that have a layer's experts, as this rank sees them."""

    group: Group = NO_GROUP
    """ep x etp, etp innermost."""
    ep: int = 1
    etp: int = 1
    within: Group = NO_GROUP
    """The group's ranks on this node, if it spans nodes and the dispatcher's spec says `works_by_node`."""
    across: Group = NO_GROUP
    """The rank with this rank's position on each node of the group; only this rank if the group does not span nodes."""


class SharedBuffers:
    """Buffers that all dispatchers of a rank share, attached to them in a step's first forward and backward. A
    dispatcher that finds them too small asks for the step to be repeated without them (titanmoe.train.gradients)."""

    repeats = 0
    """How many steps of this process were repeated."""

    def __init__(self, device: torch.device):
        self.needs_repeat = torch.zeros((), dtype=torch.bool, device=device)
        """Whether this rank asks for it. What the pass computes is then void, but it has to be finite."""

    def must_repeat(self, ranks: float) -> bool:
        """Return whether the step has to be repeated. ranks: how many ask for it."""
        return ranks > 0

    def metrics(self) -> dict[str, float]:
        """Return what is reported of them with every step."""
        return {}

    @contextmanager
    def attached(self, layers: Collection[nn.Module]) -> Iterator[None]:
        """Attach them to the dispatchers of these MoE layers."""
        self.needs_repeat.zero_()
        try:
            for layer in layers:
                layer.dispatcher.memory = self
            yield
        finally:
            for layer in layers:
                layer.dispatcher.memory = None


class Dispatcher:
    """One for each layer."""

    memory: SharedBuffers | None = None
    """What `reserve` returned, during a training step; None outside of one."""
    allows_unused_rows = False
    """Whether rows after those of the last expert may hold anything. Biases need to know which rows are real."""

    def __init__(self, num_experts: int, kernels: str = "auto"):
        """kernels: `[moe] kernels`."""
        self.num_experts, self.kernels = num_experts, kernels
        self.place(ExpertRanks())

    def place(self, ranks: ExpertRanks) -> None:
        """Called when the model is placed on the meshes; until then, this rank has all experts."""
        self.ranks = ranks
        self.group, self.ep, self.etp = ranks.group, ranks.ep, ranks.etp
        self.local_experts = self.num_experts // ranks.ep

    @abstractmethod
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> Exchange:
        """Sends each token to the ranks of its chosen experts, and returns at once if it can.

        bin_rows: rows per expert and sender if bins are padded to a static size, else 0.
        """
        raise NotImplementedError

    @staticmethod
    def missing(device: str) -> str:
        """Why this machine cannot run it; "" if it can. device: as in training.device."""
        return ""

    @staticmethod
    def reserve(
        model: Model, options: MoEOptions, ranks: ExpertRanks, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> SharedBuffers | None:
        """Makes what all layers of a rank share; None if nothing is needed. All ranks of the world call it together.

        tokens: how many a rank owns in a microbatch. dtype: that of the rows that are sent.
        """
        return None
