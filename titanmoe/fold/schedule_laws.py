"""The laws of pipeline schedules: why a recipe's schedule, named or from a file, cannot run. Without torch.

`titanmoe.fold.legality` checks them with all other laws of mappings.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.config.schema import Config
from titanmoe.fold.pipeline_schedules import SCHEDULES, SINGLE, Cell, bubble, read_csv, splits_backward, stage_ranks

PAIRS = 'moe.overlap = "pairs"'


def schedule_violations(config: Config, pp: int, dp: int, microbatches: int) -> list[str]:
    """Return a message for each reason why the recipe's pipeline schedule cannot run; [] if it can or if pp = 1.

    The layers of stages and reshard_after_forward are checked only if nothing else is wrong.
    """
    options = config.pipeline
    if pp == 1:
        return []
    samples = config.training.local_batch_size * dp
    problems, rows = [], []
    if options.schedule_csv:
        try:
            rows = read_csv(options.schedule_csv)
        except OSError as error:
            return [f"pipeline.schedule_csv = {options.schedule_csv!r} cannot be read: {error.strerror}"]
        except ValueError as error:
            return [f"pipeline.schedule_csv = {options.schedule_csv!r} is not a schedule: {error}"]
        problems += _csv_violations(options.schedule_csv, rows, pp, microbatches, samples)
    else:
        problems += _named_violations(config, pp, microbatches, samples)
    if config.moe.overlap == "pairs":
        problems += _overlap_violations(config, rows)
    if problems:
        return problems
    stages = len(stage_ranks(config.pipeline, pp))
    explicit = options.layers_per_stage
    if explicit and (
        len(explicit) != stages or sum(explicit) != config.model.num_layers or min(explicit[1:-1], default=1) < 1
    ):
        problems.append(
            f"pipeline.layers_per_stage = {explicit} must name {stages} stages that sum to model.num_layers = "
            f"{config.model.num_layers}, inner ones with at least one layer"
        )
    elif not explicit and stages > config.model.num_layers:
        problems.append(
            f"{stages} pipeline stages are too many for model.num_layers = {config.model.num_layers}: lower "
            "parallelism.pp or pipeline.virtual_stages"
        )
    if splits_backward(config.pipeline, pp) and config.parallelism.reshard_after_forward == "always":
        problems.append(
            f"pipeline.schedule = {options.schedule} splits backward in two, which loses gradients when weights are "
            "freed in between: set parallelism.reshard_after_forward to auto or never"
        )
    return problems


def _named_violations(config: Config, pp: int, microbatches: int, samples: int) -> Iterator[str]:
    """Yield a message for each reason why a schedule that is chosen by name cannot run.

    Checked are virtual_stages and the number of microbatches.

    Args:
        samples: the samples of one microbatch over all data ranks.
    """
    name, virtual = config.pipeline.schedule, config.pipeline.virtual_stages
    if name in SINGLE and virtual not in (-1, 1):
        yield (
            f"pipeline.schedule = {name} has one stage per rank, but virtual_stages is {virtual}: use 1, or "
            "Interleaved1F1B"
        )
    if SCHEDULES[name].v_shape and virtual not in (-1, 2):
        yield f"pipeline.schedule = {name} has 2 stages per rank, but virtual_stages is {virtual}: use 2"
    least = {"1F1B": pp, "DualPipeV": 2 * pp}.get(name, 1)
    rounds = max(1, microbatches // pp)
    if microbatches < least:
        yield (
            f"pipeline.schedule = {name} on {pp} ranks needs at least {least} microbatches, but the step has "
            f"{microbatches}: raise training.global_batch_size to {least * samples} or lower training.local_batch_size"
        )
    elif name.startswith("Interleaved") and microbatches % rounds:
        yield (
            f"pipeline.schedule = {name} on {pp} ranks needs microbatches in full rounds: {microbatches} is not a "
            f"multiple of {rounds}; set training.global_batch_size to {microbatches // pp * pp * samples}"
        )


def _csv_violations(path: str, rows: list[list[Cell]], pp: int, microbatches: int, samples: int) -> list[str]:
    """Return a message for each reason why a schedule from a file cannot run.

    It needs a row per rank, stages numbered without a gap, each on one rank, the step's number of microbatches, each
    action once for every stage and microbatch, and no deadlock.

    Args:
        path: the file, for messages.
        rows: the cells of each pipeline rank.
        samples: the samples of one microbatch over all data ranks, to name a fitting training.global_batch_size.
    """
    problems = []
    if len(rows) != pp:
        problems.append(f"{path} has {len(rows)} rows and needs one per pipeline rank: parallelism.pp is {pp}")
    actions = [(rank, action) for rank, row in enumerate(rows) for cell in row for action in cell]
    stages = sorted({action.stage for _, action in actions})
    if not stages or stages != list(range(len(stages))):
        return [*problems, f"{path} names the stages {stages}: number them from 0 without a gap"]
    file_microbatches = 1 + max(action.microbatch for _, action in actions)
    if file_microbatches != microbatches:
        return [
            *problems,
            f"{path} runs {file_microbatches} microbatches, but the step has {microbatches}: set "
            f"training.global_batch_size to {file_microbatches * samples}",
        ]
    for stage in stages:
        of_stage = [(rank, action) for rank, action in actions if action.stage == stage]
        ranks = sorted({rank for rank, _ in of_stage})
        if len(ranks) > 1:
            problems.append(f"{path} has stage {stage} on ranks {ranks}: put it on one")
        for m in range(file_microbatches):
            does = sorted(action.does for _, action in of_stage if action.microbatch == m)
            if does not in (["B", "F"], ["F", "I", "W"]):
                problems.append(
                    f"{path}: stage {stage} does {does} on microbatch {m}; it must do F and B, or F, I and W"
                )
    if not problems:
        try:
            bubble(rows, len(stages))
        except ValueError as error:
            problems.append(f"{path} cannot run: {error}")
    return problems


def _overlap_violations(config: Config, rows: list[list[Cell]]) -> Iterator[str]:
    """Yield a message for each reason why moe.overlap = "pairs" cannot run with the schedule.

    It needs DualPipeV, or a file with pairs, each of which is a forward and a full backward of two stages.

    Args:
        config: a recipe with moe.overlap = "pairs", which is not checked.
        rows: the cells of each pipeline rank, if the schedule is from a file; else empty.
    """
    options = config.pipeline
    name = options.schedule_csv or options.schedule
    pairs = [cell for row in rows for cell in row if len(cell) == 2]
    if not pairs and name != "DualPipeV":
        yield (
            f"{PAIRS} runs pairs of a forward and a backward, and {name} has none: set pipeline.schedule = DualPipeV, "
            'name a pipeline.schedule_csv that has actions such as "(0F4;3B1)OVERLAP_F_B", or set moe.overlap = "none"'
        )
    for pair in pairs:
        if sorted(action.does for action in pair) != ["B", "F"] or pair[0].stage == pair[1].stage:
            yield (
                f"{PAIRS} needs pairs of F and B of two stages, but {name} has "
                f'"({";".join(map(str, pair))})OVERLAP_F_B": pair other actions, or set moe.overlap = "none"'
            )


def pair_violations(config: Config, pp: int, ep: int, etp: int) -> Iterator[str]:
    """Yield a message if moe.overlap = "pairs" in a pipeline has no messages to hide, because ep * etp = 1."""
    if pp > 1 and config.moe.overlap == "pairs" and ep * etp == 1:
        yield (
            f"{PAIRS} hides the dispatch of tokens to other ranks, but with ep * etp = 1 there is none: set "
            'parallelism.experts.ep above 1, or moe.overlap = "none"'
        )
