"""Plan a Hugging Face folder from our weights: its files, config.json and tokenizer. Tensors are made as written.

Called by `titanmoe convert` and by runs that save in Hugging Face's format. A plan divides the tensors into files
before any weight is read; each rank then writes some of the files, block by block.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.fetch import INDEX
from titanmoe.checkpoint.hf.model_card import write_model_card
from titanmoe.checkpoint.hf.safetensors_folder import (
    TensorSizes,
    config_and_tokenizer_files,
    index_json,
    split_into_files,
)
from titanmoe.checkpoint.hf.tensor_map import EXPERT_BIAS, Shape, TensorMap
from titanmoe.checkpoint.hf.weight_sources import ExportSource
from titanmoe.checkpoint.move_in_blocks import CPU
from titanmoe.config.load import ConfigError
from titanmoe.data.chat import open_chat_encoder
from titanmoe.data.tokenizer import FILE, open_tokenizer
from titanmoe.files import fsync_folder

GENERATION = "generation_config.json"


class Export:
    """Our weights, seen as the tensors of a Hugging Face model."""

    def __init__(self, source: ExportSource, path: Path, dtype: torch.dtype | None = None):
        """Map the weights' names; ConfigError unless the weights are the model's.

        Args:
            source: what to export.
            path: where it is, for error messages.
            dtype: dtype of the tensors, selection biases apart; None for the weights' own.
        """
        self.weights, self.carried, self.seq_len = source
        self.path, self.model, self.stored, self.dtype = path, self.weights.model, self.weights.tensors, dtype
        self.map = TensorMap(self.model, configs.hf_format_of(self.model.family))
        self._check()

    def _check(self) -> None:
        """Raise a ConfigError with every tensor that is missing, not of this model, or of another shape."""
        problems = [f"{name} is missing" for name in self.map.our_shapes if name not in self.stored]
        problems += [f"{name} does not belong to this model" for name in self.stored if name not in self.map.our_shapes]
        problems += [
            f"{name} has shape {self.stored[name][0]}, not {shape}"
            for name, shape in self.map.our_shapes.items()
            if name in self.stored and self.stored[name][0] != shape
        ]
        if problems:
            raise ConfigError(problems, str(self.path))

    def check_biases(self) -> None:
        """Raise a ConfigError if a router's selection bias is not zero and the model's Hugging Face format has none."""
        problems = [
            f"{name} is not zero, and {self.map.hf.model_type} models have no such bias"
            for name, places in self.map.places.items()
            if not places and self.weights.read(name, (0,), self.stored[name][0]).any()
        ]
        if problems:
            raise ConfigError(problems, str(self.path))

    @cached_property
    def sizes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of each Hugging Face tensor by name; those made from one tensor of ours follow each other."""
        return {name: (shape, self._dtype(name)) for name, shape in self.map.hf_shapes.items()}

    def _dtype(self, name: str) -> torch.dtype:
        """Return a Hugging Face tensor's dtype in the files.

        It is `dtype`; without one, and for selection biases, that of our tensor, or of the first of several.
        """
        our_name = self.map.parts[name][0].our_name
        return self.stored[our_name][1] if self.dtype is None or our_name.endswith(EXPERT_BIAS) else self.dtype

    def make(self, name: str, offset: Shape, shape: Shape, device: torch.device = CPU) -> Tensor:
        """Return a block of a Hugging Face tensor in the dtype of the file, made from our weights.

        Args:
            name: the tensor's name on Hugging Face.
            offset: where the block begins in the tensor.
            shape: the block's shape; its last dim has to be full.
            device: where to make it.
        """
        return self.map.write(name, offset, shape, self._dtype(name), self.weights.read, device)

    def config(self) -> dict[str, Any]:
        """Return the contents of the config.json for these weights; ConfigError if transformers cannot express them."""
        carried = configs.read_json(self.carried[configs.CONFIG]) if configs.CONFIG in self.carried else None
        dtype = str(self.sizes["model.embed_tokens.weight"][1]).removeprefix("torch.")
        return configs.to_config_json(self.model, carried, dtype, self.seq_len)


class FolderPlan(NamedTuple):
    """The contents of a Hugging Face folder that is to be written."""

    export: Export
    files: dict[str, TensorSizes]
    config: dict[str, Any]
    other_files: dict[str, Path]
    """Files to copy, by name."""
    generation: dict[str, Any] | None
    """Contents of generation_config.json; None: it is copied as it is, or there is none."""
    card: str = ""
    """Text of the model card; "": there is none."""

    def complete(self, folder: Path) -> None:
        """Write all files beside the weights, with an index if those are several, and fsync the folder.

        One rank calls it, at the end.
        """
        layout.write_text(folder / configs.CONFIG, json.dumps(self.config, indent=2) + "\n")
        if len(self.files) > 1:
            layout.write_text(folder / INDEX, json.dumps(index_json(self.files), indent=2) + "\n")
        for name, file in self.other_files.items():
            shutil.copyfile(file, folder / name)
        if self.generation is not None:
            layout.write_text(folder / GENERATION, json.dumps(self.generation, indent=2) + "\n")
        write_model_card(folder, self.card)
        fsync_folder(folder)


def plan_folder(export: Export, shard_bytes: int, tokenizer: Path | None) -> FolderPlan:
    """Plan a Hugging Face folder. Write nothing.

    Token ids at which the tokenizer ends a text or a turn are added to eos_token_id of generation_config.json; in
    config.json the first is set if it has no eos_token_id.

    Args:
        export: the weights.
        shard_bytes: most bytes of a safetensors file.
        tokenizer: folder with tokenizer files, which replace those carried by the export; None keeps these.

    Raises:
        ConfigError: transformers cannot express the model, or `tokenizer` has no tokenizer files.
    """
    other_files = {name: file for name, file in export.carried.items() if name != configs.CONFIG}
    if tokenizer is not None:
        tokenizer_files = {
            n: file
            for n, file in config_and_tokenizer_files(tokenizer).items()
            if n not in (configs.CONFIG, GENERATION)
        }
        if not tokenizer_files:
            raise ConfigError(f"--tokenizer {tokenizer} has no tokenizer files: name a folder with tokenizer.json")
        other_files = {name: file for name, file in other_files.items() if name == GENERATION} | tokenizer_files
    config, generation = export.config(), None
    if marks := end_token_ids(other_files, export.model.vocab_size):
        config.setdefault("eos_token_id", marks[0])
        carried = configs.read_json(other_files[GENERATION]) if GENERATION in other_files else {}
        before = carried.get("eos_token_id", [])
        known = before if isinstance(before, list) else [before]
        if missing := [mark for mark in marks if mark not in known]:
            together = [mark for mark in known if mark is not None] + missing
            generation = carried | {"eos_token_id": together if len(together) > 1 else together[0]}
            other_files.pop(GENERATION, None)
    return FolderPlan(export, split_into_files(export.sizes, shard_bytes), config, other_files, generation)


def end_token_ids(files: Mapping[str, Path], vocab_size: int) -> list[int]:
    """Return the token ids at which generation has to stop: the end of a text, then the end of a turn of a chat.

    Without the second, transformers would generate on after an assistant's turn. [] without a tokenizer.

    Args:
        files: paths of the Hugging Face folder's files by name, the tokenizer among them.
        vocab_size: size of the model's vocabulary; ids beyond it are left out.
    """
    if FILE not in files:
        return []
    try:
        tokenizer = open_tokenizer(str(files[FILE]))
    except ConfigError:  # it is no tokenizer, or names no end mark
        return []
    marks = [tokenizer.eos]
    with suppress(ConfigError):  # it has no template, or one that cannot be used
        marks.append(open_chat_encoder("", tokenizer).end_of_turn_token())
    return [mark for mark in dict.fromkeys(marks) if mark is not None and mark < vocab_size]
