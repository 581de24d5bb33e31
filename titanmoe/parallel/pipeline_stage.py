"""Stages of a pipeline: torch's, with its faults mended and the vocabulary's passes, and groups for their messages.

`titanmoe.parallel.pipeline.Pipeline` makes them once; torch's runtime calls their methods, one forward or backward of a
microbatch at a time.

Shapes: B samples, S positions of the attention slice, s owned positions, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage

from titanmoe import observe
from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Training
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.pipeline_schedules import channels
from titanmoe.fold.rank_groups import groups
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import Head
from titanmoe.ops.device import choose
from titanmoe.parallel.unsharded import UnshardedExperts
from titanmoe.parallel.vocabulary_pipeline import VocabularyPasses


class Announcer:
    """An object that tells observers when forward or backward of a microbatch begins, and when this rank waits."""

    def __init__(self, group: Group):
        self.group, self.inside = group, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Announce, for a whole step, that this rank waits for other stages wherever no forward or backward runs."""
        observe.waits(self.group.name)
        try:
            yield
        finally:
            observe.arrived()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Announce that this rank does not wait for other stages within this context."""
        if not self.inside:
            observe.arrived()
        self.inside += 1  # a forward and a backward may take turns
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                observe.waits(self.group.name)

    @contextmanager
    def __call__(self, stage: int, microbatch: int, backward: bool) -> Iterator[None]:
        """Announce that this context is the forward or backward of a microbatch, and its end a wait again.

        Args:
            stage: number of the stage in the pipeline.
            microbatch: index of the microbatch in the step.
            backward: whether it is the backward.
        """
        with self.computing():
            observe.active.microbatch(stage, microbatch, backward)
            yield


def message_groups(ranks: list[int], meshes: Meshes, device: torch.device) -> dict[tuple[int, int], ProcessGroup]:
    """Return the process group for messages from one pipeline rank to another: {(source, target): group}.

    Collective over the world.

    A communicator of NCCL runs one message after the other, in the order in which they were issued, so a send would
    wait for a receive that was issued early. Hence several groups on GPUs. gloo sends what is ready.

    Args:
        ranks: the pipeline rank of each stage.
    """
    numbers = channels(ranks)
    numbers = choose(device, numbers, cpu=dict.fromkeys(numbers, 0))
    parts = groups(meshes.fold, "attention", "pp")
    made = {
        n: meshes.communicators.group(f"stages {n}" if n else "stages", parts) for n in sorted(set(numbers.values()))
    }
    return {ends: made[number] for ends, number in numbers.items()}


class Stage(PipelineStage):
    """A stage of torch's pipeline, with fixes that torch 2.11 lacks or that no version has yet."""

    announce: Announcer
    unsharded_experts: UnshardedExperts
    vocabulary: VocabularyPasses | None = None
    """The layers of the vocabulary, if all stages share them."""
    group_between: dict[tuple[int, int], ProcessGroup]
    """Process group by (source, target) pipeline rank. Messages before the first step go through one for all."""

    def _regrouped(self, ops: list[P2POp]) -> list[P2POp]:
        for op in ops:
            ends = self.group_rank, op.group_peer
            op.group = self.group_between[ends if op.op is dist.isend else ends[::-1]]
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self._regrouped(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self._regrouped(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return self._regrouped(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return self._regrouped(super().get_bwd_send_ops(bwd_chunk_id))

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Return torch's messages that set up communicators with neighbouring stages, without those to this rank.

        In a V-shaped schedule a neighbour may be on the same rank, to which gloo cannot send.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Make torch's receive buffers, which it makes once: with gradients even if the first pass is forward only."""
        before, self.has_backward = self.has_backward, self.has_backward or "has_backward" not in kwargs
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = before

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Do nothing: the last stage may return twice as many hidden states in training, for multi-token prediction.

        Before 2.13 torch compares the shapes of outputs with those given when the stage is made.
        """

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: shapes are static, so no forward has run to find them, and a step's gradients must stay.

        torch 2.13 calls this method whenever forward-only runs and training alternate, and frees all gradients in it.
        """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.vocabulary is not None and self.is_first:
            args = (self.vocabulary.input_of(fwd_chunk_id),), *args[1:]
        if self.vocabulary is not None and self.is_last:
            args = args[0], args[1] | {"next_BsD": self.vocabulary.next_input_of(fwd_chunk_id)}, *args[2:]
        with self.announce(self.stage_index, fwd_chunk_id, False):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.vocabulary is not None and self.is_last:
            self.vocabulary.outputs[fwd_chunk_id] = output
            self.output_chunks.clear()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.vocabulary is not None and self.is_last:
            kwargs["loss"] = self.vocabulary.loss_of(bwd_chunk_id, self.fwd_cache[bwd_chunk_id][0][0])
        with self.announce(self.stage_index, bwd_chunk_id, True):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.vocabulary is not None and self.is_first:
            self.vocabulary.input_grads[bwd_chunk_id] = self.bwd_cache.pop(bwd_chunk_id)[0]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.announce(self.stage_index, bwd_chunk_id, True):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Run a backward, or one half of a split backward, with three faults of torch's split backward mended.

        The first half expects a gradient of every input, but only hidden states have one. The autograd nodes where the
        second half begins are freed with the outputs, if they are of our own functions. The second half gives a node's
        first output the sum of all outputs' gradients.

        Args:
            backward_type: "full", or a half of a split backward: "input" or "weight".
            bwd_kwargs: torch's arguments of that backward by name, such as stage_output, input_values or param_groups.
            kwargs: passed on to torch.
        """
        if backward_type == "weight":
            add_weight_gradients(self.submod.parameters(), bwd_kwargs["param_groups"], self.unsharded_experts.add)
            bwd_kwargs = bwd_kwargs | {"param_groups": []}
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, **kwargs)
        inputs = [x for x in bwd_kwargs["input_values"] if isinstance(x, Tensor) and x.requires_grad]
        graph = [get_gradient_edge(x) for x in bwd_kwargs["stage_output"] if x.requires_grad]
        grads, groups = super().backward_maybe_with_nosync(
            backward_type, bwd_kwargs | {"input_values": inputs}, **kwargs
        )
        for group in groups:
            group["graph"] = graph
        return grads, groups

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.unsharded_experts.sum_over_replicas()
        super().perform_reduce_grad(grad_scale_factor)


def make_stages(
    models: list[Transformer], ranks: list[int], training: Training, meshes: Meshes, device: torch.device
) -> tuple[list[Stage], Tensor]:
    """Return torch's stages of this rank, and a meta tensor like a microbatch's hidden states between two stages.

    Shapes of inputs and outputs are given, else the first step would run an extra, real forward and backward.

    Args:
        ranks: the pipeline rank of each stage of the pipeline.
    """
    B, S = training.local_batch_size, training.seq_len // meshes.fold.cp
    compute = getattr(torch, training.mixed_precision_param)
    wide = torch.promote_types(compute, torch.float32)
    ids_BS = torch.empty(B, S, dtype=torch.int64, device="meta")
    hidden_BsD = torch.empty(B, S // meshes.fold.tp, models[0].shape.dim, dtype=compute, device="meta")
    hidden_BsD.requires_grad_()

    def output_of(model: Transformer) -> Tensor:
        if not isinstance(model.head, Head):
            return hidden_BsD
        return torch.empty(model.head.num_values, B, S, dtype=wide, device="meta", requires_grad=True)

    own_stages = [stage for stage, rank in enumerate(ranks) if rank == meshes.pp.rank]
    stages = [
        Stage(
            model,
            stage,
            len(ranks),
            device,
            input_args=(hidden_BsD if model.embed is None else ids_BS,),
            output_args=(output_of(model),),
            group=meshes.pp.process_group,
        )
        for model, stage in zip(models, own_stages, strict=True)
    ]
    return stages, hidden_BsD


def add_weight_gradients(
    weights: Iterable[nn.Parameter], groups: list[dict[str, Any]], after: Callable[[nn.Parameter], None]
) -> None:
    """Run the second half of a split backward: compute the gradients of weights and add them to the weights' `grad`.

    It starts at the autograd nodes where weight gradients branch off from the first half, which computed the gradients
    of the stage's input.

    Args:
        weights: the parameters of the stage.
        groups: torch's parameter groups of the first half; emptied in place.
        after: called with each weight that has got its gradient.
    """
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    for group in groups:
        nodes, arrived = group.pop("intermediates"), group.pop("grads", ())  # torch's hooks refer to the group
        reached = [(node, grads) for node, grads in zip(nodes, arrived, strict=False) if grads]
        outputs = [(GradientEdge(node, i), g) for node, grads in reached for i, g in enumerate(grads) if g is not None]
        if not outputs:
            continue
        # A node may be reachable from another of them, and must not get gradients through it a second time.
        handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in reached]
        try:
            edges, grads = zip(*outputs, strict=True)
            # A gradient may have been added to its sum by the product.
            leaves = [GradientEdge(leaf, 0) for leaf in group["params"]]
            weight_grads = torch.autograd.grad(edges, leaves, grads, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for leaf, grad in zip(group["params"], weight_grads, strict=True):
            if grad is None:
                continue
            weight = weight_of[leaf]
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
            after(weight)
