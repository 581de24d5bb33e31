"""A generator beside a run, on the same ranks: it has the run's present weights, under a mapping of its own.

The run's weights are copied by messages to a model that generates: without pipeline, context parallel and FSDP, in the
compute dtype. The copy and its caches take memory only while it generates, and what training holds may be in host
memory meanwhile ([generation] offload_training). Nothing of the run is written to: the copy has buffers and process
groups of its own, and random numbers are functions of (seed, step, prompt, completion, position).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
from torch import Tensor

from titanmoe.checkpoint.relayout import Relayout
from titanmoe.checkpoint.saver import page_lock
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes
from titanmoe.generate.build_model import build_empty
from titanmoe.generate.loop import Generator
from titanmoe.ops import device
from titanmoe.train.training import RankModel


class HostMemory:
    """Host memory for the contents of tensors, allocated once."""

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def instead_of(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Have the contents of tensors (on one device) in host memory within this context, which must not use them.

        One context at a time, since all use the same memory. Storages stay the objects that FSDP2 and optimizers have
        views of: only their memory is freed, and at the end allocated and filled.
        """
        storages = list({x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}.values())
        here = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
        sizes = [len(contents) for contents in here]
        if sum(sizes) > len(self.host):
            self.host = torch.empty(sum(sizes), dtype=torch.uint8)
            if here[0].is_cuda:
                page_lock(self.host)
        copies = self.host[: sum(sizes)].split(sizes)
        for target, source in zip(copies, here, strict=True):
            target.copy_(source, non_blocking=True)
        for storage in storages:
            storage.resize_(0)
        try:
            yield
        finally:
            for target, source, size in zip(here, copies, sizes, strict=True):
                target.untyped_storage().resize_(size)
                target.copy_(source, non_blocking=True)


class LiveGenerator:
    """A model that generates with the present weights of a run.

    Building it plans how weights move to it, and is collective over the world.

    Args:
        config: the config to generate with, from `config_to_run`.
        run: the run on this rank.
        vocab_size: number of the tokenizer's tokens.
        ends: the tokens that end a text.
        timeout_s: seconds that a collective of the generator may take.
        records: whether texts get the log-probability and the experts of their tokens.
        offloads: whether weights and optimizer state of the run are in host memory while the model generates.
    """

    def __init__(
        self,
        config: Config,
        run: RankModel,
        *,
        vocab_size: int,
        ends: Container[int],
        timeout_s: int,
        records: bool = False,
        offloads: bool = False,
    ):
        self.run, self.fold = run, derive(run.runtime.world, config.parallelism)
        self.host_copies = (HostMemory(), HostMemory()) if offloads else None
        """Host memory for optimizer state and for weights; None to leave them where they are."""
        meshes = build_meshes(self.fold, run.device.type, timeout=timedelta(seconds=timeout_s), trains=False)
        with self._without_optimizer_state():
            model, self.targets = build_empty(config, meshes, run.device)
            storages = [shard.tensor.untyped_storage() for _, shard in self.targets.values()]
            self.memory = {storage._cdata: (storage, storage.nbytes()) for storage in storages}.values()
            """Storages of the model's weights, which are empty between uses, and their bytes."""
            self.relayout = Relayout(run.shards, self.targets, leave_out=("model.mtp.",))
            self.generator = Generator(model, meshes, run.device, vocab_size, ends, records)
            self._free()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights on this rank, while it generates."""
        return sum(size for _, size in self.memory)

    @contextmanager
    def loaded(self) -> Iterator[Generator]:
        """Copy the run's present weights to the model, and yield its generator; free the model's memory at the end.

        With `offloads` the run's own weights and optimizer state cannot be used in this context. Collective over the
        world.
        """
        with self._without_optimizer_state():
            for storage, size in self.memory:
                storage.resize_(size)
            self.relayout.move(self.run.shards, self.targets)
            with self._without_weights():
                try:
                    yield self.generator
                finally:
                    self._free()

    def _without_optimizer_state(self) -> AbstractContextManager[None]:
        if not self.host_copies:
            return nullcontext()
        for moe in self.run.moe_layers.values():
            moe.experts.rounded.begin_step()  # copies in 8 bits, which the next step makes anew
        moments = [x for states in self.run.optimizer.moments().values() for x in states.values()]
        return self.host_copies[0].instead_of(x for x in moments if x.device.type == self.run.device.type)

    def _without_weights(self) -> AbstractContextManager[None]:
        if not self.host_copies:
            return nullcontext()
        return self.host_copies[1].instead_of(shard.tensor for _, shard in self.run.shards.values())

    def _free(self) -> None:
        """Free the memory of the model's weights and caches."""
        self.generator.clear()
        for storage, _ in self.memory:
            storage.resize_(0)
        if self.host_copies:
            device.free_unused_memory(self.run.device)
