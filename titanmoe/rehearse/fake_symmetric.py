"""Symmetric memory in a rehearsal: buffers are fake tensors, and puts are recorded as messages.

`reserve` takes the place of training's own reservation of buffers. Shapes: E experts, G ranks of the dispatch group.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as disable_modes

from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.moe.dispatchers.dispatcher import SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.dispatchers.symm_mem import Symmetric
from titanmoe.moe.dispatchers.symmetric_buffers import Buffers, SymmetricBuffers
from titanmoe.moe.dispatchers.symmetric_places import aligned_counts
from titanmoe.parallel.expert import reserve_buffers
from titanmoe.rehearse.assumed_routing import IntegerMessages
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.memory_over_step import SYMMETRIC
from titanmoe.train.gradients import Gradients


class RehearsedBuffers(SymmetricBuffers):
    """Symmetric-memory buffers of one rank that are fake tensors."""

    counts: IntegerMessages | None = None
    """The integers that the dispatchers send; None before the first step."""

    def __init__(self, recorder: FakeRecorder, fake: FakeTensorMode, *sizes: Any):
        self.recorder, self.fake = recorder, fake
        super().__init__(*sizes)

    def allocate(self, width: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        with self.fake:
            buffer = torch.empty(self.limit + 1, width, dtype=dtype)
            addresses_G = torch.empty(self.group.size, dtype=torch.int64)
        self.recorder.ledger.assign([buffer], SYMMETRIC)
        return Buffers([buffer] * self.group.size, addresses_G)

    def check_first_exchange(self, num_experts: int) -> None:
        recorder = self.recorder
        with self.fake, recorder.recording():
            super().check_first_exchange(num_experts)
        recorder.start_up += recorder.log.messages
        recorder.begin_step()

    def must_repeat(self, ranks: float) -> bool:
        """Return whether the step must be repeated because a receive buffer overflows under the assumed routing.

        It is computed from the routing of all ranks of the stage, because fake tensors never set the overflow flag, so
        `ranks` is not used. False before the first step, and if the rank is alone in its dispatch group.
        """
        if self.counts is None or self.group.size == 1:
            return False
        routing = self.counts.routing
        stage = routing.fold.stage
        first = self.recorder.rank // stage * stage
        layers = {routing.key(layer): layer for layer in moe_blocks(routing.config.model)}.values()
        with disable_modes():
            for place in product(range(first, first + stage), range(routing.microbatches), layers):
                count_GE = self.counts.received_integers(*place, 0).view(self.group.size, -1)
                received_e = aligned_counts(count_GE.sum(0).view(self.ranks.ep, -1)).sum(1)
                if (received_e > self.receive_slots).any():
                    return True
        return False


def reserve(
    recorder: FakeRecorder, fake: FakeTensorMode, config: Config, meshes: Meshes, device: torch.device
) -> SharedBuffers | None:
    """Return the buffers that the dispatchers of a rank share, as fake tensors; None if the dispatcher needs none.

    Stands in for `titanmoe.parallel.expert.reserve_buffers`.

    Args:
        recorder: the recorder of this rank's messages.
        fake: the mode in which the buffers are made.
        device: the device that the buffers are said to be on.
    """
    symmetric = DISPATCHERS.implementation(config.moe.dispatcher) is Symmetric
    make_buffers = partial(RehearsedBuffers, recorder, fake) if symmetric else None
    return reserve_buffers(config, meshes, device, make_buffers)


def symmetric_notes(gradients: Gradients) -> list[str]:
    """Return remarks on how symmetric memory is counted in the report; [] if nothing is sent by it."""
    buffers = gradients.first_pass
    if buffers is None or buffers.group.size == 1:
        return []
    texts = [
        "symm_mem: rows are sent on the computation's own stream, which waits for all to arrive; unused rows of the "
        "receive buffers count as computed"
    ]
    if buffers.repeats:
        texts.append(
            "symm_mem: a receive buffer is too small for this routing, so the step is repeated by alltoall, and both "
            "passes count: raise moe.symm_mem_factor"
        )
    return texts
