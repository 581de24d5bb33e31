"""The rows of results of a part of `first_light.py`, and timing functions.

A part prints its rows and writes them as one JSON list, which is rewritten after every row.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Rows:
    """Writer of the results of one part. If a check raises an error, its row is "failed", and the next check runs.

    Args:
        file: The file of the JSON list; None only prints.
        seconds: The seconds after which no further check begins: its row is "left out", and failed.
    """

    def __init__(self, file: Path | None, seconds: float = float("inf")):
        self.file, self.rows, self.began, self.seconds = file, [], time.monotonic(), seconds

    def check(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run one check, print its row and add it to the JSON file; an error that it raises makes a failed row.

        `run` returns the figures by name, and under "note" a text.
        """
        begin = time.monotonic()
        if begin - self.began > self.seconds:
            return self.record(name, False, 0.0, {}, f"left out: {self.seconds:.0f} s were over")
        try:
            figures = run()
            self.record(name, True, time.monotonic() - begin, figures, figures.pop("note", ""))
        except Exception as error:
            traceback.print_exc()
            note = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            self.record(name, False, time.monotonic() - begin, {}, note)

    def record(self, name: str, ok: bool, seconds: float, figures: dict[str, Any], note: str) -> None:
        self.rows.append({"name": name, "ok": ok, "seconds": round(seconds, 3), "figures": figures, "note": note})
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {words(figures)} {note} ({seconds:.1f} s)", flush=True)
        if self.file:
            self.file.write_text(json.dumps(self.rows, indent=1))

    def status(self) -> int:
        """Return the exit status of the script: 1 if any check failed, else 0."""
        return int(not all(row["ok"] for row in self.rows))


def words(figures: dict[str, Any]) -> str:
    """Return figures as one line of text, such as "ms 1.2, GB/s 300"."""
    return ", ".join(f"{key} {short(value)}" for key, value in figures.items())


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def median_seconds(run: Callable[[], Any], device: str, times: int = 20) -> float:
    """Return the median seconds of a call, after three untimed ones: by events on a GPU, by the clock on a CPU.

    Args:
        run: the call.
        device: "cuda" or "cpu".
        times: number of timed calls on a GPU; on a CPU there are 3.
    """
    import torch

    for _ in range(3):
        run()
    if device != "cuda":
        return sorted(elapsed(run) for _ in range(3))[1]
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) / 1e3 for begin, end in pairs)[times // 2]


def elapsed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def without_and_with_backward(
    run: Callable[[], Any], inputs: Iterable[Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two calls to time: `run` alone, and `run` with the backward that computes the gradients of `inputs`.

    Calls `run` once, for the shape of its one output.
    """
    import torch

    leaves = list(inputs)
    grad = torch.randn_like(run())

    def backward_too() -> None:
        torch.autograd.grad(run(), leaves, grad)

    return run, backward_too
