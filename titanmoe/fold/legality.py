"""The laws of a mapping. `violations` returns a message for each broken one, with its numbers and what to change.

Called by train, plan, rehearse, `titanmoe fold` and the search for the nearest legal mapping. A law reads only the
degrees that it names, so that one view can be checked without the other: no law ties a degree of attention to one of
the experts. What a machine lacks is checked elsewhere (`titanmoe.train.refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from titanmoe.config.blocks import has_expert_adapters, moe_layers
from titanmoe.config.laws import WIDTHS
from titanmoe.config.ranges import Replicable, choices_text, divides, divisors
from titanmoe.config.schema import Config, Model
from titanmoe.fold.attention_backend import attention_violations
from titanmoe.fold.degrees import DEGREE_PATHS, resolve_degrees
from titanmoe.fold.schedule_laws import pair_violations, schedule_violations
from titanmoe.fold.unsharded_experts import accumulation_violations
from titanmoe.fold.vocabulary_passes import shard_violations, vocabulary_violations

ROW_BYTES = 16
"""The row length of a grouped product is a multiple of so many bytes, or of so many 8-bit numbers."""


def violations(config: Config, world: int) -> list[str]:
    """Return a message for each law (constraint) that the config's mapping breaks on `world` ranks; [] if legal.

    The machine is not known: training.device = "auto" is taken for a GPU, and parallelism.node = -1 for a number that
    fits. Ranks of profile.ranks beyond the world are refused too.
    """
    degrees, problems = resolve_degrees(world, config.parallelism)
    return [*problems, *broken_laws(degrees, config), *_profile_ranks(config, world)]


def broken_laws(degrees: Mapping[str, int], config: Config) -> Iterator[str]:
    """Yield a message for each law (constraint on mappings, such as divisibility) that these degrees break.

    Laws of the recipe's components are among them.

    Args:
        degrees: degrees by name, with "stage", the ranks of a pipeline stage, and "dp", the data ranks; laws that need
            a missing one are not checked.
        config: the recipe, whose own degrees are ignored.
    """
    yield from model_violations(degrees, config)
    for law, *names in (
        (_ulysses, "cp", "tp"),
        (attention_violations, "cp"),
        (_products, "etp"),
        (_adapters, "ep", "etp", "edp"),
        (accumulation_violations, "edp"),
        (_schedule, "pp", "dp"),
        (pair_violations, "pp", "ep", "etp"),
        (vocabulary_violations, "pp", "tp"),
        (shard_violations, "pp", "tp", "cp", "dp_shard"),
    ):
        if set(names) <= degrees.keys():
            yield from law(config, *(degrees[name] for name in names))
    for spec in config.components.specs(config):
        yield from spec.violations(config, degrees)


def model_violations(degrees: Mapping[str, int], config: Config) -> Iterator[str]:
    """Yield a message for each broken law (constraint) that ties degrees to the shapes of the model and the batch.

    They are about the sizes of `divided_fields`, seq_len, the global batch, layers for pp, experts for ep and etp, and
    even shards of experts' weights over edp.

    Args:
        degrees: degrees by name, with "stage", the ranks of a pipeline stage, and "dp", the data ranks; laws that need
            a missing one are not checked.
    """
    model, training = config.model, config.training
    for name, fields in divided_fields(config).items():
        yield from _divides(degrees, name, fields)

    if {"cp", "tp"} <= degrees.keys():
        factors = {"tp": degrees["tp"], "cp": degrees["cp"]}
        if degrees["cp"] > 1 and config.parallelism.cp_placement == "zigzag":
            factors = {"2": 2} | factors  # each cp rank has two chunks, an early and a late one
        unit = prod(factors.values())
        if training.seq_len % unit:
            numbers = f"{' * '.join(factors)} = {' * '.join(map(str, factors.values()))} = {unit}"
            yield _not_a_multiple("training.seq_len", training.seq_len, numbers, unit) + ", or another tp or cp"

    if "dp" in degrees and training.local_batch_size > 0 and training.global_batch_size > 0:
        unit = training.local_batch_size * degrees["dp"]
        if training.global_batch_size % unit:
            numbers = f"training.local_batch_size * data ranks = {training.local_batch_size} * {degrees['dp']} = {unit}"
            yield _not_a_multiple("training.global_batch_size", training.global_batch_size, numbers, unit)

    if degrees.get("pp", 1) > model.num_layers:
        yield (
            f"parallelism.pp = {degrees['pp']} is more than model.num_layers = {model.num_layers}, and a stage has at "
            f"least one layer: use pp of {model.num_layers} or less"
        )

    if moe_layers(model) == 0:
        for name in ("ep", "etp"):
            if degrees.get(name, 1) > 1:
                yield (
                    f"{DEGREE_PATHS[name]} = {degrees[name]}, but none of the {model.num_layers} layers has experts "
                    f"(model.num_dense_layers = {model.num_dense_layers}, model.moe_every = {model.moe_every}): "
                    f"use {name} = 1"
                )
    elif {"ep", "edp", "etp"} <= degrees.keys():
        ep, edp, etp = degrees["ep"], degrees["edp"], degrees["etp"]
        if not experts_shard(model, ep, edp, etp):
            local_experts = model.num_experts // ep
            total = edp * degrees["edp_replicate"]
            fits = [total // n for n in divisors(total) if experts_shard(model, ep, n, etp)]
            fix = choices_text("edp_replicate", fits, degrees["edp_replicate"])
            yield (
                f"{DEGREE_PATHS['edp']} = {edp} ranks cannot shard the weights of {local_experts} experts "
                f"(model.num_experts {model.num_experts} / ep {ep}) evenly, neither by expert ({local_experts} % {edp} "
                f"= {local_experts % edp}) nor along {' and '.join(_uneven_widths(model, edp, etp))}: use {fix}"
            )


def _adapters(config: Config, ep: int, etp: int, edp: int) -> Iterator[str]:
    """Yield a message if the LoRA adapters of experts cannot be sharded evenly over edp.

    An adapter matrix is sharded by expert, else along the width that is not the adapter's rank. Of B of w1 and w3, and
    of A of w2, that is the hidden width, checked here; of the others the model dim, checked for the weights.
    """
    model = config.model
    local_experts, hidden = model.num_experts // ep, model.expert_hidden // etp
    if has_expert_adapters(config) and local_experts % edp and hidden % edp:
        yield (
            f"{DEGREE_PATHS['edp']} = {edp} ranks cannot shard the adapters of {local_experts} experts evenly, neither "
            f"by expert ({local_experts} % {edp} = {local_experts % edp}) nor along model.expert_hidden / etp = "
            f"{hidden} ({hidden} % {edp} = {hidden % edp}): use another ep or edp_replicate, or leave the "
            "experts out of lora.targets"
        )


def _ulysses(config: Config, cp: int, tp: int) -> Iterator[str]:
    heads, remainder = divmod(config.model.num_heads, tp)
    if cp > 1 and config.parallelism.cp_kind == "ulysses" and not remainder and heads % cp:
        yield (
            f'parallelism.cp_kind = "ulysses" divides {heads} heads (model.num_heads {config.model.num_heads} / '
            f"tp {tp}) over cp = {cp}, {heads} % {cp} = {heads % cp}: use another cp, or cp_kind ring or allgather"
        )


def _products(config: Config, etp: int) -> Iterator[str]:
    """Yield a message for each width of experts' weights that the chosen matrix products do not support.

    Rows have to be a multiple of 16 bytes for moe.grouped_mm = "grouped" ("auto" is not checked), and of 16 elements
    for a moe.expert_dtype of 8 bits.
    """
    moe, model, dtype = config.moe, config.model, config.training.mixed_precision_param
    widths = {"model.expert_hidden / etp": model.expert_hidden // etp, "model.dim": model.dim}
    for name, width in widths.items():
        unit = ROW_BYTES // WIDTHS[dtype]
        if moe.grouped_mm == "grouped" and width % unit:
            yield (
                f'moe.grouped_mm = "grouped" needs rows of a multiple of 16 bytes, {unit} elements of {dtype}; '
                f'{name} is {width}: use "auto", or a multiple of {unit}'
            )
        if moe.expert_dtype != "compute" and width % ROW_BYTES:
            yield (
                f'moe.expert_dtype = "{moe.expert_dtype}" needs rows of a multiple of 16 bytes; {name} is {width}: '
                f'use a multiple of {ROW_BYTES}, or expert_dtype = "compute"'
            )


def _schedule(config: Config, pp: int, dp: int) -> Iterator[str]:
    """Yield a message for each reason why the pipeline schedule cannot run with these degrees.

    A global batch of -1 counts as one microbatch per data rank. No message where pp exceeds the layers, or the
    global batch is not a multiple of dp local batches: other laws refuse these.
    """
    training = config.training
    unit = training.local_batch_size * dp
    has_global_batch = training.global_batch_size > 0
    if pp <= config.model.num_layers and unit > 0 and not (has_global_batch and training.global_batch_size % unit):
        yield from schedule_violations(config, pp, dp, training.global_batch_size // unit if has_global_batch else 1)


def _profile_ranks(config: Config, world: int) -> Iterator[str]:
    if absent := [rank for rank in config.profile.ranks if rank >= world > 0]:
        yield f"profile.ranks has {absent[0]}, and the ranks are 0 to {world - 1}: choose among them"


def divided_fields(config: Config) -> dict[str, dict[str, int]]:
    """Return the sizes that each degree has to divide, by degree and name, such as {"tp": {"model.vocab_size": 32000}}.

    A size of 0 is not checked. For a Replicable size it is enough that the size divides the degree.
    """
    model = config.model
    divided: dict[str, dict[str, int]] = {"tp": {}}
    for spec in config.components.specs(config):
        for degree, fields in spec.divided(config).items():
            divided.setdefault(degree, {}).update(fields)
    if config.parallelism.vocab == "tensor":
        divided["tp"]["model.vocab_size"] = model.vocab_size
    moe = moe_layers(model)
    if moe < model.num_layers:
        divided["tp"]["model.dense_hidden"] = model.dense_hidden
    if moe > 0:
        divided["tp"]["model.shared_hidden"] = model.shared_hidden
        divided.setdefault("ep", {})["model.num_experts"] = model.num_experts
        dim = model.dim if model.expert_linear_bias else 0
        divided.setdefault("etp", {}).update({"model.expert_hidden": model.expert_hidden, "model.dim": dim})
    return divided


def experts_shard(model: Model, ep: int, edp: int, etp: int) -> bool:
    """Return whether FSDP can shard a rank's experts over edp without padding: by expert, else along another dim.

    True if ep does not divide the experts, which another law refuses.
    """
    return model.num_experts % ep != 0 or model.num_experts // ep % edp == 0 or not _uneven_widths(model, edp, etp)


def _uneven_widths(model: Model, edp: int, etp: int) -> list[str]:
    """Return a text such as "model.dim = 100 (100 % 8 = 4)" for each width that FSDP cannot shard evenly over edp.

    Matrices are sharded along the model dim, which etp does not split, biases along their width, which etp splits.
    """
    widths, parts = {"model.dim": model.dim}, edp
    if model.expert_linear_bias:
        widths, parts = widths | {"model.expert_hidden": model.expert_hidden}, edp * etp
    return [f"{name} = {n} ({n} % {parts} = {n % parts})" for name, n in widths.items() if n % parts]


def _divides(degrees: Mapping[str, int], name: str, fields: Mapping[str, int]) -> Iterator[str]:
    if name not in degrees:
        return
    degree = degrees[name]
    for field, value in fields.items():
        if value > 0 and not divides(degree, value):
            legal = [
                n
                for n in sorted({n for other in fields.values() for n in divisors(other)})
                if all(divides(n, other) for other in fields.values()) and degrees.get("stage", n) % n == 0
            ]
            fix = choices_text(name, legal, degree)
            if field == "model.vocab_size":
                fix += f", or pad the vocabulary to {value + -value % degree}"
            why = f"({value} % {degree} = {value % degree})"
            if isinstance(value, Replicable):
                why += f", and is no multiple of it ({degree} % {value} = {degree % value})"
            yield f"{DEGREE_PATHS[name]} = {degree} does not divide {field} = {value} {why}: use {fix}"


def _not_a_multiple(field: str, value: int, numbers: str, unit: int) -> str:
    below = value // unit * unit
    near = f"{below} or {below + unit}" if below > 0 else str(unit)
    return f"{field} = {value} is not a multiple of {numbers} ({value} % {unit} = {value % unit}): use {near}"
