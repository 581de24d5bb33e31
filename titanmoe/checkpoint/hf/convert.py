"""Between folders of Hugging Face's and checkpoints of ours: a few tensors in memory at a time, on one rank or many."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import titanmoe
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.folder import Checkpoint, Group, Lazy, open_checkpoint, together, write_checkpoint
from titanmoe.checkpoint.hf import config as configs
from titanmoe.checkpoint.hf.files import INDEX, SINGLE, Tensors, companions, index, nbytes, shards, write_file
from titanmoe.checkpoint.hf.maps import BIAS, Map, Shape
from titanmoe.checkpoint.layout import CheckpointError
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Model
from titanmoe.models.families import HUGGING_FACE

MODEL = "model."
PARTIAL = ".partial"
GENERATION = "generation_config.json"


class Weights(Protocol):
    """A model's weights by our names, from wherever."""

    model: Model

    @property
    def tensors(self) -> Mapping[str, tuple[Shape, torch.dtype]]: ...

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor: ...


def free(out: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """ConfigError unless a folder may be made there. Only what is like it, or empty, is ever written over."""
    if not out.exists():
        if not out.absolute().parent.is_dir():
            raise ConfigError(
                [f"{out.absolute().parent} is no folder: make it, or choose another place for {out.name}"]
            )
        return
    if not overwrite:
        raise ConfigError([f"{out} exists: choose another folder, or give --overwrite"])
    if not out.is_dir() or (not any((out / mark).exists() for mark in marks) and any(out.iterdir())):
        raise ConfigError([f"{out} holds none of {', '.join(marks)}: --overwrite is not for it, choose another folder"])


# ---- to ours


def write_ours(out: Path, weights: Weights, origin: Path, how: str, overwrite: bool, group: Group) -> int:
    """A checkpoint at step 0 with the weights alone; returns their bytes."""
    free(out, overwrite, (layout.MANIFEST,))
    mine = shared_out({name: nbytes(*size) for name, size in weights.tensors.items()}, group)
    pieces = {
        MODEL + name: Lazy(shape, dtype, partial(weights.read, name, (0,) * len(shape), shape))
        for name, (shape, dtype) in weights.tensors.items()
        if name in mine
    }
    record = {
        "step": 0,
        "tokens": 0,
        "config": {"model": asdict(weights.model)},
        "made": f"{how} {origin.absolute()}",
        "versions": {"titanmoe": titanmoe.__version__, "torch": torch.__version__},
    }
    write_checkpoint(out, pieces, record, overwrite, companions(origin), group)
    return sum(nbytes(*size) for size in weights.tensors.values())


def shared_out(sizes: Mapping[str, int], group: Group) -> set[str]:
    """This rank's share of them, even in bytes."""
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    loads, mine = [0] * ranks, set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == rank:
            mine.add(name)
    return mine


# ---- to theirs


class Export:
    """A checkpoint of ours as a folder of Hugging Face's."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None):
        self.saved: Checkpoint = open_checkpoint(path)
        self.record = self.saved.record
        self.model = _model(self.record, path)
        self.carried = companions(path / layout.CARRIED)
        self.map = Map(self.model, HUGGING_FACE[self.model.family])
        self.stored = {n.removeprefix(MODEL): size for n, size in self.saved.tensors.items() if n.startswith(MODEL)}
        self.dtype = dtype
        self._whole: dict[str, Tensor] = {}
        self._check(path)

    def _check(self, path: Path) -> None:
        problems = [f"{name} is missing" for name in self.map.ours if name not in self.stored]
        problems += [f"{name} is not of this model" for name in self.stored if name not in self.map.ours]
        problems += [
            f"{name} has shape {self.stored[name][0]}, not {shape}"
            for name, shape in self.map.ours.items()
            if name in self.stored and self.stored[name][0] != shape
        ]
        if not problems:
            # What a family has no place for must have no effect.
            problems = [
                f"{name} is not zero, and {self.map.hf.model_type} models have no such bias"
                for name, places in self.map.places.items()
                if not places and self.saved.read(MODEL + name).any()
            ]
        if problems:
            raise ConfigError(problems, str(path))

    @property
    def sizes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Of their tensors, ordered so that those made from the same of ours follow each other."""
        return {name: (shape, self._dtype(name)) for name, shape in self.map.theirs.items()}

    def _dtype(self, name: str) -> torch.dtype:
        ours = self.map.parts[name][0].ours
        return self.stored[ours][1] if self.dtype is None or ours.endswith(BIAS) else self.dtype

    def make(self, name: str) -> Tensor:
        """One of theirs. Keeps what it read of ours until something else is needed: a stack of experts is read once."""
        needed = {place.ours for place in self.map.parts[name]}
        self._whole = {ours: tensor for ours, tensor in self._whole.items() if ours in needed}
        for ours in needed - self._whole.keys():
            self._whole[ours] = self.saved.read(MODEL + ours)
        return self.map.write(name, self._dtype(name), self._block)

    def _block(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        return self._whole[name][tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]

    def config(self) -> dict[str, Any]:
        carried = configs.read_json(self.carried[configs.CONFIG]) if configs.CONFIG in self.carried else None
        dtype = str(self.sizes["model.embed_tokens.weight"][1]).removeprefix("torch.")
        seq_len = self.record.get("config", {}).get("training", {}).get("seq_len", 4096)
        return configs.write(self.model, carried, dtype, seq_len)


def _model(record: dict[str, Any], path: Path) -> Model:
    table = record.get("config", {}).get("model")
    try:
        return Model(**table)
    except TypeError as error:
        raise ConfigError([f"{path / layout.MANIFEST} has no [model] of this version: {error}"]) from None


def to_hf(
    path: Path,
    out: Path,
    shard_bytes: int,
    tokenizer: Path | None,
    dtype: torch.dtype | None,
    overwrite: bool,
    group: Group,
) -> tuple[Export, dict[str, Tensors]]:
    free(out, overwrite, (configs.CONFIG, SINGLE, INDEX))
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    names = sorted(layout.read_manifest(path).files)
    if broken := [line for lines in together(group, lambda: layout.damage(path, names[rank::ranks])) for line in lines]:
        raise ConfigError(broken, str(path))
    export = Export(path, dtype)
    config, files = export.config(), shards(export.sizes, shard_bytes)
    others = {name: file for name, file in export.carried.items() if name != configs.CONFIG}
    if tokenizer is not None:
        found = {n: file for n, file in companions(tokenizer).items() if n not in (configs.CONFIG, GENERATION)}
        if not found:
            raise ConfigError([f"--tokenizer {tokenizer} holds no tokenizer files: name a folder with tokenizer.json"])
        others = {name: file for name, file in others.items() if name == GENERATION} | found

    aside = out.with_name(out.name + PARTIAL)

    def write() -> None:
        # Whole files in a row: neighbours are often made from the same tensor of ours.
        per_rank = -(-len(files) // ranks)
        for name in list(files)[rank * per_rank : (rank + 1) * per_rank]:
            write_file(aside / name, files[name], export.make)

    def finish() -> None:
        layout.write(aside / configs.CONFIG, json.dumps(config, indent=2) + "\n")
        if len(files) > 1:
            layout.write(aside / INDEX, json.dumps(index(files), indent=2) + "\n")
        for name, file in others.items():
            shutil.copyfile(file, aside / name)
        layout.sync(aside)
        if out.exists():
            shutil.rmtree(out)
        os.rename(aside, out)
        layout.sync(out.absolute().parent)

    try:
        _on_first(group, lambda: layout.begin(aside))
        together(group, _told(write))
        _on_first(group, finish)
    except BaseException:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return export, files


def _on_first(group: Group, work: Callable[[], None]) -> None:
    together(group, work if group is None or dist.get_rank(group) == 0 else lambda: None)


def _told(work: Callable[[], None]) -> Callable[[], None]:
    """What goes wrong on one rank, as all ranks are told of it."""

    def tell() -> None:
        try:
            work()
        except ConfigError as error:
            raise CheckpointError("; ".join(error.problems)) from None

    return tell
