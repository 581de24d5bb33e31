"""Which ranks share a host's memory, which rank keeps a copy for which, and sending bytes from rank to rank.

A host is a set of ranks that see the same local folder on the same machine. The ranks find out by themselves, so a
launcher may put them anywhere after a restart.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.checkpoint.together import Group, together


@dataclass(frozen=True)
class Hosts:
    folder: Path
    """The run's folder in the memory of this rank's host."""
    rank: int
    of: tuple[int, ...]
    """The host of each rank, counted from 0."""
    names: tuple[str, ...]
    """The host name of each host."""

    @property
    def mine(self) -> int:
        return self.of[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank does what only one rank of its host has to do."""
        return self.ranks(self.mine)[0] == self.rank

    def ranks(self, host: int) -> list[int]:
        return [rank for rank, its in enumerate(self.of) if its == host]

    def keeper(self, rank: int) -> int | None:
        """The rank on the next host that keeps a copy of what this rank writes; None if there is only one host."""
        if len(self.names) == 1:
            return None
        host = self.of[rank]
        peers = self.ranks((host + 1) % len(self.names))
        return peers[self.ranks(host).index(rank) % len(peers)]


def meet(root: str, name: str, group: Group) -> Hosts:
    """Makes the run's folder on each host. All ranks call it together."""
    folder = Path(os.path.expandvars(root)) / name
    found = together(group, lambda: _own(folder))
    places = list(dict.fromkeys(place for place, _ in found))
    rank = dist.get_rank(group) if group is not None else 0
    names = tuple(next(name for place, name in found if place == host) for host in places)
    hosts = Hosts(folder, rank, tuple(places.index(place) for place, _ in found), names)
    _check_apart(hosts, group)
    return hosts


def _own(folder: Path) -> tuple[Any, str]:
    """Makes a folder that no other user can read or has prepared. Returns what identifies it, and the host's name."""
    if not folder.is_absolute():
        raise CheckpointError(f"checkpoint.local_folder must be an absolute path, and is {folder.parent} here")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.local_folder: cannot write to {folder}: {error.strerror}: name another folder, or set "
            "checkpoint.local = 0 to keep no copies"
        ) from None
    found = os.lstat(folder)
    if folder.is_symlink() or found.st_uid != os.getuid():
        raise CheckpointError(f"{folder} is a link, or another user's: remove it, or set checkpoint.local_folder")
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return (machine, found.st_dev, found.st_ino), socket.gethostname()


def _check_apart(hosts: Hosts, group: Group) -> None:
    """Each host must see only its own mark; otherwise the folder is on a file system that hosts share."""
    mark = hosts.folder / f"host-{uuid.uuid4().hex}"
    marks = together(group, lambda: (mark.touch(), mark.name)[1] if hosts.leads else "")
    seen = together(group, lambda: [name for name in marks if name and (hosts.folder / name).exists()])
    together(group, lambda: mark.unlink() if hosts.leads else None)
    if any(len(some) > 1 for some in seen):
        raise CheckpointError(
            f"checkpoint.local_folder: {hosts.folder} is shared by several hosts, and would be lost with one of them: "
            "name a folder that each host has to itself"
        )


@dataclass(frozen=True)
class Parcel:
    source: int
    target: int
    bytes: int
    what: Any


def exchange(
    parcels: Iterable[Parcel],
    group: Group,
    give: Callable[[Parcel], Tensor],
    take: Callable[[Parcel, Tensor], None],
) -> None:
    """Sends each parcel, as bytes, from its source to its target. All ranks pass the same parcels in the same order,
    but may leave out those of sources that send them nothing.

    A source sends one parcel at a time. If give or take fails, the rest is still sent, so that no rank waits for ever;
    then the first error is raised.
    """
    rank, sent = dist.get_rank(group) if group is not None else 0, Counter[int]()
    turns: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        if rank in (parcel.source, parcel.target):
            turns.setdefault(sent[parcel.source], []).append(parcel)
        sent[parcel.source] += 1
    failures: list[Exception] = []

    def tried(work: Callable[..., Tensor | None], *args: Any) -> Tensor | None:
        try:
            return work(*args)
        except Exception as error:
            failures.append(error)
            return None

    for _, some in sorted(turns.items()):
        flights = []
        for parcel in some:
            if parcel.source == rank:
                found = tried(give, parcel)
                data = torch.zeros(parcel.bytes, dtype=torch.uint8) if found is None else found
                flights.append((dist.isend(data, parcel.target, group), parcel, data))
            else:
                data = torch.empty(parcel.bytes, dtype=torch.uint8)
                flights.append((dist.irecv(data, parcel.source, group), parcel, data))
        for flight, parcel, data in flights:
            flight.wait()
            if parcel.target == rank:
                tried(take, parcel, data)
    if failures:
        raise failures[0]
