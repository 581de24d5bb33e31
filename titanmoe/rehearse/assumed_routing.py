"""Which tokens visit which experts, assumed in advance because a rehearsal has no data.

`Routing.chosen_experts` gives the experts of every token of any rank, so a rank also knows what the others will send
it. The dispatchers' own code finds how many rows those are: it runs for each of these ranks on rows of width zero, and
the integers that it sends are delivered here.

Shapes as in titanmoe.moe.dispatchers.dispatcher.
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
from titanmoe.comm.recomputation import outside
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.rank_groups import group_of
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, Exchange, ExpertRanks, SharedBuffers
from titanmoe.parallel.batch_slice import take_slice
from titanmoe.parallel.context import placement


def balanced(index_T: Tensor, top_k: int, num_experts: int) -> Tensor:
    """As `[moe] force_balance` routes."""
    return (index_T.unsqueeze(1) * top_k + torch.arange(top_k)) % num_experts


def skewed(index_T: Tensor, top_k: int, num_experts: int, factor: float) -> Tensor:
    """The busiest expert has `factor` times the mean, and the others share the rest evenly.

    Tokens visit expert 0 at regular intervals, as often as its share asks for; all other choices cycle through the
    other experts. At num_experts / top_k, the largest factor possible, every token visits the first top_k experts.
    """
    most = num_experts / top_k
    if factor >= most:
        return torch.arange(top_k).repeat(len(index_T), 1)
    share = factor / most  # of tokens that visit expert 0
    to_first = ((index_T + 1) * share).floor() > (index_T * share).floor()
    others = num_experts - 1
    rest_TK = 1 + (index_T.unsqueeze(1) * top_k + torch.arange(top_k)) % others
    first_TK = torch.cat((torch.zeros_like(rest_TK[:, :1]), rest_TK[:, 1:]), 1)
    return first_TK.where(to_first.unsqueeze(1), rest_TK)


@dataclass(frozen=True)
class AssumedRouting:
    """Which experts each token visits."""

    text: str
    """For the report."""
    choose: Callable[[int, Tensor], Tensor]
    """chosen_TK, from a layer and the tokens' index_T within the step."""
    by_layer: bool = False
    """Whether layers differ."""
    estimates: str = ""
    """Why the results are estimates; "" if they are exact."""


def with_imbalance(config: Config, factor: float) -> AssumedRouting:
    """factor: rows of the busiest expert over the mean."""
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
    """The experts of every token of a step."""

    def __init__(self, config: Config, fold: Fold, samples: Callable[[Config, int, int], Any], assumed: AssumedRouting):
        self.config, self.fold, self.samples, self.assumed = config, fold, samples, assumed
        self._index: dict[int, Tensor] = {}
        self._chosen_experts: dict[tuple[int, int, int], Tensor] = {}

    @property
    def microbatches(self) -> int:
        return self.samples(self.config, 0, self.fold.dp).microbatches

    def key(self, layer: int) -> int:
        """The same for layers with the same routing."""
        return layer if self.assumed.by_layer else 0

    def index(self, rank: int, microbatch: int) -> Tensor:
        """The index within the step of the tokens that a rank owns."""
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
        key = rank, microbatch, self.key(layer)
        if key not in self._chosen_experts:
            self._chosen_experts[key] = self.assumed.choose(layer, self.index(rank, microbatch))
        return self._chosen_experts[key]

    def parts(self, rank: int, microbatch: int, layer: int) -> list[Tensor]:
        """The same, for each part of a microbatch that a dispatcher sends by itself."""
        chosen_TK, samples = self.chosen_experts(rank, microbatch, layer), self.config.training.local_batch_size
        if self.config.moe.overlap != "halves":
            return [chosen_TK]
        return [half.flatten(0, 1) for half in chosen_TK.unflatten(0, (samples, -1)).tensor_split(2)]


def group_at(fold: Fold, view: Any, axes: tuple[str, ...], rank: int) -> Group:
    members = group_of(fold, view, axes, rank)
    return Group("", len(members), members.index(rank)) if len(members) > 1 else NO_GROUP


class _Stop(Exception):
    """Ends a dispatcher's run early."""


class _DispatcherRun(TorchDispatchMode):
    """Runs a dispatcher's own code for one rank, up to its n-th message of integers, which is kept with its splits (n =
    -1: to the end). `supply` returns what earlier such messages receive.
    """

    def __init__(self, n: int, supply: Callable[[int], Tensor]):
        super().__init__()
        self.n, self.supply, self.count = n, supply, 0
        self.all_to_alls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """The group, rows sent to each of its ranks, and rows received from each."""

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
    """What a rank receives when dispatchers send each other integers."""

    def __init__(
        self,
        routing: Routing,
        dispatcher_type: type[Dispatcher],
        template: Dispatcher,
        node: int,
        symmetric: bool = False,
    ):
        """symmetric: whether dispatchers use symmetric memory here, as in a step that fits."""
        self.routing, self.dispatcher_type, self.template, self.node = routing, dispatcher_type, template, node
        self.symmetric = symmetric
        self._sent_cache: dict[tuple, tuple] = {}
        self._received_cache: dict[tuple, Tensor] = {}

    def __reduce__(self) -> tuple:
        """Pickled without its caches."""
        routing = self.routing
        fresh = Routing(routing.config, routing.fold, routing.samples, routing.assumed)
        return IntegerMessages, (fresh, self.dispatcher_type, self.template, self.node, self.symmetric)

    def received_integers(self, rank: int, microbatch: int, layer: int, n: int) -> Tensor:
        """What a rank receives in its n-th message of integers."""
        key = rank, microbatch, self.routing.key(layer), n
        if key not in self._received_cache:
            _, _, name, group = self.sent_integers(rank, microbatch, layer, n)
            members = self.members(group, rank)
            own_index, pieces = members.index(rank), []
            for other in members:
                x, splits, _, _ = self.sent_integers(other, microbatch, layer, n)
                pieces.append(x.split(splits[0])[own_index] if splits is not None else x)
            self._received_cache[key] = torch.stack(pieces).sum(0) if name == "all_reduce" else torch.cat(pieces)
        return self._received_cache[key]

    def sent_integers(self, rank: int, microbatch: int, layer: int, n: int) -> tuple:
        key = rank, microbatch, self.routing.key(layer), n
        if key not in self._sent_cache:
            run = _DispatcherRun(n, lambda i: self.received_integers(rank, microbatch, layer, i))
            try:
                with run, torch.no_grad(), outside():
                    for exchange in self._exchanges(rank, microbatch, layer):
                        exchange.relay()
            except _Stop:
                self._sent_cache[key] = run.integers
            else:
                raise RuntimeError(f"{self.dispatcher_type.__name__} never sends message {n} of integers")
        return self._sent_cache[key]

    def all_to_alls(self, rank: int, microbatch: int, layer: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The all-to-alls of a forward pass, to the experts and back."""
        run = _DispatcherRun(-1, lambda i: self.received_integers(rank, microbatch, layer, i))
        with run, torch.no_grad(), outside():
            for exchange in self._exchanges(rank, microbatch, layer):
                exchange.combine(exchange.receive_routed()[0])
        return run.all_to_alls

    def _exchanges(self, rank: int, microbatch: int, layer: int) -> list[Exchange]:
        dispatcher = self._dispatcher(rank)
        return [
            dispatcher.dispatch(torch.zeros(len(chosen_TK), 0), torch.zeros(chosen_TK.shape), chosen_TK, 0)
            for chosen_TK in self.routing.parts(rank, microbatch, layer)
        ]

    def _dispatcher(self, rank: int) -> Dispatcher:
        fold, template = self.routing.fold, self.template
        dispatcher = self.dispatcher_type(template.num_experts, "torch")
        whole = replace(group_at(fold, "experts", ("ep", "etp"), rank), name="whole")
        within, across = whole, NO_GROUP
        if template.ranks.across.size > 1:
            within, across = (self._group(name, rank) for name in ("within", "across"))
        dispatcher.place(ExpertRanks(whole, fold.ep, fold.etp, within, across))
        if self.symmetric:  # it stops before it uses any buffer
            dispatcher.memory = SharedBuffers(torch.device("cpu"))
        return dispatcher

    def _group(self, name: str, rank: int) -> Group:
        members = self.members(name, rank)
        return Group(name, len(members), members.index(rank))

    def members(self, group: str, rank: int) -> list[int]:
        whole = list(group_of(self.routing.fold, "experts", ("ep", "etp"), rank))
        if group == "whole":
            return whole
        first, place = whole[0], (rank - whole[0]) % self.node
        if group == "across":
            return list(range(first + place, first + len(whole), self.node))
        start = rank - (rank - first) % self.node
        return list(range(start, start + self.node))
