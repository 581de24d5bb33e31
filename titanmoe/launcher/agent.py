"""Start ranks with torchrun's elastic agent, changed in three ways: logs, signals, and failures that are returned.

Each rank has a log file; the first signal lets the ranks save and end; failures are returned, not raised. Rendezvous,
restarts and the environment of the ranks are torch's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from titanmoe.launcher.failure_message import RankFailure, phases_of_late_ranks, ranks_ended_by_hang
from titanmoe.train import launch_messages

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECOND_SIGNAL_S = 0.5
"""A second signal counts only after this time: one Ctrl-C may arrive twice, from the terminal and from make."""
MONITOR_S = 0.1
AGENT = "agent.log"


class RankLogs(LogsSpecs):
    """The files that ranks write to. Only a machine's first rank prints to the terminal; errors go to files."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.folder, self.attempt = folder, 0
        self.environment: dict[str, str] = {}
        """Environment variables of the ranks, besides those of this process."""
        self.made: list[Path] = []
        """Folders that this launcher has made, the innermost first."""

    def make_folder(self) -> None:
        """Make the folder for the ranks' logs, with its parents; OSError if that fails."""
        self.made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.attempt += 1
        folder = self.folder / f"attempt{self.attempt}" if self.attempt > 1 else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        names = {local: str(folder / f"rank{env['RANK']}") for local, env in envs.items()}
        notes = {local: f"{name}.json" for local, name in names.items()}
        for local, env in envs.items():
            for place in launch_messages.note_paths(Path(notes[local])):
                place.unlink(missing_ok=True)  # an earlier attempt's, or an earlier start's with the same --logs
            env.update(self.environment)
            env[launch_messages.NOTE_FILE] = env["TORCHELASTIC_ERROR_FILE"] = notes[local]
        outputs = {local: f"{name}.out" if local else "" for local, name in names.items()}
        return LogsDest(outputs, {local: f"{name}.log" for local, name in names.items()}, {}, {}, notes)

    def tidy(self, refused: bool = False) -> None:
        """Remove empty logs and all advice files, then folders that are empty. Called after the ranks have ended.

        If the ranks `refused` the recipe, with a message that is printed in full, also remove the agent's log and the
        ranks' notes (JSON files on why they ended).
        """
        for file in self.folder.rglob("rank*"):
            if (
                file.stat().st_size == 0
                or file.suffix == launch_messages.ADVICE_SUFFIX
                or (refused and file.suffix == ".json")
            ):
                file.unlink()
        if refused:
            (self.folder / AGENT).unlink(missing_ok=True)
        for folder in (*self.folder.glob("attempt*"), *self.made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@dataclass
class LaunchResult:
    """Outcome of a launch."""

    signal: int = 0
    """The first signal that the launcher received; 0 if none."""
    killed: bool = False
    """Whether a second signal killed the ranks."""
    failures: list[RankFailure] = field(default_factory=list)
    """This machine's ranks that failed, in any order; empty if all ended with exit code 0 or before they started."""
    world: int = 1
    """Ranks of all nodes."""


class Agent(LocalElasticAgent):
    """torch's local agent, whose ranks get the first signal, may save and end; a second signal kills them."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs):
        super().__init__(spec, logs)
        self.signal, self.killed, self._signalled_at = 0, False, 0.0

    def handle_signals(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, self._on_signal)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        pids = super()._start_workers(worker_group)  # installs handlers of its own
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        self.handle_signals()
        return pids

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            if time.monotonic() - self._signalled_at > SECOND_SIGNAL_S:
                self.killed = True
                self._signal_ranks(signal.SIGKILL)
            return
        self.signal, self._signalled_at, self._remaining_restarts = number, time.monotonic(), 0
        if self._pcontext is None:  # still waiting for other nodes
            raise SignalException("before the ranks were started", signal.Signals(number))
        self._signal_ranks(signal.SIGTERM if number == signal.SIGHUP else number)

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to this machine's ranks, if any run.

        Processes that read data for a rank do not get it: a rank ends those itself.
        """
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def build_result(self, failed_processes: dict[int, Any]) -> LaunchResult:
        workers, notes = self._worker_group.workers, self._pcontext.error_files if self._pcontext else {}
        files = [Path(note) for note in notes.values()]
        phases, ended_by_hang = phases_of_late_ranks(files), ranks_ended_by_hang(files)
        failures = [
            RankFailure(
                rank=(rank := workers[process.local_rank].global_rank),
                exitcode=process.exitcode,
                timestamp=process.timestamp,
                log=Path(self._pcontext.stderrs[process.local_rank]),
                note_file=Path(notes[process.local_rank]),
                during=phases.get(rank, ""),
                ended_by_hang=rank in ended_by_hang,
            )
            for process in failed_processes.values()
        ]
        return LaunchResult(self.signal, self.killed, failures, workers[0].world_size if workers else 1)


def launch(options: Namespace, words: list[str], logs: RankLogs) -> LaunchResult:
    """Start this machine's ranks as torchrun would with these options, wait until they end, and return how they ended.

    Called on every node, in the main thread: handles signals, and redirects torch.distributed's log to `logs.folder`.

    Args:
        options: torchrun's options, as parsed by `torch.distributed.run.parse_args`.
        words: the arguments after `-m titanmoe.rank`: the recipe and its overrides.
        logs: the files that the ranks write to, in a folder that exists (`make_folder`).

    Raises:
        Exception: of torch's rendezvous, if the nodes do not meet.
    """
    _log_to_file(logs.folder)
    config, _, _ = config_from_args(options)
    agent = Agent(_spec(config, ("-u", "-m", "titanmoe.rank", *words)), logs)
    agent.handle_signals()
    handler = agent._worker_group.spec.rdzv_handler
    try:
        result = agent.run()
    except SignalException as error:
        return LaunchResult(int(error.sigval))
    finally:
        if not agent.signal:  # otherwise other nodes may go on without this one
            handler.shutdown()
    return agent.build_result(result.failures if result and result.is_failed() else {})


def _spec(config: LaunchConfig, words: tuple[str, ...]) -> WorkerSpec:
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master, _, port = config.rdzv_endpoint.rpartition(":") if config.rdzv_backend == "static" else ("", "", "")
    return WorkerSpec(
        role="titanmoe",
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=words,
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=MONITOR_S,
        master_addr=master or None,
        master_port=int(port) if port else None,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )


def _log_to_file(folder: Path) -> None:
    """Redirect the log of torch.distributed to the file AGENT in `folder`; the first line makes the file."""
    log = logging.getLogger("torch.distributed")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed."):
            inner = logging.getLogger(name)
            inner.handlers, inner.propagate = [], True
    log.handlers, log.propagate = [AgentLog(folder / AGENT, delay=True)], False


class AgentLog(logging.FileHandler):
    """The agent's log file. A line that cannot be written, as on a full disk, is dropped without a message."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # opening it
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass
