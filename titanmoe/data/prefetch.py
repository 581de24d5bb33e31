"""Items read before they are asked for: by a thread of this process, or by worker processes (torchdata).

torchdata's own state counts per worker, so a run could only resume with the same number; ours travels with each item.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import warnings
from collections.abc import Generator, Iterator
from typing import Any

from titanmoe.config import ConfigError


class Prefetcher:
    def __init__(self, reader: Any, plans: Any, workers: int, depth: int):
        """reader[plan] makes an item; depth: how many are read ahead, by each worker."""
        self._items: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(1 if workers else depth)
        self._stop = threading.Event()
        self._peeked: list[Any] = []
        items = _worker_items(reader, plans, workers, depth) if workers else (reader[plan] for plan in plans)
        self._thread = threading.Thread(
            target=_feed, args=([items], self._items, self._room, self._stop), name="titanmoe-data", daemon=True
        )
        self._thread.start()

    def peek(self) -> Any:
        if not self._peeked:
            item = self._items.get()
            if isinstance(item, BaseException):
                self._items.put(item)
                raise item
            self._peeked.append(item)
        return self._peeked[0]

    def next(self) -> Any:
        item = self.peek()
        self._peeked.clear()
        self._room.release()
        return item

    def close(self) -> None:
        """Also ends the workers."""
        self._stop.set()
        self._room.release()
        self._thread.join()


def _worker_items(reader: Any, plans: Any, workers: int, depth: int) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13
        # Forked, so that memory is shared and memory-mapped files stay open.
        loader = StatefulDataLoader(
            _ErrorsAsItems(reader),
            batch_size=None,
            sampler=plans,
            num_workers=workers,
            prefetch_factor=depth,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_rank_signals,
            multiprocessing_context="fork",
        )
        return iter(loader)


class _ErrorsAsItems:
    """A refusal is an item like any other: torch would make a new one of it, of the text of a traceback."""

    def __init__(self, reader: Any):
        self.reader = reader

    def __getitem__(self, plan: Any) -> Any:
        try:
            return self.reader[plan]
        except ConfigError as error:
            return error


def _ignore_rank_signals(_: int) -> None:
    """Ctrl-C and torchrun signal the rank's whole process group; the rank saves first, and needs its workers for
    that."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the rank's own handler


def _unchanged(item: Any) -> Any:
    return item


def _feed(box: list[Iterator[Any]], items: queue.SimpleQueue, room: threading.Semaphore, stop: threading.Event) -> None:
    source = box.pop()  # the only reference: workers end with this function
    try:
        while True:
            room.acquire()
            if stop.is_set():
                return
            item = next(source)
            if isinstance(item, ConfigError):
                raise item
            items.put(item)
    except BaseException as error:
        # A worker's error carries its traceback as text; this one's frames would keep the workers alive.
        items.put(error if isinstance(source, Generator) else error.with_traceback(None))
