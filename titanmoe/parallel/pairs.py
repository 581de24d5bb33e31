"""Run the forward of one stage and the backward of another, on one rank, in turns: [moe] overlap = "pairs".

In a schedule with such pairs both are ready at once (DualPipeV in its steady state, arXiv 2412.19437, section 3.2.1).
torch's runtime would run one after the other. Here each yields where it would wait for an all-to-all, so that the
routed tokens of one microbatch are in flight while the other computes, and where the host would wait for counts, so
that the device has work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from titanmoe.comm.interleave import InterleavedPair
from titanmoe.observe import OTHERS_TURN, region

Computation = torch_schedules._ComputationType
Action = torch_schedules._Action


class Pairs:
    """A function for torch's pipeline runtime that runs a forward and a backward which the schedule overlaps.

    The runtime calls it in place of its own code (`register_custom_function`).
    """

    def __init__(self, device: torch.device):
        self.device, self.turns = device, InterleavedPair(partial(region, OTHERS_TURN))

    def __call__(self, action: Action, context: torch_schedules._PipelineContext) -> None:
        """Run the forward of one microbatch and the backward of another, interleaved, on two threads.

        Args:
            action: torch's action of the schedule table for the pair, whose two sub-actions are run.
        """
        # Each covers what the other sends only if forward is first (`interleave.yield_in_backward`).
        both = sorted(action.sub_actions, key=lambda one: one.computation_type != Computation.FORWARD)
        first, second = [self._ready(one, context) for one in both]
        self.turns.run(first, self._for_other_thread(second))

    def _ready(self, action: Action, context: torch_schedules._PipelineContext) -> Callable[[], None]:
        """Wait until a forward or backward has its input from another rank, and return the function that runs it.

        Args:
            action: forward or backward of one stage and microbatch, half of an overlapped action.
        """
        schedule, m = context.schedule_ref, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}
        stage = stages[action.stage_index]
        forward = action.computation_type == Computation.FORWARD
        schedule._assert_unsharded(stage)
        # Nothing is received for the first and the last stage, nor from a neighbouring stage on this rank (in a V).
        received = (schedule.fwd_recv_ops if forward else schedule.bwd_recv_ops).pop((action.stage_index, m), None)
        if received is not None:
            torch_schedules._wait_batch_p2p(received)
        neighbour = stages.get(action.stage_index + (1 if forward else -1))
        return partial(_forward if forward else _backward, context, stage, m, neighbour)

    def _for_other_thread(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` for another thread, where it runs with this thread's current stream and dispatch modes."""
        modes = _get_current_dispatch_mode_stack()
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def run() -> None:
            with ExitStack() as stack:
                if stream is not None:
                    stack.enter_context(torch.cuda.device(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                for mode in modes:
                    _push_mode(mode)
                    stack.callback(_pop_mode)
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
