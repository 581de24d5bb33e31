"""[pipeline] overlap_pairs: the forward of one stage and the backward of another, on one rank, take turns.

A schedule that has such pairs is ready for both at once (DualPipeV in its steady state, arXiv 2412.19437, section
3.2.1). torch's runtime would play one after the other; here each hands over where it would wait for rows that it has
sent to experts or back, so that the rows of one microbatch travel under the computation of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe.comm.turns import Turns
from titanmoe.config.dispatchers import DISPATCHERS, in_pieces_quoted
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.ops.region import OTHERS_TURN, region

KIND = torch_schedules._ComputationType
Action = torch_schedules._Action


def problems(config: Config, fold: Fold, rows: list[list[Action | None]]) -> Iterator[str]:
    """rows: of the file, where a file gives the schedule."""
    asked, options = "pipeline.overlap_pairs = true", config.pipeline
    name = options.schedule_csv or options.schedule
    pairs = [action.sub_actions for row in rows for action in row if action is not None and action.sub_actions]
    if not pairs and name != "DualPipeV":
        yield (
            f"{asked} plays pairs of a forward and a backward, and {name} has none: set pipeline.schedule = DualPipeV, "
            'name a pipeline.schedule_csv that has actions such as "(0F4;3B1)OVERLAP_F_B", or set overlap_pairs = false'
        )
    for pair in pairs:
        kinds = sorted(part.computation_type.value for part in pair)
        if kinds != ["B", "F"] or pair[0].stage_index == pair[1].stage_index:
            yield (
                f"{asked} takes pairs of F and B of two stages, and {name} has "
                f'"({";".join(map(str, pair))})OVERLAP_F_B": pair other actions, or set overlap_pairs = false'
            )
    if fold.ep * fold.etp == 1:
        yield (
            f"{asked} hides rows on their way to experts on other ranks, and ep * etp = 1 sends none: set "
            "parallelism.experts.ep above 1, or overlap_pairs = false"
        )
    if DISPATCHERS[config.moe.dispatcher].whole:
        yield (
            f"{asked} computes where the host would wait for rows, and moe.dispatcher = "
            f'"{config.moe.dispatcher}" has no such place: use dispatcher = {in_pieces_quoted()}, or '
            "overlap_pairs = false"
        )


class Pairs:
    """What torch's runtime calls for a pair, in place of its own way: `register_custom_function`."""

    def __init__(self, device: torch.device):
        self.device, self.turns = device, Turns(partial(region, OTHERS_TURN))

    def __call__(self, action: Action, context: torch_schedules._PipelineContext) -> None:
        first, second = [self._ready(part, context) for part in action.sub_actions]
        self.turns.take(first, self._here(second))

    def _ready(self, action: Action, context: torch_schedules._PipelineContext) -> Callable[[], None]:
        """One half of a pair, once what it needs from other ranks has come."""
        schedule, m = context.schedule_ref, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}
        stage = stages[action.stage_index]
        forward = action.computation_type == KIND.FORWARD
        schedule._assert_unsharded(stage)
        # None comes for the first and the last stage, and none where two neighbours, of a V, are on this rank.
        received = (schedule.fwd_recv_ops if forward else schedule.bwd_recv_ops).pop((action.stage_index, m), None)
        if received is not None:
            torch_schedules._wait_batch_p2p(received)
        neighbour = stages.get(action.stage_index + (1 if forward else -1))
        return partial(_forward if forward else _backward, context, stage, m, neighbour)

    def _here(self, work: Callable[[], None]) -> Callable[[], None]:
        """The same on another thread, which has a current stream of its own."""
        if self.device.type != "cuda":
            return work
        stream = torch.cuda.current_stream(self.device)

        def run() -> None:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                work()

        return run


def _forward(
    context: torch_schedules._PipelineContext, stage: PipelineStage, m: int, neighbour: PipelineStage | None
) -> None:
    output = stage.forward_one_chunk(m, context.arg_mbs[m], context.kwarg_mbs[m])
    context.schedule_ref._maybe_compute_loss(stage, output, context.target_mbs, m)
    if neighbour is not None:
        neighbour.set_local_fwd_input(output, m)


def _backward(
    context: torch_schedules._PipelineContext, stage: PipelineStage, m: int, neighbour: PipelineStage | None
) -> None:
    schedule = context.schedule_ref
    schedule.backward_counter[stage.stage_index] += 1
    last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(m, loss=schedule._maybe_get_loss(stage, m), full_backward=True, last_backward=last)
    if neighbour is not None:
        neighbour.set_local_bwd_input(stage.get_local_bwd_output(m), m)
