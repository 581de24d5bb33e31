"""The machines of a run: which ranks share one, their heartbeats, and messages between machines.

`Machines.meet` sorts the ranks by machine and opens the heartbeats of this one. `MachineMessages` sends the watchdogs'
messages to other machines through the process group's store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanmoe.checkpoint.on_all_ranks import from_rank, on_all_ranks, raise_on_all_ranks
from titanmoe.watch.heartbeat import Heartbeat
from titanmoe.watch.late_ranks import RankStatus

SHARED = Path("/dev/shm")
"""The folder in memory where heartbeats are created."""


@dataclass
class Machines:
    """The machines of the training job in the order of their first ranks, and the heartbeats on this one."""

    own_heart: Heartbeat
    """The heartbeat of this rank."""
    local: dict[int, Heartbeat]
    """The heartbeats of all ranks of this machine, by rank."""
    number: int
    """The index of this machine."""
    ranks: list[list[int]]
    """The ranks of each machine."""
    names: list[str]
    """The host name of each machine."""
    token: str
    """A random name of this start of the training job, the same on all ranks."""

    @staticmethod
    def meet(rank: int) -> Machines:
        """Create this rank's heartbeat in shared memory, open those of the other ranks on this machine, and return all.

        Collective over the world. Afterwards the files have no names any more, so nothing is left when the ranks end.
        """
        token = from_rank(dist.group.WORLD, 0, lambda: uuid.uuid4().hex)
        try:
            folder, own_heart = _create_heartbeat(SHARED, token, rank)
        except OSError:  # there is no /dev/shm, or it is full
            folder, own_heart = _create_heartbeat(Path(tempfile.gettempdir()), token, rank)
        identities = on_all_ranks(dist.group.WORLD, lambda: (_identity(folder), socket.gethostname()))
        keys = list(dict.fromkeys(key for key, _ in identities))
        ranks = [[r for r, (key, _) in enumerate(identities) if key == machine] for machine in keys]
        number = keys.index(identities[rank][0])
        # Afterwards every rank has opened all files of its machine.
        local = raise_on_all_ranks(
            dist.group.WORLD, lambda: {r: own_heart if r == rank else Heartbeat(folder / str(r)) for r in ranks[number]}
        )
        if rank == ranks[number][0]:
            shutil.rmtree(folder, ignore_errors=True)
        return Machines(
            own_heart, local, number, ranks, [identities[machine_ranks[0]][1] for machine_ranks in ranks], token
        )


def _create_heartbeat(parent: Path, token: str, rank: int) -> tuple[Path, Heartbeat]:
    """Create this rank's heartbeat file in `parent/titanmoe-TOKEN`, the folder of the ranks that share a machine.

    Returns the folder and the heartbeat. Raises OSError if `parent` has no room; nothing is left behind.
    """
    folder = parent / f"titanmoe-{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        return folder, Heartbeat(folder / str(rank), create=True)
    except OSError:
        (folder / str(rank)).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank's file is there
            folder.rmdir()
        raise


def _identity(folder: Path) -> str:
    """Return a text that all ranks of this machine share, and no others: the content of `folder/identity`.

    The first rank creates the file. Ranks that see the same files get the same text, even if containers share a host
    name.
    """
    new_file = folder / f"{uuid.uuid4().hex}.new"
    new_file.write_text(new_file.stem)
    with contextlib.suppress(FileExistsError):
        os.link(new_file, folder / "identity")
    new_file.unlink()
    return (folder / "identity").read_text()


class MachineMessages:
    """JSON messages between watchdogs on several machines, by key, through the process group's store.

    On a single machine nothing is sent. All methods raise RuntimeError or OSError if the store is gone.
    """

    def __init__(self, machines: Machines, store: dist.Store | None = None):
        self.machines, self.store = machines, store
        if store is None and len(machines.ranks) > 1:
            # A connection of its own, because the step's may be waiting in another thread.
            self.store = dist.PrefixStore(f"watch/{machines.token}", dist.distributed_c10d._get_default_store().clone())

    def post(self, key: str, value: Any = "") -> None:
        """Store a value, which must be JSON, for all machines to read."""
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def is_posted(self, key: str) -> bool:
        return self.store is not None and self.store.check([key])

    def read(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def publish(self, key: str, statuses: list[RankStatus]) -> None:
        """Store the statuses of this machine's ranks under `key`, for the other machines to read."""
        self.post(f"{key} {self.machines.number}", [status.as_json() for status in statuses])

    def read_published(self, key: str, machine: int) -> list[RankStatus] | None:
        """Return the statuses that machine number `machine` has published under `key`; None if it has not yet."""
        name = f"{key} {machine}"
        if not self.is_posted(name):
            return None
        return [RankStatus.from_json(status) for status in self.read(name)]
