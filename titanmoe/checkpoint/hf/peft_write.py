"""Plan a PEFT folder from our adapters: adapter_config.json, and the tensors by PEFT's names.

Since transformers 5 experts are stacked in parameters, gate and up in one, and PEFT from 0.19 converts adapters of
single experts to such stacks as it reads them: of rank r for down, 2 r for gate and up. `target_parameters` and
`rank_pattern` name the stacks, because PEFT does not know them for every family (not for qwen2_moe, in 0.21). Experts
are among `target_modules` too, for readers that know no stacks, unless a dense or shared network has modules of the
same name. Weights of such networks are `target_parameters`: PEFT would take modules of that name for experts', and
leave the network without adapters.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.hf.model_card import write_model_card
from titanmoe.checkpoint.hf.peft_fused import AdapterPair, fuse_adapters, fused_matrices, gate_up_rows, rows_in_fused
from titanmoe.checkpoint.hf.safetensors_folder import TensorSizes
from titanmoe.checkpoint.hf.tensor_map import HfPlace, Shape, TensorMap
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.read_adapters import Adapters, name_in_block
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.load import ConfigError
from titanmoe.files import fsync_folder
from titanmoe.models.lora_spec import adapter_names, divisor, is_adaptable

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STACKED = "mlp.experts"
"""The module of a layer's stacked experts in transformers 5, in every family that we have."""
GATE_UP, DOWN = f"{STACKED}.gate_up_proj", f"{STACKED}.down_proj"
ReadAdapter = Callable[[str], Tensor]
"""A function that returns an adapter's A or B in full, by our name."""


def module_of(place: HfPlace) -> str:
    """Return the path of the Hugging Face module that holds a weight: the tensor's name without ".weight"."""
    return place.hf_name.removesuffix(".weight")


def is_stacked(map_: TensorMap, name: str) -> bool:
    """Return whether Hugging Face's files of the family have one tensor for all experts of this weight (our name)."""
    return ".experts." in name and map_.places[name][0].expert is None


class PeftFolder(NamedTuple):
    """The contents of a PEFT folder that is to be written."""

    config: dict[str, Any]
    """Contents of adapter_config.json."""
    tensors: dict[str, LazyTensor]
    dtype: torch.dtype | None
    """Dtype of the file; None: each tensor's own."""
    card: str = ""
    """Text of the model card; "": there is none."""

    @property
    def files(self) -> dict[str, TensorSizes]:
        """The one safetensors file of a PEFT folder, by its name."""
        return {WEIGHTS: {name: (x.shape, self.dtype or x.dtype) for name, x in self.tensors.items()}}

    def make(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of one of the file's tensors in the file's dtype, made from our adapters.

        Args:
            name: the tensor's name in the file.
            offset: where the block begins in the tensor.
            shape: the block's shape.
        """
        block = self.tensors[name].read(offset, shape)
        return block if self.dtype is None else block.to(self.dtype)

    def complete(self, folder: Path) -> None:
        """Write adapter_config.json and the model card, and fsync the folder. One rank calls it, at the end."""
        layout.write_text(folder / CONFIG, json.dumps(self.config, indent=2) + "\n")
        write_model_card(folder, self.card)
        fsync_folder(folder)


def plan_peft_folder(
    adapters: Adapters, map_: TensorMap, base: str, dtype: torch.dtype | None, drop: list[str]
) -> PeftFolder:
    """Plan the PEFT folder of adapters, and write nothing; ConfigError with everything that PEFT cannot express.

    With target_parameters lora_dropout is 0, whatever the run had, because PEFT refuses both together.

    Args:
        adapters: the adapters.
        map_: the map between our tensors and Hugging Face's for the adapters' model.
        base: the base model as NAME or NAME@REVISION, for base_model_name_or_path and revision; "" for none.
        dtype: dtype of the file; None: each tensor's own.
        drop: ["mtp"] leaves multi-token prediction out, which transformers does not have.
    """
    matrices = [name for name in adapters.matrices if not ("mtp" in drop and name.startswith("mtp."))]
    if problems := _problems(matrices):
        raise ConfigError(problems, str(adapters.path))
    read_full = lru_cache(maxsize=2)(lambda name: adapters.tensors[name].get())
    tensors: dict[str, LazyTensor] = {}
    for name in matrices:
        if map_.places[name][0].hf_tensor.fused is not None:
            together = [other for other in fused_matrices(map_, name) if other in matrices]
            tensors |= _fused_tensors(adapters, map_, together, read_full)
        else:
            lazy_tensors = _stacked_tensors if is_stacked(map_, name) else _unfused_tensors
            tensors |= lazy_tensors(adapters, map_, name, read_full)
    paths = _Paths(map_, matrices)
    targets = {
        "target_modules": list(dict.fromkeys(filter(None, map(paths.target_module, matrices)))) or None,
        "target_parameters": list(dict.fromkeys(filter(None, map(paths.target_parameter, matrices)))) or None,
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.0 if targets["target_parameters"] else adapters.dropout,  # PEFT 0.21 refuses both together
    }
    model, _, revision = base.partition("@")
    config |= {"base_model_name_or_path": model or None, "revision": revision or None}
    config |= targets | _ranks(adapters, paths, matrices)
    return PeftFolder(config, tensors, dtype)


def _problems(matrices: list[str]) -> list[str]:
    """Return an error line for each reason why PEFT cannot express adapters of the weights named in `matrices`."""
    problems, merge = [], "or merge them into the weights with --to-hf"
    if any(name.startswith("mtp.") for name in matrices):
        problems.append(
            f"multi-token prediction has adapters, and transformers has none of it: use --drop mtp, {merge}"
        )
    elif not matrices:
        problems.append("only multi-token prediction has adapters, and transformers has none of it: use --to-hf")
    leaves = {name.rpartition(".")[2] for name in matrices if ".experts." in name}
    if ("w1" in leaves) != ("w3" in leaves):
        problems.append(
            f"of experts' gate (w1) and up (w3) only {min(leaves & {'w1', 'w3'})} has adapters, and PEFT adapts both "
            f"or neither: train with both in lora.targets, {merge}"
        )
    return problems


# ---- adapter_config.json


class _Paths:
    """The entries of PEFT's target_modules and target_parameters for weights of ours that have adapters.

    An entry names no layer if all layers have that adapter.
    """

    def __init__(self, map_: TensorMap, matrices: list[str]):
        self.map, alike = map_, defaultdict(list)
        for name in map_.our_shapes:
            if not name.startswith("mtp."):
                alike[name_in_block(name)].append(name)
        self.in_all_layers = {kind for kind, all_of_it in alike.items() if set(matrices).issuperset(all_of_it)}
        self.in_no_layer = {kind for kind, all_of_it in alike.items() if set(matrices).isdisjoint(all_of_it)}
        self.linear = {self.leaf(name) for name in filter(is_adaptable, map_.our_shapes) if ".experts." not in name}

    def leaf(self, name: str) -> str:
        """Return the last component of the path of a weight's module, such as q_proj, by our name of the weight."""
        return module_of(self.map.places[name][0]).rpartition(".")[2]

    def pattern(self, name: str) -> str:
        """Return the path of a weight's module or stacked parameter in transformers, as PEFT matches it, by our name.

        It is model.layers.3.self_attn.q_proj, or self_attn.q_proj if the weight has an adapter in all layers.
        """
        path = module_of(self.map.places[name][0])
        if ".experts." in name:
            layer = ".".join(path.split(".", 3)[:3])
            path = f"{layer}.{DOWN if name.endswith('.w2') else GATE_UP}"
        kinds = {name_in_block(other) for other in fused_matrices(self.map, name)}
        return path.split(".", 3)[3] if kinds <= self.in_all_layers | self.in_no_layer else path

    def target_module(self, name: str) -> str:
        """Return the entry of target_modules for a weight, by our name; "" if it is in target_parameters alone."""
        if ".attention." in name:
            return self.leaf(name) if name_in_block(name) in self.in_all_layers else self.pattern(name)
        apart = ".experts." in name and not is_stacked(self.map, name) and name_in_block(name) in self.in_all_layers
        return self.leaf(name) if apart and self.leaf(name) not in self.linear else ""

    def target_parameter(self, name: str) -> str:
        """Return the entry of target_parameters for a weight, by our name; "" for weights of attention."""
        if ".attention." in name:
            return ""
        return self.pattern(name) if ".experts." in name else f"{self.pattern(name)}.weight"


def _ranks(adapters: Adapters, paths: _Paths, matrices: list[str]) -> dict[str, Any]:
    """Return adapter_config.json's entries of rank and scale; r is the experts' rank, if they have adapters.

    rank_pattern and alpha_pattern have the weights of other rank or alpha, such as fused ones, whose ranks add up;
    rank_pattern has stacked experts of rank r too.
    """
    lora, alpha = adapters.lora, adapters.lora.alpha
    r = next((adapters.rank(name) for name in matrices if ".experts." in name), adapters.rank(matrices[0]))
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name in matrices:
        if ".experts." in name:
            ranks[paths.pattern(name)] = r if name.endswith(".w2") else 2 * r
            alphas |= {} if name.endswith(".w2") else {paths.pattern(name): divisor(lora, 2) * alpha}
            continue
        count = len([other for other in fused_matrices(paths.map, name) if other in matrices])
        key = rf"{paths.pattern(name)}(\.weight)?"
        ranks |= {key: count * adapters.rank(name)} if count * adapters.rank(name) != r else {}
        alphas |= {key: divisor(lora, count) * alpha} if count > 1 else {}
    scale = {"r": r, "lora_alpha": alpha, "use_rslora": lora.rslora}
    return scale | {"rank_pattern": ranks, "alpha_pattern": alphas}


# ---- tensors


def _unfused_tensors(adapters: Adapters, map_: TensorMap, name: str, read_full: ReadAdapter) -> dict[str, LazyTensor]:
    """Return PEFT's tensors, by name, of the adapter of a weight that is a matrix of its own or one for each expert.

    Args:
        adapters: the adapters.
        map_: the map of the model's tensors.
        name: our name of the weight.
        read_full: returns A or B in full, by our name; called when a tensor is read.
    """

    def tensor(part: HfPlace, adapter: str) -> Tensor:
        ours = read_full(adapter)
        if part.expert is not None:
            return ours[part.expert]
        if part.hf_tensor.rotated is None or adapter.endswith("A"):
            return ours
        theirs = torch.empty_like(ours)
        theirs[map_.rows(part.hf_tensor, 0, len(ours))] = ours
        return theirs

    out = {}
    for part in map_.places[name]:
        for adapter in adapter_names(name):
            stored = adapters.tensors[adapter]
            key = f"{PREFIX}{module_of(part)}.lora_{adapter[-1]}.weight"
            make = partial(tensor, part, adapter)
            out[key] = LazyTensor(stored.shape[-2:], stored.dtype, slice_of_full(make))
    return out


def _fused_tensors(
    adapters: Adapters, map_: TensorMap, names: list[str], read_full: ReadAdapter
) -> dict[str, LazyTensor]:
    """Return PEFT's tensors A and B, by name, of the adapters of our weights that transformers fuses in one matrix.

    Args:
        adapters: the adapters.
        map_: the map of the model's tensors.
        names: our names of the weights in that matrix that have adapters.
        read_full: returns A or B in full, by our name; called when a tensor is read.
    """
    place = map_.places[names[0]][0]
    outputs, inputs = map_.hf_shapes[place.hf_name]
    rank, dtype = sum(map(adapters.rank, names)), adapters.tensors[adapter_names(names[0])[0]].dtype

    def fused() -> AdapterPair:
        pairs = (AdapterPair(*map(read_full, adapter_names(name))) for name in names)
        return fuse_adapters(pairs, (rows_in_fused(map_, name) for name in names), outputs)

    path = f"{PREFIX}{module_of(place)}"
    return {
        f"{path}.lora_A.weight": LazyTensor((rank, inputs), dtype, slice_of_full(lambda: fused().down)),
        f"{path}.lora_B.weight": LazyTensor((outputs, rank), dtype, slice_of_full(lambda: fused().up)),
    }


def _stacked_tensors(adapters: Adapters, map_: TensorMap, name: str, read_full: ReadAdapter) -> dict[str, LazyTensor]:
    """Return PEFT's tensors A and B, by name, of the adapters of stacked experts; {} for w3, which is fused with w1.

    If both parameters are adapted, PEFT nests the module of gate and up (.base_layer) in that of down.

    Args:
        adapters: the adapters.
        map_: the map of the model's tensors.
        name: our name of w1, w2 or w3 of a layer's experts.
        read_full: returns A or B in full, by our name; called when a tensor is read.
    """
    block, _, leaf = name.rpartition(".")
    if leaf == "w3":
        return {}  # together with w1
    path = f"{PREFIX}{module_of(map_.places[name][0]).rpartition('.')[0]}"
    path += ".base_layer" if leaf == "w1" and f"{block}.w2" in adapters.matrices else ""
    down, up = (adapters.tensors[adapter] for adapter in adapter_names(name))
    (experts, rank, inputs), outputs = down.shape, up.shape[1]
    if leaf == "w1":
        rank, outputs = 2 * rank, 2 * outputs

    def pair() -> AdapterPair:
        gate_or_down = AdapterPair(*map(read_full, adapter_names(name)))
        if leaf == "w2":
            return gate_or_down.to_peft()
        pairs = gate_or_down, AdapterPair(*map(read_full, adapter_names(f"{block}.w3")))
        rows = gate_up_rows(outputs, map_.places[name][0].hf_tensor.stride > 1)
        return fuse_adapters(pairs, rows, outputs).to_peft()

    return {
        f"{path}.lora_A.weight": LazyTensor((experts * rank, inputs), down.dtype, slice_of_full(lambda: pair().down)),
        f"{path}.lora_B.weight": LazyTensor((outputs, experts * rank), up.dtype, slice_of_full(lambda: pair().up)),
    }
