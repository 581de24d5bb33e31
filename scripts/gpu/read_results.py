"""Read the log and the JSON file of a part of first_light.py as rows of its table.

All readers take the log and the text of the JSON file, "" if there is none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from rows import words

FIGURE = re.compile(r"^\s+(Duration|Memory Throughput|Achieved Occupancy)\s+(\S+)\s+([\d.,]+)")


@dataclass
class Row:
    """A row of the table: the result of one check of a part."""

    name: str
    ok: bool
    text: str


def read_rows(log: str, results: str) -> list[Row]:
    """Return the rows in `results`, the JSON list that a part wrote by `rows.Rows`, or [] for "". `log` is not used."""
    return [
        Row(row["name"], row["ok"], f"{words(row['figures'])} {row['note']}".strip())
        for row in json.loads(results or "[]")
    ]


def read_pytest(log: str, results: str) -> list[Row]:
    """Return a failed row for each failed test in pytest's log, and the row "all" with its last line."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", log, re.MULTILINE)
    last = re.findall(r"^=*\s*(\d+ (?:passed|failed|skipped|error|deselected).*? in .*?s)", log, re.MULTILINE)
    rows = [Row(name.rpartition("/")[2], False, why[:200]) for name, why in failed]
    return [*rows, Row("all", bool(last) and not failed, last[-1] if last else "no summary of pytest")]


def read_layers(log: str, results: str) -> list[Row]:
    """Return rows for each model and side in the results of layers.py: its steps, each error, and a layer's modules.

    Errors make failed rows, "not compared" does not.
    """
    rows = []
    for row in json.loads(results or "{}").get("rows", []):
        name = f"{row['shape']} {row['side']}"
        figures = [figure(routing, row[routing]) for routing in ("balanced", "learned") if routing in row]
        peaks = [f"{row[f'{key}_GiB']:.1f} {key}" for key in ("allocated", "rehearsed") if f"{key}_GiB" in row]
        if peaks:
            figures.append(f"peak GiB {', '.join(peaks)}")
        if figures:
            rows.append(Row(name, True, "; ".join([*figures, f"{row['layers']} layers"])))
        for why in ("failed", "parts failed", "out_of_memory", "not compared"):
            if why in row:
                rows.append(Row(name, why == "not compared", f"{why}: {row[why]}"[:300]))
        parts = [part for part in row.get("parts", []) if part["of_floor"]]
        if parts:
            text = ", ".join(f"{p['part']} {p['ms']:.2f} ms ({p['of_floor']:.0%})" for p in parts)
            rows.append(Row(f"{name} parts (of their floor)", True, text))
    return rows


def figure(routing: str, of: dict[str, float]) -> str:
    """Return time, tokens per second and MFU of a step as text.

    Args:
        routing: "balanced" or "learned".
        of: the step's "s", "tokens_per_s" and "mfu", which may be None.
    """
    mfu = "" if of["mfu"] is None else f", MFU {of['mfu']:.1%}"
    return f"{routing} {of['s'] * 1e3:.1f} ms, {of['tokens_per_s']:,.0f} tokens/s{mfu}"


def read_lines(log: str, results: str) -> list[Row]:
    """Return 45 lines of the log as rows, from the headline of trace_step.py for qwen3 on, or else from the top."""
    lines = [line.strip() for line in log[max(0, log.find("qwen3, ")) :].splitlines() if line.strip()]
    return [Row(str(n), True, line[:160]) for n, line in enumerate(lines[:45], 1)]


def read_training(log: str, results: str) -> list[Row]:
    """Return a row with the last line of the log that names a step of training; a failed one if none does."""
    steps = re.findall(r"^.*\bstep \d+/.*$", log, re.MULTILINE)
    return [Row("last step", bool(steps), steps[-1].strip()[:160] if steps else "no step was reported")]


def read_sanitizer(log: str, results: str) -> list[Row]:
    """Return two rows: compute-sanitizer's verdict in the log, and pytest's "all"."""
    verdicts = re.findall(r"ERROR SUMMARY: (\d+) errors?", log)
    errors = re.findall(r"^========= (Invalid .*|.*Race.*)$", log, re.MULTILINE)[:3]
    text = f"{verdicts[-1]} errors {'; '.join(errors)}" if verdicts else "it gave no verdict"
    return [Row("memcheck", bool(verdicts) and verdicts[-1] == "0", text), *read_pytest(log, results)[-1:]]


def read_ncu(log: str, results: str) -> list[Row]:
    """Return a row for each kernel in the log of Nsight Compute; a failed one if there is none."""
    rows: list[Row] = []
    for line in log.splitlines():
        if kernel := re.match(r"^  (\w+) \(.*Context \d+", line):
            rows.append(Row(kernel[1], True, ""))
        elif rows and (figure := FIGURE.match(line)):
            rows[-1].text += f"{figure[1].lower()} {figure[3]} {figure[2]}, "
    return rows or [Row("kernels", False, "none was profiled")]
