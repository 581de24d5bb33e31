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
from titanmoe.watch.late_ranks import Seen

SHARED = Path("/dev/shm")


@dataclass
class Machines:
    """All machines of the run, ordered by their first ranks."""

    mine: Heartbeat
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
            folder, mine = _begin(SHARED, token, rank)
        except OSError:  # there is no /dev/shm, or it is full
            folder, mine = _begin(Path(tempfile.gettempdir()), token, rank)
        found: list[Any] = [None] * world
        dist.all_gather_object(found, (_identity(folder), socket.gethostname()))
        keys = list(dict.fromkeys(key for key, _ in found))
        ranks = [[r for r, (key, _) in enumerate(found) if key == one] for one in keys]
        number = keys.index(found[rank][0])
        local = {r: mine if r == rank else Heartbeat(folder / str(r)) for r in ranks[number]}
        dist.all_gather_object(found, found[rank])  # after this, every rank has opened all files of its machine
        if rank == ranks[number][0]:
            shutil.rmtree(folder, ignore_errors=True)
        return Machines(mine, local, number, ranks, [found[some[0]][1] for some in ranks], token)


def _begin(where: Path, token: str, rank: int) -> tuple[Path, Heartbeat]:
    folder = where / f"titanmoe-{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder, Heartbeat(folder / str(rank), create=True)


def _identity(folder: Path) -> str:
    """The same for all ranks that see the same files. Neither host names nor container disks need differ."""
    draft = folder / f"{uuid.uuid4().hex}.new"
    draft.write_text(draft.stem)
    with contextlib.suppress(FileExistsError):
        os.link(draft, folder / "identity")
    return (folder / "identity").read_text()


class Between:
    """Messages between machines through the process group's store; none if there is only one machine."""

    def __init__(self, hosts: Machines, store: dist.Store | None = None):
        self.hosts, self.store = hosts, store
        if store is None and len(hosts.ranks) > 1:
            # On its own connection: another thread may be waiting on the step's.
            self.store = dist.PrefixStore(f"watch/{hosts.token}", dist.distributed_c10d._get_default_store().clone())

    def post(self, what: str, value: Any = "") -> None:
        if self.store is not None:
            self.store.set(what, json.dumps(value))

    def posted(self, what: str) -> bool:
        return self.store is not None and self.store.check([what])

    def read(self, what: str) -> Any:
        return json.loads(self.store.get(what))

    def publish(self, what: str, seen: list[Seen]) -> None:
        """Publish what is known of this machine's ranks."""
        self.post(f"{what} {self.hosts.number}", [one.as_json() for one in seen])

    def published(self, what: str, host: int) -> list[Seen] | None:
        name = f"{what} {host}"
        if not self.posted(name):
            return None
        return [Seen.from_json(one) for one in self.read(name)]
