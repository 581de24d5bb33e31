"""Open full weights by our names from any source: a Hugging Face model, a checkpoint, or either with adapters merged.

Used by conversion, by generation, and by runs with adapters, which check the digest of the weights under them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from titanmoe.checkpoint import layout, weight_digest
from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.fetch import CARRIED, is_remote, weights_folder
from titanmoe.checkpoint.hf.huggingface_source import HuggingFaceSource, open_checked_hf
from titanmoe.checkpoint.hf.peft_read import base_name_of, is_peft, read_peft
from titanmoe.checkpoint.hf.safetensors_folder import config_and_tokenizer_files
from titanmoe.checkpoint.hf.tensor_map import EXPERT_BIAS, Shape
from titanmoe.checkpoint.manifest import recorded_fields, refuse_adapters
from titanmoe.checkpoint.move_in_blocks import empty
from titanmoe.checkpoint.on_all_ranks import Group, size_and_rank
from titanmoe.checkpoint.read_adapters import MODEL, Adapters, read_checkpoint_adapters
from titanmoe.checkpoint.safe_files import ANOTHER
from titanmoe.config.fields import build
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config, Model
from titanmoe.models.lora_spec import adapter_names, divisor
from titanmoe.parallel.frozen import frozen_dtype

NAME_BASE_HINT = " (convert --base, generate --checkpoint)"
"""Hint at the options that name the base weights of adapters."""


class Weights(Protocol):
    """A model's full weights by our names, from any source, of which blocks can be read."""

    model: Model

    @property
    def tensors(self) -> Mapping[str, tuple[Shape, torch.dtype]]: ...

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor: ...


class CheckpointWeights:
    """The full weights in one of our checkpoints."""

    def __init__(self, path: Path):
        """Open a checkpoint.

        Raises:
            ConfigError: its record has no [model].
            CheckpointError: it cannot be read, has adapters alone, or this version does not know its [model].
        """
        self.saved = Checkpoint(path)
        refuse_adapters(self.saved.record, path)
        table = self.saved.record.get("config", {}).get("model")
        if not table:
            raise ConfigError(f"{path / layout.MANIFEST} has no [model] in its config: {ANOTHER}")
        self.model = build(recorded_fields({"config": {"model": table}}, path / layout.MANIFEST)).model
        self.tensors = {n.removeprefix(MODEL): size for n, size in self.saved.tensors.items() if n.startswith(MODEL)}

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        return self.saved.read(MODEL + name, offset, shape)


class MergedWeights:
    """Base weights with adapters merged: W + alpha / r B A, in float32 or wider, to be rounded once when written."""

    def __init__(self, adapters: Adapters, base: HuggingFaceSource | CheckpointWeights, name: str):
        """Prepare to merge adapters into base weights, which have this name; nothing is computed yet."""
        self.adapters, self.base, self.name = adapters, base, name
        self.model, self.tensors = base.model, base.tensors
        self.matrices = set(adapters.matrices)
        self.compared = ""
        """A line on how the base weights were compared with those that PEFT's adapters were trained on."""

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a weight: with its adapter merged, in float32 or wider whatever `tensors` says.

        A weight without an adapter is returned as the base has it.
        """
        block = self.base.read(name, offset, shape)
        if name not in self.matrices:
            return block
        A, B = (self.adapters.tensors[adapter] for adapter in adapter_names(name))
        rank, lora = A.shape[-2], self.adapters.lora
        *experts, row, column = offset
        *counts, rows, columns = shape
        down = A.read((*experts, 0, column), (*counts, rank, columns))
        up = B.read((*experts, row, 0), (*counts, rows, rank))
        wide = torch.promote_types(torch.promote_types(block.dtype, down.dtype), torch.float32)
        change = torch.matmul(up.to(wide), down.to(wide), out=empty(shape, wide, block.device))
        return change.mul_(lora.alpha / divisor(lora, rank)).add_(block)


# ---- opening


def is_hf(name: str) -> bool:
    """Return whether a name is that of a model in Hugging Face's format (folder, hub or URL), not of a checkpoint."""
    path = Path(name)
    return is_remote(name) or ((path / configs.CONFIG).is_file() and not (path / layout.MANIFEST).is_file())


def open_weights(name: str, model: Model | None = None) -> HuggingFaceSource | CheckpointWeights:
    """Open a model's full weights; check that a Hugging Face model has them all. A checkpoint is not checked.

    Args:
        name: a Hugging Face folder, hub name or URL (fetched if need be), a checkpoint, a run (its latest checkpoint),
            RUN:best or RUN:STEP.
        model: the [model] to read a Hugging Face model as; None: what its config.json says. Unused for a checkpoint.

    Raises:
        ConfigError, CheckpointError: there are none, they do not fit the model, or the checkpoint has adapters alone.
    """
    if not is_hf(name):
        return CheckpointWeights(latest_checkpoint(Path(name)))
    folder = weights_folder(name)
    return open_checked_hf(folder, model or configs.describe_folder(folder).model)


def open_adapters(path: Path, base_name: str = "") -> tuple[Adapters, str]:
    """Open the adapters of a PEFT folder or a checkpoint; return them and the name of their base weights.

    The name is "" if a checkpoint's adapters were trained on random weights.

    Args:
        path: the folder.
        base_name: name of the base weights; "" for what the adapters' own files say.

    Raises:
        ConfigError, CheckpointError: they, or the base weights of a PEFT folder, cannot be read or are not named.
    """
    if not is_peft(path):
        adapters = read_checkpoint_adapters(path)
        return adapters, base_name or adapters.base
    if not (base_name := base_name or base_name_of(path)):
        raise ConfigError(f"{path} does not say which weights its adapters are for: name them{NAME_BASE_HINT}")
    return read_peft(path, open_weights(base_name).model), base_name


def open_base_weights(adapters: Adapters, base_name: str) -> HuggingFaceSource | CheckpointWeights:
    """Open the base weights of adapters by name; ConfigError if it is "": random weights, which no file has.

    Raises ConfigError and CheckpointError as well if they cannot be read, or a Hugging Face model does not fit the
    adapters' model; a checkpoint's [model] is not compared with it.
    """
    if not base_name:
        raise ConfigError(
            f"{adapters.path} was trained on random weights (checkpoint.initial_hf is empty, and no checkpoint was "
            f"loaded), which no file has: name one that has them{NAME_BASE_HINT}"
        )
    return open_weights(base_name, adapters.model)


class ExportSource(NamedTuple):
    """The weights and files from which a Hugging Face folder is made."""

    weights: Weights
    carried: dict[str, Path]
    """Config and tokenizer files, by name."""
    seq_len: int
    """Sequence length of training, in tokens."""


def open_export_source(path: Path, base_name: str) -> ExportSource:
    """Open a checkpoint with full weights, or adapters (a checkpoint or a PEFT folder) merged into their base weights.

    Args:
        path: the folder.
        base_name: name of the base weights of adapters; "" for the one in their recipe or adapter_config.json.

    Raises:
        ConfigError: base weights are named for a checkpoint of full weights, or the adapters' cannot be opened.
    """
    seq_len = Config().training.seq_len
    if not is_peft(path):
        record = layout.read_manifest(path).record
        seq_len = record.get("config", {}).get("training", {}).get("seq_len", seq_len)
        if "base" not in record:
            if base_name:
                raise ConfigError(f"{path} has full weights: --base {base_name} is for adapters, leave it out")
            return ExportSource(CheckpointWeights(path), carried_hf_files(path), seq_len)
    adapters, base_name = open_adapters(path, base_name)
    weights = open_base_weights(adapters, base_name)
    if adapters.config:
        files = carried_hf_files(path)
    elif isinstance(weights, CheckpointWeights):
        files = carried_hf_files(weights.saved.path)
    else:
        files = config_and_tokenizer_files(weights.path)
    return ExportSource(MergedWeights(adapters, weights, base_name), files, seq_len)


def carried_hf_files(path: Path) -> dict[str, Path]:
    """Return the paths of the config and tokenizer files that a checkpoint's manifest lists in hf/, by name.

    Raises CheckpointError if the manifest is damaged, or a listed file is missing or a link.
    """
    return {n: file for n, file in layout.carried_files(path).items() if any(fnmatch(n, kind) for kind in CARRIED)}


def weights_digest(weights: Weights, compute: torch.dtype, group: Group, biases: bool = False) -> str:
    """Return a digest of weights in the dtypes that they have when frozen, as 16 hexadecimal digits.

    It is equal to the digest that a run with adapters records of its frozen base weights. Collective over the group.

    Args:
        weights: the full weights; each rank reads some of the tensors.
        compute: dtype of frozen weights other than routers.
        group: ranks that share the reading; None for a single process.
        biases: whether to include selection biases of routers, which a run updates although it freezes the rest.
    """
    ranks, rank = size_and_rank(group)

    def local_digest() -> int:
        names = sorted(name for name in weights.tensors if biases or not name.endswith(EXPERT_BIAS))[rank::ranks]
        return sum(
            weight_digest.digest_in_blocks(
                name, weights.tensors[name][0], partial(weights.read, name), frozen_dtype(name, compute)
            )
            for name in names
        )

    return weight_digest.combine_digests(group, local_digest)


def check_digest(
    adapters: Adapters, weights: HuggingFaceSource | CheckpointWeights, base_name: str, group: Group
) -> None:
    """Raise a ConfigError unless `weights` are those that the adapters were trained on, by their digest.

    Collective over the group. PEFT folders have no digest: nothing is checked, or read, for them.

    Args:
        adapters: the adapters.
        weights: the base weights to use.
        base_name: the name of `weights`, for the message.
        group: ranks that share the reading; None for a single process.
    """
    if not adapters.digest:
        return
    compute = getattr(torch, adapters.config.training.mixed_precision_param)
    if (digest := weights_digest(weights, compute, group)) != adapters.digest:
        raise ConfigError(
            f"{base_name} has other weights (digest {digest}) than the adapters were trained on (digest "
            f"{adapters.digest}{f', {adapters.base}' if adapters.base else ''}): name those{NAME_BASE_HINT}",
            str(adapters.path),
        )
