"""Passes of embedding and head in a pipeline's table, if all stages share them ([parallelism] vocab = "pipeline").

Each rank runs every pass, on its rows of the embedding or the head (Algorithm 1 of arXiv 2411.05288):

    E   embeddings of a microbatch, summed for the first stage (of the next tokens also for the last)
    H   hidden states of the last stage, sent to all ranks after its forward
    S   logits of these, and their statistics (largest logit, sum of exponentials, label's logit), sent to all ranks
    L   loss on the last stage, from all statistics, and its gradients for each token, sent to all ranks
    T   gradients of the head's weight and of the hidden states; these are summed for the backward of the last stage
    D   the embedding's gradient, sent to all ranks after the backward of the first stage (and of the last)
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from titanmoe.config.schema import Config
from titanmoe.fold.pipeline_schedules import COST, PASS_COST, Action, Cell, alternate, inputs_of, result_of

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
"""The schedules that passes are inserted into."""
EARLIER_FORWARDS = 2
"""Microbatches, or with several stages per rank stages of a microbatch, that a rank has in flight more because of the
passes. With one the waits come back in part: the gains of docs/parallelism.md over the best split would be 0.98 at pp 8
and 1.32 at pp 16 for Qwen3-30B-A3B."""
LOSS_COST = 0.4
"""Time of a loss, in forwards of a rank's stages, in the simulated run that gives passes their places."""
NEXT = {"H": "S", "S": "L", "L": "T"}
"""The pass that becomes possible when all ranks have run one."""


def with_earlier_forwards(row: Sequence[Cell]) -> list[Cell]:
    """Return a rank's cells with `EARLIER_FORWARDS` more forwards before its first backward, as far as there are any.

    Args:
        row: cells of one action each: forwards, then backward and forward in turn, then the remaining backwards.
    """
    forward = [cell for cell in row if cell[0].does == "F"]
    backward = [cell for cell in row if cell[0].does == "B"]
    return alternate(forward, backward, min(len(forward), row.index(backward[0]) + EARLIER_FORWARDS))


def insert_passes(rows: Sequence[Sequence[Cell]], stages: int) -> list[list[Cell]]:
    """Return each rank's cells of a schedule's table, with more forwards at the beginning and with all passes.

    All ranks have the passes in one order. What one rank has before a pass needs nothing that another has after it, so
    nothing deadlocks, even if each message blocks its rank.

    Args:
        rows: the cells of each pipeline rank, in the order in which it runs them; each of one action, or empty.

    Raises:
        ValueError: if the schedule deadlocks.
    """
    return _Insertion(rows, stages).rows


class _Insertion:
    """A simulated run of a schedule in which ranks run passes as soon as they are possible.

    S and T take time, and L waits for a message on the last rank, so ranks run these when they have finished what they
    do. Other passes only start a message: a rank has them before the action that runs when they become possible,
    unless an earlier pass is still to come.
    """

    def __init__(self, rows: Sequence[Sequence[Cell]], stages: int):
        """Run the simulation, which fills `self.rows` with each rank's cells; ValueError if the schedule deadlocks."""
        self.queues = [with_earlier_forwards([cell for cell in row if cell]) for row in rows]
        self.rows: list[list[Cell]] = [[] for _ in rows]
        self.stages, self.clock, self.passed = stages, [0.0] * len(rows), [0] * len(rows)
        self.finished_at: dict[tuple[int, str, int], float] = {}
        self.possible: list[tuple[float, int, Action]] = []
        """A heap of passes that will be possible, with the time and a number that tells equal times apart."""
        self.passes: list[tuple[float, Action]] = []
        """All passes so far, in the order of every rank, with the times at which they became possible."""
        self.ends: defaultdict[Action, list[float]] = defaultdict(list)
        """Times at which ranks have run each pass."""
        owners = {action.stage: rank for rank, queue in enumerate(self.queues) for (action,) in queue}
        self.first, self.last = owners[0], owners[stages - 1]
        self.costs = COST | {does: LOSS_COST * stages / len(rows) * cost for does, cost in PASS_COST.items()}
        self.starts: list[tuple[float, bool, int] | None] = [None] * len(rows)
        """Time when each rank can begin its next pass (False) or action (True), whichever is first; None if neither."""
        self.waiting: defaultdict[Any, list[int]] = defaultdict(list)
        """Ranks that wait for an input of their next action, by the key that it will have in `finished_at`."""
        for rank in range(len(rows)):
            self._update(rank)
        self._embed_next(0.0)
        while any(self.queues) or self.possible or any(n < len(self.passes) for n in self.passed):
            self._advance()

    def _advance(self) -> None:
        """Let the next pass become possible, or the rank that can begin something first run it.

        Raises:
            ValueError: if neither can happen: the schedule deadlocks.
        """
        first = min((start for start in self.starts if start), default=None)
        if self.possible and (not first or self.possible[0][0] <= first[0]):
            at, _, action = heapq.heappop(self.possible)
            self.passes.append((at, action))
            for rank in range(len(self.queues)):
                if action.does not in "ST" and (action.does, rank) != ("L", self.last):
                    self._place_early(rank, at)
                self._update(rank)
            return
        if not first:
            raise ValueError("the schedule deadlocks")
        start, is_action, rank = first
        action = self.queues[rank].pop(0)[0] if is_action else self.passes[self.passed[rank]][1]
        end = self.clock[rank] = start + self.costs[action.does]
        self.rows[rank].append((action,))
        if not is_action:
            self._end_pass(rank, end)
            self._update(rank)
            return
        self._finish(result_of(action), end)
        self._update(rank)
        if (action.stage, action.does) == (self.stages - 1, "F"):
            self._will_be_possible(end, Action(action.stage, "H", action.microbatch))
        if (action.stage, action.does) == (0, "B"):
            self._will_be_possible(end, Action(0, "D", action.microbatch))
        if rank == self.first:
            self._embed_next(start)

    def _update(self, rank: int) -> None:
        """Set `self.starts[rank]` to when the rank can begin its next pass or action, the earlier; None if neither.

        If its next action lacks an input, also add the rank to that input's list in `self.waiting`.
        """
        starts, queue = [], self.queues[rank]
        if self.passed[rank] < len(self.passes):
            starts.append((max(self.clock[rank], self.passes[self.passed[rank]][0]), False, rank))
        if queue:
            inputs = inputs_of(queue[0][0], self.stages, shared=True)
            missing = next((need for need in inputs if need not in self.finished_at), None)
            if missing is None:
                starts.append((max([self.clock[rank], *(self.finished_at[need] for need in inputs)]), True, rank))
            elif rank not in self.waiting[missing]:
                self.waiting[missing].append(rank)
        self.starts[rank] = min(starts, default=None)

    def _finish(self, key: Any, at: float) -> None:
        self.finished_at[key] = at
        for rank in self.waiting.pop(key, ()):
            self._update(rank)

    def _place_early(self, rank: int, at: float) -> None:
        """Insert the newest pass into `self.rows[rank]` before the action that runs at time `at`, else as its last.

        The pass ends at `at`. Nothing is done if the rank has an earlier pass still to come, or is running one.
        """
        row = self.rows[rank]
        is_newest, runs = self.passed[rank] == len(self.passes) - 1, self.clock[rank] > at
        if is_newest and not (runs and row[-1][0].does in PASS_COST):
            row.insert(len(row) - runs, (self.passes[-1][1],))
            self._end_pass(rank, at)

    def _end_pass(self, rank: int, at: float) -> None:
        _, action = self.passes[self.passed[rank]]
        self.passed[rank] += 1
        self.ends[action].append(at)
        if len(self.ends[action]) == len(self.queues):
            self._finish(action, max(self.ends[action]))
            if action.does in NEXT:
                self._will_be_possible(self.finished_at[action], action._replace(does=NEXT[action.does]))

    def _embed_next(self, at: float) -> None:
        """Let pass E of the first rank's next action be possible from `at` on, if that is the first stage's forward."""
        for (action,) in self.queues[self.first][:1]:
            if (action.stage, action.does) == (0, "F"):
                self._will_be_possible(at, action._replace(does="E"))

    def _will_be_possible(self, at: float, action: Action) -> None:
        heapq.heappush(self.possible, (at, len(self.passes) + len(self.possible), action))


def shard_violations(config: Config, pp: int, tp: int, cp: int, dp_shard: int) -> Iterator[str]:
    """Yield a message if pp and tp shard the vocabulary unevenly and FSDP cannot shard the shards over dp_shard x cp.

    torch takes the i-th chunks of all shards together, and divides their rows as evenly as `torch.chunk` does. The
    message comes if that gives a rank other rows than it has. No message if parallelism.vocab is not "pipeline".
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
    """Return the sizes of `parts` chunks of `number` rows, as `torch.chunk` makes them; 0 for those that it lacks."""
    each = -(-number // parts)
    return [max(0, min(each, number - i * each)) for i in range(parts)]


def vocabulary_violations(config: Config, pp: int, tp: int) -> Iterator[str]:
    """Yield a message for each reason why the pipeline's stages cannot share the vocabulary.

    Reasons are pp = 1, a schedule that passes cannot be inserted into, and a last rank that would have no ids. No
    message if parallelism.vocab is not "pipeline".
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
    if -(-vocabulary // ranks) * (ranks - 1) >= vocabulary:
        yield (
            f"{option} shards {vocabulary} ids over pp * tp = {ranks} ranks, {-(-vocabulary // ranks)} each, and the "
            'last would have none: use vocab = "tensor"'
        )
