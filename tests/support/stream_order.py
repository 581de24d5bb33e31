"""Races between streams: which accesses to memory nothing orders, by vector clocks.

An actor is the host, a stream, or the messages of a process group. Each counts its operations, and knows for every
other actor how many of its operations are over. What is launched comes after everything that the host knows of.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titanmoe.rehearse.code_site import CodeSites

HOST = "the host"
SUPPORT = os.path.dirname(__file__) + os.sep
TESTS = os.path.dirname(os.path.dirname(__file__)) + os.sep
Clocks = dict[Hashable, int]
"""By actor, how many of its operations are over."""


@dataclass
class Access:
    actor: Hashable
    number: int
    place: str
    writes: bool = False
    begin: int = 0
    end: int = 0
    """Bytes of the storage."""


@dataclass
class Storage:
    owner: Hashable
    """The actor that was current when it was allocated: its memory goes to that actor's next allocation."""
    accesses: list[Access] = field(default_factory=list)
    """Those that a later one has to be ordered with."""
    users: dict[Hashable, Access] = field(default_factory=dict)
    """The latest of each actor."""
    before: list[tuple[str, Access]] = field(default_factory=list)
    """Where memory that this may be was freed, and a use of it that may not be over; until this is used."""
    recorded: set[Hashable] = field(default_factory=set)


class StreamOrder:
    def __init__(self) -> None:
        self.clocks: dict[Hashable, Clocks] = {HOST: {}}
        self.storages: dict[int, Storage] = {}
        self.freed: dict[Hashable, list[tuple[str, Access]]] = {}
        """By owner, where memory was freed and a use of it that another actor may not have ended."""
        self.races: list[str] = []
        self.sites = CodeSites({})

    def reached(self, actor: Hashable) -> Clocks:
        """What is over once the actor gets to here."""
        return dict(self._clocks(actor))

    def join(self, actor: Hashable, other: Clocks) -> None:
        """The actor goes on once all that is over."""
        mine = self._clocks(actor)
        for name, number in other.items():
            mine[name] = max(mine.get(name, 0), number)

    def _clocks(self, actor: Hashable) -> Clocks:
        return self.clocks.setdefault(actor, {})

    # ---- memory

    def allocate(self, storage: torch.UntypedStorage, owner: Hashable, forget: Callable[[int], None]) -> None:
        key = storage._cdata
        if key not in self.storages:
            weakref.finalize(storage, self._gone, key, forget)
        clocks = self._clocks(owner)
        self.freed[owner] = [(place, use) for place, use in self.freed.get(owner, ()) if not self._over(use, clocks)]
        self.storages[key] = Storage(owner, before=self.freed[owner])

    def _gone(self, key: int, forget: Callable[[int], None]) -> None:
        self.free(key)
        del self.storages[key]
        forget(key)

    def free(self, key: int) -> None:
        """The owner's next allocation may be this memory, although another actor may still use it."""
        storage = self.storages[key]
        if storage.owner == HOST:  # torch keeps page-locked memory until copies from and to it are over
            return
        others = [use for actor, use in storage.users.items() if actor not in (storage.owner, *storage.recorded)]
        if others:
            place = self.place()
            self.freed[storage.owner] = self.freed.get(storage.owner, []) + [(place, use) for use in others]

    def record_stream(self, key: int, actor: Hashable) -> None:
        self.storages[key].recorded.add(actor)

    # ---- operations

    def launch(self, actor: Hashable, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        self.join(actor, self.clocks[HOST])
        self.access(actor, reads, writes)

    def access(self, actor: Hashable, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        clocks = self._clocks(actor)
        number, place = clocks.get(actor, 0) + 1, self.place()
        clocks[actor] = number
        for x, is_write in [*((x, False) for x in reads), *((x, True) for x in writes)]:
            if x.numel() and not x.is_meta and (storage := self.storages.get(x.untyped_storage()._cdata)) is not None:
                self._check(storage, Access(actor, number, place, is_write, *span(x)), clocks)

    def _check(self, storage: Storage, now: Access, clocks: Clocks) -> None:
        for freed, use in storage.before:
            if not self._over(use, clocks):
                self._race(f"{use.place} uses what is freed at {freed} and may be given to {now.place}")
        storage.before, kept = [], []
        for old in storage.accesses:
            apart = old.end <= now.begin or now.end <= old.begin
            if not apart and (old.writes or now.writes) and not self._over(old, clocks):
                does, then = "writes" if old.writes else "reads", "overwrites" if now.writes else "reads"
                self._race(f"{old.place} {does} what {now.place} {then}")
            covered = now.begin <= old.begin and old.end <= now.end
            if not (covered and (now.writes or (old.actor == now.actor and not old.writes))):
                kept.append(old)
        storage.accesses = [*kept, now]
        storage.users[now.actor] = now

    def _over(self, access: Access, clocks: Clocks) -> bool:
        return access.number <= clocks.get(access.actor, 0)

    def _race(self, text: str) -> None:
        if text not in self.races:
            self.races.append(text)

    def place(self) -> str:
        """The line of titanmoe, else of a test."""
        site = self.sites.current_site()
        if site.line:
            return f"{site}" + f" ({site.region})" * bool(site.region)
        frame = sys._getframe(1)
        while frame is not None and (TESTS not in frame.f_code.co_filename or SUPPORT in frame.f_code.co_filename):
            frame = frame.f_back
        return "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def span(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage between its first and its last element."""
    begin = x.storage_offset()
    end = begin + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin * x.element_size(), end * x.element_size()
