"""Who is sent where, as stated: what data would decide.

`chosen` gives the experts of every token of any rank, so that a rank knows also what the others will send it. How many
rows those are is found by the dispatchers' own code: it is run for each of them with rows of no width, and whatever
whole numbers it sends are handed over here.

Shapes as in titanmoe.moe.dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
"""The samples of a data rank, of so many: titanmoe.rehearse.samples."""


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


class Routing:
    """The same for every layer."""

    def __init__(self, config: Config, fold: Fold, samples: Callable[[Config, int, int], Any], imbalance: float = 1.0):
        self.config, self.fold, self.samples, self.imbalance = config, fold, samples, imbalance
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def index(self, rank: int, microbatch: int) -> Tensor:
        """Of the tokens that a rank owns: within the step."""
        fold, place = self.fold, lambda *axes: _place(self.fold, "attention", axes, rank)
        data, cp, tp = place("dp"), place("cp"), place("tp")
        batch = self.samples(self.config, data.rank, data.size).next_step()[microbatch]
        meshes = SimpleNamespace(data=data, cp=cp, tp=tp, fold=fold)
        return cut(batch, microbatch, meshes, placement(self.config.parallelism), torch.device("cpu")).tokens.index_T

    def chosen(self, rank: int, microbatch: int) -> Tensor:
        key = rank, microbatch
        if key not in self._chosen:
            model, index_T = self.config.model, self.index(rank, microbatch)
            if self.imbalance <= 1:
                found = balanced(index_T, model.top_k, model.num_experts)
            else:
                found = skewed(index_T, model.top_k, model.num_experts, self.imbalance)
            self._chosen[key] = found
        return self._chosen[key]


def _place(fold: Fold, view: Any, axes: tuple[str, ...], rank: int) -> Group:
    members = group_of(fold, view, axes, rank)
    return Group("", len(members), members.index(rank)) if len(members) > 1 else ALONE


class _Stop(Exception):
    pass


class _Run(TorchDispatchMode):
    """A dispatcher's own code for one rank: `give` answers the whole numbers that come, up to the n-th message of such,
    which is kept with its sizes.
    """

    def __init__(self, n: int, give: Callable[[int], Tensor]):
        super().__init__()
        self.n, self.give, self.met = n, give, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if name == "wait_tensor":
            return args[0]
        x = args[0]
        if x.dtype.is_floating_point:
            rows = sum(args[1]) if name == "all_to_all_single" else x.shape[0] * args[1]
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

    def received(self, rank: int, microbatch: int, n: int) -> Tensor:
        """By the n-th message of whole numbers, on a rank."""
        key = rank, microbatch, n
        if key not in self._got:
            _, _, name, group = self.sent(rank, microbatch, n)
            members = self._members(group, rank)
            me, pieces = members.index(rank), []
            for other in members:
                x, splits, _, _ = self.sent(other, microbatch, n)
                pieces.append(x.split(splits[0])[me] if splits is not None else x)
            self._got[key] = torch.stack(pieces).sum(0) if name == "all_reduce" else torch.cat(pieces)
        return self._got[key]

    def sent(self, rank: int, microbatch: int, n: int) -> tuple:
        key = rank, microbatch, n
        if key not in self._sent:
            chosen_TK = self.routing.chosen(rank, microbatch)
            run = _Run(n, lambda i: self.received(rank, microbatch, i))
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

    def _dispatcher(self, rank: int) -> Dispatcher:
        fold, like = self.routing.fold, self.like
        made = self.kind(like.num_experts, like.chunks, "torch")
        whole = replace(_place(fold, "experts", ("ep", "etp"), rank), name="whole")
        made.set_groups(whole, fold.ep, fold.etp)
        if isinstance(made, Hierarchical) and like.across.size > 1:
            within, across = (self._members(name, rank) for name in ("within", "across"))
            made.set_nodes(
                Group("within", len(within), within.index(rank)), Group("across", len(across), across.index(rank))
            )
        return made

    def _members(self, group: str, rank: int) -> list[int]:
        whole = list(group_of(self.routing.fold, "experts", ("ep", "etp"), rank))
        if group == "whole":
            return whole
        first, place = whole[0], (rank - whole[0]) % self.node
        if group == "across":
            return list(range(first + place, first + len(whole), self.node))
        start = rank - (rank - first) % self.node
        return list(range(start, start + self.node))
