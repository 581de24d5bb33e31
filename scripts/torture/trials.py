"""The kinds of trials: what happens to a run, and how it is judged."""

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
from scripts.torture.network import carry, cut, network
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
SKIPPED = ("titanmoe.train.gradients:all_reduce", "titanmoe.parallel.norm:all_reduce")
"""The first sums counts and losses, the second the gradient norm."""
AFTER, CLOSE = "titanmoe.train.runtime:GarbageCollection.collect", "titanmoe.data.loader:Loader.close"
READ = "titanmoe.data.loader:SampleReader.__getitem__"


# ---- kills, and disks that fail


def killed(run: Run, number: int) -> None:
    run.start(3)
    run.moment()
    run.strike(signal.SIGKILL, *run.draw.sample(range(RANKS), number))


def stopped(run: Run, first: int = INTERVAL + 1) -> None:
    run.start()
    run.moment(first)
    run.strike_launcher()


def launcher_killed(run: Run) -> None:
    stopped(run)
    run.start()


def killed_while_saving(run: Run) -> None:
    step = INTERVAL * run.draw.randint(2, STEPS // INTERVAL - 1)
    rank = run.draw.choice([0, run.rank])  # rank 0 does more with the disk
    at = run.draw.randint(1, 3 if rank else 9)
    run.start_and_strike(3, do="kill", rank=rank, path=layout.name_of(step) + layout.WRITING, at=at)


def killed_between_renames(run: Run) -> None:
    """The checkpoint has its name, but `latest` does not point to it yet."""
    on, path = run.draw.choice([("write", f"{layout.LATEST}.new"), ("rename", f"/{layout.LATEST}")])
    run.start_and_strike(3, do="kill", rank=0, on=[on], path=path, at=run.draw.randint(2, STEPS // INTERVAL - 1))


def flipped_bit(run: Run) -> None:
    stopped(run, 2 * INTERVAL + 1)
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
    """A small file system, until a file that takes up all the space is removed."""
    run.folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(run.folder)], check=True)
    run.start()
    run.moment()
    filler = run.folder / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(1 << 23))
    run.struck()
    run.ended()
    filler.unlink()
    run.start()


def slow_disk(run: Run) -> None:
    """Training goes on while a checkpoint is being written, and nobody takes that for a hang; then a rank is killed."""
    seconds = run.draw.uniform(0.05, 0.2)
    run.start(3, {"do": "slow", "on": TO_DISK, "times": 10**9, "path": "/checkpoints", "seconds": seconds})
    during: dict[Path, set[int]] = {}

    def goes_on() -> bool:
        for writing in run.checkpoints.glob(f"*{layout.WRITING}"):
            during.setdefault(writing, set()).add(run.step())
        return any(len(steps) > 1 for steps in during.values())

    run.wait(goes_on, "a step while a checkpoint is being written", Wrong)
    run.moment()
    if hangs := run.events("hang"):
        raise Wrong(f"a false alarm: {hangs[0]['text']}")
    run.strike(signal.SIGKILL, run.rank)


def errors_while_reading(run: Run) -> None:
    """A file server that does not answer at first."""
    stopped(run)
    fault = {
        "do": "fail",
        "errno": run.draw.choice(STALE),
        "on": ["read", "listdir", "scandir"],
        "path": str(run.checkpoints),
    }
    run.start(0, fault | {"rank": run.rank, "at": run.draw.randint(1, 6), "times": run.draw.randint(1, 4)})


def errors_while_writing(run: Run) -> None:
    fault = {"do": "fail", "errno": run.draw.choice(STALE), "on": TO_DISK, "path": "/checkpoints"}
    run.start_and_strike(3, **fault, rank=0, at=run.draw.randint(20, 50))


def asked_to_stop(run: Run) -> None:
    run.start()
    run.moment()
    run.agent.terminate()
    run.struck()
    run.ended()
    run.made = run.step()
    if run.made != run.committed:
        raise Wrong(f"asked to stop, it ended at step {run.made} with step {run.committed} saved")
    run.start()


# ---- hangs, and what must not count as one


def hang(run: Run, number: int, do: str) -> None:
    fault = {"do": do, "on": ["signal"], "rank": run.rank, "path": run.draw.choice(SKIPPED)}
    run.start(int(run.launcher == "torchrun"), fault)
    run.moment()
    run.strike(number, run.rank)
    judge.ends(run)


def hung_disk(run: Run) -> None:
    path = layout.name_of(INTERVAL * run.draw.randint(2, STEPS // INTERVAL - 1)) + layout.WRITING
    fault = {"do": "slow", "on": ["write"], "path": path, "rank": run.rank, "seconds": 1000}
    run.options |= {"checkpoint.timeout_s": TIMEOUT_S // 2}  # before any rank has waited for the next step too long
    run.start_and_strike(int(run.launcher == "torchrun"), **fault)
    judge.ends(run)


def slow_link(run: Run) -> None:
    """Each packet between two ranks is late, and the first by seconds, but less than the time-out."""
    run.start()
    run.moment()
    ends, stall = tuple(run.draw.sample(range(RANKS), 2)), run.draw.uniform(1, 0.6 * TIMEOUT_S)
    run.helpers.append(Forked.begin(carry, run.network, ends, run.draw.uniform(0.001, 0.006), stall))
    run.struck()
    run.wait(lambda: not run.agent.is_alive(), "the end", None)
    if time.monotonic() - run.struck_at < stall:
        raise Missed("nothing was sent over the slow link")


def waits_alone(run: Run) -> None:
    """Between two steps, at a barrier that nobody else comes to."""
    run.start(0, {"do": "barrier", "on": ["signal"], "rank": run.rank, "path": AFTER})
    run.moment()
    run.strike(signal.SIGUSR1, run.rank)
    judge.is_named(run, restarted=False)
    run.start()
    judge.goes_on(run)


def does_not_finish(run: Run) -> None:
    run.options |= {"checkpoint.timeout_s": 3}
    run.start(0, {"do": "slow", "on": ["signal"], "rank": run.rank, "path": CLOSE, "seconds": 1000})
    run.moment()
    run.strike(signal.SIGUSR1, run.rank)
    run.wait(lambda: STEPS in layout.steps(run.checkpoints), "the last checkpoint", Wrong)
    run.struck()
    judge.is_named(run, restarted=False)


def loses_its_link(run: Run) -> None:
    run.start()
    run.moment()
    cut(run.network, run.rank)
    run.struck()
    judge.is_named(run, restarted=False)
    cut(run.network, run.rank, "up")
    run.start()
    judge.goes_on(run)


# ---- numbers


def nan(run: Run, places: list[tuple[str, str]]) -> None:
    """In one microbatch of a step, on one rank; the step is repeated, the culprit named, and no update made."""
    run.skips = run.draw.choice([5, 8])
    run.options |= judge.SKIPS | {"debug.culprit": "name"}
    count = BATCH // data_ranks(run)
    microbatch = run.draw.randrange(count)
    layer = run.rank // 2 if "parallelism.pp" in run.options else run.draw.randrange(2)
    module, parameter = run.draw.choice(places)
    name = f"layers.{layer}.{module}"
    fault = {"module": name, "parameter": parameter, "place": run.draw.randrange(1 << 20), "rank": run.rank}
    run.start_and_strike(0, do="nan", at=run.skips - 1, microbatch=microbatch, of=count, **fault)
    what = f"the gradient of {name}.{parameter}" if parameter else f"the output of {name}"
    samples = "" if parameter else f"; sample {sample(run, microbatch)} of the run"
    judge.names(run, "suspect", f"{what}, microbatch {microbatch}, on rank {run.rank} (", samples)
    run.wait(lambda: run.events("skip"), "a skipped step", Wrong)


def data_ranks(run: Run) -> int:
    return RANKS // math.prod(run.options.get(f"parallelism.{axis}", 1) for axis in ("pp", "cp", "tp"))


def sample(run: Run, microbatch: int) -> int:
    """Samples go round the data ranks, and this rank's microbatch is a single one."""
    stage, ranks = RANKS // run.options.get("parallelism.pp", 1), data_ranks(run)
    return (run.skips - 1) * BATCH + microbatch * ranks + run.rank % stage * ranks // stage


def flipped_memory(run: Run) -> None:
    """A bit of a weight or moment that several ranks hold; with two of them, both are named. The run goes back to its
    last checkpoint by itself.
    """
    every, at = 2, run.draw.randint(INTERVAL + 1, STEPS - INTERVAL)
    names = {"router.weight": [4, 16]}  # held by all ranks of a stage
    if "parallelism.dp_replicate" in run.options:
        names["attention.w"] = [16, 16]
    what, shape = run.draw.choice(list(names.items()))
    of = run.draw.choice(["", "exp_avg", "exp_avg_sq"])
    run.options |= {"debug.replicas_every": every, "debug.on_difference": "restore"}
    place, bit = run.draw.randrange(math.prod(shape)), run.draw.randrange(32)
    run.start_and_strike(0, do="flip", rank=run.rank, at=at, shape=shape, of=of, place=place, bit=bit)
    first = run.rank // 2 * 2
    who = f"rank {run.rank} differs from 3 ranks that agree"
    if "parallelism.pp" in run.options:
        who = f"ranks {first}, {first + 1} should hold the same and differ"
    judge.names(run, "restore", who, f"{of} of " if of else "", what)
    if not at <= (step := run.events("restore")[0]["step"]) <= at + every:
        raise Wrong(f"flipped in step {at}, found in step {step}")
    judge.goes_on(run)


# ---- stragglers


def pulsed(run: Run) -> tuple[list[int], str]:
    """Stopped, and going on, many times a second."""
    seconds = run.draw.uniform(0.02, 0.06), run.draw.uniform(0.01, 0.03)
    run.helpers.append(Forked.begin(pulse, run.ranks()[run.rank], *seconds))
    return [run.rank], "compute"


def pulse(pid: int, stopped_s: float, runs_s: float) -> None:
    while True:
        for number, seconds in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, runs_s)):
            os.kill(pid, number)
            time.sleep(seconds)


def held_back(run: Run) -> tuple[list[int], str]:
    ends = tuple(sorted(run.draw.sample(range(RANKS), 2)))
    run.helpers.append(Forked.begin(carry, run.network, ends, run.draw.uniform(0.003, 0.01)))
    return list(ends), "link"


def slow_data(run: Run) -> tuple[list[int], str]:
    os.kill(run.ranks()[run.rank], signal.SIGUSR1)
    return [run.rank], "data"


def straggler(run: Run, slow: Callable[[Run], tuple[list[int], str]]) -> None:
    seconds = run.draw.uniform(0.3, 0.6)
    run.start(0, {"do": "slow", "on": ["signal"], "rank": run.rank, "path": READ, "seconds": seconds})
    judge.straggles(run, partial(slow, run))


# ---- one long run


def long_run(run: Run) -> None:
    steps, rows = run.options["training.steps"], []
    run.start()
    while run.agent.is_alive():
        time.sleep(0.05)
        if run.step() > len(rows) * steps // 20 and len(pids := run.ranks()) == RANKS:
            with contextlib.suppress(OSError):  # it is ending
                rows.append([max(column) for column in zip(*map(judge.size, pids), strict=True)])
    run.finish()
    judge.is_flat(run, rows)


class Group(NamedTuple):
    kinds: dict[str, Callable[[Run], None]]
    then: tuple[Callable[[Run], None], ...] = ()
    """How the end is judged."""
    options: dict[str, Any] = {}
    network: bool = False


EQUAL = judge.as_if_nothing_had_happened
GROUPS = {
    "kills": Group({
        "one rank killed": partial(killed, number=1),
        "all ranks killed": partial(killed, number=RANKS),
        "torchrun killed": launcher_killed,
        "a rank killed while saving": killed_while_saving,
        "rank 0 killed between two renames": killed_between_renames,
        "a bit flipped in the newest checkpoint": flipped_bit,
        "full disk": full_disk,
        "slow disk, one rank killed": slow_disk,
        "errors while reading": errors_while_reading,
        "errors while writing": errors_while_writing,
        "asked to stop (SIGTERM)": asked_to_stop,
    }, (judge.goes_on, EQUAL)),
    "hangs": Group({
        "a rank stopped (SIGSTOP)": partial(hang, number=signal.SIGSTOP, do="deadlock"),
        "a rank deadlocked in Python": partial(hang, number=signal.SIGUSR1, do="deadlock"),
        "a rank leaves, with exit code 0": partial(hang, number=signal.SIGUSR1, do="leave"),
        "a rank skips a collective": partial(hang, number=signal.SIGUSR1, do="skip"),
        "a disk that hangs while saving": hung_disk,
    }, (judge.goes_on, EQUAL)),
    "more hangs": Group({
        "a rank waits at a barrier of its own": waits_alone,
        "a rank does not finish": does_not_finish,
        "a rank's link is down": loses_its_link,
    }, (EQUAL,), network=True),
    "withstood": Group({"a slow link": slow_link}, (judge.no_alarm, EQUAL), network=True),
    "numbers": Group({
        "NaN in what a layer returns": partial(nan, places=OUTPUTS),
        "NaN in a weight's gradient": partial(nan, places=WEIGHTS),
        "a bit flipped in memory": flipped_memory,
    }, (judge.no_alarm, EQUAL)),
    "stragglers": Group({
        "a rank pulsed by SIGSTOP": partial(straggler, slow=pulsed),
        "packets between two ranks held back": partial(straggler, slow=held_back),
        "slow data on one rank": partial(straggler, slow=slow_data),
    }, options=ENDLESS, network=True),
    "soak": Group({"one long run": long_run}, options=LONG),
}  # fmt: skip
KINDS = {kind: group for group in GROUPS.values() for kind in group.kinds}


def trial(kind: str, seed: int, folder: Path, launcher: str = "") -> judge.Outcome:
    """launcher: by turns unless given; a network has torchrun alone, whose address can be chosen."""
    group = KINDS[kind]
    launcher = LAUNCHERS[0] if group.network else launcher or LAUNCHERS[seed // len(group.kinds) % 2]
    for attempt in range(5):
        failure, run = "", Run(folder / f"{seed}-{attempt}", seed + 1_000_000 * attempt, launcher)
        run.options |= group.options
        try:
            with network(RANKS) if group.network else contextlib.nullcontext("") as run.network, closing(run):
                for part in (group.kinds[kind], *group.then):
                    part(run)
        except Wrong as wrong:
            failure = str(wrong)
            print(run.output[-3000:])
        except Missed as missed:
            failure = str(missed)
            continue
        break
    figures = {name: round(value, 2) for name, value in run.figures.items()}
    return judge.Outcome(kind, seed, f"{launcher}, {run.degrees}", failure, figures)
