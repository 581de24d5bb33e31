"""The processes that tokenize the units of a text, each fed by a thread, and the display of their progress.

`titanmoe.data.tokenize` calls `run_workers` with the units that are left to do; a process runs
`titanmoe.data.tokenize_unit`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import titanmoe
from titanmoe.config import ConfigError
from titanmoe.data.record_reader import Span
from titanmoe.data.tokenize_unit import TokenizeJob


def run_workers(
    job: TokenizeJob, todo: list[tuple[int, list[Span], list[dict[str, Any]]]], workers: int, meter: ProgressMeter
) -> None:
    """Tokenize units in processes, each fed by a thread, until none are left. Ends all processes.

    Args:
        job: the options.
        todo: number, spans and records of finished shards of each unit.
        workers: largest number of processes.
        meter: shows the progress.

    Raises:
        ConfigError: a process reports a problem, or has died.
    """
    waiting, processes = deque(todo), []
    responses: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threads = []
    try:
        for _ in range(min(workers, len(todo))):
            processes.append(_start_worker(job))
            threads.append(threading.Thread(target=_feed_worker, args=(processes[-1], waiting, responses), daemon=True))
            threads[-1].start()
        running = len(threads)
        while running:
            try:
                response = responses.get(timeout=0.5)
            except queue.Empty:
                meter.show()
                continue
            if response is None:
                running -= 1
            elif "problems" in response:
                raise ConfigError(response["problems"])
            elif "at" in response:
                meter.add(*response["at"])
    finally:
        waiting.clear()
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()


def _start_worker(job: TokenizeJob) -> subprocess.Popen[str]:
    """Start a process that tokenizes units, in a session that Ctrl-C does not reach; send it the job, and return it."""
    # Not multiprocessing: its processes import the parent's main module, which in a training run is the trainer.
    home = str(Path(titanmoe.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "titanmoe.data.tokenize_unit"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # Ctrl-C is for the parent
    )
    process.stdin.write(json.dumps(asdict(job)) + "\n")
    return process


def _feed_worker(
    process: subprocess.Popen[str], waiting: deque[Any], responses: queue.Queue[dict[str, Any] | None]
) -> None:
    """Send units to a process until none are left, and put its responses into the queue; None at the end.

    Args:
        process: the process.
        waiting: number, spans and records of finished shards of each unit that no process has; shared by all threads.
        responses: receives each response of the process; {"problems": [...]} if it dies.
    """
    file = ""
    try:
        with process:
            while waiting:
                try:
                    number, unit, records = waiting.popleft()
                except IndexError:
                    break
                file = unit[0].file
                items = records[-1]["items"] if records else 0
                spans = [list(vars(span).values()) for span in unit]
                request = {"unit": number, "shard": len(records), "items": items, "spans": spans}
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    if not line.endswith("\n"):  # the process was killed while it wrote the line
                        raise EOFError
                    response = json.loads(line)
                    responses.put(response)
                    if "at" not in response:
                        break
                else:
                    raise EOFError
                if "problems" in response:
                    return
            process.stdin.close()
            process.wait()
    except (EOFError, BrokenPipeError):
        code = process.wait()
        why = (
            f"was killed by signal {-code} (too little memory? use fewer workers)" if code < 0 else "failed, see above"
        )
        responses.put(
            {"problems": [f"the process at {file} {why}: the same command resumes from the last finished shard"]}
        )
    finally:
        responses.put(None)


class ProgressMeter:
    """Progress display of a tokenization: a bar on a terminal, otherwise a line every half minute.

    Args:
        total: bytes of the input.
        done: bytes that earlier commands tokenized.
        log: receives the lines.
    """

    def __init__(self, total: int, done: int, log: Callable[[str], None]):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self.total, self.done_at_start, self.done, self.tokens, self.log = total, done, done, 0, log
        self.started = self.shown_at = time.monotonic()
        console = Console(stderr=True)
        self._bar = None
        if console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, completed=done, rate="")

    def __enter__(self) -> ProgressMeter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def rate(self) -> float:
        """Tokens per second since this command started."""
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    def add(self, size: int, tokens: int) -> None:
        """Add input that is done, in bytes, and the tokens that it gave, and show the progress."""
        self.done += size
        self.tokens += tokens
        self.show()

    def show(self) -> None:
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self.done, rate=f"{self.rate / 1e6:.2f} M tokens/s")
        elif now - self.shown_at >= 30:
            self.shown_at = now
            seconds_left = (self.total - self.done) * (now - self.started) / max(self.done - self.done_at_start, 1)
            self.log(
                f"{self.done / self.total:.1%} of {self.total / 1e9:.2f} GB, {self.rate / 1e6:.2f} M tokens/s, "
                f"about {seconds_left / 60:.0f} min to go"
            )
