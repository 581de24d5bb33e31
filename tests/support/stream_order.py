"""Finds races between streams: accesses to memory that nothing orders, by vector clocks.

An actor is the host, a stream, or the collectives of a process group. Each counts its operations, and knows of every
other actor how many operations are over. A launched operation comes after all that the host knows to be over.
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
"""Number of operations that are over, by actor."""


@dataclass
class Access:
    """Access of an actor's operation to bytes of a storage."""

    actor: Hashable
    number: int
    place: str
    writes: bool = False
    begin: int = 0
    end: int = 0
    """First byte after the access; `begin` is its first byte in the storage."""


@dataclass
class Storage:
    """Accesses to a storage so far."""

    owner: Hashable
    """Actor that was current at the allocation; freed memory goes to the same actor's next allocation."""
    accesses: list[Access] = field(default_factory=list)
    """Accesses that a later one must be ordered with."""
    users: dict[Hashable, Access] = field(default_factory=dict)
    """Latest access of each actor."""
    before: list[tuple[str, Access]] = field(default_factory=list)
    """Uses, perhaps not over, of freed memory that this storage may have got, with the place where it was freed."""
    recorded: set[Hashable] = field(default_factory=set)
    """Actors given to record_stream."""


class StreamOrder:
    """Recorder of accesses to memory, and of the races among them."""

    def __init__(self) -> None:
        self.clocks: dict[Hashable, Clocks] = {HOST: {}}
        self.storages: dict[int, Storage] = {}
        self.freed: dict[Hashable, list[tuple[str, Access]]] = {}
        """By owner, places where memory was freed, with a use of it by another actor that may not be over."""
        self.races: list[str] = []
        self.sites = CodeSites({})

    def reached(self, actor: Hashable) -> Clocks:
        """Return the operations of all actors that are over when the actor has done all its operations so far."""
        return dict(self._clocks(actor))

    def join(self, actor: Hashable, other: Clocks) -> None:
        """Let the actor wait for operations of others, those in `other`, such as what `reached` returned."""
        mine = self._clocks(actor)
        for name, number in other.items():
            mine[name] = max(mine.get(name, 0), number)

    def _clocks(self, actor: Hashable) -> Clocks:
        return self.clocks.setdefault(actor, {})

    # ---- memory

    def allocate(self, storage: torch.UntypedStorage, owner: Hashable, forget: Callable[[int], None]) -> None:
        """Record a new storage, perhaps in memory that `owner` has freed; `forget` gets its _cdata once it is freed."""
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
        """Record that a storage's memory may go to its owner's next allocation, though another actor may use it.

        The host's memory is left out.
        """
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
                self._check(storage, Access(actor, number, place, is_write, *byte_range(x)), clocks)

    def _check(self, storage: Storage, now: Access, clocks: Clocks) -> None:
        for freed, use in storage.before:
            if not self._over(use, clocks):
                self._race(f"{use.place} uses what is freed at {freed} and may be given to {now.place}")
        storage.before, still_relevant = [], []
        for old in storage.accesses:
            apart = old.end <= now.begin or now.end <= old.begin
            if not apart and (old.writes or now.writes) and not self._over(old, clocks):
                does, then = "writes" if old.writes else "reads", "overwrites" if now.writes else "reads"
                self._race(f"{old.place} {does} what {now.place} {then}")
            covered = now.begin <= old.begin and old.end <= now.end
            if not (covered and (now.writes or (old.actor == now.actor and not old.writes))):
                still_relevant.append(old)
        storage.accesses = [*still_relevant, now]
        storage.users[now.actor] = now

    def _over(self, access: Access, clocks: Clocks) -> bool:
        return access.number <= clocks.get(access.actor, 0)

    def _race(self, text: str) -> None:
        if text not in self.races:
            self.races.append(text)

    def place(self) -> str:
        """Return the current line of titanmoe, or else of a test, as "FILE:LINE"; "?" if there is neither.

        A line of titanmoe is followed by the region of the step in parentheses, if it is in one.
        """
        site = self.sites.current_site()
        if site.line:
            return f"{site}" + f" ({site.region})" * bool(site.region)
        frame = sys._getframe(1)
        while frame is not None and (TESTS not in frame.f_code.co_filename or SUPPORT in frame.f_code.co_filename):
            frame = frame.f_back
        return "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def byte_range(x: Tensor) -> tuple[int, int]:
    """Return the first byte of the tensor in its storage and the byte after its last."""
    begin = x.storage_offset()
    end = begin + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin * x.element_size(), end * x.element_size()
