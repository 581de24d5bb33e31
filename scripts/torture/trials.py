"""The kinds of trials: which fault strikes a run, and how the result is judged.

Each fault function starts the run and strikes it at a moment that the run's seed decides; it raises Missed if the run
ends before. Where the run must go on and the launcher does not restart the ranks, it starts the run again, without
waiting for its end. The checks that follow are those of its group.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.torture import judge
from scripts.torture.network import delay_packets, network, set_link
from scripts.torture.runs import BATCH, INTERVAL, LAUNCHERS, RANKS, STEPS, TIMEOUT_S, Forked, Missed, Run, Wrong
from titanmoe.checkpoint import layout

PATIENT = {"training.timeout_s": 60, "checkpoint.timeout_s": 60}
ENDLESS = PATIENT | {
    "training.steps": 100_000, "lr_schedule.decay": "none", "checkpoint.enable": "false", "metrics.log_every": 1,
    "moe.force_balance": "true",
}  # fmt: skip
LONG = PATIENT | {
    "training.steps": 10_000, "checkpoint.interval": 500, "validation.interval": 1000, "validation.held_out": 100,
    "validation.steps": 2, "metrics.log_every": 100, "data.source": "stdlib", "model.vocab_size": 259,
}  # fmt: skip
OUTPUTS = [(module, "") for module in ("attention_norm", "attention", "ffn_norm", "moe")]
WEIGHTS = [("attention.wq", "weight"), ("attention_norm", "weight"), ("moe.router", "weight"), ("moe.experts", "w2")]
TO_DISK, STALE = ["write", "mkdir", "rename", "fsync"], [errno.ESTALE, errno.EIO]
SKIPPED = ("titanmoe.train.gradients:all_reduce", "titanmoe.parallel.grad_norm:all_reduce")
"""Collectives that a rank skips: the first sums counts and losses, the second the gradient norm."""
AFTER, CLOSE = "titanmoe.train.runtime:GarbageCollection.collect", "titanmoe.data.loader:Loader.close"
READ = "titanmoe.data.loader:SampleReader.__getitem__"


# ---- kills, and disks that fail


def kill_ranks(run: Run, number: int) -> None:
    """Start the run and kill `number` random ranks with SIGKILL at a random step; the launcher restarts the ranks."""
    run.start(3)
    run.wait_for_random_step()
    run.signal_ranks(signal.SIGKILL, *run.rng.sample(range(RANKS), number))


def start_and_kill_launcher(run: Run, first: int = INTERVAL + 1) -> None:
    """Start the run once, kill its launcher at a random step from `first` on, and wait until all ranks have ended."""
    run.start()
    run.wait_for_random_step(first)
    run.kill_launcher()


def kill_launcher_and_restart(run: Run) -> None:
    start_and_kill_launcher(run)
    run.start()


def kill_while_saving(run: Run) -> None:
    """Start the run, kill a rank at a random disk operation of a save, and let the launcher restart the ranks."""
    step = INTERVAL * run.rng.randint(2, STEPS // INTERVAL - 1)
    rank = run.rng.choice([0, run.rank])  # rank 0 does more with the disk
    at = run.rng.randint(1, 3 if rank else 9)
    run.start_and_strike(3, do="kill", rank=rank, path=layout.folder_name(step) + layout.WRITING, at=at)


def kill_between_renames(run: Run) -> None:
    """Start the run and kill rank 0 when a checkpoint has its name but `latest` does not point to it yet."""
    on, path = run.rng.choice([("write", f"{layout.LATEST}.new"), ("rename", f"/{layout.LATEST}")])
    run.start_and_strike(3, do="kill", rank=0, on=[on], path=path, at=run.rng.randint(2, STEPS // INTERVAL - 1))


def flip_checkpoint_bit(run: Run) -> None:
    """Kill the run, flip a bit in a file of its newest checkpoint, and start it again.

    Sets `run.saved_step` to the step of the checkpoint before the newest; raises Missed if there is no such one.
    """
    start_and_kill_launcher(run, 2 * INTERVAL + 1)
    checkpoints = layout.checkpoints_by_step(run.checkpoints)
    if len(checkpoints) < 2:  # a save is late: there would be no earlier one to go back to
        raise Missed(f"there are only {len(checkpoints)} checkpoints")
    newest = checkpoints.pop(max(checkpoints))
    run.saved_step = max(checkpoints)
    file = run.rng.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    data[run.rng.randrange(len(data))] ^= 1 << run.rng.randrange(8)
    file.write_bytes(data)
    run.start()


def fill_disk(run: Run) -> None:
    """Run on a small file system, fill it up until the run ends, free it and restart. Needs root, to mount it."""
    run.folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(run.folder)], check=True)
    run.start()
    run.wait_for_random_step()
    filler = run.folder / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(1 << 23))
    run.record_strike()
    run.wait_for_end()
    filler.unlink()
    run.start()


def slow_disk_and_kill(run: Run) -> None:
    """Slow the disk down, raise Wrong unless steps are made during a save without a hang event, and kill a rank."""
    seconds = run.rng.uniform(0.05, 0.2)
    run.start(3, {"do": "slow", "on": TO_DISK, "times": 10**9, "path": "/checkpoints", "seconds": seconds})
    during: dict[Path, set[int]] = {}

    def training_continues() -> bool:
        for writing in run.checkpoints.glob(f"*{layout.WRITING}"):
            during.setdefault(writing, set()).add(run.step())
        return any(len(steps) > 1 for steps in during.values())

    run.wait(training_continues, "a step while a checkpoint is being written", Wrong)
    run.wait_for_random_step()
    if hangs := run.events("hang"):
        raise Wrong(f"a false alarm: {hangs[0]['text']}")
    run.signal_ranks(signal.SIGKILL, run.rank)


def fail_reads(run: Run) -> None:
    """Kill the run and start it again; one to four early reads of its checkpoints fail on one rank."""
    start_and_kill_launcher(run)
    fault = {
        "do": "fail",
        "errno": run.rng.choice(STALE),
        "on": ["read", "listdir", "scandir"],
        "path": str(run.checkpoints),
    }
    run.start(0, fault | {"rank": run.rank, "at": run.rng.randint(1, 6), "times": run.rng.randint(1, 4)})


def fail_writes(run: Run) -> None:
    """Make a random disk operation of rank 0 on the checkpoints fail, and let the launcher restart the ranks."""
    fault = {"do": "fail", "errno": run.rng.choice(STALE), "on": TO_DISK, "path": "/checkpoints"}
    run.start_and_strike(3, **fault, rank=0, at=run.rng.randint(20, 50))


def send_sigterm(run: Run) -> None:
    """Stop the launcher with SIGTERM, raise Wrong unless the run saves its last step, and start it again.

    Sets `run.last_step` and `run.saved_step` to the step at which it stopped.
    """
    run.start()
    run.wait_for_random_step()
    run.agent.terminate()
    run.record_strike()
    run.wait_for_end()
    run.last_step = run.step()
    if run.last_step != run.saved_step:
        raise Wrong(f"asked to stop, it ended at step {run.last_step} with step {run.saved_step} saved")
    run.start()


# ---- hangs, and what must not count as one


def hang(run: Run, number: int, do: str) -> None:
    """Make a rank hang, raise Wrong unless the report names this rank, and let the run start again.

    Args:
        run: the run.
        number: signal to send: SIGSTOP, or SIGUSR1 for `do`.
        do: what the rank does at SIGUSR1: "deadlock", "leave" or "skip" (scripts/torture/faults/sitecustomize.py).
    """
    fault = {"do": do, "on": ["signal"], "rank": run.rank, "path": run.rng.choice(SKIPPED)}
    run.start(int(run.launcher == "torchrun"), fault)
    run.wait_for_random_step()
    run.signal_ranks(number, run.rank)
    judge.expect_end_and_restart(run)


def hang_disk(run: Run) -> None:
    """Make a write of a rank hang in a save, raise Wrong unless the report names the rank; let the run start again.

    Sets the run's checkpoint.timeout_s.
    """
    path = layout.folder_name(INTERVAL * run.rng.randint(2, STEPS // INTERVAL - 1)) + layout.WRITING
    fault = {"do": "slow", "on": ["write"], "path": path, "rank": run.rank, "seconds": 1000}
    run.options |= {"checkpoint.timeout_s": TIMEOUT_S // 2}  # before any rank has waited for the next step too long
    run.start_and_strike(int(run.launcher == "torchrun"), **fault)
    judge.expect_end_and_restart(run)


def slow_link(run: Run) -> None:
    """Delay packets between two ranks by seconds, less than a collective's time-out, then by milliseconds to the end.

    Waits for the end of the run; raises Missed also if it comes before the first of these packets.
    """
    run.start()
    run.wait_for_random_step()
    ends, stall = tuple(run.rng.sample(range(RANKS), 2)), run.rng.uniform(1, 0.6 * TIMEOUT_S)
    run.helpers.append(Forked.begin(delay_packets, run.network, ends, run.rng.uniform(0.001, 0.006), stall))
    run.record_strike()
    run.wait(lambda: not run.agent.is_alive(), "the end", None)
    if time.monotonic() - run.struck_at < stall:
        raise Missed("nothing was sent over the slow link")


def wait_at_barrier(run: Run) -> None:
    """Make a rank wait between two steps at a barrier that no other comes to; check the report, and the resumed run."""
    run.start(0, {"do": "barrier", "on": ["signal"], "rank": run.rank, "path": AFTER})
    run.wait_for_random_step()
    run.signal_ranks(signal.SIGUSR1, run.rank)
    judge.expect_report(run, restarted=False)
    run.start()
    judge.expect_resume(run)


def hang_at_end(run: Run) -> None:
    """Make a rank hang when it closes its loader at the end of the run; raise Wrong unless the report names that rank.

    Sets the run's checkpoint.timeout_s to 3 s.
    """
    run.options |= {"checkpoint.timeout_s": 3}
    run.start(0, {"do": "slow", "on": ["signal"], "rank": run.rank, "path": CLOSE, "seconds": 1000})
    run.wait_for_random_step()
    run.signal_ranks(signal.SIGUSR1, run.rank)
    run.wait(lambda: STEPS in layout.checkpoints_by_step(run.checkpoints), "the last checkpoint", Wrong)
    run.record_strike()
    judge.expect_report(run, restarted=False)


def take_link_down(run: Run) -> None:
    """Take a rank's network link down, check the report, bring the link up, start the run and check that it resumes."""
    run.start()
    run.wait_for_random_step()
    set_link(run.network, run.rank)
    run.record_strike()
    judge.expect_report(run, restarted=False)
    set_link(run.network, run.rank, "up")
    run.start()
    judge.expect_resume(run)


# ---- numbers


def insert_nan(run: Run, places: list[tuple[str, str]]) -> None:
    """Insert a NaN in one microbatch of a step on one rank; wait until the step has been skipped.

    Raises Wrong unless events name the NaN's place and the skipped step. `places` are (module of a layer, parameter) to
    choose from; for parameter "" the module's output gets the NaN.
    """
    run.skips = run.rng.choice([5, 8])
    run.options |= judge.SKIPS | {"debug.culprit": "name"}
    count = BATCH // data_ranks(run)
    microbatch = run.rng.randrange(count)
    layer = run.rank // 2 if "parallelism.pp" in run.options else run.rng.randrange(2)
    module, parameter = run.rng.choice(places)
    name = f"layers.{layer}.{module}"
    fault = {"module": name, "parameter": parameter, "place": run.rng.randrange(1 << 20), "rank": run.rank}
    run.start_and_strike(0, do="nan", at=run.skips - 1, microbatch=microbatch, of=count, **fault)
    what = f"the gradient of {name}.{parameter}" if parameter else f"the output of {name}"
    samples = "" if parameter else f"; sample {sample_number(run, microbatch)} of the run"
    judge.expect_event(run, "suspect", f"{what}, microbatch {microbatch}, on rank {run.rank} (", samples)
    run.wait(lambda: run.events("skip"), "a skipped step", Wrong)


def data_ranks(run: Run) -> int:
    """Return the number of data ranks of the run."""
    return RANKS // math.prod(run.options.get(f"parallelism.{axis}", 1) for axis in ("pp", "cp", "tp"))


def sample_number(run: Run, microbatch: int) -> int:
    """Return the index in the run of the one sample in a microbatch of the struck rank, in the step that is skipped."""
    stage, ranks = RANKS // run.options.get("parallelism.pp", 1), data_ranks(run)
    return (run.skips - 1) * BATCH + microbatch * ranks + run.rank % stage * ranks // stage


def flip_memory_bit(run: Run) -> None:
    """Flip a bit of a weight or moment that several ranks hold; raise Wrong unless an event names who differs.

    If only two ranks hold it, both must be named. Starts the run with debug.replicas_every and debug.on_difference, and
    checks also that it returns to its last checkpoint by itself and ends.
    """
    every, at = 2, run.rng.randint(INTERVAL + 1, STEPS - INTERVAL)
    names = {"router.weight": [4, 16]}  # held by all ranks of a stage
    if "parallelism.dp_replicate" in run.options:
        names["attention.w"] = [16, 16]
    what, shape = run.rng.choice(list(names.items()))
    of = run.rng.choice(["", "exp_avg", "exp_avg_sq"])
    run.options |= {"debug.replicas_every": every, "debug.on_difference": "restore"}
    place, bit = run.rng.randrange(math.prod(shape)), run.rng.randrange(32)
    run.start_and_strike(0, do="flip", rank=run.rank, at=at, shape=shape, of=of, place=place, bit=bit)
    first = run.rank // 2 * 2
    who = f"rank {run.rank} differs from 3 ranks that agree"
    if "parallelism.pp" in run.options:
        who = f"ranks {first}, {first + 1} should hold the same and differ"
    judge.expect_event(run, "restore", who, f"{of} of " if of else "", what)
    if not at <= (step := run.events("restore")[0]["step"]) <= at + every:
        raise Wrong(f"flipped in step {at}, found in step {step}")
    judge.expect_resume(run)


# ---- stragglers


def pulse_rank(run: Run) -> tuple[list[int], str]:
    """Stop and continue a rank many times a second from now on; return ([rank], "compute"), who must be named."""
    seconds = run.rng.uniform(0.02, 0.06), run.rng.uniform(0.01, 0.03)
    run.helpers.append(Forked.begin(pulse, run.ranks()[run.rank], *seconds))
    return [run.rank], "compute"


def pulse(pid: int, stopped_s: float, runs_s: float) -> None:
    """Stop and continue a process in turn. Never returns.

    Args:
        pid: the process.
        stopped_s: seconds that it is stopped each time.
        runs_s: seconds that it runs in between.
    """
    while True:
        for number, seconds in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, runs_s)):
            os.kill(pid, number)
            time.sleep(seconds)


def delay_link(run: Run) -> tuple[list[int], str]:
    """Delay packets between two ranks from now on; return (ranks, "link"), the stragglers that must be named."""
    ends = tuple(sorted(run.rng.sample(range(RANKS), 2)))
    run.helpers.append(Forked.begin(delay_packets, run.network, ends, run.rng.uniform(0.003, 0.01)))
    return list(ends), "link"


def slow_data(run: Run) -> tuple[list[int], str]:
    """Slow down a rank's data loading, in a run of `slow_rank`; return ([rank], "data"), the straggler to be named."""
    os.kill(run.ranks()[run.rank], signal.SIGUSR1)
    return [run.rank], "data"


def slow_rank(run: Run, slow: Callable[[Run], tuple[list[int], str]]) -> None:
    """Start the run, slow ranks down once it is calm, and raise Wrong unless they are named as stragglers.

    `slow` slows ranks down; it returns them and the cause that must be named: "compute", "link" or "data".
    """
    seconds = run.rng.uniform(0.3, 0.6)
    run.start(0, {"do": "slow", "on": ["signal"], "rank": run.rank, "path": READ, "seconds": seconds})
    judge.expect_straggler(run, partial(slow, run))


# ---- one long run


def long_run(run: Run) -> None:
    """Run for a long time, and raise Wrong if memory, open files or threads of a rank grow."""
    steps, rows = run.options["training.steps"], []
    run.start()
    while run.agent.is_alive():
        time.sleep(0.05)
        if run.step() > len(rows) * steps // 20 and len(pids := run.ranks()) == RANKS:
            with contextlib.suppress(OSError):  # it is ending
                rows.append([max(column) for column in zip(*map(judge.process_size, pids), strict=True)])
    run.expect_success()
    judge.expect_no_growth(run, rows)


class Group(NamedTuple):
    """Kinds of trials whose runs are judged by the same checks, such as all in which a rank is killed."""

    kinds: dict[str, Callable[[Run], None]]
    """The fault function of each kind."""
    then: tuple[Callable[[Run], None], ...] = ()
    """Checks of the end of the run."""
    options: dict[str, Any] = {}
    """Further options of the run, by path."""
    network: bool = False
    """Whether the ranks have a network of their own, on which links can fail."""


EQUAL = judge.expect_bitwise_equal
GROUPS = {
    "kills": Group({
        "one rank killed": partial(kill_ranks, number=1),
        "all ranks killed": partial(kill_ranks, number=RANKS),
        "torchrun killed": kill_launcher_and_restart,
        "a rank killed while saving": kill_while_saving,
        "rank 0 killed between two renames": kill_between_renames,
        "a bit flipped in the newest checkpoint": flip_checkpoint_bit,
        "full disk": fill_disk,
        "slow disk, one rank killed": slow_disk_and_kill,
        "errors while reading": fail_reads,
        "errors while writing": fail_writes,
        "asked to stop (SIGTERM)": send_sigterm,
    }, (judge.expect_resume, EQUAL)),
    "hangs": Group({
        "a rank stopped (SIGSTOP)": partial(hang, number=signal.SIGSTOP, do="deadlock"),
        "a rank deadlocked in Python": partial(hang, number=signal.SIGUSR1, do="deadlock"),
        "a rank leaves, with exit code 0": partial(hang, number=signal.SIGUSR1, do="leave"),
        "a rank skips a collective": partial(hang, number=signal.SIGUSR1, do="skip"),
        "a disk that hangs while saving": hang_disk,
    }, (judge.expect_resume, EQUAL)),
    "more hangs": Group({
        "a rank waits at a barrier of its own": wait_at_barrier,
        "a rank does not finish": hang_at_end,
        "a rank's link is down": take_link_down,
    }, (EQUAL,), network=True),
    "withstood": Group({"a slow link": slow_link}, (judge.expect_no_alarm, EQUAL), network=True),
    "numbers": Group({
        "NaN in what a layer returns": partial(insert_nan, places=OUTPUTS),
        "NaN in a weight's gradient": partial(insert_nan, places=WEIGHTS),
        "a bit flipped in memory": flip_memory_bit,
    }, (judge.expect_no_alarm, EQUAL)),
    "stragglers": Group({
        "a rank pulsed by SIGSTOP": partial(slow_rank, slow=pulse_rank),
        "packets between two ranks held back": partial(slow_rank, slow=delay_link),
        "slow data on one rank": partial(slow_rank, slow=slow_data),
    }, options=ENDLESS, network=True),
    "soak": Group({"one long run": long_run}, options=LONG),
}  # fmt: skip
KINDS = {kind: group for group in GROUPS.values() for kind in group.kinds}


def trial(kind: str, seed: int, folder: Path, launcher: str = "") -> judge.Outcome:
    """Run one trial and return its outcome; while its fault misses the run, try other seeds. A fifth miss is a failure.

    Args:
        kind: a key of KINDS.
        seed: decides the mapping, the fault's moment and details.
        folder: parent of the runs' folders; undisturbed runs stay there for later trials.
        launcher: one of LAUNCHERS; "" for both in turn, by the seed. Trials with a network always use torchrun, whose
            address can be chosen.
    """
    group = KINDS[kind]
    launcher = LAUNCHERS[0] if group.network else launcher or LAUNCHERS[seed // len(group.kinds) % 2]
    for attempt in range(5):
        failure, run = "", Run(folder / f"{seed}-{attempt}", seed + 1_000_000 * attempt, launcher)
        run.options |= group.options
        try:
            with network(RANKS) if group.network else contextlib.nullcontext("") as run.network, closing(run):
                for phase in (group.kinds[kind], *group.then):
                    phase(run)
        except Wrong as wrong:
            failure = str(wrong)
            print(run.output[-3000:])
        except Missed as missed:
            failure = str(missed)
            continue
        break
    figures = {name: round(value, 2) for name, value in run.figures.items()}
    return judge.Outcome(kind, seed, f"{launcher}, {run.degrees}", failure, figures)
