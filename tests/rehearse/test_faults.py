"""Faults planted on some ranks of a world whose programs are right: each is named, with its ranks and messages.

Most are planted in recorded programs, of three worlds that are rehearsed once.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.rehearse.small import config_of
from tests.rehearse.test_clean import NARROW
from titanmoe.fold import meshes
from titanmoe.fold.degrees import derive
from titanmoe.fold.rank_groups import groups
from titanmoe.models import vocabulary
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.many_ranks import SMALL, check_ranks, corners
from titanmoe.rehearse.message_order import HOST_ORDER, Verdict
from titanmoe.rehearse.message_recorder import Event, Log, Message
from titanmoe.rehearse.rehearsal import FakeLoader, Rehearsal, rehearse

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")

FLAT = NARROW | {"model.num_layers": 2, "training.global_batch_size": 4, "parallelism.tp": 2}
WORLDS = {
    "flat": (8, FLAT | {"parallelism.experts.ep": 4}),
    "stages": (
        8,
        NARROW
        | {"model.num_layers": 4, "training.global_batch_size": 8, "parallelism.pp": 4, "parallelism.experts.ep": 2},
    ),
    "large": (16, FLAT | {"training.global_batch_size": 8} | {"parallelism.pp": 2, "parallelism.experts.ep": 8}),
}
"""Of the large world those at the corners are rehearsed: 0, 1, 6, 7, 8, 9, 14 and 15."""


@cache
def right(name: str) -> list[Rehearsal]:
    world, changes = WORLDS[name]
    config = config_of(changes, world, "h100")
    ranks = range(world) if world <= SMALL else corners(derive(world, config.parallelism))
    return [rehearse(config, world, rank, "h100", routing=1.7) for rank in ranks]


class Step(NamedTuple):
    """An event of a program: a message that is issued or waited for, or a line where the host waits."""

    kind: str
    of: Any


class Recorded:
    """A rank's program, to be changed."""

    def __init__(self, rehearsal: Rehearsal):
        self.rehearsal, log = rehearsal, copy.deepcopy(rehearsal.log)
        of = {"issue": log.messages, "wait": log.messages, "sync": log.syncs}
        self.steps = [Step(kind, of[kind][number]) for kind, number in log.events]
        self.groups, self.created_groups = dict(rehearsal.groups), list(rehearsal.created_groups)

    def messages(self, kind: str, op: str, **fields: Any) -> list[Message]:
        return [
            step.of
            for step in self.steps
            if step.kind == "issue"
            and step.of.op == op
            and self.named(step.of.group) == kind
            and all(getattr(step.of, name) == value for name, value in fields.items())
        ]

    def named(self, group: str) -> str:
        """Its kind, the same for all channels of the pipeline, and its axes."""
        return f"{self.groups[group].kind.partition(' ')[0]} {self.groups[group].axes}"

    def group(self, kind: str) -> str:
        return next(name for name in self.groups if self.named(name) == kind)

    def drop(self, message: Message) -> None:
        self.steps = [step for step in self.steps if step.of is not message]

    def add(self, *messages: Message) -> None:
        """At the end, one after the other."""
        for message in messages:
            self.steps += [Step("issue", message), Step("wait", message)]

    def swap(self, a: Message, b: Message) -> None:
        other = {id(a): b, id(b): a}
        self.steps = [Step(step.kind, other.get(id(step.of), step.of)) for step in self.steps]

    def at_once(self, message: Message) -> None:
        """Waits for it as soon as it is issued."""
        self.steps.remove(Step("wait", message))
        self.steps.insert(self.steps.index(Step("issue", message)) + 1, Step("wait", message))

    @property
    def changed(self) -> Rehearsal:
        log = Log(syncs=[step.of for step in self.steps if step.kind == "sync"])
        number: dict[int, int] = {}
        for kind, of in self.steps:
            if kind == "issue":
                number[id(of)] = len(log.messages)
                log.messages.append(of)
            log.events.append(Event(kind, 0 if kind == "sync" else number[id(of)]))
        return replace(self.rehearsal, log=log, groups=self.groups, created_groups=self.created_groups)


World = dict[int, Recorded]
Fault = Callable[[World], Message | None]
FAULTS: dict[str, tuple[str, tuple[int, ...], Fault]] = {}
"""By name: the world, the ranks that are to be named, and what is planted, which returns the message to be named."""


def fault(world: str, *ranks: int) -> Callable[[Fault], Fault]:
    def add(function: Fault) -> Fault:
        FAULTS[function.__name__] = world, ranks, function
        return function

    return add


def judged(world: str, plant: Fault) -> tuple[Verdict, Message | None]:
    ranks = {rehearsal.rank: Recorded(rehearsal) for rehearsal in right(world)}
    message = plant(ranks)
    return check_ranks(recorded.changed for recorded in ranks.values()), message


@pytest.mark.parametrize("name", WORLDS)
def test_right_programs_are_safe(name: str) -> None:
    assert judged(name, lambda world: None)[0] == Verdict(HOST_ORDER, True)


# ---- collectives


@fault("flat", 5)
def another_size(world: World) -> Message:
    message = world[5].messages("blocking tp", "all-gather")[2]
    message.sent_bytes //= 2
    return message


@fault("flat", 7)
def another_dtype(world: World) -> Message:
    message = world[7].messages("shards dp_shard", "all-gather")[1]
    message.dtype = torch.float32
    return message


@fault("flat", 6)
def another_operation(world: World) -> Message:
    message = world[6].messages("shards edp", "reduce-scatter")[0]
    message.op, message.received_bytes = "all-reduce", message.sent_bytes
    return message


@fault("flat", 1)
def another_group(world: World) -> Message:
    message = world[1].messages("blocking tp", "all-reduce")[-1]
    message.group = world[1].group("blocking dp")
    return message


@fault("flat", 0)
def rank_0_alone_in_a_sum_over_the_world(world: World) -> Message:
    message = copy.copy(world[0].messages("blocking dp_shard x tp = world", "all-reduce")[-1])
    world[0].add(message)
    return message


@fault("flat", 3)
def one_less(world: World) -> Message:
    message = world[3].messages("shards dp_shard", "reduce-scatter")[2]
    world[3].drop(message)
    return world[5].messages("shards dp_shard", "reduce-scatter")[2]


@fault("flat", 4)
def the_end_is_missing(world: World) -> Message:
    message = world[4].messages("blocking dp_shard x tp = world", "all-reduce")[-1]
    world[4].drop(message)
    return message


@fault("flat", 2, 5)
def layers_in_another_order(world: World) -> Message:
    for rank in 2, 5:
        a, b = (
            next(
                m
                for m in world[rank].messages("shards edp", "all-gather")
                if m.site.layer.startswith(f"layers.{layer}")
            )
            for layer in (0, 1)
        )
        world[rank].swap(a, b)
    return a


@fault("flat", 6)
def never_waited_for(world: World) -> Message:
    message = world[6].messages("shards edp", "reduce-scatter")[-1]
    world[6].steps.remove(Step("wait", message))
    return message


@fault("flat", 0, 1, 2, 3)
def groups_crossed(world: World) -> Message:
    """tp and dp: everyone waits for the next rank around a ring of 8."""
    for rank, recorded in world.items():
        tp, dp = (copy.copy(recorded.messages(f"blocking {axis}", "all-reduce")[-1]) for axis in ("tp", "dp"))
        recorded.add(*((tp, dp) if rank in (0, 3, 4, 7) else (dp, tp)))
    return tp


# ---- all-to-alls


@fault("flat", 1, 2)
def two_ranks_swap_rows_and_results(world: World) -> Message:
    for rank in 1, 2:
        there, back = world[rank].messages("dispatch ep", "all-to-all", dtype=torch.bfloat16, backward=False)[:2]
        world[rank].swap(there, back)
    return there


@fault("flat", 2)
def rows_and_weights_of_one_dtype_swapped(world: World) -> Message:
    for recorded in world.values():
        for message in recorded.messages("dispatch ep", "all-to-all", dtype=torch.float32):
            message.dtype = torch.bfloat16
    rows, weights = world[2].messages("dispatch ep", "all-to-all", dtype=torch.bfloat16)[:2]
    assert rows.row_bytes > weights.row_bytes
    world[2].swap(rows, weights)
    return rows


@fault("flat", 7)
def another_width(world: World) -> Message:
    message = world[7].messages("dispatch ep", "all-to-all", dtype=torch.bfloat16)[0]
    message.row_bytes *= 2
    return message


@fault("flat", 2, 0)
def splits_not_mirrored(world: World) -> Message:
    message = world[2].messages("dispatch ep", "all-to-all", dtype=torch.bfloat16)[3]
    send, receive = message.splits
    message.splits = (send[0] - 1, *send[1:3], send[3] + 1), receive
    return message


@fault("flat", 6)
def no_rows_no_call(world: World) -> Message:
    message = world[6].messages("dispatch ep", "all-to-all", dtype=torch.bfloat16)[4]
    world[6].drop(message)
    return world[4].messages("dispatch ep", "all-to-all", dtype=torch.bfloat16)[4]


@fault("flat", 0, 2)
def a_sum_between_them(world: World) -> Message:
    """Rank 0 sums over dp between two all-to-alls, rank 2 after them."""
    for rank, before in (0, True), (2, False):
        recorded = world[rank]
        sums = copy.copy(recorded.messages("blocking dp", "all-reduce")[-1])
        rows = copy.copy(recorded.messages("dispatch ep", "all-to-all", dtype=torch.int64)[-1])
        recorded.add(*((sums, rows) if before else (rows, sums)))
    for rank in 1, 3:
        world[rank].add(copy.copy(world[rank].messages("dispatch ep", "all-to-all", dtype=torch.int64)[-1]))
    for rank in 4, 6:
        world[rank].add(copy.copy(world[rank].messages("blocking dp", "all-reduce")[-1]))
    return sums


# ---- groups


@fault("flat", 3)
def groups_in_another_order(world: World) -> None:
    groups = world[3].created_groups
    groups[2], groups[3] = groups[3], groups[2]


@fault("flat", 5)
def one_group_more(world: World) -> None:
    world[5].created_groups.append(("dispatch", (tuple(range(8)),)))


@fault("flat", 7)
def one_group_less(world: World) -> None:
    del world[7].created_groups[-1]


@fault("flat", 1)
def a_group_of_other_ranks(world: World) -> Message:
    recorded = world[1]
    name = recorded.group("blocking tp")
    recorded.groups[name] = replace(recorded.groups[name], ranks=(1, 2))
    return recorded.messages("blocking tp", "reduce-scatter")[0]


# ---- sends and receives


@fault("stages", 0, 2)
def a_send_less(world: World) -> Message:
    message = world[0].messages("stages pp", "send", dtype=torch.bfloat16)[1]
    world[0].drop(message)
    return world[2].messages("stages pp", "receive", dtype=torch.bfloat16, peer=0)[-1]


@fault("stages", 5, 3)
def another_peer(world: World) -> Message:
    message = world[5].messages("stages pp", "send", dtype=torch.bfloat16, peer=1)[0]
    message.peer = 3
    return world[3].messages("stages pp", "receive", dtype=torch.bfloat16, peer=2)[-1]


@fault("stages", 4, 6)
def a_smaller_receive(world: World) -> Message:
    message = world[6].messages("stages pp", "receive", dtype=torch.bfloat16)[0]
    message.received_bytes //= 2
    return message


@fault("stages", 3, 5)
def a_send_of_another_dtype(world: World) -> Message:
    message = world[3].messages("stages pp", "send", dtype=torch.bfloat16, peer=2)[2]
    message.dtype = torch.float16
    return message


@fault("stages", 2, 4)
def sends_before_receives(world: World) -> Message:
    """Both ranks send at once and wait, and only then receive."""
    for rank, peer in (2, 2), (4, 1):
        recorded = world[rank]
        send, receive = (
            copy.copy(recorded.messages("stages pp", op, dtype=torch.bfloat16, peer=peer)[0]) for op in WAYS
        )
        send.batch = receive.batch = -1
        recorded.add(send, receive)
    return send


@fault("stages", 4, 6)
def a_send_on_the_channel_of_receives(world: World) -> Message:
    message, received = (world[4].messages("stages pp", op, dtype=torch.bfloat16, peer=3)[0] for op in WAYS)
    assert message.group != received.group
    message.group = received.group
    return message


@fault("stages", 2, 4)
def two_sends_swapped(world: World) -> Message:
    """The activations of a microbatch and a smaller message that follows them to the same rank."""
    small = copy.copy(world[2].messages("stages pp", "send", dtype=torch.bfloat16, peer=2)[-1])
    small.sent_bytes //= 2
    received = copy.copy(world[4].messages("stages pp", "receive", dtype=torch.bfloat16, peer=1)[-1])
    received.received_bytes //= 2
    world[2].add(small)
    world[4].add(received)
    world[2].swap(small, first := world[2].messages("stages pp", "send", dtype=torch.bfloat16, peer=2)[0])
    return first


WAYS = ("send", "receive")


@fault("stages", 0)
def a_send_never_waited_for(world: World) -> Message:
    message = world[0].messages("stages pp", "send", dtype=torch.bfloat16)[2]
    world[0].steps.remove(Step("wait", message))
    return message


# ---- of a large world, some of whose ranks are taken to be like others


@fault("large", 1)
def the_last_along_tp(world: World) -> Message:
    message = world[1].messages("blocking tp", "all-gather")[0]
    message.sent_bytes *= 2
    return message


@fault("large", 6)
def a_microbatch_less_along_dp(world: World) -> Message:
    """None of the ranks that it does this with are rehearsed, but for rank 0, which it is compared with."""
    messages = world[6].messages("blocking tp", "all-gather")
    world[6].drop(messages[0])
    return messages[0]


@fault("large", 7)
def the_last_along_ep(world: World) -> Message:
    message = world[7].messages("dispatch ep", "all-to-all", dtype=torch.int64)[0]
    world[7].drop(message)
    return world[0].messages("dispatch ep", "all-to-all", dtype=torch.int64)[0]


@fault("large", 15)
def the_last_stage(world: World) -> Message:
    message = world[15].messages("blocking world", "all-reduce")[0]
    message.dtype = torch.float32
    return message


@fault("large", 9)
def an_order_that_differs_along_tp(world: World) -> Message:
    """The ranks with which the two groups form a cycle are not rehearsed."""
    tp, dp = (copy.copy(world[9].messages(f"blocking {axis}", "all-reduce")[-1]) for axis in ("tp", "dp"))
    for rank in 8, 14, 15:
        world[rank].add(*(copy.copy(world[rank].messages(f"blocking {x}", "all-reduce")[-1]) for x in ("tp", "dp")))
    world[9].add(dp, tp)
    return dp


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    world, ranks, plant = FAULTS[name]
    verdict, message = judged(world, plant)
    names(verdict, *ranks)
    text = "\n".join((verdict.text, *verdict.details))
    assert message is None or (message.op in text and str(message.site) in text), text


def names(verdict: Verdict, *ranks: int) -> None:
    text = "\n".join((verdict.text, *verdict.details))
    lists = re.findall(r"\branks? (\d+(?:,\d+)*)", text)
    assert not verdict.safe and set(ranks) <= {int(rank) for ranks_text in lists for rank in ranks_text.split(",")}, (
        text
    )


# ---- planted in the program itself


def run(world: int, of: Callable[[int], AbstractContextManager]) -> Verdict:
    """of: what a rank does otherwise."""
    changes = {"model.num_layers": 1, "training.global_batch_size": world, "parallelism.tp": 2}
    config = config_of(NARROW | changes | {"parallelism.experts.ep": 4}, world, "h100")
    rehearsals = []
    for rank in range(world) if world <= SMALL else corners(derive(world, config.parallelism)):
        with of(rank):
            rehearsals.append(rehearse(config, world, rank, "h100"))
    return check_ranks(rehearsals)


@pytest.mark.parametrize(("world", "rank"), [(4, 2), (16, 14)])
def test_data_ranks_with_a_microbatch_less(world: int, rank: int) -> None:
    real = FakeLoader.__init__

    def fewer(samples: FakeLoader, config: Any, data_rank: int, data_ranks: int) -> None:
        real(samples, config, data_rank, data_ranks)
        samples.microbatches -= data_rank == data_ranks - 1

    names(run(world, lambda _: mock.patch.object(FakeLoader, "__init__", fewer)), 0, rank)


def test_a_rank_that_makes_its_groups_in_another_order() -> None:
    real = meshes._expert_groups

    def later(fold: Any, communicators: Any, node: int) -> Any:
        communicators.group("blocking", groups(fold, "attention", "tp"))
        return real(fold, communicators, node)

    verdict = run(4, lambda rank: mock.patch.object(meshes, "_expert_groups", later if rank == 3 else real))
    names(verdict, 0, 3)
    assert "same groups in the same order" in verdict.text


def test_a_rank_that_sums_more_than_the_others_of_its_tp_group() -> None:
    real = vocabulary.all_reduce

    def more(x: Any, group: Any, op: str = "sum") -> Any:
        return real(torch.cat((x, x)), group, op)[: len(x)]

    verdict = run(4, lambda rank: mock.patch.object(vocabulary, "all_reduce", more if rank == 3 else real))
    names(verdict, 2, 3)
    assert "models/vocabulary.py" in verdict.text
