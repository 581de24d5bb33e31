"""Symmetric memory in a rehearsal: its operations as messages, its buffers as fake tensors.

Such an operation keeps its sizes on the device, and the receiver learns them from the operation itself. Here the stated
routing supplies what the other ranks of the group send: the dispatcher's own code runs for each of them, up to its
first operation.

Shapes as in titanmoe.moe.symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as outside

from titanmoe.config.blocks import moe_blocks
from titanmoe.moe.symmetric import Symmetric, SymmetricBuffers, bins
from titanmoe.rehearse import values
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.memory_over_step import SYMMETRIC
from titanmoe.rehearse.routing import Exchange
from titanmoe.rehearse.sent_rows import Rows, rows_sent
from titanmoe.replace import replaced
from titanmoe.train.trainer import StepWork, Sums, Trainer


@contextmanager
def symmetric_memory(recorder: FakeRecorder, fake: FakeTensorMode) -> Iterator[None]:
    dispatch, combine = SymmetricBuffers.dispatch, SymmetricBuffers.combine
    rows: dict[int, tuple[Rows, Rows]] = {}  # sent and received, by the storage of the sizes, which backward uses too

    def key(sizes: Tensor) -> int:
        return sizes.untyped_storage()._cdata

    def send(memory: SymmetricBuffers, buffers: Any, x_HD: Tensor, send_Ge: Tensor) -> tuple[Tensor, Tensor]:
        now, group = recorder.dispatching, memory.group
        if now.exchange is None:  # the first exchange, in which all ranks send the same
            sent = rows_sent(values.numbers(send_Ge), group.size)
            rows[key(send_Ge)] = sent, (sent[group.rank],) * group.size
        elif now.starting:
            sent = rows_sent(values.numbers(send_Ge), group.size)
            with outside():
                received = now.exchange.rows_received(recorder.rank, now.microbatch, now.layer)
            rows[key(send_Ge)] = sent, received
        now.rows = rows[key(send_Ge)]
        away, sizes = dispatch(memory, buffers, x_HD, send_Ge)
        rows[key(sizes)] = now.rows[::-1]
        return away, sizes

    def send_back(memory: SymmetricBuffers, buffers: Any, y_AD: Tensor, sizes: Tensor) -> Tensor:
        recorder.dispatching.rows = rows[key(sizes)]
        return combine(memory, buffers, y_AD, sizes)

    def empty(*shape: int, dtype: torch.dtype, device: Any) -> Tensor:
        with fake:
            buffer = torch.empty(shape, dtype=dtype)
        recorder.ledger.assign([buffer], SYMMETRIC)
        return buffer

    with ExitStack() as stack:
        for owner, name, replacement in (
            (SymmetricBuffers, "dispatch", send),
            (SymmetricBuffers, "combine", send_back),
            (SymmetricBuffers, "try_once", _before_the_first_step(recorder, fake, SymmetricBuffers.try_once)),
            (symm_mem, "empty", empty),
            (symm_mem, "rendezvous", lambda *_: None),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        yield


def _before_the_first_step(recorder: FakeRecorder, fake: FakeTensorMode, real: Callable) -> Callable[..., None]:
    def try_once(memory: SymmetricBuffers, held: int) -> None:
        with fake, recorder.on():
            real(memory, held)
        recorder.start_up += recorder.log.messages
        recorder.begin_step()

    return try_once


@contextmanager
def as_if_supported() -> Iterator[None]:
    """The machine that rehearses need not have what the rehearsed one needs."""
    with replaced(Symmetric, "missing", staticmethod(lambda device: "")):
        yield


def repeat_if_too_small(trainer: Trainer, lent: Exchange) -> None:
    """Make the step see whether the receive buffers of symmetric memory are too small for the stated routing."""
    real, first = trainer.gradients, trainer.runtime.rank // trainer.fold.stage * trainer.fold.stage
    stage, layers = range(first, first + trainer.fold.stage), moe_blocks(trainer.config.model)

    def gradients(work: StepWork, memory: Any) -> Sums:
        sums = real(work, memory)
        if memory is not None:
            with outside():
                sums.scalars.overflowed = float(_overflows(lent, memory, layers, stage))
        return sums

    trainer.gradients = gradients


def _overflows(exchange: Exchange, memory: SymmetricBuffers, layers: Iterable[int], ranks: Iterable[int]) -> bool:
    """Whether a receive buffer of these ranks is too small for the stated routing, in any microbatch and layer."""
    layers = list({exchange.routing.key(layer): layer for layer in layers}.values())
    return any(
        bool((bins(total_E.view(exchange.routing.fold.ep, -1)).sum(1) > memory.away_rows).any())
        for rank in ranks
        for microbatch in range(exchange.routing.microbatches)
        for layer in layers
        for total_E in (exchange.received(rank, microbatch, layer, 0),)
    )


def notes(trainer: Trainer) -> list[str]:
    """What a reader has to know about the figures."""
    if trainer.shared_buffers is None or trainer.shared_buffers.group.size == 1:
        return []
    notes = [
        "symm_mem: its operations run on the computation's own stream, which waits for each; unused rows of the "
        "receive buffers count as computed and moved"
    ]
    if trainer.overflow_reruns:
        notes.append(
            "symm_mem: a receive buffer is too small for this routing, so the step is repeated by alltoall, and both "
            "passes count: raise moe.symm_mem_factor"
        )
    return notes
