"""Local copies: every few steps the state of a run goes into the memory of its hosts, in case one of them is lost.

    /dev/shm/titanmoe-UID-RUN-DIGEST/            on each host
        step-00000120.TOKEN/                     a set: the files of a checkpoint, spread over the hosts
            rank-00003-000.distcp                written by a rank of this host
            rank-00007-000.distcp                copied from a rank of the previous host
            tensors.json, manifest.json          on every host

The manifest is written when every other file is complete on every host. So a set counts as soon as one host has its
manifest, and it is complete as long as each file is on some host. TOKEN names the start of the run that made the set
(ledger.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanmoe.checkpoint import layout, ledger
from titanmoe.checkpoint.disk import Doing
from titanmoe.checkpoint.folder import write_pieces
from titanmoe.checkpoint.hosts import Parcel, exchange, meet
from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.checkpoint.manifest import Manifest, Sum
from titanmoe.checkpoint.scattered import Scattered
from titanmoe.checkpoint.tensors import TENSORS
from titanmoe.checkpoint.together import Group, from_rank, together
from titanmoe.checkpoint.write_tensors import NotFinite, Pieces, Writer
from titanmoe.config.schema import Config

CHUNK = 1 << 24
"""Bytes of a message between hosts."""
MEMORY = Path("/dev/shm")


class Local:
    """The sets of a run. All ranks make, find and remove them together."""

    def __init__(self, folder: Path, run: Path, config: Config, group: Group, say: Callable[[str], None]):
        """folder: where the run's checkpoints are. group: for CPU tensors."""
        self.shared, self.group, self.say = folder, group, say
        self.root, self.global_batch_size = config.checkpoint.local_folder, config.training.global_batch_size
        self.hosts = meet(self.root, from_rank(group, 0, lambda: _name(run)), group)
        self.first = self.hosts.rank == 0
        self.start = from_rank(group, 0, lambda: uuid.uuid4().hex)
        self.number = from_rank(group, 0, lambda: layout.next_number(folder))
        """The number of the next checkpoint. A local set is newer than all checkpoints before it, and newer than that
        one only if it has the later step."""
        self.kept = ""
        """The set that a restart would go back to. All others are removed to make room."""
        self.made = 0

    # ---- making

    def target(self, step: int) -> Path:
        return self.hosts.folder / f"{layout.name_of(step)}.{self.start}"

    def save(self, step: int, pieces: Pieces, record: dict[str, Any], doing: Doing) -> None:
        """Called in the saver's thread. A set that cannot be made does not end the run, unless it is the first: then
        there is no room for any."""
        try:
            self._save(self.target(step), step, pieces, record, doing)
        except NotFinite:
            raise
        except CheckpointError as error:
            if not self.made:
                raise
            self._say(f"no local copies of step {step}: {error}")
            together(self.group, lambda: self._remove_others() if self.hosts.leads else None)
            return
        self.made += 1

    def _save(self, target: Path, step: int, pieces: Pieces, record: dict[str, Any], doing: Doing) -> None:
        hosts, group = self.hosts, self.group
        free = together(group, lambda: doing(f"making {target}", self._begin, target) if hosts.leads else 0)
        writer = Writer(target, doing, finite=True, room=lambda needs: self._check_room(needs, free))
        write_pieces(writer, target, pieces, group)
        tables = from_rank(group, 0, lambda: layout.content(target, TENSORS, writer.sums[TENSORS]))
        sums = together(group, lambda: {name: s for name, s in writer.sums.items() if name != TENSORS})
        together(group, lambda: doing(f"copying {target} to another host", self._copy, target, sums))

        def complete() -> Sum:
            # Checking the keeper's copy also checks the file that it was copied from.
            alone = hosts.keeper(hosts.rank) is None
            for rank in [hosts.rank] if alone else [r for r in range(len(sums)) if hosts.keeper(r) == hosts.rank]:
                layout.require(target, sums[rank])
            if hosts.leads and not self.first:
                (target / TENSORS).write_bytes(tables)
            return writer.sums.get(TENSORS)

        found = together(group, lambda: doing(f"reading back {target}", complete))
        files = {name: s for theirs in sums for name, s in theirs.items()} | {TENSORS: found[0]}
        text = from_rank(group, 0, lambda: Manifest(step, self.number, files, record).text())
        together(group, lambda: layout.seal(target, text) if hosts.leads else None)
        if not self.made:
            entry = ledger.LocalRecord(self.start, self.global_batch_size)
            together(group, lambda: ledger.write(self.shared, entry) if self.first else None)
        self.kept = target.name
        together(group, lambda: self._remove_others() if hosts.leads else None)

    def _begin(self, target: Path) -> int:
        """How many bytes this host has for two sets: what is free now, and what the present set occupies."""
        self._remove_others()
        target.mkdir()
        held = sum(file.stat().st_size for file in (self.hosts.folder / (self.kept or target.name)).glob("*"))
        return _free(self.hosts.folder) + held

    def _remove_others(self) -> None:
        for name in os.listdir(self.hosts.folder):
            if name != self.kept and (left := layout.erase(self.hosts.folder / name)):
                raise CheckpointError("; ".join(left))

    def _check_room(self, needs: list[int], free: list[int]) -> None:
        """needs: the bytes that each rank writes. There are two sets at a time: the newest complete one and the one
        being written. Only the first set of a start is checked: the others have the same size."""
        if self.made:
            return
        hosts, short = self.hosts, []
        keepers = [hosts.keeper(rank) for rank in range(len(needs))]
        for host, name in enumerate(hosts.names):
            mine = sum(needs[rank] for rank in hosts.ranks(host))
            copies = sum(needs[rank] for rank, keeper in enumerate(keepers) if keeper in hosts.ranks(host))
            has = free[hosts.ranks(host)[0]]
            if has < 2 * (mine + copies):
                short.append(
                    f"{name} has {has:,} bytes free in {self.root} and needs {2 * (mine + copies):,}: twice the "
                    f"{mine:,} of its own ranks plus the {copies:,} it keeps for another host"
                )
        if short:
            raise CheckpointError(
                f"no room for local copies: {'; '.join(short)}. Enlarge it (mount -o remount,size=..., or docker run "
                "--shm-size), set checkpoint.local_folder to a local disk, or checkpoint.local = 0"
            )

    def _copy(self, target: Path, sums: list[dict[str, Sum]]) -> None:
        hosts = self.hosts

        def parcels() -> Iterator[Parcel]:
            for source, files in enumerate(sums):
                keeper = hosts.keeper(source)
                if keeper is not None and hosts.rank in (source, keeper):
                    for name in sorted(files):
                        for start in range(0, files[name].bytes, CHUNK):
                            yield Parcel(source, keeper, min(CHUNK, files[name].bytes - start), (name, start))

        def give(parcel: Parcel) -> Tensor:
            name, start = parcel.what
            with open(target / name, "rb") as stream:
                stream.seek(start)
                return torch.frombuffer(bytearray(stream.read(parcel.bytes)), dtype=torch.uint8)

        def take(parcel: Parcel, data: Tensor) -> None:
            with open(target / parcel.what[0], "ab") as stream:
                stream.write(data.numpy())

        exchange(parcels(), self.group, give, take)

    # ---- finding

    def newest(self, verify: bool) -> Scattered | None:
        """The newest complete set of the start that the ledger names."""
        try:
            entry = from_rank(self.group, 0, lambda: ledger.read(self.shared))
        except CheckpointError as error:
            self._say(f"local copies cannot be used: {error}")
            return None
        held = together(self.group, lambda: self._held(entry.start) if entry and self.hosts.leads else {})
        sets = {name: layout.step_of(Path(name)) for theirs in held for name in theirs}
        for name in sorted(sets, key=sets.__getitem__, reverse=True):
            holders = [rank for rank, theirs in enumerate(held) if layout.MANIFEST in theirs.get(name, ())]
            found, why = None, "no host has its manifest" if not holders else ""
            for holder in holders:
                try:
                    found = self._open(name, holder, verify)
                    break
                except CheckpointError as error:
                    why = str(error)
            if found is not None:
                self.kept = name
                return found
            self._say(f"passing over the local copies of step {sets[name]}: {why}")
        if entry:
            self._say(f"no local copies are left in {self.hosts.folder} on this host or any other of this start")
        return None

    def _say(self, line: str) -> None:
        if self.first:
            self.say(f"checkpoint: {line}")

    def _held(self, start: str) -> dict[str, set[str]]:
        """The files of each set on this host."""
        sets = [path for path in self.hosts.folder.iterdir() if path.name.endswith(f".{start}")]
        return {path.name: set(os.listdir(path)) for path in sets}

    def _open(self, name: str, holder: int, verify: bool) -> Scattered:
        """Raises CheckpointError on all ranks if the set is not complete."""
        path, hosts = self.hosts.folder / name, self.hosts

        def described() -> tuple[Manifest, bytes]:
            manifest = layout.read_manifest(path)
            return manifest, layout.content(path, TENSORS, manifest.files[TENSORS])

        manifest, tables = from_rank(self.group, holder, described)
        names = [name for name in sorted(manifest.files) if name != TENSORS]

        def whole() -> list[str]:
            here, mates = [name for name in names if (path / name).exists()], hosts.ranks(hosts.mine)
            mine = here[mates.index(hosts.rank) :: len(mates)]
            return [name for name in mine if not layout.damage_of(path, name, manifest.files[name], verify)]

        where: dict[str, set[int]] = {name: set() for name in names}
        for rank, some in enumerate(together(self.group, whole)):
            for file in some:
                where[file].add(hosts.of[rank])
        if gone := [name for name, on in where.items() if not on]:
            raise CheckpointError(f"no host has an intact copy of {', '.join(gone[:8])}")
        return Scattered(path, manifest, tables, where, hosts, self.group)

    def clear(self) -> None:
        """Remove all copies: the run has ended and is saved."""
        together(self.group, lambda: (self.shared / ledger.NAME).unlink(missing_ok=True) if self.first else None)
        together(self.group, lambda: shutil.rmtree(self.hosts.folder, ignore_errors=True) if self.hosts.leads else None)


def _name(run: Path) -> str:
    """A name that is the same at every start of the run, and that no other run has."""
    return f"titanmoe-{os.getuid()}-{run.name}-{hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]}"


def _free(folder: Path) -> int:
    """Bytes free in a folder. Shared memory also needs free memory, of which the machine may have less."""
    free = shutil.disk_usage(folder).free
    if MEMORY.exists() and os.stat(folder).st_dev == os.stat(MEMORY).st_dev:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = min(free, int(lines["MemAvailable"].split()[0]) << 10)
    return free
