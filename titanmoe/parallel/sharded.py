"""Sharded data parallel (FSDP2) and HSDP, on each view's own data axes.

Gradients are summed over data ranks and never divided: the loss is divided once, by the step's global token count.
"""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanmoe.config.schema import Parallelism, Training
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Block, Transformer
from titanmoe.moe.experts import Experts
from titanmoe.moe.router import Router


class _Exchange(dist.Work):
    """Between every two ranks of a group: `sent` by the rank that it goes to, `arrived` by the one it comes from."""

    def __init__(
        self, sent: Sequence[Tensor], arrived: Sequence[Tensor], group: dist.ProcessGroup, what: str, tag: int
    ):
        super().__init__()
        ranks, rank = group.size(), group.rank()
        self.group, self.what = group, what
        self.works: list[tuple[dist.Work, str, int]] = []
        for step in range(1, ranks):
            before, after = (rank - step) % ranks, (rank + step) % ranks
            self.works.append((dist.irecv(arrived[before], group=group, group_src=before, tag=tag), "send", before))
            self.works.append((dist.isend(sent[after], group=group, group_dst=after, tag=tag), "take", after))

    def wait(self, timeout: Any = None) -> bool:
        """Within the group's time-out for all together: gloo by itself bounds these by what the group was made with."""
        bound = self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        end = time.monotonic() + bound
        for work, does, other in self.works:
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))  # 0 would be without end
            except RuntimeError as error:
                if time.monotonic() < end:
                    raise
                rank = dist.get_global_rank(self.group, other)
                raise TimeoutError(
                    f"rank {dist.get_rank()} waited {bound:g} s in {self.what} for rank {rank} to {does} its piece: "
                    f"see what rank {rank} says or hangs in; if it is only slow, raise training.timeout_s "
                    "(training.first_step_timeout_s for the first step)"
                ) from error
        return True


BLOCK = 1 << 18  # numbers


class StraightToPlace:
    """All-gather for FSDP2 on CPUs: each rank's piece goes straight to its place in the whole, where FSDP has put ours.

    gloo's own gathers into a second buffer and copies: twice the CPU time. FSDP waits when it needs the weights.
    """

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        ranks = group.size()
        return _Exchange(
            [input_tensor] * ranks, output_tensor.chunk(ranks), group, "FSDP's all-gather of weights", tag=0
        )


class NarrowOnTheWire:
    """Reduce-scatter for FSDP2: gradients travel in the 16 bits they were computed in and are added up wide.

    The numbers are those of a wide reduce-scatter, which sends the same 16 bits as 32.
    """

    def __init__(self, ranks: int, wide: torch.dtype, sums: Kept):
        self.ranks, self.wide, self.sums = ranks, wide, sums
        self._sent = 0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called in turn for what is sent and for the sum of what arrives, which is so many times smaller."""
        numbers = math.prod(size)
        is_sum = numbers * self.ranks == self._sent
        self._sent = 0 if is_sum else numbers
        return self.sums.take(size, self.wide) if is_sum else torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        pieces = input_tensor.chunk(self.ranks)
        summands = [piece if r == group.rank() else torch.empty_like(piece) for r, piece in enumerate(pieces)]
        _Exchange(pieces, summands, group, "FSDP's reduce-scatter of gradients", tag=1).wait()
        # A sum of two widths first copies the narrow one wide: block by block that stays in the cache.
        for out, first, *others in zip(output_tensor.split(BLOCK), *(x.split(BLOCK) for x in summands), strict=True):
            out.copy_(first)
            for other in others:
                out += other


class Kept:
    """Memory of this rank that is used again as soon as no tensor lies in it.

    The heap cuts up what a step's gradients leave and grows for ten steps, at 4 CPU-seconds for each new gigabyte.
    """

    def __init__(self) -> None:
        self.pages: list[tuple[mmap.mmap, weakref.ref]] = []

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numbers = max(math.prod(size), 1)
        length = numbers * dtype.itemsize
        free = [i for i, (pages, user) in enumerate(self.pages) if user() is None and len(pages) >= length]
        if free:
            pages, _ = self.pages.pop(min(free, key=lambda i: len(self.pages[i][0])))
        else:
            pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        user = memoryview(pages)  # the tensor holds it as long as it lives
        self.pages.append((pages, weakref.ref(user)))
        return torch.frombuffer(user, dtype=dtype, count=numbers)[: math.prod(size)].view(size)


def shard_experts_on_model_dim(num_experts: int, ep: int, edp: int) -> bool:
    """Uneven pieces of the expert dim would be padded, up to edp times the bytes; the widths are even by law."""
    return num_experts // ep % edp != 0


def reshard(options: Parallelism) -> bool:
    choice = options.reshard_after_forward
    return options.pp == 1 if choice == "auto" else choice == "always"


def _model_dim(experts: Experts) -> Callable[[nn.Parameter], Shard]:
    # D of (E, F, D) for two; D of (E, D, F); the one width of a bias
    return lambda parameter: Shard(2 if parameter is experts.w1 or parameter is experts.w3 else 1)


def shard_data(model: Transformer, training: Training, freed: bool, meshes: Meshes) -> None:
    """freed: whether whole weights are freed between forward and backward."""
    param = getattr(torch, training.mixed_precision_param)
    reduce = getattr(torch, training.mixed_precision_reduce)
    # Inputs are left alone: what enters a block already has the width its weights compute in.
    wide = torch.promote_types(param, reduce)
    # NCCL adds up on the way. A pipeline adds up microbatches, in the dtype given here, before it sends.
    narrow_wire = meshes.dense_data.device_type == "cpu" and wide != param and meshes.pp.size == 1
    policy = MixedPrecisionPolicy(param, param if narrow_wire else wide, cast_forward_inputs=False)
    keep_wide = MixedPrecisionPolicy(cast_forward_inputs=False)
    options = {"mesh": meshes.dense_data, "reshard_after_forward": freed}

    on_model_dim = shard_experts_on_model_dim(model.shape.num_experts, meshes.fold.ep, meshes.fold.edp)
    for block in model.blocks().values():
        if block.moe is not None:
            if block.moe.router.weight.dtype != param:
                fully_shard(block.moe.router, **options, mp_policy=keep_wide)
            fully_shard(
                block.moe.experts,
                **options | {"mesh": meshes.expert_data},
                mp_policy=policy,
                shard_placement_fn=_model_dim(block.moe.experts) if on_model_dim else None,
            )
        fully_shard(block, **options, mp_policy=policy)
    for end in (model.embed_copy,) if model.shape.tie_embeddings else (model.embed, model.embed_copy, model.head):
        if end is not None:
            fully_shard(end, **options, mp_policy=policy)
    fully_shard(model, **options, mp_policy=policy)
    sums = Kept()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            mesh = meshes.expert_data if isinstance(module, Experts) else meshes.dense_data
            if mesh.size() > 1:  # where there is nothing to sum, torch would divide by 1.0, number by number
                module.set_gradient_divide_factor(1.0)
            if meshes.dense_data.device_type == "cpu":
                module.set_custom_all_gather(StraightToPlace())
            if narrow_wire and not isinstance(module, Router):
                module.set_custom_reduce_scatter(NarrowOnTheWire(mesh.size(mesh.ndim - 1), wide, sums))
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(model, meshes, freed)


def _prefetch(model: Transformer, meshes: Meshes, freed: bool) -> None:
    """Before its attention a block asks for its experts' weights and the next block's; in backward for its experts'
    and the block's before. freed: whether forward gives weights up again.

    FSDP by itself gathers ahead only as far as the host is ahead of the device. A dropless dispatcher holds the host
    until the rows are counted, and the device would then wait for the weights. Blocks ask, and not experts, whose hooks
    run once more where recomputation is: that would gather weights in backward which forward then finds outdated.
    """

    # The last axis shards; one before it replicates.
    dense, experts = (mesh.size(mesh.ndim - 1) > 1 for mesh in (meshes.dense_data, meshes.expert_data))

    def units(block: Block, and_then: nn.Module | None) -> list[nn.Module]:
        own = [block.moe.experts] if experts and block.moe is not None else []
        return [*own, and_then] if dense and and_then is not None else own

    blocks = list(model.layers.values())
    head = model.head if isinstance(model.head, FSDPModule) else None
    for block, before, after in zip(blocks, [None, *blocks], [*blocks[1:], head], strict=False):
        block.set_modules_to_forward_prefetch(units(block, after))
        if freed:  # else nothing is gathered in backward
            block.set_modules_to_backward_prefetch(units(block, before))
