"""Which ranks share a machine, and what machines tell each other."""

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

from titanmoe.watch.heartbeat import Heartbeat
from titanmoe.watch.late_ranks import RankStatus

SHARED = Path("/dev/shm")


@dataclass
class Machines:
    """All machines of the run, ordered by their first ranks."""

    own_heart: Heartbeat
    local: dict[int, Heartbeat]
    """Of all ranks of this machine, by rank."""
    number: int
    """The index of this machine."""
    ranks: list[list[int]]
    """The ranks of each machine."""
    names: list[str]
    token: str

    @staticmethod
    def meet(rank: int, world: int) -> Machines:
        """All ranks call it together."""
        box: list[Any] = [uuid.uuid4().hex]
        dist.broadcast_object_list(box, 0)
        token = box[0]
        try:
            folder, own_heart = _create_heartbeat(SHARED, token, rank)
        except OSError:  # there is no /dev/shm, or it is full
            folder, own_heart = _create_heartbeat(Path(tempfile.gettempdir()), token, rank)
        identities: list[Any] = [None] * world
        dist.all_gather_object(identities, (_identity(folder), socket.gethostname()))
        keys = list(dict.fromkeys(key for key, _ in identities))
        ranks = [[r for r, (key, _) in enumerate(identities) if key == machine] for machine in keys]
        number = keys.index(identities[rank][0])
        local = {r: own_heart if r == rank else Heartbeat(folder / str(r)) for r in ranks[number]}
        dist.all_gather_object(
            identities, identities[rank]
        )  # after this, every rank has opened all files of its machine
        if rank == ranks[number][0]:
            shutil.rmtree(folder, ignore_errors=True)
        return Machines(
            own_heart, local, number, ranks, [identities[machine_ranks[0]][1] for machine_ranks in ranks], token
        )


def _create_heartbeat(parent: Path, token: str, rank: int) -> tuple[Path, Heartbeat]:
    folder = parent / f"titanmoe-{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        return folder, Heartbeat(folder / str(rank), create=True)
    except OSError:  # it is full: leave nothing there
        (folder / str(rank)).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank's file is there
            folder.rmdir()
        raise


def _identity(folder: Path) -> str:
    """Create `folder/identity` unless another rank has, and return its text.

    Ranks that see the same files have the same, even if host names or the disks of containers are equal elsewhere.
    """
    new_file = folder / f"{uuid.uuid4().hex}.new"
    new_file.write_text(new_file.stem)
    with contextlib.suppress(FileExistsError):
        os.link(new_file, folder / "identity")
    new_file.unlink()
    return (folder / "identity").read_text()


class MachineMessages:
    """Messages between machines through the process group's store; none if there is only one machine."""

    def __init__(self, machines: Machines, store: dist.Store | None = None):
        self.machines, self.store = machines, store
        if store is None and len(machines.ranks) > 1:
            # On its own connection: another thread may be waiting on the step's.
            self.store = dist.PrefixStore(f"watch/{machines.token}", dist.distributed_c10d._get_default_store().clone())

    def post(self, key: str, value: Any = "") -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def is_posted(self, key: str) -> bool:
        return self.store is not None and self.store.check([key])

    def read(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def publish(self, key: str, statuses: list[RankStatus]) -> None:
        """Publish what is known of this machine's ranks."""
        self.post(f"{key} {self.machines.number}", [status.as_json() for status in statuses])

    def read_published(self, key: str, host: int) -> list[RankStatus] | None:
        name = f"{key} {host}"
        if not self.is_posted(name):
            return None
        return [RankStatus.from_json(status) for status in self.read(name)]
