"""Move a model's tensors from one mapping to another within the same world: by messages, without a file.

`Relayout` compares the shards of all ranks (`Targets`, titanmoe.checkpoint.state) once, and plans which rank sends
which block to which; `move` can then be called whenever weights have changed. In each of n rounds, an all-to-all over
the world, every pair of ranks exchanges 1/n of its bytes, and none sends or receives more than `round_bytes`. The
result equals saving under one mapping and loading under the other, to the bit.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.checkpoint.move_in_blocks import Sizes, block_slices
from titanmoe.checkpoint.state import Targets
from titanmoe.checkpoint.write_tensors import TensorShard
from titanmoe.comm.collectives import Group, gather_objects, launch_all_to_all, wait
from titanmoe.config.load import ConfigError

ROUND_BYTES = 256 << 20
"""Most bytes that a rank sends in a round, and most that it receives, if a caller names no other number."""
WORD = 8
"""Bytes of an element of a message; a multiple of every dtype's itemsize."""
PROBLEMS_SHOWN = 8
"""Most tensors that an error names."""

Region = tuple[Sizes, Sizes]
"""Offset and sizes of a block of a tensor."""
Layout = dict[tuple[str, torch.dtype, Sizes], list[Region]]
"""The regions of a rank's shards by stored name, dtype and full shape; no regions if they are empty."""


class TensorPlaces(NamedTuple):
    """The shards of a stored tensor on all ranks."""

    dtype: torch.dtype
    shape: Sizes
    ranks: dict[Region, set[int]]
    """The ranks that have each shard: several if it is replicated."""


class LocalTensors:
    """This rank's shards by stored name and region, and the device of its messages."""

    def __init__(self, shards: Iterable[tuple[str, TensorShard]]):
        """Sort shards by name and region, given as the values of `Targets`: stored names and shards."""
        self.layout: Layout = {}
        self.by_region: dict[tuple[str, Region], list[Tensor]] = {}
        """Several tensors in one region are copies of a tied weight."""
        for name, shard in shards:
            regions, region = self.layout.setdefault((name, shard.dtype, shard.shape), []), (shard.offset, shard.sizes)
            if shard.tensor.numel() and region not in regions:
                regions.append(region)
            self.by_region.setdefault((name, region), []).append(shard.tensor.detach())
        tensors = [tensor for some in self.by_region.values() for tensor in some]
        self.device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


# ---- which rank has what


def gather_places(sets: Sequence[LocalTensors], group: Group) -> list[dict[str, TensorPlaces]]:
    """Return, for each of this rank's sets of shards, those of all ranks by stored name. Collective over the group.

    All ranks pass as many sets, in the same order, such as source and destination.

    Raises:
        ConfigError: on all ranks, if ranks have the same tensor in different dtypes or shapes.
    """
    packed = [pack(tensors.layout) for tensors in sets]
    return [merge_layouts(of_rank) for of_rank in zip(*gather_objects(packed, group), strict=True)]


def pack(layout: Layout) -> bytes:
    """Return a layout as compressed JSON, equal for equal layouts in the same order."""
    rows = [
        [name, str(dtype).removeprefix("torch."), shape, regions] for (name, dtype, shape), regions in layout.items()
    ]
    return zlib.compress(json.dumps(rows).encode())


def unpack(packed: bytes) -> Layout:
    """Return the layout of a rank's shards that `pack` was given."""
    rows = json.loads(zlib.decompress(packed))
    return {
        (name, getattr(torch, dtype), tuple(shape)): [(tuple(offset), tuple(sizes)) for offset, sizes in regions]
        for name, dtype, shape, regions in rows
    }


def merge_layouts(packed: Sequence[bytes]) -> dict[str, TensorPlaces]:
    """Return the shards of all ranks by stored name, given the Layout of each rank, packed. Not collective.

    Raises:
        ConfigError: ranks have a tensor in different dtypes or full shapes.
    """
    places: dict[str, TensorPlaces] = {}
    problems = []
    for layout in dict.fromkeys(packed):
        ranks = [rank for rank, other in enumerate(packed) if other == layout]
        for (name, dtype, shape), regions in unpack(layout).items():
            tensor = places.setdefault(name, TensorPlaces(dtype, shape, {}))
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                problems.append(f"{name} is {tensor.dtype} {tensor.shape}, and on rank {ranks[0]} {dtype} {shape}")
            for region in regions:
                tensor.ranks.setdefault(region, set()).update(ranks)
    _refuse(problems)
    return places


def refuse_other_model(
    held: Mapping[str, TensorPlaces], wanted: Mapping[str, TensorPlaces], leave_out: tuple[str, ...]
) -> None:
    """Raise a ConfigError with the tensors by which the source and the destination are different models.

    Names and full shapes are compared; dtypes may differ.

    Args:
        held: the shards in the source, by stored name.
        wanted: those in the destination.
        leave_out: prefixes of stored names that the destination may lack.
    """
    _refuse(
        [
            f"{name} has shape {held[name].shape} in the source and {tensor.shape} in the destination"
            for name, tensor in wanted.items()
            if name in held and held[name].shape != tensor.shape
        ]
        + [f"the source has no {name} {tensor.shape}" for name, tensor in wanted.items() if name not in held]
        + [
            f"the destination has no {name} {tensor.shape}"
            for name, tensor in held.items()
            if name not in wanted and not name.startswith(leave_out)
        ]
    )


def _refuse(problems: list[str]) -> None:
    """Raise a ConfigError with the first 8 problems and the number of others; return if there are none."""
    if (more := len(problems) - PROBLEMS_SHOWN) > 0:
        problems = [*problems[:PROBLEMS_SHOWN], f"and {more:,} more tensors"]
    if problems:
        raise ConfigError(problems)


# ---- which rank sends what


class BlockMove(NamedTuple):
    """A block of a stored tensor that moves from a shard in the source to one in the destination."""

    name: str
    source: Region
    """The shard that it comes from."""
    destination: Region
    """The shard that it goes to."""
    region: Region
    """The elements that both have in common."""
    dtype: torch.dtype
    """Dtype in which it is sent."""

    @property
    def bytes(self) -> int:
        return prod(self.region[1]) * self.dtype.itemsize

    def source_view(self, tensors: LocalTensors) -> Tensor:
        """Return the block as a view of this rank's tensor in the source, given this rank's shards there."""
        return tensors.by_region[self.name, self.source][0][block_slices(*self.region, self.source[0])]

    def destination_views(self, tensors: LocalTensors) -> list[Tensor]:
        """Return the block as a view of each of this rank's tensors in the destination, given this rank's shards there.

        There are several for a tied weight.
        """
        slices = block_slices(*self.region, self.destination[0])
        return [tensor[slices] for tensor in tensors.by_region[self.name, self.destination]]


def overlaps(wanted: Iterable[Region], held: Iterable[Region]) -> Iterator[tuple[Region, Region, Region]]:
    """Yield (region of `wanted`, region of `held`, the region of their common elements) for each pair that has any."""
    wanted, held = list(wanted), list(held)
    if not wanted or not held:
        return
    first, second = (torch.tensor(regions, dtype=torch.int64) for regions in (wanted, held))
    starts = torch.maximum(first[:, None, 0], second[None, :, 0])
    sizes = torch.minimum(first.sum(1)[:, None], second.sum(1)[None]) - starts
    pairs = (sizes > 0).all(-1).nonzero(as_tuple=True)
    for i, j, start, size in zip(*pairs, starts[pairs].tolist(), sizes[pairs].tolist(), strict=True):
        yield wanted[i], held[j], (tuple(start), tuple(size))


class Stream:
    """The blocks that one rank sends to another, in one row of bytes that is divided into rounds."""

    def __init__(self, blocks: list[BlockMove]):
        # Wide dtypes come first, so that each block begins at a multiple of its itemsize.
        self.blocks = sorted(blocks, key=lambda block: -block.dtype.itemsize)
        self.starts = list(accumulate((block.bytes for block in self.blocks), initial=0))

    def words(self, number: int, rounds: int) -> range:
        """Return which words (8 bytes each) of the row belong to round `number` of `rounds`, counted from 0."""
        words = -(-self.starts[-1] // WORD)
        return range(words * number // rounds, words * (number + 1) // rounds)

    def round_blocks(self, message: Tensor, number: int, rounds: int) -> Iterator[tuple[BlockMove, int, Tensor]]:
        """Yield the blocks, or parts of blocks, that belong to round `number` of `rounds`, counted from 0.

        `message` has this stream's bytes of the round, uint8, in full words.

        Yields:
            The block, the row-major index in it of its first element in this round, and its elements in this round: a
                1-D view of `message` in the block's dtype.
        """
        if not (words := self.words(number, rounds)):
            return
        begin, end = words.start * WORD, min(words.stop * WORD, self.starts[-1])
        for i in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end)):
            block, start, stop = self.blocks[i], max(begin, self.starts[i]), min(end, self.starts[i + 1])
            elements = message[start - begin : stop - begin].view(block.dtype)
            yield block, (start - self.starts[i]) // block.dtype.itemsize, elements


def flat_views(x: Tensor, first: int, count: int) -> Iterator[Tensor]:
    """Yield views of x that together are `count` elements from the `first` on, in row-major order."""
    if count == x.numel():
        yield x
        return
    row = x.numel() // len(x)
    start, end = -(-first // row), (first + count) // row  # full rows
    if start > end:
        yield from flat_views(x[end], first - end * row, count)
        return
    if before := start * row - first:
        yield from flat_views(x[start - 1], row - before, before)
    if end > start:
        yield x[start:end]
    if after := first + count - end * row:
        yield from flat_views(x[end], 0, after)


def pair_views(view: Tensor, first: int, elements: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of a block, each with the elements of a message that belong to it, in the same shape.

    Args:
        view: the block.
        first: row-major index in the block of the first of the elements.
        elements: elements of the message, 1-D.
    """
    parts = list(flat_views(view, first, len(elements)))
    for part, data in zip(parts, elements.split([part.numel() for part in parts]), strict=True):
        yield part, data.view(part.shape)


class MessagePlan:
    """Plan of the copies and messages by which this rank fills a destination."""

    def __init__(
        self,
        held: Mapping[str, TensorPlaces],
        wanted: Mapping[str, TensorPlaces],
        group: Group,
        round_bytes: int = ROUND_BYTES,
    ):
        """Choose who sends each block: its receivers are dealt to its holders, first to those with the least to send.

        A rank copies what it holds itself. Nothing is communicated: all ranks come to the same choices.

        Args:
            held: the shards of all ranks in the source, by stored name.
            wanted: those in the destination, of tensors that the source has.
            group: the ranks.
            round_bytes: most bytes that a rank sends in a round, and most that it receives.

        Raises:
            ConfigError: shards of a tensor in the source overlap, or are not all of it.
        """
        self.group, self.copies = group, []
        self.sent, self.received = [0] * group.size, [0] * group.size
        """Bytes that each rank sends and receives."""
        sends: dict[int, list[BlockMove]] = {}
        receives: dict[int, list[BlockMove]] = {}
        problems = []
        for name, tensor in wanted.items():
            dtype = min(tensor.dtype, held[name].dtype, key=lambda dtype: dtype.itemsize)
            missing = {region: prod(region[1]) for region in tensor.ranks}
            for destination, source, region in overlaps(tensor.ranks, held[name].ranks):
                missing[destination] -= prod(region[1])
                block = BlockMove(name, source, destination, region, dtype)
                receivers, holders = tensor.ranks[destination], held[name].ranks[source]
                if group.rank in receivers and group.rank in holders:
                    self.copies.append(block)
                senders = sorted(holders, key=lambda rank: (self.sent[rank], rank))
                needing, size = sorted(receivers - holders), block.bytes
                for i, sender in enumerate(senders):
                    served = needing[i :: len(senders)]
                    self.sent[sender] += size * len(served)
                    if sender == group.rank:
                        for receiver in served:
                            sends.setdefault(receiver, []).append(block)
                    elif group.rank in served:
                        receives.setdefault(sender, []).append(block)
                for receiver in needing:
                    self.received[receiver] += size
            if any(missing.values()):
                problems.append(f"the shards of {name} {tensor.shape} in the source overlap, or are not all of it")
        _refuse(problems)
        self.sends = {rank: Stream(blocks) for rank, blocks in sends.items()}
        """Blocks that this rank sends, by receiver."""
        self.receives = {rank: Stream(blocks) for rank, blocks in receives.items()}
        """Blocks that this rank receives, by sender."""
        self.rounds = -(-max(self.sent + self.received) // round_bytes)

    @torch.no_grad()
    def move(self, source: LocalTensors, destination: LocalTensors, device: torch.device) -> None:
        """Fill this rank's shards of the destination in place. Collective over the group.

        Args:
            source: this rank's shards in the source.
            destination: the shards to fill.
            device: where messages are made.
        """
        for block in self.copies:
            for view in block.destination_views(destination):
                view.copy_(block.source_view(source))
        for number in range(self.rounds):
            self._round(number, source, destination, device)

    def _round(self, number: int, source: LocalTensors, destination: LocalTensors, device: torch.device) -> None:
        """Send and receive what belongs to round `number`, counted from 0. Collective over the group.

        Fills shards of the destination in place. A method, so that its messages, on `device`, are freed at its end.
        """
        send, receive = (
            [len(streams[rank].words(number, self.rounds)) if rank in streams else 0 for rank in range(self.group.size)]
            for streams in (self.sends, self.receives)
        )
        message = torch.empty(sum(send), dtype=torch.int64, device=device)
        for block, first, elements in self._round_blocks(self.sends, message, send, number):
            for part, data in pair_views(block.source_view(source), first, elements):
                data.copy_(part)
        message = wait(launch_all_to_all(message, send, receive, self.group), self.group)
        for block, first, elements in self._round_blocks(self.receives, message, receive, number):
            for view in block.destination_views(destination):
                for part, data in pair_views(view, first, elements):
                    part.copy_(data)

    def _round_blocks(
        self, streams: Mapping[int, Stream], message: Tensor, words: list[int], number: int
    ) -> Iterator[tuple[BlockMove, int, Tensor]]:
        for rank, data in enumerate(message.view(torch.uint8).split([n * WORD for n in words])):
            if rank in streams:
                yield from streams[rank].round_blocks(data, number, self.rounds)


class Relayout:
    """A planned move of a model's tensors from one mapping to another, to be made any number of times."""

    def __init__(
        self,
        source: Targets,
        destination: Targets,
        *,
        leave_out: tuple[str, ...] = (),
        round_bytes: int = ROUND_BYTES,
        group: Group | None = None,
    ):
        """Compare the shards of all ranks and plan the messages. Collective over the group.

        Args:
            source: this rank's shards in the mapping to move from (`checkpoint.state.shards_to_load`).
            destination: its shards in the mapping to move to, in other memory, of any dtype.
            leave_out: prefixes of stored names that the destination may lack, such as "model.mtp.".
            round_bytes: most bytes that a rank sends in a round, and most that it receives. A move takes twice as much
                memory, plus 8 bytes for each rank.
            group: the ranks of both mappings; None for the world.

        Raises:
            ConfigError: on all ranks, if they are not shards of one model, with the names and shapes that differ.
        """
        self.group = group or Group.of(dist.group.WORLD)
        tensors = LocalTensors(source.values()), LocalTensors(destination.values())
        held, wanted = gather_places(tensors, self.group)
        refuse_other_model(held, wanted, leave_out)
        self.plan = MessagePlan(held, wanted, self.group, round_bytes)
        self.layouts = [some.layout for some in tensors]

    def move(self, source: Targets, destination: Targets) -> None:
        """Fill the destination from the source. Collective over the group.

        The shards are those of the plan, with other contents. A destination that has run a forward without backward
        since the last move may hold gathered weights: free them before its next forward
        (`titanmoe.parallel.data_parallel.free_gathered`).

        Raises:
            ValueError: the shards have other names, shapes or dtypes than those of the plan.
        """
        tensors = LocalTensors(source.values()), LocalTensors(destination.values())
        if [some.layout for some in tensors] != self.layouts:
            raise ValueError("these are other shards than the move was planned for")
        source_device, destination_device = (some.device for some in tensors)
        self.plan.move(*tensors, destination_device if source_device == torch.device("cpu") else source_device)
