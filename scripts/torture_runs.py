"""The runs of torture.py, and what it does to them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import layout
from titanmoe.train.runtime import PR_SET_PDEATHSIG

ROOT = Path(__file__).resolve().parent.parent
STEPS, INTERVAL, RANKS = 24, 3, 2
LAUNCHERS = ("torchrun", "titanmoe train")
LIMIT_S = 240.0
"""For one attempt of a trial; after that it counts as failed."""
TINY = {
    "model.family": "mixtral", "model.size": "debug", "model.vocab_size": 64, "model.dim": 16, "model.num_layers": 2,
    "model.num_heads": 2, "model.num_kv_heads": 2, "model.head_dim": 8, "model.num_experts": 4,
    "model.expert_hidden": 16, "training.mixed_precision_param": "float32", "training.seq_len": 16,
    "training.global_batch_size": 4, "training.steps": STEPS, "training.device": "cpu", "training.timeout_s": 60,
    "parallelism.experts.ep": 2, "moe.bias_update_rate": 0.01, "data.source": "synthetic", "job.name": "run",
    "checkpoint.enable": "true", "checkpoint.interval": INTERVAL, "checkpoint.keep_last": 3,
    "metrics.tensorboard": "false", "metrics.console": "lines",
}  # fmt: skip

PRELOADED = (
    "torch.distributed.run", "torch.distributed.fsdp", "titanmoe.checkpoint.folder", "titanmoe.cli",
    "titanmoe.train.trainer", "titanmoe.watch.numbers", "titanmoe.watch.watch",
)  # fmt: skip


class Wrong(Exception):
    """A trial did not end as it should."""


class Missed(Exception):
    """The run ended before the fault struck, or had not yet saved what the fault needs."""


def preload() -> None:
    """Before the first fork."""
    for name in PRELOADED:
        importlib.import_module(name)


def begin(launcher: str, argv: list[str], log: Path, faults: list[dict[str, Any]], forks: bool) -> None:
    """In a process of its own. launcher: one of LAUNCHERS."""
    if launcher == "torchrun":
        from torch.distributed.run import main
    else:
        from titanmoe.cli import main

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and its ranks die with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parent / "faults")}
    os.environ |= {"FAULTS": json.dumps(faults)} if faults else {}
    if forks:
        fork_ranks()
    sys.exit(main(argv))


def fork_ranks() -> None:
    """In a launcher: ranks that it starts from now on are forks of it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda self, args, env: Forked(args, env, (self._stdout, self._stderr))


class Forked:
    """As torchrun uses subprocess.Popen: a rank that is a fork of torchrun, which has imported torch. Four on two cores
    start in one second instead of ten.
    """

    def __init__(self, args: tuple[str, ...], env: dict[str, str], output: tuple[Any, Any]):
        """output: files for stdout and stderr, or None for torchrun's own."""
        self.args = args
        self.process = multiprocessing.get_context("fork").Process(target=become, args=(args, env, output))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def become(args: tuple[str, ...], env: dict[str, str], output: tuple[Any, Any]) -> None:
    """In the fork: what `python -u train.py ...` or `python -u -m titanmoe.rank ...` does."""
    os.setsid()
    for number, file in enumerate(output, 1):
        if file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's own would run here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
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


class Run:
    """A run in a folder, across all its starts."""

    forks = False
    """Whether ranks are forks of their launcher instead of new processes."""
    launcher = "torchrun"

    def __init__(self, folder: Path, seed: int = 0, options: dict[str, Any] = TINY, count: int = RANKS):
        self.folder, self.draw, self.options, self.count = folder, random.Random(seed), options, count
        self.run, self.log, self.struck_file = folder / "run", folder / "log", folder / "struck"
        self.checkpoints = self.run / "checkpoints"
        self.agent: Any = None
        self.committed = self.made = self.starts = 0
        self.struck_at = 0.0
        self.lost, self.again, self.seconds = 0, 0, 0.0

    # ---- starting and watching

    def start(self, restarts: int = 0, faults: tuple[dict[str, Any], ...] = ()) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [f"--{name}={value}" for name, value in (self.options | {"job.dump_folder": self.folder}).items()]
        if self.launcher == "torchrun":
            ranks = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={self.count}"]
            argv = [*ranks, f"--max-restarts={restarts}", "train.py", *words]
        else:
            ranks = [f"--ranks={self.count}", f"--logs={self.folder}/logs"]
            argv = ["train", *ranks, f"--max-restarts={restarts}", *words]
        context = multiprocessing.get_context("fork")
        self.agent = context.Process(target=begin, args=(self.launcher, argv, self.log, list(faults), self.forks))
        self.agent.start()

    def ranks(self) -> list[int]:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
            return [int(child) for child in children]
        return []

    def lines(self, name: str) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(OSError):
            for line in (self.run / name).read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # being written
                    found.append(json.loads(line))
        return found

    def step(self) -> int:
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    def begun(self) -> list[int]:
        """The step after which each start of the run began."""
        return [event["step"] for event in self.lines("events.jsonl") if event["kind"] in ("start", "restart")]

    def wait(self, condition: Callable[[], object], what: str, ended: type[Exception] | None = Missed) -> None:
        """ended: what to raise if torchrun ends first; None if it may."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            if ended and not self.agent.is_alive() and not condition():
                raise ended(f"{what} did not happen, the run has ended: {last_words(self.log)}")
            if time.monotonic() > end:
                raise Wrong(f"{what} did not happen within {LIMIT_S:.0f} s")
            time.sleep(0.02)

    def wait_for_a_moment(self, least: int = INTERVAL + 1) -> None:
        """A random moment in a random step after the first checkpoint."""
        step = self.draw.randint(least, STEPS - 2 * INTERVAL)
        self.wait(lambda: self.step() >= step and layout.latest(self.checkpoints), f"step {step}")
        time.sleep(self.draw.uniform(0, 0.1))

    # ---- causing failures

    def struck(self) -> None:
        """Record the state at the moment of the failure; what follows is compared with it."""
        self.struck_at, self.made, self.starts = time.monotonic(), self.step(), len(self.begun())
        self.committed = max(layout.steps(self.checkpoints), default=0)

    def kill_ranks(self, number: int) -> None:
        if len(ranks := self.ranks()) < self.count:
            raise Missed("the run is ending")
        for pid in self.draw.sample(ranks, number):
            with contextlib.suppress(ProcessLookupError):  # it has just ended: what follows will show it
                os.kill(pid, signal.SIGKILL)
        self.struck()

    def kill_launcher(self) -> None:
        ranks = self.ranks()
        self.agent.kill()
        self.struck()
        self.agent.join()
        self.wait(lambda: not any(map(alive, ranks)), "the ranks' end after their launcher's", None)

    def wait_for_strike(self) -> None:
        self.wait(self.struck_file.exists, "the fault")
        self.struck()

    def ended(self) -> None:
        """Wait for the run to end by itself after a failure, with no restarts left."""
        self.wait(lambda: not self.agent.is_alive(), "the end of the run that was struck", None)
        self.agent.join()
        self.committed = max(layout.steps(self.checkpoints), default=0)

    def goes_on(self) -> None:
        """Wait until the run has ended, and measure what the failure cost."""
        self.wait(lambda: len(self.begun()) > self.starts, "another start", Wrong)
        began = self.begun()[self.starts]
        self.wait(lambda: self.step() > began, "a step after the restart", Wrong)
        self.seconds = time.monotonic() - self.struck_at
        self.lost, self.again = max(0, self.committed - began), max(0, self.made - began)
        self.finish()

    def finish(self) -> None:
        self.agent.join(LIMIT_S)
        if self.agent.exitcode != 0:
            raise Wrong(f"torchrun ended with {self.agent.exitcode}: {last_words(self.log)}")

    def close(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            self.agent.join()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def last_words(log: Path) -> str:
    """What the run printed about its end: titanmoe's own line, if there is one."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    ours = [line for line in lines if line.startswith(("error:", "rank "))]
    theirs = [line for line in lines if "Error: " in line]
    return (ours or theirs or ["it reported no error"])[-1].strip()[:300]


# ---- of all scripts


@contextlib.contextmanager
def workplace(keep: str | None = None) -> Iterator[Path]:
    """keep: a folder whose undisturbed runs stay there."""
    folder = Path(keep or tempfile.mkdtemp(prefix="torture-")).absolute()
    try:
        yield folder
    finally:
        print(f"the runs' output: {folder}/*.log")
        for entry in folder.iterdir():
            if entry.is_dir() and not (keep and entry.name.startswith("calm")):
                shutil.rmtree(entry, ignore_errors=True)


def write(file: Path, name: str, text: str) -> None:
    """Between the page's marks of that name, if it has them; else as a file of its own."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    page = file.read_text(encoding="utf-8") if file.exists() else ""
    if begin in page:
        text = page.partition(begin)[0] + begin + "\n" + text + "\n" + end + page.partition(end)[2]
    file.write_text(text, encoding="utf-8")


# ---- kinds of trials


def one_rank(run: Run) -> None:
    run.start(restarts=3)
    run.wait_for_a_moment()
    run.kill_ranks(1)


def all_ranks(run: Run) -> None:
    run.start(restarts=3)
    run.wait_for_a_moment()
    run.kill_ranks(RANKS)


def launcher(run: Run) -> None:
    run.start()
    run.wait_for_a_moment()
    run.kill_launcher()
    run.start()


def saving(run: Run) -> None:
    step = INTERVAL * run.draw.randint(2, STEPS // INTERVAL - 1)
    fault = {"do": "kill", "path": layout.name_of(step) + layout.WRITING, "once": str(run.struck_file)}
    rank = run.draw.choice([0, 1])  # rank 0 does more with the disk
    run.start(restarts=3, faults=(fault | {"rank": rank, "at": run.draw.randint(1, 9 if rank == 0 else 3)},))
    run.wait_for_strike()


def renames(run: Run) -> None:
    """The checkpoint has its name, but `latest` does not point to it yet."""
    on = run.draw.choice(["write", "rename"])
    path = f"{layout.LATEST}.new" if on == "write" else f"/{layout.LATEST}"
    fault = {"do": "kill", "rank": 0, "on": [on], "path": path, "at": run.draw.randint(2, STEPS // INTERVAL - 1)}
    run.start(restarts=3, faults=(fault | {"once": str(run.struck_file)},))
    run.wait_for_strike()


def flipped_bit(run: Run) -> None:
    run.start()
    run.wait_for_a_moment(2 * INTERVAL + 1)
    run.kill_launcher()
    there = layout.steps(run.checkpoints)
    if len(there) < 2:  # a save is late: there would be no earlier one to go back to
        raise Missed(f"there are only {len(there)} checkpoints")
    newest = there.pop(max(there))
    run.committed = max(there)
    file = run.draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    data[run.draw.randrange(len(data))] ^= 1 << run.draw.randrange(8)
    file.write_bytes(data)
    run.start()


def full_disk(run: Run) -> None:
    """A file takes up all the space; later it is removed."""
    if tmpfs(run.folder):
        run.start()
        run.wait_for_a_moment()
        filler = run.folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(1 << 12))
        run.struck()
        run.ended()
        filler.unlink()
    else:  # mounting needs root; without it the disk only claims to be full
        fault = {"do": "fail", "errno": errno.ENOSPC, "on": ["write", "mkdir"], "path": str(run.checkpoints)}
        at = run.draw.randint(8, 24)
        run.start(faults=(fault | {"at": at, "times": 10**9, "once": str(run.struck_file)},))
        run.wait_for_strike()
        run.ended()
    run.start()


def tmpfs(folder: Path) -> bool:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def slow_disk(run: Run) -> None:
    """Every access takes up to half a second, and a rank is killed meanwhile."""
    fault = {"do": "slow", "seconds": run.draw.uniform(0.1, 0.5), "on": ["write", "rename", "fsync"], "times": 10**9}
    run.start(restarts=3, faults=(fault | {"path": str(run.checkpoints)},))
    run.wait_for_a_moment()
    run.kill_ranks(1)


def errors_while_reading(run: Run) -> None:
    """A file server that does not answer at first."""
    run.start()
    run.wait_for_a_moment()
    run.kill_launcher()
    fault = {"do": "fail", "errno": run.draw.choice([errno.ESTALE, errno.EIO]), "path": str(run.checkpoints)}
    fault |= {"on": ["read", "list"], "at": run.draw.randint(1, 6), "times": run.draw.randint(1, 4)}
    run.start(faults=(fault | {"rank": run.draw.choice([0, 1])},))


def errors_while_writing(run: Run) -> None:
    fault = {"do": "fail", "errno": run.draw.choice([errno.ESTALE, errno.EIO]), "path": str(run.checkpoints)}
    fault |= {"on": ["write", "mkdir", "rename", "fsync"], "at": run.draw.randint(20, 50)}
    run.start(restarts=3, faults=(fault | {"rank": 0, "once": str(run.struck_file)},))
    run.wait_for_strike()


def asked_to_stop(run: Run) -> None:
    run.start()
    run.wait_for_a_moment()
    run.agent.terminate()
    run.struck()
    run.ended()
    run.made = run.step()
    if run.made != run.committed:
        raise Wrong(f"asked to stop, it ended at step {run.made} with step {run.committed} saved")
    run.start()


KINDS: dict[str, Callable[[Run], None]] = {
    "one rank killed": one_rank,
    "all ranks killed": all_ranks,
    "torchrun killed": launcher,
    "a rank killed while saving": saving,
    "rank 0 killed between two renames": renames,
    "a bit flipped in the newest checkpoint": flipped_bit,
    "full disk": full_disk,
    "slow disk, one rank killed": slow_disk,
    "errors while reading": errors_while_reading,
    "errors while writing": errors_while_writing,
    "asked to stop (SIGTERM)": asked_to_stop,
}
