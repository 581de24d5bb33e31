"""What a dispatcher does before its host waits for counts: rows are laid out, and in a pair the other side has a turn.

Two real ranks; the other side of the pair only notes when it has a turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import world
from tests.moe.test_dispatch import CASES, D, E, K, inputs, whole_world
from tests.support.dispatched import dispatched
from titanmoe.comm import collectives, interleave
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.comm.host_sync import HostCopy
from titanmoe.comm.interleave import InterleavedPair
from titanmoe.moe import permute
from titanmoe.moe.dispatchers.allgather import AllGather
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, ExpertRanks
from titanmoe.moe.dispatchers.hierarchical import Hierarchical
from titanmoe.ops.device import HARDWARE, imitate

RANKS = 2
assert D not in (1, K)  # the width by which rows are known
ALL_CASES = [*CASES, "no_tokens", "one_choice"]


class Notes:
    """Replaces the operations that collectives.py calls; notes what happens to counts and to rows."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.real, self.flying = collectives._ops, {}
        self.kept: list[Tensor] = []  # so that no id is used twice

    def _sent(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.is_floating_point() and x.shape[-1] == D
        if rows or x.dtype == torch.int64:
            self.flying[id(y)] = "rows" if rows else "counts"
            self.kept.append(y)
            self.log.append(f"{self.flying[id(y)]} leave")
        return y

    def all_to_all_single(self, x: Tensor, *how: Any) -> Tensor:
        return self._sent(x, self.real.all_to_all_single(x, *how))

    def all_gather_into_tensor(self, x: Tensor, *how: Any) -> Tensor:
        return self._sent(x, self.real.all_gather_into_tensor(x, *how))

    def wait_tensor(self, y: Tensor) -> Tensor:
        if (what := self.flying.pop(id(y), None)) is not None:
            self.log.append(f"{what} arrive")
        return self.real.wait_tensor(y)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not isinstance(args[0], Tensor) or args[0].shape[1] == D:
                self.log.append(name)
            return real(*args)

        return call

    def in_a_pair(self, work: Callable[[], Any]) -> list[str]:
        """What happens while `work` is the second side of a pair, from its first turn on."""
        over = []

        def other() -> None:
            interleave.mark_sent()
            interleave.yield_if_sent()
            while not over:
                self.log.append("OTHER")
                interleave.mark_sent()
                interleave.yield_if_sent()

        def own() -> None:
            work()
            over.append(True)

        self.log.clear()
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(collectives, "_ops", self))
            stack.enter_context(mock.patch.object(permute, "_copy", self.noted("laid out", permute._copy)))
            stack.enter_context(mock.patch.object(permute, "_sum", self.noted("summed", permute._sum)))
            stack.enter_context(mock.patch.object(HostCopy, "__init__", self.noted("to the host", HostCopy.__init__)))
            stack.enter_context(mock.patch.object(HostCopy, "read", self.noted("read", HostCopy.read)))
            InterleavedPair().run(other, own)
        return self.log.copy()


def dispatcher_of(kind: str) -> Dispatcher:
    group = whole_world()
    if kind == "across nodes":  # each rank is a node
        dispatcher, ranks = Hierarchical(E, "torch"), ExpertRanks(group, RANKS, 1, NO_GROUP, group)
    else:
        dispatcher = AllGather(E, "torch") if kind == "allgather" else AllToAll(E, "torch")
        ranks = ExpertRanks(group, RANKS, 1)
    dispatcher.place(ranks)
    return dispatcher


def case_of(case: str) -> tuple[Tensor, Tensor, Tensor]:
    x_TD, weights_TK, chosen_TK = inputs(case if case in CASES else "random", whole_world().rank)
    if case == "no_tokens":
        x_TD, weights_TK, chosen_TK = x_TD[:0], weights_TK[:0], chosen_TK[:0]
    if case == "one_choice":
        weights_TK, chosen_TK = weights_TK[:, :1], chosen_TK[:, :1]
    return x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_(), chosen_TK


def sequences(kind: str, gpu: bool) -> list[tuple[str, list[str], list[str]]]:
    """For each case, what happens in forward and in backward."""
    out = []
    for case in ALL_CASES:
        dispatcher, given, notes, y = dispatcher_of(kind), case_of(case), Notes(), []

        def forward(dispatcher: Dispatcher = dispatcher, given: tuple = given, y: list = y) -> None:
            x_RD, weights_R1, _, combine = dispatched(dispatcher, *given)
            y.append(combine(x_RD * weights_R1))

        with imitate(HARDWARE["h100"]) if gpu else nullcontext():
            there = notes.in_a_pair(forward)
        (y_TD,) = y
        out.append((case, there, notes.in_a_pair(lambda y_TD=y_TD: y_TD.sum().backward())))
    return out


@functools.cache
def seen(kind: str, gpu: bool = False) -> list[tuple[str, list[str], list[str]]]:
    return [case for rank in world.run(RANKS, sequences, kind, gpu) for case in rank]


WAIT = ["counts leave", "laid out", "OTHER", "counts arrive", "to the host", "read"]
TRIP = ["rows leave", "OTHER", "rows arrive"]
WAIT_ON_GPU = ["counts leave", "laid out", "counts arrive", "to the host", "OTHER", "read"]


def inside_the_node(gpu: bool = False) -> list[str]:
    """Where there is one rank, nothing is sent, but the host waits for its counts there too."""
    wait = WAIT_ON_GPU if gpu else WAIT
    return [*TRIP, *(what for what in wait if not what.startswith("counts")), "summed", *TRIP, "summed"]


AFTER: dict[str, Callable[..., list[str]]] = {
    "alltoall": lambda gpu=False: [*TRIP, *TRIP, "summed"],
    "across nodes": inside_the_node,
}


@pytest.mark.parametrize("kind", AFTER)
def test_rows_are_laid_out_and_the_turn_is_given_up_before_the_host_waits(kind: str) -> None:
    """Whatever is sent: also without tokens, with all of them for one expert, and with none for any."""
    for case, there, _ in seen(kind):
        assert there == [*WAIT, *AFTER[kind]()], case


@pytest.mark.parametrize("kind", AFTER)
def test_on_a_gpu_the_copy_to_the_host_is_launched_before_the_turn_is_given_up(kind: str) -> None:
    for case, there, _ in seen(kind, True):
        assert there == [*WAIT_ON_GPU, *AFTER[kind](gpu=True)], case


@pytest.mark.parametrize("kind", AFTER)
def test_backward_gives_up_a_turn_for_each_wait_for_counts(kind: str) -> None:
    """After it has summed the gradients of the rows. So forward and backward have as many turns each."""
    backward = {
        "alltoall": ["laid out", *TRIP, *TRIP, "summed", "OTHER"],
        "across nodes": ["laid out", *TRIP, "laid out", "summed", "OTHER", *TRIP, "summed", "OTHER"],
    }[kind]
    for case, there, back in seen(kind):
        assert back == backward, case
        assert back.count("OTHER") == there.count("OTHER"), case


def test_gathered_rows_travel_while_the_host_waits() -> None:
    """Their own layout needs them, and this rank's counts need only the choices, which are gathered first."""
    for case, there, _ in seen("allgather"):
        gathered = ["counts leave", "counts arrive", "to the host", "rows leave", "rows arrive", "read", "laid out"]
        assert there[: len(gathered)] == gathered, case
