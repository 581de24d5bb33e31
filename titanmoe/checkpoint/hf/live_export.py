"""Export a running model as full tensors in Hugging Face's names, block by block, to some of its ranks.

For whoever hands the weights on, such as to an inference engine after each step. Every tensor equals to the bit what
`titanmoe convert --to-hf` makes from a checkpoint of the run. A block is the shards of as many Hugging Face tensors as
fit in `block_bytes`, or of one; of stacked experts only the expert that a tensor is made from is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.checkpoint.hf.config_json import CONFIG
from titanmoe.checkpoint.hf.convert import check_output_folder, make_folder
from titanmoe.checkpoint.hf.export import Export, FolderPlan, plan_folder
from titanmoe.checkpoint.hf.fetch import INDEX, SINGLE
from titanmoe.checkpoint.hf.safetensors_folder import safetensors_writer
from titanmoe.checkpoint.hf.tensor_map import HfPlace, Shape
from titanmoe.checkpoint.hf.weight_sources import ExportSource, MergedWeights
from titanmoe.checkpoint.move_in_blocks import block_slices, empty
from titanmoe.checkpoint.on_all_ranks import raise_on_all_ranks
from titanmoe.checkpoint.read_adapters import MODEL, Adapters
from titanmoe.checkpoint.relayout import ROUND_BYTES, LocalTensors, MessagePlan, Region, TensorPlaces, gather_places
from titanmoe.checkpoint.state import Targets
from titanmoe.checkpoint.write_tensors import LazyTensor, TensorShard
from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Config, LoRA, Model
from titanmoe.models.lora_spec import adapter_names, is_adapter

Regions = dict[tuple[str, Region], torch.dtype]
"""Blocks of our tensors, and the dtype in which each is gathered."""


class GatheredWeights:
    """The blocks of a model's weights that are gathered on this rank, by our names."""

    def __init__(self, model: Model, tensors: dict[str, tuple[Shape, torch.dtype]]):
        self.model, self.tensors = model, tensors
        self.blocks: dict[str, list[TensorShard]] = {}

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a view of a block of a tensor; raise KeyError unless it lies within one block gathered on this rank.

        Args:
            name: our name of the tensor.
            offset: where the block begins in the full tensor.
            shape: the block's shape.
        """
        for shard in self.blocks[name]:
            ends = zip(offset, shape, shard.offset, shard.sizes, strict=True)
            if all(begin <= first and first + n <= begin + size for first, n, begin, size in ends):
                return shard.tensor[block_slices(offset, shape, shard.offset)]
        raise KeyError(f"{name}: {shape} at {offset} is not gathered")


class HFBlock(NamedTuple):
    """Hugging Face tensors that are made together, and the blocks of our tensors to gather for them first."""

    names: list[str]
    regions: Regions
    plan: MessagePlan


class LiveExport:
    """A planned export of a running model as full Hugging Face tensors, to be made any number of times."""

    def __init__(
        self,
        source: Targets,
        model: Model,
        *,
        merge: LoRA | None = None,
        ranks: Collection[int] | None = (0,),
        dtype: torch.dtype | None = None,
        block_bytes: int = ROUND_BYTES,
        group: Group | None = None,
        carried: Mapping[str, Path] = MappingProxyType({}),
        seq_len: int = Config().training.seq_len,
    ):
        """Compare the shards of all ranks and plan the messages. Collective over the group.

        A rank that gets tensors needs memory for a block and one tensor; every rank needs `block_bytes` for what it
        sends and as much for what it receives.

        Args:
            source: this rank's shards (`checkpoint.state.shards_to_load`).
            model: the recipe's [model].
            merge: the recipe's [lora], to merge adapters into their matrices; None leaves adapters out.
            ranks: the ranks of the group that get the tensors; None for all.
            dtype: dtype of the tensors, selection biases apart; None for the weights' own.
            block_bytes: most bytes of a block, unless a single tensor is larger, and of a message.
            group: the ranks that hold the model; None for the world.
            carried: config and tokenizer files by name, for `write_hf_folder`.
            seq_len: sequence length of training, in tokens, for its config.json.

        Raises:
            ConfigError: on all ranks, if these are not the model's weights, or transformers cannot represent it.
        """
        self.group = group or Group.of(dist.group.WORLD)
        everyone = range(self.group.size)
        self.ranks, self.block_bytes = everyone if ranks is None else ranks, block_bytes
        local = LocalTensors(source.values())
        self.layout = local.layout
        (self.held,) = gather_places([local], self.group)
        stored = {name.removeprefix(MODEL): (held.shape, held.dtype) for name, held in self.held.items()}
        weights = {name: size for name, size in stored.items() if not is_adapter(name)}
        self.gathered = self.weights = GatheredWeights(model, weights)
        self.matrices: set[str] = set()
        if merge is not None:
            pairs = {
                name: LazyTensor(*size, partial(self.gathered.read, name))
                for name, size in stored.items()
                if is_adapter(name)
            }
            self.weights = MergedWeights(
                Adapters(path=Path("the model"), model=model, lora=merge, tensors=pairs), self.gathered, ""
            )
            self.matrices = self.weights.matrices
        self.export = Export(ExportSource(self.weights, dict(carried), seq_len), Path("the model"), dtype)
        # Biases that transformers has no place for: all ranks check them, so that all raise the same error.
        homeless = [name for name, places in self.export.map.places.items() if not places]
        self.biases = self._plan([], {(name, self._region(name)): stored[name][1] for name in homeless}, everyone)
        self.blocks = list(self._split())

    def tensors(self, source: Targets) -> Iterator[tuple[str, Tensor | None]]:
        """Yield name and tensor of each Hugging Face tensor; None on ranks that do not get it.

        Collective over the group: all ranks get the same names in the same order, and have to go on to the end. Tensors
        are on the device of the shards, in memory of their own.

        Args:
            source: the shards that were planned for, with whatever they contain now.

        Raises:
            ConfigError: on all ranks, if a selection bias has an effect that transformers cannot represent.
            ValueError: if the shards have other names, shapes or dtypes than those that were planned for.
        """
        local = LocalTensors(source.values())
        if local.layout != self.layout:
            raise ValueError("these are other shards than the export was planned for")
        self._gather(local, self.biases, True)
        self.export.check_biases()
        receives = self.group.rank in self.ranks
        for block in self.blocks:
            self._gather(local, block, receives)
            for name in block.names:
                shape, _ = self.export.sizes[name]
                yield name, self.export.make(name, (0,) * len(shape), shape, local.device) if receives else None
        self.gathered.blocks = {}

    def _split(self) -> Iterator[HFBlock]:
        """Split the export into blocks of Hugging Face tensors whose sources take at most `block_bytes`; yield them."""
        names: list[str] = []
        regions: Regions = {}
        room = self.block_bytes
        for name, places in self.export.map.parts.items():
            more = {key: dtype for place in places for key, dtype in self._regions(place).items() if key not in regions}
            needed = sum(prod(sizes) * dtype.itemsize for (_, (_, sizes)), dtype in more.items())
            if needed > room and names:
                yield self._plan(names, regions, self.ranks)
                names, regions, room = [], {}, self.block_bytes
            names.append(name)
            regions |= more
            room -= needed
        yield self._plan(names, regions, self.ranks)

    def _regions(self, place: HfPlace) -> Regions:
        """Return which blocks of our tensors a Hugging Face tensor, or a slice of it, is made from.

        Returns:
            The dtype to gather each block in, by (our name, (offset, shape)). Adapters that are merged are included.
        """
        if place.our_name not in self.matrices:
            return {(place.our_name, self._region(place.our_name, place.expert)): self.export.sizes[place.hf_name][1]}
        # Adapters are merged into what is stored, and the sum is rounded.
        names = place.our_name, *adapter_names(place.our_name)
        return {(name, self._region(name, place.expert)): self.held[MODEL + name].dtype for name in names}

    def _region(self, name: str, expert: int | None = None) -> Region:
        """Return offset and sizes of a full tensor of ours or, with `expert`, of that expert in it."""
        shape = self.held[MODEL + name].shape
        if expert is None:
            return (0,) * len(shape), shape
        return (expert, *[0] * (len(shape) - 1)), (1, *shape[1:])

    def _plan(self, names: list[str], regions: Regions, ranks: Collection[int]) -> HFBlock:
        """Plan the messages that bring `regions` to `ranks`. Nothing is sent, and `names` are only stored."""
        wanted: dict[str, TensorPlaces] = {}
        for (name, region), dtype in regions.items():
            shape = self.held[MODEL + name].shape
            wanted.setdefault(MODEL + name, TensorPlaces(dtype, shape, {})).ranks[region] = set(ranks)
        return HFBlock(names, regions, MessagePlan(self.held, wanted, self.group, self.block_bytes))

    def _gather(self, source: LocalTensors, block: HFBlock, receives: bool) -> None:
        """Replace `gathered.blocks` by the sources of one block on ranks that receive tensors, and by {} on others.

        `receives` says which this rank is; `source` has its shards of the model. Collective over the group.
        """
        self.gathered.blocks = {}
        for (name, (offset, sizes)), dtype in block.regions.items() if receives else ():
            shard = TensorShard(empty(sizes, dtype, source.device), offset, self.held[MODEL + name].shape)
            self.gathered.blocks.setdefault(name, []).append(shard)
        shards = [(MODEL + name, shard) for name, some in self.gathered.blocks.items() for shard in some]
        block.plan.move(source, LocalTensors(shards), source.device)


def write_hf_folder(
    export: LiveExport, source: Targets, out: Path, shard_bytes: int, group: object, card: str = ""
) -> None:
    """Write a running model to a Hugging Face folder, from the first rank. Collective over the world.

    Args:
        export: a plan whose tensors go to the first rank alone.
        source: the shards that were planned for.
        out: the folder to make, or to replace if it is of that kind.
        shard_bytes: most bytes of a safetensors file.
        group: a process group of CPU tensors of all ranks; None for a single rank.
        card: text of the model card; "" for none.

    Raises:
        ConfigError: on all ranks, if the model cannot be exported or the folder cannot be written.
    """

    def plan_first() -> FolderPlan | None:
        if export.group.rank:
            return None
        check_output_folder(out, True, (CONFIG, SINGLE, INDEX))
        return plan_folder(export.export, shard_bytes, None)._replace(card=card)

    plan = raise_on_all_ranks(group, plan_first)

    def write(unfinished: Path) -> None:
        tensors = export.tensors(source)
        try:
            for file, contents in plan.files.items() if plan else ():
                with safetensors_writer(unfinished / file, contents) as write_tensor:
                    for _, (name, tensor) in zip(contents, tensors, strict=False):
                        write_tensor(name, [tensor.cpu()])
        finally:
            for _ in tensors:  # the other ranks go on to the end, whatever happened to the files
                pass

    make_folder(out, write, plan.complete if plan else lambda unfinished: None, group)
