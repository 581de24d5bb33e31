"""Computes a model's log-probabilities of a run's data once and stores them beside the token shards.

Two uses: the reference model of a DPO run, which is the model that the run begins from or the weights under its
adapters, and the teacher of another run (`titanmoe score`). Stored are the log-probability of every label, or the top-k
ids and their log-probabilities (data.token_scores). Sequences are those of a run's first epoch, batched as the run
does, so that its first step finds bitwise equal numbers; then those of the validation set.

Shapes: G samples of a step, N those of one data rank, M microbatches, B samples of each, S positions of the attention
slice, L of the full sequence, R numbers per label (N in output_NBS): 1, or K ids and K + 1 log-probabilities.
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

from titanmoe.checkpoint.choose_checkpoint import run_folder
from titanmoe.checkpoint.on_all_ranks import on_all_ranks, raise_on_all_ranks
from titanmoe.checkpoint.weight_digest import model_digest
from titanmoe.comm.collectives import all_reduce
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.balanced_work import DocumentWork
from titanmoe.data.batch import Batch
from titanmoe.data.documents import stored_documents
from titanmoe.data.loader import BatchLayout, StepPlans, ValidationSet
from titanmoe.data.source_mix import Sample, SourceMix
from titanmoe.data.sources import open_training_sources
from titanmoe.data.token_scores import DTYPES, SCORES, ScoreWriter, TopK, find_scores
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.models.lora import without_adapters
from titanmoe.models.lora_spec import is_adapter
from titanmoe.models.tensors import stored_name
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.parallel.context import placement
from titanmoe.train.checkpoints import REFERENCE
from titanmoe.train.gradients import Slicer
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.runtime import print_rank_0
from titanmoe.train.training import Training


class Reference:
    """Reference model of a DPO run, and its stored log-probabilities of the run's data.

    `titanmoe score` also uses this class, to store a model's log-probabilities for another run.
    """

    def __init__(self, config: Config, training: Training):
        self.config, self.training = config, training
        self.group = training.checkpoints.group

    def prepare(self) -> dict[str, str]:
        """Give the loader the reference model's stored log-probabilities, after computing them if there are none.

        Called once the weights are loaded, and before the first step. The model's digest becomes part of the run's
        record, which checkpoints contain. Collective over the world.

        Returns:
            {"reference": the model's digest, and whether its numbers were stored before or computed now}, for the
            header.

        Raises:
            ConfigError: on all ranks, if the data are not token shards, stored numbers do not fit them, or a resumed
                run finds none of the model that it began with.
        """
        training, run_record = self.training, self.training.checkpoints.run_record
        goes_on = REFERENCE in run_record and not self.config.lora.rank
        if not goes_on:
            run_record[REFERENCE] = self.digest()
        model, sources = run_record[REFERENCE], self.sources()
        note = "stored before"
        if not self._load_scores(sources, model):
            if goes_on and training.state.step:
                raise ConfigError(
                    f"{sources[0].folder} has no scores of this run's reference model (digest {model}), and the "
                    "current weights would give others: compute them with the recipe that the run began with, "
                    "titanmoe score RECIPE"
                )
            print_rank_0(
                f"scores     computing those of the reference model {model}, as none are stored beside the data"
            )
            with without_adapters(training.stages):
                compute_scores(self.config, training, model)
            self._load_scores(sources, model)
            note = "computed now"
        training.loader.close()  # batches that it has prefetched have no scores
        return {"reference": f"{model}, {note}"}

    def digest(self) -> str:
        """Return a hash of weights and buffers, without adapters, in the compute dtype. Collective over the world."""
        compute = getattr(torch, self.config.training.mixed_precision_param)
        tied = self.config.model.tie_embeddings
        base = {
            name: parameter
            for name, parameter in self.training.parameters.items()
            if name == stored_name(name, tied) and not is_adapter(name)
        }
        return model_digest(base, self.training.buffers, compute, self.group)

    def sources(self) -> list[ShardDocuments]:
        """Return the token shards of each source of the training data, then of the validation data.

        Raises:
            ConfigError: if some data does not come from token shards.
        """
        loader, validation = self.training.loader, self.training.validation
        mixes = [loader.mix, *([validation.samples.mix] if validation else [])]
        packers = [source.packer for mix in mixes for source in mix.sources]
        documents = [stored_documents(packer.documents) for packer in packers if hasattr(packer, "documents")]
        if len(documents) < len(packers) or not all(isinstance(one, ShardDocuments) for one in documents):
            fix = 'set data.source = "files", and name some in data.paths'
            raise ConfigError(f"scores are stored beside token shards, and this run has none: {fix}")
        return documents

    def _load_scores(self, sources: list[ShardDocuments], model: str) -> bool:
        """Give the loader the stored log-probabilities of a model; return whether all ranks found those of all shards.

        `model` is its digest. Collective over the world. Raises a ConfigError on all ranks if files do not fit the
        shards.
        """

        def attach_stored_log_probs() -> bool:
            problems: list[str] = []
            for documents in sources:
                try:
                    documents.stored_reference_log_probs = find_scores(documents, model, self.config.training.seq_len)
                except ConfigError as error:
                    problems += error.problems
            if problems:
                raise ConfigError([*dict.fromkeys(problems)])
            return all(documents.stored_reference_log_probs for documents in sources)

        complete = raise_on_all_ranks(self.group, attach_stored_log_probs)
        return all(on_all_ranks(self.group, lambda: complete))


def run_scoring(config: Config, training: Training, top_k: bool) -> int:
    """Load the weights, store the model's log-probabilities of the run's data beside the token shards, and return 0.

    This is `titanmoe score` on one rank; all are computed unless all are stored already. Collective over the world.

    Args:
        top_k: whether to store the top-k ids of each position, which the head must return, instead of the labels'
            log-probabilities.

    Raises:
        ConfigError: the weights cannot be loaded, or some data does not come from token shards.
    """
    with training.checkpoints.in_folder(run_folder(config.job)) as checkpoints:
        begun, reference = checkpoints.begin(), Reference(config, training)
        notes = begun | (_score_top_k(reference) if top_k else reference.prepare())
    for name, note in notes.items():
        print_rank_0(f"{name:<10} {note}")
    return 0


def _score_top_k(reference: Reference) -> dict[str, str]:
    """Store the model's top-k ids and log-probabilities for the run's data beside the token shards, unless they exist.

    The data are the training data's first epoch and the validation data. Collective over the world.

    Returns:
        {"scores": a line for the console that says how another recipe names these scores}.

    Raises:
        ConfigError: the model has adapters, or some data does not come from token shards.
    """
    config, training, options = reference.config, reference.training, reference.config.distillation
    if config.lora.rank:
        raise ConfigError("--top needs a model without adapters: merge them (titanmoe convert), and score the result")
    top_k, model = TopK(options.top, options.temperature, config.model.vocab_size), reference.digest()
    name, sources = top_k.name(model), reference.sources()
    are_stored = raise_on_all_ranks(
        reference.group, lambda: all(find_scores(one, name, config.training.seq_len) for one in sources)
    )
    if not all(on_all_ranks(reference.group, lambda: are_stored)):
        compute_scores(config, training, model, top_k)
    return {"scores": f'name them in the recipe that learns from them: distillation.scores = "{name}"'}


PROGRESS_INTERVAL_S = 30
"""Seconds between two lines on progress."""


def compute_scores(config: Config, training: Training, model: str, top_k: TopK | None = None) -> None:
    """Compute log-probabilities for the run's first epoch and validation data, and write them beside the token shards.

    One rank of each machine writes. Collective over the world.

    Args:
        training: the model and its data. Its adapters count, unless the caller is within `without_adapters`.
        model: digest of the model, part of the files' names.
        top_k: the top-k ids that the head returns; None for the log-probabilities of labels.

    Raises:
        ConfigError: on all ranks, if one cannot write the files.
    """
    steps = ScoringSteps(config, training)
    writers: dict[Path, ScoreWriter] = {}
    wide = torch.promote_types(getattr(torch, config.training.mixed_precision_param), torch.float32)
    dtype = str(wide).removeprefix("torch.")
    record = top_k.record(DTYPES[dtype]) if top_k else DTYPES[dtype]
    tokens = sum(int(documents.first_token[-1]) for documents in steps.documents)
    where = ", ".join(str(documents.folder / SCORES) for documents in steps.documents)
    print_rank_0(
        f"scores     {tokens:,} tokens of {record.itemsize} bytes: {tokens * record.itemsize / 1e9:,.3f} GB in {where}"
    )

    def open_writers() -> None:
        for documents in steps.documents if training.runtime.local_rank == 0 else ():
            writers[documents.folder] = ScoreWriter(documents, model, config.training.seq_len, dtype, top_k)

    group, shown = training.checkpoints.group, time.monotonic()
    try:
        raise_on_all_ranks(group, open_writers)
        for count, step in enumerate(steps, 1):
            numbers_GLR = _forward(steps.slicer, training, step, top_k)
            if writers:
                _write(writers, step, _to_records(numbers_GLR, record))
            if time.monotonic() - shown > PROGRESS_INTERVAL_S:
                shown = time.monotonic()
                print_rank_0(f"scores     {count:,} batches of {len(step.samples)} sequences are done")
        raise_on_all_ranks(group, lambda: [writer.close() for writer in writers.values()])
    finally:
        for writer in writers.values():
            writer.discard()


def _write(writers: dict[Path, ScoreWriter], step: ScoringStep, scores_GL: np.ndarray) -> None:
    """Write the scores of a step's samples, but padding, at the positions of their tokens in the shards.

    Args:
        writers: writers by folder of token shards.
        scores_GL: one record of the stored dtype for each label of each sample.
    """
    for sample, score_L in zip(step.samples, scores_GL, strict=True):
        if sample is None:
            continue
        documents, first = step.mix.sources[sample.source].packer.documents, 0
        writer = writers[stored_documents(documents).folder]
        for start, pairs in zip(sample.segments.start_G.tolist(), sample.segments.pairs_G.tolist(), strict=True):
            for begin, end in documents.stored_ranges(start + 1, start + 1 + pairs):
                writer.write(begin, score_L[first : first + end - begin])
                first += end - begin


def _to_records(numbers_GLR: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return one record for each label, G samples by L positions, from the R numbers that the head gives to each.

    Args:
        numbers_GLR: R = 1: the log-probability of the label. Otherwise, in this order: K ids, their K
            log-probabilities, and the log-probability of all other ids together.
        dtype: for records of K ids the dtype with the fields "ids" and "log_p"; else any plain dtype, and the numbers
            keep theirs.
    """
    if dtype.names is None:
        return numbers_GLR.squeeze(-1)
    records_GL = np.empty(numbers_GLR.shape[:2], dtype)
    top = dtype["ids"].shape[0]
    records_GL["ids"], records_GL["log_p"] = numbers_GLR[..., :top], numbers_GLR[..., top:]
    return records_GL


class ScoringStep(NamedTuple):
    """Batch of one forward pass whose log-probabilities are stored."""

    mix: SourceMix
    samples: list[Sample | None]
    """Samples of all data ranks; None for padding."""
    batches: list[Batch]
    """Microbatches of this data rank."""
    number_N: np.ndarray
    """Index in `samples` of each sample of this data rank."""


class ScoringSteps:
    """Iterable of the batches whose log-probabilities are stored: an epoch of training data, then validation data."""

    def __init__(self, config: Config, training: Training):
        meshes, validation = training.meshes, config.validation
        one_epoch = replace(
            config, training=replace(config.training, epochs=1), validation=replace(validation, steps=0)
        )
        self.layout = BatchLayout(one_epoch, meshes.data.rank, meshes.data.size)
        self.mix, held_out = open_training_sources(one_epoch)
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
        """Folders of token shards that the batches come from, each once."""
        sources = [source for mix in (self.mix, self.rest and self.rest.mix) if mix for source in mix.sources]
        stored = [stored_documents(source.packer.documents) for source in sources]
        return list({documents.folder: documents for documents in stored}.values())

    def __iter__(self) -> Iterator[ScoringStep]:
        consumed, size = 0, self.layout.global_batch_size
        plans = StepPlans(self.mix, self.layout, self.work, 0, self.mix.state)
        while consumed < self.mix.epoch_order.total:
            samples = self.mix.take(consumed, size)
            consumed = self.mix.next_sample(consumed, size)
            yield self._step(plans, samples)
        if self.rest:
            plans = StepPlans(self.rest.mix, self.layout, None, 0, self.rest.mix.state)
            for samples in self.rest.planned_steps():
                yield self._step(plans, samples)

    def _step(self, plans: StepPlans, samples: list[Sample | None]) -> ScoringStep:
        """Read this data rank's microbatches of a step; return the step.

        Args:
            samples: samples of the step on all data ranks; None for padding.
        """
        local, number_N = plans.samples_of_rank(samples)
        batches = self.layout.read(plans.mix, local, number_N).chunk(self.layout.microbatches)
        return ScoringStep(plans.mix, samples, batches, self.layout.round_robin_N if number_N is None else number_N)


def _forward(slicer: Slicer, training: Training, step: ScoringStep, top_k: TopK | None) -> np.ndarray:
    """Run the forward pass of a step and return the head's numbers of every label, float64, on every rank.

    Shape (G, L, R): samples of all data ranks, positions, and numbers of a label: its log-probability (R = 1), or K
    ids, their K log-probabilities and that of all other ids. Collective over the world.

    Args:
        top_k: the top-k ids that the head returns; None if it returns the loss of labels.
    """
    gradients, meshes, device = training.gradients, training.meshes, training.device
    slices, length = slicer.slices(step.batches), step.batches[0].tokens_BS.shape[1]
    numbers = 2 * top_k.top + 1 if top_k else 1
    out_GLR = torch.zeros(len(step.samples), length, numbers, dtype=torch.float64, device=device)
    place_S = slicer.placement.rank_slice(torch.arange(length, device=device).unsqueeze(0), meshes.cp.rank).squeeze(0)
    number_MB = torch.from_numpy(step.number_N).to(device).view(len(slices), -1)
    number_B = {id(batch_slice): number_MB[m] for m, batch_slice in enumerate(slices)}

    def store(output_NBS: Tensor, batch_slice: BatchSlice) -> Tensor:
        if meshes.tp.rank == 0:  # all ranks of a tp group have the same
            numbers_RBS = output_NBS if top_k else -output_NBS[:1]
            out_GLR[number_B[id(batch_slice)].unsqueeze(1), place_S] = numbers_RBS.detach().double().movedim(0, -1)
        return output_NBS.new_zeros(())

    gradients.begin_step(slicer.count(step.batches))
    gradients.engine.run(slices, store, backward=False)
    return all_reduce(out_GLR, meshes.world).cpu().numpy()
