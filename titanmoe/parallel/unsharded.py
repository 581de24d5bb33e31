"""Hold experts that FSDP does not shard (edp = 1): there is nothing to gather or to scatter.

FSDP would cast and copy their weights in every forward and backward, and copy each of their gradients once more. Here a
step makes one copy of the weights in the dtype of the products, or none if that is the dtype they are stored in, and
adds each microbatch's gradients straight to the sum. Replicas (edp_replicate) sum theirs once, after the last backward.
The copies of gate's and up's weights lie side by side, so that one product has the results of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanmoe.comm.collectives import Group, gradient_from_local, launch_all_reduce, to_local, wait
from titanmoe.config.schema import Training
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.expert_products import ExpertProducts
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped_mm import add_gradient
from titanmoe.observe import region

MATRICES = ("w1", "w3", "w2")
"""Names of the experts' matrices: gate, up and down."""


@dataclass(eq=False)
class Weight:
    """A weight of unsharded experts: the stored parameter, the one that products multiply by, and the gradient."""

    experts: Experts
    name: str
    stored: nn.Parameter
    shard: Tensor
    """This rank's shard of `stored` (over ep and etp), in its own memory."""
    computed: nn.Parameter
    """Factor of the products: the shard itself, or a copy in another dtype, which has memory only during a step."""
    grad: Tensor | None = None
    """Sum of the gradients so far."""
    reducing: Tensor | None = None
    """The gradient while it is summed over replicas."""

    @property
    def is_copy(self) -> bool:
        """Whether `computed` is a copy, in another dtype than `stored`."""
        return self.computed.dtype != self.shard.dtype


def multiplied_together(gate: Weight, up: Weight) -> bool:
    """Return whether one matrix product computes gate and up, from copies of both weights in one tensor.

    Only if both weights are trained and copied. Not in 8 bits, where each row of a factor has a scale, and separate
    rows of gradients are more exact.
    """
    trained = gate.stored.requires_grad and up.stored.requires_grad
    return gate.is_copy and trained and gate.experts.dtype == "compute"


class UnshardedExperts:
    """The experts of one pipeline stage that FSDP does not shard: their computed weights and gradients."""

    def __init__(self, stage: Transformer, training: Training, meshes: Meshes, summed_before: bool):
        """Make the parameters that products multiply by, copies without memory yet, and hooks that sum their gradients.

        Args:
            stage: a pipeline stage.
            summed_before: whether gradients of the other weights are summed over microbatches before FSDP reduces
                them. Then the sums here are in the dtype that FSDP reduces in too.
        """
        compute = getattr(torch, training.mixed_precision_param)
        wide = torch.promote_types(compute, getattr(torch, training.mixed_precision_reduce))
        self.replicas = Group.of(meshes.experts.get_group("edp_replicate"))
        self.sum_dtype = wide if summed_before else getattr(torch, training.dtype)
        if self.replicas.size > 1:
            self.sum_dtype = torch.promote_types(self.sum_dtype, wide)
        self.by_computed: dict[Tensor, tuple[Weight, ...]] = {}
        """Weights by the parameter that autograd gives a gradient to: two, gate and up, if it is (e, 2F, D)."""
        self.totals: dict[Tensor, Tensor] = {}
        """Sums that products add gradients to, by the parameter that autograd would give them to; gate before up."""
        for moe in stage.moe_layers().values():
            if not isinstance(moe.experts, FSDPModule):
                self._add_experts(moe.experts, compute)
        self.weights = [weight for some in self.by_computed.values() for weight in some]
        for computed, (weight, *_) in self.by_computed.items():
            if weight.is_copy:
                computed.untyped_storage().resize_(0)
            if computed.requires_grad:
                computed.register_post_accumulate_grad_hook(self.add)
        self.adding = self.is_last = False
        """Whether gradients are summed, and whether this is the step's last microbatch."""

    def _add_experts(self, experts: Experts, compute: torch.dtype) -> None:
        weights = {}
        for name, stored in experts.named_parameters():
            part = to_local(stored.detach())
            computed = nn.Parameter(part.to(compute), requires_grad=stored.requires_grad)
            weights[name] = Weight(experts, name, stored, part, computed)
        if multiplied_together(gate := weights["w1"], up := weights["w3"]):
            both = nn.Parameter(torch.cat((gate.computed, up.computed), 1))
            for weight, half in zip((gate, up), both.detach().chunk(2, 1), strict=True):
                weight.computed = nn.Parameter(half, requires_grad=False)
            self.by_computed[both] = weights.pop("w1"), weights.pop("w3")
        self.by_computed |= {weight.computed: (weight,) for weight in weights.values()}

    @contextmanager
    def use_computed_weights(self, accumulate: bool) -> Iterator[None]:
        """Give the experts' modules the weights that products multiply by, within this context, for a step.

        At its end the gradients are summed over replicas, and added to the stored weights' `grad`; an exception
        drops them. Collective over edp_replicate.

        Args:
            accumulate: whether to sum the gradients of the microbatches; False if there is no backward.
        """
        self._copy()
        for weight in self.weights:
            setattr(weight.experts, weight.name, weight.computed)
        for computed, (weight, *others) in self.by_computed.items():
            if others:
                weight.experts.w1_and_w3 = computed
            if accumulate and weight.experts.accumulates and weight.name in MATRICES:
                name = "w1_and_w3" if others else weight.name
                weight.experts.sums[name] = partial(self.add_product, computed)
        self.adding, self.is_last = accumulate, False
        try:
            yield
            self.sum_over_replicas()
            self._hand_over()
        finally:
            self.adding = False
            self.totals.clear()
            for weight in self.weights:
                weight.experts.w1_and_w3 = None
                setattr(weight.experts, weight.name, weight.stored)
                weight.experts.sums.clear()
                weight.grad = weight.reducing = None
            for computed, (weight, *_) in self.by_computed.items():
                computed.grad = None
                if weight.is_copy:
                    computed.untyped_storage().resize_(0)

    @torch.no_grad()
    def _copy(self) -> None:
        copies = [weight for weight in self.weights if weight.is_copy]
        if not copies:
            return
        with region("gather weights"):
            for computed, (weight, *_) in self.by_computed.items():
                if weight.is_copy:
                    computed.untyped_storage().resize_(computed.numel() * computed.element_size())
            # A call copies its tensors in one kernel only if all are dense.
            for dense in (True, False):
                if some := [weight for weight in copies if weight.computed.is_contiguous() == dense]:
                    torch._foreach_copy_([weight.computed for weight in some], [weight.shard for weight in some])

    def add(self, computed: Tensor) -> None:
        """Move the gradient that autograd has put into a parameter's `grad` to the sum over microbatches.

        Does nothing if the parameter is none of the unsharded experts'. If `is_last` is set,
        as the engine does in the step's last microbatch, it starts to sum the gradient over replicas.

        Args:
            computed: the parameter that products multiply by.
        """
        weights = self.by_computed.get(computed)
        if weights is None or not self.adding or computed.grad is None:
            return
        grad, computed.grad = computed.grad, None
        with region("reduce gradients"):
            for weight, part in zip(weights, grad.chunk(len(weights), 1), strict=True):
                if weight.grad is None:
                    weight.grad = part.to(self.sum_dtype).contiguous()
                else:
                    weight.grad += part
                if self.is_last:
                    self._send(weight)

    def add_product(self, computed: Tensor, grad: Tensor, x: Tensor, products: ExpertProducts) -> None:
        """Add the gradient of a weight to the sum over microbatches inside the matrix product that computes it.

        The experts' backward calls it, once for each half of a microbatch. No half knows whether it is the last, so
        nothing is summed over replicas yet.

        Args:
            computed: the parameter that products multiply by.
            grad: gradient of the product's output, of the routed tokens.
            x: input of the product, of the routed tokens.
            products: says how the routed tokens are grouped by expert.
        """
        weights, add = self.by_computed[computed], computed in self.totals
        if not add:
            shape = len(weights), *weights[0].shard.shape
            self.totals[computed] = grad.new_empty(shape, dtype=self.sum_dtype)
            for weight, total in zip(weights, self.totals[computed], strict=True):
                weight.grad = total
        options = {"grouped": products.method == "grouped", "kernels": products.kernels}
        add_gradient(self.totals[computed], grad, x, products.groups, add=add, **options)

    def _send(self, weight: Weight) -> None:
        if self.replicas.size > 1 and weight.reducing is None and weight.grad is not None:
            weight.reducing = launch_all_reduce(weight.grad, self.replicas)

    def sum_over_replicas(self) -> None:
        """Start to sum over replicas the gradients of the weights for which that has not been started.

        Collective over edp_replicate. Does not wait: the end of `use_computed_weights` does.
        """
        with region("reduce gradients"):
            for weight in self.weights:
                self._send(weight)

    def _hand_over(self) -> None:
        for weight in self.weights:
            if weight.reducing is not None:
                wait(weight.reducing, self.replicas)
            if weight.grad is not None:
                with region("reduce gradients"):
                    grad = weight.grad.to(weight.stored.dtype)
                    if weight.stored.grad is None:
                        weight.stored.grad = gradient_from_local(weight.stored, grad)
                    else:  # DTensor's own sum would enumerate shardings for seconds, for each shape
                        weight.stored.grad.to_local().add_(grad)
