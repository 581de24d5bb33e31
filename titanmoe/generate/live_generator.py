"""A generator beside a run, on the same ranks: it has the run's present weights, under a mapping of its own.

The run's weights are copied by messages to a model that generates: without pipeline, context parallel and FSDP, in the
compute dtype. The copy and its caches take memory only while it generates. Nothing of the run is written to: the copy
has buffers and process groups of its own, and random numbers are functions of (seed, step, prompt, answer, position).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from datetime import timedelta

from titanmoe.checkpoint.relayout import Relayout
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes
from titanmoe.generate.loop import Generator
from titanmoe.generate.model import build_empty
from titanmoe.train.training import RankModel


class LiveGenerator:
    """A model that generates with the present weights of a run."""

    def __init__(
        self,
        config: Config,
        run: RankModel,
        *,
        vocab_size: int,
        ends: Container[int],
        timeout_s: int,
        records: bool = False,
    ):
        """Build the model and plan how weights move to it. Collective over the world.

        Args:
            config: the config to generate with, from `config_to_run`.
            run: the run on this rank.
            vocab_size: number of the tokenizer's tokens.
            ends: the tokens that end a text.
            timeout_s: seconds that a collective of the generator may take.
            records: whether texts get the log-probability and the experts of their tokens.
        """
        self.run, self.fold = run, derive(run.runtime.world, config.parallelism)
        meshes = build_meshes(self.fold, run.device.type, timeout=timedelta(seconds=timeout_s), trains=False)
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
        """Copy the run's present weights to the model; free the model's memory at the context's end.

        Collective over the world.
        """
        for storage, size in self.memory:
            storage.resize_(size)
        self.relayout.move(self.run.shards, self.targets)
        try:
            yield self.generator
        finally:
            self._free()

    def _free(self) -> None:
        """Free the memory of the model's weights and caches."""
        self.generator.clear()
        for storage, _ in self.memory:
            storage.resize_(0)
