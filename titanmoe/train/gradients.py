"""Computes a step's gradients, pipelined or not, and copies all scalars that the host needs in one transfer.

`Trainer.train_step` makes the slices by `Slicer` and calls `Gradients.sums`. A `titanmoe.session.Session` calls what
that consists of: `begin_step`, `add` for each pass of microbatches, `reduce`. The objective's sums are divided by their
`divisor`, counted over the whole step, and every reduction is a sum, so no gradient is scaled twice.

Shapes: B samples, S positions of the attention slice, N numbers of the head for each label, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanmoe import observe
from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model
from titanmoe.data.batch import Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.count import NO_WORK, TrainingWork
from titanmoe.models.lora_dropout import InputDropout
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher import SharedBuffers
from titanmoe.moe.layer import MoE
from titanmoe.moe.layer_statistics import LayerStatistics, RowLayout, sum_statistics
from titanmoe.observe import named
from titanmoe.parallel.batch_slice import BatchSlice, mask_of, take_slice, to_device
from titanmoe.parallel.context import Placement
from titanmoe.parallel.grad_norm import grad_norm
from titanmoe.parallel.largest_logits import LargestLogits
from titanmoe.parallel.parallel_plan import sum_replicated
from titanmoe.parallel.pipeline import Pipeline, WithoutPipeline
from titanmoe.parallel.tied_embeddings import TiedEmbeddings
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.run_state import RunState


@dataclass
class Totals:
    """Counts of a step's batch, summed over all data ranks: float64 scalars on the device."""

    divisor: Tensor
    """Divisor of the objective's sum, such as the number of labels (`Objective.count`)."""
    tokens: Tensor
    """Tokens without padding."""
    samples: Tensor
    """Samples that are not all padding."""
    flops: Tensor
    """FLOPs of the model, forward and backward."""


@dataclass
class StepWork:
    """Inputs of a rank's forward and backward in one step."""

    batches: list[Batch]
    """This data rank's microbatches."""
    slices: list[BatchSlice]
    """This rank's slices of the microbatches, on its device."""
    totals: Totals


@dataclass
class StepScalars:
    """Loss, norm, counts and statistics of a step over all ranks, in host memory, known before the update."""

    loss: float
    mtp_loss: float
    stop: bool
    """Whether any rank asked for training to end after this step."""
    repeats: float
    """Number of ranks on which a buffer of fixed size was too small."""
    norm: float
    """Gradient norm before clipping."""
    tokens: float
    divisor: float
    """Divisor of the objective's sum, such as the number of labels."""
    flops: float
    layers: dict[int, LayerStatistics]
    """Statistics of each MoE layer of the model, by number of the block."""
    max_logits: list[float]
    """Largest attention logit of each block; [] in a step that does not measure them."""
    metrics: dict[str, float]
    """Metrics of the objective besides the loss, by name."""


@dataclass
class PassSums:
    """Loss, metrics and requests to stop or repeat, of a forward and backward: one rank's, or summed over ranks."""

    loss: Tensor
    mtp_loss: Tensor
    stop: Tensor
    """1 if this rank asks for training to end; summed over ranks, the number of ranks that do."""
    repeat: Tensor
    """1 if a buffer of fixed size was too small on this rank (SharedBuffers); summed over ranks, how many."""
    metrics: Tensor
    """Metrics of the objective, in the order of `Objective.metrics`."""


def sum_together(values: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Sum each named tensor over the group by one all-reduce in float64; return the float64 sums by name.

    Collective over the group. Not differentiable.
    """
    flat = all_reduce(torch.cat([value.flatten() for value in values.values()]).double(), group)
    parts = flat.split([value.numel() for value in values.values()])
    return {name: part.view_as(value) for (name, value), part in zip(values.items(), parts, strict=True)}


def to_host(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Copy named tensors to the host in one transfer and wait for it; return floats for scalars, lists for vectors."""
    numbers = iter(torch.cat([value.flatten() for value in values.values()]).double().tolist())
    return {
        name: [next(numbers) for _ in range(value.numel())] if value.ndim else next(numbers)
        for name, value in values.items()
    }


class StepSums(NamedTuple):
    """Loss, gradient norm and statistics of a step over all ranks, after its gradients are summed."""

    scalars: StepScalars
    norm: Tensor
    """Gradient norm before clipping, a scalar on the device."""
    layers: dict[int, LayerStatistics]
    """Statistics of each MoE layer of the model by number of the block, on the device."""
    local: PassSums
    """Loss, metrics and votes of this rank alone."""
    logits: Tensor | None
    """Largest attention logit of each block and head, on the device; None in a step that does not measure them."""


@dataclass(eq=False, kw_only=True)
class Slicer:
    """Cutter of a data rank's microbatches: takes what this rank works on, its slice of the sequence, to its device."""

    meshes: Meshes
    placement: Placement
    device: torch.device
    with_mtp: bool
    """Whether slices have the ids and labels that multi-token prediction reads."""
    objective: Objective
    work: TrainingWork = NO_WORK
    """FLOPs that `count` counts."""
    with_index: bool = False
    """Whether slices have the indices of their tokens, which dropout of adapters reads."""

    def count(self, batches: list[Batch], objective: Objective | None = None) -> Totals:
        """Count divisor, tokens, samples and FLOPs of a step's batch over all data ranks. Collective over these ranks.

        Args:
            batches: this data rank's microbatches.
            objective: the objective whose divisor to count; None for the slicer's own.
        """
        objective = objective or self.objective
        tokens = [b.valid_BS.sum().double() for b in batches]
        counts = {
            "divisor": sum(objective.count(b).double() for b in batches),
            "tokens": sum(tokens),
            "samples": sum(b.valid_BS.any(1).sum().double() for b in batches),
            "flops": sum(
                n * self.work.per_token + self._attention_flops(b) for n, b in zip(tokens, batches, strict=True)
            ),
        }
        on_device = to_device(torch.stack(list(counts.values())), self.device)
        return Totals(**sum_together(dict(zip(counts, on_device, strict=True)), self.meshes.data))

    def _attention_flops(self, batch: Batch) -> float:
        """Return the attention FLOPs of a microbatch of full sequences, forward and backward, all blocks together.

        Only pairs of positions that see each other count, within each block's window.
        """
        (samples, length), mask = batch.tokens_BS.shape, mask_of(batch)
        counts = {width: mask._replace(window=width).count(length, samples) for width in self.work.per_pair}
        return sum(cost * counts[width] for width, cost in self.work.per_pair.items())

    def slices(self, batches: list[Batch]) -> list[BatchSlice]:
        """Return this rank's slice of each microbatch, on its device. Not collective."""
        where = (self.meshes, self.placement, self.device)
        return [take_slice(batch, m, *where, self.with_mtp, self.with_index) for m, batch in enumerate(batches)]


@dataclass(eq=False, kw_only=True)
class Gradients:
    """Computation of a step's gradients, summed over all ranks, and of the numbers reported with them.

        sums                    a step of the trainer, made twice if a buffer was too small
          forward_backward        begin_step, add
            add                     the engine's microbatches, divided by the step's divisor
          reduce                  finish_gradients, sums, the norm, and one transfer of all scalars to the host

    titanmoe.session calls begin_step, add and reduce instead.
    """

    stages: list[Transformer]
    engine: WithoutPipeline | Pipeline
    objective: Objective
    tied: TiedEmbeddings
    first_pass: SharedBuffers | None
    meshes: Meshes
    model: Model
    layout: RowLayout
    """Meaning of the columns of a MoE layer's row of statistics."""
    state: RunState
    device: torch.device
    logits: LargestLogits | None = None

    def __post_init__(self) -> None:
        self.parameters = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """Parameters that get a gradient; the recipe may freeze others."""
        self.summed_over = {name: ranks for stage in self.stages for name, ranks in stage.summed_over.items()}
        self.moe_layers: dict[int, MoE] = {i: moe for stage in self.stages for i, moe in stage.moe_layers().items()}
        self.blocks = moe_blocks(self.model)
        self.dropouts = [m for stage in self.stages for m in stage.modules() if isinstance(m, InputDropout)]

    def sums(self, work: StepWork, wants_to_stop: Callable[[], bool] = lambda: False) -> StepSums:
        """Run a step's forward and backward, leave gradients summed over ranks in `.grad`, return the step's sums.

        Collective over the world. If a buffer of fixed size was too small on any rank, these gradients are dropped, and
        forward and backward are made again without such buffers.

        Args:
            wants_to_stop: returns whether this rank asks for training to end after this step; called after each
                backward. The decision of all ranks is `scalars.stop` of the result.
        """
        first_pass = self.first_pass
        while True:
            observe.active.phase("forward_backward", self.state.step)
            local = self.forward_backward(work.slices, work.totals, first_pass, wants_to_stop)
            sums = self.reduce(local, work.totals, self.objective.metrics, self.objective.constant)
            if first_pass is None or not first_pass.must_repeat(sums.scalars.repeats):
                return sums
            first_pass.repeats += 1
            self.drop()
            first_pass = None

    def reduce(self, local: PassSums, totals: Totals, metrics: Sequence[str], constant: float) -> StepSums:
        """Sum the gradients of all `add` calls of a step over the ranks, in `.grad`, and return the step's sums.

        Call it once. Collective over the world. Waits for all scalars, in one transfer to the host, the only one of a
        step outside its dispatchers; the norm and the statistics of the MoE layers are returned on the device too.

        Args:
            local: the sum over these calls of what `add` returned.
            totals: counts of the step's batch.
            metrics: names of the numbers in `local.metrics`.
            constant: what is added to the reported loss (`Objective.constant`).
        """
        summed = sum_together(vars(local), self.meshes.world)
        self.finish_gradients()
        observe.active.phase("optimizer", self.state.step)
        norm = grad_norm(self.trained, self.meshes.world, self.tied.names, self.device)
        of_layers = {number: moe.balance.counts for number, moe in self.moe_layers.items()}
        experts = sum_statistics(of_layers, self.blocks, self.layout, self.meshes.world, self.device)
        logits = self.logits.reduce_over_ranks(self.device) if self.logits else None
        rows = dict(zip(self.blocks, experts, strict=True))
        by_block = {} if logits is None else {"max_logits": logits.amax(1)}
        by_layer = {f"layer {number}": row for number, row in rows.items()}
        known = to_host(vars(totals) | summed | {"norm": norm} | by_layer | by_block)
        # All ranks of a tp group of the last stage compute the same loss, and other stages none. So a loss or a metric
        # that is summed over the world is tp times what it should be, and is divided by tp here. Gradients are not: the
        # collectives' backwards take the losses of a tp group as one (titanmoe.comm.collectives).
        tp = self.meshes.tp.size
        scalars = StepScalars(
            loss=known["loss"] / tp + constant,
            mtp_loss=known["mtp_loss"] / tp,
            stop=bool(known["stop"]),
            repeats=known["repeat"],
            norm=known["norm"],
            tokens=known["tokens"],
            divisor=known["divisor"],
            flops=known["flops"],
            layers={number: self.layout.read(known[f"layer {number}"]) for number in rows},
            max_logits=known.get("max_logits", []),
            metrics={name: x / tp for name, x in zip(metrics, known["metrics"], strict=True)},
        )
        on_device = {number: self.layout.read(row) for number, row in rows.items()}
        return StepSums(scalars, norm, on_device, local, logits)

    def begin_step(self, totals: Totals) -> None:
        """Set the MoE layers' counts of tokens and loads to 0, and give them the step's number, tokens and samples.

        Dropout layers get the number, and the measurement of attention logits begins anew if this step is measured.
        Call it before the first `add` of a step.
        """
        if self.logits:
            self.logits.begin_step(self.state.step)
        for moe in self.moe_layers.values():
            moe.begin_step(self.state.step, totals.tokens, totals.samples)
        for dropout in self.dropouts:
            dropout.begin_step(self.state.step)

    def begin_pass(self) -> None:
        """Move the MoE layers' counts of microbatches so far into the step's sums, before the step's next `add` call.

        Call it before each `add` but the first. The microbatches of that call are numbered from 0 again.
        """
        for moe in self.moe_layers.values():
            moe.balance.begin_pass()

    @named("forward backward")
    def add(self, slices: list[BatchSlice], objective: Objective, divisor: Tensor, backward: bool = True) -> PassSums:
        """Run microbatches forward and backward, add gradients to `.grad`, and return this rank's loss and metrics.

        All three are divided by `divisor`, or by 1 if that is 0. Loss and metrics are 0 on ranks without the last
        pipeline stage, and equal on the ranks of a tp group. Collective over the stage and the pipeline. Gradients of
        replicated parameters are not yet summed over ranks. Call `begin_pass` before each further call in a step.

        Args:
            slices: this rank's microbatches, at most as many as the recipe's step has; with a pipeline, just as many.
            objective: what to differentiate.
            divisor: what to divide the objective's sums by: its count over all microbatches and ranks of the step.
            backward: whether to compute gradients.
        """
        divisor = divisor.where(divisor > 0, 1)

        # Sums of losses are divided here alone: before backward, so that gradients are too, and what is reported below.
        # Every reduction is a sum, so nothing is scaled twice. Multi-token prediction's loss gets this loss's gradient
        # (`MultiToken.add_loss`); balance losses divide by tokens or samples of the step (titanmoe.moe.balance).
        def microbatch_loss(output_NBS: Tensor, batch_slice: BatchSlice) -> Tensor:
            return objective(output_NBS, batch_slice) / divisor

        mtps = [mtp for stage in self.stages for mtp in stage.mtp or ()]
        for mtp in mtps:
            mtp.loss_M.zero_()
        loss = self.engine.run(slices, microbatch_loss, backward)
        mtp_loss = sum((mtp.loss_M.sum() / divisor for mtp in mtps), loss.new_zeros(()))
        zero = torch.zeros_like(loss)
        return PassSums(
            loss=loss, mtp_loss=mtp_loss, stop=zero, repeat=zero, metrics=objective.take_metrics(loss) / divisor
        )

    def forward_backward(
        self,
        slices: list[BatchSlice],
        totals: Totals,
        first_pass: SharedBuffers | None = None,
        wants_to_stop: Callable[[], bool] = lambda: False,
    ) -> PassSums:
        """Run a step's microbatches forward and backward; return this rank's sums. Collective over the world.

        `reduce` has yet to complete the gradients.

        Args:
            first_pass: buffers of fixed size that the dispatchers use; None for none.
            wants_to_stop: called after backward; returns whether this rank asks for training to end after this step.
        """
        self.begin_step(totals)
        with first_pass.used_by(self.moe_layers.values()) if first_pass else nullcontext():
            local = self.add(slices, self.objective, totals.divisor)
        local.stop = torch.full_like(local.loss, wants_to_stop())
        if first_pass:
            local.repeat = first_pass.needs_repeat.to(local.loss.dtype)
        return local

    @named("finish gradients")
    def finish_gradients(self) -> None:
        """Sum the gradients that FSDP does not sum: of replicated parameters, and of copies of the tied embedding.

        Called once after the last backward of a step. Collective over the world.
        """
        sum_replicated(self.trained, self.summed_over, self.meshes)
        self.tied.add_gradients()

    def drop(self) -> None:
        """Free the gradients of all trained parameters: set `.grad` to None."""
        for parameter in self.trained.values():
            parameter.grad = None
