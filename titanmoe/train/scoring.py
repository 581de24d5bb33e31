"""Counts what a model says of a run's data: the log-probability of every label, or of the likeliest ids in its place,
under the run's mapping, only forward.

Sequences come as in a run's first epoch, so its first step finds the same bits; then those that are held out.

Shapes: G samples of a step, N of a data rank, M microbatches, B samples of a microbatch, S positions of the attention
slice, L of a whole sequence, R numbers of a label: 1, or K ids and K + 1 log-probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanmoe.checkpoint.hf.convert import raise_on_all_ranks
from titanmoe.comm.collectives import all_reduce
from titanmoe.config.schema import Config
from titanmoe.data.balanced_work import DocumentWork
from titanmoe.data.batch import Batch
from titanmoe.data.documents import whole_of
from titanmoe.data.loader import Share, StepPlans, ValidationSet
from titanmoe.data.mix import Mix, Sample
from titanmoe.data.scores import DTYPES, SCORES, Classes, ScoreWriter
from titanmoe.data.shards import ShardDocuments
from titanmoe.data.sources import training_sources
from titanmoe.parallel.batch_slice import Slice
from titanmoe.parallel.context import placement
from titanmoe.train.gradients import Slicer
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.runtime import say
from titanmoe.train.training import Training

EVERY_S = 30
"""Seconds between two lines of progress."""


def count_scores(config: Config, training: Training, model: str, classes: Classes | None = None) -> None:
    """Of all data of the run, beside its shards. All ranks call it together; one of each machine writes. model: the
    digest of what `training` holds. classes: what its head says, if not the log-probabilities of labels."""
    steps = ScoringSteps(config, training)
    writers: dict[Path, ScoreWriter] = {}
    wide = torch.promote_types(getattr(torch, config.training.mixed_precision_param), torch.float32)
    dtype = str(wide).removeprefix("torch.")
    record = classes.record(DTYPES[dtype]) if classes else DTYPES[dtype]
    tokens = sum(int(documents.first_token[-1]) for documents in steps.documents)
    where = ", ".join(str(documents.folder / SCORES) for documents in steps.documents)
    say(f"scores     {tokens:,} tokens of {record.itemsize} bytes: {tokens * record.itemsize / 1e9:,.3f} GB in {where}")

    def open_writers() -> None:
        for documents in steps.documents if training.runtime.local_rank == 0 else ():
            writers[documents.folder] = ScoreWriter(documents, model, config.training.seq_len, dtype, classes)

    group, shown = training.checkpoints.group, time.monotonic()
    try:
        raise_on_all_ranks(group, open_writers)
        for count, step in enumerate(steps, 1):
            numbers_GLR = _forward(steps.slicer, training, step, classes)
            if writers:
                _write(writers, step, _records(numbers_GLR, record))
            if time.monotonic() - shown > EVERY_S:
                shown = time.monotonic()
                say(f"scores     {count:,} batches of {len(step.samples)} sequences are counted")
        raise_on_all_ranks(group, lambda: [writer.close() for writer in writers.values()])
    finally:
        for writer in writers.values():
            writer.remove()


def _write(writers: dict[Path, ScoreWriter], step: ScoringStep, scores_GL: np.ndarray) -> None:
    for sample, score_L in zip(step.samples, scores_GL, strict=True):
        if sample is None:
            continue
        documents, first = step.mix.sources[sample.source].packer.documents, 0
        writer = writers[whole_of(documents).folder]
        for start, pairs in zip(sample.pieces.start_P.tolist(), sample.pieces.pairs_P.tolist(), strict=True):
            for begin, end in documents.ranges(start + 1, start + 1 + pairs):
                writer.put(begin, score_L[first : first + end - begin])
                first += end - begin


def _records(numbers_GLR: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """(G, L), as they are stored."""
    if dtype.names is None:
        return numbers_GLR.squeeze(-1)
    records_GL = np.empty(numbers_GLR.shape[:2], dtype)
    top = dtype["ids"].shape[0]
    records_GL["ids"], records_GL["log_p"] = numbers_GLR[..., :top], numbers_GLR[..., top:]
    return records_GL


class ScoringStep(NamedTuple):
    mix: Mix
    samples: list[Sample | None]
    """Of all data ranks."""
    batches: list[Batch]
    """This rank's microbatches."""
    number_N: np.ndarray
    """Of their samples."""


class ScoringSteps:
    def __init__(self, config: Config, training: Training):
        meshes, validation = training.meshes, config.validation
        one_epoch = replace(
            config, training=replace(config.training, epochs=1), validation=replace(validation, steps=0)
        )
        self.share = Share(one_epoch, meshes.data.rank, meshes.data.size)
        self.mix, held_out = training_sources(one_epoch)
        self.work = DocumentWork(config.model) if config.data.balance_work else None
        self.rest = None
        if validation.interval or any(map(len, held_out)):
            self.rest = ValidationSet(one_epoch, meshes.data.rank, meshes.data.size, held_out)
        self.slicer = Slicer(
            meshes=meshes,
            placement=placement(config.parallelism),
            device=training.device,
            with_mtp=False,
            objective=CrossEntropy(meshes),
        )

    @property
    def documents(self) -> list[ShardDocuments]:
        sources = [source for mix in (self.mix, self.rest and self.rest.mix) if mix for source in mix.sources]
        stored = [whole_of(source.packer.documents) for source in sources]
        return list({documents.folder: documents for documents in stored}.values())

    def __iter__(self) -> Iterator[ScoringStep]:
        consumed, size = 0, self.share.global_batch_size
        plans = StepPlans(self.mix, self.share, self.work, 0, self.mix.state)
        while consumed < self.mix.epochs_to_take.total:
            samples = self.mix.take(consumed, size)
            consumed = self.mix.after(consumed, size)
            yield self._step(plans, samples)
        if self.rest:
            plans = StepPlans(self.rest.mix, self.share, None, 0, self.rest.mix.state)
            for samples in self.rest.steps_of_samples():
                yield self._step(plans, samples)

    def _step(self, plans: StepPlans, samples: list[Sample | None]) -> ScoringStep:
        own, number_N = plans.own(samples)
        batches = self.share.read(plans.mix, own, number_N).chunk(self.share.microbatches)
        return ScoringStep(plans.mix, samples, batches, self.share.round_robin_N if number_N is None else number_N)


def _forward(slicer: Slicer, training: Training, step: ScoringStep, classes: Classes | None) -> np.ndarray:
    """(G, L, R), on every rank."""
    gradients, meshes, device = training.gradients, training.meshes, training.device
    slices, length = slicer.slices(step.batches), step.batches[0].tokens_BS.shape[1]
    numbers = 2 * classes.top + 1 if classes else 1
    out_GLR = torch.zeros(len(step.samples), length, numbers, dtype=torch.float64, device=device)
    place_S = slicer.placement.part(torch.arange(length, device=device).unsqueeze(0), meshes.cp.rank).squeeze(0)
    number_MB = torch.from_numpy(step.number_N).to(device).view(len(slices), -1)
    number_B = {id(piece): number_MB[m] for m, piece in enumerate(slices)}

    def keep(scores_NBS: Tensor, piece: Slice) -> Tensor:
        if meshes.tp.rank == 0:  # all ranks of a tp group have the same
            numbers_RBS = scores_NBS if classes else -scores_NBS[:1]
            out_GLR[number_B[id(piece)].unsqueeze(1), place_S] = numbers_RBS.double().movedim(0, -1)
        return scores_NBS.new_zeros(())

    gradients.begin_step(slicer.count(step.batches))
    gradients.engine.run(slices, keep, torch.ones((), device=device), backward=False)
    return all_reduce(out_GLR, meshes.world).cpu().numpy()
