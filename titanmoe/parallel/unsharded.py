"""Experts that no other data rank shares (edp = 1): in no FSDP unit, because there is nothing to gather or to scatter.

FSDP would cast and copy their weights in every forward and backward, and copy each of their gradients once more. Here a
step makes one copy of the weights in the dtype of the products, or none if that is the dtype they are stored in, and
adds each microbatch's gradients straight to the sum. Replicas (edp_replicate) sum theirs once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanmoe.comm.collectives import Group, local, start_sum, wait, with_layout_of
from titanmoe.config.schema import Training
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.experts import Experts
from titanmoe.observe import region


@dataclass(eq=False)
class Weight:
    experts: Experts
    name: str
    stored: nn.Parameter
    part: Tensor
    """This rank's part of it, in its own memory."""
    computed: nn.Parameter
    """What products take: the part itself, or a copy in another dtype, which has memory only while a step runs."""
    grad: Tensor | None = None
    """The sum so far."""
    flying: Tensor | None = None
    """The same while it is summed over replicas."""

    @property
    def is_copy(self) -> bool:
        return self.computed.dtype != self.part.dtype


class UnshardedExperts:
    """Those of a stage, if FSDP has not got them."""

    def __init__(self, stage: Transformer, training: Training, meshes: Meshes, summed_before: bool):
        """summed_before: whether FSDP would sum microbatches first, in the dtype that it reduces in."""
        compute = getattr(torch, training.mixed_precision_param)
        wide = torch.promote_types(compute, getattr(torch, training.mixed_precision_reduce))
        self.replicas = Group.of(meshes.experts.get_group("edp_replicate"))
        self.sum_dtype = wide if summed_before else getattr(torch, training.dtype)
        if self.replicas.size > 1:
            self.sum_dtype = torch.promote_types(self.sum_dtype, wide)
        self.weights = [
            self._weight(moe.experts, name, stored, compute)
            for moe in stage.moe_layers().values()
            if not isinstance(moe.experts, FSDPModule)
            for name, stored in moe.experts.named_parameters()
        ]
        self.by_computed = {weight.computed: weight for weight in self.weights}
        self.adding = self.is_last = False
        """Whether gradients are kept, and whether this is the step's last microbatch."""

    def _weight(self, experts: Experts, name: str, stored: nn.Parameter, compute: torch.dtype) -> Weight:
        part = local(stored.detach())
        computed = nn.Parameter(part.to(compute), requires_grad=stored.requires_grad)
        weight = Weight(experts, name, stored, part, computed)
        if weight.is_copy:
            computed.untyped_storage().resize_(0)
        if computed.requires_grad:
            computed.register_post_accumulate_grad_hook(self.add)
        return weight

    @contextmanager
    def in_place(self, adding: bool) -> Iterator[None]:
        """Within this, the modules have what products take in place of their weights. adding: keep gradients, which the
        weights get in the end."""
        self._copy()
        for weight in self.weights:
            setattr(weight.experts, weight.name, weight.computed)
        self.adding, self.is_last = adding, False
        try:
            yield
            self.sum_over_replicas()
            self._hand_over()
        finally:
            self.adding = False
            for weight in self.weights:
                setattr(weight.experts, weight.name, weight.stored)
                weight.grad = weight.flying = weight.computed.grad = None
                if weight.is_copy:
                    weight.computed.untyped_storage().resize_(0)

    @torch.no_grad()
    def _copy(self) -> None:
        copies = [weight for weight in self.weights if weight.is_copy]
        if not copies:
            return
        with region("gather weights"):
            for weight in copies:
                weight.computed.untyped_storage().resize_(weight.computed.numel() * weight.computed.element_size())
            torch._foreach_copy_([weight.computed for weight in copies], [weight.part for weight in copies])

    def add(self, computed: Tensor) -> None:
        """Adds a microbatch's gradient to the sum, if it is of one of these weights."""
        weight = self.by_computed.get(computed)
        if weight is None or not self.adding:
            return
        grad, computed.grad = computed.grad, None
        with region("reduce gradients"):
            if weight.grad is None:
                weight.grad = grad.to(self.sum_dtype)
            else:
                weight.grad += grad
            if self.is_last:
                self._send(weight)

    def _send(self, weight: Weight) -> None:
        if self.replicas.size > 1 and weight.flying is None and weight.grad is not None:
            weight.flying = start_sum(weight.grad, self.replicas)

    def sum_over_replicas(self) -> None:
        """Begins to, where it has not begun."""
        with region("reduce gradients"):
            for weight in self.weights:
                self._send(weight)

    def _hand_over(self) -> None:
        for weight in self.weights:
            if weight.flying is not None:
                wait(weight.flying, self.replicas)
            if weight.grad is not None:
                with region("reduce gradients"):
                    grad = with_layout_of(weight.stored, weight.grad.to(weight.stored.dtype))
                weight.stored.grad = grad
