"""A closer look at chosen steps: torch's profiler, with the step's regions by name, and the GPU memory's history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from titanmoe import observe
from titanmoe.config.schema import Profile
from titanmoe.train.runtime import Runtime

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
