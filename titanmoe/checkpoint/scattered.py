"""A checkpoint whose files are spread over hosts: ranks read what their host has, and other ranks send them the
rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from titanmoe.checkpoint import inside
from titanmoe.checkpoint.folder import Checkpoint, Wanted
from titanmoe.checkpoint.hosts import Hosts, Parcel, exchange
from titanmoe.checkpoint.manifest import Manifest
from titanmoe.checkpoint.tensors import Box, Extent, from_json, load, shared, within
from titanmoe.checkpoint.together import Group, together
from titanmoe.checkpoint.write_tensors import Piece


@dataclass(frozen=True)
class Ask:
    """A request for part of a block that is on another host."""

    name: str
    offset: tuple[int, ...]
    """Where the block begins in its tensor."""
    box: Box
    server: int
    """The rank that is asked."""


class Scattered(Checkpoint):
    """Open for reading; all ranks read it together."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        tables: bytes,
        where: Mapping[str, set[int]],
        hosts: Hosts,
        group: Group,
    ):
        """where: the hosts that have each file."""
        self.path, self.manifest, self.record = path, manifest, manifest.record
        self.where, self.hosts, self.group = where, hosts, group
        self.written = from_json(tables, manifest.files)

    def fill(self, targets: Mapping[str, tuple[str, Piece]]) -> None:
        hosts = self.hosts
        here: Wanted = {}
        asks: list[Ask] = []
        pieces: list[Piece] = []

        def sort_out() -> list[Ask]:
            for turn, (file, blocks) in enumerate(sorted(self.wanted(targets).items())):
                if hosts.mine in self.where[file]:
                    here[file] = blocks
                    continue
                servers = [rank for host in sorted(self.where[file]) for rank in hosts.ranks(host)]
                for block, some in sorted(blocks.items(), key=lambda item: item[0].start):
                    for name, piece in some:
                        box = shared(block, piece.offset, piece.sizes)
                        asks.append(Ask(name, block.offset, box, servers[(hosts.rank + turn) % len(servers)]))
                        pieces.append(piece)
            return asks

        asked = together(self.group, sort_out)
        last: dict[Extent, Tensor] = {}

        def give(parcel: Parcel) -> Tensor:
            ask = parcel.what[1]
            stored = self.written[ask.name]
            block = next(block for block in stored.blocks if block.offset == ask.offset)
            if block not in last:
                last.clear()
                with inside.opened(self.path, block.file) as stream:
                    last[block] = load(block, stored.dtype, stream)
            return last[block][within(ask.box, block.offset)].contiguous().view(-1).view(torch.uint8)

        def take(parcel: Parcel, data: Tensor) -> None:
            number, ask = parcel.what
            tensor = data.view(self.written[ask.name].dtype).view([last - first for first, last in ask.box])
            pieces[number].tensor.detach()[within(ask.box, pieces[number].offset)].copy_(tensor)

        def parcels() -> Iterator[Parcel]:
            for target, some in enumerate(asked):
                for number, ask in enumerate(some):
                    size = prod(last - first for first, last in ask.box) * self.written[ask.name].dtype.itemsize
                    yield Parcel(ask.server, target, size, (number, ask))

        exchange(parcels(), self.group, give, take)
        self.read_files(here)
