"""A thread in every rank that notices when a rank is late, and ends the run with one report.

It reads the heartbeats of its machine. The first watchdog that sees something wrong raises an alarm. Then each live
rank writes a reply with the stacks of its threads into its heartbeat. The leader of each machine, its first live rank,
publishes the replies of its machine; the leader of the first machine finds the late ranks and reports. Stopped ranks
are killed by others on their machine, because SIGTERM would not reach them.
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
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from titanmoe.train import launch_messages
from titanmoe.train.report_targets import LineFile
from titanmoe.train.run_folder import EVENTS
from titanmoe.watch import heartbeat
from titanmoe.watch.connections import Connections, probe_connections
from titanmoe.watch.flight_recorder import FlightRecord
from titanmoe.watch.heartbeat import Heartbeat
from titanmoe.watch.late_ranks import LateRanks, RankStatus, find_late_ranks
from titanmoe.watch.machines import MachineMessages, Machines
from titanmoe.watch.process_groups import AxisGroups
from titanmoe.watch.stacks import is_communicating, main_stack, other_stacks

TICK_S = 0.5
"""The seconds between two looks at the heartbeats."""
PUBLISH_S = 5.0
"""The seconds between two copies of a machine's heartbeats to the store."""
SILENT_S = 3.0
"""The seconds without a tick of its watchdog after which a rank counts as silent, once there is an alarm."""
REPLY_S, GATHER_S = 2.0, 4.0
"""The seconds that ranks have to reply to an alarm, and machines to publish the replies."""
ENDING_S = 3.0
"""The seconds that the other ranks have to end before they are killed and the report is printed."""
DISK_S = 2.0
"""The seconds to wait for a write to a disk, which may be what hangs the run."""


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a run is considered hung."""

    step: float
    """The limit within a step."""
    first: float
    """The limit within the first step."""
    between: float
    """The limit between steps, where a checkpoint may be written."""
    thread: float
    """The limit without a tick of the watchdog thread."""
    by_age: bool
    """Whether the limit of a step holds even if the host does not wait in a communication: on a GPU the host does not
    know what it waits for."""


class Watchdog(threading.Thread):
    """The watchdog thread of a rank, which ends the process with a report if a rank is late."""

    def __init__(
        self,
        rank: int,
        machines: Machines,
        *,
        groups: list[AxisGroups],
        stage: int,
        limits: Limits,
        folder: Callable[[], Path | None],
        dump: Callable[[], str] = lambda: "",
        read_recorder: Callable[[], FlightRecord] = FlightRecord,
        messages: MachineMessages | None = None,
        end: Callable[[int], Any] = os._exit,
    ):
        """Prepare the thread; `start` starts it.

        Args:
            rank: This rank.
            machines: The machines of the training job.
            groups: The process groups, as `name_groups` numbers them.
            stage: The number of ranks in a pipeline stage.
            limits: The seconds without progress after which the training job is considered hung.
            folder: Returns the run folder, or None if there is none.
            dump: Saves the flight recorder and returns a sentence that says where.
            read_recorder: Returns the collectives of the current step.
            messages: Messages to other machines; tests bring their own.
            end: Ends the process with an exit code.
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
        """The stack of the error that another rank has caused; empty if there is none."""

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
            if self.is_alarmed() or self.sees_trouble():
                self.machines.own_heart.numbers[heartbeat.ALARM] = 1
                with contextlib.suppress(RuntimeError, OSError):
                    self.messages.post("alarm")
                try:
                    return self.respond()
                except Exception:  # nothing else would end this process
                    traceback.print_exc()
                    return self.end(1)
            # A launcher sends SIGTERM to all ranks when one has exited; a report about that one comes first.
            if sigterm_at and time.monotonic() - sigterm_at > 2 * TICK_S and is_ended_by_watchdog(signal.SIGTERM):
                os._exit(128 + signal.SIGTERM)

    def tick(self) -> None:
        """Store in the heartbeat that this thread runs, and whether the main thread waits in a communication."""
        self.machines.own_heart.tick(is_communicating(main_stack()))

    def stop(self) -> None:
        """End the thread and wait for it."""
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self.join()

    @property
    def wakeup_fd(self) -> int:
        """The file descriptor for signal.set_wakeup_fd, which wakes this thread even if the main thread waits."""
        return self._wake.fileno()

    # ---- is anything wrong?

    def is_alarmed(self) -> bool:
        """Return whether any rank of this machine raised an alarm; its leader also sees those of other machines."""
        if any(heart.numbers[heartbeat.ALARM] for heart in self.machines.local.values()):
            return True
        with contextlib.suppress(RuntimeError, OSError):
            return self.messages.store is not None and self.is_leader() and self.messages.is_posted("alarm")
        return False

    def sees_trouble(self) -> bool:
        """Return whether this rank or the next rank of its machine makes no progress, is silent or has exited.

        So every rank is watched by another. If several are in trouble, one of them is watched by a rank that is not.
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
        """Return the seconds that the rank of `heart` may be without progress in its current phase.

        Infinite while it starts. Otherwise `limits.between`, unless the rank waits in a communication or, with
        `limits.by_age`, is within a step; then `limits.first` in the first step of this start and `limits.step` later.
        """
        phase, limits = heart.numbers[heartbeat.PHASE], self.limits
        if phase == heartbeat.STARTING:  # loading has no time limit
            return float("inf")
        if not (heart.is_waiting or (limits.by_age and phase != heartbeat.BETWEEN)):
            return limits.between
        return limits.first if heart.numbers[heartbeat.STEP] == heart.numbers[heartbeat.FIRST_STEP] else limits.step

    def is_leader(self) -> bool:
        """Return whether this is the machine's first rank with a running watchdog, which publishes for it."""
        return all(rank_state(heart) != "alive" for rank, heart in self.machines.local.items() if rank < self.rank)

    def _publish_heartbeats(self) -> None:
        if self.messages.store is not None and time.monotonic() - self.published_at > PUBLISH_S and self.is_leader():
            self.published_at = time.monotonic()
            self.messages.publish("heartbeats", self.local_statuses())

    # ---- the report

    def respond(self) -> None:
        """Reply to the alarm, report the hang if it is this rank's task, and end the process with exit code 1."""
        step = self.machines.own_heart.numbers[heartbeat.STEP]  # that of the messages, if the rank still goes on
        reply = {"stack": self.error_stack or main_stack(), "threads": other_stacks(), "note": "", "step": step}
        with contextlib.suppress(Exception):
            reply["recorded"] = self.read_recorder()._asdict()
        with contextlib.suppress(Exception):
            reply["connections"] = vars(probe_connections())
        with contextlib.suppress(Exception):
            reply["note"] = self.dump()
        self.machines.own_heart.write_reply(json.dumps(reply).encode())
        local = self.machines.local.values()
        self._wait_until(lambda: all(heart.reply() or rank_state(heart) != "alive" for heart in local), REPLY_S)
        if self.is_leader():
            statuses = self.local_statuses()
            with contextlib.suppress(RuntimeError, OSError):
                self.messages.publish("replies", statuses)
            if self.machines.number == 0:
                return self.report(statuses)
            if self.machines.number == 1 and not self._wait_until(self._reported, REPLY_S + GATHER_S + ENDING_S):
                return self.report(statuses)
        self._wait_until(self._reported, REPLY_S + GATHER_S + 2 * ENDING_S)
        self.machines.own_heart.numbers[heartbeat.REPORTED] = 1
        self._run_briefly(self._note_report)
        if self.is_leader():
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
        """Write a failure note for the launcher: the report that another machine posted, or "another rank is late"."""
        with contextlib.suppress(RuntimeError, OSError):
            if self.machines.number and self.messages.is_posted("report"):
                self._leave_note(self.messages.read("report"))
                return
        launch_messages.write_failure_note("another rank is late", consequence=True)

    def _leave_note(self, report: dict[str, Any]) -> None:
        """Write a report on late ranks as a failure note for this machine's launcher.

        The note lists the ranks of this machine that watchdogs end, except late ranks that are already gone: these are
        the cause.
        """
        late = set(map(int, report["during"]))
        local = {rank: heart for rank, heart in self.machines.local.items() if rank != self.rank}
        following = [rank for rank, heart in local.items() if rank not in late or not has_exited(heart)]
        launch_messages.write_failure_note(**report, alike=True, following=following)

    def report(self, statuses: list[RankStatus]) -> None:
        """Find the late ranks, report them, and end this machine's processes, this one with exit code 1.

        Called by the leader of the first machine, or of the second if the first is gone, with the statuses of its
        machine. It gathers those of the others.
        """
        all_statuses = statuses + self._statuses_of_other_machines()
        verdict = find_late_ranks(all_statuses, self.groups, self.stage)
        report = {"text": verdict.text, "during": verdict.during}
        self._run_briefly(lambda: self._leave_note(report))
        self._run_briefly(lambda: self._write(all_statuses, verdict))
        self.machines.own_heart.numbers[heartbeat.REPORTED] = 1
        with contextlib.suppress(RuntimeError, OSError):
            self.messages.post("report", report)
        self.end_others(wait=True)
        if not os.environ.get(launch_messages.NOTE_FILE):  # otherwise the launcher prints it
            os.write(2, f"error: {verdict.text}\n".encode())  # without the rank before each line
        self.end(1)

    def _statuses_of_other_machines(self) -> list[RankStatus]:
        """Return the statuses of the other machines' ranks, from their replies to the alarm.

        It waits at most `GATHER_S`. A machine that does not reply in time is represented by its last published
        heartbeats, in the state "unknown".
        """
        by_machine: dict[int, list[RankStatus]] = {}
        others = [host for host in range(len(self.machines.ranks)) if host != self.machines.number]

        def all_replied() -> bool:
            for host in others:
                if host not in by_machine and (reply := self.messages.read_published("replies", host)) is not None:
                    by_machine[host] = reply
            return len(by_machine) == len(others)

        with contextlib.suppress(RuntimeError, OSError):
            self._wait_until(all_replied, GATHER_S)
        for host in set(others) - by_machine.keys():
            name = self.machines.names[host]
            statuses = [RankStatus(rank, name, 0, "", 0.0) for rank in self.machines.ranks[host]]
            with contextlib.suppress(RuntimeError, OSError):
                statuses = self.messages.read_published("heartbeats", host) or statuses
            by_machine[host] = [replace(status, state="unknown") for status in statuses]
        return [status for statuses in by_machine.values() for status in statuses]

    def _write(self, statuses: list[RankStatus], verdict: LateRanks) -> None:
        """Append an event with the report and all statuses to the run folder's file of events, if there is a folder."""
        folder = self.folder()
        if folder is None:
            return
        event = {
            "step": max(status.step for status in statuses),
            "kind": "hang",
            "text": verdict.text.partition("\n")[0],
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "late": sorted(verdict.late),
            "report": verdict.text.splitlines(),
            "groups": [asdict(group) for group in self.groups],
            "ranks": [status.as_json() for status in sorted(statuses, key=lambda status: status.rank)],
        }
        with contextlib.suppress(OSError):  # the disk may be what hangs the run
            file = LineFile(folder / EVENTS)
            file.write(json.dumps(event))
            file.close()

    def end_others(self, wait: bool) -> None:
        """Kill the other ranks of this machine that cannot end themselves, because they are stopped or silent.

        With `wait`, wait `ENDING_S` for the others, and kill those that have not ended by then.
        """
        others = [heart for rank, heart in self.machines.local.items() if rank != self.rank]
        for heart in others:
            if rank_state(heart) in ("stopped", "silent"):
                kill(heart)
        if wait and not self._wait_until(lambda: all(map(has_exited, others)), ENDING_S):
            for heart in others:
                kill(heart)

    def _run_briefly(self, work: Callable[[], Any]) -> None:
        """Run `work`, which writes to a disk, in a thread of its own, and wait for it for at most `DISK_S`."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._wait_until(lambda: not thread.is_alive(), DISK_S)

    def local_statuses(self) -> list[RankStatus]:
        """Return the status of each rank of this machine."""
        return [self._status(rank, heart) for rank, heart in self.machines.local.items()]

    def _status(self, rank: int, heart: Heartbeat) -> RankStatus:
        numbers = heart.numbers
        status = RankStatus(
            rank,
            self.machines.names[self.machines.number],
            pid=numbers[heartbeat.PID],
            state=rank_state(heart),
            silent_s=round(time.monotonic() - heart.last_progress, 1),
            step=numbers[heartbeat.STEP],
            phase=heartbeat.PHASE_NAMES[numbers[heartbeat.PHASE]],
            position=heart.position,
        )
        with contextlib.suppress(ValueError):
            reply = json.loads(heart.reply() or b"{}")
            status.stack, status.threads = reply.get("stack", []), reply.get("threads", {})
            status.note, status.step = reply.get("note", ""), reply.get("step", status.step)
            if "recorded" in reply:
                status.recorded = FlightRecord.from_json(reply["recorded"])
            status.connections = Connections(**reply.get("connections", {}))
        return status

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, for at most `seconds`, and tick meanwhile; return whether it does."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.tick()
            time.sleep(0.05)
        return True


def ignore(number: int, frame: Any) -> None:
    """Do nothing: a handler of SIGTERM, so that the watchdog can report before it ends the process."""


def is_ended_by_watchdog(number: int) -> bool:
    """Return whether the handler of signal `number` is `ignore`, which leaves it to the watchdog to end the process."""
    return signal.getsignal(number) is ignore


def seconds_since(nanoseconds: int) -> float:
    """Return the seconds since a time of `time.monotonic_ns`."""
    return time.monotonic() - nanoseconds / 1e9


def _kernel_state(pid: int) -> str:
    """Return the letter of a process's state, such as T for stopped; "" if the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def has_exited(heart: Heartbeat) -> bool:
    """Return whether the process of a heartbeat's rank is gone or a zombie."""
    pid = heart.numbers[heartbeat.PID]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # A zombie does not tick, so /proc is read only for a rank that does not.
    return seconds_since(heart.numbers[heartbeat.TICK]) > 2 * TICK_S and _kernel_state(pid) == "Z"


def rank_state(heart: Heartbeat) -> str:
    """Return the state of a rank of this machine: "alive", "stopped", "silent", "gone", "failed" or "ended".

    "stopped" is by a signal. "silent" is a live process that has neither ticked for 3 s nor replied to an alarm, so a
    rank that has replied stays "alive". "gone" is a process that has exited without storing that it failed or ended.
    """
    if heart.numbers[heartbeat.STATE] != heartbeat.RUNNING:
        return "ended" if heart.numbers[heartbeat.STATE] == heartbeat.ENDED else "failed"
    if has_exited(heart):
        return "gone"
    if _kernel_state(heart.numbers[heartbeat.PID]) in ("T", "t"):
        return "stopped"
    return "alive" if heart.reply() or seconds_since(heart.numbers[heartbeat.TICK]) < SILENT_S else "silent"


def kill(heart: Heartbeat) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(heart.numbers[heartbeat.PID], signal.SIGKILL)
