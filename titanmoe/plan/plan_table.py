"""A plan as tables for people, and as JSON for programs.

Called by titanmoe.plan.plan_command. The stated errors of a plan are those against published runs (docs/planner.md).
"""

from __future__ import annotations

from typing import Any

from titanmoe.config.schema import RL, Config
from titanmoe.files import format_bytes
from titanmoe.fold.degrees import DEGREE_PATHS, Fold
from titanmoe.plan.communicators import communicators, nccl_bytes, usable_bytes
from titanmoe.plan.devices import Device
from titanmoe.plan.generation_costs import GeneratorPlan
from titanmoe.plan.planned_overlap import overlap_text
from titanmoe.plan.price import Price
from titanmoe.plan.search import PricedMapping, Search, is_unfolded
from titanmoe.text_report import columns

HEAD = ("", "step", "tok/s/GPU", "MFU", "memory", "attention / experts", "bottleneck")
OPTIONS_HEAD = ("", "stages", "dp_replicate", "microbatch", "recompute", "reshard", "schedule", "dispatcher")
"""Heads of a plan's two tables, of which each has a row for each mapping. Their lines have at most 100 columns unless
names are unusually long."""

TIE = 0.13
"""Error of the ratio of two steps within which four of five pairs of published mappings of one model are. Mappings that
differ by less are ties (docs/planner.md)."""
RANGES = {"etp": 0.09, "pipeline": 0.23, "FSDP + EP": 0.17, "FSDP": 0.12, "launch-bound": 0.6}
"""Error of step time within which four of five published runs are, by kind of mapping (docs/planner.md)."""
LAUNCH_BOUND = 0.2
"""Fraction of a step that waits for the host, above which a mapping is of that kind."""
TIGHT = 0.95
"""Fraction of the usable memory above which the allocator may have to free and allocate again: with 1.01 to 1.03 times
the peak Qwen3's layers took 16 to 38 % longer on an H200, with 1.05 no longer (docs/benchmarks.md)."""
RETRIES = "the allocator may free and allocate again (a step 16 to 38% longer)"
"""Warning about memory above TIGHT."""
HELPS = {
    "attention": "nothing but fewer tokens a sample, or a device with faster attention",
    "memory-bound work": "--compile.enable; a larger tp or cp shares it among more ranks",
    "waiting for the host": "a larger microbatch",
    "messages of tp": "a smaller tp, with cp or more data ranks instead",
    "messages of cp": "a smaller cp, or ring rather than allgather",
    "dispatch and combine": "ep x etp within a node, a smaller etp, or moe.overlap (docs/moe.md#overlap)",
    "messages of pp": "fewer stages per rank, or a smaller pp",
    "bubble": "more microbatches (a larger batch, fewer data ranks), more stages per rank, or a smaller pp",
    "weights and gradients": "more tokens a microbatch, a larger ep, or a pipeline, which gathers weights once a step",
    "copies of weights": "more tokens a microbatch, or a larger ep or pp",
    "optimizer": "more tokens a step",
}
"""Advice by what takes the most time of a step after matrix work."""


GENERATOR_HEAD = "completions", "generator"
"""Further columns of a recipe with [rl]: seconds of a step's completions, and the mapping that generates them."""


def degrees_text(fold: Fold) -> str:
    """Return the degrees above 1 of attention and of the experts, such as "pp 4 tp 2 / ep 8", "pp 2 / 1" or "1 / 1"."""
    views = (("pp", "cp", "tp"), ("ep", "etp"))
    return " / ".join(
        " ".join(f"{axis} {n}" for axis in axes if (n := getattr(fold, axis)) > 1) or "1" for axes in views
    )


def time_cells(label: str, mapping: PricedMapping, device: Device) -> tuple[str, ...]:
    """Return the cells of a mapping under HEAD: "!" marks memory above TIGHT."""
    price = mapping.price
    return (
        label,
        f"{price.step:.3g} s ±{error_of(mapping):.0%}",
        f"{price.tokens:,.0f}",
        f"{price.mfu:.1%}",
        format_bytes(mapping.peak) + ("!" if is_tight(mapping, device) else " "),
        degrees_text(mapping.fold),
        price.bottleneck,
    )


def option_cells(label: str, mapping: PricedMapping) -> tuple[str, ...]:
    """Return the cells of a mapping under OPTIONS_HEAD, and with [rl] those under GENERATOR_HEAD after them."""
    config, fold = mapping.config, mapping.fold
    schedule = config.pipeline.schedule + " in pairs" * (config.moe.overlap == "pairs")
    schedule += " with vocab" * (config.parallelism.vocab == "pipeline")
    return (
        label,
        *(str(n) for n in (stages_per_rank(config), fold.dp_replicate, config.training.local_batch_size)),
        config.activation_checkpoint.mode,
        config.parallelism.reshard_after_forward,
        schedule if fold.pp > 1 else "-",
        config.moe.dispatcher + " in halves" * (config.moe.overlap == "halves"),
        *_generator_cells(mapping.generator),
    )


def _generator_cells(generator: GeneratorPlan | None) -> tuple[str, ...]:
    if generator is None:
        return ()
    degrees = " ".join(f"{name} {n}" for name, n in vars(generator.parallelism).items() if n > 1)
    return f"{generator.seconds:.3g} s", degrees or "dp"


def stages_per_rank(config: Config) -> int:
    from titanmoe.fold.pipeline_schedules import stage_ranks

    return len(stage_ranks(config.pipeline, config.parallelism.pp)) // config.parallelism.pp


def is_tie(mapping: PricedMapping, best: PricedMapping) -> bool:
    """Return whether the mapping's seconds are at most 1 + TIE times the best's: within the planner's own error."""
    return mapping.seconds <= (1 + TIE) * best.seconds


def kind_of_mapping(fold: Fold, price: Price) -> str:
    """Return the key of RANGES for a mapping: "launch-bound", "etp", "pipeline", "FSDP + EP" or "FSDP"."""
    if price.components["waiting for the host"] > LAUNCH_BOUND * price.step:
        return "launch-bound"
    return "etp" if fold.etp > 1 else "pipeline" if fold.pp > 1 else "FSDP + EP" if fold.ep > 1 else "FSDP"


def error_of(mapping: PricedMapping) -> float:
    """Return the error, as a fraction of the step time, that four of five published runs of its kind do not exceed."""
    return RANGES[kind_of_mapping(mapping.fold, mapping.price)]


def is_tight(mapping: PricedMapping, device: Device) -> bool:
    """Return whether a mapping needs over TIGHT of the usable memory and fits."""
    usable = usable_bytes(mapping.config, mapping.fold, device)
    return TIGHT * usable < mapping.peak <= usable


def table(result: Search, device: Device, world: int) -> list[str]:
    """Return the lines that `titanmoe plan` prints about the fastest mappings and the best unfolded one.

    Args:
        result: a search that found at least one mapping.
        world: number of ranks, which the heading names.
    """
    best, unfolded = result.best[0], result.best_unfolded
    together = ", by step and completions together" if best.generator else ""
    lines = [f"The fastest of {result.considered:,} mappings on {world} {device.name} that may fit{together}:", ""]
    listed = list(result.best)
    alike = [
        i for i, one in enumerate(listed) if unfolded and (one.fold, one.seconds) == (unfolded.fold, unfolded.seconds)
    ]
    if unfolded and not alike:
        listed.append(unfolded)
    ties = sum(is_tie(mapping, best) for mapping in listed)
    labels = [f"{i}{'=' if ties > 1 and is_tie(mapping, best) else ' '}" for i, mapping in enumerate(listed, 1)]
    rows = list(zip(labels, listed, strict=True))
    options_head = OPTIONS_HEAD + (GENERATOR_HEAD if best.generator else ())
    lines += columns([HEAD, *(time_cells(label, mapping, device) for label, mapping in rows)], right=(0, 1, 2, 3, 4))
    lines += [
        "",
        *columns(
            [options_head, *(option_cells(label.rstrip("= "), mapping) for label, mapping in rows)], right=(0, 1, 2, 3)
        ),
        "",
    ]
    lines.append("±: four of five published runs of that kind of mapping are within this error.")
    if ties > 1:
        lines.append(f"=: {ties} ties, within {TIE:.0%} of the fastest. Take the simplest of them.")
    if any(is_tight(mapping, device) for mapping in listed):
        lines.append(f"!: over {TIGHT:.0%} of usable memory: {RETRIES}.")
    kind = "unfolded one (etp = tp, ep within dp)"
    if unfolded is None:
        lines.append(f"No {kind} fits.")
    else:
        gain, number = unfolded.seconds / best.seconds - 1, alike[0] + 1 if alike else len(listed)
        slower = f"{gain:.1%} slower than the fastest{': a tie' * is_tie(unfolded, best)}" * (number > 1)
        lines.append(f"The best {kind} is number {number}{slower and ', ' + slower}.")
    if best.generator:
        lines += [
            "",
            *generation_lines(best.generator, best.config.rl),
            "",
            "The fastest mappings as in a recipe:",
            "",
            *mapping_tables(best.config),
        ]
    return lines


def generation_lines(generator: GeneratorPlan, rl: RL) -> list[str]:
    """Return the lines on a step's completions, of a generator under one mapping: time by component, text lengths."""
    turn = " in one turn" if rl.max_turns > 1 else ""
    lines = [
        f"The completions of a step, {rl.completions} of each of {rl.prompts_per_step} prompts, take "
        f"{generator.seconds:.3g} s if prompts have {generator.lengths.prompt:,} tokens and completions "
        f"{generator.lengths.completion:,}{turn}. This is a roofline; on one H200 they took twice as long.",
        f"A token of {generator.texts} completions on each data rank takes the device {generator.token * 1000:.3g} ms "
        f"and the host {generator.launches * 1000:.3g} ms:",
        "",
    ]
    parts = sorted(generator.components.items(), key=lambda item: -item[1])
    return lines + columns([(name, f"{t:.3g} s", f"{t / generator.seconds:.1%}") for name, t in parts], right=(1, 2))


def mapping_tables(config: Config) -> list[str]:
    """Return the TOML tables of a recipe that have the mappings of generating and training, as indented lines."""
    axes, experts = config.parallelism, config.parallelism.experts
    tables = {
        "generation.parallelism": vars(config.generation.parallelism),
        "parallelism": {name: getattr(axes, name) for name in ("pp", "dp_replicate", "cp", "tp")},
        "parallelism.experts": {"ep": experts.ep, "etp": experts.etp},
    }
    lines = []
    for name, degrees in tables.items():
        lines += ["", f"    [{name}]", *(f"    {axis} = {degree}" for axis, degree in degrees.items())]
    return lines[1:]


def explanation(mapping: PricedMapping, device: Device) -> list[str]:
    """Return the lines of `titanmoe plan --explain`: time and memory of one mapping by component."""
    price, fold, overlap, error = mapping.price, mapping.fold, overlap_text(mapping.config), error_of(mapping)
    axes = ", ".join(f"{name} {n}" for name in DEGREE_PATHS if (n := getattr(fold, name)) > 1)
    lines = [
        f"The recipe's mapping on {fold.world} {device.name}: {axes or 'one rank'}; "
        f"{price.microbatches} microbatches of {mapping.config.training.local_batch_size}"
        f"{f'; dispatch overlaps {overlap}' if overlap else ''}.",
        f"A step takes {price.step:.4g} s ({price.step * (1 - error):.3g} to {price.step * (1 + error):.3g} s by "
        f"published runs of that kind, {kind_of_mapping(fold, price)}): {price.tokens:,.0f} tokens/s/GPU, "
        f"MFU {price.mfu:.1%}.",
        f"After matrix work most of it goes on {price.bottleneck}. What helps: {HELPS[price.bottleneck]}.",
        "",
        "Time of a step:",
        "",
    ]
    parts = sorted(price.components.items(), key=lambda item: -item[1])
    lines += columns([(name, f"{t:.4g} s", f"{t / price.step:.1%}") for name, t in parts if t > 0], right=(1, 2))
    rank = mapping.memory[mapping.fullest]
    usable, messages = usable_bytes(mapping.config, fold, device), nccl_bytes(mapping.config, fold, device)
    count = len(communicators(mapping.config, fold, device.domain))
    fits = "fits" if rank.peak <= usable else f"does not fit, by {format_bytes(rank.peak - usable)},"
    lines += [
        "",
        f"Memory of the fullest pipeline rank, {mapping.fullest} of {len(mapping.memory)}: {format_bytes(rank.peak)}, "
        f"which {fits} into {format_bytes(usable)} ({format_bytes(device.memory)} less {format_bytes(device.reserved)} "
        f"for CUDA and fragmentation and {format_bytes(messages)} for NCCL, which has {count} communicators). "
        f"Most of it during {rank.peak_during}:",
        "",
    ]
    if is_tight(mapping, device):
        lines[-1:] = [f"It is over {TIGHT:.0%} of the usable memory: {RETRIES}.", ""]
    components = sorted(rank.components.items(), key=lambda item: -item[1])
    lines += columns([(name, format_bytes(n), f"{n / rank.peak:.1%}") for name, n in components], right=(1, 2))
    return [*lines, "", *generation_lines(mapping.generator, mapping.config.rl)] if mapping.generator else lines


def budget(mapping: PricedMapping, tokens: float, device: Device) -> list[str]:
    """Return the lines on the days and US dollars of training on `tokens` tokens, at the device's price."""
    hours = tokens / (mapping.price.tokens * mapping.fold.world) / 3600
    days, cost = hours / 24, hours * mapping.fold.world * device.price
    return ["", f"{tokens:.3g} tokens: {days:,.1f} days, {cost:,.0f} US dollars at {device.price:g} per GPU and hour."]


def as_json(mapping: PricedMapping) -> dict[str, Any]:
    """Return a priced mapping as data for `--json`: degrees, options, time by component, memory of each pipeline rank.

    Times are in seconds, memory in bytes.
    """
    config, fold, price, generator = mapping.config, mapping.fold, mapping.price, mapping.generator
    return {
        "mapping": {name: getattr(fold, name) for name in DEGREE_PATHS},
        "local_batch_size": config.training.local_batch_size,
        "recompute": config.activation_checkpoint.mode,
        "schedule": config.pipeline.schedule if fold.pp > 1 else "",
        "stages_per_rank": stages_per_rank(config),
        "vocab": config.parallelism.vocab,
        "dispatcher": config.moe.dispatcher,
        "overlap": config.moe.overlap,
        "reshard_after_forward": config.parallelism.reshard_after_forward,
        "unfolded": is_unfolded(fold),
        "step_s": price.step,
        "kind": kind_of_mapping(fold, price),
        "range": error_of(mapping),
        "tokens_per_second_per_gpu": price.tokens,
        "mfu": price.mfu,
        "bottleneck": price.bottleneck,
        "time": price.components,
        "generation": generator and generator.as_json(),
        "memory": [
            {
                "peak": rank.peak,
                "weights": rank.weights,
                "gradients": rank.gradients,
                "moments": rank.moments,
                "peak_during": rank.peak_during,
                "components": rank.components,
            }
            for rank in mapping.memory
        ],
    }
