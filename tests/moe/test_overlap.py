"""What is computed while rows are in flight, from the order in which a program sends, computes and waits.

Two ranks and the real layer. A message lasts from its sending to the wait for it, in the program's order.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests import parity, world
from tests.support.event_order import Events
from titanmoe.comm import all_to_all, collectives
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.models.attention import Attention
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.experts import Experts
from titanmoe.moe.layer import MoE
from titanmoe.ops.cpu.fsdp import ReduceScatter
from titanmoe.tokens import Tokens

RANKS, T, K = 2, 48, 2
MESSAGES, EXPERTS, SHARED, ATTENTION = "messages", "experts", "shared", "attention"


class Wire:
    """Replaces the operations that collectives.py calls: records the rows that are sent and waited for."""

    def __init__(self, events: Events):
        self.real, self.events = collectives._ops, events
        self.in_flight: list[Tensor] = []  # kept, so that no id is used twice

    def __enter__(self) -> Wire:
        collectives._ops = self
        return self

    def __exit__(self, *_: Any) -> None:
        collectives._ops = self.real

    def all_to_all_single(self, x: Tensor, receive: list[int], send: list[int], name: str) -> Tensor:
        y = self.real.all_to_all_single(x, receive, send, name)
        if x.dim() == 2 and x.shape[1] > 1 and x.is_floating_point():  # rows, not counts or weights
            self.in_flight.append(y)
            self.events.begin(MESSAGES, id(y))
        return y

    def wait_tensor(self, y: Tensor) -> Tensor:
        if id(y) in self.events.open:
            self.events.end(id(y))
        return self.real.wait_tensor(y)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Work(torch.autograd.Function):
    """Returns x, and records when it passes forward and backward."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        note(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.note(grad)
        return grad, None


def noted(events: Events, name: str) -> Any:
    def note(x: Tensor) -> None:
        with events.during(name):
            pass

    return note


class Shared(nn.Module):
    def __init__(self, events: Events):
        super().__init__()
        self.events = events

    def forward(self, x_BsD: Tensor) -> Tensor:
        return _Work.apply(x_BsD, noted(self.events, SHARED))


def counted(events: Events) -> dict[str, int]:
    assert not events.open, "something was sent and never waited for"
    names = (MESSAGES, EXPERTS, SHARED, ATTENTION)
    return {name: len(events.of(name)) for name in names} | {
        f"{name} in messages": events.within(name, MESSAGES) for name in names[1:]
    }


def ordered(shared: bool, across: bool = False) -> dict[str, dict[str, int]]:
    """Forward and backward of a layer whose experts are on two ranks."""
    events = Events()
    kind = "hierarchical" if across else "alltoall"
    changes = {"moe.dispatcher": kind, "moe.force_balance": True}
    config = parity.read(changes, RANKS)
    moe = MoE(
        config.model,
        config.moe,
        shared=Shared(events) if shared else None,
        seed=0,
        layer=0,
        microbatches=1,
        dtype=torch.float64,
    )
    nn.init.normal_(moe.router.weight)
    group = Group(dist.group.WORLD.group_name, RANKS, dist.get_rank())
    # across: each rank is a node
    moe.dispatcher.place(ExpertRanks(group, RANKS, 1, NO_GROUP if across else group, group if across else NO_GROUP))
    moe.experts.products = lambda x, weight, count: _Work.apply(x * weight, noted(events, EXPERTS))
    x_BsD = torch.randn(1, T, config.model.dim, dtype=torch.float64, requires_grad=True)
    index = torch.arange(T) + T * group.rank
    tokens = Tokens(
        index[None], index, torch.zeros(T).long(), torch.ones(T, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    )
    moe.begin_step(1, torch.tensor(RANKS * T), 1)
    out = {}

    def seen(name: str, run: Any) -> Any:
        events.__init__()
        with Wire(events):
            result = run()
        out[name] = counted(events)
        return result

    y_BsD = seen("forward", lambda: moe(x_BsD, tokens))
    seen("backward", lambda: y_BsD.sum().backward())
    return out


@functools.cache
def seen_on_ranks(shared: bool, across: bool = False) -> list[dict[str, dict[str, int]]]:
    return world.run(RANKS, ordered, shared, across)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("across", [False, True], ids=["flat", "across_nodes"])
def test_the_shared_expert_is_computed_while_rows_are_under_way(across: bool, direction: str) -> None:
    for seen in seen_on_ranks(True, across):
        at = seen[direction]
        assert at["shared in messages"] == at["shared"] == 1, at
        assert at["experts in messages"] == 0 < at["experts"], at


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_without_a_shared_expert_nothing_is_computed_while_rows_are_under_way(direction: str) -> None:
    for seen in seen_on_ranks(False):
        assert [seen[direction][name] for name in ("messages", "experts", "experts in messages")] == [2, 1, 0]


def test_what_is_under_way_cannot_be_used() -> None:
    """The mark that represents it is empty."""
    assert all(world.run(RANKS, marks))


def marks() -> bool:
    group = Group(dist.group.WORLD.group_name, RANKS, dist.get_rank())
    x_RD = torch.randn(2, 3, requires_grad=True)
    flight = all_to_all.start_all_to_all(x_RD, group, [1] * RANKS, [1] * RANKS)
    y_RD = all_to_all.finish_all_to_all(flight)
    return flight.mark.numel() == 0 and y_RD.shape == x_RD.shape


# ---- two microbatches


def a_step(pairs: bool) -> dict[str, int]:
    """A step of DualPipeV on two pipeline ranks, with experts on two ranks each."""
    events, products = Events(), Experts.products

    def multiplied(self: Experts, x_RD: Tensor, *given: Any) -> Tensor:
        return _Work.apply(products(self, x_RD, *given), noted(events, EXPERTS))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Experts, "products", multiplied))
        stack.enter_context(Wire(events))
        parity.measure(TWO_STAGES | {"moe.overlap": "pairs" if pairs else "none"}, steps=1)
    return counted(events)


TWO_STAGES = {
    "parallelism.pp": 2,
    "parallelism.experts.ep": RANKS,
    "pipeline.schedule": "DualPipeV",
    "model.num_layers": 4,
    "training.global_batch_size": 8,
    "moe.force_balance": True,
}


def test_rows_of_one_microbatch_travel_under_the_experts_of_another() -> None:
    """3 of 8 forwards and 3 of 8 backwards are in pairs, and none waits without giving the other the turn."""
    for taken, apart in zip(world.run(4, a_step, True), world.run(4, a_step, False), strict=True):
        assert apart["experts in messages"] == 0 < apart["experts"] == taken["experts"], (taken, apart)
        assert taken["experts in messages"] == 3 / 8 * taken["experts"], (taken, apart)


# ---- two halves of a microbatch


def a_step_in_halves(halves: bool) -> dict[str, int]:
    """A step of two layers on two data ranks, which share the experts."""
    events, products, attention = Events(), Experts.products, Attention.forward

    def multiplied(self: Experts, x_RD: Tensor, *given: Any) -> Tensor:
        return _Work.apply(products(self, x_RD, *given), noted(events, EXPERTS))

    def attended(self: Attention, *given: Any) -> Tensor:
        return _Work.apply(attention(self, *given), noted(events, ATTENTION))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Experts, "products", multiplied))
        stack.enter_context(mock.patch.object(Attention, "forward", attended))
        stack.enter_context(Wire(events))
        changes = {"training.local_batch_size": 2, "training.global_batch_size": 4, "moe.force_balance": True}
        changes |= {"parallelism.experts.ep": RANKS, "moe.overlap": "halves" if halves else "none"}
        parity.measure(changes, steps=1)
    return counted(events)


def test_rows_of_one_half_travel_under_attention_and_experts_of_the_other() -> None:
    """Forward and backward: experts of both halves, and attention of the second."""
    for halves, whole in zip(*(world.run(RANKS, a_step_in_halves, h) for h in (True, False)), strict=True):
        assert whole["attention"] == whole["experts"] == 4 and halves["attention"] == halves["experts"] == 8
        assert whole["experts in messages"] == whole["attention in messages"] == 0, whole
        assert halves["experts in messages"] == 8 and halves["attention in messages"] == 4, halves


# ---- hooks around the experts


def reductions(changes: dict[str, Any]) -> list[str]:
    """The units of the last layers in the order in which backward reduces their gradients; 2 data ranks each."""
    trainer = parity.make_trainer({"data.source": "synthetic", "parallelism.experts.ep": 2} | changes)
    (part,) = trainer.training.stages

    def elements(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if isinstance(p, DTensor))

    block = part.layers["1"]
    experts, router = elements(block.moe.experts), elements(block.moe.router)
    names = {experts // 2: "experts", elements(block) - experts - router: "block"}
    assert len(names) == 2
    order: list[str] = []

    def note(plain: Any) -> Any:
        def call(self: ReduceScatter, output_tensor: Tensor, input_tensor: Tensor, *given: Any, **more: Any) -> Any:
            order.append(names.get(input_tensor.numel(), "other"))
            return plain(self, output_tensor, input_tensor, *given, **more)

        return call

    with mock.patch.object(ReduceScatter, "__call__", note(ReduceScatter.__call__)):
        trainer.train_step()
    return [name for name in order if name != "other"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 8},
        {"moe.dispatcher": "allgather"},
        {"moe.dispatcher": "hierarchical", "parallelism.node": 1},
        {"moe.dispatcher": "symm_mem"},
    ],
    ids=["alltoall", "halves", "allgather", "hierarchical", "symm_mem"],
)
def test_experts_are_reduced_as_soon_as_their_gradients_are_there(changes: dict[str, Any]) -> None:
    """FSDP finds out from the tensors that go into the experts: without any, it waits for the end of backward."""
    for order in world.run(4, reductions, changes):
        assert order[:4] == ["experts", "block"] * 2, order
