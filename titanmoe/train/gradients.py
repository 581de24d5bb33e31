"""Computes a step's gradients, pipelined or not, and sends the host what it needs to know in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titanmoe import observe
from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model
from titanmoe.data.batch import Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.count import NO_WORK, TrainingWork
from titanmoe.models.transformer import Transformer
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
    stop: bool
    """Whether any rank wants to stop."""
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


@dataclass
class PassSums:
    """What a forward and backward gives besides gradients: this rank's, or summed over all ranks."""

    loss: Tensor
    mtp_loss: Tensor
    stop: Tensor
    """How many ranks want to stop."""
    repeat: Tensor
    """How many ranks ask for the step to be repeated (FirstPass)."""
    metrics: Tensor
    """The objective's own, in the order of their names."""


def sum_together(values: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Sum named tensors over the group in one message, in float64. Collective over the group. Not differentiable."""
    flat = all_reduce(torch.cat([value.flatten() for value in values.values()]).double(), group)
    parts = flat.split([value.numel() for value in values.values()])
    return {name: part.view_as(value) for (name, value), part in zip(values.items(), parts, strict=True)}


def to_host(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Copy named tensors to the host in one transfer, which waits for the device: numbers, and lists of vectors."""
    numbers = iter(torch.cat([value.flatten() for value in values.values()]).double().tolist())
    return {
        name: [next(numbers) for _ in range(value.numel())] if value.ndim else next(numbers)
        for name, value in values.items()
    }


class FirstPass(Protocol):
    """What makes the first forward and backward of a step faster, and may ask that they be repeated without it."""

    needs_repeat: Tensor
    """Whether this rank asks for it: a scalar on the device, set during the pass."""
    repeats: int
    """How many steps of this process were repeated."""

    def attached(self, layers: Collection[MoE]) -> AbstractContextManager[None]:
        """Return a context in which the layers use it."""
        ...

    def must_repeat(self, ranks: float) -> bool:
        """Return whether the pass is void. ranks: how many ask for it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what is reported of it with every step."""
        ...


class Sums(NamedTuple):
    """What is known of a step once its gradients are summed."""

    scalars: StepScalars
    norm: Tensor
    layers: dict[int, LayerStatistics]
    """Each MoE layer's, on the device."""
    own: PassSums
    """This rank's summands."""
    logits: Tensor | None
    """The largest of each block and head, in a step that measures them."""


@dataclass(eq=False, kw_only=True)
class Slicer:
    """Cuts the batches of a data rank into the slices that this rank works on."""

    meshes: Meshes
    placement: Placement
    device: torch.device
    with_mtp: bool
    objective: Objective
    work: TrainingWork = NO_WORK

    def count(self, batches: list[Batch]) -> Totals:
        """Count a step's batch over all data ranks, in one message. Collective over them."""
        tokens = [b.valid_BS.sum().double() for b in batches]
        own = {
            "count": sum(self.objective.count(b).double() for b in batches),
            "tokens": sum(tokens),
            "samples": sum(b.valid_BS.any(1).sum().double() for b in batches),
            "flops": sum(n * self.work.per_token + self._of_pairs(b) for n, b in zip(tokens, batches, strict=True)),
        }
        on_device = to_device(torch.stack(list(own.values())), self.device)
        return Totals(**sum_together(dict(zip(own, on_device, strict=True)), self.meshes.data))

    def _of_pairs(self, batch: Batch) -> float:
        """Return the FLOPs of positions and what they see."""
        (samples, length), mask = batch.tokens_BS.shape, mask_of(batch)
        counts = {width: mask._replace(window=width).count(length, samples) for width in self.work.per_pair}
        return sum(cost * counts[width] for width, cost in self.work.per_pair.items())

    def slices(self, batches: list[Batch]) -> list[Slice]:
        where = (self.meshes, self.placement, self.device)
        return [take_slice(batch, m, *where, self.with_mtp) for m, batch in enumerate(batches)]


@dataclass(eq=False, kw_only=True)
class Gradients:
    """Computes the gradients of a step, summed over all ranks, and what is reported with them."""

    stages: list[Transformer]
    engine: WithoutPipeline | Pipeline
    objective: Objective
    tied: TiedEnds
    first_pass: FirstPass | None
    meshes: Meshes
    model: Model
    layout: RowLayout
    """Where numbers stand in the row of statistics of a MoE layer."""
    state: RunState
    device: torch.device
    logits: LargestLogits | None = None

    def __post_init__(self) -> None:
        self.parameters = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """Those with a gradient: the recipe may freeze others."""
        self.moe_layers: dict[int, MoE] = {i: moe for stage in self.stages for i, moe in stage.moe_layers().items()}
        self.blocks = moe_blocks(self.model)

    def sums(self, work: StepWork, wants_to_stop: Callable[[], bool] = lambda: False) -> Sums:
        """Sum the gradients of a step over the ranks, and return what is known of it. Collective over the world.

        wants_to_stop: asked after the backward, whether this rank wants to; all stop together once one does.
        """
        sums, repeat = self._sums(work, self.first_pass, wants_to_stop)
        if repeat:
            self.first_pass.repeats += 1
            self.drop()
            sums, _ = self._sums(work, None, wants_to_stop)
        return sums

    def _sums(
        self, work: StepWork, first_pass: FirstPass | None, wants_to_stop: Callable[[], bool]
    ) -> tuple[Sums, bool]:
        """Return what is known of a step, and whether it has to be repeated.

        What the host has to know comes in one transfer, the only one of a step outside its dispatchers; the norm and
        each MoE layer's statistics are returned as tensors too.
        """
        observe.active.phase("forward_backward", self.state.step)
        own, summed = self.forward_backward(work.slices, work.totals, first_pass, wants_to_stop)
        self.finish_gradients()
        observe.active.phase("optimizer", self.state.step)
        norm = grad_norm(self.trained, self.meshes.world, self.tied.names, self.device)
        counts = {number: moe.balance.counts for number, moe in self.moe_layers.items()}
        experts = sum_statistics(counts, self.blocks, self.layout, self.meshes.world, self.device)
        logits = self.logits.over_ranks(self.device) if self.logits else None
        rows = dict(zip(self.blocks, experts, strict=True))
        by_block = {} if logits is None else {"max_logits": logits.amax(1)}
        by_layer = {f"layer {number}": row for number, row in rows.items()}
        known = to_host(vars(work.totals) | vars(summed) | {"norm": norm} | by_layer | by_block)
        tp = self.meshes.tp.size  # only ranks of the last stage have a loss, and all ranks of a tp group the same one
        scalars = StepScalars(
            loss=known["loss"] / tp + self.objective.constant,
            mtp_loss=known["mtp_loss"] / tp,
            stop=bool(known["stop"]),
            norm=known["norm"],
            tokens=known["tokens"],
            count=known["count"],
            flops=known["flops"],
            layers={number: self.layout.read(known[f"layer {number}"]) for number in rows},
            max_logits=known.get("max_logits", []),
            metrics={name: x / tp for name, x in zip(self.objective.metrics, known["metrics"], strict=True)},
        )
        on_device = {number: self.layout.read(row) for number, row in rows.items()}
        repeat = first_pass is not None and first_pass.must_repeat(known["repeat"])
        return Sums(scalars, norm, on_device, own, logits), repeat

    def begin_step(self, totals: Totals) -> None:
        if self.logits:
            self.logits.begin_step(self.state.step)
        for moe in self.moe_layers.values():
            moe.begin_step(self.state.step, totals.tokens, totals.samples)

    @named("forward backward")
    def forward_backward(
        self,
        slices: list[Slice],
        totals: Totals,
        first_pass: FirstPass | None = None,
        wants_to_stop: Callable[[], bool] = lambda: False,
    ) -> tuple[PassSums, PassSums]:
        """Run the step's microbatches. Return this rank's sums, and those of all ranks, which travel in one message.

        first_pass: what the layers use; the pass is exact without it.
        """
        self.begin_step(totals)
        # The objective's sums are divided by their global count. Every reduction is a sum, so nothing is scaled twice.
        count = totals.count.where(totals.count > 0, 1)
        with first_pass.attached(self.moe_layers.values()) if first_pass else nullcontext():
            loss = self.engine.run(slices, self.objective, count)
        mtp_loss = sum(
            (mtp.loss_M.sum() / count for stage in self.stages for mtp in stage.mtp or ()), loss.new_zeros(())
        )
        own = PassSums(
            loss=loss,
            mtp_loss=mtp_loss,
            stop=torch.full_like(loss, wants_to_stop()),
            repeat=first_pass.needs_repeat.to(loss.dtype) if first_pass else torch.zeros_like(loss),
            metrics=self.objective.take_metrics(loss) / count,
        )
        return own, PassSums(**sum_together(vars(own), self.meshes.world))

    @named("finish gradients")
    def finish_gradients(self) -> None:
        """Sums the gradients that FSDP does not: those of replicated parameters and of copies of the embedding."""
        meshes = self.meshes
        sum_replicated(self.trained.values(), (meshes.sequence, meshes.data), meshes.tp, meshes.etp)
        self.tied.add_gradients()

    def drop(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None
