"""Between Hugging Face folders and our checkpoints: a few tensors in memory at a time, on one rank or many."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import titanmoe
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import Checkpoint, open_checkpoint, write_checkpoint
from titanmoe.checkpoint.hf import config as configs
from titanmoe.checkpoint.hf.fetch import CARRIED, INDEX, SINGLE
from titanmoe.checkpoint.hf.files import Tensors, config_and_tokenizer_files, index, nbytes, shards, write_file
from titanmoe.checkpoint.hf.maps import BIAS, Map, Shape
from titanmoe.checkpoint.manifest import config_of, refuse_adapters
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError, error_text
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Model
from titanmoe.data.chat import open_chat
from titanmoe.data.tokenizer import FILE, open_tokenizer

T = TypeVar("T")
MODEL = "model."
PARTIAL = ".partial"
GENERATION = "generation_config.json"


class Weights(Protocol):
    """A model's weights by our names, from any source."""

    model: Model

    @property
    def tensors(self) -> Mapping[str, tuple[Shape, torch.dtype]]: ...

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor: ...


def check_free(out: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """ConfigError unless a folder may be made there. Only a folder of the same kind, or an empty one, is
    overwritten."""
    if not out.exists():
        if not out.absolute().parent.is_dir():
            raise ConfigError(
                [f"{out.absolute().parent} is not a folder: make it, or choose another place for {out.name}"]
            )
        return
    if not overwrite:
        raise ConfigError([f"{out} exists: choose another folder, or give --overwrite"])
    if not out.is_dir() or (not any((out / mark).exists() for mark in marks) and any(out.iterdir())):
        raise ConfigError([f"{out} holds none of {', '.join(marks)}: --overwrite does not replace it, choose another"])


# ---- from Hugging Face


def write_ours(out: Path, weights: Weights, origin: Path, provenance: str, overwrite: bool, group: Group) -> int:
    """A checkpoint at step 0 with the weights alone; returns their bytes."""
    raise_on_all_ranks(group, lambda: check_free(out, overwrite, (layout.MANIFEST,)))
    own = balanced_share({name: nbytes(*size) for name, size in weights.tensors.items()}, group)
    pieces = {
        MODEL + name: LazyTensor(shape, dtype, partial(weights.read, name, (0,) * len(shape), shape))
        for name, (shape, dtype) in weights.tensors.items()
        if name in own
    }
    record = {
        "step": 0,
        "tokens": 0,
        "config": {"model": asdict(weights.model)},
        "made": f"{provenance} {origin.absolute()}",
        "versions": {"titanmoe": titanmoe.__version__, "torch": torch.__version__},
    }
    write_checkpoint(out, pieces, record, overwrite, config_and_tokenizer_files(origin), group)
    return sum(nbytes(*size) for size in weights.tensors.values())


def balanced_share(sizes: Mapping[str, int], group: Group) -> set[str]:
    """This rank's share of them, balanced by bytes."""
    ranks, rank = _size_and_rank(group)
    loads, own = [0] * ranks, set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == rank:
            own.add(name)
    return own


# ---- to Hugging Face


class Export:
    """One of our checkpoints as a Hugging Face folder."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None):
        self.saved: Checkpoint = open_checkpoint(path)
        self.record = self.saved.record
        refuse_adapters(self.record, path)
        self.model = _model(self.record, path)
        self.carried = {
            name: file for name, file in layout.carried(path).items() if any(fnmatch(name, kind) for kind in CARRIED)
        }
        self.map = Map(self.model, configs.written_as(self.model.family))
        self.stored = {n.removeprefix(MODEL): size for n, size in self.saved.tensors.items() if n.startswith(MODEL)}
        self.dtype = dtype
        self._whole: dict[str, Tensor] = {}
        self._check(path)

    def _check(self, path: Path) -> None:
        problems = [f"{name} is missing" for name in self.map.our_shapes if name not in self.stored]
        problems += [f"{name} does not belong to this model" for name in self.stored if name not in self.map.our_shapes]
        problems += [
            f"{name} has shape {self.stored[name][0]}, not {shape}"
            for name, shape in self.map.our_shapes.items()
            if name in self.stored and self.stored[name][0] != shape
        ]
        if not problems:
            # A tensor that a family has no place for must have no effect.
            problems = [
                f"{name} is not zero, and {self.map.hf.model_type} models have no such bias"
                for name, places in self.map.places.items()
                if not places and self.saved.read(MODEL + name).any()
            ]
        if problems:
            raise ConfigError(problems, str(path))

    @cached_property
    def sizes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Of the Hugging Face tensors, ordered so that those made from the same tensor of ours follow each other."""
        return {name: (shape, self._dtype(name)) for name, shape in self.map.hf_shapes.items()}

    def _dtype(self, name: str) -> torch.dtype:
        our_name = self.map.parts[name][0].our_name
        return self.stored[our_name][1] if self.dtype is None or our_name.endswith(BIAS) else self.dtype

    def make(self, name: str) -> Tensor:
        """A Hugging Face tensor. Caches what it read of ours until something else is needed: a stack of experts is read
        once."""
        needed = {place.our_name for place in self.map.parts[name]}
        self._whole = {our_name: tensor for our_name, tensor in self._whole.items() if our_name in needed}
        for our_name in needed - self._whole.keys():
            self._whole[our_name] = self.saved.read(MODEL + our_name)
        return self.map.write(name, self._dtype(name), self._block)

    def _block(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        return self._whole[name][tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]

    def config(self) -> dict[str, Any]:
        carried = configs.read_json(self.carried[configs.CONFIG]) if configs.CONFIG in self.carried else None
        dtype = str(self.sizes["model.embed_tokens.weight"][1]).removeprefix("torch.")
        seq_len = self.record.get("config", {}).get("training", {}).get("seq_len", 4096)
        return configs.to_config_json(self.model, carried, dtype, seq_len)


def _model(record: dict[str, Any], path: Path) -> Model:
    table = record.get("config", {}).get("model")
    config_of({"config": {"model": table or {}}}, path / layout.MANIFEST)
    try:
        return Model(**table)
    except TypeError as error:
        raise ConfigError([f"{path / layout.MANIFEST} has no [model] of this version: {error}"]) from None


class FolderPlan(NamedTuple):
    """The contents of a Hugging Face folder to be written."""

    export: Export
    files: dict[str, Tensors]
    config: dict[str, Any]
    other_files: dict[str, Path]
    """Files to copy."""
    generation: dict[str, Any] | None
    """What GENERATION says; None: it is copied, or there is none."""

    def write(self, folder: Path, files: Sequence[str]) -> None:
        for name in files:
            write_file(folder / name, self.files[name], self.export.make)

    def complete(self, folder: Path) -> None:
        layout.write_text(folder / configs.CONFIG, json.dumps(self.config, indent=2) + "\n")
        if len(self.files) > 1:
            layout.write_text(folder / INDEX, json.dumps(index(self.files), indent=2) + "\n")
        for name, file in self.other_files.items():
            shutil.copyfile(file, folder / name)
        if self.generation is not None:
            layout.write_text(folder / GENERATION, json.dumps(self.generation, indent=2) + "\n")
        layout.sync(folder)


def plan_folder(
    path: Path, out: Path, shard_bytes: int, tokenizer: Path | None, dtype: torch.dtype | None, overwrite: bool
) -> FolderPlan:
    check_free(out, overwrite, (configs.CONFIG, SINGLE, INDEX))
    export = Export(path, dtype)
    other_files = {name: file for name, file in export.carried.items() if name != configs.CONFIG}
    if tokenizer is not None:
        tokenizer_files = {
            n: file
            for n, file in config_and_tokenizer_files(tokenizer).items()
            if n not in (configs.CONFIG, GENERATION)
        }
        if not tokenizer_files:
            raise ConfigError([f"--tokenizer {tokenizer} has no tokenizer files: name a folder with tokenizer.json"])
        other_files = {name: file for name, file in other_files.items() if name == GENERATION} | tokenizer_files
    config, generation = export.config(), None
    if marks := end_marks(other_files, export.model.vocab_size):
        config.setdefault("eos_token_id", marks[0])
        carried = configs.read_json(other_files[GENERATION]) if GENERATION in other_files else {}
        before = carried.get("eos_token_id", [])
        known = before if isinstance(before, list) else [before]
        if missing := [mark for mark in marks if mark not in known]:
            together = [mark for mark in known if mark is not None] + missing
            generation = carried | {"eos_token_id": together if len(together) > 1 else together[0]}
            other_files.pop(GENERATION, None)
    return FolderPlan(export, shards(export.sizes, shard_bytes), config, other_files, generation)


def end_marks(files: Mapping[str, Path], vocab_size: int) -> list[int]:
    """What ends a text of the tokenizer among the files, then what ends an answer by its chat template, if that is
    another token: without them transformers goes on after an answer."""
    if FILE not in files:
        return []
    try:
        tokenizer = open_tokenizer(str(files[FILE]))
    except ConfigError:  # it is no tokenizer, or names no end mark
        return []
    marks = [tokenizer.eos]
    with suppress(ConfigError):  # it has no template, or one that cannot be used
        marks.append(open_chat("", tokenizer).end_mark())
    return [mark for mark in dict.fromkeys(marks) if mark is not None and mark < vocab_size]


def to_hf(
    path: Path,
    out: Path,
    shard_bytes: int,
    tokenizer: Path | None,
    dtype: torch.dtype | None,
    overwrite: bool,
    group: Group,
) -> FolderPlan:
    ranks, rank = _size_and_rank(group)
    plan = raise_on_all_ranks(group, lambda: plan_folder(path, out, shard_bytes, tokenizer, dtype, overwrite))
    names = sorted(layout.read_manifest(path).files)
    if broken := [
        line for lines in on_all_ranks(group, lambda: layout.damage(path, names[rank::ranks])) for line in lines
    ]:
        raise ConfigError(broken, str(path))
    # A run of whole files each: neighbours are often made from the same tensor of ours.
    per_rank = -(-len(plan.files) // ranks)
    own = list(plan.files)[rank * per_rank : (rank + 1) * per_rank]
    unfinished = out.with_name(out.name + PARTIAL)
    try:
        _on_first_rank(group, lambda: layout.make_empty(unfinished))
        raise_on_all_ranks(group, lambda: plan.write(unfinished, own))
        _on_first_rank(group, lambda: _publish(plan, unfinished, out))
    except BaseException:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return plan


def _publish(plan: FolderPlan, unfinished: Path, out: Path) -> None:
    plan.complete(unfinished)
    replaced = out.with_name(out.name + layout.REMOVING)
    if out.exists():
        os.rename(out, replaced)
    os.rename(unfinished, out)
    layout.sync(out.absolute().parent)
    shutil.rmtree(replaced, ignore_errors=True)


# ---- all ranks of a group


def _size_and_rank(group: Group) -> tuple[int, int]:
    """How many ranks there are, and which this is."""
    return (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)


def raise_on_all_ranks(group: Group, work: Callable[[], T]) -> T:
    """What work returns on this rank; ConfigError on all of them if anything that a user can fix goes wrong on any."""
    problems: list[str] = []
    source = ""
    result: Any = None
    try:
        result = work()
    except ConfigError as error:
        problems, source = error.problems, error.source
    except CheckpointError as error:
        problems = [str(error)]
    except OSError as error:
        problems = [error_text(error)]
    answers = [(problems, source)]
    if group is not None:
        answers *= dist.get_world_size(group)
        dist.all_gather_object(answers, (problems, source), group)
    if any(rank_problems for rank_problems, _ in answers):
        distinct = dict.fromkeys(problem for rank_problems, _ in answers for problem in rank_problems)
        raise ConfigError(list(distinct), next((source for _, source in answers if source), ""))
    return result


def _on_first_rank(group: Group, work: Callable[[], None]) -> None:
    raise_on_all_ranks(group, work if _size_and_rank(group)[1] == 0 else lambda: None)
