"""Make torch's runtime of a pipeline schedule with its tables: what each rank runs in which order.

    table                        a row of it, for one pipeline rank                      who reads it
    cells                        forwards and backwards, and the vocabulary's passes     `bubble`, `with_passes`
    pipeline_order               forwards and backwards, as actions of torch             torch, to make the last table
    pipeline_order_with_comms    these, passes, sends, receives, FSDP's gathers          torch's runtime, in each step

`make_schedule` says what each is made of. Called once, by titanmoe.parallel.pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe.config.schema import Pipeline
from titanmoe.fold.pipeline_schedules import COST, SINGLE, Action, Cell, is_pass, read_csv, single_order
from titanmoe.fold.vocabulary_passes import insert_passes
from titanmoe.parallel.vocabulary_pipeline import with_passes


def make_schedule(
    stages: list[PipelineStage],
    options: Pipeline,
    *,
    microbatches: int,
    loss: Callable[..., Any],
    keep_gathered: bool,
    with_vocabulary: bool,
) -> tuple[torch_schedules._PipelineScheduleRuntime, list[list[Cell]]]:
    """Return torch's runtime of the schedule with its tables, and each pipeline rank's cells.

    schedule                  class                       cells from       pipeline_order from
    GPipe, 1F1B               torch's runtime, plain      `single_order`   the cells
    a CSV file                torch's runtime, plain      the file         the cells
    others                    torch's for the schedule    its tables       the class

    If all stages share the vocabulary, its passes (titanmoe.fold.vocabulary_passes) are inserted into the cells, and
    `pipeline_order` is from these. Of `pipeline_order` torch makes `pipeline_order_with_comms`.

    Args:
        loss: called by the last stage with the output and the slice of a microbatch; backward begins at its result.
        keep_gathered: whether weights stay gathered from a stage's first forward to its last backward.
        with_vocabulary: whether all stages share the vocabulary.
    """
    pp, num_stages = stages[0].group_size, stages[0].num_stages
    # GPipe and 1F1B too: torch's own put sends and receives in one batch, which only one group can run.
    has_class = not options.schedule_csv and options.schedule not in SINGLE
    name = f"Schedule{options.schedule}" if has_class else "_PipelineScheduleRuntime"
    schedule = getattr(torch_schedules, name)(stages, microbatches, loss_fn=loss, scale_grads=False)
    if options.schedule_csv:
        cells = read_csv(options.schedule_csv)
    elif has_class:
        cells = [[cell_of(action) for action in schedule.pipeline_order[rank]] for rank in range(pp)]
    else:
        cells = single_order(options.schedule, pp, microbatches)
    if with_vocabulary:
        cells = insert_passes(cells, num_stages)
    if with_vocabulary or not has_class:
        for rank, row in enumerate(cells):
            schedule.pipeline_order[rank] = [_torch_action(cell) for cell in row if cell and not is_pass(cell)]
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    table = schedule.pipeline_order_with_comms
    if keep_gathered:
        table = {rank: gather_each_stage_once(row) for rank, row in table.items()}
    if with_vocabulary:
        table = with_passes(table, cells)
    schedule.pipeline_order_with_comms = table
    return schedule, cells


def cell_of(action: torch_schedules._Action | None) -> Cell:
    """Return the forwards and backwards in one cell of torch's schedule table, without messages; () if it is idle."""
    actions = () if action is None else action.sub_actions or (action,)
    return tuple(
        Action(one.stage_index, one.computation_type.value, one.microbatch_index)
        for one in actions
        if one.computation_type.value in COST
    )


def _torch_action(cell: Cell) -> torch_schedules._Action:
    """Return torch's form of a cell that is not idle: one forward or backward, or two that overlap."""
    text = ";".join(map(str, cell))
    return torch_schedules._Action.from_str(text if len(cell) == 1 else f"({text})OVERLAP_F_B")


def gather_each_stage_once(row: list[torch_schedules._Action]) -> list[torch_schedules._Action]:
    """Return a rank's row of torch's schedule table, changed so that each stage's weights are gathered and freed once.

    torch keeps at most 3 stages of a rank gathered, however small they are (`_add_unshard_reshard`, max_active_stages),
    and gathers the others anew each time: of 4 ranks with 7 stages each, one would gather 71 times in 32 microbatches,
    not 7.
    """
    first, last = ({} for _ in range(2))
    for i, action in enumerate(row):
        if action.computation_type == torch_schedules.UNSHARD:
            first.setdefault(action.stage_index, i)
        elif action.computation_type == torch_schedules.RESHARD:
            last[action.stage_index] = i
    first_and_last = {*first.values(), *last.values()}
    sizing = (torch_schedules.UNSHARD, torch_schedules.RESHARD)
    return [action for i, action in enumerate(row) if i in first_and_last or action.computation_type not in sizing]
