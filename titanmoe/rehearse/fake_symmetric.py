"""Symmetric memory in a rehearsal: its operations as messages, its buffers as fake tensors.

Such an operation keeps its sizes on the device, and the receiver learns them from the operation itself. Here the
assumed routing supplies what the other ranks of the group send: the dispatcher's own code runs for each of them, up to
its first operation.

Shapes as in titanmoe.moe.dispatchers.symm_mem.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as outside

from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model, Training
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.fold.meshes import Meshes
from titanmoe.moe.dispatchers.protocol import SharedBuffers
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.moe.dispatchers.symm_mem import Symmetric, SymmetricBuffers, bins
from titanmoe.parallel.expert import reserve_buffers
from titanmoe.rehearse import values
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.memory_over_step import SYMMETRIC
from titanmoe.rehearse.routing import IntegerMessages
from titanmoe.rehearse.sent_rows import Rows, rows_sent
from titanmoe.replace import replaced
from titanmoe.train.gradients import Gradients


class RehearsedBuffers(SymmetricBuffers):
    """exchange: what the other ranks send; None before the first step, in which all send the same."""

    exchange: IntegerMessages | None = None

    def __init__(self, recorder: FakeRecorder, fake: FakeTensorMode, *sizes: Any):
        self.recorder, self.fake = recorder, fake
        self._rows: dict[int, tuple[Rows, Rows]] = {}
        """Sent and received, by the storage of the sizes, which backward uses too."""
        with replaced(symm_mem, "empty", self._empty), replaced(symm_mem, "rendezvous", lambda *_: None):
            super().__init__(*sizes)

    def _empty(self, *shape: int, dtype: torch.dtype, device: Any) -> Tensor:
        with self.fake:
            buffer = torch.empty(shape, dtype=dtype)
        self.recorder.ledger.assign([buffer], SYMMETRIC)
        return buffer

    def try_once(self, row_limit: int) -> None:
        recorder = self.recorder
        with self.fake, recorder.recording():
            super().try_once(row_limit)
        recorder.start_up += recorder.log.messages
        recorder.begin_step()

    def dispatch(self, buffers: Any, x_HD: Tensor, send_Ge: Tensor) -> tuple[Tensor, Tensor]:
        recorder, current = self.recorder, self.recorder.dispatching
        if self.exchange is None:
            sent_rows = rows_sent(values.numbers(send_Ge), self.group.size)
            self._rows[_key(send_Ge)] = sent_rows, (sent_rows[self.group.rank],) * self.group.size
        elif recorder.sites.in_region("dispatch"):  # not in backward
            sent_rows = rows_sent(values.numbers(send_Ge), self.group.size)
            with outside():
                received = self.exchange.rows_received(recorder.rank, current.microbatch, current.layer)
            self._rows[_key(send_Ge)] = sent_rows, received
        current.rows = self._rows[_key(send_Ge)]
        away, sizes = super().dispatch(buffers, x_HD, send_Ge)
        self._rows[_key(sizes)] = current.rows[::-1]
        return away, sizes

    def combine(self, buffers: Any, y_AD: Tensor, back: Tensor) -> Tensor:
        self.recorder.dispatching.rows = self._rows[_key(back)]
        return super().combine(buffers, y_AD, back)

    def were_too_small(self, flags: float) -> bool:
        """By the assumed routing, as a flag of fake tensors is never set."""
        if self.exchange is None or self.group.size == 1:
            return False
        stage = self.exchange.routing.fold.stage
        first = self.recorder.rank // stage * stage
        layers = moe_blocks(self.exchange.routing.config.model)
        with outside():
            return _overflows(self.exchange, self, layers, range(first, first + stage))


def _key(sizes: Tensor) -> int:
    return sizes.untyped_storage()._cdata


def reserve(
    recorder: FakeRecorder,
    fake: FakeTensorMode,
    model: Model,
    moe: MoEOptions,
    training: Training,
    meshes: Meshes,
    device: torch.device,
) -> SharedBuffers | None:
    symmetric = DISPATCHERS.implementation(moe.dispatcher) is Symmetric
    own = partial(RehearsedBuffers, recorder, fake) if symmetric else None
    return reserve_buffers(model, moe, training, meshes, device, own)


def _overflows(
    exchange: IntegerMessages, memory: SymmetricBuffers, layers: Iterable[int], ranks: Iterable[int]
) -> bool:
    """Whether a receive buffer of these ranks is too small for the assumed routing, in any microbatch and layer."""
    layers = list({exchange.routing.key(layer): layer for layer in layers}.values())
    return any(
        bool((bins(total_E.view(exchange.routing.fold.ep, -1)).sum(1) > memory.away_rows).any())
        for rank in ranks
        for microbatch in range(exchange.routing.microbatches)
        for layer in layers
        for total_E in (exchange.received_integers(rank, microbatch, layer, 0),)
    )


def symmetric_notes(gradients: Gradients) -> list[str]:
    """What a reader has to know about the figures."""
    if gradients.shared_buffers is None or gradients.shared_buffers.group.size == 1:
        return []
    texts = [
        "symm_mem: its operations run on the computation's own stream, which waits for each; unused rows of the "
        "receive buffers count as computed and moved"
    ]
    if gradients.overflow_reruns:
        texts.append(
            "symm_mem: a receive buffer is too small for this routing, so the step is repeated by alltoall, and both "
            "passes count: raise moe.symm_mem_factor"
        )
    return texts
