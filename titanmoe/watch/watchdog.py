"""A thread in every rank that notices when a rank is late, and ends the run with one report.

It reads the heartbeats of its machine. The first thread that sees something wrong raises an alarm. Then each rank that
still answers writes the stacks of its threads into its heartbeat, the first such rank of each machine publishes the
answers of its machine, and that of the first machine judges and reports. Stopped ranks are killed by others on their
machine, since SIGTERM would not reach them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from titanmoe.train import launch_messages
from titanmoe.train.report_targets import LineFile
from titanmoe.train.run_folder import EVENTS
from titanmoe.watch import heartbeat
from titanmoe.watch.connections import Connections, probed_connections
from titanmoe.watch.flight_recorder import FlightRecord
from titanmoe.watch.heartbeat import Heartbeat
from titanmoe.watch.late_ranks import LateRanks, RankStatus, judge
from titanmoe.watch.machines import MachineMessages, Machines
from titanmoe.watch.process_groups import LaneGroups
from titanmoe.watch.stacks import in_message, main_stack, other_stacks

TICK_S = 0.5
PUBLISH_S = 5.0
"""How often a machine's heartbeats are copied to the store."""
SILENT_S = 3.0
"""After the alarm, a rank whose watchdog has not run for this long counts as silent."""
ANSWER_S, GATHER_S = 2.0, 4.0
"""How long ranks have to answer, and machines to publish the answers."""
ENDING_S = 3.0
"""How long the other ranks have to end before they are killed and the report is printed."""
DISK_S = 2.0
"""How long to wait for a write to a disk, which may be what hangs the run."""


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a run is considered hung."""

    step: float
    first: float
    between: float
    """Between steps, where a checkpoint may be written."""
    thread: float
    """Without a tick of the watchdog thread."""
    by_age: bool
    """Whether a step is late even if it does not wait in a message: on a GPU the host does not know what it waits
    for."""


class Watchdog(threading.Thread):
    def __init__(
        self,
        rank: int,
        machines: Machines,
        groups: list[LaneGroups],
        stage: int,
        limits: Limits,
        folder: Callable[[], Path | None],
        dump: Callable[[], str] = lambda: "",
        read_recorder: Callable[[], FlightRecord] = FlightRecord,
        messages: MachineMessages | None = None,
        end: Callable[[int], Any] = os._exit,
    ):
        """folder: the run folder. dump: saves what the flight recorder has and returns where. read_recorder: reads it.
        end: ends the process.
        """
        super().__init__(name="titanmoe-watch", daemon=True)
        self.rank, self.machines, self.groups, self.stage, self.limits = rank, machines, groups, stage, limits
        self.folder, self.dump, self.read_recorder, self.end = folder, dump, read_recorder, end
        self.messages = messages or MachineMessages(machines)
        self.published_at = 0.0
        self._wakeups, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self.stopped = threading.Event()
        self.error_stack: list[str] = []
        """The stack of the error that showed that another rank is gone."""

    def run(self) -> None:
        sigterm_at = 0.0
        self.tick()
        while not self.stopped.is_set():
            if select.select([self._wakeups], [], [], TICK_S)[0] and signal.SIGTERM in self._wakeups.recv(64):
                sigterm_at = sigterm_at or time.monotonic()
            if self.stopped.is_set():
                return
            self.tick()
            with contextlib.suppress(RuntimeError, OSError):  # the store may be gone with its machine
                self._publish_heartbeats()
            if self.alarmed() or self.trouble():
                self.machines.own_heart.numbers[heartbeat.ALARM] = 1
                with contextlib.suppress(RuntimeError, OSError):
                    self.messages.post("alarm")
                return self._respond_and_end()
            # A launcher sends SIGTERM to all ranks when one has exited; a report about that one comes first.
            if sigterm_at and time.monotonic() - sigterm_at > 2 * TICK_S and ends_by(signal.SIGTERM):
                os._exit(128 + signal.SIGTERM)

    def tick(self) -> None:
        self.machines.own_heart.tick(in_message(main_stack()))

    def stop(self) -> None:
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self.join()

    @property
    def waker(self) -> int:
        """For signal.set_wakeup_fd: signals arrive here at once, whatever the main thread is waiting for."""
        return self._wake.fileno()

    # ---- is anything wrong?

    def alarmed(self) -> bool:
        if any(heart.numbers[heartbeat.ALARM] for heart in self.machines.local.values()):
            return True
        with contextlib.suppress(RuntimeError, OSError):
            return self.messages.store is not None and self.leads() and self.messages.is_posted("alarm")
        return False

    def trouble(self) -> bool:
        """Whether this rank makes no progress, or the next one of its machine does not, does not answer or has exited.
        So every rank is looked after by another; if several are in trouble, one of them by a rank that is not.
        """
        ranks = list(self.machines.local)
        following = self.machines.local[ranks[(ranks.index(self.rank) + 1) % len(ranks)]]
        return any(
            heart.numbers[heartbeat.STATE] == heartbeat.RUNNING
            and (
                seconds_since(heart.numbers[heartbeat.TICK]) > self.limits.thread
                or time.monotonic() - heart.last_progress > self._limit(heart)
                or has_exited(heart)
            )
            for heart in (self.machines.own_heart, following)
        )

    def _limit(self, heart: Heartbeat) -> float:
        phase, limits = heart.numbers[heartbeat.PHASE], self.limits
        if phase == heartbeat.STARTING:  # loading has no time limit
            return float("inf")
        if not (heart.is_waiting or (limits.by_age and phase != heartbeat.BETWEEN)):
            return limits.between
        return limits.first if heart.numbers[heartbeat.STEP] == heart.numbers[heartbeat.FIRST_STEP] else limits.step

    def leads(self) -> bool:
        """Whether this is the first rank of its machine whose watchdog runs."""
        return all(state(heart) != "answers" for rank, heart in self.machines.local.items() if rank < self.rank)

    def _publish_heartbeats(self) -> None:
        if self.messages.store is not None and time.monotonic() - self.published_at > PUBLISH_S and self.leads():
            self.published_at = time.monotonic()
            self.messages.publish("heartbeats", self.local_statuses())

    # ---- the report

    def _respond_and_end(self) -> None:
        try:
            self.respond()
        except Exception:  # nothing else would end this process
            traceback.print_exc()
            self.end(1)

    def respond(self) -> None:
        answer = {"stack": self.error_stack or main_stack(), "threads": other_stacks(), "note": ""}
        answer["step"] = self.machines.own_heart.numbers[
            heartbeat.STEP
        ]  # that of the messages, if the rank still goes on
        with contextlib.suppress(Exception):
            answer["recorded"] = self.read_recorder().as_json()
        with contextlib.suppress(Exception):
            answer["connections"] = vars(probed_connections())
        with contextlib.suppress(Exception):
            answer["note"] = self.dump()
        self.machines.own_heart.write_answer(json.dumps(answer).encode())
        local = self.machines.local.values()
        self._wait_until(lambda: all(heart.answer() or state(heart) != "answers" for heart in local), ANSWER_S)
        if self.leads():
            statuses = self.local_statuses()
            with contextlib.suppress(RuntimeError, OSError):
                self.messages.publish("answers", statuses)
            if self.machines.number == 0:
                return self.report(statuses)
            if self.machines.number == 1 and not self._wait_until(self._reported, ANSWER_S + GATHER_S + ENDING_S):
                return self.report(statuses)
        self._wait_until(self._reported, ANSWER_S + GATHER_S + 2 * ENDING_S)
        self.machines.own_heart.numbers[heartbeat.REPORTED] = 1
        self._run_briefly(self._note_report)
        if self.leads():
            self.end_others(wait=False)
        self.end(1)

    def _reported(self) -> bool:
        if any(heart.numbers[heartbeat.REPORTED] for heart in self.machines.local.values()):
            return True
        try:
            return self.messages.is_posted("report")
        except (RuntimeError, OSError):
            return False

    def _note_report(self) -> None:
        """The report of another machine, for the launcher of this one."""
        with contextlib.suppress(RuntimeError, OSError):
            if self.machines.number and self.messages.is_posted("report"):
                self._leave_note(self.messages.read("report"))
                return
        launch_messages.leave_note("another rank is late", consequence=True)

    def _leave_note(self, report: dict[str, Any]) -> None:
        """A late rank that is gone is the cause; one that is still there is ended, and the others follow."""
        late = set(map(int, report["during"]))
        local = {rank: heart for rank, heart in self.machines.local.items() if rank != self.rank}
        following = [rank for rank, heart in local.items() if rank not in late or not has_exited(heart)]
        launch_messages.leave_note(**report, alike=True, following=following)

    def report(self, statuses: list[RankStatus]) -> None:
        """Judge, report, and end the run. Called on the first machine, or the second if the first is gone."""
        all_statuses = statuses + self._statuses_elsewhere()
        verdict = judge(all_statuses, self.groups, self.stage)
        launcher_reports = bool(os.environ.get(launch_messages.NOTE_FILE))
        report = {"text": verdict.text, "during": verdict.during}
        self._run_briefly(lambda: self._leave_note(report))
        self._run_briefly(lambda: self._write(all_statuses, verdict))
        self.machines.own_heart.numbers[heartbeat.REPORTED] = 1
        with contextlib.suppress(RuntimeError, OSError):
            self.messages.post("report", report)
        self.end_others(wait=True)
        if not launcher_reports:
            os.write(2, f"error: {verdict.text}\n".encode())  # without the rank before each line
        self.end(1)

    def _statuses_elsewhere(self) -> list[RankStatus]:
        """What the other machines say about their ranks, or else what they last published."""
        by_machine = {}
        others = [host for host in range(len(self.machines.ranks)) if host != self.machines.number]

        def all_answered() -> bool:
            for host in others:
                if host not in by_machine and (answer := self.messages.read_published("answers", host)) is not None:
                    by_machine[host] = answer
            return len(by_machine) == len(others)

        with contextlib.suppress(RuntimeError, OSError):
            self._wait_until(all_answered, GATHER_S)
        for host in set(others) - by_machine.keys():
            last_heartbeats = None
            with contextlib.suppress(RuntimeError, OSError):
                last_heartbeats = self.messages.read_published("heartbeats", host)
            name = self.machines.names[host]
            by_machine[host] = last_heartbeats or [
                RankStatus(rank, name, 0, "", 0.0) for rank in self.machines.ranks[host]
            ]
            for status in by_machine[host]:
                status.state = "unknown"
        return [status for statuses in by_machine.values() for status in statuses]

    def _write(self, statuses: list[RankStatus], verdict: LateRanks) -> None:
        folder = self.folder()
        if folder is None:
            return
        ranks = [status.as_json() for status in sorted(statuses, key=lambda status: status.rank)]
        event = {
            "step": max(status.step for status in statuses),
            "kind": "hang",
            "text": verdict.text.partition("\n")[0],
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "late": sorted(verdict.late),
            "report": verdict.text.splitlines(),
            "groups": [asdict(group) for group in self.groups],
            "ranks": ranks,
        }
        with contextlib.suppress(OSError):  # the disk may be what hangs the run
            file = LineFile(folder / EVENTS)
            file.write(json.dumps(event))
            file.close()

    def end_others(self, wait: bool) -> None:
        """Kill the ranks of this machine that cannot end themselves. wait: kill the others too if they do not end."""
        others = [heart for rank, heart in self.machines.local.items() if rank != self.rank]
        for heart in others:
            if state(heart) in ("stopped", "silent"):
                kill(heart)
        if wait and not self._wait_until(lambda: all(map(has_exited, others)), ENDING_S):
            for heart in others:
                kill(heart)

    def _run_briefly(self, work: Callable[[], Any]) -> None:
        """Run work that writes to a disk, but do not wait for it for long."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._wait_until(lambda: not thread.is_alive(), DISK_S)

    def local_statuses(self) -> list[RankStatus]:
        """The ranks of this machine."""
        return [self._status(rank, heart) for rank, heart in self.machines.local.items()]

    def _status(self, rank: int, heart: Heartbeat) -> RankStatus:
        numbers = heart.numbers
        idle = time.monotonic() - heart.last_progress
        status = RankStatus(
            rank, self.machines.names[self.machines.number], numbers[heartbeat.PID], state(heart), round(idle, 1)
        )
        status.step, status.phase, status.position = (
            numbers[heartbeat.STEP],
            heartbeat.PHASE_NAMES[numbers[heartbeat.PHASE]],
            heart.position,
        )
        with contextlib.suppress(ValueError):
            answer = json.loads(heart.answer() or b"{}")
            status.stack, status.threads = answer.get("stack", []), answer.get("threads", {})
            status.note, status.step = answer.get("note", ""), answer.get("step", status.step)
            if "recorded" in answer:
                status.recorded = FlightRecord.from_json(answer["recorded"])
            status.connections = Connections(**answer.get("connections", {}))
        return status

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.tick()
            time.sleep(0.05)
        return True


def ignore(number: int, frame: Any) -> None:
    """The handler of SIGTERM, if there is no other: the watchdog ends the process, and may report first."""


def ends_by(number: int) -> bool:
    return signal.getsignal(number) is ignore


def seconds_since(nanoseconds: int) -> float:
    return time.monotonic() - nanoseconds / 1e9


def _kernel_state(pid: int) -> str:
    """One letter; "" if the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def has_exited(heart: Heartbeat) -> bool:
    pid = heart.numbers[heartbeat.PID]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return (
        seconds_since(heart.numbers[heartbeat.TICK]) > 2 * TICK_S and _kernel_state(pid) == "Z"
    )  # such a process does not tick


def state(heart: Heartbeat) -> str:
    """As in `RankStatus`."""
    if heart.numbers[heartbeat.STATE] != heartbeat.RUNNING:
        return "ended" if heart.numbers[heartbeat.STATE] == heartbeat.ENDED else "failed"
    if has_exited(heart):
        return "gone"
    if _kernel_state(heart.numbers[heartbeat.PID]) in ("T", "t"):
        return "stopped"
    return "answers" if seconds_since(heart.numbers[heartbeat.TICK]) < SILENT_S else "silent"


def kill(heart: Heartbeat) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(heart.numbers[heartbeat.PID], signal.SIGKILL)
