"""A plan as tables for people, and as JSON for programs."""

from __future__ import annotations

from typing import Any

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import DEGREE_PATHS, Fold
from titanmoe.plan.communicators import communicators, nccl_bytes, usable_bytes
from titanmoe.plan.devices import Device
from titanmoe.plan.generation_costs import GeneratorPlan
from titanmoe.plan.planned_overlap import overlap_text
from titanmoe.plan.price import Price
from titanmoe.plan.search import PricedMapping, Search
from titanmoe.text_report import columns, format_bytes

HEAD = (
    *("step", "tokens/s/GPU", "MFU", "memory", "pp", "stages", "dp_replicate", "dp_shard", "cp", "tp"),
    *("edp", "ep", "etp", "microbatch", "recompute", "reshard", "schedule", "dispatcher", "binds"),
)

TIE = 0.13
"""Error of the ratio of two steps within which four of five pairs of published mappings of one model are. Mappings that
differ by less are ties (docs/planner.md)."""
RANGES = {"etp": 0.09, "pipeline": 0.24, "FSDP + EP": 0.17, "FSDP": 0.12, "launch-bound": 0.6}
"""Error of step time within which four of five published runs are, by kind of mapping (docs/planner.md)."""
LAUNCH_BOUND = 0.2
"""Fraction of a step that waits for the host, above which a mapping is of that kind."""
TIGHT = 0.95
"""Fraction of the usable memory above which the allocator may have to free and allocate again: with 1.03 times the peak
Qwen3's layers took a third longer on an H200, with 1.05 no longer (docs/benchmarks.md)."""
HELPS = {
    "attention": "nothing but fewer tokens a sample, or a device with faster attention",
    "memory-bound work": "--compile.enable; a larger tp or cp shares it among more ranks",
    "waiting for the host": "a larger microbatch",
    "messages of tp": "a smaller tp, with cp or more data ranks instead",
    "messages of cp": "a smaller cp, or ring rather than allgather",
    "rows to experts and back": "ep x etp within a node, a smaller etp, or rows that overlap (docs/moe.md#overlap)",
    "messages of pp": "fewer stages per rank, or a smaller pp",
    "bubble": "more microbatches (a larger batch, fewer data ranks), more stages per rank, or a smaller pp",
    "weights and gradients": "more tokens a microbatch, a larger ep, or a pipeline, which gathers weights once a step",
    "copies of weights": "more tokens a microbatch, or a larger ep or pp",
    "optimizer": "more tokens a step",
}
"""What helps, by what takes the most time of a step after matrix work."""


GENERATOR_HEAD = "answers", "generator"
"""Further columns of a recipe with [rl]: seconds of a step's answers, and the mapping that generates them."""


def row(mapping: PricedMapping) -> tuple[str, ...]:
    """Return the cells of a mapping in a plan's table, under HEAD and with [rl] GENERATOR_HEAD."""
    config, fold, price = mapping.config, mapping.fold, mapping.price
    per_rank, overlap = stages_per_rank(config), config.moe.overlap
    return (
        f"{price.step:.3g} s",
        f"{price.tokens:,.0f}",
        f"{price.mfu:.1%}",
        format_bytes(mapping.peak),
        *(str(n) for n in (fold.pp, per_rank, fold.dp_replicate, fold.dp_shard, fold.cp, fold.tp)),
        *(str(n) for n in (fold.edp * fold.edp_replicate, fold.ep, fold.etp, config.training.local_batch_size)),
        config.activation_checkpoint.mode,
        config.parallelism.reshard_after_forward,
        _schedule_text(config) if fold.pp > 1 else "-",
        config.moe.dispatcher + " in halves" * (overlap == "halves"),
        price.bottleneck,
        *_generator_cells(mapping.generator),
    )


def _generator_cells(generator: GeneratorPlan | None) -> tuple[str, ...]:
    if generator is None:
        return ()
    degrees = " ".join(f"{name} {n}" for name, n in vars(generator.parallelism).items() if n > 1)
    return f"{generator.seconds:.3g} s", degrees or "dp"


def _schedule_text(config: Config) -> str:
    """Return the name of the schedule, and what else pipeline stages do together."""
    shared = " with vocab" * (config.parallelism.vocab == "pipeline")
    return config.pipeline.schedule + " in pairs" * (config.moe.overlap == "pairs") + shared


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


def range_text(mapping: PricedMapping) -> str:
    """Return the likely range of a step's time, from the errors of published runs, such as "2.1 to 2.9 s"."""
    error = RANGES[kind_of_mapping(mapping.fold, mapping.price)]
    return f"{mapping.price.step * (1 - error):.3g} to {mapping.price.step * (1 + error):.3g} s"


def tight_memory(mapping: PricedMapping, device: Device) -> str:
    """Return a warning if a mapping needs over TIGHT of the usable memory and fits; else ""."""
    usable = usable_bytes(mapping.config, mapping.fold, device)
    if not TIGHT * usable < mapping.peak <= usable:
        return ""
    return (
        f"{format_bytes(mapping.peak)} is over {TIGHT:.0%} of the usable memory: the allocator may free and allocate "
        "again, which has cost a third of a step. Leave 5 % free."
    )


def table(result: Search, device: Device, world: int) -> list[str]:
    """Return the lines that `titanmoe plan` prints about the fastest mappings."""
    best = result.best[0]
    together = ", by step and answers together" if best.generator else ""
    lines = [f"The fastest of {result.considered:,} mappings on {world} {device.name} that may fit{together}:", ""]
    head = HEAD + (GENERATOR_HEAD if best.generator else ())
    lines += columns([head, *map(row, result.best)], right=tuple(range(14)))
    ties = sum(is_tie(mapping, best) for mapping in result.best)
    if ties > 1:
        lines += ["", f"The first {ties} are ties, within {TIE:.0%} of the fastest: take the simplest of them."]
    lines += ["", f"Four of five published runs of that kind ({kind_of_mapping(best.fold, best.price)}) would put the "
              f"first at {range_text(best)}."]  # fmt: skip
    if note := tight_memory(best, device):
        lines += ["", note]
    if result.best_unfolded is not None and result.best_unfolded.fold == best.fold:
        lines += ["", "It is the best unfolded one too (etp = tp, ep within dp)."]
    elif result.best_unfolded is not None:
        gain = result.best_unfolded.seconds / best.seconds - 1
        within = ", which is a tie" if is_tie(result.best_unfolded, best) else ""
        lines += [
            "",
            f"The best unfolded one (etp = tp, ep within dp), {gain:.1%} slower than the best of all{within}:",
            "",
        ]
        lines += columns([head, row(result.best_unfolded)], right=tuple(range(14)))
    else:
        lines += ["", "No unfolded one (etp = tp, ep within dp) fits."]
    if best.generator:
        lines += [
            "",
            *generation_lines(best),
            "",
            "The fastest mappings as in a recipe:",
            "",
            *mapping_tables(best.config),
        ]
    return lines


def generation_lines(mapping: PricedMapping) -> list[str]:
    """Return the lines on the answers of a step: what generating them takes, and for which lengths."""
    generator, rl = mapping.generator, mapping.config.rl
    turn = " in one turn" if rl.max_turns > 1 else ""
    lines = [
        f"The answers of a step, {rl.answers} to each of {rl.prompts_per_step} prompts, take {generator.seconds:.3g} s "
        f"if prompts have {generator.lengths.prompt:,} tokens and answers {generator.lengths.answer:,}{turn}. This is "
        "a roofline, not compared with a GPU.",
        f"A token of {generator.rows} answers on each data rank takes the device {generator.token * 1000:.3g} ms and "
        f"the host {generator.launches * 1000:.3g} ms:",
        "",
    ]
    parts = sorted(generator.components.items(), key=lambda item: -item[1])
    return lines + columns([(name, f"{t:.3g} s", f"{t / generator.seconds:.1%}") for name, t in parts], right=(1, 2))


def mapping_tables(config: Config) -> list[str]:
    """Return the tables of a recipe that have the mappings of generating and training, as indented lines."""
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
    price, fold, rows = mapping.price, mapping.fold, overlap_text(mapping.config)
    axes = ", ".join(f"{name} {n}" for name in DEGREE_PATHS if (n := getattr(fold, name)) > 1)
    lines = [
        f"The recipe's mapping on {fold.world} {device.name}: {axes or 'one rank'}; "
        f"{price.microbatches} microbatches of {mapping.config.training.local_batch_size}"
        f"{f'; rows travel {rows}' if rows else ''}.",
        f"A step takes {price.step:.4g} s ({range_text(mapping)} by published runs of that kind, "
        f"{kind_of_mapping(fold, price)}): {price.tokens:,.0f} tokens/s/GPU, MFU {price.mfu:.1%}.",
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
    if note := tight_memory(mapping, device):
        lines[-1:] = [note, ""]
    components = sorted(rank.components.items(), key=lambda item: -item[1])
    lines += columns([(name, format_bytes(n), f"{n / rank.peak:.1%}") for name, n in components], right=(1, 2))
    return [*lines, "", *generation_lines(mapping)] if mapping.generator else lines


def budget(mapping: PricedMapping, tokens: float, device: Device) -> list[str]:
    """Return the lines on the days and US dollars of training on that many tokens."""
    days, cost = days_and_cost(mapping, tokens, device)
    return ["", f"{tokens:.3g} tokens: {days:,.1f} days, {cost:,.0f} US dollars at {device.price:g} per GPU and hour."]


def days_and_cost(mapping: PricedMapping, tokens: float, device: Device) -> tuple[float, float]:
    """Return the days and US dollars of training on that many tokens."""
    hours = tokens / (mapping.price.tokens * mapping.fold.world) / 3600
    return hours / 24, hours * mapping.fold.world * device.price


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
        "unfolded": mapping.unfolded,
        "step_s": price.step,
        "kind": kind_of_mapping(fold, price),
        "range": RANGES[kind_of_mapping(fold, price)],
        "tokens_per_second_per_gpu": price.tokens,
        "mfu": price.mfu,
        "binds": price.bottleneck,
        "time": price.components,
        "generation": generator and generator.as_json(),
        "memory": [
            {
                "peak": rank.peak,
                "weights": rank.weights,
                "gradients": rank.gradients,
                "moments": rank.moments,
                "moment": rank.peak_during,
                "components": rank.components,
            }
            for rank in mapping.memory
        ],
    }
