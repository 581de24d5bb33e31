"""Where the time of a step goes: a clock for every step, and torch's profiler for chosen ones.

A GPU runs behind the program, so there the clock's marks are events on its stream, which are read once the GPU has
passed them and never waited for. On a CPU a mark is simply the time. A profile has the step's regions by name, and the
history of the GPU's memory.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from titanmoe import observe
from titanmoe.config.schema import Profile
from titanmoe.observe import OTHERS_TURN, Observer
from titanmoe.train.runtime import Runtime

PARTS = {"dispatch": "dispatch", "combine": "dispatch"}
"""The regions that the clock measures, and the part that each counts towards."""


class Clock(Observer):
    """Measures the phases of a step and, in forward and backward, some regions; on the rank that reports."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self._phase: tuple[str, Any] | None = None
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._seconds: Counter[str] = Counter()
        self._begun: dict[int, tuple[str, Any]] = {}  # the part that each thread is in

    def phase(self, name: str, step: int) -> None:
        """Each phase lasts until the next, so they add up to the whole."""
        self._read()
        now = self._mark()
        if self._phase is not None:
            self._open.append((*self._phase, now))
        self._phase = name, now

    def region(self, name: str) -> AbstractContextManager[None] | None:
        if self._phase is None or self._phase[0] != "forward_backward":
            return None
        if name == OTHERS_TURN:
            return self.away()
        return self.part(PARTS[name]) if name in PARTS else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a phase that is also measured on its own; parts inside it are not."""
        me = get_ident()
        if me in self._begun:
            yield
            return
        self._begun[me] = name, self._mark()
        try:
            yield
        finally:
            self._open.append((*self._begun.pop(me), self._mark()))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Work of another thread, which does not count towards this thread's part."""
        me = get_ident()
        begun = self._begun.pop(me, None)
        if begun is None:
            yield
            return
        self._open.append((*begun, self._mark()))
        try:
            yield
        finally:
            self._begun[me] = begun[0], self._mark()

    def take(self, steps: int) -> dict[str, float]:
        """Seconds of each part, per step, since the last call `steps` steps ago, as far as the device has run."""
        self._read()
        seconds, self._seconds = self._seconds, Counter()
        return {name: total / steps for name, total in seconds.items()}

    def _read(self) -> None:
        while self._open and (not self.gpu or self._open[0][2].query()):
            name, begin, end = self._open.popleft()
            self._seconds[name] += begin.elapsed_time(end) / 1e3 if self.gpu else end - begin

    def _mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


HISTORY = 200_000
"""Number of allocations that a memory snapshot covers."""
OPEN_TRACE = "open it at https://ui.perfetto.dev or in chrome://tracing"
OPEN_MEMORY = "open it at https://pytorch.org/memory_viz"
ROWS = 40


class RegionsInTrace(observe.Observer):
    """Gives the regions of a step their names in a trace by torch's profiler."""

    def region(self, name: str) -> AbstractContextManager[None]:
        return record_function(name)


class Profiler:
    def __init__(self, options: Profile, run: Path, runtime: Runtime, all_threads: bool):
        """all_threads: whether parts of the step run in other threads, as the halves of a pair do."""
        self.options, self.device, self.all_threads = options, runtime.device, all_threads
        self.folder, self.rank = run / "profile", runtime.rank
        self.mine = self.rank in self.options.ranks
        self.records_memory = self.mine and self.options.memory != "none"
        if self.records_memory:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        chosen = number in self.options.steps
        try:
            if chosen and self.mine:
                with self._trace(number):
                    yield
            else:
                yield
        except torch.OutOfMemoryError:
            if self.records_memory:
                file = self._snapshot(f"out-of-memory-step-{number}")
                print(f"out of memory: the allocations that led there are in {file}; {OPEN_MEMORY}", flush=True)
            raise
        if chosen:
            self._report(number)

    @contextmanager
    def _trace(self, number: int) -> Iterator[None]:
        on_gpu = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        threads = _ExperimentalConfig(profile_all_threads=True) if self.all_threads else None
        tracing = profile(activities=kinds, record_shapes=True, experimental_config=threads)
        with tracing as trace, observe.listening(RegionsInTrace()):
            yield
        observe.active.phase("other", number)  # writing is not part of the step
        self.folder.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(self._file(number, "json.gz")))
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        self._file(number, "txt").write_text(
            trace.key_averages().table(sort_by=order, row_limit=ROWS), encoding="utf-8"
        )
        if self.records_memory and self.options.memory == "steps":
            self._snapshot(f"step-{number}")

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"step-{number}-rank-{self.rank}.{kind}"

    def _snapshot(self, name: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"{name}-rank-{self.rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
        return file

    def _report(self, number: int) -> None:
        ranks = ", ".join(map(str, self.options.ranks))
        text = f"{self.folder}/step-{number}-rank-*.json.gz has the trace of rank {ranks}: {OPEN_TRACE}"
        if self.options.memory == "steps":
            text += f"; next to it the memory's history (.pickle): {OPEN_MEMORY}"
        observe.active.event(number, "profile", text)
