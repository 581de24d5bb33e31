"""Prefetching of items, in a thread of this process or in worker processes (torchdata).

torchdata counts its state per worker, so a run could only resume with the same number of workers. Here each item
carries the state of the loader after it instead.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from titanmoe.config import ConfigError


class Prefetcher:
    """A queue of items that are made ahead of time, in order, for one consumer.

    Args:
        reader: object whose `reader[plan]` makes an item.
        plans: iterable of plans; advanced ahead of the items, always in this process.
        workers: number of worker processes; 0 for a thread.
        depth: items to make ahead, per worker.
    """

    def __init__(self, reader: Any, plans: Iterable[Any], workers: int, depth: int):
        self._items: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(1 if workers else depth)
        self._stop = threading.Event()
        self._peeked: list[Any] = []
        items = _worker_items(reader, plans, workers, depth) if workers else (reader[plan] for plan in plans)
        self._thread = threading.Thread(
            target=_feed_queue, args=([items], self._items, self._room, self._stop), name="titanmoe-data", daemon=True
        )
        self._thread.start()

    def peek(self) -> Any:
        """Return the next item without removing it, once it is made.

        Raises:
            StopIteration: there are no more items.
            Exception: the error of making it, again on every call.
        """
        if not self._peeked:
            item = self._items.get()
            if isinstance(item, BaseException):
                self._items.put(item)
                raise item
            self._peeked.append(item)
        return self._peeked[0]

    def next(self) -> Any:
        """Remove and return the next item, once it is made.

        Raises:
            StopIteration: there are no more items.
            Exception: the error of making it, again on every call.
        """
        item = self.peek()
        self._peeked.clear()
        self._room.release()
        return item

    def close(self) -> None:
        """Stop making items, and wait until the thread has ended. Afterwards `next` would wait for ever."""
        self._stop.set()
        self._room.release()
        self._thread.join()


def _worker_items(reader: Any, plans: Iterable[Any], workers: int, depth: int) -> Iterator[Any]:
    """Start worker processes, and return an iterator over the items that they make of all plans, in order.

    A ConfigError is an item, not raised.

    Args:
        reader: object whose `reader[plan]` makes an item.
        plans: the plans, which this process iterates.
        workers: number of processes, at least 1.
        depth: items that each process makes ahead.
    """
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
            collate_fn=lambda item: item,
            worker_init_fn=_ignore_rank_signals,
            multiprocessing_context="fork",
        )
        return iter(loader)


class _ErrorsAsItems:
    """Reader that returns a ConfigError as an item instead of raising it.

    In a worker torch would raise another error, with the text of the traceback.
    """

    def __init__(self, reader: Any):
        self.reader = reader

    def __getitem__(self, plan: Any) -> Any:
        try:
            return self.reader[plan]
        except ConfigError as error:
            return error


def _ignore_rank_signals(_: int) -> None:
    """Put a worker process in a session of its own, ignore SIGINT in it, and let SIGTERM end it.

    Ctrl-C and torchrun signal the rank's whole process group, but the rank needs its workers to save before it ends.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # instead of the rank's handler, which it inherits


def _feed_queue(
    source_holder: list[Iterator[Any]], items: queue.SimpleQueue, room: threading.Semaphore, stop: threading.Event
) -> None:
    """Put items into the queue while there is room, until `stop` is set. Runs in the thread.

    If the items end or one fails, the last item in the queue is the exception: StopIteration, or the error.

    Args:
        source_holder: list with the iterator over items, which is removed so that no other reference keeps workers
            alive.
        items: the queue.
        room: semaphore of free places; the reader releases it after each item, and after setting `stop`.
        stop: set to end.
    """
    source = source_holder.pop()  # the only reference: workers end with this function
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
        # A worker's error has its traceback as text; the frames of this one would keep the workers alive.
        items.put(error if isinstance(source, Generator) else error.with_traceback(None))
