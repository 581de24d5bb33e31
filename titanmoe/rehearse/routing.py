"""Who is sent where, as stated: what data would decide.

`Routing.chosen` gives the experts of every token of any rank, so that a rank knows also what the others will send it.
How many rows those are is found by the dispatchers' own code: it is run for each of them with rows of no width, and
whatever whole numbers it sends are handed over here.

Shapes as in titanmoe.moe.dispatch.
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

from titanmoe.comm.collectives import ALONE, Group
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.fold.degrees import Fold
from titanmoe.fold.groups import group_of
from titanmoe.moe.dispatch import Dispatcher, Hierarchical
from titanmoe.parallel.batch import cut
from titanmoe.parallel.context import placement

Numbers = Callable[[int, int], list[Batch]]
"""Makes the samples of a data rank, given the number of data ranks: titanmoe.rehearse.samples."""


def balanced(index_T: Tensor, top_k: int, num_experts: int) -> Tensor:
    """As `[moe] force_balance` has it."""
    return (index_T.unsqueeze(1) * top_k + torch.arange(top_k)) % num_experts


def skewed(index_T: Tensor, top_k: int, num_experts: int, factor: float) -> Tensor:
    """The busiest expert has `factor` times the mean, the others share what is left evenly.

    A token whose turn it is visits expert 0, in such a rhythm that the share is met; its other choices go round the
    rest. At num_experts / top_k, the most there can be, every token visits the first top_k experts and no other.
    """
    most = num_experts / top_k
    if factor >= most:
        return torch.arange(top_k).repeat(len(index_T), 1)
    share = factor / most  # of the tokens
    to_first = ((index_T + 1) * share).floor() > (index_T * share).floor()
    others = num_experts - 1
    rest_TK = 1 + (index_T.unsqueeze(1) * top_k + torch.arange(top_k)) % others
    first_TK = torch.cat((torch.zeros_like(rest_TK[:, :1]), rest_TK[:, 1:]), 1)
    return first_TK.where(to_first.unsqueeze(1), rest_TK)


@dataclass(frozen=True)
class Stated:
    """Which experts each token visits."""

    text: str
    """As a person reads it."""
    choose: Callable[[int, Tensor], Tensor]
    """chosen_TK of a layer and of tokens by their index within the step."""
    by_layer: bool = False
    """False where every layer has the same."""
    estimates: str = ""
    """Why what follows from it is an estimate, if it is one."""


def with_imbalance(config: Config, factor: float) -> Stated:
    """factor: rows of the busiest expert over the mean."""
    top_k, num_experts = config.model.top_k, config.model.num_experts
    if factor <= 1:
        return Stated("balanced", partial(_balanced, top_k, num_experts))
    text = f"with {factor:g} times the mean for the busiest expert"
    return Stated(text, partial(_skewed, top_k, num_experts, factor))


# Not lambdas: a rehearsal goes from process to process.
def _balanced(top_k: int, num_experts: int, layer: int, index_T: Tensor) -> Tensor:
    return balanced(index_T, top_k, num_experts)


def _skewed(top_k: int, num_experts: int, factor: float, layer: int, index_T: Tensor) -> Tensor:
    return skewed(index_T, top_k, num_experts, factor)


class Routing:
    """Of a step: whose tokens go where."""

    def __init__(self, config: Config, fold: Fold, samples: Callable[[Config, int, int], Any], stated: Stated):
        self.config, self.fold, self.samples, self.stated = config, fold, samples, stated
        self._index: dict[tuple[int, int], Tensor] = {}
        self._chosen: dict[tuple[int, int, int], Tensor] = {}

    @property
    def microbatches(self) -> int:
        return self.samples(self.config, 0, self.fold.dp).microbatches

    def kind(self, layer: int) -> int:
        """Equal for layers with equal routing."""
        return layer if self.stated.by_layer else 0

    def index(self, rank: int, microbatch: int) -> Tensor:
        """Of the tokens that a rank owns: within the step."""
        key = rank, microbatch
        if key not in self._index:
            fold, place = self.fold, lambda *axes: _place(self.fold, "attention", axes, rank)
            data, cp, tp = place("dp"), place("cp"), place("tp")
            batch = self.samples(self.config, data.rank, data.size).next_step()[microbatch]
            meshes = SimpleNamespace(data=data, cp=cp, tp=tp, fold=fold)
            cut_out = cut(batch, microbatch, meshes, placement(self.config.parallelism), torch.device("cpu"))
            self._index[key] = cut_out.tokens.index_T
        return self._index[key]

    def chosen(self, rank: int, microbatch: int, layer: int) -> Tensor:
        key = rank, microbatch, self.kind(layer)
        if key not in self._chosen:
            self._chosen[key] = self.stated.choose(layer, self.index(rank, microbatch))
        return self._chosen[key]


def _place(fold: Fold, view: Any, axes: tuple[str, ...], rank: int) -> Group:
    members = group_of(fold, view, axes, rank)
    return Group("", len(members), members.index(rank)) if len(members) > 1 else ALONE


class _Stop(Exception):
    pass


class _Run(TorchDispatchMode):
    """A dispatcher's own code for one rank: `give` answers the whole numbers that come, up to the n-th message of such,
    which is kept with its sizes. n = -1: to the end.
    """

    def __init__(self, n: int, give: Callable[[int], Tensor]):
        super().__init__()
        self.n, self.give, self.met = n, give, 0
        self.all_to_alls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """Group, rows to each of its ranks, rows from each."""

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
        if self.met == self.n:
            self.sent = x.clone(), (args[2], args[1]) if name == "all_to_all_single" else None, name, args[-1]
            raise _Stop
        self.met += 1
        return self.give(self.met - 1)


class Exchange:
    """What a rank receives of the whole numbers that dispatchers send each other."""

    def __init__(self, routing: Routing, kind: type[Dispatcher], like: Dispatcher, node: int):
        self.routing, self.kind, self.like, self.node = routing, kind, like, node
        self._sent: dict[tuple, tuple] = {}
        self._got: dict[tuple, Tensor] = {}

    def __reduce__(self) -> tuple:
        """To another process, without what is found again."""
        routing = self.routing
        fresh = Routing(routing.config, routing.fold, routing.samples, routing.stated)
        return Exchange, (fresh, self.kind, self.like, self.node)

    def received(self, rank: int, microbatch: int, layer: int, n: int) -> Tensor:
        """By the n-th message of whole numbers, on a rank."""
        key = rank, microbatch, self.routing.kind(layer), n
        if key not in self._got:
            _, _, name, group = self.sent(rank, microbatch, layer, n)
            members = self.members(group, rank)
            me, pieces = members.index(rank), []
            for other in members:
                x, splits, _, _ = self.sent(other, microbatch, layer, n)
                pieces.append(x.split(splits[0])[me] if splits is not None else x)
            self._got[key] = torch.stack(pieces).sum(0) if name == "all_reduce" else torch.cat(pieces)
        return self._got[key]

    def sent(self, rank: int, microbatch: int, layer: int, n: int) -> tuple:
        key = rank, microbatch, self.routing.kind(layer), n
        if key not in self._sent:
            chosen_TK = self.routing.chosen(rank, microbatch, layer)
            run = _Run(n, lambda i: self.received(rank, microbatch, layer, i))
            dispatcher = self._dispatcher(rank)
            x_TD, weights_TK = torch.zeros(len(chosen_TK), 0), torch.zeros(chosen_TK.shape)
            try:
                with run, torch.no_grad():
                    dispatcher.parts(dispatcher.start(x_TD, weights_TK, chosen_TK, 0))
            except _Stop:
                self._sent[key] = run.sent
            else:
                raise RuntimeError(f"{self.kind.__name__} sends no whole numbers for the {n + 1}th time")
        return self._sent[key]

    def all_to_alls(self, rank: int, microbatch: int, layer: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Of a forward pass: to the experts and back."""
        chosen_TK = self.routing.chosen(rank, microbatch, layer)
        run = _Run(-1, lambda i: self.received(rank, microbatch, layer, i))
        dispatcher = self._dispatcher(rank)
        x_TD, weights_TK = torch.zeros(len(chosen_TK), 0), torch.zeros(chosen_TK.shape)
        with run, torch.no_grad():
            parts, home = dispatcher.parts(dispatcher.start(x_TD, weights_TK, chosen_TK, 0))
            arrived = [dispatcher.arrive(part) for part in parts]
            dispatcher.land([dispatcher.leave(x_RD, splits) for x_RD, _, _, splits in arrived], home)
        return run.all_to_alls

    def _dispatcher(self, rank: int) -> Dispatcher:
        fold, like = self.routing.fold, self.like
        made = self.kind(like.num_experts, like.chunks, "torch")
        whole = replace(_place(fold, "experts", ("ep", "etp"), rank), name="whole")
        made.set_groups(whole, fold.ep, fold.etp)
        if isinstance(made, Hierarchical) and like.across.size > 1:
            within, across = (self.members(name, rank) for name in ("within", "across"))
            made.set_nodes(
                Group("within", len(within), within.index(rank)), Group("across", len(across), across.index(rank))
            )
        return made

    def members(self, group: str, rank: int) -> list[int]:
        whole = list(group_of(self.routing.fold, "experts", ("ep", "etp"), rank))
        if group == "whole":
            return whole
        first, place = whole[0], (rank - whole[0]) % self.node
        if group == "across":
            return list(range(first + place, first + len(whole), self.node))
        start = rank - (rank - first) % self.node
        return list(range(start, start + self.node))
