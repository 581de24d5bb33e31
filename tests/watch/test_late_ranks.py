"""Who is late, from what the heartbeats of all ranks show."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from titanmoe.watch.connections import Connections
from titanmoe.watch.flight_recorder import Collective, FlightRecord
from titanmoe.watch.heartbeat import Position
from titanmoe.watch.late_ranks import LateRanks, RankStatus, find_late_ranks
from titanmoe.watch.process_groups import AxisGroups

GROUPS = [
    AxisGroups("blocking", ((0, 1, 2, 3),), "world"),
    AxisGroups("blocking", ((0, 1), (2, 3)), "tp"),
    AxisGroups("dispatch", ((0, 1, 2, 3),), "ep"),
    AxisGroups("stages", ((0, 2), (1, 3)), "pp"),
]
WORLD, TP, EP, PP = range(4)
IN_MESSAGE = ["/v/site-packages/torch/distributed/c10d.py:1 in wait", "titanmoe/moe/layer.py:50 in forward"]


def seen(rank: int, ops: list[tuple[int, str]], state: str = "alive", differs: int = -1, **more: Any) -> RankStatus:
    """A rank that has issued these operations in step 7, and 10 in each group before."""
    numbers, last = {str(i): 10 for i in range(3)}, []
    for index, (group, op) in enumerate(ops):
        numbers[str(group)] = numbers.get(str(group), 0) + 1
        last.append(Collective(index, group, op, "Float", 16, numbers[str(group)]))
    one = RankStatus(
        rank, f"node{rank // 2}", 4000 + rank, state, 8.0, 7, "forward and backward", Position(0, 1, 3, True)
    )
    one.recorded = FlightRecord(len(ops), tuple(last), numbers, differs)
    one.stack = [
        "/v/site-packages/torch/x.py:1 in wait",
        f"titanmoe/moe/dispatchers/alltoall.py:{200 + rank} in combine",
    ]
    return replace(one, **more)


STEP = [(WORLD, "all_reduce"), (TP, "all_gather"), (EP, "all_to_all"), (EP, "all_to_all"), (WORLD, "all_reduce")]


def of(some: list[RankStatus], stage: int = 4) -> LateRanks:
    return find_late_ranks(some, GROUPS, stage)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("stopped", "stopped by a signal"),
        ("silent", "does not answer"),
        ("gone", "has exited"),
        ("unknown", "its machine does not answer"),
        ("ended", "has finished its run"),
    ],
)
def test_a_rank_that_does_not_answer(state: str, why: str) -> None:
    """The other ranks may be further along, and wait in different messages."""
    found = of([seen(0, STEP[:4]), seen(1, STEP[:3]), seen(2, STEP[:2], state, stack=[]), seen(3, STEP[:3])])
    first, second, *rest = found.text.splitlines()
    assert list(found.late) == [2]
    assert first == "hang: rank 2 on node1 is late, in step 7"
    assert second.startswith("  rank 2, process 4002 on node1: ") and why in second
    assert rest == [
        "    step 7, forward and backward: backward of layer 3, microbatch 1; no progress for 8 s",
        "    its last collective: all-gather over tp, number 11 there, message 2 of its step",
        "  the others wait:",
        "    rank 0: all-to-all over ep, number 12 at titanmoe/moe/dispatchers/alltoall.py:200 in combine, for 8 s",
        "    rank 1: all-to-all over ep, number 11 at titanmoe/moe/dispatchers/alltoall.py:201 in combine, for 8 s",
        "    rank 3: all-to-all over ep, number 11 at titanmoe/moe/dispatchers/alltoall.py:203 in combine, for 8 s",
    ]


def test_a_rank_that_others_wait_for_while_it_waits_for_nobody() -> None:
    late = seen(1, STEP[:1], phase="data", stack=["titanmoe/data/read_files.py:5 in fetch"])
    found = of([seen(0, STEP[:2]), late, seen(2, STEP[:3]), seen(3, STEP[:3])])
    assert list(found.late) == [1], "ranks 2 and 3 wait for rank 0 too, which waits for rank 1"
    assert "step 7, data; no progress for 8 s" in found.text
    assert "it is at titanmoe/data/read_files.py:5 in fetch" in found.text


def test_a_rank_that_skipped_a_message() -> None:
    """It waits too, for ranks that wait for it. It is named even if another has died because of it."""
    skipped = seen(2, [STEP[0], *STEP[2:4]])
    found = of([seen(0, STEP[:2], "gone"), seen(1, STEP[:2]), skipped, seen(3, STEP[:2])])
    assert list(found.late) == [2]
    assert "issued all-to-all over ep as message 2 of its step, where 3 other ranks issued all-gather over tp" in (
        found.text
    )


def test_a_stage_of_two_that_disagree() -> None:
    """The other stage decides. If that did something else, both are named."""
    skipped = seen(3, STEP[1:3])
    assert list(of([*(seen(rank, STEP[:1]) for rank in range(3)), skipped], stage=2).late) == [3]
    other = [(EP, "all_to_all")]
    assert {2, 3} <= of([seen(0, other), seen(1, other), seen(2, STEP[:1]), skipped], stage=2).late.keys()


def test_of_a_stage_of_two_the_one_that_does_not_repeat_its_last_step_is_late() -> None:
    first = [seen(rank, [(EP, "all_to_all")]) for rank in range(2)]
    for ops in (STEP[1:3], [(EP, "all_reduce"), STEP[1]]):
        found = of([*first, seen(2, STEP[:1]), seen(3, ops, differs=0)], stage=2)
        assert list(found.late) == [3]
        done = f"{ops[0][1].replace('_', '-')} over {GROUPS[ops[0][0]].axes}"
        assert f"issued {done} as message 1 of its step, not that of the step before" in found.text
    # The other has not come to that message, or both differ there: it does not decide.
    assert list(of([*first, seen(2, []), seen(3, STEP[1:3], differs=0)], stage=2).late) != [3]
    both = [seen(2, STEP[:1], differs=0), seen(3, STEP[1:3], differs=0)]
    assert {2, 3} <= of([*first, *both], stage=2).late.keys()


def test_ranks_of_other_stages_issue_other_messages() -> None:
    other = [(WORLD, "all_reduce"), (EP, "all_to_all")]
    found = of([seen(0, STEP[:3]), seen(1, STEP[:3]), seen(2, other, "stopped"), seen(3, other)], stage=2)
    assert list(found.late) == [2]


def test_a_rank_of_the_pipeline_that_has_not_sent() -> None:
    """Sends and receives are not recorded: its stack shows that it does not wait, while others wait for each other."""
    waits = ["/v/torch/distributed/pipelining/schedules.py:1 in _wait", "titanmoe/parallel/pipeline.py:9 in run"]
    some = [seen(rank, STEP[:1], stack=waits) for rank in range(4)]
    some[2].stack = ["mine.py:250 in deadlock", "titanmoe/moe/layer.py:50 in forward", *waits]
    assert list(of(some, stage=1).late) == [2]


def test_a_cycle_names_its_ranks() -> None:
    some = [seen(0, STEP[:1]), seen(1, [(TP, "all_gather")])]
    found = of(some, stage=1)
    assert found.late == {0: "waits for rank 1 in a circle", 1: "waits for rank 0 in a circle"}
    assert "waits for nobody" not in found.text


def test_a_disk_that_does_not_answer() -> None:
    """All the others have already written their part."""
    calls = "titanmoe/checkpoint/on_all_ranks.py:33 in on_all_ranks"
    waits = {"checkpoint": ["/v/torch/distributed/c10d.py:1 in wait", calls]}
    writing = "titanmoe/checkpoint/write_tensors.py:90 in write"
    checking = "titanmoe/checkpoint/layout.py:9 in check_files"
    for place, stack in (writing, [writing]), (checking, [checking, calls]):
        threads = {"checkpoint": stack}
        some = [seen(rank, STEP, phase="between steps", threads=threads if rank == 3 else waits) for rank in range(4)]
        found = of(some)
        assert list(found.late) == [3]
        assert f"its thread that saves is at {place}" in found.text


def test_a_rank_without_a_reply_is_named_only_if_no_other_is_late() -> None:
    """On a busy machine a reply may come too late: then nobody knows what that rank has issued."""
    late = seen(1, STEP[:1], stack=["mine.py:250 in deadlock"])
    silent = seen(3, [], stack=[], recorded=FlightRecord())
    assert list(of([seen(0, STEP[:2]), late, seen(2, STEP[:2]), silent]).late) == [1]
    assert list(of([seen(0, STEP[:2]), seen(1, STEP[:2]), seen(2, STEP[:2]), silent]).late) == [3]
    both = [seen(rank, STEP[:2]) for rank in (0, 2)]
    assert list(of([*both, seen(1, STEP[:1], "stopped"), replace(silent, state="silent")]).late) == [1]


def test_a_rank_that_others_wait_for_between_steps() -> None:
    """In messages that have no heartbeat; such a message may also be one of this file's."""
    for inner in ("/v/site-packages/torch/distributed/c10d.py:1 in wait", "titanmoe/comm/host_sync.py:1 in gather"):
        waits = ["/v/site-packages/torch/x.py:1 in f", inner, "titanmoe/checkpoint/on_all_ranks.py:31 in on_all_ranks"]
        ranks = [seen(rank, STEP, phase="between steps", stack=waits) for rank in range(4)]
        ranks[2].stack = ["/lib/python3.11/threading.py:5 in acquire", "mine.py:250 in deadlock", *waits]
        found = of(ranks)
        assert found.late == {2: ""} and "    it is at mine.py:250 in deadlock" in found.text
        assert "ranks 0-1, 3: between steps at titanmoe/checkpoint/on_all_ranks.py:31 in on_all_ranks" in found.text


def test_nobody_is_behind() -> None:
    found = of([seen(rank, STEP[:3]) for rank in range(4)])
    assert found.late == {}
    assert found.text.startswith("hang: ranks 0-3 wait for each other, and none is behind: check the network")


def test_a_barrier_too_many_between_two_steps() -> None:
    """The others' next message over the world is in the next step, and has the barrier's number."""
    barrier = seen(2, [*STEP, (WORLD, "barrier")], step=6, phase="between steps")
    barrier.recorded = replace_numbers(barrier.recorded, {"0": 11, "1": 10, "2": 10})
    found = of([barrier, *(seen(rank, STEP[:1], phase="data") for rank in (0, 1, 3))])
    assert list(found.late) == [2]
    assert "issued barrier over world as number 11 there, where 3 other ranks issued all-reduce over" in found.text


def test_who_is_alone_in_its_step_while_all_wait_for_each_other() -> None:
    """A barrier too many again, but the next step begins with messages of other groups: there the others wait for it,
    and it waits for them.
    """
    numbers = {"0": 13, "1": 11, "2": 12}
    waits = [(WORLD, "all_reduce"), (TP, "all_gather"), (EP, "all_to_all"), (EP, "all_to_all"), (WORLD, "all_reduce")]
    for rank in range(4):
        some = [seen(other, [(TP, "all_gather")], step=8, phase="data", stack=IN_MESSAGE) for other in range(4)]
        for one in some:
            one.recorded = replace_numbers(one.recorded, numbers | {"0": 12, "1": 12})
        some[rank] = seen(rank, [*waits, (WORLD, "barrier")], phase="between steps", stack=IN_MESSAGE)
        some[rank].recorded = replace_numbers(some[rank].recorded, numbers)
        others = "1-3", "0, 2-3", "0-1, 3", "0-2"
        assert of(some).late == {rank: f"in step 7, when ranks {others[rank]} are in step 8"}
    # The other way round, three wait at a barrier that one has left out.
    some = [seen(other, [*waits, (WORLD, "barrier")], stack=IN_MESSAGE) for other in range(4)]
    some[1] = seen(1, [(TP, "all_gather")], step=8, phase="data", stack=IN_MESSAGE)
    some[1].recorded = replace_numbers(some[1].recorded, numbers | {"0": 12, "1": 12})
    assert of(some).late == {1: "in step 8, when ranks 0, 2-3 are in step 7"}


def replace_numbers(recorded: FlightRecord, numbers: dict[str, int]) -> FlightRecord:
    """The same record, with these as the numbers of the latest messages of each group."""
    left, last = dict(numbers), []
    for message in reversed(recorded.last):
        last.insert(0, message._replace(number=left[str(message.group)]))
        left[str(message.group)] -= 1
    return recorded._replace(last=tuple(last), numbers=numbers)


def test_a_rank_that_does_not_finish_when_the_others_have() -> None:
    done = {"phase": "between steps", "stack": [], "state": "ended"}
    closes = {"phase": "between steps", "stack": ["/lib/python3.11/threading.py:9 in join", "mine.py:1 in f"]}
    found = of([seen(rank, STEP, **(closes if rank == 1 else done)) for rank in range(4)])
    assert found.late == {1: "has not finished, as ranks 0, 2-3 have"}
    assert found.text.endswith("\n  ranks 0, 2-3 have finished") and "the others wait" not in found.text
    waits = {"phase": "between steps", "stack": IN_MESSAGE}
    found = of([seen(rank, STEP, **(done if rank == 1 else waits)) for rank in range(4)])
    assert found.late == {1: "has finished its run"}


def address(rank: int) -> str:
    return f"10.0.0.{rank}"


def connected(unanswered: dict[int, list[int]], reached: dict[int, list[int]] | None = None) -> list[RankStatus]:
    """Ranks with a connection to each other one. All have issued the same messages."""
    some = [seen(rank, STEP[:3], stack=IN_MESSAGE) for rank in range(4)]
    for one in some:
        one.recorded = one.recorded._replace(unfinished={str(EP): 11} if one.rank in (1, 2) else {})
        peers = {name: [[address(one.rank), address(peer)] for peer in ranks] for name, ranks in {
            "pairs": [rank for rank in range(4) if rank != one.rank],
            "unanswered": unanswered.get(one.rank, []),
            "reached": (reached or {}).get(one.rank, []),
        }.items()}  # fmt: skip
        one.connections = Connections(**peers)
    return some


def test_a_link_is_the_suspect_if_all_its_connections_wait() -> None:
    found = of(connected({0: [1], 1: [2], 3: [1]}))
    assert found.text.startswith("hang: rank 1 on node0 cannot be reached, in step 7\n")
    assert found.late == {
        1: "what ranks 0, 2-3 and it send each other is not acknowledged: look at the network of 10.0.0.1"
    }
    # Of a single connection, the end that reaches others is not to blame.
    assert list(of(connected({0: [1]})).late) == [0, 1]
    assert list(of(connected({0: [1]}, {0: [2], 3: [0, 2]})).late) == [1]
    assert list(of(connected({0: [1]}, {0: [2], 3: [0, 1]})).late) == [0, 1]
    # A peer that is no rank, such as a server of data, does not count.
    elsewhere = connected({0: [9]})
    assert of(elsewhere).late == {}


def test_a_message_that_all_have_sent_waits_for_the_network() -> None:
    """Ranks 1 and 2 are the last of the chain, and nobody is behind."""
    some = connected({})
    for one in some:
        if one.rank in (0, 3):
            one.recorded = seen(one.rank, STEP[:4]).recorded
    found = of(some)
    assert found.late == {} and "check the network" in found.text
    assert "  number 11 over ep was sent by all of ranks 0-3 and has not reached ranks 1-2" in found.text
    some[1].stack = ["titanmoe/moe/layer.py:50 in forward"]
    assert list(of(some).late) == [1], "it is not in that message, which may complete without it"


def test_a_status_as_another_machine_reads_it() -> None:
    one = connected({0: [1]})[0]
    assert RankStatus.from_json(json.loads(json.dumps(one.as_json()))) == one
