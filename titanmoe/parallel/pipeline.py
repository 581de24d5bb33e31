"""Run forward and backward of a step's microbatches: through one stage, or through the stages of a pipeline schedule.

`Pipeline` and `WithoutPipeline` have the same `run`, which the training step calls. Who runs what in a pipeline:

    titanmoe.parallel.schedule_tables    the order: for each rank, its forwards, backwards and messages
    torch's runtime of a schedule        takes these actions in turn (`_step_microbatches`)
    titanmoe.parallel.pipeline_stage     one forward or backward of a microbatch through a stage

torch's public step() splits tensors into microbatches; ours are split already, so `Pipeline.run` calls the function
below it.

Shapes: B samples, S positions of the attention slice, N numbers of the head for each label, K candidates of each
position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe import observe
from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.pipeline_schedules import bubble, stage_ranks
from titanmoe.fold.unsharded_experts import reshards_after_forward
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary_shards import VocabularyShards
from titanmoe.observe import region
from titanmoe.parallel import pairs
from titanmoe.parallel.batch_slice import BatchSlice, MicrobatchLoss
from titanmoe.parallel.pipeline_stage import Announcer, make_stages, message_groups
from titanmoe.parallel.schedule_tables import make_schedule
from titanmoe.parallel.unsharded import UnshardedExperts
from titanmoe.parallel.vocabulary_pipeline import Pass, VocabularyPasses
from titanmoe.parallel.warm_up import warm_up


class WithoutPipeline:
    """The engine without a pipeline: forward and backward of one microbatch after the other."""

    bubble = 0.0
    pairs = None

    def __init__(self, model: Transformer, unsharded_experts: UnshardedExperts, reduce_once: bool):
        self.model, self.unsharded_experts, self.reduce_once = model, unsharded_experts, reduce_once

    def run(self, slices: list[BatchSlice], microbatch_loss: MicrobatchLoss, backward: bool = True) -> Tensor:
        """Run all microbatches of a step and return this rank's sum of their losses, a float64 scalar.

        Collective over the world, by the layers and FSDP. With `reduce_once` FSDP reduces gradients in the last
        microbatch only.

        Args:
            microbatch_loss: returns a microbatch's loss, whose gradient backward computes: nothing is divided here.
            backward: whether to run backward, which adds gradients to the parameters' `grad`; False for validation.
        """
        total = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        with torch.set_grad_enabled(backward), self.unsharded_experts.use_computed_weights(accumulate=backward):
            for m, batch_slice in enumerate(slices):
                self.unsharded_experts.is_last = m == len(slices) - 1
                if self.reduce_once:
                    self.model.set_requires_gradient_sync(m == len(slices) - 1)
                observe.active.microbatch(0, m, False)
                output_NBS = self.model(
                    batch_slice.ids_BS, batch_slice.tokens, batch_slice.labels_BS, batch_slice.candidates_BSK
                )
                with region("head and loss"):
                    loss = microbatch_loss(output_NBS, batch_slice)
                if backward:
                    observe.active.microbatch(0, m, True)
                    loss.backward()
                total += loss.detach()
        return total


class Pipeline:
    """The engine of a pipeline over several ranks."""

    def __init__(
        self,
        models: list[Transformer],
        unsharded_experts: list[UnshardedExperts],
        *,
        config: Config,
        meshes: Meshes,
        microbatches: int,
        device: torch.device,
        shards: VocabularyShards | None,
    ):
        """Make torch's stages and schedule. Collective over the world.

        Args:
            unsharded_experts: the experts of each stage that FSDP does not shard.
            shards: this rank's rows of embedding and head, if all stages share these.
        """
        self.device, self.announcer = device, Announcer(meshes.pp)
        self.cold = device.type == "cuda"
        """Whether kernels are not loaded yet. Always False on a CPU, where none waits for another."""
        ranks = stage_ranks(config.pipeline, meshes.pp.size)
        self.stages, self.hidden = make_stages(models, ranks, config.training, meshes, device)
        between = message_groups(ranks, meshes, device)
        for stage, stage.unsharded_experts in zip(self.stages, unsharded_experts, strict=True):
            stage.announce, stage.group_between = self.announcer, between
        self.schedule, cells = make_schedule(
            self.stages,
            config.pipeline,
            microbatches=microbatches,
            loss=self._loss,
            keep_gathered=not reshards_after_forward(config.parallelism),
            with_vocabulary=shards is not None,
        )
        self.bubble = bubble(cells, len(ranks))
        self.pairs = pairs.Pairs(device) if config.moe.overlap == "pairs" else None
        if self.pairs is not None:
            self.schedule.register_custom_function(torch_schedules._ComputationType.OVERLAP_F_B, self.pairs)
        self.vocabulary = None
        if shards is not None:
            multi_token = [mtp for model in models for mtp in model.mtp or ()]
            self.vocabulary = VocabularyPasses(
                shards, ranks, meshes, self.hidden, multi_token, self.announcer.computing
            )
            self.schedule._comp_type_to_function_map |= dict.fromkeys(Pass, self.vocabulary)
            for stage in self.stages:
                stage.vocabulary = self.vocabulary

    def _loss(self, output_NBS: Tensor, batch_slice: BatchSlice) -> Tensor:
        if self.vocabulary is not None:  # a pass computes the loss
            return output_NBS.new_zeros(())
        with region("head and loss"):
            return self.microbatch_loss(output_NBS, batch_slice)

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """Remove backward from the schedule table within this context, for validation.

        torch's own forward-only mode fails in V-shaped schedules, where two neighbouring stages are on one rank.
        """
        table = self.schedule.pipeline_order_with_comms
        passes = (one for one in Pass if one != Pass.D)
        forward = ("F", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD", *passes)
        self.schedule.pipeline_order_with_comms = {
            rank: [one for action in row for one in (action.sub_actions or [action]) if one.computation_type in forward]
            for rank, row in table.items()
        }
        try:
            yield
        finally:
            self.schedule.pipeline_order_with_comms = table

    def run(self, slices: list[BatchSlice], microbatch_loss: MicrobatchLoss, backward: bool = True) -> Tensor:
        """Run all microbatches of a step and return this rank's sum of their losses, a float64 scalar.

        The sum is 0 on ranks without the last stage. Collective over the world, by the pipeline, the layers and FSDP.
        On GPUs the first call also loads all kernels, by a forward and backward that change nothing.

        Args:
            slices: this rank's slices of the microbatches, as many as the engine was made for.
            microbatch_loss: returns a microbatch's loss, whose gradient backward computes: nothing is divided here.
            backward: whether to run backward, which adds gradients to the parameters' `grad`; False for validation.
        """
        self.microbatch_loss, losses = microbatch_loss, []
        if self.cold:
            self._warm_up(slices[0])
        self.schedule._has_backward = backward
        for stage in self.stages:
            stage.has_backward = backward
            stage.clear_runtime_states()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(backward))
            for stage in self.stages:
                stack.enter_context(stage.unsharded_experts.use_computed_weights(accumulate=backward))
            if not backward:
                stack.enter_context(self._forward_only())
            stack.enter_context(self.announcer.waiting())
            if self.vocabulary is not None:
                stack.enter_context(self.vocabulary.step(slices, microbatch_loss, backward))
            self.schedule._step_microbatches(
                [(s.ids_BS,) for s in slices],
                [{"tokens": s.tokens, "labels_BS": s.labels_BS, "candidates_BSK": s.candidates_BSK} for s in slices],
                slices,
                losses,
            )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        losses = losses if self.vocabulary is None else self.vocabulary.losses
        return sum((loss.detach() for loss in losses), total)

    def _warm_up(self, first: BatchSlice) -> None:
        """Load the kernels of this rank's stages, by a forward and backward of `first` that change nothing.

        Collective over the ranks of each stage, and over pp too if all stages share the vocabulary.
        """
        # In validation without what multi-token prediction reads, so with any ids and labels. Losses get the slice
        # itself, as they will again: they record by a slice's identity.
        tokens = first.tokens._replace(next_BS=first.ids_BS, later_BS=first.labels_BS)
        any_mtp = first._replace(tokens=tokens)
        for stage in self.stages:
            with observe.unheard(), stage.unsharded_experts.use_computed_weights(accumulate=False):
                warm_up(
                    stage.submod, self.hidden, any_mtp, self.device, lambda output_NBS, _: self._loss(output_NBS, first)
                )
        if self.vocabulary is not None:
            self.vocabulary.warm_up(any_mtp, lambda output_NBS, _: self.microbatch_loss(output_NBS, first))
        self.cold = False
