"""Everything that can be refused before the first process group exists, in one list."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, FoldError, derive
from titanmoe.fold.legality import node_violations, violations
from titanmoe.train.runtime import read_environment


def _symmetric(config: Config, fold: Fold) -> Iterator[str]:
    """What dispatcher = "symm_mem" asks of the machine and the mapping; a group of one sends nothing."""
    ranks = fold.ep * fold.etp
    if config.moe.dispatcher != "symm_mem" or ranks == 1:
        return
    from titanmoe.moe.symmetric import MOST, missing  # imports torch

    if lack := missing(config.training.device):
        yield f'moe.dispatcher = "symm_mem" cannot run here: {lack}; use dispatcher = "alltoall"'
    held = config.model.num_experts // fold.ep
    for name, number in (
        (f"ep * etp = {fold.ep} * {fold.etp}", ranks),
        (f"model.num_experts / ep = {config.model.num_experts} / {fold.ep}", held),
    ):
        if number > MOST:
            yield (
                f'moe.dispatcher = "symm_mem" takes at most {MOST} ranks of ep * etp and {MOST} experts on a rank, and '
                f'{name} is {number}: use another ep or etp, or dispatcher = "alltoall"'
            )


def _grouped(config: Config, fold: Fold) -> Iterator[str]:
    """What torch's grouped matrix product cannot do; "auto" takes the loop instead."""
    dtype = config.training.mixed_precision_param
    if config.moe.grouped_mm != "grouped":
        return
    if dtype == "float64":
        yield 'moe.grouped_mm = "grouped" has no float64: use "auto", which takes the loop there'
        return
    unit = 16 // (4 if dtype == "float32" else 2)
    hidden = config.model.expert_hidden // fold.etp
    for name, width in (("model.expert_hidden / etp", hidden), ("model.dim", config.model.dim)):
        if width % unit:
            yield (
                f'moe.grouped_mm = "grouped" wants rows of whole 16-byte units, {unit} elements of {dtype}; {name} is '
                f'{width}: use "auto", or a multiple of {unit}'
            )


def _kernels(config: Config) -> Iterator[str]:
    if config.moe.kernels != "triton":
        return
    from titanmoe.ops.device import chosen
    from titanmoe.ops.kernels import missing

    if reason := missing(chosen(config.training.device) == "cuda"):
        yield (f'moe.kernels = "triton", but {reason}: use "auto", which takes them where they can run, or "torch"')


def _eight_bits(config: Config, fold: Fold) -> Iterator[str]:
    """What the experts' products in 8 bits ask for."""
    if config.moe.expert_dtype == "compute":
        return
    from titanmoe.moe import fp8
    from titanmoe.ops.device import chosen

    dtype, hidden = config.training.mixed_precision_param, config.model.expert_hidden // fold.etp
    for name, width in (("model.expert_hidden / etp", hidden), ("model.dim", config.model.dim)):
        if width % fp8.UNIT:
            yield (
                f'moe.expert_dtype = "{config.moe.expert_dtype}" wants rows of whole 16-byte units; {name} is '
                f'{width}: use a multiple of {fp8.UNIT}, or expert_dtype = "compute"'
            )
    if config.moe.expert_dtype != "fp8":
        return
    if reason := fp8.missing(chosen(config.training.device) == "cuda"):
        yield (
            f'moe.expert_dtype = "fp8" needs 8-bit products, but {reason}: use expert_dtype = "compute", or '
            '"fp8_emulated" to see what the roundings do'
        )
    if dtype != "bfloat16":
        yield (
            f'moe.expert_dtype = "fp8" gives results in bfloat16, and training.mixed_precision_param = "{dtype}": use '
            '"bfloat16" there, or expert_dtype = "compute"'
        )
    if config.moe.grouped_mm == "loop":
        yield (
            'moe.expert_dtype = "fp8" is a grouped product, and moe.grouped_mm = "loop" asks for none: use '
            'grouped_mm = "auto", or expert_dtype = "compute"'
        )


def _attention(config: Config, fold: Fold) -> Iterator[str]:
    """What attention_backend = "torch" asks of the device, the model and the documents; "auto" takes ours instead."""
    options, model, training = config.parallelism, config.model, config.training
    if options.attention_backend != "torch":
        return
    import torch

    from titanmoe.config.blocks import window
    from titanmoe.ops.device import chosen
    from titanmoe.parallel.attend import pick_backend

    device = chosen(training.device)
    dtype, apart = getattr(torch, training.mixed_precision_param), config.data.packing != "stream"
    masked = {apart or window(model, layer) > 0 for layer in range(model.num_layers)}
    ways = [
        pick_backend("torch", options.cp_kind, fold.cp, device, dtype, mask, model.attention_sinks) for mask in masked
    ]
    for why in sorted({why for _, why in ways if why}):
        other = "" if fold.cp > 1 and options.cp_kind == "ring" else ', or cp > 1 with cp_kind = "ring"'
        fix = other if device == "cpu" else ', or cp_kind = "allgather" or "ulysses"' if masked != {False} else ""
        yield f'parallelism.attention_backend = "torch" cannot hold here: {why}; use "auto"{fix}'


def _watched(config: Config, world: int) -> Iterator[str]:
    profile = config.profile
    found = find_spec("wandb") if config.metrics.wandb else None
    if config.metrics.wandb and (found is None or found.origin is None):  # of a mere folder of that name, none
        asked = config.metrics.wandb
        yield f'metrics.wandb = "{asked}" needs a package: pip install "titanmoe[wandb]", or leave it empty'
    if late := [step for step in profile.steps if step > config.training.steps]:
        yield f"profile.steps has {late[0]}, and training.steps is {config.training.steps}: choose earlier steps"
    if absent := [rank for rank in profile.ranks if rank >= world]:
        yield f"profile.ranks has {absent[0]}, and the ranks are 0 to {world - 1}: choose among them"
    if profile.memory == "steps" and not profile.steps:
        yield 'profile.memory = "steps" needs profile.steps: list some, or take "oom"'
    if profile.memory != "none":
        from titanmoe.ops.device import chosen

        if chosen(config.training.device) == "cpu":
            yield f'profile.memory = "{profile.memory}" records the memory of GPUs, and this run has none: use "none"'


def ranks_of_a_node(config: Config) -> int:
    asked = config.parallelism.node
    return read_environment().local_world if asked == -1 else asked


def problems(config: Config, world: int) -> list[str]:
    found = violations(world, config)
    try:
        fold = derive(world, config.parallelism)
    except FoldError:
        return found
    if fold.cp > 1 and config.parallelism.cp_kind == "ulysses" and config.model.num_heads // fold.tp % fold.cp:
        heads = config.model.num_heads // fold.tp
        found.append(
            f'parallelism.cp_kind = "ulysses" shares {heads} heads (model.num_heads {config.model.num_heads} / '
            f"tp {fold.tp}) over cp = {fold.cp}, {heads} % {fold.cp} = {heads % fold.cp}: use another cp, or "
            "cp_kind ring or allgather"
        )
    found += list(_symmetric(config, fold))
    if config.moe.dispatcher == "hierarchical":
        found += node_violations(fold, ranks_of_a_node(config))
    found += [*_grouped(config, fold), *_kernels(config), *_eight_bits(config, fold)]
    found += list(_attention(config, fold))
    found += list(_watched(config, world))
    if not found:
        from titanmoe.parallel import pipeline  # imports torch

        samples = config.training.global_batch_size
        microbatches = 1 if samples == -1 else samples // (config.training.local_batch_size * fold.dp)
        found += pipeline.problems(config, fold, microbatches)
    return found
