"""The watchdogs of two machines with two ranks each, in this process; other processes die for them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from titanmoe.watch import heartbeat, watchdog
from titanmoe.watch import machines as machine_memory
from titanmoe.watch.flight_recorder import Collective, FlightRecord
from titanmoe.watch.heartbeat import Heartbeat, Position
from titanmoe.watch.machines import MachineMessages, Machines
from titanmoe.watch.process_groups import AxisGroups
from titanmoe.watch.watchdog import Limits, Watchdog

RANKS = [[0, 1], [2, 3]]
RECORDED = FlightRecord(1, (Collective(0, 0, "all_reduce", "Float", 2, 1),), {"0": 1})
GROUPS = [AxisGroups("blocking", ((0, 1, 2, 3),), "world")]
LIMITS = Limits(step=0.6, first=60, between=60, thread=60, by_age=False)


def test_a_heartbeat_is_read_by_others(tmp_path: Path) -> None:
    mine = Heartbeat(tmp_path / "0", create=True)
    other = Heartbeat(tmp_path / "0")
    (tmp_path / "0").unlink()
    assert not other.is_waiting and other.reply() == b"" and other.position == Position()
    for place in (Position(15, 70_000, 60, True), Position(0, 3, -1, False)):
        mine.enter(place)
        assert other.position == place
    mine.tick(waiting=True)
    assert other.is_waiting
    mine.tick(waiting=False)
    assert not other.is_waiting and abs(other.last_progress - time.monotonic()) < 5
    mine.enter_phase(heartbeat.BETWEEN)
    assert other.numbers[heartbeat.PHASE] == heartbeat.BETWEEN and other.position == Position()
    mine.write_reply(b"words")
    assert other.reply() == b"words"


def test_a_machine_is_known_by_a_file_and_nothing_else_is_left(tmp_path: Path) -> None:
    first, second = machine_memory._identity(tmp_path), machine_memory._identity(tmp_path)
    assert first == second and [path.name for path in tmp_path.iterdir()] == ["identity"]


def test_a_full_memory_disk_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        machine_memory._create_heartbeat(tmp_path, "token", 0)
    assert list(tmp_path.iterdir()) == []


class Watched:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        patch.setattr(watchdog, "TICK_S", 0.05)
        patch.setattr(watchdog, "SILENT_S", 1.0)
        patch.setattr(watchdog, "GATHER_S", 1.0)
        self.waiting = True
        patch.setattr(watchdog, "is_communicating", lambda stack: self.waiting)
        self.folder, store = folder, dist.HashStore()
        self.hearts = [Heartbeat(folder / str(rank), create=True) for rank in range(4)]
        self.bodies = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
        self.watchdogs = []
        for rank, heart in enumerate(self.hearts):
            heart.numbers[heartbeat.PID] = self.bodies[rank].pid
            heart.numbers[heartbeat.FIRST_STEP], heart.numbers[heartbeat.STEP] = 1, 3
            heart.numbers[heartbeat.PHASE] = heartbeat.PHASE_NAMES.index("forward and backward")
            number = rank // 2
            local = {r: Heartbeat(folder / str(r)) for r in RANKS[number]} | {rank: heart}
            machines = Machines(heart, local, number, RANKS, ["node0", "node1"], "token")
            end = lambda code, rank=rank: self.bodies[rank].kill()  # noqa: E731
            messages = MachineMessages(machines, store)
            self.watchdogs.append(
                Watchdog(
                    rank,
                    machines,
                    groups=GROUPS,
                    stage=4,
                    limits=LIMITS,
                    folder=lambda: folder,
                    messages=messages,
                    end=end,
                )
            )

    def send(self, *ranks: int) -> None:
        """They wait in a sum over the world."""
        for rank in ranks:
            self.hearts[rank].tick(waiting=True)
            self.watchdogs[rank].read_recorder = lambda: RECORDED

    def run(self, *ranks: int) -> None:
        for rank in ranks:
            self.watchdogs[rank].start()
        for rank in ranks:
            self.watchdogs[rank].join(30)
            assert not self.watchdogs[rank].is_alive()

    def event(self) -> dict:
        (line,) = (self.folder / "events.jsonl").read_text().splitlines()
        return json.loads(line)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    simulated = Watched(tmp_path, monkeypatch)
    yield simulated
    for body in simulated.bodies:
        body.kill()
        body.wait()


def test_one_report_names_a_rank_of_another_machine_and_all_end(
    machines: Watched, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[dict] = []
    monkeypatch.setattr(
        watchdog.launch_messages, "write_failure_note", lambda text, **more: notes.append({"text": text} | more)
    )
    machines.send(0, 1, 2)
    machines.hearts[3].numbers[heartbeat.TICK] = 0  # its thread does not run
    machines.run(0, 1, 2)
    assert [body.wait(5) for body in machines.bodies] == [-9] * 4, "its neighbour has killed it"
    report = capfd.readouterr().err
    assert report.startswith("error: hang: rank 3 on node1 is late, in step 3\n") and report.count("error:") == 1
    assert f"rank 3, process {machines.bodies[3].pid} on node1: does not answer: its process lives" in report
    assert "ranks 0-2: all-reduce over world, number 1" in report
    assert sorted(note.get("consequence", False) for note in notes) == [False, False, True]
    part = "step 3, forward and backward: forward, microbatch 0"
    reports = {tuple(note["following"]): note for note in notes if note.get("alike")}
    assert set(reports) == {(1,), (3,)}, "the launcher of each machine knows which of its ranks end only now"
    assert reports[1,]["during"] == {3: part} and reports[3,]["during"] == {"3": part}
    assert all(f"error: {note['text']}\n" == report for note in reports.values()), "both print the report last"
    event = machines.event()
    assert (event["kind"], event["step"], event["late"]) == ("hang", 3, [3])
    assert event["text"] == "hang: rank 3 on node1 is late, in step 3"
    assert event["report"] == report.removeprefix("error: ").splitlines()
    assert event["groups"] == [{"communicator": "blocking", "axes": "world", "ranks": [[0, 1, 2, 3]]}]
    first, *_, last = event["ranks"]
    assert FlightRecord.from_json(first["recorded"]) == RECORDED and last["recorded"]["numbers"] == {}
    assert last["state"] == "silent" and last["position"] == {
        "stage": 0, "microbatch": 0, "layer": -1, "backward": False
    }  # fmt: skip
    assert any("in main_stack" in line for line in first["stack"]) or first["stack"]


def test_a_machine_that_is_gone(machines: Watched, capfd: pytest.CaptureFixture) -> None:
    """What it last copied to the store is reported."""
    machines.send(0, 1)
    machines.hearts[3].numbers[heartbeat.STEP] = 2
    machines.watchdogs[2]._publish_heartbeats()
    machines.run(0, 1)
    report = capfd.readouterr().err
    assert "ranks 2-3 on" not in report
    assert report.startswith("error: hang: rank 2 on node1 is late (and rank 3), in step 3\n")
    assert report.count("its machine does not answer") == 2 and "step 2, forward and backward" in report


def test_a_run_without_trouble_is_left_alone(machines: Watched) -> None:
    machines.waiting = False
    dogs = machines.watchdogs
    for dog in dogs:
        dog.start()
    time.sleep(1.0)  # longer than a message may take
    assert all(dog.is_alive() for dog in dogs)
    for dog in dogs:
        dog.stop()
    assert not any(dog.is_alive() for dog in dogs) and all(body.poll() is None for body in machines.bodies)


def test_what_counts_as_trouble(machines: Watched) -> None:
    (dog, *_), (heart, other, *_) = machines.watchdogs, machines.hearts
    heart.tick(waiting=False), other.tick(waiting=False)
    assert not dog.sees_trouble()
    machines.send(1)
    machines.watchdogs[0].limits = Limits(step=0, first=60, between=60, thread=60, by_age=False)
    time.sleep(0.01)
    copy_of_heart = Heartbeat(machines.folder / "1")
    assert copy_of_heart.is_waiting and dog.sees_trouble()
    other.numbers[heartbeat.FIRST_STEP] = 3  # its first step, which may compile
    assert not dog.sees_trouble()
    other.numbers[heartbeat.FIRST_STEP] = 1
    other.numbers[heartbeat.STATE] = heartbeat.ENDED
    assert not dog.sees_trouble()
    other.numbers[heartbeat.STATE] = heartbeat.RUNNING
    other.tick(waiting=False)
    assert not dog.sees_trouble(), "it computes, as far as the host knows"
    dog.limits = Limits(step=0, first=60, between=60, thread=60, by_age=True)
    assert dog.sees_trouble(), "on a GPU the host may be far ahead"
    dog.limits = LIMITS
    machines.bodies[1].kill()
    machines.bodies[1].wait()
    assert dog.sees_trouble(), "it has exited"


def test_an_answer_has_the_step_of_its_messages(machines: Watched) -> None:
    """The rank may still go on."""
    heart, dog = machines.hearts[0], machines.watchdogs[0]
    heart.write_reply(json.dumps({"step": 3}).encode())
    heart.numbers[heartbeat.STEP] = 4
    assert dog.local_statuses()[0].step == 3
    assert dog.local_statuses()[1].step == 3 == machines.hearts[1].numbers[heartbeat.STEP], "it has not answered"


def test_every_rank_is_looked_after_by_another(tmp_path: Path) -> None:
    ranks = [4, 5, 6]
    hearts = {rank: Heartbeat(tmp_path / str(rank), create=True) for rank in ranks}
    dogs = {
        rank: Watchdog(
            rank,
            Machines(heart, hearts, 0, [ranks], ["node0"], "token"),
            groups=GROUPS,
            stage=3,
            limits=LIMITS,
            folder=lambda: None,
        )
        for rank, heart in hearts.items()
    }
    assert not any(dog.sees_trouble() for dog in dogs.values())
    for gone in ([4], [5], [6], [4, 5], [5, 6], [4, 6]):
        body = subprocess.Popen(["true"])
        body.wait()
        for rank in gone:
            hearts[rank].numbers[heartbeat.PID] = body.pid
        assert any(dogs[rank].sees_trouble() for rank in ranks if rank not in gone)
        for rank in gone:
            hearts[rank].numbers[heartbeat.PID] = os.getpid()


def test_sigterm_waits_for_the_report(monkeypatch: pytest.MonkeyPatch, machines: Watched) -> None:
    """torchrun sends it to all ranks as soon as one has exited."""
    ended = threading.Event()
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(**vars(watchdog.os) | {"_exit": lambda code: ended.set()}))
    monkeypatch.setattr(watchdog, "is_ended_by_watchdog", lambda number: True)
    dog = machines.watchdogs[0]
    dog.start()
    dog._wake.send(bytes([15]))
    assert ended.wait(5)
    dog.stop()
