"""The watch over a run: this rank's heartbeat, the observers that write into it, and its watchdog thread.

`titanmoe.rank.watch` makes it, and it is entered around training.
"""

from __future__ import annotations

import json
import signal
import time
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
from titanmoe.watch.stacks import stack_of_error
from titanmoe.watch.step_times import CudaEventTimer, HostTimer, StepTimes
from titanmoe.watch.stragglers import Stragglers
from titanmoe.watch.watchdog import Limits, Watchdog, ignore

if TYPE_CHECKING:
    from titanmoe.train.training import Training

EARLY_S = 2.0
"""The seconds by which the report precedes the time-out of torch's collectives, whose errors say less. A fifth of that
time-out is used if it is shorter."""
PATIENCE_S = 30.0
"""The seconds to wait for the report after an error that another rank has caused."""
DUMPS = "flight_recorder"
"""The folder of flight recorders in the run folder."""


def limits(options: Options, checkpoint: Checkpoint, gpu: bool) -> Limits:
    """Return the watchdog's limits, from the time-outs of the config's tables [training] and [checkpoint].

    Those of steps are shorter than the time-outs by EARLY_S or less. That between steps is training.timeout_s plus
    checkpoint.timeout_s, or without checkpoints plus training.first_step_timeout_s. On a GPU the limit of a step holds
    whatever the host does.
    """
    between = checkpoint.timeout_s if checkpoint.enable else options.first_step_timeout_s
    return Limits(
        step=options.timeout_s - min(EARLY_S, options.timeout_s / 5),
        first=options.first_step_timeout_s - EARLY_S,
        between=between + options.timeout_s,
        thread=options.timeout_s,
        by_age=gpu,
    )


PHASE_NAME_OF = {"forward_backward": "forward and backward", "optimizer": "norm and update"}
"""The heartbeat's names of phases, by the observers' name, where they differ."""


class HeartbeatListener(Observer):
    """Observer that writes the step's phase, microbatch and layer into this rank's heartbeat."""

    def __init__(self, heart: Heartbeat):
        self.heart, self.position, self.has_computed = heart, Position(), False

    def phase(self, name: str, step: int) -> None:
        numbers = self.heart.numbers
        numbers[heartbeat.STEP] = step
        if name == "data":
            if not self.has_computed:
                numbers[heartbeat.FIRST_STEP] = step
            numbers[heartbeat.PREVIOUS_BEGUN] = numbers[heartbeat.STEP_BEGUN]
            numbers[heartbeat.STEP_BEGUN] = time.time_ns()
        self.has_computed |= name == "forward_backward"
        phase = PHASE_NAME_OF.get(name, name)
        self.heart.enter_phase(PHASE_NAMES.index(phase) if phase in PHASE_NAMES else heartbeat.BETWEEN)

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        self.position = Position(stage, number, -1, backward)
        self.heart.enter(self.position)

    def layer(self, number: int) -> None:
        self.position = self.position._replace(layer=number)
        self.heart.enter(self.position)


class Watch:
    """Context around a rank's training that keeps its heartbeat and runs its watchdog thread.

    If an error that another rank has caused leaves the context, the watchdog reports and ends the process.
    """

    def __init__(self, options: Options, checkpoint: Checkpoint, training: Training):
        """Create the heartbeat, the observers and the watchdog, which start with the context.

        With training.stragglers it sets `stragglers` of the NumberChecks in `training.guard.checks`. Collective over
        the world.

        Args:
            options: [training] of the config.
            checkpoint: [checkpoint] of the config.
            training: this rank's run.
        """
        runtime, checks = training.runtime, training.guard.checks
        self.folder, self.rank = training.folder, runtime.rank
        self.machines = Machines.meet(runtime.rank)
        self.heart = self.machines.own_heart
        communicators, gpu = training.meshes.communicators, device.kind(training.device) == "cuda"
        groups, local = name_groups(communicators, training.fold), own_groups(communicators)
        self.observers: list[Observer] = [HeartbeatListener(self.heart)]
        if options.stragglers and isinstance(checks, NumberChecks):
            times = StepTimes([group.axes for group in groups], local, CudaEventTimer() if gpu else HostTimer())
            checks.stragglers = Stragglers(training, times, self.machines, groups)
            self.observers.append(times)
        self.watchdog = Watchdog(
            runtime.rank,
            self.machines,
            groups=groups,
            stage=training.fold.stage,
            limits=limits(options, checkpoint, gpu),
            folder=lambda: training.folder.path,
            dump=self._dump if gpu else lambda: "",
            read_recorder=lambda: flight_recorder.read_recorder(local, *self.heart.step_times),
        )
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        for observer in self.observers:
            self._stack.enter_context(listening(observer))
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, ignore))
        before = signal.set_wakeup_fd(self.watchdog.wakeup_fd, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        self.watchdog.start()
        self._stack.callback(self.watchdog.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        local = self.machines.local.values()
        has_culprit = any(heart.numbers[heartbeat.STATE] == heartbeat.FAILED for heart in local)  # which reports itself
        if error is not None and caused_by_others(error) and not has_culprit:
            self.watchdog.error_stack = stack_of_error(error)
            self.heart.numbers[heartbeat.ALARM] = 1
            self.watchdog.join(PATIENCE_S)  # it ends the process
        elif error is not None:
            reply = {"note": f"{kind.__name__}: {error}", "stack": stack_of_error(error)}
            self.heart.write_reply(json.dumps(reply).encode())
        self.heart.numbers[heartbeat.STATE] = heartbeat.ENDED if error is None else heartbeat.FAILED
        self._stack.close()

    def _dump(self) -> str:
        """Save NCCL's flight recorder in the run folder; return a sentence that says where, or "" if unsaved."""
        if self.folder.path is None:
            return ""
        folder = Path(self.folder.path, DUMPS)
        if not flight_recorder.save(folder, self.rank):
            return ""
        return f"the messages it sent are in {folder}: torchfrtrace {folder} compares the ranks"


def caused_by_others(error: BaseException) -> bool:
    """Return whether an error shows that another rank is gone or does not answer, as a TimeoutError does.

    A TimeoutError with an errno comes from the operating system, such as from a disk, and shows nothing of the kind.
    """
    return launch_messages.caused_by_other_rank(error) or (isinstance(error, TimeoutError) and error.errno is None)
