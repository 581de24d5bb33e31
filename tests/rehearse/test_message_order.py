"""The order of messages: deliberate faults are found, and programs that need overlapping streams are recognized."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.message_order import HOST_ORDER, STREAMS, Verdict, check_order
from titanmoe.rehearse.message_recorder import ALL_TO_ALLS, Event, Log, Message
from titanmoe.rehearse.rank_program import Communicator, Program

ALL, LEFT = (0, 1, 2, 3), (0, 1)


class Script:
    """A rank's program, written by hand. A group's name is its kind; messages are waited for at once unless `open`."""

    def __init__(self, rank: int, **groups: tuple[int, ...]):
        self.rank, self.log, self.groups, self.line = rank, Log(), groups, 0

    def __call__(self, op: str, kind: str, size: int = 64, open: bool = False, **more: object) -> Script:
        self.line += 1
        sent_bytes, received_bytes = (0 if op == "receive" else size), (0 if op == "send" else size)
        dtype = more.pop("dtype", torch.float32)
        message = Message(
            op=op,
            group=kind,
            dtype=dtype,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            site=CodeSite("made.py", self.line),
            **more,
        )
        self.log.messages.append(message)
        self.log.events.append(Event("issue", len(self.log.messages) - 1))
        return self if open else self.wait()

    def wait(self, number: int = -1) -> Script:
        self.log.events.append(Event("wait", number % len(self.log.messages)))
        return self

    def sync(self) -> Script:
        self.log.syncs.append(CodeSite("made.py", self.line))
        self.log.events.append(Event("sync", len(self.log.syncs) - 1))
        return self

    @property
    def program(self) -> Program:
        return Program(
            self.rank, self.log, {kind: Communicator(kind, ranks, ranks) for kind, ranks in self.groups.items()}
        )


def judged(*scripts: Script) -> Verdict:
    return check_order([script.program for script in scripts])


def pair(**groups: tuple[int, ...]) -> tuple[Script, Script]:
    groups = groups or {"dispatch": LEFT, "shards": LEFT}
    return Script(0, **groups), Script(1, **groups)


def test_equal_programs_are_safe():
    a, b = pair()
    for script in (a, b):
        script("all-gather", "shards", open=True)("all-to-all", "dispatch", splits=((1, 1), (1, 1))).wait(0).sync()
    assert judged(a, b) == Verdict(HOST_ORDER, True)


def test_groups_in_swapped_order_need_streams():
    a, b = pair()
    a("all-gather", "shards", open=True)("all-gather", "dispatch", open=True).wait(0).wait(1)
    b("all-gather", "dispatch", open=True)("all-gather", "shards", open=True).wait(0).wait(1)
    verdict = judged(a, b)
    assert verdict.safe and verdict.text == STREAMS
    assert "rank 0" in verdict.details[0] and "made.py:1" in verdict.details[0] and "shards" in verdict.details[0]


def test_groups_in_swapped_order_that_wait_are_stuck():
    a, b = pair()
    a("all-gather", "shards")("all-gather", "dispatch")
    b("all-gather", "dispatch")("all-gather", "shards")
    verdict = judged(a, b)
    assert not verdict.safe and len(verdict.details) == 2 and "cycle" in verdict.text


def test_a_host_that_reads_a_number_orders_what_follows():
    a, b = pair()
    for script, communicators in (a, ("shards", "dispatch")), (b, ("dispatch", "shards")):
        script("all-gather", communicators[0], open=True).wait().sync()("all-gather", communicators[1], open=True)
    assert not judged(a, b).safe


def test_one_more_or_one_less():
    a, b = pair()
    a("all-reduce", "dispatch")("all-reduce", "dispatch")
    b("all-reduce", "dispatch")
    assert (
        "rank 0: operation 1 of dispatch" in judged(a, b).text
        and "rank 1 never issues operation 1" in judged(a, b).text
    )
    a, b = pair()
    a("all-reduce", "dispatch")
    assert "rank 1 never issues any operation of that group" in judged(a, b).text


def test_sizes_dtypes_and_kinds_agree():
    for wrong in ({"size": 32}, {"dtype": torch.bfloat16}, {"op": "all-gather"}):
        a, b = pair()
        a("all-reduce", "dispatch")
        b(**{"op": "all-reduce", "kind": "dispatch"} | wrong)
        verdict = judged(a, b)
        assert not verdict.safe and verdict.text.count("made.py:1") == 2


@pytest.mark.parametrize("op", ALL_TO_ALLS)
def test_split_sizes_agree(op: str):
    a, b = pair()
    a(op, "dispatch", splits=((2, 3), (2, 5)))
    b(op, "dispatch", splits=((5, 0), (4, 0)))
    assert "sends rank 1 3 rows" in judged(a, b).text and "expects 4" in judged(a, b).text


def test_rows_of_the_same_width_are_exchanged():
    a, b = pair()
    for script, row in (a, 32), (b, 4):
        script("all-to-all", "dispatch", row_bytes=row, splits=((2, 2), (2, 2)))
    verdict = judged(a, b)
    assert not verdict.safe and "in rows of 32" in verdict.text and "in rows of 4" in verdict.text


def test_every_message_is_waited_for():
    a, b = pair()
    for script in (a, b):
        script("all-gather", "shards")("all-reduce", "dispatch", open=script is b)
    verdict = judged(a, b)
    assert not verdict.safe and "rank 1" in verdict.text and "made.py:2, which is never waited for" in verdict.text


def test_all_ranks_make_the_same_groups():
    a, b = pair()
    programs = [
        replace(a.program, created_groups=[("dispatch", (LEFT,))]),
        replace(b.program, created_groups=[("dispatch", (ALL,))]),
    ]
    verdict = check_order(programs)
    assert (
        not verdict.safe
        and "rank 0 makes dispatch over ranks 0,1, and rank 1 dispatch over ranks 0,1,2,3" in verdict.text
    )


def test_ranks_that_were_not_rehearsed_are_not_waited_for():
    a, b = pair(rows=LEFT)
    for script in (a, b):
        script("all-reduce", "dispatch")
        script.groups = {"dispatch": ALL}
    programs = [
        replace(program, comms={"dispatch": Communicator("dispatch", ALL, LEFT)}) for program in (a.program, b.program)
    ]
    assert check_order(programs).text == HOST_ORDER
    b("all-reduce", "dispatch").sync()
    assert "rank 0 never issues operation 1" in check_order(programs).text


def test_ranks_that_stand_for_others_are_alike():
    groups = {"dispatch": (0, 2), "shards": (1, 3)}
    a, b = Script(0, **groups), Script(1, **groups)
    for script, kind in (a, "dispatch"), (b, "shards"):
        script("all-reduce", kind).sync()
    alone = {kind: Communicator("dispatch", ranks, ranks[:1]) for kind, ranks in groups.items()}
    programs = [replace(program, comms=alone) for program in (a.program, b.program)]
    assert check_order(programs, [tuple(programs)]).text == HOST_ORDER
    b.sync()
    text = check_order(programs, [tuple(programs)]).text
    assert "ranks 0 and 1 of a stage differ" in text and "--all-ranks" in text


def test_sends_meet_receives():
    def stages(first: int, second: int) -> Verdict:
        a, b = pair(stages=LEFT)
        for _ in range(first):
            a("send", "stages", peer=1)
        for _ in range(second):
            b("receive", "stages", peer=0)
        return judged(a, b)

    assert stages(2, 2).text == HOST_ORDER
    assert "rank 1 never issues its side" in stages(3, 2).text
    assert "rank 0 never issues its side" in stages(1, 2).text
    a, b = pair(stages=LEFT)
    a("send", "stages", peer=1)
    b("receive", "stages", size=8, peer=0)
    assert not judged(a, b).safe


def test_two_ranks_that_send_first_are_stuck_unless_batched():
    a, b = pair(stages=LEFT)
    for script, other in (a, 1), (b, 0):
        script("send", "stages", peer=other)("receive", "stages", peer=other)
    assert not judged(a, b).safe
    a, b = pair(stages=LEFT)
    for script, other in (a, 1), (b, 0):
        script("send", "stages", peer=other, batch=0, open=True)("receive", "stages", peer=other, batch=0, open=True)
        script.wait(0).wait(1)
    assert judged(a, b).text == HOST_ORDER


def test_a_reduction_between_another_groups_messages():
    """Rank 0 reduces over shards between the two all-to-alls of backward, rank 1 after them; both wait at once."""
    a, b = pair()
    splits = ((1, 1), (1, 1))
    a("all-to-all", "dispatch", splits=splits)("reduce-scatter", "shards")("all-to-all", "dispatch", splits=splits)
    b("all-to-all", "dispatch", splits=splits)("all-to-all", "dispatch", splits=splits)("reduce-scatter", "shards")
    verdict = judged(a, b)
    assert not verdict.safe and "reduce-scatter" in " ".join(verdict.details)


def test_a_cycle_of_four_is_reported_whole():
    groups = [(0, 1), (1, 2), (2, 3), (0, 3)]
    scripts = []
    for rank, order in enumerate(((3, 0), (0, 1), (1, 2), (2, 3))):
        script = Script(rank, **{f"g{i}": groups[i] for i in order})
        for i in order:
            script("all-reduce", f"g{i}")
        scripts.append(script)
    verdict = judged(*scripts)
    assert not verdict.safe and len(verdict.details) == 4
