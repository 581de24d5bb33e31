"""A run of 4 CPU ranks over all its starts: start it, watch it, strike it, and wait for its end.

The first process imports torch once; launchers and ranks are forks of it, which saves seconds. Elastic agent, store and
restarts are the real ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.torture import network
from titanmoe.checkpoint import layout
from titanmoe.train.runtime import PR_SET_PDEATHSIG

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS, INTERVAL, BATCH, TIMEOUT_S = 4, 24, 3, 4, 6
LIMIT_S = 240.0
"""Seconds that one attempt of a trial may take; after that it counts as failed."""
LAUNCHERS = ("torchrun", "titanmoe train")
TINY = {
    "model.family": "mixtral", "model.size": "debug", "model.vocab_size": 64, "model.dim": 16, "model.num_layers": 2,
    "model.num_heads": 2, "model.num_kv_heads": 2, "model.head_dim": 8, "model.num_experts": 4,
    "model.expert_hidden": 16, "training.mixed_precision_param": "float32", "training.seq_len": 16,
    "training.global_batch_size": BATCH, "training.steps": STEPS, "training.device": "cpu",
    "training.timeout_s": TIMEOUT_S, "moe.bias_update_rate": 0.01, "data.source": "synthetic", "job.name": "run",
    "checkpoint.enable": "true", "checkpoint.interval": INTERVAL, "checkpoint.keep_last": 3,
    "checkpoint.timeout_s": TIMEOUT_S, "metrics.tensorboard": "false", "metrics.console": "lines",
}  # fmt: skip
MAPPINGS: tuple[dict[str, int], ...] = (
    {"parallelism.experts.ep": 2},
    {"parallelism.tp": 2, "parallelism.experts.ep": 4},
    {"parallelism.cp": 2, "parallelism.experts.ep": 2},
    {"parallelism.pp": 2, "parallelism.experts.ep": 2},
    {"parallelism.dp_replicate": 4, "parallelism.experts.ep": 2},
)


class Wrong(Exception):
    """Error of a trial whose run did not do what it should: the trial has failed."""


class Missed(Exception):
    """Error of a trial whose fault did not strike: the run ended before, or had not yet saved what the fault needs."""


class Run:
    """A run of 4 ranks under a launcher; its mapping and the rank that a fault strikes are drawn from a seed.

    Args:
        folder: folder for the run's folder, its log and its marks; `close` removes it.
        seed: decides mapping, rank and all that `rng` draws later.
        launcher: one of LAUNCHERS.
    """

    def __init__(self, folder: Path, seed: int = 0, launcher: str = LAUNCHERS[0]):
        self.folder, self.rng, self.launcher = folder, random.Random(seed), launcher
        self.run_folder, self.log, self.struck_file = folder / "run", folder / "log", folder / "struck"
        self.checkpoints = self.run_folder / "checkpoints"
        self.mapping, self.rank = self.rng.randrange(len(MAPPINGS)), self.rng.randrange(RANKS)  # who is struck
        self.options: dict[str, Any] = TINY | MAPPINGS[self.mapping]
        self.degrees = ", ".join(f"{name.split('.')[-1]} {n}" for name, n in MAPPINGS[self.mapping].items())
        self.skips = 0  # the step whose update is not made
        self.network = ""  # by default the ranks share this machine's
        self.agent: Any = None
        self.helpers: list[Forked] = []
        self.pids: list[int] = []
        self.saved_step = self.last_step = self.starts = 0
        self.struck_at = 0.0
        self.figures: dict[str, float] = {}

    # ---- starting and watching

    def start(self, restarts: int = 0, *faults: dict[str, Any]) -> None:
        """Start the launcher in a forked process, for the first time or once more, and return.

        Args:
            restarts: how often the launcher may restart the ranks.
            faults: faults inside the ranks, as scripts/torture/faults/sitecustomize.py takes them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [f"--{name}={value}" for name, value in (self.options | {"job.dump_folder": self.folder}).items()]
        arguments = ["train", f"--ranks={RANKS}", f"--logs={self.folder}/logs", f"--max-restarts={restarts}"]
        if self.launcher == "torchrun":
            arguments = ["--standalone", f"--local-addr={network.AGENT if self.network else '127.0.0.1'}"]
            arguments += [f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}", "train.py"]
        self.agent = Forked.begin(launch, [*arguments, *words], self.log, faults, self.network)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in order; empty if the launcher has ended."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return [int(child) for child in children.read_text().split()] if children.exists() else []

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the complete lines of a JSONL file of the run's folder, as dicts; [] if there is no such file."""
        lines = []
        with contextlib.suppress(OSError):
            for line in (self.run_folder / name).read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # being written
                    lines.append(json.loads(line))
        return lines

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl with one of these kinds, as dicts."""
        return [event for event in self.lines("events.jsonl") if event["kind"] in kinds]

    def step(self) -> int:
        """Return the last step that metrics.jsonl has; 0 if it has none."""
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    def start_steps(self) -> list[int]:
        """Return for each start of the run, the earliest first, the number of steps that it had made before."""
        return [event["step"] for event in self.events("start", "restart")]

    def read_log(self) -> str:
        """Return what launcher and ranks have printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, condition: Callable[[], object], what: str, ended: type[Exception] | None = Missed) -> None:
        """Wait until a condition holds.

        Args:
            condition: returns whether it holds.
            what: description of the condition, for messages.
            ended: error to raise if the launcher ends first; None if it may end.

        Raises:
            Wrong: if the condition does not hold within LIMIT_S seconds.
        """
        end = time.monotonic() + LIMIT_S
        while not condition():
            if ended and not self.agent.is_alive() and not condition():
                raise ended(f"{what} did not happen, the run has ended: {self.read_log()[-500:]}")
            if time.monotonic() > end:
                raise Wrong(f"{what} did not happen within {LIMIT_S:.0f} s")
            time.sleep(0.02)

    def wait_for_random_step(self, first: int = INTERVAL + 1) -> None:
        """Wait until a random moment in a random step, `first` to STEPS - 2 * INTERVAL, and for a first checkpoint.

        A run that starts from scratch renames its event files, so faults come after the first checkpoint. Raises Missed
        if the run ends first, Wrong if it takes longer than LIMIT_S seconds.
        """
        step = self.rng.randint(first, STEPS - 2 * INTERVAL)
        self.wait(lambda: self.step() >= step and layout.read_latest(self.checkpoints), f"step {step}")
        time.sleep(self.rng.uniform(0, 0.1))

    # ---- striking

    def record_strike(self) -> None:
        """Record the moment of the fault in `struck_at`, `last_step`, `saved_step`, `starts` (how many) and `pids`."""
        self.struck_at, self.last_step, self.starts = time.monotonic(), self.step(), len(self.start_steps())
        self.saved_step, self.pids = max(layout.checkpoints_by_step(self.checkpoints), default=0), self.ranks()

    def signal_ranks(self, number: int, *ranks: int) -> None:
        """Record the moment of the fault and send these ranks the signal `number`; raise Missed if a rank has ended."""
        if len(pids := self.ranks()) < RANKS:
            raise Missed("the run is ending")
        self.record_strike()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has just ended: what follows will show it
                os.kill(pids[rank], number)

    def kill_launcher(self) -> None:
        """Kill the launcher, record the moment of the fault, and wait until the ranks have ended too."""
        pids = self.ranks()
        self.agent.kill()
        self.record_strike()
        self.agent.join()
        self.wait(lambda: not any(map(is_alive, pids)), "the ranks' end after their launcher's", None)

    def start_and_strike(self, restarts: int, **fault: Any) -> None:
        """Start the run with a fault, wait until the fault has struck once, and record the moment (`record_strike`).

        `fault` is one inside the ranks, as scripts/torture/faults/sitecustomize.py takes it, without "once". Raises
        Missed if the run ends before it strikes.
        """
        self.start(restarts, fault | {"once": str(self.struck_file)})
        self.wait(self.struck_file.exists, "the fault")
        self.record_strike()

    def wait_for_end(self) -> None:
        """Wait for the launcher to end, with any exit code; set `saved_step` to the step of the last checkpoint."""
        self.wait(lambda: not self.agent.is_alive(), "the end of the run that was struck", None)
        self.saved_step = max(layout.checkpoints_by_step(self.checkpoints), default=0)

    def expect_success(self) -> None:
        """Wait for the launcher to end; raise Wrong unless it ends within LIMIT_S seconds with exit code 0."""
        self.agent.join(LIMIT_S)
        if self.agent.exitcode != 0:
            raise Wrong(f"{self.launcher} ended with {self.agent.exitcode}: {self.read_log()[-500:]}")

    def close(self) -> None:
        """Kill all processes of the run and remove its folder; the text of its log is then in `output`."""
        for process in (*self.helpers, self.agent):
            if process is not None:
                process.kill()
                process.join()
        self.output = self.read_log()
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- processes


class Forked(multiprocessing.context.ForkProcess):
    """A forked process that also has the methods of subprocess.Popen that torchrun uses."""

    @staticmethod
    def begin(target: Callable[..., None], *args: object) -> Forked:
        process = Forked(target=target, args=args)
        process.start()
        return process

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode


def launch(argv: list[str], log: Path, faults: tuple[dict[str, Any], ...], spaces: str) -> None:
    """Become the launcher, torchrun or `titanmoe train`, in this forked process. Never returns.

    Args:
        argv: arguments of the launcher; those of `titanmoe train` begin with "train".
        log: file for the output of the launcher and its ranks.
        faults: faults inside the ranks, as scripts/torture/faults/sitecustomize.py takes them.
        spaces: prefix of the network namespaces; "" for this machine's network.
    """
    from torch.distributed.run import main as torchrun

    from titanmoe.cli import main as titanmoe

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and its ranks die with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A fork of pytest has streams and a fault handler that write elsewhere.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.disable()
    os.chdir(ROOT)
    os.environ |= {"PYTHONUNBUFFERED": "1", "FAULTS": json.dumps(faults)}
    if spaces:
        network.enter_namespace(spaces)
        os.environ |= {network.VARIABLE: spaces, "GLOO_SOCKET_IFNAME": network.DEVICE}
    fork_ranks()
    sys.exit((titanmoe if argv[0] == "train" else torchrun)(argv))


def fork_ranks() -> None:
    """Make the launcher in this process fork its ranks instead of starting new Python processes."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def forked(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Forked:
        return Forked.begin(run_rank, args, env, (self._stdout, self._stderr))

    SubprocessHandler._popen = forked


def run_rank(args: tuple[str, ...], env: dict[str, str], output: tuple[Any, Any]) -> None:
    """Run a rank in this forked process, as `python -u train.py ...` or `python -u -m titanmoe.rank ...` does.

    Args:
        args: the command.
        env: environment of the rank.
        output: files for stdout and stderr, or None for the launcher's.
    """
    os.setsid()
    for number, file in enumerate(output, 1):
        if file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's own would run here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    if network.VARIABLE in env:
        network.enter_namespace(env[network.VARIABLE], env["RANK"])
    if "FAULTS" in env:
        runpy.run_path(str(Path(__file__).parent / "faults/sitecustomize.py"))
    sys.path.insert(0, str(ROOT))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    what, *words = args[args.index("-u") + 1 :]
    if what == "-m":
        sys.argv = ["-m", *words[1:]]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *words]
        runpy.run_path(what, run_name="__main__")
