#!/usr/bin/env python
"""Makes runs under the real torchrun fail in the ways that a cluster fails, and compares each with an undisturbed run.

    python scripts/torture.py                                   # 200 trials, unattended; a table at the end
    python scripts/torture.py --named --trials 100              # of faults that the run itself must name or withstand
    python scripts/torture.py --results runs/torture.jsonl      # the same; the same command again resumes it
    python scripts/torture.py --only "full disk" --first 17 --trials 1     # repeat one trial, as a failure prints it
    python scripts/torture.py --soak 10000                      # one long run: memory, open files and threads

A trial trains a small model on 2 CPU ranks and causes a failure at a moment drawn from its seed. Then torchrun restarts
the ranks (--max-restarts), or the same command is given again, and the run goes on to its end. Losses, gradient norms,
weights and moments must be those of the undisturbed run, to the last bit. docs/reliability.md has the results.

The first process imports torch once and each torchrun is a fork of it, which saves seconds; the ranks are started by
torchrun as usual. Those of --named, 4 under a mapping drawn from the seed, are forks of their torchrun too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture_named import STRUCK, WITHSTOOD, Struck, told
from torture_runs import KINDS, RANKS, Missed, Run, Wrong, preload, workplace, write

from titanmoe.checkpoint import layout

SOAK = {
    "config": "train_configs/debug.toml", "training.seq_len": 32, "training.global_batch_size": 8,
    "training.device": "cpu", "parallelism.tp": 1, "parallelism.experts.ep": 2, "job.name": "run",
    "checkpoint.enable": "true", "checkpoint.interval": 500, "validation.interval": 1000, "validation.held_out": 100,
    "validation.steps": 2, "metrics.console": "lines", "metrics.log_every": 100,
}  # fmt: skip


# ---- trials and their table


@dataclass
class Outcome:
    """The result of one trial, a line in the --results file."""

    kind: str
    seed: int
    equal: bool = False
    lost: int = 0
    again: int = 0
    seconds: float | None = None
    took: float = 0.0
    failure: str = ""
    named_after: float | None = None
    mapping: str = ""

    def __str__(self) -> str:
        if self.failure and not self.equal:
            return f"FAILED: {self.failure}"
        if self.mapping:
            named = "" if self.named_after is None else f", named after {self.named_after:.1f} s"
            return f"equal{named}, in {self.took:.0f} s under {self.mapping}"
        return f"equal, {self.lost} saved steps lost, {self.again} repeated, resumed in {self.seconds:.1f} s"

    @property
    def command(self) -> str:
        return f'--only "{self.kind}" --first {self.seed} --trials 1: {self.failure}'


def read(results: Path) -> list[Outcome]:
    """The last line may be incomplete."""
    names = {each.name for each in fields(Outcome)}
    needed = {each.name for each in fields(Outcome) if each.default is MISSING}
    found = []
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
        with contextlib.suppress(ValueError):
            saved = json.loads(line)
            if needed <= saved.keys() <= names:
                found.append(Outcome(**saved))
    return found


def note(results: Path, outcome: Outcome) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a+b") as stream:
        stream.seek(max(0, stream.tell() - 1))
        cut = stream.read(1) not in (b"", b"\n")
        stream.write(b"\n" * cut + json.dumps(asdict(outcome)).encode() + b"\n")


class Calm:
    """Undisturbed runs, each made when it is first needed; those in the folder already are used again."""

    def __init__(self, folder: Path):
        self.folder = folder

    def of(self, run: Run) -> Run:
        calm = Struck.of_calm(run.calm, self.folder) if isinstance(run, Struck) else Run(self.folder / "calm")
        if calm.options["training.steps"] not in layout.steps(calm.checkpoints):
            shutil.rmtree(calm.folder, ignore_errors=True)
            calm.start()
            calm.finish()
        return calm


def one(kind: str, seed: int, folder: Path, calm: Calm) -> Outcome:
    outcome, began = Outcome(kind, seed), time.monotonic()
    try:
        run = trial(kind, seed, folder, calm)
        outcome = Outcome(kind, seed, True, run.lost, run.again, run.seconds)
        if isinstance(run, Struck):
            outcome.named_after, outcome.mapping = run.named_after, told(run)
        if run.lost:
            outcome.failure = f"{run.lost} saved steps lost"
    except Wrong as wrong:
        outcome.failure = str(wrong)
    outcome.took = time.monotonic() - began
    return outcome


def trial(kind: str, seed: int, folder: Path, calm: Calm) -> Run:
    for attempt in range(5):
        run = (Struck if kind in STRUCK else Run)(folder / f"{seed}-{attempt}", seed + 1_000_000 * attempt)
        try:
            (KINDS | STRUCK)[kind](run)
            run.goes_on()
            compare(run, calm.of(run))
            return run
        except Missed:
            continue
        finally:
            run.close()
            shutil.copy(run.log, folder / f"{seed}.log")
            if os.path.ismount(run.folder):
                subprocess.run(["umount", str(run.folder)], check=False)
            shutil.rmtree(run.folder, ignore_errors=True)
    raise Wrong("in five attempts the run ended before the failure")


def losses(run: Run) -> list[tuple[int, float, float]]:
    """Without those of a step that made no update."""
    skipped = getattr(run, "skips", 0)
    lines = [line for line in run.lines("metrics.jsonl") if line["step"] != skipped]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def compare(run: Run, calm: Run) -> None:
    from titanmoe.checkpoint.folder import open_checkpoint

    if (ours := losses(run)) != (theirs := losses(calm)):
        first = next((a for a, b in zip(ours, theirs, strict=False) if a != b), None)
        raise Wrong(f"a different loss or norm: {first or f'{len(ours)} lines for {len(theirs)} steps'}")
    ours, theirs = (
        open_checkpoint(each.checkpoints / layout.name_of(run.options["training.steps"])) for each in (run, calm)
    )
    if ours.tensors != theirs.tensors:
        raise Wrong("the last checkpoint has different tensors")
    if odd := [name for name in theirs.tensors if not ours.read(name).equal(theirs.read(name))]:
        raise Wrong(f"{len(odd)} tensors differ in bits, among them {odd[0]}")


def table(outcomes: list[Outcome]) -> str:
    head = ("what happened", "trials", "equal to the last bit", "saved steps lost", "steps repeated, at most",
            "seconds to resume: median", "max")  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for kind in [kind for kind in KINDS if any(each.kind == kind for each in outcomes)] + ["all"]:
        some = [each for each in outcomes if kind in (each.kind, "all")]
        seconds = [each.seconds for each in some if each.seconds is not None]
        lost, again = sum(each.lost for each in some), max((each.again for each in some), default=0)
        counts = (len(some), sum(each.equal for each in some), lost, again)
        shown = [f"{each:.1f}" for each in (statistics.median(seconds), max(seconds))] if seconds else ["", ""]
        rows.append((kind, *map(str, counts), *shown))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def named_table(outcomes: list[Outcome]) -> str:
    head = ("what happened", "trials", "rightly named", "equal to the last bit",
            "seconds until named: median", "max", "seconds to resume: median")  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for kind in [kind for kind in STRUCK if any(each.kind == kind for each in outcomes)] + ["all"]:
        some = [each for each in outcomes if kind in (each.kind, "all")]
        named = [each.named_after for each in some if each.named_after is not None]
        resumed = [each.seconds for each in some if each.seconds is not None]
        shown = [f"{each:.1f}" for each in (statistics.median(named), max(named))] if named else ["", ""]
        shown.append(f"{statistics.median(resumed):.1f}" if resumed else "")
        count = "no false alarm" if kind in WITHSTOOD and all(each.equal for each in some) else str(len(named))
        rows.append((kind, str(len(some)), count, str(sum(each.equal for each in some)), *shown))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def torture(args: argparse.Namespace, folder: Path) -> int:
    preload()
    named = args.named or args.only in STRUCK
    kinds = [args.only] if args.only else list(STRUCK if named else KINDS)
    results = Path(args.results) if args.results else None
    outcomes = read(results) if results else []
    done = {(each.kind, each.seed) for each in outcomes}
    asked = [(kinds[seed % len(kinds)], seed) for seed in range(args.first, args.first + args.trials)]
    left = [each for each in asked if each not in done]
    if len(left) < len(asked):
        print(f"{len(asked) - len(left)} of {len(asked)} trials are already in {results}", flush=True)
    calm = Calm(folder)
    try:
        for kind, seed in left:
            outcome = one(kind, seed, folder, calm)
            outcomes.append(outcome)
            if results:
                note(results, outcome)
            print(f"{len(outcomes):>3} {kind}, seed {seed}: {outcome}", flush=True)
    finally:
        failures = [each.command for each in outcomes if each.failure]
        spent = sum(each.took for each in outcomes)
        text = (named_table if named else table)(
            outcomes
        ) + f"\n{len(outcomes)} trials in {spent:.0f} s, {len(failures)} failures\n"
        print("\n" + text + "".join(f"  {line}\n" for line in failures))
        if args.out:
            write(Path(args.out), "named" if named else "trials", text + "".join(f"* {line}\n" for line in failures))
    return 1 if failures else 0


# ---- one long run


def sample(pid: int) -> tuple[float, int, int]:
    """MiB, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def is_flat(rows: list[list[float]]) -> bool:
    """After the first quarter, no maximum is higher in the second half than in the first, memory by at most 5 %.

    A single sample may have one more file or thread, while a checkpoint is being written.
    """
    settled = rows[len(rows) // 4 :]
    early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    return all(
        max(row[i] for row in late) <= max(row[i] for row in early) * grow for i, grow in ((1, 1.05), (2, 1), (3, 1))
    )


def soak(args: argparse.Namespace, folder: Path) -> int:
    every = max(1, args.soak // 20)
    run = Run(folder / "soak", options=SOAK | {"training.steps": args.soak})
    began = time.monotonic()
    run.start()
    rows: list[list[float]] = []
    metrics = run.run / "metrics.jsonl"
    last, seen = 0, 0
    while run.agent.is_alive():
        time.sleep(0.05)
        if metrics.exists() and metrics.stat().st_size > seen:
            seen, step = metrics.stat().st_size, run_step(metrics)
            if step // every > last // every and len(pids := run.ranks()) == RANKS:
                last = step
                with contextlib.suppress(OSError):  # it is ending
                    rows.append([step, *(max(column) for column in zip(*map(sample, pids), strict=True))])
    run.finish()
    lines = ["| step | memory of the larger rank, MiB | open files | threads |", "| --- | --- | --- | --- |"]
    lines += [f"| {step:,.0f} | {mib:.0f} | {files:.0f} | {threads:.0f} |" for step, mib, files, threads in rows]
    flat, spent = is_flat(rows), time.monotonic() - began
    lines.append(f"\n{args.soak:,} steps in {spent:.0f} s; after the first quarter {'' if flat else 'NOT '}flat")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        write(Path(args.out), "soak", text)
    return 0 if flat else 1


def run_step(metrics: Path) -> int:
    """From the last complete line. Reading all of a long file each time would slow down the run."""
    with metrics.open("rb") as stream:
        stream.seek(max(0, metrics.stat().st_size - 65536))
        whole = stream.read().rpartition(b"\n")[0]
    return json.loads(whole.rpartition(b"\n")[2])["step"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="SEED", help="seed of the first trial; each further trial adds 1"
    )
    parser.add_argument(
        "--named", action="store_true", help=f"the kinds that a run must name or withstand: {', '.join(STRUCK)}"
    )
    parser.add_argument("--only", choices=KINDS | STRUCK, metavar="KIND", help=f"one of: {', '.join(KINDS | STRUCK)}")
    parser.add_argument(
        "--results", metavar="FILE", help="one line per finished trial; trials already in it are skipped"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="also write the table there; in docs/reliability.md, between its marks"
    )
    parser.add_argument("--work", metavar="FOLDER", help="keeps the undisturbed runs there for the next time")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="one long run instead")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("this needs Linux: it reads /proc")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the code that unmounts and reports
    with workplace(args.work) as folder:
        return soak(args, folder) if args.soak else torture(args, folder)


if __name__ == "__main__":
    sys.exit(main())
