"""The table of dispatchers is true of each class, and an entry in it is all that a new class needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import parity, world
from tests.moe.test_dispatch import CASES, D, E, K, T, arriving, inputs, nodes_of, whole_world
from tests.support.dispatched import dispatched
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, ExpertRanks
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS, DispatcherSpec, overlapping
from titanmoe.moe.layer import MoE as Layer
from titanmoe.tokens import Tokens

RANKS = 4


class HostReads(TorchFunctionMode):
    """Counts how often a tensor's value is read into Python."""

    READS = ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu")

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += getattr(function, "__name__", "") in self.READS
        return function(*args, **(kwargs or {}))


class Groups(TorchDispatchMode):
    """The names of the groups that collectives are called over."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "_c10d_functional":
            self.names.add(args[-1])
        return op(*args, **(kwargs or {}))


def on_four_ranks(name: str) -> Dispatcher:
    """On four ranks on two nodes, as a step uses it."""
    shape = {"model.dim": D, "model.top_k": K, "training.seq_len": T, "parallelism.experts.ep": RANKS}
    spec = DISPATCHERS.look_up(name)
    if getattr(spec, "param", ""):  # what is read from the recipe does not matter to the emulation
        shape |= {"training.mixed_precision_param": spec.param, "model.dim": spec.dim_of}
    config = parity.read(shape | {"moe.dispatcher": name}, RANKS)
    dispatcher = DISPATCHERS.implementation(name)(E)
    ranks = ExpertRanks(whole_world(), RANKS, 1, *nodes_of(2))
    dispatcher.place(ranks)
    tokens, dtype = config.training.local_batch_size * T, getattr(torch, config.training.mixed_precision_param)
    dispatcher.memory = dispatcher.reserve(config.model, config.moe, ranks, tokens, dtype, torch.device("cpu"))
    return dispatcher


def host_syncs(name: str, slots_per_expert: int) -> int:
    dispatcher = on_four_ranks(name)
    with HostReads() as reads:
        rows, _, _, send_back = dispatched(dispatcher, *inputs("some_dropped", dist.get_rank()), slots_per_expert)
        send_back(rows)
    return reads.times


def can_wait(name: str) -> bool:
    """Whether what it returns is a SplitExchange."""
    exchange = on_four_ranks(name).dispatch(*inputs("random", dist.get_rank()), 0)
    return all(hasattr(exchange, method) for method in ("relay", "start_combine", "finish_combine"))


def rows_for_no_expert(name: str) -> bool:
    found = False
    for case in CASES:
        rows, _, count_e, _ = dispatched(on_four_ranks(name), *inputs(case, dist.get_rank()))
        arrived, _ = arriving(case, RANKS, range(2 * dist.get_rank(), 2 * dist.get_rank() + 2))
        found |= len(rows) != int(count_e.sum()) or len(rows) != len(arrived)
    return found


def sends_across(name: str) -> bool:
    """Whether anything travels by the group across nodes."""
    dispatcher = on_four_ranks(name)
    with Groups() as groups:
        dispatcher.dispatch(*inputs("random", dist.get_rank()), 0)
    return dispatcher.ranks.across.name in groups.names


def seen_by_hooks(name: str) -> tuple[int, int, int]:
    """Return what torch's hooks on a module find in a half's exchange: the number of tensors with gradients, the number
    of plain numbers, and the number of tensors with gradients in what it sends back."""
    x_TD, weights_TK, chosen_TK = inputs("random", dist.get_rank())
    exchange = on_four_ranks(name).dispatch(x_TD.requires_grad_(), weights_TK.requires_grad_(), chosen_TK, 0).relay()
    leaves = tree_leaves(exchange)
    going = sum(x.requires_grad for x in leaves if isinstance(x, Tensor))
    numbers = sum(isinstance(x, int) for x in leaves)
    back = exchange.start_combine(exchange.receive_routed()[0])
    return going, numbers, sum(x.requires_grad for x in tree_leaves(back) if isinstance(x, Tensor))


@pytest.mark.parametrize("name", overlapping())
def test_hooks_see_rows_that_are_on_their_way(name: str) -> None:
    """Rows and weights go in, rows come out. Numbers for each rank would cost a hook a microsecond or two each."""
    assert world.run(RANKS, seen_by_hooks, name) == [(2, 0, 1)] * RANKS


@pytest.mark.parametrize("name", DISPATCHERS.table)
def test_facts_are_true(name: str) -> None:
    spec = DISPATCHERS.look_up(name)
    assert world.run(RANKS, host_syncs, name, 0) == [spec.host_syncs] * RANKS
    assert world.run(RANKS, rows_for_no_expert, name) == [spec.has_unused_slots] * RANKS
    if not spec.cannot_pad:
        assert world.run(RANKS, host_syncs, name, 8) == [0] * RANKS
    assert world.run(RANKS, can_wait, name) == [name in overlapping()] * RANKS
    assert world.run(RANKS, sends_across, name) == [spec.works_by_node] * RANKS
    assert spec.asks_machine == (DISPATCHERS.implementation(name).missing is not Dispatcher.missing)


class Nowhere(Dispatcher):
    """Only this rank's experts, one row for each kept choice, and no message."""

    spec = DispatcherSpec()

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Stay:
        flat = chosen_TK.flatten()
        kept_R = flat.argsort(stable=True)[: int((flat < self.num_experts).sum())]
        token_R = kept_R // chosen_TK.shape[1]
        count_e = flat[kept_R].bincount(minlength=self.num_experts)
        weights_R1 = weights_TK.flatten()[kept_R].unsqueeze(1)
        return Stay(x_TD[token_R], weights_R1, count_e, token_R, len(x_TD))


class Stay(NamedTuple):
    x_RD: Tensor
    weights_R1: Tensor
    count_e: Tensor
    token_R: Tensor
    tokens: int

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x_RD, self.weights_R1, self.count_e

    def combine(self, y_RD: Tensor) -> Tensor:
        return y_RD.new_zeros(self.tokens, y_RD.shape[1]).index_add(0, self.token_R, y_RD)


def test_a_dispatcher_may_lie_outside_the_package() -> None:
    """The class only defines how rows get to their experts and back."""
    model, index = Model(num_experts=4, top_k=2, dim=16, expert_hidden=24), torch.arange(24)
    tokens = Tokens(index.view(2, 12) % 12, index, index // 12, index % 5 != 4, torch.tensor(0))
    x_BsD = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for name in ("alltoall", f"{__name__}:Nowhere"):
        layer = Layer(model, MoE(dispatcher=name), shared=None, seed=0, layer=0, microbatches=1, dtype=torch.float64)
        for seed, weight in enumerate(layer.parameters()):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(seed))
        layer.begin_step(1, torch.tensor(24.0), 2)
        y_BsD = layer(x_BsD, tokens)
        found.append([y_BsD, *torch.autograd.grad(y_BsD.square().sum(), list(layer.parameters()))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
