"""Console output of a run, on rank 0: on a terminal a live panel, elsewhere one line per report.

`titanmoe.train.metrics` prints the header and opens the console as a ReportTarget.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from titanmoe.checkpoint.choose_checkpoint import checkpoints_folder
from titanmoe.config.schema import Checkpoint
from titanmoe.files import format_bytes
from titanmoe.train.report_targets import Report, ReportTarget

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 48
"""Number of reports in the panel's loss curve."""
UNPRINTED_EVENTS = ("start", "restart", "data", "save", "stop")
"""Kinds of events that are not printed, because the header, the reports or the error say the same."""


class ConsoleSettings(NamedTuple):
    """Settings of the recipe that the console shows beside a step's metrics."""

    steps: int
    compiles: bool
    force_balance: bool


def open_console(style: str, run: ConsoleSettings, name: str, console: Console | None = None) -> ReportTarget:
    """Return the console output of a run: a live panel, or a printer of lines.

    The panel is drawn at once, until it is closed.

    Args:
        style: metrics.console: "live", "lines", or "auto" for the panel on a terminal that can show it.
        console: rich's console to draw the panel on; None makes one of standard output.
    """
    console = console or Console(highlight=False)
    if style == "live" or (style == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LivePanel(run, name, console)
    return LineConsole(run)


def judged_metric(record: Mapping[str, float]) -> tuple[str, float]:
    """Return the metric by which a run is judged, of a step's metrics: ("reward", its value), else ("loss", its value).

    The reward's name in `record` is "rl.reward".
    """
    return ("reward", record["rl.reward"]) if "rl.reward" in record else ("loss", record["loss"])


FORMATS = {
    "grad_norm": ("grad norm", "{:.3f}"),
    "lr": ("lr", "{:.2e}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "memory_gib": ("memory", "{:.2f} GiB"),
    "preference.accuracy": ("accuracy", "{:.1%}"),
    "imbalance": ("imbalance", "{:.2f}"),
    "dropped_fraction": ("dropped", "{:.1%}"),
    "rl.length": ("length", "{:.1f}"),
    "val_reward": ("val reward", "{:.4f}"),
}
"""Label and format of metrics on the console, by the name in metrics.jsonl, in the order in which they are shown."""


def format_metrics(record: dict[str, float]) -> dict[str, str]:
    """Return what the console shows of a line of metrics.jsonl, as text by label, such as {"tokens/s": "12,345"}.

    The loss, or the reward instead of it, comes first; then the metrics of FORMATS that the line has, without
    dropped tokens if there are none, and those of validation and quizzes, of which the accuracy alone.
    """
    name, value = judged_metric(record)
    shown = {name: f"{value:.4f}"}
    for name, (label, text) in FORMATS.items():
        if name in record and (record[name] or name != "dropped_fraction"):
            shown[label] = text.format(record[name])
    if "val_loss" in record:
        best = "the best" if record["val_loss"] == record["val_best"] else f"best {record['val_best']:.4f}"
        shown["val loss"] = f"{record['val_loss']:.4f} ({best})"
    if (value := record.get("val_perplexity")) is not None:
        shown["perplexity"] = f"{value:.2f}" if value < 1e6 else f"{value:.2e}"
    if "preference.val_accuracy" in record:
        shown["val accuracy"] = f"{record['preference.val_accuracy']:.1%}"
    for name, value in record.items():
        if name.startswith("quiz.") and name.endswith(".accuracy"):
            shown[name.split(".", 1)[1].removesuffix(".accuracy")] = f"{value:.1%} right"
    return shown


def format_rl_seconds(record: dict[str, float]) -> dict[str, str]:
    """Return the seconds of a step of [rl] as text, such as "2.1 s", by "generate", "rewards" and "learn".

    {} for other runs. A step that learns from completions of an earlier step has "learn" alone. `record` is a line of
    metrics.jsonl.
    """
    if "rl.reward" not in record:
        return {}
    seconds = {"learn": record.get("time.forward_backward", 0.0) + record.get("time.optimizer", 0.0)}
    if "time.generate" in record:
        seconds = {"generate": record["time.generate"], "rewards": record.get("time.reward", 0.0)} | seconds
    return {name: f"{value:.1f} s" for name, value in seconds.items()}


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class LineConsole:
    """ReportTarget that prints one line per report or event."""

    def __init__(self, run: ConsoleSettings):
        self.run = run

    def log(self, report: Report) -> None:
        steps = self.run.steps
        parts = [f"step {report.step:>{len(str(steps))}}/{steps}"]
        for name, value in (format_metrics(report.record) | format_rl_seconds(report.record)).items():
            parts.append(f"{value} {name}" if name == "tokens/s" else f"{name} {value}")
        if self.run.force_balance:
            parts.append("FORCED BALANCE")
        if report.wrong:
            parts.append("LOSS TOO HIGH")
        if report.eta is not None:
            parts.append(f"ETA {format_duration(report.eta)}")
        print("  ".join(parts), flush=True)
        if report.eta is None:
            seconds = report.record["step_time_s"]
            what = "including start-up and compilation; the ETA counts from the next step"
            print(f"first step took {seconds:.1f} s, {what}", flush=True)

    def event(self, step: int, kind: str, text: str) -> None:
        if kind not in UNPRINTED_EVENTS:
            print(f"step {step}  {kind.upper()}: {text}", flush=True)

    def close(self) -> None:
        pass


class LivePanel:
    """ReportTarget that redraws a panel in place on the terminal.

    Other output appears above it, and it remains at the end.
    """

    def __init__(self, run: ConsoleSettings, name: str, console: Console):
        self.run, self.name, self.console = run, name, console
        self.losses: deque[float] = deque(maxlen=CURVE)
        self.held_out = ""
        """Text of the last validation loss, with perplexity or accuracy if it has one, shown until the next."""
        what = "compiling and making the first step" if run.compiles else "making the first step"
        self.live = Live(Spinner("dots", f"{what} ..."), console=console, refresh_per_second=2)
        self.live.start()
        console.show_cursor(True)  # Live hides it, and a killed run could not restore it

    def log(self, report: Report) -> None:
        self.losses.append(judged_metric(report.record)[1])
        self.live.update(self.panel(report))

    def event(self, step: int, kind: str, text: str) -> None:
        if kind not in UNPRINTED_EVENTS:
            style = "bold red" if kind == "divergence" else "bold"
            self.live.console.print(Text.assemble((f"step {step}  {kind}: ", style), text))

    def close(self) -> None:
        self.live.stop()

    def panel(self, report: Report) -> Panel:
        """Return the panel for a report: progress, metrics, loss curve, fractions of the step's time, warnings.

        It shows the last validation until the next, and stores its text in `held_out`. The curve is that of `losses`.
        """
        steps, record = self.run.steps, report.record
        eta = "ETA ..." if report.eta is None else f"ETA {format_duration(report.eta)}"
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_row(
            Text(f"step {report.step:,} of {steps:,}", "bold"),
            ProgressBar(steps, report.step),
            Text(f"{report.step / steps:.0%}  {eta}", "bold"),
        )
        cells = format_metrics(record)
        if "imbalance" in record and record["imbalance"] > 2:
            cells["imbalance"] = f"[yellow]{cells['imbalance']}[/]"
        name, _ = judged_metric(record)
        if report.wrong:
            cells[name] = f"[bold red]{cells[name]}[/]"
        cells = {name: cells.pop(name), "smoothed": f"{report.smoothed:.4f}", **cells}
        if "val loss" in cells:
            others = [f"{name} {cells.pop(name)}" for name in ("perplexity", "val accuracy") if name in cells]
            self.held_out = "  ".join([cells.pop("val loss"), *others, f"at step {report.step:,}"])
        names, values = Table.grid(expand=True), list(cells)
        half = -(-len(values) // 2)
        for _ in range(half):
            names.add_column(ratio=1)
        for row in (values[:half], values[half:]):
            names.add_row(*(f"[dim]{name}[/] {cells[name]}" for name in row))
        lines = [head, names, Text.assemble((f"{name} ", "dim"), draw_curve(self.losses))]
        if self.held_out:
            lines.append(Text.assemble(("val loss ", "dim"), self.held_out))
        if times := format_phases(record):
            lines.append(Text.assemble(("time ", "dim"), times))
        if self.run.force_balance:
            lines.append(Text("FORCED BALANCE: a benchmark, the router is ignored", "bold yellow"))
        if report.wrong:
            lines.append(Text(report.wrong, "bold red"))
        border = "red" if report.wrong else "dim"
        return Panel(Group(*lines), title=self.name, title_align="left", border_style=border)


def draw_curve(values: deque[float]) -> str:
    """Return a sparkline: a block character per value, scaled to their range, and a space where one is not finite."""
    finite = list(filter(math.isfinite, values))
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def format_phases(record: dict[str, float]) -> str:
    """Return the phases in a line of metrics.jsonl with the percentage of the step's time that each takes, as text.

    Phases below 0.5 % are left out. The time of dispatch is part of that of forward and backward, and is shown in
    parentheses after it.
    """
    phases = {name.removeprefix("time."): value for name, value in record.items() if name.startswith("time.")}
    dispatch, total = phases.pop("dispatch", 0.0), sum(phases.values())
    shown = []
    for name, value in phases.items():
        inside = f" (dispatch {dispatch / total:.0%})" if name == "forward_backward" and dispatch else ""
        if value >= 0.005 * total:
            shown.append(f"{name.replace('_', '-')} {value / total:.0%}{inside}")
    return "  ".join(shown)


def print_header(rows: dict[str, str | Text]) -> None:
    """Print the settings of a run, texts by label, as a table."""
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text, overflow="fold") if isinstance(text, str) else text)
    Console(highlight=False).print(table)


def describe_saving(options: Checkpoint, each: int, run: Path) -> Text:
    """Return text on when and where the run saves, for the header; red if nothing is saved or the disk lacks room.

    Args:
        each: bytes of one checkpoint.
    """
    if not options.enable:
        return Text("saves nothing (checkpoint.enable = false)", "bold red", overflow="fold")
    folder = checkpoints_folder(run, options)
    when = f"every {options.interval:,} steps and at the end" if options.interval else "at the end"
    more = f", every {options.keep_every:,}th step" * bool(options.keep_every)
    more += f" and the best by {options.keep_best}" * bool(options.keep_best)
    retention = f"the last {options.keep_last}{more} kept" if options.keep_last else "all kept"
    text = Text(f"saves {when} to {folder} ({retention}, about {format_bytes(each)} each)", overflow="fold")
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(folder).free) < each:
            text.append(f": only {format_bytes(free)} are free there", "bold red")
    return text


def format_mapping(axes: dict[str, int]) -> str:
    """Return the axes with more than one rank as text, such as "dp_shard 4 x tp 2"; "one rank" if there is none."""
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"


class RankPrefixed:
    """Text stream that writes the rank before each line; for standard output and errors of ranks other than 0."""

    def __init__(self, stream: TextIO, rank: int):
        self.stream, self.mark, self.open = stream, f"[rank {rank}] ", False

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.stream.write(line if self.open else self.mark + line)
            self.open = not line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def prefix_output_with_rank(rank: int) -> None:
    """Put "[rank N] " before every line that this process prints, unless it is rank 0.

    Replaces sys.stdout and sys.stderr.
    """
    if rank:
        sys.stdout, sys.stderr = RankPrefixed(sys.stdout, rank), RankPrefixed(sys.stderr, rank)
