"""The routing that a rehearsal assumes, because it has no data: the experts of every token of every rank.

`Routing.chosen_experts` gives them for any rank, so a rank also knows what the others send it. The dispatchers' own
code determines the split sizes: `IntegerMessages` runs it for each rank of a group on rows of width zero, and delivers
the integers that it sends.

Shapes: T tokens this rank owns, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.comm.recomputation import leave_checkpointed_region
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.rank_groups import View, group_of
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, Exchange, ExpertRanks, SharedBuffers
from titanmoe.parallel.batch_slice import take_slice
from titanmoe.parallel.context import placement


def balanced(index_T: Tensor, top_k: int, num_experts: int) -> Tensor:
    """Return the experts (tokens, top_k) of tokens, by index in the step, as `[moe] force_balance` routes: in turn.

    index_T has each token's number within the step, over all data ranks. The k-th expert of token t is number
    (t * top_k + k) % num_experts.
    """
    return (index_T.unsqueeze(1) * top_k + torch.arange(top_k)) % num_experts


def skewed(index_T: Tensor, top_k: int, num_experts: int, factor: float) -> Tensor:
    """Return the experts (tokens, top_k) of tokens, where the busiest expert has `factor` times the mean load.

    The other experts split the rest evenly. Tokens visit expert 0 at regular intervals, as often as its load asks for;
    all other choices cycle through the other experts. At num_experts / top_k, the largest factor possible, every token
    visits the first top_k experts.

    Args:
        index_T: The indices of the tokens within the step.
        factor: The load of expert 0 over the mean load.
    """
    most = num_experts / top_k
    if factor >= most:
        return torch.arange(top_k).repeat(len(index_T), 1)
    fraction = factor / most  # of tokens that visit expert 0
    to_first = ((index_T + 1) * fraction).floor() > (index_T * fraction).floor()
    others = num_experts - 1
    rest_TK = 1 + (index_T.unsqueeze(1) * top_k + torch.arange(top_k)) % others
    first_TK = torch.cat((torch.zeros_like(rest_TK[:, :1]), rest_TK[:, 1:]), 1)
    return first_TK.where(to_first.unsqueeze(1), rest_TK)


@dataclass(frozen=True)
class AssumedRouting:
    """The rule by which a rehearsal chooses each token's experts, with its description for the report."""

    text: str
    """The description in the report."""
    choose: Callable[[int, Tensor], Tensor]
    """The function from a layer and the tokens' index_T within the step to chosen_TK."""
    by_layer: bool = False
    """Whether the routing differs from layer to layer."""
    estimates: str = ""
    """The reason why the results are estimates; "" if they are exact."""


def with_imbalance(config: Config, factor: float) -> AssumedRouting:
    """Return the routing in which the busiest expert has `factor` times the mean of routed tokens.

    It is balanced up to 1. The busiest expert gets every token at most, num_experts / top_k times the mean.
    """
    top_k, num_experts = config.model.top_k, config.model.num_experts
    if factor <= 1:
        return AssumedRouting("balanced", partial(_balanced, top_k, num_experts))
    text = f"with {factor:g} times the mean for the busiest expert"
    return AssumedRouting(text, partial(_skewed, top_k, num_experts, factor))


# Not lambdas, because a rehearsal is pickled.
def _balanced(top_k: int, num_experts: int, layer: int, index_T: Tensor) -> Tensor:
    return balanced(index_T, top_k, num_experts)


def _skewed(top_k: int, num_experts: int, factor: float, layer: int, index_T: Tensor) -> Tensor:
    return skewed(index_T, top_k, num_experts, factor)


class Routing:
    """The experts of every token of a step, for any rank of the world, under an assumed routing."""

    def __init__(self, config: Config, fold: Fold, samples: Callable[[Config, int, int], Any], assumed: AssumedRouting):
        """Take the assumed routing.

        Args:
            samples: Builds the batch loader of a data rank, from the config, the rank and the number of data ranks, as
                `titanmoe.rehearse.rehearsal.FakeLoader` does.
        """
        self.config, self.fold, self.samples, self.assumed = config, fold, samples, assumed
        self._index: dict[int, Tensor] = {}
        self._chosen_experts: dict[tuple[int, int, int], Tensor] = {}

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.samples(self.config, 0, self.fold.dp).microbatches

    def key(self, layer: int) -> int:
        """Return a number that is equal for layers with the same routing, as part of a cache key."""
        return layer if self.assumed.by_layer else 0

    def index(self, rank: int, microbatch: int) -> Tensor:
        """Return the indices within the step of the tokens that a rank owns in a microbatch, as index_T."""
        if rank not in self._index:
            fold, place = self.fold, lambda *axes: group_at(self.fold, "attention", axes, rank)
            data, cp, tp = place("dp"), place("cp"), place("tp")
            batch = self.samples(self.config, data.rank, data.size).next_step()[0]
            meshes = SimpleNamespace(data=data, cp=cp, tp=tp, fold=fold)
            batch_slice = take_slice(batch, 0, meshes, placement(self.config.parallelism), torch.device("cpu"))
            self._index[rank] = batch_slice.tokens.index_T
        training = self.config.training
        return self._index[rank] + microbatch * self.fold.dp * training.local_batch_size * training.seq_len

    def chosen_experts(self, rank: int, microbatch: int, layer: int) -> Tensor:
        """Return the experts (tokens, top_k) of the tokens that a rank owns in a microbatch, in block `layer`."""
        key = rank, microbatch, self.key(layer)
        if key not in self._chosen_experts:
            self._chosen_experts[key] = self.assumed.choose(layer, self.index(rank, microbatch))
        return self._chosen_experts[key]

    def halves(self, rank: int, microbatch: int, layer: int) -> list[Tensor]:
        """Return the experts (tokens, top_k) of each half of a rank's samples; one entry without overlap in halves.

        `rank` is one of the world, `layer` the index of the block.
        """
        chosen_TK, samples = self.chosen_experts(rank, microbatch, layer), self.config.training.local_batch_size
        if self.config.moe.overlap != "halves":
            return [chosen_TK]
        return [half.flatten(0, 1) for half in chosen_TK.unflatten(0, (samples, -1)).tensor_split(2)]


def group_at(fold: Fold, view: View, axes: tuple[str, ...], rank: int) -> Group:
    """Return a rank's group along some axes of a view: its size and the rank's index in it, without a process group.

    NO_GROUP if the rank is alone in it.
    """
    members = group_of(fold, view, axes, rank)
    return Group("", len(members), members.index(rank)) if len(members) > 1 else NO_GROUP


class _Stop(Exception):
    """Ends a dispatcher's run early."""


class _DispatcherRun(TorchDispatchMode):
    """A dispatch mode that runs a dispatcher's code for any rank without communicating, to see what it sends."""

    def __init__(self, n: int, supply: Callable[[int], Tensor]):
        """Prepare a run of a dispatcher, which ends at a chosen message of integers.

        Args:
            n: The index of the integer message that ends the run by _Stop, and is stored in `integers` as
                `IntegerMessages.sent_integers` returns it; -1 to run to the end.
            supply: Returns the integers that the rank receives in each earlier integer message, by its index.
        """
        super().__init__()
        self.n, self.supply, self.count = n, supply, 0
        self.all_to_alls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """The group of each all-to-all, the rows sent to each of its ranks, and the rows received from each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if name == "wait_tensor":
            return args[0]
        x = args[0]
        if name == "all_to_all_single":
            self.all_to_alls.append((args[-1], tuple(args[2]), tuple(args[1])))
        if x.dtype.is_floating_point:
            if name == "all_to_all_single":
                rows = sum(args[1])
            else:
                rows = x.shape[0] // args[2] if name == "reduce_scatter_tensor" else x.shape[0] * args[1]
            return x.new_zeros(rows, *x.shape[1:])
        if self.count == self.n:
            self.integers = x.clone(), (args[2], args[1]) if name == "all_to_all_single" else None, name, args[-1]
            raise _Stop
        self.count += 1
        return self.supply(self.count - 1)


class IntegerMessages:
    """The split sizes and other integers that dispatchers of all ranks send each other, computed in one process."""

    def __init__(
        self,
        routing: Routing,
        dispatcher_type: type[Dispatcher],
        template: Dispatcher,
        node: int,
        symmetric: bool = False,
    ):
        """Take the routing and the kind of dispatcher.

        Args:
            template: A dispatcher of the model, whose sizes the others have.
            node: Number of ranks per machine.
            symmetric: Whether the dispatchers use symmetric memory, as in a step whose buffers do not overflow.
        """
        self.routing, self.dispatcher_type, self.template, self.node = routing, dispatcher_type, template, node
        self.symmetric = symmetric
        self._sent_cache: dict[tuple, tuple] = {}
        self._received_cache: dict[tuple, Tensor] = {}

    def __reduce__(self) -> tuple:
        """Return what pickles this object without its caches."""
        routing = self.routing
        fresh = Routing(routing.config, routing.fold, routing.samples, routing.assumed)
        return IntegerMessages, (fresh, self.dispatcher_type, self.template, self.node, self.symmetric)

    def received_integers(self, rank: int, microbatch: int, layer: int, n: int) -> Tensor:
        """Return what a rank receives in its dispatcher's n-th integer message, in block `layer` and a microbatch.

        It is one tensor: what the group's ranks send to this rank, in their order; of an all-reduce their sum.

        Args:
            n: The index, from 0, of the message among this dispatcher's integer messages in that block and microbatch.

        Raises:
            RuntimeError: if the dispatcher sends fewer such messages.
        """
        key = rank, microbatch, self.routing.key(layer), n
        if key not in self._received_cache:
            _, _, name, group = self.sent_integers(rank, microbatch, layer, n)
            members = self.members(group, rank)
            own_index, received = members.index(rank), []
            for other in members:
                x, splits, _, _ = self.sent_integers(other, microbatch, layer, n)
                received.append(x.split(splits[0])[own_index] if splits is not None else x)
            self._received_cache[key] = torch.stack(received).sum(0) if name == "all_reduce" else torch.cat(received)
        return self._received_cache[key]

    def sent_integers(
        self, rank: int, microbatch: int, layer: int, n: int
    ) -> tuple[Tensor, tuple[list[int], list[int]] | None, str, str]:
        """Return the n-th integer message of a rank's dispatcher in block `layer`: (tensor, splits, operation, group).

        The first is number 0. Splits are how many routed tokens or integers are sent to each rank of the group, and
        received from each; None unless it is an all-to-all. The operation is torch's name, such as "all_to_all_single",
        and the group a name for `members`.

        Raises:
            RuntimeError: if the dispatcher sends fewer such messages.
        """
        key = rank, microbatch, self.routing.key(layer), n
        if key not in self._sent_cache:
            run = _DispatcherRun(n, lambda i: self.received_integers(rank, microbatch, layer, i))
            try:
                with run, torch.no_grad(), leave_checkpointed_region():
                    for exchange in self._exchanges(rank, microbatch, layer):
                        exchange.relay()
            except _Stop:
                self._sent_cache[key] = run.integers
            else:
                raise RuntimeError(f"{self.dispatcher_type.__name__} never sends message {n} of integers")
        return self._sent_cache[key]

    def all_to_alls(self, rank: int, microbatch: int, layer: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Return the all-to-alls of a rank's forward in block `layer`: dispatch, with its integers, and combine.

        Returns:
            For each, in order: the group's name as for `members`, and how many routed tokens or integers are sent to
            each of its ranks and received from each.
        """
        run = _DispatcherRun(-1, lambda i: self.received_integers(rank, microbatch, layer, i))
        with run, torch.no_grad(), leave_checkpointed_region():
            for exchange in self._exchanges(rank, microbatch, layer):
                exchange.combine(exchange.receive_routed()[0])
        return run.all_to_alls

    def _exchanges(self, rank: int, microbatch: int, layer: int) -> list[Exchange]:
        """Return the dispatches in flight of a rank's microbatch, or of its halves; their tokens have width zero."""
        dispatcher = self._dispatcher(rank)
        return [
            dispatcher.dispatch(torch.zeros(len(chosen_TK), 0), torch.zeros(chosen_TK.shape), chosen_TK, 0)
            for chosen_TK in self.routing.halves(rank, microbatch, layer)
        ]

    def _dispatcher(self, rank: int) -> Dispatcher:
        fold, template = self.routing.fold, self.template
        dispatcher = self.dispatcher_type(template.num_experts, "torch")
        group = replace(group_at(fold, "experts", ("ep", "etp"), rank), name="group")
        within, across = group, NO_GROUP
        if template.ranks.across.size > 1:
            within, across = (self._group(name, rank) for name in ("within", "across"))
        dispatcher.place(ExpertRanks(group, fold.ep, fold.etp, within, across))
        if self.symmetric:  # it stops before it uses any buffer
            dispatcher.memory = SharedBuffers(torch.device("cpu"))
        return dispatcher

    def _group(self, name: str, rank: int) -> Group:
        members = self.members(name, rank)
        return Group(name, len(members), members.index(rank))

    def members(self, group: str, rank: int) -> list[int]:
        """Return the ranks, in the world, of one of the dispatcher groups that `rank` is in.

        Args:
            group: "group" for all ranks of ep x etp, "within" for those on the rank's node, "across" for one of each
                node.
        """
        ranks = list(group_of(self.routing.fold, "experts", ("ep", "etp"), rank))
        if group == "group":
            return ranks
        first, place = ranks[0], (rank - ranks[0]) % self.node
        if group == "across":
            return list(range(first + place, first + len(ranks), self.node))
        start = rank - (rank - first) % self.node
        return list(range(start, start + self.node))
