"""The state of a run as named tensors that do not depend on the mapping; and which options a resume may change.

    model.NAME                                         parameters and expert biases; layers numbered in the full model
    optimizer.exp_avg.NAME, optimizer.exp_avg_sq.NAME  AdamW's moments; another optimizer's have names of its own
    optimizer.momentum.NAME                            Muon's, of weights that are made of matrices

All else is numbers, in the manifest's record: step, tokens, loader, config, mapping. Random numbers are functions of
(seed, step, index), so seed and step are the whole state of every generator. In the checks of a resume `old` is the
config of the run that saved, and `new` or `now` that of this run, both by dotted path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titanmoe.checkpoint.hf.fetch import local_folder, resolve_place, short_name
from titanmoe.checkpoint.manifest import flatten_record, unknown_fields
from titanmoe.checkpoint.write_tensors import TensorShard
from titanmoe.config.fields import to_tables, toml_value
from titanmoe.config.schema import Config, MoE
from titanmoe.fold.degrees import Fold
from titanmoe.models.families import family_of
from titanmoe.models.families.family import attention
from titanmoe.models.tensors import stored_name
from titanmoe.moe.balance_losses.balance_spec import active_losses
from titanmoe.parallel.materialize import local_shard

Targets = dict[str, tuple[str, TensorShard]]
"""Stored tensors' names and this rank's shards of them, by name on this rank. Tied weights share a stored tensor."""


def shards_to_load(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    moments: Mapping[str, Mapping[str, Tensor]] | None,
    tied: bool,
) -> Targets:
    """Return this rank's shards of weights, buffers and optimizer state, which a load fills in place.

    Args:
        parameters: parameters by name, with layers by their number in the full model.
        buffers: persistent buffers by name, full on this rank.
        moments: by the parameter's name and the moment's, such as "exp_avg": a plain tensor for this rank's shard of
            the parameter; None for weights alone.
        tied: whether the embedding and the head are one stored tensor.

    Returns:
        By name on this rank, "model.NAME" or "optimizer.MOMENT.NAME": the name of the stored tensor, and the shard,
            which shares the memory of the tensor that was passed.
    """
    out: Targets = {}
    for name, parameter in parameters.items():
        part, offset = local_shard(parameter.detach())
        stored, shape = stored_name(name, tied), tuple(parameter.shape)
        out[f"model.{name}"] = f"model.{stored}", TensorShard(part, offset, shape)
        for moment, tensor in moments.get(name, {}).items() if moments else ():
            out[f"optimizer.{moment}.{name}"] = f"optimizer.{moment}.{stored}", TensorShard(tensor, offset, shape)
    for name, buffer in buffers.items():
        out[f"model.{name}"] = f"model.{name}", TensorShard(buffer, (0,) * buffer.dim(), tuple(buffer.shape))
    return out


def shards_to_save(named_shards: Targets) -> dict[str, TensorShard]:
    """Return the shards to write by the stored tensor's name; of tied weights only the one that has this name itself.

    They are chosen from this rank's shards, as `shards_to_load` returns them.
    """
    return {stored: shard for name, (stored, shard) in named_shards.items() if name == stored}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's persistent buffers by name, without any that is also registered as a parameter."""
    parameters = {id(p) for p in module.parameters()}
    return {
        f"{path}.{name}" if path else name: buffer
        for path, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set and id(buffer) not in parameters
    }


def run_record(config: Config, fold: Fold) -> dict[str, Any]:
    """Return the manifest entries that describe a run: "seed", "config", "mapping" and "versions" (titanmoe, torch)."""
    from titanmoe import __version__

    return {
        "seed": config.training.seed,
        "config": to_tables(config),
        "mapping": {"world": fold.world, "attention": fold.attention_axes, "experts": fold.expert_axes},
        "versions": {"titanmoe": __version__, "torch": torch.__version__},
    }


# ---- a config that differs from the one before

WEIGHT_KEEPING_FIELDS = (
    "hf", "change", "family", "size", "init_std", "norm_eps", "top_k", "score_function", "norm_topk", "route_scale",
    "num_groups", "top_groups", "sliding_window", "rotary_dim", "media_tokens", "mtp_after_norm",
)  # fmt: skip
"""Fields of [model] that change how weights are used, but not which there are; fields that begin with rope_ as well."""
DEFAULT_OPTIMIZER = "adamw"
"""The optimizer of checkpoints whose record names none."""


def keeps_weights(name: str, family: str) -> bool:
    """Return whether a model has weights of the same names and shapes after this field of [model] is changed.

    The field is named without "model.". full_attention_every keeps weights in families whose other layers are attention
    with a window, but not in those with linear attention, which has weights of its own.
    """
    if name == "full_attention_every":
        return family_of(family).mixer is attention
    return name in WEIGHT_KEEPING_FIELDS or name.startswith("rope_")


def _refused_changes(old: Mapping[str, Any], new: Mapping[str, Any], paths: Iterable[str], why: str) -> list[str]:
    """Return an error line, which gives `why`, for each path whose value has changed; paths that `old` lacks pass."""
    return [
        f"{path} is {toml_value(new[path])} and was {toml_value(old[path])} when the checkpoint was made: "
        f"{why}; use that value, or start a new run"
        for path in paths
        if path in old and old[path] != new[path]
    ]


def refused_shapes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return an error line for each changed field of [model] on which names or shapes of weights depend.

    Fields that `old` lacks pass.
    """
    fields, family = (path for path in new if path.startswith("model.")), new["model.family"]
    shapes = (path for path in fields if not keeps_weights(path.removeprefix("model."), family))
    return _refused_changes(old, new, shapes, "the weights do not fit")


def refused_adapters(old: Mapping[str, Any], new: Mapping[str, Any], adapters: bool) -> list[str]:
    """Return an error line for each reason why a checkpoint of LoRA adapters does not fit this run; [] if it fits.

    Ranks and lora.targets are compared, not the scale (lora.alpha). It never fits a run without adapters.

    Args:
        old: the config of the run that saved, by dotted path.
        new: the config of this run, by dotted path.
        adapters: whether this run trains adapters.
    """
    if adapters:
        adapter_fields = "lora.rank", "lora.experts_rank", "lora.targets"
        return _refused_changes(old, new, adapter_fields, "the adapters do not fit")
    rank = old.get("lora.rank")
    return [f"the checkpoint has only adapters and none of the weights under them: set lora.rank = {rank}, as it was"]


def refused_record(
    record: Mapping[str, Any],
    now: Mapping[str, Any],
    path: Path,
    adapters: bool,
    model_only: bool,
    initial_adapter: str,
) -> list[str]:
    """Return an error line for each reason, found in its manifest alone, why a run cannot start from a checkpoint.

    [] if it can.

    Args:
        record: the manifest's record.
        now: the run's config, by dotted path.
        path: the checkpoint's folder, for the messages.
        adapters: whether the run trains adapters.
        model_only: whether the run takes weights alone, and begins at step 0.
        initial_adapter: the PEFT folder from which the run's adapters begin; "" if none.
    """
    old, has_base = flatten_record(record.get("config", {})), "base" in record
    load = f"with checkpoint.load = {toml_value(str(path))} and checkpoint.model_only = true"
    problems = unknown_fields(old) + refused_shapes(old, now)
    if has_base:
        problems += refused_adapters(old, now, adapters)
    elif adapters and not model_only:
        problems.append(
            "the checkpoint has full weights, and no adapters to go on with: begin a run of another job.name on them, "
            f"{load}"
        )
    if has_base and model_only and initial_adapter:
        problems.append(
            "the checkpoint has adapters, and checkpoint.initial_adapter names others: leave that option out"
        )
    if model_only:
        return problems
    if not record.keys() >= {"loader", "step", "tokens"}:
        how = record.get("made", "not made by a training run")
        text = f"the checkpoint contains only weights ({how}): set checkpoint.model_only = true to begin from them"
        return [*problems, text]
    restart = f"begin a run of another job.name from its weights, {load}"
    problems += refused_optimizer(old, now, restart)
    problems += refused_freeze(old, now, restart)
    return problems + ([] if adapters else refused_weights(old, now))  # a digest says more than a name


def refused_weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return an error line if checkpoint.initial_hf names another model than when the resumed run began; else [].

    Also if the run began from random weights. [] if the option is "" in `new`, or not in `old`, or if the former model
    is not on this machine and has the same short name (`short_name`): it may have been moved.
    """
    path = "checkpoint.initial_hf"
    before, now = old.get(path), new[path]
    if before is None or not now or resolve_place(before) == resolve_place(now):
        return []
    if before and local_folder(before) is None and short_name(before) == short_name(now):  # it was moved
        return []
    was = f"was {toml_value(before)} when the run began" if before else "the run began from random weights"
    keep = "keep that value" if before else "leave it (or model.hf) out"
    return [
        f"{path} is {toml_value(now)}, and {was}: it goes on from its own weights, not from those; {keep}, or start a "
        "new run (another job.name)"
    ]


def refused_freeze(old: Mapping[str, Any], new: Mapping[str, Any], restart: str) -> list[str]:
    """Return an error line if training.freeze lists more, fewer or other parameters than before; else [].

    `restart` is the message's advice on how to use the checkpoint's weights alone.
    """
    before, now = old.get("training.freeze", []), new["training.freeze"]
    if sorted(before) == sorted(now):
        return []
    return [
        f"training.freeze = {toml_value(now)} trains other parameters than the checkpoint has moments of, which was "
        f"made with {toml_value(before)}: use that list, or {restart}"
    ]


def refused_optimizer(old: Mapping[str, Any], new: Mapping[str, Any], restart: str) -> list[str]:
    """Return an error line if the checkpoint has other optimizer state than this run keeps; else [].

    That is so if optimizer.name has changed, or optimizer.router_matrix. `restart` is the message's advice on how to
    use the checkpoint's weights alone.
    """
    before, now = old.get("optimizer.name", DEFAULT_OPTIMIZER), new["optimizer.name"]
    if before != now:
        return [
            f"optimizer.name = {toml_value(now)} cannot go on from the moments of {toml_value(before)}, which the "
            f"checkpoint has: set optimizer.name = {toml_value(before)}, or {restart}"
        ]
    routers = "optimizer.router_matrix"
    if old.get(routers, new[routers]) != new[routers]:
        return [
            f"{routers} = {toml_value(new[routers])} keeps another state of routers than the checkpoint has: set it to "
            f"{toml_value(old[routers])}, or {restart}"
        ]
    return []


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return lines for the log on fields that differ between two configs, and notes on what the changes lead to.

    Fields that `old` lacks and those of [checkpoint], [job] and [metrics] are left out.
    """
    changed = [
        f"{path}: {toml_value(old[path])} -> {toml_value(new[path])}"
        for path in new
        if path in old and old[path] != new[path] and not path.startswith(("checkpoint.", "job.", "metrics."))
    ]
    return changed + _grouping_notes(old, new)


def _grouping_notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return lines for the log on losses and token drops that change as samples or tokens are grouped differently."""
    notes = []
    if old.get("training.global_batch_size") != new["training.global_batch_size"]:
        notes.append("note: the global batch has changed; the loss curve differs from here on")

    def regrouped(*paths: str) -> bool:
        return any(old.get(path) != new[path] for path in paths)

    per_microbatch = regrouped("training.local_batch_size", "parallelism.dp_shard", "parallelism.dp_replicate")
    moe = MoE(**{path.removeprefix("moe."): value for path, value in new.items() if path.startswith("moe.")})
    if terms := [term.name for term in active_losses(moe) if term.spec.by_microbatch and per_microbatch]:
        notes.append(f"note: other microbatches than before for {' and '.join(terms)} (docs/moe.md)")
    drops = new["moe.capacity_factor"] and new["moe.capacity_scope"] == "sub_sequence"
    if drops and (per_microbatch or regrouped("parallelism.tp", "parallelism.cp")):
        notes.append("note: sub_sequence capacity drops within different groups of tokens than before (docs/moe.md)")
    return notes
