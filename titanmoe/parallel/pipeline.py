"""Pipeline parallel: which layers form a stage, which rank holds it, and the schedule that drives them.

Stages and schedules are torch.distributed.pipelining's. Its public step() cuts tensors into microbatches; ours come
cut, so `Pipeline.run` calls the step on microbatches that lies below it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe.config.schema import Config, Model, Training
from titanmoe.config.schema import Pipeline as Options
from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Meshes
from titanmoe.models.count import layer_flops
from titanmoe.models.transformer import Transformer
from titanmoe.parallel import pairs
from titanmoe.parallel.batch import Slice


@dataclass(frozen=True)
class Kind:
    cls: type
    stages_per_rank: int  # unless [pipeline] virtual_stages says otherwise
    v_shape: bool = False  # the second half of the stages lies on the ranks in reverse
    zero_bubble: bool = False  # backward is split into input and weight gradients


KINDS = {
    "GPipe": Kind(torch_schedules.ScheduleGPipe, 1),
    "1F1B": Kind(torch_schedules.Schedule1F1B, 1),
    "LoopedBFS": Kind(torch_schedules.ScheduleLoopedBFS, 2),
    "Interleaved1F1B": Kind(torch_schedules.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": Kind(torch_schedules.ScheduleInterleavedZeroBubble, 2, zero_bubble=True),
    "ZBVZeroBubble": Kind(torch_schedules.ScheduleZBVZeroBubble, 2, v_shape=True, zero_bubble=True),
    "DualPipeV": Kind(torch_schedules.ScheduleDualPipeV, 2, v_shape=True, zero_bubble=True),
}
SINGLE = ("GPipe", "1F1B")
COST = {"F": 1, "B": 2, "I": 1, "W": 1}  # forward; backward, whole, of inputs, of weights


# ---- before start: stages, and what a schedule demands


def read_csv(path: str) -> list[list[torch_schedules._Action | None]]:
    """One row of actions ("0F0", "1B3", empty for a pause) per rank."""
    with open(path, newline="") as file:
        return [[torch_schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file) if row]


def _steps(action: torch_schedules._Action | None) -> list[torch_schedules._Action]:
    """An action's computations: none for a pause, several for an overlapped pair."""
    if action is None:
        return []
    if action.sub_actions:
        return [step for part in action.sub_actions for step in _steps(part)]
    return [action] if action.computation_type.value in COST else []


def stage_ranks(options: Options, pp: int) -> list[int]:
    """The pipeline rank of each stage."""
    if options.schedule_csv:
        owner = {
            step.stage_index: rank
            for rank, row in enumerate(read_csv(options.schedule_csv))
            for action in row
            for step in _steps(action)
        }
        return [owner[stage] for stage in range(len(owner))]
    kind = KINDS[options.schedule]
    virtual = kind.stages_per_rank if options.virtual_stages == -1 else options.virtual_stages
    ranks = list(range(pp))
    if kind.v_shape:
        return ranks + ranks[::-1]
    return ranks * virtual


def splits_backward(options: Options, pp: int) -> bool:
    """Whether the schedule computes gradients of inputs and of weights apart."""
    if pp == 1:
        return False
    if not options.schedule_csv:
        return KINDS[options.schedule].zero_bubble
    actions = [action for row in read_csv(options.schedule_csv) for action in row]
    return any(step.computation_type.value == "W" for action in actions for step in _steps(action))


def split_layers(model: Model, seq_len: int, stages: int, explicit: list[int]) -> list[range]:
    """Contiguous layers per stage: as listed, or such that the costliest stage is as cheap as can be.

    Cost is forward FLOPs per token; the last stage also pays the head, the first the embedding's small lookup.
    """
    if explicit:
        ends = list(accumulate(explicit))
        return [range(end - count, end) for end, count in zip(ends, explicit, strict=True)]
    layer, head = layer_flops(model, seq_len)
    total = [0, *accumulate(layer)]
    n = len(layer)

    def cost(first: int, end: int, stage: int) -> float:
        return total[end] - total[first] + (head if stage == stages - 1 else 0) + (2 * model.dim if stage == 0 else 0)

    # best[i]: (cost of the costliest stage, where the stages begin) when the first i layers form the stages so far
    best = {i: (cost(0, i, 0), [0]) for i in range(1, n + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[first][0], cost(first, end, stage)), [*best[first][1], first])
                for first in best
                if first < end
            )
            for end in range(stage + 1, n + 1)
            if any(first < end for first in best)
        }
    begins = [*best[n][1], n]
    return [range(a, b) for a, b in pairwise(begins)]


def _csv_problems(path: str, rows: list[list], pp: int, microbatches: int, samples: int) -> list[str]:
    """samples: per microbatch, over all data ranks."""
    found = []
    if len(rows) != pp:
        found.append(f"{path} has {len(rows)} rows, one per pipeline rank; parallelism.pp is {pp}")
    steps = [(rank, step) for rank, row in enumerate(rows) for action in row for step in _steps(action)]
    stages = sorted({step.stage_index for _, step in steps})
    if not stages or stages != list(range(len(stages))):
        return [*found, f"{path} names the stages {stages}: number them from 0 without a gap"]
    needs = 1 + max(step.microbatch_index for _, step in steps)
    if needs != microbatches:
        found.append(
            f"{path} runs {needs} microbatches, the step has {microbatches}: set training.global_batch_size to "
            f"{needs * samples}"
        )
    for stage in stages:
        own = [(rank, step) for rank, step in steps if step.stage_index == stage]
        if len({rank for rank, _ in own}) > 1:
            found.append(f"{path} has stage {stage} on ranks {sorted({rank for rank, _ in own})}: give it one")
        for m in range(needs):
            kinds = sorted(step.computation_type.value for _, step in own if step.microbatch_index == m)
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                found.append(f"{path}: stage {stage} does {kinds} on microbatch {m}; it must do F and B, or F, I and W")
    if not found:
        try:
            bubble(dict(enumerate(rows)), len(stages))
        except ValueError as error:
            found.append(f"{path} cannot run: {error}")
    return found


def problems(config: Config, fold: Fold, microbatches: int) -> list[str]:
    """What the pipeline cannot run, with numbers and fix."""
    options, pp = config.pipeline, fold.pp
    if pp == 1:
        return []
    found, rows = [], []
    if options.schedule_csv:
        try:
            rows = read_csv(options.schedule_csv)
        except OSError as error:
            return [f"pipeline.schedule_csv = {options.schedule_csv!r} cannot be read: {error.strerror}"]
        except RuntimeError as error:
            return [f"pipeline.schedule_csv = {options.schedule_csv!r} is not a schedule: {error}"]
        found += _csv_problems(options.schedule_csv, rows, pp, microbatches, config.training.local_batch_size * fold.dp)
    else:
        kind = KINDS[options.schedule]
        virtual = options.virtual_stages
        if options.schedule in SINGLE and virtual not in (-1, 1):
            found.append(
                f"pipeline.schedule = {options.schedule} has one stage per rank, virtual_stages is {virtual}: use 1, "
                "or Interleaved1F1B"
            )
        if kind.v_shape and virtual not in (-1, 2):
            found.append(
                f"pipeline.schedule = {options.schedule} has 2 stages per rank, virtual_stages is {virtual}: use 2"
            )
        least = {"1F1B": pp, "DualPipeV": 2 * pp}.get(options.schedule, 1)
        rounds = max(1, microbatches // pp)
        per = config.training.local_batch_size * fold.dp
        if microbatches < least:
            found.append(
                f"pipeline.schedule = {options.schedule} on {pp} ranks needs at least {least} microbatches, the step "
                f"has {microbatches}: raise training.global_batch_size to {least * per} or lower "
                "training.local_batch_size"
            )
        elif options.schedule.startswith("Interleaved") and microbatches % rounds:
            found.append(
                f"pipeline.schedule = {options.schedule} on {pp} ranks needs microbatches in whole rounds: "
                f"{microbatches} is not a multiple of {rounds}; set training.global_batch_size to "
                f"{microbatches // pp * pp * per}"
            )
    if options.overlap_pairs:
        found += pairs.problems(config, fold, rows)
    if found:
        return found
    stages = len(stage_ranks(options, pp))
    explicit = options.layers_per_stage
    if explicit and (
        len(explicit) != stages or sum(explicit) != config.model.num_layers or min(explicit[1:-1], default=1) < 1
    ):
        found.append(
            f"pipeline.layers_per_stage = {explicit} must name {stages} stages that sum to model.num_layers = "
            f"{config.model.num_layers}, inner ones with at least one layer"
        )
    elif not explicit and stages > config.model.num_layers:
        found.append(
            f"{stages} pipeline stages for model.num_layers = {config.model.num_layers}: lower parallelism.pp or "
            "pipeline.virtual_stages"
        )
    if splits_backward(options, pp) and config.parallelism.reshard_after_forward == "always":
        found.append(
            f"pipeline.schedule = {options.schedule} splits backward in two, which loses gradients when weights are "
            "freed in between: set parallelism.reshard_after_forward to auto or never"
        )
    return found


def single_order(schedule: str, pp: int, microbatches: int) -> dict[int, list[torch_schedules._Action]]:
    """The action table of GPipe and 1F1B, which torch runs without one (the table it offers for 1F1B is shifted)."""
    action, kinds = torch_schedules._Action, torch_schedules._ComputationType
    order = {}
    for rank in range(pp):
        ahead = microbatches if schedule == "GPipe" else min(microbatches, pp - rank)
        forward = [action(rank, kinds.FORWARD, m) for m in range(microbatches)]
        backward = [action(rank, kinds.FULL_BACKWARD, m) for m in range(microbatches)]
        steady = [x for pair in zip(backward, forward[ahead:], strict=False) for x in pair]
        order[rank] = forward[:ahead] + steady + backward[microbatches - ahead :]
    return order


def bubble(order: dict[int, list[torch_schedules._Action | None]], stages: int) -> float:
    """Idle share of all ranks' time, by playing the action table: forward 1, backward 2 (input 1, weight 1).

    torch begins a pair when both its halves can run, and sends what they made when both are done.
    """
    queues = {rank: [steps for action in row if (steps := _steps(action))] for rank, row in order.items()}
    done: dict[tuple[int, str, int], float] = {}
    clock, busy = dict.fromkeys(queues, 0.0), 0.0

    def made(step: torch_schedules._Action) -> tuple[int, str, int]:
        # a whole backward also delivers the input gradient that the stage before it waits for
        kind = step.computation_type.value
        return step.stage_index, "I" if kind == "B" else kind, step.microbatch_index

    def needs(step: torch_schedules._Action) -> list[tuple[int, str, int]]:
        stage, kind, m = step.stage_index, step.computation_type.value, step.microbatch_index
        return {
            "F": [(stage - 1, "F", m)] if stage else [],
            "W": [(stage, "I", m)],
        }.get(kind, [(stage, "F", m)] + ([(stage + 1, "I", m)] if stage < stages - 1 else []))

    def ready(steps: list[torch_schedules._Action]) -> float | None:
        own = {made(step) for step in steps}
        wanted = [need for step in steps for need in needs(step) if need not in own or need[0] != step.stage_index]
        return max((done[need] for need in wanted), default=0.0) if all(need in done for need in wanted) else None

    while any(queues.values()):
        moved = False
        for rank, queue in queues.items():
            while queue and (at := ready(queue[0])) is not None:
                steps = queue.pop(0)
                cost = sum(COST[step.computation_type.value] for step in steps)
                clock[rank] = max(clock[rank], at) + cost
                busy += cost
                done |= dict.fromkeys(map(made, steps), clock[rank])
                moved = True
        if not moved:
            raise ValueError("the schedule waits for itself")
    return 1 - busy / (len(clock) * max(clock.values()))


# ---- running


class Alone:
    """No pipeline: each microbatch forward and backward in turn."""

    bubble = 0.0
    pairs = None

    def __init__(self, parts: list[Transformer]):
        (self.model,) = parts

    def run(self, slices: list[Slice], divisor: Tensor, backward: bool = True) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=divisor.device)
        with torch.set_grad_enabled(backward):
            for ids_BS, tokens, labels_BS in slices:
                loss = self.model(ids_BS, tokens, labels_BS) / divisor
                if backward:
                    loss.backward()
                total += loss.detach()
        return total


class Pipeline:
    """The same over several ranks: the sum of losses on those with the last stage, 0 on the others."""

    def __init__(
        self,
        parts: list[Transformer],
        options: Options,
        training: Training,
        meshes: Meshes,
        microbatches: int,
        device: torch.device,
    ):
        fold, pp = meshes.fold, meshes.pp
        ranks = stage_ranks(options, pp.size)
        mine = [stage for stage, rank in enumerate(ranks) if rank == pp.rank]
        B, length = training.local_batch_size, training.seq_len // fold.cp
        compute = getattr(torch, training.mixed_precision_param)
        # Static shapes: without them the first step runs an additional, real forward and backward.
        ids = torch.empty(B, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(B, length // fold.tp, parts[0].shape.dim, dtype=compute, device="meta")
        loss = torch.empty((), dtype=torch.promote_types(compute, torch.float32), device="meta")
        self.stages = [
            PipelineStage(
                part,
                stage,
                len(ranks),
                device,
                input_args=(ids if part.embed is not None else hidden.requires_grad_(),),
                output_args=(hidden.requires_grad_() if part.head is None else loss.requires_grad_(),),
                group=_resolve_process_group(pp.name),
            )
            for part, stage in zip(parts, mine, strict=True)
        ]
        self.device = device
        if options.schedule_csv:
            runtime = torch_schedules._PipelineScheduleRuntime
            self.schedule = runtime(self.stages, microbatches, loss_fn=self._scaled, scale_grads=False)
            self.schedule._load_csv(options.schedule_csv)
        else:
            kind = KINDS[options.schedule]
            stages = self.stages[0] if options.schedule in SINGLE else self.stages
            self.schedule = kind.cls(stages, microbatches, loss_fn=self._scaled, scale_grads=False)
        self.pairs = pairs.Pairs(device) if options.overlap_pairs else None
        if self.pairs is not None:
            self.schedule.register_custom_function(torch_schedules._ComputationType.OVERLAP_F_B, self.pairs)
        if options.schedule in SINGLE and not options.schedule_csv:
            order = single_order(options.schedule, pp.size, microbatches)
        else:
            order = self.schedule.pipeline_order
        self.bubble = bubble(order, len(ranks))

    def _scaled(self, loss: Tensor, _target: Tensor) -> Tensor:
        return loss / self.divisor

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """torch plays the whole table here too and fails where two stages of a V meet; so backward is cut out."""
        whole = getattr(self.schedule, "pipeline_order_with_comms", None)
        if whole is None:  # GPipe and 1F1B have no table
            yield
            return
        keep = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
        self.schedule.pipeline_order_with_comms = {
            rank: [part for action in row for part in (action.sub_actions or [action]) if part.computation_type in keep]
            for rank, row in whole.items()
        }
        try:
            yield
        finally:
            self.schedule.pipeline_order_with_comms = whole

    def run(self, slices: list[Slice], divisor: Tensor, backward: bool = True) -> Tensor:
        self.divisor, losses = divisor, []
        self.schedule._has_backward = backward
        for stage in self.stages:
            stage.has_backward = backward
            stage.clear_runtime_states()
        with torch.set_grad_enabled(backward), nullcontext() if backward else self._forward_only():
            self.schedule._step_microbatches(
                [(s.ids_BS,) for s in slices],
                [{"tokens": s.tokens, "labels_BS": s.labels_BS} for s in slices],
                [s.labels_BS for s in slices],
                losses,
            )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        return total + sum(loss.detach() for loss in losses)
