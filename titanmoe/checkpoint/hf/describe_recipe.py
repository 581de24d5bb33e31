"""`titanmoe convert --describe`: write a recipe that trains a model in Hugging Face's format.

Called by `titanmoe convert`. The recipe names model.hf, which fixes [model]; comments say what that is.
"""

from __future__ import annotations

from dataclasses import fields

from titanmoe.checkpoint.hf.config_json import CONFIG, ParsedConfig, context_length, describe_folder
from titanmoe.checkpoint.hf.fetch import describing_folder
from titanmoe.checkpoint.hf.model_differences import OWN_PREFIX, field_value
from titanmoe.config.blocks import moe_layers
from titanmoe.config.fields import toml_value
from titanmoe.config.schema import Model
from titanmoe.data.tokenizer import FILE
from titanmoe.models.count import parameters

CONTEXT = 4096
"""Most tokens of a sample in the recipe, if the model's context is not shorter."""


def write_recipe(name: str) -> str:
    """Return the text of a TOML recipe that trains a Hugging Face model; the user fills in data and steps.

    `name` is a folder, hub name or URL, from which config.json and tokenizer are fetched.

    Raises:
        ConfigError: they cannot be fetched, or [model] cannot express the model.
    """
    folder = describing_folder(name)
    parsed = describe_folder(folder)
    tokenizer = "its own" if (folder / FILE).is_file() else f"none: {folder} has no {FILE}, so text is read as bytes"
    return f"""\
# {_summary(name, parsed.model)}
#
#     titanmoe plan THIS.toml --ranks 8      # which mapping is fast on 8 GPUs, and what it needs
#     titanmoe train THIS.toml --ranks 8
#
# Tokenizer: {tokenizer}.
{"".join(f"# Note: {note}.{chr(10)}" for note in parsed.notes)}
[model]
hf = {toml_value(name)}
# {CONFIG} says, and a recipe may only say otherwise of what model.change lists:
{_model_comments(parsed)}

[data]
# source = "files"          # fill in: what to train on; without it, the source of Python's own library
# paths = ["data.jsonl"]
# format = "chat"           # for conversations

[training]
steps = 100                 # fill in: optimizer steps, each of global_batch_size samples
seq_len = {min(CONTEXT, context_length(parsed) or CONTEXT)}
local_batch_size = 1
global_batch_size = -1      # fill in: samples in a step; -1: one on each data rank

[optimizer]
lr = 1e-5                   # usual for all weights of a model that has been trained

[lr_schedule]
warmup_steps = 10
decay = "cosine"

[activation_checkpoint]
mode = "moe"
"""


def _summary(name: str, model: Model) -> str:
    count = parameters(model)
    blocks = f"{model.num_layers} layers, {moe_layers(model)} of them with {model.num_experts} experts"
    return f"{name}: {model.family}, {blocks}, {_number(count.total)} parameters, {_number(count.active)} active"


def _model_comments(parsed: ParsedConfig) -> str:
    """Return comment lines: fields of [model] in config.json or other than the defaults, and moe.aux_loss."""
    names = [f.name for f in fields(Model) if f.name not in ("hf", "change", "size", "mtp_depth", "own")]
    names += [name for name in parsed.hf.fields if name.startswith(OWN_PREFIX)]
    default, always = Model(), {"family", "norm_topk", *parsed.hf.fields}
    values = {name: field_value(parsed.model, name) for name in names}
    lines = [f"# {n} = {toml_value(v)}" for n, v in values.items() if n in always or v != getattr(default, n)]
    if parsed.aux_loss is not None:
        lines.append(f"# moe.aux_loss = {toml_value(parsed.aux_loss)}, of router_aux_loss_coef")
    return "\n".join(lines)


def _number(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
