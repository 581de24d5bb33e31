"""What a run has to name, or to withstand: kinds of trials for torture.py, on 4 ranks, each under a mapping of its own.

If a rank is stopped or deadlocked, a disk hangs, a NaN appears or a bit flips, the run itself must name the rank (and
the tensor, layer and samples). Slow links and slow disks must raise no alarm. Every run ends like the calm run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture_hangs import MAPPINGS, RANKS, Hang, deadlock, disk, stop
from torture_runs import Wrong

from titanmoe.checkpoint import layout

TIMEOUT_S, WITHIN_S = 6, 20.0
EVERY = 2
"""Steps between comparisons of what several ranks hold."""
LAST, SAVED, BATCH = 12, 3, 4
NAMED = (*MAPPINGS, {"parallelism.dp_replicate": 4, "parallelism.experts.ep": 2})
SHORT = {
    "training.steps": LAST, "training.timeout_s": TIMEOUT_S, "training.global_batch_size": BATCH,
    "checkpoint.interval": SAVED, "checkpoint.timeout_s": TIMEOUT_S,
}  # fmt: skip
SKIPS = {"optimizer.skip_spikes": 6}
NAN_STEPS = (5, 8)
ROUTER, ATTENTION = [4, 16], [16, 16]
"""Shapes of weights: the first are held by all ranks of a stage, the second by all if all are replicas."""
OUTPUTS = ("attention_norm", "attention", "ffn_norm", "moe")
WEIGHTS = (("attention.wq", "weight"), ("attention_norm", "weight"), ("moe.router", "weight"), ("moe.experts", "w2"))


class Struck(Hang):
    """Compared with the calm run of its mapping."""

    forks, timeout_s = True, TIMEOUT_S

    def __init__(self, folder: Path, seed: int = 0, mapping: int | None = None):
        super().__init__(folder, seed, SHORT)
        self.mapping = self.draw.randrange(len(NAMED)) if mapping is None else mapping
        self.options = {k: v for k, v in self.options.items() if not k.startswith("parallelism.")} | NAMED[self.mapping]
        self.skips, self.restarts = 0, 0
        """The step whose update is not made, 0 for none; and how often torchrun may start the ranks again."""
        self.named_after: float | None = None

    @property
    def calm(self) -> str:
        return f"calm-{self.mapping}-{self.skips}"

    @property
    def data_ranks(self) -> int:
        return RANKS // math.prod(self.options.get(f"parallelism.{axis}", 1) for axis in ("pp", "cp", "tp"))

    @staticmethod
    def of_calm(name: str, folder: Path) -> Struck:
        _, mapping, skips = name.split("-")
        run = Struck(folder / name, mapping=int(mapping))
        run.skip(int(skips))
        run.options |= {"data.skip_steps": f'["{skips}"]'} if run.skips else {}
        return run

    def skip(self, step: int) -> None:
        self.skips = step
        self.options |= SKIPS if step else {}

    def strike(self, number: int) -> None:
        """In a random step after the first checkpoint: a run that starts over would move its events aside."""
        step = self.draw.randint(SAVED + 1, LAST - 4)
        self.wait(lambda: self.step() >= step and layout.latest(self.checkpoints), f"step {step}")
        time.sleep(self.draw.uniform(0, 0.3))
        os.kill(self.ranks()[self.rank], number)
        self.struck()

    def start(self, restarts: int = 0, faults: tuple[dict[str, Any], ...] = ()) -> None:
        super().start(restarts or self.restarts, faults)

    def named(self, line: Callable[[], str], *words: str) -> None:
        """Wait until the run says what has happened; Wrong unless all of these words are in it."""
        found: list[str] = []
        self.wait(lambda: found.append(line()) or found[-1], "a name for what has happened", Wrong)
        self.named_after = time.monotonic() - self.struck_at
        if missing := [word for word in words if word not in found[-1]]:
            raise Wrong(f"{', '.join(missing)} should have been named: {found[-1]}")
        if self.named_after > WITHIN_S:
            raise Wrong(f"named only after {self.named_after:.1f} s")

    def said(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line for line in lines if line.startswith("error: ")), "")

    def event(self, kind: str) -> str:
        return next((event["text"] for event in self.lines("events.jsonl") if event["kind"] == kind), "")

    def goes_on(self) -> None:
        if self.restarts or self.event("restore"):
            super().goes_on()
        else:
            self.finish()
            self.seconds = None
        if not self.restarts and "hang" in (self.said() + self.event("hang")):
            raise Wrong(f"a false alarm: {self.said()}")


def stopped(run: Struck) -> None:
    run.restarts = 1
    stop(run)
    run.named(run.said, f"hang: rank {run.rank} ", "is late, in step")


def deadlocked(run: Struck) -> None:
    run.restarts = 1
    deadlock(run)
    run.named(run.said, f"hang: rank {run.rank} ", "is late, in step")


def hung_disk(run: Struck) -> None:
    run.restarts = 1
    disk(run, layout.name_of(SAVED * run.draw.randint(2, LAST // SAVED - 1)) + layout.WRITING)
    run.named(run.said, f"rank {run.rank} is still ")


def slow_link(run: Struck) -> None:
    """Each message between two ranks is late, and one by seconds, but less than the time-out."""
    other = run.draw.choice([rank for rank in range(RANKS) if rank != run.rank])
    stall = run.draw.uniform(1, 0.6 * TIMEOUT_S)
    fault = {"do": "delay", "seconds": run.draw.uniform(0.001, 0.006), "stall": stall, "once": str(run.struck_file)}
    fault |= {"seed": run.draw.random()}
    there = fault | {"rank": run.rank, "peers": [other], "at": run.draw.randint(20, 60)}
    back = fault | {"rank": other, "peers": [run.rank], "at": 0}
    run.start(faults=(there, back))
    run.wait_for_strike()


def slow_disk(run: Struck) -> None:
    """Training goes on while a checkpoint is being written, and the next one waits for it."""
    fault = {"do": "slow", "seconds": run.draw.uniform(0.05, 0.2), "on": ["write", "rename", "fsync"], "times": 10**9}
    run.start(faults=(fault | {"path": str(run.checkpoints)},))
    run.wait(lambda: layout.latest(run.checkpoints) or run.step() >= 1, "the first step")
    run.struck()
    during: dict[str, set[int]] = {}

    def ended() -> bool:
        for writing in run.checkpoints.glob(f"*{layout.WRITING}"):
            during.setdefault(writing.name, set()).add(run.step())
        return not run.agent.is_alive()

    run.wait(ended, "the end", None)
    if not any(len(steps) > 1 for steps in during.values()):
        raise Wrong(f"no step was made while a checkpoint was being written: {during}")


def nan(run: Struck, spoilt: Callable[[Struck, int], tuple[dict[str, Any], str]]) -> None:
    """In one microbatch of a step, on one rank; the step is repeated, the culprit named, and no update made."""
    run.skip(run.draw.choice(NAN_STEPS))
    run.options |= {"debug.culprit": "name"}
    microbatches = BATCH // run.data_ranks
    microbatch = run.draw.randrange(microbatches)
    layer = run.rank // 2 if "parallelism.pp" in run.options else run.draw.randrange(2)
    what, name = spoilt(run, layer)
    fault = {"do": "nan", "rank": run.rank, "at": run.skips - 1, "microbatch": microbatch, "of": microbatches}
    run.start(faults=(fault | what | {"place": run.draw.randrange(1 << 20), "once": str(run.struck_file)},))
    run.wait_for_strike()
    where = f"{name}, microbatch {microbatch}, on rank {run.rank} ("
    run.named(lambda: run.event("suspect"), where, *samples(run, what, microbatch))
    run.wait(lambda: run.event("skip"), "a skipped step", Wrong)


def samples(run: Struck, what: dict[str, Any], microbatch: int) -> list[str]:
    """Samples go round the data ranks, and this one's microbatch is a single sample."""
    if "parameter" in what:
        return []
    stage = RANKS // run.options.get("parallelism.pp", 1)
    first, rank = (run.skips - 1) * BATCH, run.rank % stage * run.data_ranks // stage
    return [f"; sample {first + microbatch * run.data_ranks + rank} of the run"]


def nan_in_output(run: Struck) -> None:
    def spoilt(run: Struck, layer: int) -> tuple[dict[str, Any], str]:
        module = f"layers.{layer}.{run.draw.choice(OUTPUTS)}"
        return {"module": module}, f"the output of {module}"

    nan(run, spoilt)


def nan_in_gradient(run: Struck) -> None:
    def spoilt(run: Struck, layer: int) -> tuple[dict[str, Any], str]:
        module, parameter = run.draw.choice(WEIGHTS)
        what = {"module": f"layers.{layer}.{module}", "parameter": parameter}
        return what, f"the gradient of layers.{layer}.{module}.{parameter}"

    nan(run, spoilt)


def flipped_memory(run: Struck) -> None:
    """A bit of a weight or moment that several ranks hold; with two of them, both are named. The run goes back to its
    last checkpoint by itself.
    """
    at = run.draw.randint(SAVED + 1, LAST - 3)
    replicas = "parallelism.dp_replicate" in run.options
    shape = run.draw.choice([ROUTER, ATTENTION]) if replicas else ROUTER
    of = run.draw.choice(["", "exp_avg", "exp_avg_sq"])
    fault = {"do": "flip", "rank": run.rank, "at": at, "shape": shape, "of": of, "once": str(run.struck_file)}
    run.options |= {"debug.replicas_every": EVERY, "debug.on_difference": "restore"}
    run.start(faults=(fault | {"place": run.draw.randrange(shape[0] * shape[1]), "bit": run.draw.randrange(32)},))
    run.wait_for_strike()
    who = f"rank {run.rank} differs from 3 ranks that agree"
    if "parallelism.pp" in run.options:
        first = run.rank // 2 * 2
        who = f"ranks {first}, {first + 1} should hold the same and differ"
    what = "router.weight" if shape == ROUTER else "attention.w"
    run.named(lambda: run.event("restore"), who, what, *([f"{of} of "] if of else []))
    step = next(event["step"] for event in run.lines("events.jsonl") if event["kind"] == "restore")
    if not at <= step <= at + EVERY:
        raise Wrong(f"flipped in step {at}, found in step {step}")


STRUCK: dict[str, Callable[[Struck], None]] = {
    "a rank stopped (SIGSTOP)": stopped,
    "a rank deadlocked in Python": deadlocked,
    "a disk that hangs while saving": hung_disk,
    "a slow link": slow_link,
    "a slow disk": slow_disk,
    "NaN in what a layer returns": nan_in_output,
    "NaN in a weight's gradient": nan_in_gradient,
    "a bit flipped in memory": flipped_memory,
}
WITHSTOOD = ("a slow link", "a slow disk")
"""Nothing is to be named."""


def told(run: Struck) -> str:
    """The mapping, as a trial's line says it."""
    return json.dumps({name.rpartition(".")[2]: value for name, value in NAMED[run.mapping].items()})
