"""`titanmoe plan`: memory, time and the best mapping of a recipe, before there is a machine.

Called by titanmoe.cli. titanmoe.plan.search finds the fastest mappings that fit, or prices the one of the recipe
(--explain); titanmoe.plan.plan_table formats them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanmoe.config import ConfigError, load
from titanmoe.config.blocks import separates_documents
from titanmoe.config.command_line import split_words
from titanmoe.config.fields import to_toml
from titanmoe.config.schema import Config, Parallelism
from titanmoe.config.world_size import add_ranks, world_of
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS, with_dispatcher
from titanmoe.text_report import Report, print_report

if TYPE_CHECKING:
    from titanmoe.plan.devices import Device
    from titanmoe.plan.generation_costs import TextLengths
    from titanmoe.plan.search import PricedMapping, Search

MOST_GPUS = 16384
"""The most GPUs that are tried for a model that does not fit."""


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `plan`."""
    plan = commands.add_parser(
        "plan",
        help="the fastest mappings of a recipe on N GPUs, with memory and time by component",
        description="Prices every legal mapping of a recipe on hardware that need not be there, in closed form, and "
        "lists the fastest that fit. docs/planner.md says how far published runs agree. Whatever follows the options "
        "and has the form --table.field value overrides the recipe.",
    )
    add_ranks(plan)
    plan.add_argument(
        "--hardware", metavar="NAME", default="h100", help="a known device, or a TOML file (default h100)"
    )
    plan.add_argument(
        "--stack",
        metavar="NAME",
        default="titanmoe",
        help="software to price: titanmoe (default), megatron, automodel or torchtitan",
    )
    plan.add_argument("--explain", action="store_true", help="the recipe's own mapping: where time and memory go")
    plan.add_argument("--top", type=int, metavar="N", default=10, help="mappings that are listed (default 10)")
    plan.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="routed tokens of the busiest rank over the mean (default: 1, balanced; other stacks: what they showed)",
    )
    plan.add_argument(
        "--reference",
        action="store_true",
        help="count the weights of a frozen copy beside the model, as policy objectives have it (docs/training_api.md)",
    )
    plan.add_argument("--tokens", type=float, metavar="N", help="days and cost of that many tokens, such as 1e12")
    plan.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="[rl]: mean tokens of a prompt (default: what completions leave)"
    )
    plan.add_argument(
        "--completion-tokens",
        type=int,
        metavar="N",
        help="[rl]: mean tokens of a completion (default generation.max_tokens)",
    )
    plan.add_argument("--write", type=Path, metavar="FILE", help="write the recipe with the fastest mapping there")
    plan.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to this file")
    plan.set_defaults(run=run_plan, overrides=[])


def run_plan(args: argparse.Namespace) -> int:
    """Run `titanmoe plan`: print the plan, and write the files of --write and --json.

    Returns:
        0; 1 if the mapping that --explain prices does not fit; 2 after an error, which is printed.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.plan.devices import read_device
    from titanmoe.plan.training_stacks import stack_of

    def report() -> Report:
        args.ranks = world_of(args.ranks, args.overrides, COMPONENTS)
        args.stack = stack_of(args.stack)
        args.imbalance = args.stack.busiest if args.imbalance is None else args.imbalance
        return _plan(args, read_device(args.hardware))

    return print_report(_problems(args), report)


def _plan(args: argparse.Namespace, device: Device) -> Report:
    """Price the recipe's own mapping (--explain) or search for the fastest ones, and return what to print and write.

    Args:
        args: options of `titanmoe plan`, with ranks, stack and imbalance resolved.

    Raises:
        ConfigError: the recipe or an option is refused, or no mapping fits.
    """
    from titanmoe.plan.communicators import usable_bytes
    from titanmoe.plan.links import Factors
    from titanmoe.plan.plan_table import as_json, budget, explanation, is_tie, table
    from titanmoe.plan.search import evaluate

    config, notes = _read_recipe(args)
    if device.name == "cpu":
        notes = [
            "left out: what kernels for CPUs save for backward: memory is that of the kernels for GPUs",
            *(notes or [""]),
        ]
    check_imbalance(config, args.imbalance)
    data: dict[str, Any] = {"hardware": device.name}
    files: dict[Path | None, str] = {}
    if args.explain:
        mapping = evaluate(config, args.ranks, device, Factors(), **_assumptions(args))
        lines, data["plan"] = explanation(mapping, device), as_json(mapping)
        code = int(mapping.peak > usable_bytes(mapping.config, mapping.fold, device))
    else:
        result = _search(config, args, device)
        mapping, lines, code = result.best[0], table(result, device, args.ranks), 0
        data["considered"] = result.considered
        data["best"] = [as_json(one) | {"within_error": is_tie(one, mapping)} for one in result.best]
        data["best_unfolded"] = as_json(result.best_unfolded) if result.best_unfolded else None
        if args.write:
            source = f"titanmoe plan for {args.ranks} {device.name}, from {split_words(args.overrides).recipe}"
            best_config = replace(mapping.config, job=replace(mapping.config.job, ranks=args.ranks))
            files[args.write] = f"# Written by {source}.\n\n{to_toml(best_config)}"
    lines = [*notes, *lines, *(budget(mapping, args.tokens, device) if args.tokens else [])]
    return lines, files | {args.json: json.dumps(data, indent=1) + "\n"}, code


def _assumptions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `titanmoe plan` that `search` and `evaluate` take under the same names."""
    return {name: getattr(args, name) for name in ("imbalance", "stack", "reference", "lengths")}


def check_imbalance(config: Config, imbalance: float) -> None:
    """Raise ConfigError for an imbalance that routing cannot reach: a token goes to an expert once."""
    experts, top_k = config.model.num_experts, config.model.top_k
    if imbalance > experts / top_k:
        raise ConfigError(
            f"--imbalance = {imbalance:g} cannot be: where every token takes the same {top_k} of {experts} "
            f"experts, the busiest expert has {experts / top_k:g} times the mean: use at most that"
        )


def _search(config: Config, args: argparse.Namespace, device: Device) -> Search:
    """Search for the fastest mappings; return a Search that found at least one that fits.

    Raises:
        ConfigError: no mapping is legal, or none fits.
    """
    from titanmoe.fold.legality import violations
    from titanmoe.plan.links import Factors
    from titanmoe.plan.search import search

    result = search(config, args.ranks, device, Factors(), count=args.top, **_assumptions(args))
    if result.best:
        return result
    if result.nearest is None:
        plain = replace(config, parallelism=Parallelism(), training=replace(config.training, local_batch_size=1))
        reasons = violations(plain, args.ranks) or violations(config, args.ranks)
        reasons = reasons or [f"heads, experts, batch and sequence length cannot be divided among {args.ranks} ranks"]
        raise ConfigError(
            [f"no mapping of {args.ranks} ranks is legal. Without any parallelism but data: {reasons[0]}", *reasons[1:]]
        )
    raise ConfigError(_too_large(config, args, device, result.nearest))


def _too_large(config: Config, args: argparse.Namespace, device: Device, nearest: PricedMapping) -> str:
    """Return the error message for a model that no mapping fits, with the single change that helps most.

    Changes are twice the ranks, half the tokens of a sample (with [rl] half the texts at a time), and gradients reduced
    in bfloat16. If the best is not enough, how many GPUs are, up to MOST_GPUS, is said too.

    Args:
        nearest: the mapping that comes closest to fitting. Searches for smaller models and more ranks compare with it.
    """
    from titanmoe.files import format_bytes
    from titanmoe.plan.communicators import usable_bytes
    from titanmoe.plan.links import Factors
    from titanmoe.plan.search import search

    training, generation = config.training, config.generation
    if config.rl.reward:  # prompts and completions are as long as they are
        size = max(config.rl.completions, generation.batch_size // 2)
        smaller_text = f"--generation.batch_size {size}"
        smaller = replace(config, generation=replace(generation, batch_size=size))
    else:
        smaller_text = f"--training.seq_len {training.seq_len // 2}"
        smaller = replace(config, training=replace(training, seq_len=training.seq_len // 2))
    narrow = replace(config, training=replace(training, mixed_precision_reduce="bfloat16"))
    changes = {
        f"--ranks {2 * args.ranks}": (config, 2 * args.ranks),
        smaller_text: (smaller, args.ranks),
        "--training.mixed_precision_reduce bfloat16": (narrow, args.ranks),
    }

    def smallest(changed: Config, world: int) -> PricedMapping | None:
        result = search(changed, world, device, Factors(), count=1, **_assumptions(args))
        return result.best[0] if result.best else result.nearest

    def available(mapping: PricedMapping) -> float:
        return usable_bytes(mapping.config, mapping.fold, device)

    def excess(mapping: PricedMapping) -> float:
        return mapping.peak - available(mapping)

    mappings = {
        change_text: mapping
        for change_text, changed_run in changes.items()
        if (mapping := smallest(*changed_run)) is not None
    }
    best = min(mappings, key=lambda change_text: excess(mappings[change_text]), default="")
    helps = ""
    if best and excess(mappings[best]) < excess(nearest):
        helps = f"; of single changes {best} helps most, to {format_bytes(mappings[best].peak)}"
        if excess(mappings[best]) > 0:
            gpus = 4 * args.ranks
            while gpus <= MOST_GPUS and ((mapping := smallest(config, gpus)) is None or excess(mapping) > 0):
                gpus *= 2
            enough = f"{gpus} GPUs are enough" if gpus <= MOST_GPUS else f"nor are {gpus // 2:,} GPUs enough"
            helps += f", which is still too much: {enough}"
    fold, rank = nearest.fold, nearest.memory[nearest.fullest]
    largest = max(rank.components, key=rank.components.__getitem__)
    return (
        f"no mapping of {args.ranks} {device.name} fits into {format_bytes(available(nearest))} a device: the one that "
        f"needs least, pp {fold.pp} cp {fold.cp} tp {fold.tp} ep {fold.ep} etp {fold.etp} "
        f"microbatch {nearest.config.training.local_batch_size} "
        f"recompute {nearest.config.activation_checkpoint.mode}, "
        f"needs {format_bytes(nearest.peak)} on pipeline rank {nearest.fullest}, "
        f"{format_bytes(excess(nearest))} too much, most of it {largest} "
        f"({format_bytes(rank.components[largest])}){helps}"
    )


def _read_recipe(args: argparse.Namespace) -> tuple[Config, list[str]]:
    """Return the recipe with a global batch size, and lines to print on what the plan assumes or leaves out.

    Sets `args.lengths` to the mean lengths of the texts of [rl], or None. The recipe's own mapping has to be legal only
    for --explain.

    Raises:
        ConfigError: the recipe or an option is refused.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.fold.degrees import derive
    from titanmoe.fold.legality import violations
    from titanmoe.train.find_teacher import teacher_problems

    def check(config: Config) -> list[str]:
        return [*violations(config, args.ranks), *teacher_problems(config, args.ranks)] if args.explain else []

    config = load(args.overrides, COMPONENTS, check)
    if args.reference and config.lora.rank:
        raise ConfigError(
            f"lora.rank = {config.lora.rank}: the weights under the adapters are the reference model "
            "(log_probs(batch, adapters=False)), which takes no memory: leave --reference out"
        )
    if args.reference and config.rl.reward:
        raise ConfigError("a run of [rl] has no model beside it: rl.kl needs [lora]. Leave --reference out")
    notes, training = [], config.training
    args.lengths = _text_lengths(config, args)
    if args.lengths:
        config = _with_samples(config, args)
        notes.append(
            f"[rl]: {config.training.global_batch_size} samples a step are taken, into which its texts of "
            f"{sum(args.lengths):,} tokens are packed"
        )
    elif training.global_batch_size == -1:
        ranks = derive(args.ranks, config.parallelism).dp if args.explain else args.ranks
        config = replace(config, training=replace(training, global_batch_size=training.local_batch_size * ranks))
        notes.append(f"training.global_batch_size is not given: {config.training.global_batch_size} is taken")
    if config.moe.dispatcher == "auto" and not args.explain:
        config = with_dispatcher(config, "alltoall")
        notes.append(
            'moe.dispatcher = "auto" is searched as alltoall, whose time a formula cannot tell from symm_mem\'s'
        )
    if not args.explain:
        for path, value, searched in (  # what search.with_mapping replaces beside degrees, schedule and modes
            ("activation_checkpoint.every", config.activation_checkpoint.every, 1),
            ("pipeline.layers_per_stage", config.pipeline.layers_per_stage, []),
            ("pipeline.schedule_csv", config.pipeline.schedule_csv, ""),
        ):
            if value != searched:
                notes.append(f"{path} = {value!r} is not searched: every mapping has {searched!r}")
    notes += [f"left out: {text}" for text in _left_out(config, args.reference)]
    return config, [*notes, ""] if notes else []


def _left_out(config: Config, reference: bool) -> Iterator[str]:
    """Yield what the plan of a recipe leaves out; with `reference` the time of a frozen copy of the model, too."""
    from titanmoe.fold.pipeline_schedules import splits_backward

    moe = config.moe
    for left_out, text in (
        (config.compile.enable, "compilation: memory and memory-bound work are those of the uncompiled model"),
        (bool(config.distillation.teacher), "the teacher's forward: its memory is counted, its time is not"),
        (reference, "the reference model's forward: its memory is counted, its time is not"),
        (
            bool(config.rl.reward),
            "rewards, evaluations, and the log-probabilities that rl.updates above 1 and rl.kl need: their time",
        ),
        (
            bool(config.rl.reward) and config.generation.offload_training,
            "generation.offload_training: training's memory takes no time to reach the host and to come back",
        ),
        (
            separates_documents(config),
            "documents that do not attend to each other: attention is priced as over full samples",
        ),
        (moe.capacity_factor > 0, "a capacity: routed tokens are those before anything is dropped or padded"),
        (
            moe.overlap == "pairs" and bool(config.pipeline.schedule_csv),
            "pairs of the schedule file: dispatch is priced as if nothing hid it",
        ),
        (
            config.optimizer.offload,
            "optimizer.offload: moments are counted on the device, and take no time to reach it",
        ),
        (
            "torch" in (moe.kernels, config.parallelism.attention_backend)
            or config.parallelism.attention_backend == "plain"
            or moe.grouped_mm == "loop",
            "plain kernels: those of the defaults are priced",
        ),
        (moe.expert_dtype != "compute", "the memory of experts in 8 bits: that of the compute dtype is counted"),
        (
            DISPATCHERS.look_up(moe.dispatcher).own_buffers,
            f"the buffers of {moe.dispatcher}: those of alltoall are counted",
        ),
        (
            config.activation_checkpoint.mode != "none" and splits_backward(config.pipeline, config.parallelism.pp),
            "what recomputation caches between both halves of the schedule's backward: memory is too small",
        ),
        (bool(config.pipeline.schedule_csv), "the schedule file's own bubble: that of one microbatch a rank is taken"),
    ):
        if left_out:
            yield text


def _text_lengths(config: Config, args: argparse.Namespace) -> TextLengths | None:
    """Return the mean tokens of prompts and completions that the options, or else the recipe, give; None without [rl].

    Raises:
        ConfigError: options contradict the recipe or each other.
    """
    from titanmoe.plan.generation_costs import TextLengths

    lengths = {"--prompt-tokens": args.prompt_tokens, "--completion-tokens": args.completion_tokens}
    given = {name: value for name, value in lengths.items() if value is not None}
    if not config.rl.reward:
        if given:
            raise ConfigError(
                [f"{name} is for recipes with [rl], and this one has no rl.reward: leave it out" for name in given]
            )
        return None
    most = config.training.seq_len - config.generation.max_tokens, config.generation.max_tokens
    problems = [
        f"{name} = {value} is not from 1 to {limit}, which training.seq_len = {config.training.seq_len} and "
        f"generation.max_tokens = {config.generation.max_tokens} allow"
        for (name, value), limit in zip(lengths.items(), most, strict=True)
        if value is not None and not 1 <= value <= limit
    ]
    if args.tokens:
        problems.append("--tokens counts tokens that are trained on, and [rl] has steps: leave it out")
    if problems:
        raise ConfigError(problems)
    return TextLengths.of(config, args.prompt_tokens, args.completion_tokens)


def _with_samples(config: Config, args: argparse.Namespace) -> Config:
    """Return a recipe of [rl] whose global batch is a step's samples and empty ones that round them up.

    They become a multiple of local_batch_size * dp with --explain, else a divisor or multiple of `args.ranks`.

    Args:
        args: the options of `titanmoe plan`, with the TextLengths in `args.lengths`.
    """
    from titanmoe.config.ranges import divisors
    from titanmoe.fold.degrees import derive

    samples, training, unit = args.lengths.samples(config), config.training, args.ranks
    if args.explain:
        unit = training.local_batch_size * derive(args.ranks, config.parallelism).dp
    elif samples < unit:
        unit = next(n for n in divisors(unit) if n >= samples)
    return replace(config, training=replace(training, global_batch_size=-(-samples // unit) * unit))


def _problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.top < 1:
        problems.append(f"--top = {args.top} is not a number of mappings: use 1 or more")
    if args.imbalance is not None and not args.imbalance >= 1:
        problems.append(f"--imbalance = {args.imbalance:g} is below 1, the mean: use 1 or more")
    if args.tokens is not None and not args.tokens > 0:
        problems.append(f"--tokens = {args.tokens:g} is not a number of tokens: use more than 0")
    if args.explain and args.write:
        problems.append("--explain looks at the recipe's own mapping: leave out --write")
    return problems
