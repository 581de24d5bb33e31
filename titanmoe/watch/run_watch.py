"""The watch over a run: its heartbeat, what writes into it, and the watchdog thread."""

from __future__ import annotations

import json
import signal
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from titanmoe.config.schema import Checkpoint
from titanmoe.config.schema import Training as Options
from titanmoe.observe import Observer, listening
from titanmoe.ops import device
from titanmoe.train import launch_messages
from titanmoe.watch import flight_recorder, heartbeat
from titanmoe.watch.heartbeat import PHASE_NAMES, Heartbeat, Position
from titanmoe.watch.machines import Machines
from titanmoe.watch.number_checks import NumberChecks
from titanmoe.watch.process_groups import name_groups, own_groups
from titanmoe.watch.stacks import ROOT
from titanmoe.watch.step_times import HostMarks, StepTimes, StreamMarks
from titanmoe.watch.stragglers import Stragglers
from titanmoe.watch.watchdog import Limits, Watchdog, ignore

if TYPE_CHECKING:
    from titanmoe.train.training import Training

EARLY_S = 2.0
"""How long before the time-out of torch's messages the report comes, or a fifth of that time-out if that is less. Else
torch's own errors would come first."""
PATIENCE_S = 30.0
"""How long to wait for the report after an error which shows that another rank is gone."""
DUMPS = "flight_recorder"
"""A folder in the run folder."""


def limits(options: Options, checkpoint: Checkpoint, gpu: bool) -> Limits:
    between = checkpoint.timeout_s if checkpoint.enable else options.first_step_timeout_s
    return Limits(
        step=options.timeout_s - min(EARLY_S, options.timeout_s / 5),
        first=options.first_step_timeout_s - EARLY_S,
        between=between + options.timeout_s,
        thread=options.timeout_s,
        by_age=gpu,
    )


NAME_OF = {"data": "data", "forward_backward": "forward and backward", "optimizer": "norm and update"}


class HeartbeatListener(Observer):
    """Writes into the heartbeat where the step is."""

    def __init__(self, heart: Heartbeat):
        self.heart, self.position = heart, Position()

    def phase(self, name: str, step: int) -> None:
        numbers = self.heart.numbers
        numbers[heartbeat.STEP] = step
        if name == "data":
            numbers[heartbeat.FIRST_STEP] = numbers[heartbeat.FIRST_STEP] or step
            numbers[heartbeat.PREVIOUS_BEGUN], numbers[heartbeat.STEP_BEGUN] = (
                numbers[heartbeat.STEP_BEGUN],
                time.time_ns(),
            )
        self.heart.enter_phase(PHASE_NAMES.index(NAME_OF[name]) if name in NAME_OF else heartbeat.BETWEEN)

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        self.position = Position(stage, number, -1, backward)
        self.heart.enter(self.position)

    def layer(self, number: int) -> None:
        self.position = self.position._replace(layer=number)
        self.heart.enter(self.position)


class Watch:
    def __init__(self, options: Options, checkpoint: Checkpoint, training: Training):
        runtime, checks = training.runtime, training.guard.checks
        self.folder, self.rank = training.folder, runtime.rank
        self.machines = Machines.meet(runtime.rank, runtime.world)
        self.heart = self.machines.own_heart
        lanes, gpu = training.meshes.lanes, device.kind(training.device) == "cuda"
        groups, own = name_groups(lanes, training.fold), own_groups(lanes)
        self.observers: list[Observer] = [HeartbeatListener(self.heart)]
        if options.stragglers and isinstance(checks, NumberChecks):
            times = StepTimes([group.axes for group in groups], own, StreamMarks() if gpu else HostMarks())
            checks.stragglers = Stragglers(training, times, self.machines, groups)
            self.observers.append(times)
        self.watchdog = Watchdog(
            runtime.rank,
            self.machines,
            groups,
            training.fold.stage,
            limits(options, checkpoint, gpu),
            lambda: training.folder.path,
            self._dump if gpu else lambda: "",
            lambda: flight_recorder.read_recorder(own, *self.heart.step_times),
        )
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        for observer in self.observers:
            self._stack.enter_context(listening(observer))
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, ignore))
        before = signal.set_wakeup_fd(self.watchdog.waker, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        self.watchdog.start()
        self._stack.callback(self.watchdog.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and caused_by_others(error) and not self._explained():
            self.watchdog.error_stack = _stack(error)
            self.heart.numbers[heartbeat.ALARM] = 1
            self.watchdog.join(PATIENCE_S)  # it ends the process
        elif error is not None:
            self.heart.write_answer(json.dumps({"note": f"{kind.__name__}: {error}", "stack": _stack(error)}).encode())
        self.heart.numbers[heartbeat.STATE] = heartbeat.ENDED if error is None else heartbeat.FAILED
        self._stack.close()

    def _explained(self) -> bool:
        """Whether a rank of this machine has failed and has said why."""
        return any(heart.numbers[heartbeat.STATE] == heartbeat.FAILED for heart in self.machines.local.values())

    def _dump(self) -> str:
        if self.folder.path is None:
            return ""
        folder = Path(self.folder.path, DUMPS)
        if not flight_recorder.save(folder, self.rank):
            return ""
        return f"the messages it sent are in {folder}: torchfrtrace {folder} compares the ranks"


def caused_by_others(error: BaseException) -> bool:
    """Whether another rank is to blame, which is gone or does not answer. The system's own time-outs have an errno."""
    return launch_messages.caused_by_others(error) or (isinstance(error, TimeoutError) and error.errno is None)


def _stack(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename.removeprefix(ROOT)}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
