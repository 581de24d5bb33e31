"""What is computed while rows are under way: seen in the times of messages and computations over a slowed transport.

Two ranks, the real layer. Rows take MESSAGE seconds each on a wire that carries one message after the other, experts
COMPUTE seconds a row, and the shared expert SHARED at once, forward and backward alike.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import parity, world
from titanmoe import comm
from titanmoe.comm import ALONE, Group
from titanmoe.models.transformer import Block
from titanmoe.moe import chunks
from titanmoe.moe.experts import Experts
from titanmoe.moe.layer import MoE
from titanmoe.parallel.pipeline import Pipeline
from titanmoe.tokens import Tokens

RANKS, T, K = 2, 48, 2
MESSAGE, COMPUTE, SHARED = 4e-3, 2e-3, 0.15
Span = tuple[float, float]


class SlowWire:
    """In place of the operations that titanmoe.comm calls: rows arrive no sooner than such a wire could carry them."""

    def __init__(self) -> None:
        self.real = comm._ops
        self.free = 0.0
        self.under_way: dict[int, tuple[Tensor, Span]] = {}
        self.spans: list[Span] = []

    def __enter__(self) -> SlowWire:
        comm._ops = self
        return self

    def __exit__(self, *_: Any) -> None:
        comm._ops = self.real

    def all_to_all_single(self, x: Tensor, receive: list[int], send: list[int], name: str) -> Tensor:
        y = self.real.all_to_all_single(x, receive, send, name)
        if x.dim() == 2 and x.shape[1] > 1 and x.is_floating_point():  # rows, not counts or weights
            begin = max(time.monotonic(), self.free)
            self.free = begin + MESSAGE * sum(send)
            self.under_way[id(y)] = y, (begin, self.free)
        return y

    def wait_tensor(self, y: Tensor) -> Tensor:
        if id(y) in self.under_way:
            _, span = self.under_way.pop(id(y))
            time.sleep(max(0.0, span[1] - time.monotonic()))
            self.spans.append(span)
        return self.real.wait_tensor(y)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds, spans):
        ctx.seconds, ctx.spans = seconds, spans
        return _Work.take(x, seconds, spans)

    @staticmethod
    def backward(ctx, grad):
        return _Work.take(grad, ctx.seconds, ctx.spans), None, None

    @staticmethod
    def take(x: Tensor, seconds: float, spans: list[Span]) -> Tensor:
        begin = time.monotonic()
        time.sleep(seconds)
        spans.append((begin, time.monotonic()))
        return x * 2


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []

    def forward(self, x_BsD: Tensor) -> Tensor:
        return _Work.apply(x_BsD, SHARED, self.spans)


def together(some: list[Span], others: list[Span]) -> float:
    """Seconds in which one of either runs; those of a list do not intersect each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def timed(chunks: int, shared: bool, across: bool = False) -> dict[str, dict[str, float]]:
    """Forward and backward of a layer whose experts lie on two ranks: how long, how long at once. Other work on
    the machine makes sleeps longer and moves messages apart, so times are compared with each other, never with a clock.
    """
    kind = "hierarchical" if across else "alltoall"
    changes = {"moe.dispatcher": kind, "moe.overlap_chunks": chunks, "moe.force_balance": True}
    config = parity.read(changes, RANKS)
    moe = MoE(config.model, config.moe, Shared() if shared else None, 0, 0, 1, torch.float64)
    nn.init.normal_(moe.router.weight)
    group = Group(dist.group.WORLD.group_name, RANKS, dist.get_rank())
    moe.dispatcher.lay(group, RANKS, 1)
    if across:  # each rank a node of its own
        moe.dispatcher.lay_nodes(ALONE, group)
    computing: list[Span] = []
    moe.experts.products = lambda x, weight, count: _Work.apply(x * weight, COMPUTE * x.shape[0], computing)
    x_BsD = torch.randn(1, T, config.model.dim, dtype=torch.float64, requires_grad=True)
    index = torch.arange(T) + T * group.rank
    tokens = Tokens(
        index[None], index, torch.zeros(T).long(), torch.ones(T, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    )
    moe.begin_step(1, torch.tensor(RANKS * T), 1)
    out = {}

    def measured(name: str, run: Any) -> Any:
        dist.barrier()
        computing.clear()
        own = moe.shared.spans if shared else []
        own.clear()
        with SlowWire() as wire:
            result = run()
        assert not wire.under_way, "something was sent and never waited for"
        out[name] = {
            "messages": length(wire.spans),
            "experts": length(computing),
            "shared": length(own),
            "experts in messages": together(wire.spans, computing),
            "shared in messages": together(wire.spans, own),
        }
        return result

    y_BsD = measured("forward", lambda: moe(x_BsD, tokens))
    measured("backward", lambda: y_BsD.sum().backward())
    return out


@functools.cache
def seen_on_ranks(chunks: int, shared: bool, across: bool = False) -> list[dict[str, dict[str, float]]]:
    return world.run(RANKS, timed, chunks, shared, across)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("across", [False, True], ids=["flat", "across_nodes"])
def test_the_shared_expert_is_computed_while_rows_are_under_way(across: bool, way: str) -> None:
    for seen in seen_on_ranks(1, True, across):
        at = seen[way]
        assert at["shared in messages"] > 0.5 * SHARED, at
        assert at["experts in messages"] == 0, at


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_chunk_is_multiplied_while_others_are_under_way(way: str) -> None:
    for alone, cut in zip(seen_on_ranks(1, False), seen_on_ranks(4, False), strict=True):
        assert alone[way]["experts in messages"] == 0, alone[way]
        assert cut[way]["experts in messages"] > 0.5 * cut[way]["experts"], cut[way]


def chosen(slowed: bool) -> chunks.Choice:
    """On four ranks: of rows that take MESSAGE seconds and experts that take COMPUTE, or neither."""
    config = parity.read({}, 4)
    group = Group(dist.group.WORLD.group_name, 4, dist.get_rank())
    experts = chunks.stand_in(config.model, config.moe, 4, 1, torch.float32, torch.device("cpu"))
    if slowed:
        products = experts.products
        experts.products = lambda x, *work: _Work.apply(products(x, *work), COMPUTE * x.shape[0], [])
    with SlowWire() if slowed else nullcontext(), mock.patch.object(chunks, "ROUNDS", 1 if slowed else 10):
        return chunks.choose(chunks.measure(experts, 16, group, group), 16)


def test_chunks_are_chosen_where_messages_are_slow() -> None:
    slow, quick = world.run(4, chosen, True), world.run(4, chosen, False)
    assert len({str(choice) for choice in slow}) == len({str(choice) for choice in quick}) == 1
    assert slow[0].chunks > 1 and min(slow[0].alone) > 1, str(slow[0])
    there, back, forward, backward = (line.slope for line in vars(slow[0].costs).values())
    assert min(there, back) > 0.5 * MESSAGE and min(forward, backward) > 0.5 * COMPUTE, str(slow[0])
    assert quick[0].chunks == 1, str(quick[0])


def test_what_is_under_way_cannot_be_used() -> None:
    """The mark that stands for it is empty."""
    assert all(world.run(RANKS, marks))


def marks() -> bool:
    group = Group(dist.group.WORLD.group_name, RANKS, dist.get_rank())
    x_RD = torch.randn(2, 3, requires_grad=True)
    flight = comm.start(x_RD, group)
    y_RD = comm.arrive(flight)
    return flight.mark.numel() == 0 and y_RD.shape == x_RD.shape


# ---- two microbatches


def a_step(changes: dict[str, Any], message: float, product: float, attention: float = 0.0) -> dict[str, float]:
    """Of DualPipeV on two pipeline ranks, experts on two ranks each; seconds of a row, and of a block's attention."""
    computing, products, attend, run = [], Experts.products, Block.attend, Pipeline.run
    out = {}

    def timed(self: Pipeline, *given: Any) -> Tensor:
        dist.barrier()
        begin = time.monotonic()
        result = run(self, *given)
        out["step"] = time.monotonic() - begin
        return result

    def multiplied(self: Experts, x_RD: Tensor, *given: Any) -> Tensor:
        return _Work.apply(products(self, x_RD, *given), product * x_RD.shape[0], computing)

    def attended(self: Block, *given: Any) -> Tensor:
        return _Work.apply(attend(self, *given), attention, [])

    slow = ((Experts, "products", multiplied), (Block, "attend", attended), (Pipeline, "run", timed))
    with ExitStack() as stack:
        for owner, name, method in slow:
            stack.enter_context(mock.patch.object(owner, name, method))
        stack.enter_context(mock.patch(f"{__name__}.MESSAGE", message))
        wire = stack.enter_context(SlowWire())
        parity.measure(TWO_STAGES | changes, steps=1)
    assert not wire.under_way, "something was sent and never waited for"
    both = together(wire.spans, computing)
    return out | {"messages": length(wire.spans), "experts": length(computing), "experts in messages": both}


TWO_STAGES = {
    "parallelism.pp": 2,
    "parallelism.experts.ep": RANKS,
    "pipeline.schedule": "DualPipeV",
    "model.num_layers": 4,
    "training.global_batch_size": 8,
    "moe.force_balance": True,
}


def test_rows_of_one_microbatch_travel_under_the_experts_of_another() -> None:
    """3 of 8 forwards and 3 of 8 backwards are in pairs, so that 3/8 or so could be hidden."""
    taken, apart = (
        world.run(4, a_step, {"pipeline.overlap_pairs": pairs}, MESSAGE / 4, MESSAGE / 8) for pairs in (True, False)
    )
    for at, without in zip(taken, apart, strict=True):
        assert without["experts in messages"] == 0, without
        assert at["experts in messages"] > 0.25 * at["experts"] > 0, at
        assert at["step"] < without["step"], (at, without)
