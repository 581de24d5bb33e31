"""Pipeline parallel: which layers form a stage, and the schedule that runs the stages.

Stages and schedules are those of torch.distributed.pipelining. Its public step() splits tensors into microbatches; ours
are split already, so `Pipeline.run` calls the function below it, which takes microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe.config.schema import Model, Training
from titanmoe.config.schema import Pipeline as Options
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.schedules import COST, SINGLE, Action, Cell, bubble, single_order, stage_ranks
from titanmoe.models.count import layer_flops
from titanmoe.models.transformer import Transformer
from titanmoe.parallel import pairs
from titanmoe.parallel.batch import Slice


def split_layers(model: Model, seq_len: int, stages: int, explicit: list[int]) -> list[range]:
    """Contiguous layers per stage: as listed, or so that the costliest stage is as cheap as possible.

    Cost is forward FLOPs per token; the last stage also has the head, the first the embedding's small lookup.
    """
    if explicit:
        ends = list(accumulate(explicit))
        return [range(end - count, end) for end, count in zip(ends, explicit, strict=True)]
    layer, head = layer_flops(model, seq_len)
    total = [0, *accumulate(layer)]
    n = len(layer)

    def cost(first: int, end: int, stage: int) -> float:
        return total[end] - total[first] + (head if stage == stages - 1 else 0) + (2 * model.dim if stage == 0 else 0)

    # best[i]: (cost of the costliest stage, where each stage begins) if the first i layers form the stages so far
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


def _cell(action: torch_schedules._Action | None) -> Cell:
    """What is computed in one cell of torch's table."""
    parts = () if action is None else action.sub_actions or (action,)
    return tuple(
        Action(part.stage_index, part.computation_type.value, part.microbatch_index)
        for part in parts
        if part.computation_type.value in COST
    )


def gathered_once(row: list[torch_schedules._Action]) -> list[torch_schedules._Action]:
    """A rank's row of a table without all but the first gathering of a stage's weights, and but the last freeing.

    torch keeps at most 3 stages of a rank gathered, whatever they take (`_add_unshard_reshard`, max_active_stages), and
    gathers the others again and again: 4 ranks with 7 stages each would gather 71 times in 32 microbatches, not 7.
    """
    first, last = ({} for _ in range(2))
    for i, action in enumerate(row):
        if action.computation_type == torch_schedules.UNSHARD:
            first.setdefault(action.stage_index, i)
        elif action.computation_type == torch_schedules.RESHARD:
            last[action.stage_index] = i
    wanted = {*first.values(), *last.values()}
    sizing = (torch_schedules.UNSHARD, torch_schedules.RESHARD)
    return [action for i, action in enumerate(row) if i in wanted or action.computation_type not in sizing]


# ---- running


class Alone:
    """No pipeline: forward and backward of each microbatch in turn."""

    bubble = 0.0
    pairs = None

    def __init__(self, parts: list[Transformer], reduce_once: bool):
        (self.model,), self.reduce_once = parts, reduce_once

    def run(self, slices: list[Slice], divisor: Tensor, backward: bool = True) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=divisor.device)
        with torch.set_grad_enabled(backward):
            for left, (ids_BS, tokens, labels_BS) in zip(reversed(range(len(slices))), slices, strict=True):
                if self.reduce_once:
                    self.model.set_requires_gradient_sync(left == 0)
                loss = self.model(ids_BS, tokens, labels_BS) / divisor
                if backward:
                    loss.backward()
                total += loss.detach()
        return total


class Pipeline:
    """The same over several ranks: `run` returns the sum of losses on ranks with the last stage, 0 on the others."""

    def __init__(
        self,
        parts: list[Transformer],
        options: Options,
        training: Training,
        meshes: Meshes,
        microbatches: int,
        device: torch.device,
        kept: bool,
    ):
        """kept: whether weights stay gathered from a stage's first forward to its last backward."""
        fold, pp = meshes.fold, meshes.pp
        ranks = stage_ranks(options, pp.size)
        mine = [stage for stage, rank in enumerate(ranks) if rank == pp.rank]
        B, length = training.local_batch_size, training.seq_len // fold.cp
        compute = getattr(torch, training.mixed_precision_param)
        # Static shapes: without them the first step runs an extra, real forward and backward.
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
            schedule = getattr(torch_schedules, f"Schedule{options.schedule}")
            stages = self.stages[0] if options.schedule in SINGLE else self.stages
            self.schedule = schedule(stages, microbatches, loss_fn=self._scaled, scale_grads=False)
        table = getattr(self.schedule, "pipeline_order_with_comms", None)  # GPipe and 1F1B have none
        if kept and table is not None:
            self.schedule.pipeline_order_with_comms = {rank: gathered_once(row) for rank, row in table.items()}
        self.pairs = pairs.Pairs(device) if options.overlap_pairs else None
        if self.pairs is not None:
            self.schedule.register_custom_function(torch_schedules._ComputationType.OVERLAP_F_B, self.pairs)
        if options.schedule in SINGLE and not options.schedule_csv:
            rows = single_order(options.schedule, pp.size, microbatches)
        else:
            order = self.schedule.pipeline_order
            rows = [[_cell(action) for action in order[rank]] for rank in range(pp.size)]
        self.bubble = bubble(rows, len(ranks))

    def _scaled(self, loss: Tensor, _target: Tensor) -> Tensor:
        return loss / self.divisor

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """torch would run the whole table and fail where two stages of a V meet, so backward is removed from it."""
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
