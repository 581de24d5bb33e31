"""A closer look at chosen steps: torch's profiler, which hears the step's regions, and the GPU memory's history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

if TYPE_CHECKING:
    from titanmoe.train.trainer import Trainer

HISTORY = 200_000
"""Allocations that a memory snapshot goes back."""
OPEN_TRACE = "open it at https://ui.perfetto.dev or in chrome://tracing"
OPEN_MEMORY = "open it at https://pytorch.org/memory_viz"
ROWS = 40


class Profiler:
    def __init__(self, trainer: Trainer, run: Path, tell: Callable[[int, str, str], None]):
        self.trainer, self.options, self.tell = trainer, trainer.config.profile, tell
        self.folder, self.rank = run / "profile", trainer.runtime.rank
        self.mine = self.rank in self.options.ranks
        self.remembers = self.mine and self.options.memory != "none"
        if self.remembers:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        asked = number in self.options.steps
        try:
            if asked and self.mine:
                with self._trace(number):
                    yield
            else:
                yield
        except torch.OutOfMemoryError:
            if self.remembers:
                file = self._snapshot(f"out-of-memory-step-{number}")
                print(f"out of memory: the allocations that led there are in {file}; {OPEN_MEMORY}", flush=True)
            raise
        if asked:
            self._tell(number)

    @contextmanager
    def _trace(self, number: int) -> Iterator[None]:
        on_gpu = self.trainer.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # Else it would see the thread that it begins in, and of a pair's halves only one.
        threads = _ExperimentalConfig(profile_all_threads=True) if self.trainer.engine.pairs is not None else None
        with profile(activities=kinds, record_shapes=True, experimental_config=threads) as trace:
            yield
        self.folder.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(self._file(number, "json.gz")))
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        self._file(number, "txt").write_text(
            trace.key_averages().table(sort_by=order, row_limit=ROWS), encoding="utf-8"
        )
        if self.remembers and self.options.memory == "steps":
            self._snapshot(f"step-{number}")
        self.trainer.clock.lap("other")  # the writing is no part of the step

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"step-{number}-rank-{self.rank}.{kind}"

    def _snapshot(self, name: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"{name}-rank-{self.rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
        return file

    def _tell(self, number: int) -> None:
        ranks = ", ".join(map(str, self.options.ranks))
        text = f"{self.folder}/step-{number}-rank-*.json.gz holds the trace of rank {ranks}: {OPEN_TRACE}"
        if self.options.memory == "steps":
            text += f"; beside it the memory's history (.pickle): {OPEN_MEMORY}"
        self.tell(number, "profile", text)
