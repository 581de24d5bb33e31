"""Convert between Hugging Face folders, PEFT folders and our checkpoints, on one rank or many.

At most a block of a tensor is in memory at a time. Folders appear under their name once they are complete. Functions
with a `group` are collective over it; None stands for a single process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import titanmoe
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.export import Export, FolderPlan, plan_folder
from titanmoe.checkpoint.hf.fetch import INDEX, SINGLE
from titanmoe.checkpoint.hf.model_card import model_card
from titanmoe.checkpoint.hf.peft_base import compare_base
from titanmoe.checkpoint.hf.peft_read import is_peft
from titanmoe.checkpoint.hf.peft_write import CONFIG as ADAPTER_CONFIG
from titanmoe.checkpoint.hf.peft_write import PeftFolder, plan_peft_folder
from titanmoe.checkpoint.hf.safetensors_folder import (
    TensorSizes,
    config_and_tokenizer_files,
    nbytes,
    total_bytes,
    write_file,
)
from titanmoe.checkpoint.hf.tensor_map import ReadNamedBlock, TensorMap
from titanmoe.checkpoint.hf.weight_sources import (
    MergedWeights,
    Weights,
    check_digest,
    open_base_weights,
    open_export_source,
)
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks, raise_on_all_ranks, size_and_rank
from titanmoe.checkpoint.read_adapters import MODEL, Adapters, read_checkpoint_adapters
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.load import ConfigError

PARTIAL = ".partial"


def check_output_folder(out: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Raise a ConfigError if `out` exists and may not be replaced, or has no parent folder. Make nothing.

    Args:
        out: the folder to make.
        overwrite: whether an existing folder may be replaced, if it is empty or of the same kind.
        marks: names of files, one of which a folder of that kind has.
    """
    if not out.exists():
        if not out.absolute().parent.is_dir():
            raise ConfigError(
                f"{out.absolute().parent} is not a folder: make it, or choose another place for {out.name}"
            )
        return
    if not overwrite:
        raise ConfigError(f"{out} exists: choose another folder, or give --overwrite")
    if not out.is_dir() or (not any((out / mark).exists() for mark in marks) and any(out.iterdir())):
        raise ConfigError(f"{out} holds none of {', '.join(marks)}: --overwrite does not replace it, choose another")


# ---- from Hugging Face


def write_converted(out: Path, weights: Weights, origin: Path, provenance: str, overwrite: bool, group: Group) -> int:
    """Write weights as a checkpoint of ours at step 0, without optimizer state. Collective over the group.

    Args:
        out: the checkpoint's folder, which is made.
        weights: the weights by our names.
        origin: the folder with config.json and tokenizer, which are copied.
        provenance: how the weights were made, such as "converted from"; the record has it with `origin` after it.
        overwrite: replace an existing checkpoint.
        group: ranks that share the work.

    Returns:
        The bytes of all weights, those that other ranks write too.

    Raises:
        ConfigError: on all ranks, if `out` cannot be made or may not be replaced.
        CheckpointError: on all ranks, if weights cannot be read or written.
    """
    raise_on_all_ranks(group, lambda: check_output_folder(out, overwrite, (layout.MANIFEST,)))
    assigned = assign_by_bytes(weights.tensors, group)
    tensors = {
        MODEL + name: LazyTensor(shape, dtype, partial(weights.read, name))
        for name, (shape, dtype) in weights.tensors.items()
        if name in assigned
    }
    record = {
        "step": 0,
        "tokens": 0,
        "config": {"model": asdict(weights.model)},
        "made": f"{provenance} {origin.absolute()}",
        "versions": {"titanmoe": titanmoe.__version__, "torch": torch.__version__},
    }
    write_checkpoint(out, tensors, record, overwrite, config_and_tokenizer_files(origin), group)
    return total_bytes(weights.tensors)


def assign_by_bytes(tensors: TensorSizes, group: Group) -> set[str]:
    """Return the names of the tensors that this rank handles, so that all ranks have about as many bytes.

    Nothing is communicated: `tensors` are the same on all ranks.
    """
    ranks, rank = size_and_rank(group)
    loads, assigned = [0] * ranks, set()
    for name, size in sorted(tensors.items(), key=lambda item: -nbytes(*item[1])):
        least = loads.index(min(loads))
        loads[least] += nbytes(*size)
        if least == rank:
            assigned.add(name)
    return assigned


# ---- to Hugging Face


def to_hf(
    path: Path,
    out: Path,
    *,
    shard_bytes: int,
    tokenizer: Path | None,
    dtype: torch.dtype | None,
    overwrite: bool,
    group: Group,
    base_name: str = "",
) -> FolderPlan:
    """Export a checkpoint, or adapters merged into their base weights, to a Hugging Face folder; return its contents.

    Collective over the group.

    Args:
        path: a checkpoint, or a PEFT folder.
        out: the folder to make.
        shard_bytes: most bytes of a safetensors file.
        tokenizer: folder with tokenizer files; None: those that the checkpoint carries.
        dtype: dtype of the files; None: the checkpoint's.
        overwrite: replace an existing folder.
        group: ranks that share the work.
        base_name: name of the base weights of adapters; "" for the one in their recipe or adapter_config.json.

    Raises:
        ConfigError: on all ranks, if these are not the model's weights, or not those under the adapters, transformers
            cannot express them, files are damaged, or `out` cannot be written.
    """

    def plan_hf() -> FolderPlan:
        check_output_folder(out, overwrite, (configs.CONFIG, SINGLE, INDEX))
        export = Export(open_export_source(path, base_name), path, dtype)
        export.check_biases()
        plan = plan_folder(export, shard_bytes, tokenizer)
        record = {} if is_peft(path) else layout.read_manifest(path).record
        return plan._replace(card=model_card(record, base_name))

    plan = raise_on_all_ranks(group, plan_hf)
    _check_files(path, group)
    if isinstance(merged := plan.export.weights, MergedWeights):
        check_digest(merged.adapters, merged.base, merged.name, group)
        if merged.adapters.config is None:
            merged.compared = compare_base(merged.adapters, merged.base, merged.name, group)
    _write(plan, plan.export.make, out, group)
    return plan


def to_peft(
    path: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    drop: Sequence[str],
    overwrite: bool,
    group: Group,
    base_name: str = "",
) -> PeftFolder:
    """Export a checkpoint's LoRA adapters to a PEFT folder; return its contents. Collective over the group.

    Args:
        path: a checkpoint of a run with adapters.
        out: the folder to make.
        dtype: dtype of the files; None: the checkpoint's.
        drop: ["mtp"] leaves the adapters of multi-token prediction out.
        overwrite: replace an existing folder.
        group: ranks that share the work.
        base_name: name of the base weights for adapter_config.json, which are compared with those that the adapters
            were trained on; "" for checkpoint.initial_hf of their recipe, uncompared.

    Raises:
        ConfigError: on all ranks, if PEFT cannot express the adapters, the base weights are others, files are damaged,
            or `out` cannot be written.
    """

    def plan_peft() -> tuple[Adapters, PeftFolder]:
        check_output_folder(out, overwrite, (ADAPTER_CONFIG,))
        adapters = read_checkpoint_adapters(path)
        map_ = TensorMap(adapters.model, configs.hf_format_of(adapters.model.family))
        base = base_name or (adapters.config.checkpoint.initial_hf)
        card = model_card(layout.read_manifest(path).record, base_name, adapter=True)
        return adapters, plan_peft_folder(adapters, map_, base, dtype, drop)._replace(card=card)

    adapters, plan = raise_on_all_ranks(group, plan_peft)
    _check_files(path, group)
    if base_name:
        weights = raise_on_all_ranks(group, lambda: open_base_weights(adapters, base_name))
        check_digest(adapters, weights, base_name, group)
    _write(plan, plan.make, out, group)
    return plan


def _check_files(path: Path, group: Group) -> None:
    """Read the checkpoint's files, shared among ranks; raise a ConfigError on all with every damaged one.

    Collective over the group. A PEFT folder has no checksums: nothing is checked.
    """
    if is_peft(path):
        return
    ranks, rank = size_and_rank(group)
    by_rank = on_all_ranks(group, lambda: layout.find_damage(path, rank=rank, ranks=ranks))
    if broken := [line for lines in by_rank for line in lines]:
        raise ConfigError(broken, str(path))


def _write(plan: FolderPlan | PeftFolder, make: ReadNamedBlock, out: Path, group: Group) -> None:
    """Write a planned folder, each rank some of its files: a single one is the first rank's. Collective."""
    ranks, rank = size_and_rank(group)
    per_rank = -(-len(plan.files) // ranks)

    def write(unfinished: Path) -> None:
        for name in list(plan.files)[rank * per_rank : (rank + 1) * per_rank]:
            write_file(unfinished / name, plan.files[name], make)

    make_folder(out, write, plan.complete, group)


def make_folder(out: Path, write: Callable[[Path], None], complete: Callable[[Path], None], group: Group) -> None:
    """Make a folder that appears under its name once it is complete, or replace whatever is there.

    Collective over the group.

    Args:
        out: the folder.
        write: called on every rank with the unfinished folder; writes safetensors files into it.
        complete: called on the first rank with the unfinished folder; writes all other files.
        group: ranks that share the work.

    Raises:
        ConfigError: on all ranks, if a file cannot be written on any.
    """
    unfinished = out.with_name(out.name + PARTIAL)
    try:
        _on_first_rank(group, lambda: layout.make_empty(unfinished))
        raise_on_all_ranks(group, lambda: write(unfinished))
        _on_first_rank(group, lambda: _publish(complete, unfinished, out))
    except BaseException:
        if size_and_rank(group)[1] == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _on_first_rank(group: Group, work: Callable[[], None]) -> None:
    raise_on_all_ranks(group, work if size_and_rank(group)[1] == 0 else lambda: None)


def _publish(complete: Callable[[Path], None], unfinished: Path, out: Path) -> None:
    complete(unfinished)
    layout.rename_into_place(unfinished, out)
