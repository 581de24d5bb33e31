"""Read a PEFT folder as our adapters: experts as modules of their own, or stacked in one parameter (target_parameters).

Only plain LoRA is read: any other setting of adapter_config.json that changes what adapters compute is refused, and so
is any tensor that is no adapter of a weight of the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanmoe.checkpoint.hf.config_json import hf_format_of, read_json
from titanmoe.checkpoint.hf.huggingface_source import compress_names
from titanmoe.checkpoint.hf.peft_fused import (
    AdapterPair,
    from_peft,
    fused_matrices,
    gate_up_rows,
    is_block_diagonal,
    rows_in_fused,
    split_adapters,
)
from titanmoe.checkpoint.hf.peft_write import CONFIG, DOWN, GATE_UP, PREFIX, STACKED, WEIGHTS, module_of
from titanmoe.checkpoint.hf.safetensors_folder import SafetensorsFolder
from titanmoe.checkpoint.hf.tensor_map import Shape, TensorMap
from titanmoe.checkpoint.move_in_blocks import ReadBlock, block_slices, slice_of_full
from titanmoe.checkpoint.read_adapters import Adapters, name_in_block
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import LoRA, Model
from titanmoe.models.lora_spec import adapter_names, is_adaptable

PLAIN_LORA_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "use_bdlora", "fan_in_fan_out"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"), (None,)),
    **dict.fromkeys(("monteclora_config", "megatron_config"), (None,)),
}
"""Keys of adapter_config.json (PEFT 0.21), and the values that stand for plain LoRA on an unchanged base."""
IGNORED_KEYS = (
    # Read by _Reader, or checked with the tensors.
    *("base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora"),
    *("rank_pattern", "alpha_pattern", "target_parameters"),
    # Which modules get adapters when PEFT makes them: the file's tensors say it as well.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # What made them, and how they are loaded. Weights are tied in embeddings alone, whose adapters are refused.
    *("peft_version", "auto_mapping", "inference_mode", "runtime_config", "ensure_weight_tying"),
    # Options of what is refused above, or of how A and B begin on an unchanged base.
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # Acts in training alone; a run that begins from the adapters says that it has none.
    "lora_dropout",
)
"""Keys whose values do not change what adapters compute, or that are read elsewhere."""
BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Prefixes of init_lora_weights with which PEFT changes the base weights when it makes adapters."""
KINDS = {
    "alpha_pattern": (dict, "an object"),
    "rank_pattern": (dict, "an object"),
    "target_parameters": (list, "a list"),
}
"""The types that some keys of adapter_config.json must have unless they are null, and their names in JSON."""
PATTERN = re.compile(r"\^?(\.\*)?([\w-]|\\?\.|\\d\+)+(\(\\\.weight\)\?)?")
"""The keys of alpha_pattern that are accepted. PEFT takes them as regular expressions, of which others could take
exponential time: only module names with a few harmless operators are read."""

MOST_PATTERN = 200
"""Most characters of a key of alpha_pattern."""


def is_peft(path: Path) -> bool:
    """Return whether a folder is one of PEFT's adapters: it has an adapter_config.json."""
    return (path / CONFIG).is_file()


def base_name_of(path: Path) -> str:
    """Return the base model's name in a PEFT folder's adapter_config.json, with @REVISION if it has one; else "".

    Raises:
        ConfigError: the name or the revision is not a string.
    """
    settings = read_json(path / CONFIG)
    names = {key: settings.get(key) or "" for key in ("base_model_name_or_path", "revision")}
    for key, name in names.items():
        if not isinstance(name, str) or "\0" in name:
            raise ConfigError(
                f"{path / CONFIG} has {key} = {name!r:.80}, which is not a name: write that of the base model"
            )
    base, revision = names.values()
    return f"{base}@{revision}" if base and revision else base


class _Reader:
    """A reader of one PEFT folder, which collects its adapters in `tensors` and all that is wrong in `problems`."""

    def __init__(self, path: Path, model: Model):
        """Read adapter_config.json and the headers of the tensors; ConfigError if the folder is not one of PEFT's."""
        if not is_peft(path):
            raise ConfigError(
                f"{path} is no folder of PEFT, as there is no {CONFIG}: name one that save_pretrained wrote"
            )
        self.path, self.model, self.settings = path, model, read_json(path / CONFIG)
        self.files = SafetensorsFolder(path, WEIGHTS)
        self.map = TensorMap(model, hf_format_of(model.family))
        self.interleaved = any(hf_tensor.stride > 1 for hf_tensor in self.map.hf.hf_tensors.values())
        """Whether gate and up rows are interleaved in the fused weight."""
        self.tensors: dict[str, LazyTensor] = {}
        self.alphas: dict[str, float] = {}
        """The lora.alpha that gives each weight the scale that it has in the folder."""
        self.stacks: dict[str, dict[str, tuple[str, str]]] = {}
        """Keys of A and B of stacked experts, by our name of the layer's experts and by parameter (GATE_UP, DOWN)."""
        self.used: set[str] = set()
        self.problems: list[str] = []

    def adapters(self) -> Adapters:
        """Return the folder's adapters, whose tensors are read later, apart from fused ones. Call it once.

        Raises:
            ConfigError: with everything that is wrong, which is also in `problems`.
        """
        self.problems += unsupported_settings(self.settings)
        self.problems += self._mistyped()
        if not self.problems:
            for name in filter(is_adaptable, self.map.our_shapes):
                if self.map.places[name][0].hf_tensor.fused is None:
                    self._add_unfused(name)
                elif name == fused_matrices(self.map, name)[0]:
                    self._add_fused(fused_matrices(self.map, name))
            for layer in (name.rpartition(".")[0] for name in self.map.our_shapes if name.endswith(".experts.w1")):
                self._find_stacked(layer)
            self._add_experts()
            self._refuse_unused_tensors()
        lora = self._lora()
        if self.problems:
            raise ConfigError(self.problems, str(self.path))
        return Adapters(
            path=self.path,
            model=self.model,
            lora=lora,
            tensors=self.tensors,
            base=base_name_of(self.path),
            dropout=float(self.settings.get("lora_dropout") or 0.0),
        )

    def _refuse_unused_tensors(self) -> None:
        """Add a line to `problems` for each tensor in the folder that is no adapter of a weight that can have one.

        If they are all adapters of routers and gates, another line says how to train with PEFT without those.
        """
        unknown = self.files.tensors.keys() - self.used
        self.problems += [
            f"{name}: not an adapter of a matrix that can have one here" for name in compress_names(unknown)
        ]
        modules = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in unknown}
        fixed = {name.removesuffix(".weight") for name in self.map.hf_shapes} & modules
        if not fixed or len(fixed) < len(modules):
            return
        adapted = {key.rpartition(".lora_")[0].rpartition(".")[2] for key in self.used if f".{STACKED}." not in key}
        stacks = [GATE_UP, DOWN] if any(f".{STACKED}." in key for key in self.used) else None
        also = f" and target_parameters={json.dumps(stacks)}" if stacks else ""
        others = ", ".join(sorted({name.rpartition(".")[2] for name in fixed}))
        self.problems.append(
            f'{others}: routers and gates are not adapted here, and "all-linear" adapts them: train with '
            f"target_modules={json.dumps(sorted(adapted))}{also} instead"
        )

    # ---- tensors

    def _tensor_keys(self, name: str, outputs: int) -> dict[str, list[str]]:
        """Return the names in the file of the A and B matrices of a weight's adapter: {"A": [...], "B": [...]}.

        The lists have one name, or one for each expert, and are added to `used`; {} if the weight has no adapter, or
        if tensors are missing or have wrong shapes, which is added to `problems`.

        Args:
            name: our name of the weight.
            outputs: rows of the Hugging Face matrix.
        """
        paths = [f"{PREFIX}{module_of(place)}" for place in self.map.places[name]]
        keys = {leaf: [f"{path}.lora_{leaf}.weight" for path in paths] for leaf in "AB"}
        present = [key for both in keys.values() for key in both if key in self.files.tensors]
        self.used |= {*present}
        if not present:
            return {}
        if missing := {*keys["A"], *keys["B"]} - self.files.tensors.keys():
            self.problems += [f"{key}: missing" for key in compress_names(missing)]
            return {}
        rank = self.files.tensors[keys["A"][0]].shape[0]
        for leaf, needed in (("A", (rank, self.map.our_shapes[name][-1])), ("B", (outputs, rank))):
            for key in keys[leaf]:
                if (shape := self.files.tensors[key].shape) != needed:
                    self.problems.append(f"{key}: shape {shape}, and {needed} is needed: name adapters of this model")
                    return {}
        return keys

    def _add_fused(self, names: list[str]) -> None:
        """Split the adapter of a fused matrix into those of our weights; add these to `tensors` and `alphas`.

        `names` are our names of the weights in the matrix. Does nothing if it has no adapter. Weights for whose rows B
        is zero get no adapter, unless B is zero for all. Each gets its own rows of A if B is block diagonal; otherwise
        all get the full A.
        """
        place = self.map.places[names[0]][0]
        if not (keys := self._tensor_keys(names[0], self.map.hf_shapes[place.hf_name][0])):
            return
        fused = AdapterPair(*(self._read_full(keys[leaf][0]) for leaf in "AB"))
        rows = {name: rows_in_fused(self.map, name) for name in names}
        rows = {name: row for name, row in rows.items() if fused.up[row].any()} or rows
        pairs = split_adapters(fused, [*rows.values()], is_block_diagonal(fused, [*rows.values()]))
        for name, pair in zip(rows, pairs, strict=True):
            for adapter, tensor in zip(adapter_names(name), pair, strict=True):
                self.tensors[adapter] = LazyTensor(tuple(tensor.shape), tensor.dtype, slice_of_full(lambda x=tensor: x))
            self.alphas[name] = self._alpha(module_of(place), len(pair.down) / len(fused.down))

    def _add_unfused(self, name: str) -> None:
        """Add a weight's adapter to `tensors`, to be read later, and to `alphas`. Does nothing if it has none."""
        *experts, outputs, inputs = self.map.our_shapes[name]
        if not (keys := self._tensor_keys(name, outputs)):
            return
        first = self.files.tensors[keys["A"][0]]
        shapes = {"A": (first.shape[0], inputs), "B": (outputs, first.shape[0])}
        for leaf, adapter in zip("AB", adapter_names(name), strict=True):
            read = partial(self._read_unfused, name, keys[leaf], leaf)
            self.tensors[adapter] = LazyTensor((*experts, *shapes[leaf]), first.dtype, read)
        self.alphas[name] = self._alpha(module_of(self.map.places[name][0]))

    def _read_unfused(self, name: str, keys: list[str], leaf: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of our A or B (`leaf`) of a weight: experts stacked, or B's rows in our order of RoPE."""
        hf_tensor = self.map.places[name][0].hf_tensor
        if self.map.places[name][0].expert is not None:
            chosen = keys[offset[0] : offset[0] + shape[0]]
            return torch.stack([self.files.read(key, offset[1:], shape[1:]) for key in chosen])
        if leaf == "A" or hf_tensor.rotated is None:
            return self.files.read(keys[0], offset, shape)
        rows = self.map.rows(hf_tensor, offset[0], shape[0])
        return self._read_full(keys[0])[rows][:, block_slices(offset, shape)[1]]

    def _read_full(self, key: str) -> Tensor:
        shape = self.files.tensors[key].shape
        return self.files.read(key, (0,) * len(shape), shape)

    def _find_stacked(self, block: str) -> None:
        """Add a layer's stacked adapters to `stacks`, if it has any; add lines on missing or wrong ones to `problems`.

        `block` is our name of the layer's experts, such as layers.0.moe.experts.
        """
        layer = block.split(".")[1]
        path = f"model.layers.{layer}.{STACKED}"
        outer, inner = f"{PREFIX}{path}", f"{PREFIX}{path}.base_layer"
        both = f"{inner}.lora_A.weight" in self.files.tensors
        for_down = any(str(target).endswith("down_proj") for target in self.settings.get("target_parameters") or [])
        places = {GATE_UP: inner, DOWN: outer} if both else {DOWN if for_down else GATE_UP: outer}
        pairs: dict[str, tuple[str, str]] = {}
        for parameter, where in places.items():
            keys = f"{where}.lora_A.weight", f"{where}.lora_B.weight"
            if not any(key in self.files.tensors for key in keys):
                continue
            self.used |= {*keys}
            if missing := [key for key in keys if key not in self.files.tensors]:
                self.problems += [f"{key}: missing" for key in missing]
            elif self._has_rank(block, parameter, keys):
                pairs[parameter] = keys
        if pairs:
            self.stacks[block] = pairs

    def _has_rank(self, block: str, parameter: str, keys: tuple[str, str]) -> bool:
        """Return whether A has a rank above 0, equal for all experts; add a line to `problems` if A or B is wrong."""
        experts, outputs, inputs = self.map.our_shapes[f"{block}.{'w2' if parameter == DOWN else 'w1'}"]
        outputs *= 1 + (parameter == GATE_UP)
        (down, up) = (self.files.tensors[key].shape for key in keys)
        rank, rest = divmod(down[0], experts)
        if rest or down[1:] != (inputs,) or up != (outputs, down[0]):
            shapes = f"({experts} r, {inputs}) and ({outputs}, {experts} r)"
            self.problems.append(
                f"{keys[0]} and lora_B: shapes {down} and {up}, and {shapes} are needed: name adapters of this model"
            )
        return not rest and rank > 0

    def _add_experts(self) -> None:
        """Add the adapters of all stacked experts to `tensors` and `alphas`, unless there are `problems` already.

        Gate and up share one A in the folder: each gets its own rows of it if B is block diagonal in every layer, else
        both get the full A.
        """
        if self.problems:
            return
        block_diagonal = all(
            is_block_diagonal(*self._stacked_pair(pairs[GATE_UP], self.map.our_shapes[f"{block}.w1"][0]))
            for block, pairs in self.stacks.items()
            if GATE_UP in pairs
        )
        for block, pairs in self.stacks.items():
            self._add_stacked(block, pairs, block_diagonal)

    def _add_stacked(self, block: str, pairs: dict[str, tuple[str, str]], block_diagonal: bool) -> None:
        """Add the adapters of one layer's stacked experts to `tensors` and `alphas`, all with one rank.

        If B is block diagonal, that rank is down's, or without down half that of gate and up, whose A is split only if
        it has twice that rank; else it is the larger one, to which the other is padded with zeros. Ranks that do not
        fit are added to `problems`.
        """
        path = f"model.layers.{block.split('.')[1]}.{STACKED}"
        experts = self.map.our_shapes[f"{block}.w1"][0]
        ranks = {parameter: self.files.tensors[keys[0]].shape[0] // experts for parameter, keys in pairs.items()}
        rank = ranks.get(DOWN, ranks.get(GATE_UP, 0))
        if DOWN not in ranks and block_diagonal:
            rank //= 2
        elif not block_diagonal:
            rank = max(ranks.values())  # the other is filled up with zeros
        for parameter, keys in pairs.items():
            if block_diagonal and parameter == GATE_UP and ranks[parameter] not in (rank, 2 * rank):
                self.problems.append(
                    f"{keys[0]} has rank {ranks[parameter]}, and down_proj {rank}: {rank} or {2 * rank} can be read"
                )
                continue
            halves = block_diagonal and ranks[parameter] != rank
            for leaf, number in {"w2": None}.items() if parameter == DOWN else {"w1": 0, "w3": 1}.items():
                read_pair = partial(self._read_stacked, keys, experts, rank, number, halves)
                outputs, inputs = self.map.our_shapes[f"{block}.{leaf}"][1:]
                shapes = (experts, rank, inputs), (experts, outputs, rank)
                for which, adapter in enumerate(adapter_names(f"{block}.{leaf}")):
                    dtype = self.files.tensors[keys[which]].dtype
                    read = slice_of_full(lambda read_pair=read_pair, which=which: read_pair()[which])
                    self.tensors[adapter] = LazyTensor(shapes[which], dtype, read)
                module = f"{path}.{parameter.rpartition('.')[2]}"
                self.alphas[f"{block}.{leaf}"] = self._alpha(module, rank / ranks[parameter])

    def _read_stacked(
        self, keys: tuple[str, str], experts: int, rank: int, number: int | None, halves: bool
    ) -> AdapterPair:
        """Read the adapters of stacked experts; return those of gate (number 0), up (1) or down (None).

        With `halves` gate and up have half of the rank of the parameter that fuses them; if not, both get its full A.
        The pair is padded with zeros to `rank`.
        """
        pair, rows = self._stacked_pair(keys, experts)
        if number is not None:
            pair = split_adapters(pair, rows, halves)[number]
        return pair.widened(rank)

    def _stacked_pair(self, keys: tuple[str, str], experts: int) -> tuple[AdapterPair, tuple[slice, slice]]:
        """Read the adapters of stacked experts; return them with the rows of gate and of up, meaningless for down."""
        pair = from_peft(*map(self._read_full, keys), experts)
        return pair, gate_up_rows(pair.up.shape[1], self.interleaved)

    # ---- [lora]

    def _mistyped(self) -> Iterator[str]:
        """Yield an error line for each alpha, pattern or use_rslora in adapter_config.json that cannot be read.

        After the first pattern or target_parameters of a wrong type it stops. Other settings are not looked at.
        """
        for key, (kind, kind_name) in KINDS.items():
            if not isinstance(self.settings.get(key) or kind(), kind):
                yield f"{CONFIG} has {key} = {self.settings[key]!r:.80}, which is not {kind_name}: write one, or null"
                return
        if not isinstance(self.settings.get("use_rslora", False), bool | None):
            yield f"{CONFIG} has use_rslora = {self.settings['use_rslora']!r:.80}: write true or false"
        alphas: dict[str, Any] = self.settings.get("alpha_pattern") or {}
        for key in alphas:
            if len(key) > MOST_PATTERN or not PATTERN.fullmatch(key):
                what = f"{CONFIG} has alpha_pattern with {key!r:.80}"
                yield f"{what}, a regular expression: write names of modules, which alone are read"
        for key, alpha in {"lora_alpha": self.settings.get("lora_alpha", 8), **alphas}.items():
            if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
                yield f"{CONFIG} has {key} = {alpha!r:.80}: write a number above 0"

    def _alpha(self, path: str, ranks: float = 1) -> float:
        """Return the alpha with which an adapter, at the rank that it has here, keeps its scale in the folder.

        That is the folder's alpha times `ranks`, or times its square root with use_rslora, which [lora] takes over.

        Args:
            path: path of the adapter's module, for the first matching key of alpha_pattern; without one it is
                lora_alpha.
            ranks: the adapter's rank here over its rank in the PEFT folder.
        """
        patterns: dict[str, Any] = self.settings.get("alpha_pattern") or {}
        matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", path))
        alpha = float(next(matching, self.settings.get("lora_alpha", 8)))
        # Roots are not exact: 12 digits make alphas that are meant to be equal so.
        return float(f"{alpha * math.sqrt(ranks):.12g}") if self.settings.get("use_rslora") else alpha * ranks

    def _level_alphas(self) -> None:
        """Give adapters of experts the smallest alpha of other weights, else of experts, and multiply their B instead.

        Done only where the factor is a power of two, so that it is exact in every dtype. PEFT doubles the alpha of gate
        and up with their rank.
        """
        others = {alpha for name, alpha in self.alphas.items() if ".experts." not in name}
        experts = {name: alpha for name, alpha in self.alphas.items() if ".experts." in name}
        alpha = min(others or experts.values(), default=1.0)
        for name, given in experts.items():
            if given == alpha or not alpha > 0 or not given > 0 or math.frexp(given / alpha)[0] != 0.5:
                continue
            up = adapter_names(name)[1]
            read = self.tensors[up].read
            self.tensors[up] = replace(self.tensors[up], read=partial(_times, given / alpha, read))
            self.alphas[name] = alpha

    def _lora(self) -> LoRA:
        """Return [lora] of the adapters, whose alphas it levels; defaults if there are `problems`, to which it adds."""
        if self.problems:
            return LoRA()
        self._level_alphas()
        ranks: dict[str, dict[int, str]] = {"lora.rank": {}, "lora.experts_rank": {}}
        alphas: dict[float, str] = {}
        for name, alpha in self.alphas.items():
            rank = self.tensors[adapter_names(name)[0]].shape[-2]
            ranks["lora.experts_rank" if ".experts." in name else "lora.rank"].setdefault(rank, name)
            alphas.setdefault(alpha, name)
        for field, values in (ranks | {"lora.alpha": alphas}).items():
            if len(values) > 1:
                shown = ", ".join(f"{value} ({name_in_block(name)})" for value, name in values.items())
                self.problems.append(
                    f"the adapters have several values of {field}, {shown}, and a recipe has one: save them so"
                )
        if not alphas:
            self.problems.append(f"{WEIGHTS} has no adapters: name another folder")
        if self.problems:
            return LoRA()
        (alpha,), experts_rank = alphas, next(iter(ranks["lora.experts_rank"]), -1)
        rank, rslora = next(iter(ranks["lora.rank"]), max(experts_rank, 1)), bool(self.settings.get("use_rslora"))
        return LoRA(rank, experts_rank, alpha, rslora, targets=list(self.alphas))


def _times(factor: float, read: ReadBlock, offset: Shape, shape: Shape) -> Tensor:
    return read(offset, shape) * factor


def unsupported_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return an error line for each setting in adapter_config.json beyond LoRA or rsLoRA on an unchanged base.

    Unknown keys count unless they are null or false, and so does a lora_dropout that is none. [] if there is none.
    """
    problems = []
    for key, value in settings.items():
        dropout = key == "lora_dropout" and value is not None
        if dropout and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1):
            problems.append(f"{CONFIG} has lora_dropout = {value!r}: write a number from 0 to below 1")
        if key in IGNORED_KEYS or value in PLAIN_LORA_VALUES.get(key, (None, False)):
            continue
        if key == "init_lora_weights" and str(value).lower().startswith(BASE_CHANGING_INITS):
            problems.append(
                f"{CONFIG} has {key} = {value!r}, with which PEFT changes the base when it makes adapters, so that "
                "they are for other weights than the base's: save them as plain LoRA with PEFT's save_pretrained(..., "
                "path_initial_model_for_weight_conversion=...)"
            )
        elif key in PLAIN_LORA_VALUES:
            problems.append(
                f"{CONFIG} has {key} = {value!r}, and only plain LoRA is read: save the adapters without that"
            )
        else:
            unknown = "which is not known here, so that what that changes cannot be told"
            problems.append(f"{CONFIG} has {key} = {value!r}, {unknown}: save the adapters without that")
    return problems


def read_peft(path: Path, model: Model) -> Adapters:
    """Read a PEFT folder as adapters of a model, with their [lora] settings; most tensors are read later.

    Raises:
        ConfigError: with everything that is not LoRA (with rsLoRA's scale or not), targets what [lora] cannot, such as
            routers, differs between adapters in rank or alpha, or does not fit the model.
    """
    return _Reader(path, model).adapters()
