"""Read a Hugging Face model's folder by our names: any block of any tensor, without loading anything else.

Opened by runs that begin from a Hugging Face model, by conversions and by generation. A block of a tensor of ours is
put together from blocks of theirs (titanmoe.checkpoint.hf.tensor_map).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.model_differences import differing_fields, field_value
from titanmoe.checkpoint.hf.quantised import Dequantised, fp8_block
from titanmoe.checkpoint.hf.safetensors_folder import SafetensorsFolder
from titanmoe.checkpoint.hf.tensor_map import Shape, TensorMap, layer_number
from titanmoe.checkpoint.move_in_blocks import COPY_BLOCK_BYTES, split_into_blocks
from titanmoe.checkpoint.state import keeps_weights
from titanmoe.config.load import ConfigError
from titanmoe.config.model_file import changed_paths
from titanmoe.config.schema import Model
from titanmoe.files import format_ranges
from titanmoe.models.tensors import stored_name

if TYPE_CHECKING:
    from titanmoe.checkpoint.hf.torchtitan import TorchTitanFolder


class HuggingFaceSource:
    """A Hugging Face model's weights by our names, with experts stacked."""

    def __init__(
        self,
        path: Path,
        parsed: configs.ParsedConfig,
        model: Model,
        drop: tuple[str, ...] = (),
        folder: SafetensorsFolder | TorchTitanFolder | None = None,
    ):
        """Open the files; ConfigError if they cannot be read. check() says whether they fit the model.

        Args:
            path: the folder with config.json.
            parsed: the parsed config.json.
            model: the [model] to read the weights as.
            drop: ("mtp",) leaves multi-token prediction out.
            folder: the weights, if they are not safetensors files in `path`.
        """
        self.path, self.parsed, self.model, self.drop = path, parsed, model, drop
        # before a file of another kind is opened
        block = fp8_block(parsed.json, path) if folder is None else (128, 128)
        self.weights = Dequantised(folder or SafetensorsFolder(path, renamed=parsed.hf.outer_names), block)
        self.map = TensorMap(model, parsed.hf, self.weights.tensors)
        self.skipped: dict[str, list[str]] = {}
        """Tensors that are left out on purpose, by the reason; filled by check()."""

    @cached_property
    def tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype by our names: as stored, but bfloat16 if quantised, and float32 for a bias in no file."""
        return {name: (shape, self._dtype(name)) for name, shape in self.map.our_shapes.items()}

    def _dtype(self, name: str) -> torch.dtype:
        places = self.map.places[name]
        return self.weights.tensors[places[0].hf_name][1] if places else torch.float32

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a tensor of the model in its stored dtype, read from the Hugging Face files.

        Args:
            name: our name of the tensor.
            offset: where the block begins in our tensor.
            shape: the block's shape.
        """
        name = stored_name(name, self.model.tie_embeddings)
        return self.map.read(name, offset, shape, self._dtype(name), self.weights.read)

    def check(self) -> None:
        """Raise a ConfigError that lists every differing field, and every missing, unexpected or misshapen tensor.

        Experts of several dtypes are listed too, and copies whose values differ; no other values are read. Tensors are
        looked at only if no field differs. Fills `skipped`.
        """
        if problems := self._model_problems() or self._tensor_problems():
            raise ConfigError(problems, str(self.weights.folder.path))

    @property
    def notes(self) -> list[str]:
        """Lines for the log on what the user should know although the files fit the model, such as tensors left out.

        The latter are those that `check` found: call it first.
        """
        file, file_model = self.path / configs.CONFIG, self.parsed.model
        notes = [f"left out {len(names)} tensors: {reason}" for reason, names in self.skipped.items()]
        if "mtp" in self.drop and not self.has_mtp:
            notes.append(f"{self.path} has no multi-token prediction to drop")
        notes += self.parsed.notes
        stored = {str(dtype).removeprefix("torch.") for _, dtype in self.weights.tensors.values()}
        declared = self.parsed.json.get("dtype") or self.parsed.json.get("torch_dtype")
        if declared and declared not in stored:
            file_dtypes = ", ".join(sorted(stored))
            notes.append(f"{file} has dtype = {declared}: weights keep the dtype of their files, {file_dtypes}")
        for name in differing_fields(self.model, file_model):
            ours, theirs = (field_value(model, name) for model in (self.model, file_model))
            notes.append(f"model.{name} = {ours!r}, {file} says {theirs!r}")
        if quantised := self.weights.quantised:
            kinds = " and ".join(sorted(set(quantised.values())))
            notes.append(f"{len(quantised)} tensors of {kinds} read as bfloat16")
        return notes

    def _model_problems(self) -> list[str]:
        """Return an error line for each field of [model] that differs from config.json and may not.

        It may if model.change lists it and it keeps the weights' shapes. If families differ, the only line says so. For
        multi-token prediction model.mtp_after_norm must be true, unless model.change lists it.
        """
        file, file_model = self.path / configs.CONFIG, self.parsed.model
        if configs.hf_format_of(self.model.family).model_type != configs.hf_format_of(file_model.family).model_type:
            return [f"model.family = {self.model.family!r}, but {file} has model_type {self.parsed.hf.model_type!r}"]
        problems = []
        for name in differing_fields(self.model, file_model):
            listed = f"model.{name}" in changed_paths(self.model.change)
            usable = keeps_weights(name, self.model.family)
            if not (listed and usable):
                fix = f"use that, or list {name!r} in model.change" if usable else "use that"
                ours, theirs = (field_value(model, name) for model in (self.model, file_model))
                problems.append(f"model.{name} = {ours!r}, but {file} gives {theirs!r}: {fix}")
        if self.model.mtp_depth and not (self.model.mtp_after_norm or "mtp_after_norm" in self.model.change):
            problems.append(
                "model.mtp_after_norm = False, but Megatron and vLLM feed multi-token prediction what comes out of the "
                "final norm: set it to true, or list 'mtp_after_norm' in model.change"
            )
        return problems

    def _tensor_problems(self) -> list[str]:
        """Return error lines: missing, unexpected and misshapen tensors, unequal copies, mixed dtypes, wrong depth.

        Dtypes are mixed if experts of one weight differ in theirs; depth is the number of layers. Only copies' values
        are read. Tensors that are left out on purpose go to `skipped`.
        """
        in_files = {name: shape for name, (shape, _) in self.weights.tensors.items()}
        in_files |= {name: self.weights.folder.tensors[name].shape for name in self.weights.unused}
        in_model = self.map.hf_shapes
        extra = self._skip(in_files.keys() - in_model.keys())
        by_problem: dict[str, list[str]] = {}
        for name, shape in in_model.items():
            if name in in_files and in_files[name] != shape:
                by_problem.setdefault(f"shape {in_files[name]} in the files, {shape} in this model", []).append(name)
        for name, places in self.map.places.items():
            dtypes = {str(self.weights.tensors[p.hf_name][1])[6:] for p in places if p.hf_name in self.weights.tensors}
            if len(dtypes) > 1:
                by_problem.setdefault(f"experts of different dtypes, {', '.join(sorted(dtypes))}", []).append(name)
        for copy, original in self.map.copies.items():
            if (
                in_files.get(copy) == in_model[copy]
                and in_files.get(original) == in_model[original]
                and not self._equal(copy, original)
            ):
                by_problem.setdefault(f"not equal to {original}, which it repeats", []).append(copy)
        hint = "not part of this model"
        if any(self._is_mtp(name) for name in extra):
            hint += " (drop mtp leaves multi-token prediction out, model.mtp_depth = 1 includes it)"
        depth, layers = self._depth_problem(in_files)
        missing, extra = (
            {name for name in names if layer_number(name) not in layers}
            for names in (in_model.keys() - in_files.keys(), extra)
        )
        kinds = {"missing": missing, hint: extra, **by_problem}
        return depth + [f"{name}: {what}" for what, names in kinds.items() for name in compress_names(names)]

    def _depth_problem(self, in_files: Iterable[str]) -> tuple[list[str], set[int]]:
        """Return an error line if the files have more or fewer layers than config.json says, and these layers.

        `in_files` are the names of the tensors in the files.

        Returns:
            The line, and the layers that are missing or too many; ([], set()) if the depth is right or cannot be told.
        """
        ends = (".input_layernorm.weight", ".attention_norm.weight")
        norms = (name for name in in_files if name.endswith(ends) and not self._is_mtp(name))
        stored, expected = {layer_number(name) for name in norms} - {None}, set(range(self.model.num_layers))
        if stored == expected or stored != set(range(len(stored))):
            return [], set()
        problem = (
            f"{self.path / configs.CONFIG} has num_hidden_layers = {len(expected)}, and the files have {len(stored)} "
            "layers: correct the number, or add the files that are missing"
        )
        return [problem], stored ^ expected

    def _skip(self, names: set[str]) -> set[str]:
        """Return those of the names for which no reason to leave them out is known; put the others into `skipped`.

        The names are of tensors in the files that are not part of the model. Reasons are, for example, that multi-token
        prediction is dropped, or that it is a copy of a tied embedding.
        """
        reasons, hf_tensors = {}, self.parsed.hf.hf_tensors
        for name in names:
            if self.parsed.hf.derived and name.endswith(self.parsed.hf.derived):
                reasons[name] = "they are derived from config.json"
            elif "mtp" in self.drop and self._is_mtp(name):
                reasons[name] = "multi-token prediction, dropped"
            elif begin := next((begin for begin in self.parsed.hf.left_out if name.startswith(begin)), ""):
                reasons[name] = self.parsed.hf.left_out[begin]
            elif (
                self.model.tie_embeddings
                and name == hf_tensors["head.weight"].name
                and self._equal(name, hf_tensors["embed.weight"].name)
            ):
                reasons[name] = "a second copy of the tied embedding"
        self.skipped = {}
        for name, reason in sorted(reasons.items()):
            self.skipped.setdefault(reason, []).append(name)
        return names - reasons.keys()

    @property
    def has_mtp(self) -> bool:
        """Whether the files have the weights of multi-token prediction."""
        return any(self._is_mtp(name) for name in self.weights.tensors)

    def _is_mtp(self, name: str) -> bool:
        """Return whether a tensor in the files belongs to multi-token prediction.

        DeepSeek-V3 stores it as num_nextn_predict_layers additional layers, Qwen under names of its own.
        """
        layer = layer_number(name)
        first, count = self.model.num_layers, self.parsed.json.get("num_nextn_predict_layers") or 0
        return name.startswith(("mtp.", "mtp_layers.")) or (layer is not None and first <= layer < first + count)

    def _equal(self, a: str, b: str) -> bool:
        """Return whether two matrices in the files, by their names there, are equal in shape, dtype and values.

        Reads them in blocks of rows.
        """
        tensors = self.weights.tensors
        if tensors[a] != tensors[b]:
            return False
        shape, dtype = tensors[a]
        blocks = split_into_blocks((0, 0), shape, dtype.itemsize, COPY_BLOCK_BYTES)
        return all(torch.equal(self.weights.read(a, *at), self.weights.read(b, *at)) for at in blocks)


def open_hf(folder: Path | str, model: Model, drop: tuple[str, ...] = ()) -> HuggingFaceSource:
    """Open a Hugging Face folder to read its weights as a model of ours. Whether they fit it is not checked.

    ConfigError if config.json or the headers of the files cannot be read. `drop` of ("mtp",) leaves multi-token
    prediction out.
    """
    path = Path(folder)
    return HuggingFaceSource(path, configs.describe_folder(path), model, drop)


def open_checked_hf(folder: Path, model: Model) -> HuggingFaceSource:
    """Open a Hugging Face folder to read its weights as a model of ours; ConfigError if they do not fit it.

    Multi-token prediction is left out if the model has none.
    """
    source = open_hf(folder, model)
    if source.has_mtp and not model.mtp_depth:
        source = open_hf(folder, model, drop=("mtp",))
    source.check()
    return source


def compress_names(names: Iterable[str]) -> list[str]:
    """Return names in few lines, such as "layers.{0-3}.w" for four names that differ only in a number.

    Names share a line if they are all combinations of some numbers.
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        texts, numbers = re.split(r"\d+", name), re.findall(r"\d+", name)
        groups.setdefault(tuple(texts), []).append(tuple(map(int, numbers)))
    lines = []
    for texts, rows in sorted(groups.items()):
        columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
        if prod(map(len, columns)) == len(rows):
            numbers = [f"{{{format_ranges(column)}}}" if len(column) > 1 else str(column[0]) for column in columns]
            lines.append(_join(texts, numbers))
        else:
            lines += [_join(texts, list(map(str, row))) for row in sorted(rows)]
    return lines


def _join(texts: tuple[str, ...], numbers: list[str]) -> str:
    return "".join(text + number for text, number in zip(texts, [*numbers, ""], strict=True))
