"""Translate a Hugging Face config.json to our [model] and back.

Reading refuses every key whose value changes the logits and that [model] cannot express; writing checks that the result
reads back as the same model. Which keys a family has is in its HuggingFace table (models/families).
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from titanmoe.checkpoint import safe_files
from titanmoe.checkpoint.hf.model_differences import OWN_PREFIX, differing_fields, field_value, has_dense_layers
from titanmoe.config import laws, ranges
from titanmoe.config.blocks import moe_layers
from titanmoe.config.component_kinds import ComponentError, Components
from titanmoe.config.field_values import closest
from titanmoe.config.fields import ranges as field_ranges
from titanmoe.config.fields import toml_value
from titanmoe.config.load import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.config.schema import Config, Model, Own
from titanmoe.models.families import FAMILIES, family_of, preset, shipped
from titanmoe.models.families.dense import DENSE
from titanmoe.models.families.huggingface import LATER, HuggingFace, Unrepresentable
from titanmoe.moe.score_functions import SCORE_FUNCTIONS

CONFIG = "config.json"
AUX_LOSS = "router_aux_loss_coef"
TEXT, TIED = "text_config", "tie_word_embeddings"
# Keys that do not affect the logits, or that other functions of this package read.
IGNORED_KEYS = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "_name_or_path"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", AUX_LOSS),
    *("pretraining_tp", "quantization_config", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"),
    *("num_mtp_layers", "initial_context_length", "experts_per_token"),
    # what every transformers config has, and nothing in these models reads
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "is_encoder_decoder", "return_dict"),
    *("output_hidden_states", "output_attentions"),
}
TRAINING_ONLY = {
    "attention_dropout": "titanmoe has no attention dropout",
    "router_jitter_noise": "transformers multiplies the input of the router and of the experts by noise in training; "
    "moe.jitter does it for the router alone",
    "output_router_logits": "transformers adds a balance term to the loss; here that is moe.aux_loss, which "
    "model.hf sets where both are the same",
}
"""Keys that only affect training, and are not supported unless null, 0 or false."""

UPCYCLE = (
    "titanmoe convert --upcycle {} OUT gives it experts, and --checkpoint.load OUT with --checkpoint.model_only true "
    "trains that"
)
"""Hint for a dense model."""
ANOTHER_FAMILY = "docs/extending_families.md shows how to add one that has more"

KEYS_OF_EVERY_MODEL = {"is_causal": True, "per_layer_config": None}
"""Keys that transformers follows in every model, and their only values that [model] can express: the defaults."""

MOST_BYTES = 32 << 20
"""Limit on the bytes of a JSON file: the index of 140,000 tensors has 15 MB; parsed, up to 30 times that."""
MOST_MATRICES = 2**20
"""Limit on layers times experts, each of which has names in lists; the largest published model has 61 * 384."""
KEYS_FOR_ANY_MODEL_TYPE = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Keys that are copied from a config.json with another model_type."""
DERIVED_FIELDS = ("num_kv_heads", "head_dim")
"""Fields derived from others if config.json has null, or has nothing and its family has no default."""


class ParsedConfig(NamedTuple):
    """A config.json, parsed."""

    hf: HuggingFace
    model: Model
    json: dict[str, Any]
    """Keys of config.json that describe the text model."""
    unknown: list[str]
    """Keys that are not known and were ignored."""

    @property
    def aux_loss(self) -> float | None:
        """Value of moe.aux_loss with the weight of router_aux_loss_coef; None if transformers adds no such loss.

        Theirs is E * sum_e (routed_e / tokens) * p_e with sums over all layers together: top_k under uniform routing.
        Ours is 1 in each layer, and layers add up. So router_aux_loss_coef * top_k / layers with experts is the same
        weight, and where all layers have the same loads, the same loss.
        """
        coefficient = self.json.get(AUX_LOSS, self.hf.defaults.get(AUX_LOSS))
        if AUX_LOSS not in self.hf.defaults or not self.json.get("output_router_logits"):
            return None
        return coefficient * self.model.top_k / moe_layers(self.model) if moe_layers(self.model) else None

    @property
    def notes(self) -> list[str]:
        """Lines for the log on keys of config.json that are not supported or not known."""
        notes = [
            f"{CONFIG} has {key} = {json.dumps(self.json[key])}: {why}"
            for key, why in TRAINING_ONLY.items()
            if self.json.get(key)
        ]
        if self.unknown:
            notes.append(f"{CONFIG} has unknown keys, which were ignored: {', '.join(self.unknown)}")
        return notes


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ConfigError if it is missing, above 32 MiB, unreadable or no object."""
    try:
        data = parse_json(safe_files.read(file.parent, file.name, MOST_BYTES))
    except safe_files.NOT_FOUND_ERRORS:
        where = file.parent if file.parent.is_dir() else f"{file.parent}, which is not a folder"
        raise ConfigError(f"no {file.name} in {where}: name the folder of a Hugging Face model") from None
    except safe_files.CheckpointError as error:
        raise ConfigError(str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}: copy the file again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is JSON of a {type(data).__name__}, not of an object: copy the file again")
    return data


def describe_folder(folder: Path, dense: bool = False) -> ParsedConfig:
    """Parse and check the config.json in a model's folder.

    Args:
        folder: the folder.
        dense: expect a model without experts, to be upcycled; others are refused then, and dense ones otherwise.

    Raises:
        ConfigError: with everything in it that [model] cannot express; or it is missing or not JSON.
    """
    file = folder / CONFIG
    return parse_config_json(read_json(file), str(file), dense)


def parse_config_json(config: dict[str, Any], source: str, dense: bool = False) -> ParsedConfig:
    """Translate the contents of a config.json to our [model].

    Keys that are not known here are listed in the result, not refused. Of a multimodal model only the text model is
    translated.

    Args:
        config: the contents.
        source: the file's name, for messages.
        dense: expect a model without experts, to be upcycled; others are refused then, and dense ones otherwise.

    Raises:
        ConfigError: with everything in it that [model] cannot express.
    """
    hf = _type_of(config, source, dense)
    outer, config = config, text_model_config(config, hf, source)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, keys in hf.fields.items():
        entries = {key: config[key] for key in keys if key in config}
        if not entries and keys[0] in hf.defaults:
            entries = {keys[0]: hf.defaults[keys[0]]}
        first = next(iter(entries.values()), None)
        if any(value != first for value in entries.values()):
            problems.append(f"{source} has {' and '.join(f'{k} = {v!r}' for k, v in entries.items())}: set one value")
        elif first is not None:
            values[name] = first
        elif name not in DERIVED_FIELDS:
            problems.append(f"{source} has no {keys[0]}, which gives model.{name}: add that key")
    oversized = _oversized(values, source)
    problems += oversized or _mistyped(hf, values, source)
    if is_sound := not problems:
        values.setdefault("num_kv_heads", values["num_heads"])
        values.setdefault("head_dim", values["dim"] // max(1, values["num_heads"]))
    for conversion in hf.conversions if not oversized else ():
        try:
            values |= conversion.read({**hf.defaults, **config})
        except Unrepresentable as error:
            problems.append(f"{source} {error}")
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            if is_sound:  # else it may follow from a key that is missing, or of a wrong type
                keys = ", ".join(conversion.keys)
                problems.append(f"{source} has {keys} that cannot be read ({error!r}): correct them")
    if is_sound:
        problems += _oversized(values, source) or _mistyped(hf, values, source)
    if AUX_LOSS in config and type(config[AUX_LOSS]) not in (int, float):
        problems.append(f"{source} has {AUX_LOSS} = {config[AUX_LOSS]!r}: write a number")
    model = Model() if problems else _model(hf, values)
    problems = problems or [f"{source}: {violation.text}" for violation in violations_of(model)]
    if outer is not config and outer.get(TIED, config.get(TIED)) != config.get(TIED):
        both = f"{TIED} = {outer[TIED]!r}, and {config.get(TIED)!r} in {TEXT}"
        problems.append(f"{source} has {both}: set one value")
    problems += [
        f"{source} has {key} = {config[key]!r}, titanmoe's {hf.family} only has {json.dumps(value)}: {ANOTHER_FAMILY}"
        for key, value in (hf.fixed | KEYS_OF_EVERY_MODEL).items()
        if key in config and config[key] != value
    ]
    if problems:
        raise ConfigError(problems)
    unknown = [f"{key} (beside {TEXT})" for key in misplaced_keys(outer, hf)]
    unknown += sorted(config.keys() - known_keys(hf))
    return ParsedConfig(hf, replace(model, size=nearest_size(model)), config, unknown)


def context_length(parsed: ParsedConfig) -> int | None:
    """Return max_position_embeddings of a config.json, whatever RoPE scaling it has; None without a positive one."""
    length = parsed.json.get("max_position_embeddings")
    return length if type(length) is int and length > 0 else None


def context_note(folder: Path, model: Model, seq_len: int) -> str:
    """Return a line for the log if samples exceed the context in a model's config.json; "" if not, or if it has none.

    Args:
        folder: the folder with config.json.
        model: [model] of the run, whose RoPE may stretch the context.
        seq_len: tokens of a sample.
    """
    try:
        context = context_length(describe_folder(folder))
    except ConfigError:  # carried along from another version, or of another kind
        return ""
    if context is None:
        return ""
    stretched = int(model.rope_factor * model.rope_original_len) if model.rope_scaling == "yarn" else 0
    if seq_len <= max(context, stretched):
        return ""
    return (
        f"training.seq_len = {seq_len:,} is above {context:,}, the max_position_embeddings of its {CONFIG}: positions "
        "beyond that are new to the model; lower seq_len, or stretch RoPE (model.change with rope_scaling, or a larger "
        "rope_theta)"
    )


def known_keys(hf: HuggingFace) -> set[str]:
    """Return the keys of a config.json that we read for a family, or know to have no effect; others get a note."""
    return IGNORED_KEYS | _keys_read(hf)


def _keys_read(hf: HuggingFace) -> set[str]:
    """Return the keys of a config.json that are translated, checked or named in a note for a family."""
    keys = *hf.fields.values(), *(conversion.keys for conversion in hf.conversions)
    return {hf.mtp_key}.union(TRAINING_ONLY, KEYS_OF_EVERY_MODEL, hf.defaults, hf.fixed, *keys)


def text_model_config(config: dict[str, Any], hf: HuggingFace, source: str) -> dict[str, Any]:
    """Return the keys of a config.json that describe the text model, in one dict.

    For a multimodal model these are the keys in its text_config and those beside it that both models share; keys of the
    text model that stand only beside text_config are left out, because transformers does not look for them there. Other
    models' dicts are returned unchanged. The value of model_type becomes that of the text model.

    Raises:
        ConfigError: a multimodal model has no text_config; the message names `source`.
    """
    if not hf.outer_type or config.get("model_type") != hf.outer_type:
        return config
    text = config.get(TEXT)
    if not isinstance(text, dict):
        raise ConfigError(f"{source} has no object {TEXT}, which has the keys of the text model: copy the file again")
    left_out = {TEXT, "vision_config", *misplaced_keys(config, hf)}
    shared = {key: value for key, value in config.items() if key not in left_out}
    return shared | text | {"model_type": hf.model_type}


def misplaced_keys(config: dict[str, Any], hf: HuggingFace) -> list[str]:
    """Return a multimodal model's keys that stand beside text_config and not in it, where transformers ignores them.

    Only keys that its text model would read; [] for other models. `config` has the contents of config.json.
    """
    if not hf.outer_type or config.get("model_type") != hf.outer_type:
        return []
    of_text = _keys_read(hf) | {"max_position_embeddings", AUX_LOSS}
    return sorted(of_text.difference(hf.outer_keys, [TIED], config[TEXT]) & config.keys())


def _type_of(config: dict[str, Any], source: str, dense: bool) -> HuggingFace:
    """Return the format that model_type names: of a family with experts, or with `dense` of one without.

    Raises:
        ConfigError: there is none of that kind; the message says what else to do with such a model.
    """
    kind = config.get("model_type")
    maps = [family.hf for family in reversed(shipped().values()) if family.hf]
    types = {kind: hf for hf in maps for kind in (hf.model_type, hf.outer_type) if kind}
    plain = {hf.model_type: hf for hf in DENSE}
    accepted_types, other_kind_types = (plain, types) if dense else (types, plain)
    if kind in accepted_types:
        return accepted_types[kind]
    if kind in other_kind_types:
        hint = (
            "it has experts, --from-hf converts it" if dense else f"it is dense: {UPCYCLE.format(Path(source).parent)}"
        )
    elif kind in LATER:
        how = "docs/extending_families.md#a-layer-of-its-own shows how to add it"
        hint = f"it needs {LATER[kind]}, which is not here: {how}"
    else:
        near = closest(str(kind), accepted_types, cutoff=0.5)
        begin = f", here from that of {near}" if near else ""
        hint = f"docs/extending_families.md shows how to add one, as a file of names and sizes{begin}"
    raise ConfigError(f"{source} has model_type = {kind!r}, not one of {', '.join(sorted(accepted_types))}: {hint}")


def _oversized(values: dict[str, Any], source: str) -> list[str]:
    """Return an error line for each number beyond the limit of its field of [model], or for too many experts in all.

    Checked before lists of that length are made. `values` are by field of [model], `source` is the file's name.
    """
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    problems = []
    for name, value in numbers.items():
        limits = field_ranges().get(f"model.{name}")
        most = limits.high if limits and limits.high is not None else ranges.LIMIT - 1
        if value > most or value < -ranges.LIMIT:
            problems.append(f"{source} gives model.{name} = {ranges.number_text(value)}, and the limit is {most:,}")
    layers, experts = numbers.get("num_layers", 0), numbers.get("num_experts", 0)
    if not problems and layers * experts > MOST_MATRICES:
        problems.append(
            f"{source} gives {layers} layers (model.num_layers) of {experts} experts (model.num_experts), "
            f"{layers * experts:,} in all, and the limit is {MOST_MATRICES:,}"
        )
    return problems


def _mistyped(hf: HuggingFace, values: dict[str, Any], source: str) -> list[str]:
    """Return an error line for each value of a wrong type. Integers become floats in place where a float is needed.

    `values` are by field of [model], `source` is the file's name.
    """
    kinds = {f.name: type(getattr(Model(), f.name)) for f in fields(Model)}
    kinds |= {f"{OWN_PREFIX}{name}": type(default) for name, default in family_of(hf.family).own.items()}
    values |= {n: float(v) for n, v in values.items() if kinds[n] is float and type(v) is int}
    return [
        f"{source} gives model.{name} = {value!r}, which is not of type {kinds[name].__name__}"
        for name, value in values.items()
        if type(value) is not kinds[name]
    ]


def _model(hf: HuggingFace, values: dict[str, Any]) -> Model:
    """Return [model] with checked values over the format's `switches`; dense_hidden is 0 without dense layers."""
    own = {name.removeprefix(OWN_PREFIX): value for name, value in values.items() if name.startswith(OWN_PREFIX)}
    values = {name: value for name, value in values.items() if not name.startswith(OWN_PREFIX)}
    own = Own({**family_of(hf.family).own, **own})
    model = Model(**{**hf.switches, **values, "family": hf.family, "own": own})
    if hf.dense:
        model = replace(model, num_dense_layers=model.num_layers)
    return model if has_dense_layers(model) else replace(model, dense_hidden=0)


def violations_of(model: Model) -> list[ranges.Violation]:
    """Return what of [model] is out of range or, if nothing is, contradicts itself."""
    out_of_range = laws.out_of_range({f"model.{name}": value for name, value in asdict(model).items()})
    return out_of_range or list(
        laws.contradictions(Config(model=model, components=Components((FAMILIES, SCORE_FUNCTIONS))))
    )


def nearest_size(model: Model) -> str:
    """Return the name of the model family's preset size that differs from the model in the fewest fields."""

    def count_differences(size: str) -> int:
        return len(differing_fields(model, Model(**preset(model.family, size))))

    return min(family_of(model.family).sizes, key=count_differences)


def model_table(model: Model) -> str:
    """Return the text of a recipe's [model] table: family and size, then the fields that differ from that size."""
    base = preset(model.family, model.size)
    names = [f.name for f in fields(Model) if f.name not in ("family", "size")]
    different = [n for n in names if getattr(model, n) != base.get(n, getattr(Model(), n))]
    lines = [f"{n} = {toml_value(getattr(model, n))}" for n in ("family", "size", *different)]
    return "\n".join(["[model]", *lines])


# ---- [model] to config.json


def hf_format_of(family: str) -> HuggingFace:
    """Return the names and keys with which Hugging Face stores a model family; ConfigError if it does not store it."""
    try:
        hf = family_of(family).hf
    except ComponentError as error:
        raise ConfigError(str(error)) from None
    if hf is None:
        how = "add hf to that Family (docs/extending_families.md)"
        raise ConfigError(f"model.family = {family!r} has no Hugging Face format: {how}")
    return hf


def to_config_json(model: Model, carried: dict[str, Any] | None, dtype: str, seq_len: int) -> dict[str, Any]:
    """Return the contents of a config.json with which transformers builds the same model.

    Args:
        model: the model.
        carried: the config.json that the model came from, whose other keys are copied, or only special tokens and
            context if its model_type is another; None if it came from none.
        dtype: the weights' dtype, such as "bfloat16".
        seq_len: training sequence length in tokens: max_position_embeddings if neither `carried` nor YaRN gives it.

    Raises:
        ConfigError: transformers cannot express the model.
    """
    hf = hf_format_of(model.family)
    source_config = carried = text_model_config(carried, hf, CONFIG) if carried else carried
    if carried is not None and carried.get("model_type") != hf.model_type:
        carried = None
    old_entries = {"architectures": [], "model_type": "", "max_position_embeddings": _context(model, seq_len)}
    old_entries |= carried or {
        key: value for key, value in (source_config or {}).items() if key in KEYS_FOR_ANY_MODEL_TYPE
    }
    old_entries.pop("quantization_config", None)
    if hf.mtp_key:
        old_entries[hf.mtp_key] = model.mtp_depth
    kind = "dtype" if "dtype" in old_entries else "torch_dtype"
    new_entries = {"architectures": [hf.architecture], "model_type": hf.model_type, kind: dtype}
    if carried is None or differing_fields(model, _interpreted(carried)):
        key_of_field = {
            name: next((key for key in keys if key in old_entries), keys[0]) for name, keys in hf.fields.items()
        }
        for key in (key for conversion in hf.conversions for key in conversion.keys):
            old_entries.pop(key, None)
        new_entries |= {key: value for key, value in hf.fixed.items() if key not in old_entries}
        new_entries |= {key: field_value(model, name) for name, key in key_of_field.items()}
        try:
            for conversion in hf.conversions:
                new_entries |= conversion.write(model)
        except Unrepresentable as error:
            raise ConfigError(f"transformers' {hf.model_type} {error}: it cannot be exported to it") from None
        if "dense_hidden" in hf.fields and not has_dense_layers(model):
            key = key_of_field["dense_hidden"]
            new_entries[key] = old_entries.get(key, model.expert_hidden)
    config = old_entries | new_entries
    interpreted = _interpreted(config)
    if different := differing_fields(model, interpreted):
        raise ConfigError(
            [
                f"model.{name} = {field_value(model, name)!r}, but transformers' {hf.model_type} only has "
                f"{field_value(interpreted, name)!r}: a model with another value cannot be exported"
                for name in different
            ],
            "the checkpoint's [model]",
        )
    return config


def _interpreted(config: dict[str, Any]) -> Model:
    return parse_config_json(config, "the config.json to write").model


def _context(model: Model, seq_len: int) -> int:
    """Return the positions to which YaRN stretches RoPE, or without YaRN `seq_len`."""
    return int(model.rope_original_len * model.rope_factor) if model.rope_scaling == "yarn" else seq_len
