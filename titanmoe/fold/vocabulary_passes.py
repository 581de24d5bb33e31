"""Where pipeline ranks run the layers of the vocabulary that all stages share ([parallelism] vocab = "pipeline").

Such a layer is a pass that all ranks of a pipeline run together, each on its rows of the embedding or the head:

    E   the embeddings of a microbatch, for the forward of the first stage
    L   logits, loss and all gradients of the head, after the forward of the last stage and before its backward
    D   the embedding's gradient, after the backward of the first stage

`insert_passes` puts them into a schedule's table. Every rank has all passes, in the same order, at the places where a
simulated run has them; in it all ranks begin a pass at the same time. So ranks that wait for each other in a pass do
not deadlock. An E or D comes with an L, so that ranks meet once per microbatch; only the first E and last D do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from titanmoe.config.schema import Config
from titanmoe.fold.pipeline_schedules import COST, Action, Cell, inputs_of, result_of

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
"""The schedules that passes are inserted into."""


def insert_passes(rows: Sequence[Sequence[Cell]], stages: int) -> list[list[Cell]]:
    """Return each rank's cells of a schedule's table, with the passes of the vocabulary.

    Args:
        rows: the cells of each pipeline rank, in the order in which it runs them; each of one action, or empty.
        stages: the number of stages.

    Raises:
        ValueError: if the schedule deadlocks.
    """
    rows = _insert_losses(rows, stages)
    first = next(row for row in rows if any(action.stage == 0 for (action,) in row))
    losses = [action.microbatch for (action,) in first if action.does == "L"]
    after: defaultdict[int, list[Cell]] = defaultdict(list)
    """The embedding's passes by the number of losses before them."""
    number = 0
    for (action,) in first:
        number += action.does == "L"
        if action[:2] == (0, "F"):
            after[number].append((Action(0, "E", action.microbatch),))
        elif action[:2] == (0, "B"):
            after[number + 1].append((Action(0, "D", action.microbatch),))
    with_passes = []
    for row in rows:
        number, out = 0, [*after[0]]
        for cell in row:
            out.append(cell)
            if cell[0].does == "L":
                number += 1
                out += after[number]
        with_passes.append(out + after[len(losses) + 1])
    return with_passes


def _insert_losses(rows: Sequence[Sequence[Cell]], stages: int) -> list[list[Cell]]:
    """Return each rank's cells with the losses: when the last stage has finished a forward, ranks meet for its loss.

    A rank that waits for others meanwhile runs what it can finish before they come. Raises a ValueError if the schedule
    deadlocks.
    """
    queues, out = [[cell for cell in row if cell] for row in rows], [[] for _ in rows]
    clock, finished_at, due = [0.0] * len(queues), dict[tuple[int, str, int], float](), list[tuple[float, int]]()
    last = stages - 1

    def start_of(rank: int) -> float | None:
        (action,) = queues[rank][0]
        inputs = inputs_of(action, stages)
        if (action.stage, action.does) == (last, "B"):
            inputs.append((last, "L", action.microbatch))
        if any(need not in finished_at for need in inputs):
            return None
        return max([clock[rank], *(finished_at[need] for need in inputs)])

    while any(queues):
        starts = {rank: start for rank, queue in enumerate(queues) if queue and (start := start_of(rank)) is not None}
        if due:
            ready, microbatch = due[0]
            meet = max([ready, *clock])
            starts = {r: s for r, s in starts.items() if s < ready or s + COST[queues[r][0][0].does] <= meet}
        if starts:
            rank = min(starts, key=starts.__getitem__)
            cell = queues[rank].pop(0)
            (action,) = cell
            out[rank].append(cell)
            finished_at[result_of(action)] = clock[rank] = starts[rank] + COST[action.does]
            if (action.stage, action.does) == (last, "F"):
                due.append((clock[rank], action.microbatch))
        elif due:
            due.pop(0)
            clock = [meet] * len(clock)
            finished_at[last, "L", microbatch] = meet
            for row in out:
                row.append((Action(last, "L", microbatch),))
        else:
            raise ValueError("the schedule deadlocks")
    return out


def shard_violations(config: Config, pp: int, tp: int, cp: int, dp_shard: int) -> Iterator[str]:
    """Yield a message if FSDP cannot shard the vocabulary's rows once more that pp and tp have sharded unevenly.

    torch takes the i-th chunks of all shards together, and divides their rows as evenly as `torch.chunk` does. The
    message comes if that gives a rank other rows than it has. None if parallelism.vocab is not "pipeline".
    """
    size, ranks, data = config.model.vocab_size, pp * tp, cp * dp_shard
    if config.parallelism.vocab != "pipeline" or size % ranks == 0:
        return
    chunks = [_chunk(rows, data) for rows in _chunk(size, ranks)]
    if any(list(same) != _chunk(sum(same), ranks) for same in zip(*chunks, strict=True)):
        yield (
            f'parallelism.vocab = "pipeline" shards {size} ids unevenly over pp * tp = {ranks} ranks, and FSDP cannot '
            f"shard these shards over dp_shard * cp = {data} ranks: pad the vocabulary to {size + -size % ranks}, or "
            'use vocab = "tensor"'
        )


def _chunk(number: int, parts: int) -> list[int]:
    """Return the sizes of so many parts of a number, as `torch.chunk` makes them, with zeros if there are fewer."""
    each = -(-number // parts)
    return [max(0, min(each, number - i * each)) for i in range(parts)]


def vocabulary_violations(config: Config, pp: int, tp: int) -> Iterator[str]:
    """Yield a message for each reason why the pipeline's stages cannot share the vocabulary.

    Args:
        config: the recipe.
        pp: number of pipeline ranks.
        tp: number of ranks of tensor parallel.
    """
    option = 'parallelism.vocab = "pipeline"'
    if config.parallelism.vocab != "pipeline":
        return
    if pp == 1:
        yield f'{option} shards embedding and head over the pipeline, and parallelism.pp = 1: use vocab = "tensor"'
        return
    schedule, vocabulary, ranks = config.pipeline.schedule, config.model.vocab_size, pp * tp
    if config.pipeline.schedule_csv or schedule not in SCHEDULES:
        name = "schedule_csv" if config.pipeline.schedule_csv else f"schedule = {schedule}"
        yield (
            f"{option} has no place for its passes in pipeline.{name}: use {', '.join(SCHEDULES[:-1])} or "
            f'{SCHEDULES[-1]}, or vocab = "tensor"'
        )
    if config.model.mtp_depth:
        yield (
            f"{option} computes one loss per label, and model.mtp_depth = {config.model.mtp_depth} adds another: use "
            'mtp_depth = 0, or vocab = "tensor"'
        )
    if -(-vocabulary // ranks) * (ranks - 1) >= vocabulary:
        yield (
            f"{option} shards {vocabulary} ids over pp * tp = {ranks} ranks, {-(-vocabulary // ranks)} each, and the "
            'last would have none: use vocab = "tensor"'
        )
