"""Checks of a trial, by the run's log, events, metrics and checkpoints; and the table of all trials.

The functions whose names begin with expect_ raise `Wrong` unless the run did what the name says; some add
what they measured to `Run.figures`.
"""

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

from scripts.torture.runs import MAPPINGS, STEPS, TIMEOUT_S, TINY, Run, Wrong, is_alive
from titanmoe.checkpoint import layout

CALM_STEPS, WINDOW = 64, 16
SKIPS = {"optimizer.skip_spikes": 6}


@dataclass
class Outcome:
    """The result of one trial, a line in the file of results."""

    kind: str
    seed: int
    under: str = ""
    """Launcher and mapping of the run."""
    failure: str = ""
    """Reason for the failure; "" if the trial passed."""
    figures: dict[str, float] = field(default_factory=dict)
    """Times and counts by what they measure, such as "seconds to resume"."""


def read(results: Path) -> list[Outcome]:
    """Read the outcomes of trials from a file of results, one JSON dict per line."""
    return [Outcome(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table of trials by kind, with median and maximum of each figure, then the failures.

    Figures that are 0 in all outcomes are left out.
    """
    figures = [figure for each in outcomes for figure in each.figures.items()]
    names = list(dict.fromkeys(name for name, value in figures if value))
    rows = [("what happened", "passed", *names), ("---",) * (2 + len(names))]
    for kind in dict.fromkeys(each.kind for each in outcomes):
        some = [each for each in outcomes if each.kind == kind]
        cells = [kind, f"{sum(not each.failure for each in some)} of {len(some)}"]
        for name in names:
            values = [each.figures[name] for each in some if name in each.figures]
            cells.append(f"{statistics.median(values):.3g} ({max(values):.3g})" if values else "")
        rows.append(tuple(cells))
    failures = [f'* "{each.kind}" --first {each.seed} --trials 1: {each.failure}' for each in outcomes if each.failure]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *([""] if failures else []), *failures]) + "\n"


# ---- what the run logged


def expect_event(run: Run, kind: str, *words: str) -> None:
    """Wait for the run's first event of a kind; raise Wrong unless its text contains all of these words."""
    run.wait(lambda: run.events(kind), "a name for what has happened", Wrong)
    run.figures["seconds until named"] = time.monotonic() - run.struck_at
    text = run.events(kind)[0]["text"]
    if missing := [word for word in words if word not in text]:
        raise Wrong(f"{', '.join(missing)} should have been named: {text}")


def expect_end_and_restart(run: Run) -> None:
    """Raise Wrong unless all ranks end in time and the report names the struck rank; then let the run start again.

    torchrun restarts the ranks by itself; `titanmoe train` is launched again. Does not wait for the end of that run.
    """
    expect_report(run)
    if run.launcher != "torchrun":
        run.start()


def expect_report(run: Run, restarted: bool | None = None) -> None:
    """Raise Wrong unless all ranks end in time and the last error line says that the struck rank is late or gone.

    Other ranks may be named beside it. In time is TIMEOUT_S + 10 seconds from `Run.record_strike`; a traceback before
    that line is wrong too.

    Args:
        run: the run, one of whose ranks was struck; gets the figure of the seconds until all had ended.
        restarted: whether the launcher restarts the ranks; None: only torchrun does.
    """
    restarted = run.launcher == "torchrun" if restarted is None else restarted
    run.wait(lambda: not any(map(is_alive, run.pids)), "the end of all ranks", None)
    took = run.figures["seconds until all had ended"] = time.monotonic() - run.struck_at
    if not restarted:
        run.wait_for_end()
    log = run.read_log()
    last = [line for line in log.splitlines() if line.startswith("error: ")][-1:]
    if not last or not re.search(rf"\brank {run.rank} (on \S+ (is late|cannot be reached), |is still )", last[0]):
        raise Wrong(f"rank {run.rank} was struck, and the last report is: {last}")
    if "Traceback" in log.partition(last[0])[0]:
        raise Wrong("a rank printed a traceback before the report")
    if took > TIMEOUT_S + 10:
        raise Wrong(f"all had ended only after {took:.1f} s")


def expect_straggler(run: Run, slow: Callable[[], tuple[list[int], str]]) -> None:
    """Raise Wrong unless one straggler event names the slowed ranks and the cause, and none comes before the fault.

    `slow` slows ranks down when it is called; it returns these ranks and the cause that should be named.
    """
    named = partial(run.events, "straggler")
    run.wait(lambda: run.step() >= CALM_STEPS, "calm")
    begin = run.figures["calm steps before"] = run.step()
    if early := named():
        raise Wrong(f"named without a fault: {early[0]['text']}")
    expected = slow()
    run.wait(named, f"a name ({expected})", Wrong)
    first = named()[0]
    if (first["ranks"], first["cause"]) != expected:
        raise Wrong(f"{expected} should have been named: {first['text']}")
    run.figures["steps until named"] = first["step"] - begin
    run.wait(lambda: run.step() > first["step"] + WINDOW, "another window", Wrong)
    if more := named()[1:]:
        raise Wrong(f"named too: {more[0]['text']}")


# ---- how it continued


def expect_resume(run: Run) -> None:
    """Wait until the run has restarted and ended; raise Wrong if it fails or steps are lost that had been saved.

    Saved steps are those at `Run.record_strike`. The figures of the run get the cost of the failure: seconds to resume,
    and steps repeated.
    """
    run.wait(lambda: len(run.start_steps()) > run.starts, "another start", Wrong)
    began = run.start_steps()[run.starts]
    run.wait(lambda: run.step() > began, "a step after the restart", Wrong)
    run.figures["seconds to resume"] = time.monotonic() - run.struck_at
    lost = run.figures["saved steps lost"] = max(0, run.saved_step - began)
    run.figures["steps repeated"] = max(0, run.last_step - began)
    if lost:
        raise Wrong(f"{lost} saved steps lost")
    run.expect_success()


def expect_no_alarm(run: Run) -> None:
    """Wait until the run has ended; raise Wrong if its exit code is not 0 or an event reports a hang."""
    run.expect_success()
    if hangs := run.events("hang"):
        raise Wrong(f"a false alarm: {hangs[0]['text']}")


def process_size(pid: int) -> tuple[float, int, int]:
    """Return the resident memory of a process in MiB, its open files and its threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def expect_no_growth(run: Run, rows: list[list[float]]) -> None:
    """Raise Wrong if memory, open files or threads grow over a long run.

    `rows` has MiB, open files and threads at each time, each of the rank that has most. The first quarter, in which the
    heap settles, is left out. Of the rest, no maximum may be higher in the second half than in the first, memory by at
    most 5 %. Maxima are compared because a checkpoint that is being written may add a file or a thread.
    """
    settled = rows[len(rows) // 4 :]
    halves = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    early, late = (dict(zip(("MiB", "open files", "threads"), map(max, *half), strict=True)) for half in halves)
    run.figures |= late
    if grown := [what for what in late if late[what] > early[what] * (1.05 if what == "MiB" else 1)]:
        raise Wrong(f"{', '.join(grown)} grew: {rows}")


def expect_bitwise_equal(run: Run) -> None:
    """Raise Wrong unless an ended run's losses, norms, weights and moments equal those of `undisturbed_run` bitwise."""
    from titanmoe.checkpoint.checkpoint_folder import Checkpoint

    undisturbed = undisturbed_run(run)
    if (ours := losses(run)) != (theirs := losses(undisturbed)):
        first = next((a for a, b in zip(ours, theirs, strict=False) if a != b), None)
        raise Wrong(f"a different loss or norm: {first or f'{len(ours)} lines for {len(theirs)} steps'}")
    ours, theirs = (Checkpoint(each.checkpoints / layout.folder_name(STEPS)) for each in (run, undisturbed))
    if ours.tensors != theirs.tensors:
        raise Wrong("the last checkpoint has different tensors")
    if odd := [name for name in theirs.tensors if not ours.read(name).equal(theirs.read(name))]:
        raise Wrong(f"{len(odd)} tensors differ in bits, among them {odd[0]}")


def undisturbed_run(run: Run) -> Run:
    """Return a finished run without faults, of the same mapping and skipped step, beside the run's folder.

    It is made unless an earlier call has made it.
    """
    calm = Run(run.folder.parent / f"calm-{run.mapping}-{run.skips}")
    calm.options = TINY | MAPPINGS[run.mapping]
    if run.skips:
        calm.options |= SKIPS | {"data.skip_steps": f'["{run.skips}"]'}
    if STEPS not in layout.checkpoints_by_step(calm.checkpoints):
        calm.start()
        calm.expect_success()
    return calm


def losses(run: Run) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of each logged step but `run.skips`."""
    return [(x["step"], x["loss"], x["grad_norm"]) for x in run.lines("metrics.jsonl") if x["step"] != run.skips]
