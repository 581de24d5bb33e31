"""How a trial is judged: by what the run said, and by what it computed. And the table of all trials."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.torture.runs import MAPPINGS, STEPS, TIMEOUT_S, TINY, Run, Wrong, alive
from titanmoe.checkpoint import layout

CALM_STEPS, WINDOW = 64, 16
SKIPS = {"optimizer.skip_spikes": 6}


@dataclass
class Outcome:
    """The result of one trial, a line in the file of results."""

    kind: str
    seed: int
    under: str = ""
    """The launcher and the mapping."""
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def read(results: Path) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]


def table(outcomes: list[Outcome]) -> str:
    """Figures as median and maximum."""
    names = list(dict.fromkeys(name for each in outcomes for name in each.figures))
    rows = [("what happened", "trials", "as it should be", *names), ("---",) * (3 + len(names))]
    for kind in [*dict.fromkeys(each.kind for each in outcomes), "all"]:
        some = [each for each in outcomes if kind in (each.kind, "all")]
        cells = [kind, str(len(some)), str(sum(not each.failure for each in some))]
        for name in names:
            found = [each.figures[name] for each in some if name in each.figures]
            cells.append(f"{statistics.median(found):.3g}, at most {max(found):.3g}" if found else "")
        rows.append(tuple(cells))
    failures = [f'* "{each.kind}" --first {each.seed} --trials 1: {each.failure}' for each in outcomes if each.failure]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", f"{len(failures)} failures", *failures]) + "\n"


# ---- what the run said


def names(run: Run, kind: str, *words: str) -> None:
    """Wait for an event of this kind; Wrong unless all of these words are in it."""
    run.wait(lambda: run.events(kind), "a name for what has happened", Wrong)
    run.figures["seconds until named"] = time.monotonic() - run.struck_at
    text = run.events(kind)[0]["text"]
    if missing := [word for word in words if word not in text]:
        raise Wrong(f"{', '.join(missing)} should have been named: {text}")


def ends(run: Run) -> None:
    """Raise Wrong unless all ranks end by themselves in time, after a report that names the rank.

    Then the run goes on: torchrun starts the ranks again by itself, `titanmoe train` is given again.
    """
    is_named(run)
    if run.launcher != "torchrun":
        run.start()


def is_named(run: Run, restarted: bool | None = None) -> None:
    """Raise Wrong unless all ranks end by themselves in time and the last message is a report that names only the rank.

    Args:
        restarted: whether the launcher starts the ranks again; by default, if it is torchrun.
    """
    restarted = run.launcher == "torchrun" if restarted is None else restarted
    run.wait(lambda: not any(map(alive, run.pids)), "the end of all ranks", None)
    took = run.figures["seconds until all had ended"] = time.monotonic() - run.struck_at
    if not restarted:
        run.ended()
    said = run.said()
    last = [line for line in said.splitlines() if line.startswith("error: ")][-1:]
    if not last or not re.search(rf"\brank {run.rank} (on \S+ (is late|cannot be reached), |is still )", last[0]):
        raise Wrong(f"rank {run.rank} was struck, and the last report is: {last}")
    if "Traceback" in said.partition(last[0])[0]:
        raise Wrong("a rank printed a traceback before the report")
    if took > TIMEOUT_S + 10:
        raise Wrong(f"all had ended only after {took:.1f} s")


def straggles(run: Run, slow: Callable[[], tuple[list[int], str]]) -> None:
    """Nobody is named until somebody is slow, then the right one for the right reason, and nobody else."""
    named = partial(run.events, "straggler")
    run.wait(lambda: run.step() >= CALM_STEPS, "calm")
    begin = run.figures["calm steps before"] = run.step()
    if found := named():
        raise Wrong(f"named without a fault: {found[0]['text']}")
    expected = slow()
    run.wait(named, f"a name ({expected})", Wrong)
    first = named()[0]
    if (first["ranks"], first["cause"]) != expected:
        raise Wrong(f"{expected} should have been named: {first['text']}")
    run.figures["steps until named"] = first["step"] - begin
    run.wait(lambda: run.step() > first["step"] + WINDOW, "another window", Wrong)
    if more := named()[1:]:
        raise Wrong(f"named too: {more[0]['text']}")


# ---- how it went on


def goes_on(run: Run) -> None:
    """The run starts again and ends, and what the failure cost is measured."""
    run.wait(lambda: len(run.begun()) > run.starts, "another start", Wrong)
    began = run.begun()[run.starts]
    run.wait(lambda: run.step() > began, "a step after the restart", Wrong)
    run.figures["seconds to resume"] = time.monotonic() - run.struck_at
    lost = run.figures["saved steps lost"] = max(0, run.committed - began)
    run.figures["steps repeated"] = max(0, run.made - began)
    if lost:
        raise Wrong(f"{lost} saved steps lost")
    run.finish()


def no_alarm(run: Run) -> None:
    run.finish()
    if hangs := run.events("hang"):
        raise Wrong(f"a false alarm: {hangs[0]['text']}")


def size(pid: int) -> tuple[float, int, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def is_flat(run: Run, rows: list[list[float]]) -> None:
    """After the first quarter, in which the heap settles, no maximum is higher in the second half than in the first,
    memory by at most 5 %. While a checkpoint is being written there may be one more file or thread.
    """
    settled = rows[len(rows) // 4 :]
    halves = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    early, late = (dict(zip(("MiB", "open files", "threads"), map(max, *half), strict=True)) for half in halves)
    run.figures |= late
    if grown := [what for what in late if late[what] > early[what] * (1.05 if what == "MiB" else 1)]:
        raise Wrong(f"{', '.join(grown)} grew: {rows}")


def as_if_nothing_had_happened(run: Run) -> None:
    """Losses, norms, weights and moments are those of an undisturbed run, to the last bit."""
    from titanmoe.checkpoint.checkpoint_folder import open_checkpoint

    calm = calm_of(run)
    if (ours := losses(run)) != (theirs := losses(calm)):
        first = next((a for a, b in zip(ours, theirs, strict=False) if a != b), None)
        raise Wrong(f"a different loss or norm: {first or f'{len(ours)} lines for {len(theirs)} steps'}")
    ours, theirs = (open_checkpoint(each.checkpoints / layout.name_of(STEPS)) for each in (run, calm))
    if ours.tensors != theirs.tensors:
        raise Wrong("the last checkpoint has different tensors")
    if odd := [name for name in theirs.tensors if not ours.read(name).equal(theirs.read(name))]:
        raise Wrong(f"{len(odd)} tensors differ in bits, among them {odd[0]}")


def calm_of(run: Run) -> Run:
    """The undisturbed run of the same mapping, made when it is first needed."""
    calm = Run(run.folder.parent / f"calm-{run.mapping}-{run.skips}")
    calm.options = TINY | MAPPINGS[run.mapping]
    if run.skips:
        calm.options |= SKIPS | {"data.skip_steps": f'["{run.skips}"]'}
    if STEPS not in layout.steps(calm.checkpoints):
        calm.start()
        calm.finish()
    return calm


def losses(run: Run) -> list[tuple[int, float, float]]:
    """Without those of a step that made no update."""
    return [(x["step"], x["loss"], x["grad_norm"]) for x in run.lines("metrics.jsonl") if x["step"] != run.skips]
