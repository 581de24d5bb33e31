"""Measures the time of a step: a clock of its phases in every step, and torch's profiler in chosen steps ([profile]).

On a GPU the clock records CUDA events on the current stream and reads them once the GPU has passed them, without
waiting. On a CPU it reads the time. A profile names the step's regions, and may have the history of the GPU's memory.
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

MEASURED_REGIONS = {"dispatch": "dispatch", "combine": "dispatch"}
"""Regions of forward and backward that the clock measures, and the metric time.* that each is added to."""


class Clock(Observer):
    """Clock of a step on the rank that reports: seconds of its phases, and of dispatch in forward and backward.

    An observer: it hears when phases and regions begin.
    """

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self._phase: tuple[str, Any] | None = None
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._seconds: Counter[str] = Counter()
        self._begun: dict[int, tuple[str, Any]] = {}
        """Measured region that each thread is in, and the mark of its begin."""

    def phase(self, name: str, step: int) -> None:
        """Begin a phase of the step, such as "optimizer", and end the one before, so that phases add up to the step."""
        self._read()
        now = self._mark()
        if self._phase is not None:
            self._open.append((*self._phase, now))
        self._phase = name, now

    def region(self, name: str) -> AbstractContextManager[None] | None:
        """Return a context that measures a region of forward and backward.

        For OTHERS_TURN it pauses the clock instead. None in any other phase, and for a name not in MEASURED_REGIONS.
        """
        if self._phase is None or self._phase[0] != "forward_backward":
            return None
        if name == OTHERS_TURN:
            return self.pause()
        return self.measure(MEASURED_REGIONS[name]) if name in MEASURED_REGIONS else None

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of this context's body to the metric time.NAME.

        Within another such context of this thread it does nothing: the time belongs to the outer one.
        """
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
    def pause(self) -> Iterator[None]:
        """Stop the clock of this thread's region (such as "dispatch") in this context, while another thread works."""
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
        """Return and reset mean seconds per step by phase or region, of the `steps` steps since the last call.

        The phase that still runs, and intervals that a GPU has not completed yet, are included in a later call.
        """
        self._read()
        seconds, self._seconds = self._seconds, Counter()
        return {name: total / steps for name, total in seconds.items()}

    def _read(self) -> None:
        """Add the seconds of all intervals that the device has completed to the sums by phase and region."""
        while self._open and (not self.gpu or self._open[0][2].query()):
            name, begin, end = self._open.popleft()
            self._seconds[name] += begin.elapsed_time(end) / 1e3 if self.gpu else end - begin

    def _mark(self) -> float | torch.cuda.Event:
        """Return the present time: in seconds on a CPU; on a GPU an event recorded on the current stream."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


SNAPSHOT_ALLOCATIONS = 200_000
"""Number of allocations that a memory snapshot covers."""
OPEN_TRACE = "open it at https://ui.perfetto.dev or in chrome://tracing"
OPEN_MEMORY = "open it at https://pytorch.org/memory_viz"
TABLE_ROWS = 40
"""Number of operations in a profile's table."""


class RegionsInTrace(observe.Observer):
    """Observer that gives the regions of a step their names in a trace of torch's profiler."""

    def region(self, name: str) -> AbstractContextManager[None]:
        return record_function(name)


class Profiler:
    """Profiler of the steps and ranks that the recipe's [profile] names."""

    def __init__(self, options: Profile, run: Path, runtime: Runtime, all_threads: bool):
        """Start to record the history of GPU memory, if the recipe asks for it.

        Args:
            all_threads: whether the step runs in several threads, as with moe.overlap = "pairs".
        """
        self.options, self.device, self.all_threads = options, runtime.device, all_threads
        self.folder, self.rank = run / "profile", runtime.rank
        self.mine = self.rank in self.options.ranks
        self.records_memory = self.mine and self.options.memory != "none"
        if self.records_memory:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ALLOCATIONS)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the step made in this context if the recipe's [profile] names it and this rank.

        The trace, a table of operations, and with profile.memory = "steps" the GPU memory's history are written to the
        folder `profile` of the run's folder; an event names them. If the GPU's memory runs out in any step and its
        history is recorded, write that before the error is raised again.
        """
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
            trace.key_averages().table(sort_by=order, row_limit=TABLE_ROWS), encoding="utf-8"
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
