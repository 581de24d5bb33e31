"""Computes a step's gradients, pipelined or not, and sends the host what it needs to know in one transfer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe import observe
from titanmoe.comm.collectives import all_reduce
from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model
from titanmoe.data.batch import Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.count import NO_WORK, TrainingWork
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.protocol import SharedBuffers
from titanmoe.moe.layer import MoE
from titanmoe.moe.layer_statistics import LayerStatistics, RowLayout, sum_statistics
from titanmoe.observe import named
from titanmoe.parallel.batch_slice import Slice, mask_of, take_slice, to_device
from titanmoe.parallel.context import Placement
from titanmoe.parallel.largest_logits import LargestLogits
from titanmoe.parallel.norm import grad_norm
from titanmoe.parallel.pipeline import Pipeline, WithoutPipeline
from titanmoe.parallel.tensor import sum_replicated
from titanmoe.parallel.tied import TiedEnds
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.run_state import RunState


@dataclass
class Totals:
    """Counts of a step's batch over all ranks."""

    count: Tensor  # of what the objective divides by, such as labels
    tokens: Tensor  # tokens that are not padding
    samples: Tensor  # that are not all padding
    flops: Tensor  # of the model, forward and backward


@dataclass
class StepWork:
    """The inputs of a rank's forward and backward in one step."""

    batches: list[Batch]
    slices: list[Slice]
    totals: Totals


@dataclass
class StepScalars:
    """What the host learns of a step, between its gradients and its update."""

    loss: float
    mtp_loss: float
    stop: float
    overflowed: float
    norm: float
    tokens: float
    count: float
    """Of what the objective divides by, such as labels."""
    flops: float
    layers: dict[int, LayerStatistics]
    """Of each MoE layer."""
    max_logits: list[float]
    """Of each block, in a step that measures them."""
    metrics: dict[str, float]
    """The objective's own."""


class Sums(NamedTuple):
    scalars: StepScalars
    norm: Tensor
    layers: dict[int, LayerStatistics]
    """Each MoE layer's, on the device."""
    own_losses: Tensor
    """What this rank added to the losses."""
    logits: Tensor | None
    """The largest of each block and head, in a step that measures them."""


class Slicer:
    """From a data rank's batches to what this rank works on."""

    def __init__(
        self,
        meshes: Meshes,
        placement: Placement,
        device: torch.device,
        with_mtp: bool,
        objective: Objective,
        work: TrainingWork = NO_WORK,
    ):
        self.meshes, self.placement, self.device, self.with_mtp = meshes, placement, device, with_mtp
        self.objective, self.work = objective, work

    def count(self, batches: list[Batch]) -> Totals:
        mine = [
            torch.stack(
                [
                    self.objective.count(b).double(),
                    b.valid_BS.sum().double(),
                    b.valid_BS.any(1).sum().double(),
                    b.valid_BS.sum().double() * self.work.per_token + self._of_pairs(b),
                ]
            )
            for b in batches
        ]
        return Totals(*all_reduce(to_device(torch.stack(mine).sum(0), self.device), self.meshes.data))

    def _of_pairs(self, batch: Batch) -> float:
        """FLOPs of positions and what they see."""
        (samples, length), mask = batch.tokens_BS.shape, mask_of(batch)
        counts = {width: mask._replace(window=width).count(length, samples) for width in self.work.per_pair}
        return sum(cost * counts[width] for width, cost in self.work.per_pair.items())

    def slices(self, batches: list[Batch]) -> list[Slice]:
        where = (self.meshes, self.placement, self.device)
        return [take_slice(batch, m, *where, self.with_mtp) for m, batch in enumerate(batches)]


@dataclass(eq=False)
class Gradients:
    stages: list[Transformer]
    engine: WithoutPipeline | Pipeline
    objective: Objective
    tied: TiedEnds
    shared_buffers: SharedBuffers | None
    """The buffers that a step attaches to its dispatchers."""
    meshes: Meshes
    model: Model
    layout: RowLayout
    """Where numbers stand in the row of statistics of a MoE layer."""
    state: RunState
    device: torch.device
    logits: LargestLogits | None = None
    wants_to_stop: Callable[[], bool] = lambda: False
    """Whether this rank wants to stop; all stop together once one does."""
    overflow_reruns: int = 0

    def __post_init__(self) -> None:
        self.parameters = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """Those with a gradient: the recipe may freeze others."""
        self.moe_layers: dict[int, MoE] = {i: moe for stage in self.stages for i, moe in stage.moe_layers().items()}
        self.blocks = moe_blocks(self.model)

    def sums(self, work: StepWork) -> Sums:
        """Sums the gradients of a step over the ranks, and returns what is known of it."""
        sums = self._sums(work, self.shared_buffers)
        if self.shared_buffers and self.shared_buffers.were_too_small(sums.scalars.overflowed):  # the pass is void
            self.overflow_reruns += 1
            self.drop()
            sums = self._sums(work, None)
        return sums

    def _sums(self, work: StepWork, symmetric: SharedBuffers | None) -> Sums:
        """What the host has to know of a step comes in one transfer, the only one of a step outside its dispatchers;
        the norm and each MoE layer's statistics are returned as tensors too.
        """
        observe.active.phase("forward_backward", self.state.step)
        own, sums = self.forward_backward(work.slices, work.totals, symmetric)
        self.finish_gradients()
        observe.active.phase("optimizer", self.state.step)
        norm = grad_norm(self.trained, self.meshes.world, self.tied.names, self.device)
        counts = {number: moe.balance.counts for number, moe in self.moe_layers.items()}
        experts = sum_statistics(counts, self.blocks, self.layout, self.meshes.world, self.device)
        logits = self.logits.over_ranks(self.device) if self.logits else None
        by_block = norm.new_empty(0) if logits is None else logits.amax(1)
        metrics = self.objective.metrics
        totals = work.totals
        loss, mtp_loss, stop, overflowed, norm_now, tokens, count, flops, *rest = torch.cat(
            (
                sums[:4],
                torch.stack((norm.double(), totals.tokens, totals.count, totals.flops)),
                sums[4:],
                experts.flatten(),
                by_block,
            )
        ).tolist()
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        tp, (own_metrics, rest) = self.meshes.tp.size, (rest[: len(metrics)], rest[len(metrics) :])
        loss, mtp_loss = loss / tp + self.objective.constant, mtp_loss / tp
        reported = {name: value / tp for name, value in zip(metrics, own_metrics, strict=True)}
        width = self.layout.width
        layers = {n: self.layout.read(rest[i * width : (i + 1) * width]) for i, n in enumerate(self.blocks)}
        scalars = StepScalars(
            loss, mtp_loss, stop, overflowed, norm_now, tokens, count, flops, layers, rest[experts.numel() :], reported
        )
        on_device = {number: self.layout.read(row) for number, row in zip(self.blocks, experts, strict=True)}
        return Sums(scalars, norm, on_device, own, logits)

    def begin_step(self, totals: Totals) -> None:
        if self.logits:
            self.logits.begin_step(self.state.step)
        for moe in self.moe_layers.values():
            moe.begin_step(self.state.step, totals.tokens, totals.samples)

    @named("forward backward")
    def forward_backward(
        self, slices: list[Slice], totals: Totals, symmetric: SharedBuffers | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's losses. And summed over all, in one message: the losses, whether any rank wants to stop, whether
        a receive buffer was too small, and the objective's metrics.

        symmetric: what to attach to the layers' dispatchers, which are exact without it.
        """
        self.begin_step(totals)
        # The only division: the objective's sums by their global count. Every reduction is a sum.
        count = totals.count.where(totals.count > 0, 1)
        dispatchers = [moe.dispatcher for moe in self.moe_layers.values()]
        with symmetric.attach(dispatchers) if symmetric else nullcontext():
            loss = self.engine.run(slices, self.objective, count)
        mtp_loss = sum(
            (mtp.loss_M.sum() / count for stage in self.stages for mtp in stage.mtp or ()), loss.new_zeros(())
        )
        stop = torch.full_like(loss, self.wants_to_stop())
        overflowed = symmetric.overflowed.to(loss.dtype) if symmetric else torch.zeros_like(loss)
        own_metrics = self.objective.take_metrics(loss) / count
        mine = torch.cat((torch.stack((loss, mtp_loss, stop, overflowed)).double(), own_metrics))
        return mine[:2], all_reduce(mine, self.meshes.world)

    @named("finish gradients")
    def finish_gradients(self) -> None:
        """Sums the gradients that FSDP does not: those of replicated parameters and of copies of the embedding."""
        meshes = self.meshes
        sum_replicated(self.trained.values(), (meshes.sequence, meshes.data), meshes.tp, meshes.etp)
        self.tied.add_gradients()

    def drop(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None
