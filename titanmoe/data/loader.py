"""The stateful data loader: which samples a data rank trains on in a step, and how far the run has got.

Microbatch m of data rank d has samples j = (m * data_ranks + d) * local_batch_size + b of a step, so consecutive ones
go round the data ranks, unless data.balance_work assigns them by their work. Every rank plans every step: that reads no
tokens and advances one state, which depends on neither data ranks nor workers. Samples are read ahead, in a thread or
in workers; the loader's state is that of the last step returned.

Shapes: M microbatches of a step, R data ranks, B samples of a microbatch, N = M * B samples of a rank, S positions, G
documents of a sample, L long chats.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from titanmoe.config import ConfigError
from titanmoe.config.blocks import separates_documents
from titanmoe.config.schema import Config
from titanmoe.data.balanced_work import DocumentWork, assign_samples
from titanmoe.data.batch import Batch
from titanmoe.data.documents import Documents
from titanmoe.data.pack_chats import ChatPacker
from titanmoe.data.prefetch import Prefetcher
from titanmoe.data.source_mix import Sample, SourceMix
from titanmoe.data.sources import open_training_sources, open_validation_sources


class BatchLayout:
    """The assignment of a step's samples to microbatches and data ranks, for one data rank.

    `round_robin_N` has the numbers within the step of this rank's samples, unless data.balance_work assigns others.
    """

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        training = config.training
        self.data_rank, self.data_ranks, self.local_batch_size = data_rank, data_ranks, training.local_batch_size
        per_round = self.local_batch_size * data_ranks
        self.global_batch_size = per_round if training.global_batch_size == -1 else training.global_batch_size
        self.microbatches = self.global_batch_size // per_round
        self.seq_len, self.separate_documents = training.seq_len, separates_documents(config)
        self.with_weights = config.data.label_weights
        # Random tokens cover the full vocabulary.
        self.media_tokens = [] if config.data.source == "synthetic" else config.model.media_tokens
        every_MRB = np.arange(self.global_batch_size).reshape(self.microbatches, data_ranks, self.local_batch_size)
        self.round_robin_N = every_MRB[:, data_rank].ravel()

    def read(self, mix: SourceMix, samples: list[Sample | None], number_N: np.ndarray | None = None) -> Batch:
        """Read the tokens of this data rank's planned samples, and return one batch of all microbatches of a step.

        Args:
            mix: the sources.
            samples: plans of the samples; None for padding.
            number_N: number of each sample within the step; None if they are numbered round-robin.

        Raises:
            ConfigError: the data cannot be read, or has a token that stands for an image or a video.
        """
        *arrays, extra_fields = mix.read(samples, self.seq_len, self.separate_documents, self.with_weights)
        for token in self.media_tokens:
            if (arrays[0] == token).any():
                raise ConfigError(
                    f"the data has token {token}, which stands for an image or a video (model.media_tokens = "
                    f"{self.media_tokens}), and only text is trained: leave documents with it out, or set "
                    "media_tokens = [] to train it as any other token"
                )
        fields = (None if x is None else torch.from_numpy(x) for x in arrays)
        number_B = None if number_N is None else torch.from_numpy(number_N)
        return Batch(
            *fields, number_B=number_B, extra_fields={name: torch.from_numpy(x) for name, x in extra_fields.items()}
        )


class StepPlan(NamedTuple):
    """The plan of a data rank's samples in one step, before their tokens are read."""

    samples: list[Sample | None]
    """Plan of each sample; None for padding."""
    number_N: np.ndarray | None
    """Number of each sample within the step; None for the usual round-robin numbers."""
    state_after: dict[str, Any]
    """Samples consumed, packers' states and epochs after this step."""


class StepPlans:
    """Endless iterable of a data rank's plans of the coming steps; after the last epoch all samples are padding.

    Iterating it sets and advances the packers of `mix`.

    Args:
        mix: the sources.
        layout: the assignment of samples to ranks.
        work: work of documents, if data.balance_work assigns samples by it; None for round-robin.
        consumed: samples that all data ranks have taken so far.
        state: state of each source's packer.
    """

    def __init__(
        self, mix: SourceMix, layout: BatchLayout, work: DocumentWork | None, consumed: int, state: list[list[int]]
    ):
        self.mix, self.layout, self.work, self.consumed, self.state = mix, layout, work, consumed, state

    def __iter__(self) -> Iterator[StepPlan]:
        layout, consumed = self.layout, self.consumed
        self.mix.state = self.state
        while True:
            samples = self.mix.take(consumed, layout.global_batch_size)
            consumed = self.mix.next_sample(consumed, layout.global_batch_size)
            samples_and_numbers = self.samples_of_rank(samples)
            state_after = {"consumed": consumed, "sources": self.mix.state, "epochs": self.mix.epochs}
            yield StepPlan(*samples_and_numbers, state_after)

    def samples_of_rank(self, samples: list[Sample | None]) -> tuple[list[Sample | None], np.ndarray | None]:
        """Return (this data rank's samples of a step, their numbers within the step); None for round-robin numbers.

        `samples` are the planned ones of all data ranks, of which data.balance_work chooses this rank's by their work.
        """
        layout, number_N = self.layout, None
        if self.work:
            work_N = np.array([self.work(length_G) for length_G in self.mix.lengths(samples)])
            number_N = assign_samples(work_N, layout.microbatches, layout.data_ranks, layout.local_batch_size)[
                :, layout.data_rank
            ].ravel()
        which_N = layout.round_robin_N if number_N is None else number_N
        return [samples[j] for j in which_N.tolist()], number_N


class SampleReader:
    """Mapping whose `reader[plan]` reads a planned step, and returns (all its microbatches in one, plan.state_after).

    It runs in the worker processes if there are any, else in the prefetching thread.
    """

    def __init__(self, mix: SourceMix, layout: BatchLayout):
        self.mix, self.layout = mix, layout

    def __getitem__(self, plan: StepPlan) -> tuple[Batch, dict[str, Any]]:
        return self.layout.read(self.mix, plan.samples, plan.number_N), plan.state_after


class Loader:
    """The training data of one data rank, a list of microbatches for each optimizer step.

    The loader's state can be saved, and resumed on another number of data ranks.

    Every rank makes its own. The first tokenizes data that the cache lacks, and those that share the cache wait for it.

    Raises:
        ConfigError: the data cannot be opened, do not fit the recipe, or are too few.
    """

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        self.layout = BatchLayout(config, data_rank, data_ranks)
        self.global_batch_size, self.microbatches = self.layout.global_batch_size, self.layout.microbatches
        self.seed, self.options = config.training.seed, config.data
        self.epochs_to_train, self.steps = config.training.epochs, config.training.steps
        self.mix, self.held_out = open_training_sources(config)
        self.work = DocumentWork(config.model) if config.data.balance_work else None
        self.wait_s = 0.0
        """Seconds that the last step waited for its samples."""
        self._prefetcher: Prefetcher | None = None
        self._restart_from(0, self.mix.state)

    def next_step(self) -> list[Batch]:
        """Return this data rank's microbatches of the next optimizer step, and advance the loader's state.

        Waits until they are read, but for no other rank. After the last epoch it returns padding, without end. Sets
        `wait_s`, `epochs` and `epoch_messages`, lines to log about sources that begin another epoch.

        Raises:
            ConfigError: the data cannot be read, or has a token that cannot be trained on.
        """
        begin = time.perf_counter()
        step, state_after = self._start_prefetcher().next()
        self.wait_s = time.perf_counter() - begin
        self.first = self.consumed
        self.consumed, self.state = state_after["consumed"], state_after["sources"]
        self.epoch_messages = [
            f"data: {name} begins epoch {int(epoch) + 1}"
            for name, epoch in state_after["epochs"].items()
            if int(epoch) > int(self.epochs[name]) and int(epoch) != self.epochs_to_train
        ]
        self.epochs = state_after["epochs"]
        return step.chunk(self.microbatches)

    def peek(self) -> list[Batch]:
        """Return the microbatches that the next call of `next_step` will return, without advancing the state.

        Waits until they are read.

        Raises:
            ConfigError: the data cannot be read, or has a token that cannot be trained on.
        """
        step, _ = self._start_prefetcher().peek()
        return step.chunk(self.microbatches)

    def digest_samples(self, batches: list[Batch]) -> dict[int, str]:
        """Return a hash (16 hexadecimal digits) of each sample's input tokens, by its number in the training job.

        Only this data rank's samples are among them, and labels do not count. `batches` are the microbatches that
        `next_step` returned last.
        """
        number_N = self.layout.round_robin_N
        if batches[0].number_B is not None:
            number_N = torch.cat([batch.number_B for batch in batches]).numpy()
        samples = [tokens_S for batch in batches for tokens_S in batch.tokens_BS.numpy()]
        digests = [hashlib.blake2b(tokens_S.tobytes(), digest_size=8).hexdigest() for tokens_S in samples]
        return {self.first + number: digest for number, digest in zip(number_N.tolist(), digests, strict=True)}

    def report(self) -> dict[str, float]:
        """Return the loader's metrics: "data_wait_s", seconds that the last step waited, and "data.epoch.NAME".

        The latter is the number of epochs read of the source NAME, with the fraction of the current one.
        """
        return {"data_wait_s": self.wait_s} | {f"data.epoch.{name}": epoch for name, epoch in self.epochs.items()}

    def header_rows(self) -> dict[str, str]:
        """Return lines about the data for the log's header, by title: sources, epochs, packing, truncated data."""
        sources, packing = self.mix.sources, self._packing
        total = sum(source.weight for source in sources)
        fractions = ", ".join(f"{source.name} {source.weight / total:.1%}" for source in sources)
        rows = {"sources": f"{fractions} of the samples"} if len(sources) > 1 and not self.epochs_to_train else {}
        if epochs := self.mix.epoch_order:
            padded = (epochs.total - self.consumed) % self.global_batch_size > 0
            rows["epochs"] = (
                f"{self.epochs_to_train} of every source: {epochs.total:,} sequences in {self.steps:,} steps"
                f"{', the last filled up with padding' * padded}"
            )
        rows |= self.mix.truncation_rows()
        even = ", distributed by their work" if self.work else ""
        return rows if packing == "stream" else rows | {"packing": f"{packing}{even}"}

    def close(self) -> None:
        """End the thread and the worker processes that read ahead; the next `next_step` or `peek` starts new ones."""
        if self._prefetcher is not None:
            self._close_prefetcher()
            self._prefetcher = None

    def _start_prefetcher(self) -> Prefetcher:
        if self._prefetcher is None:
            plans = StepPlans(self.mix, self.layout, self.work, self.consumed, self.state)
            reader = SampleReader(self.mix, self.layout)
            self._prefetcher = Prefetcher(reader, plans, self.options.workers, self.options.prefetch)
            self._close_prefetcher = weakref.finalize(self, self._prefetcher.close)
        return self._prefetcher

    def _restart_from(self, consumed: int, state: list[list[int]]) -> None:
        """Set the loader's state, and discard samples that were read ahead.

        `consumed` counts samples over all data ranks, `state` is that of each source's packer.
        """
        self.close()
        self.consumed = self.first = consumed
        """Samples, over all data ranks; first: before the last step."""
        self.state = state
        """State of each source's packer."""
        self.mix.state = state
        self.epochs = self.mix.epochs
        """Number of epochs read of each source, by name."""
        self.epoch_messages: list[str] = []
        """Lines to log about sources of which the last step began another epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state to save: samples consumed, packers' states, and what identifies the data.

        It is that after the last call of `next_step`, equal on all ranks; samples that were read ahead do not count.
        """
        descriptions = [source.description for source in self.mix.sources]
        state = {"consumed": self.consumed, "sources": self.state, "described": descriptions} | self._identity()
        state["in_epochs"] = self.epochs_to_train > 0
        return state | ({"tokenizer": self.mix.tokenizer.identity} if self.mix.tokenizer else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that a saved state has consumed.

        The batch size and the number of data ranks may differ from those when the state was saved.

        Raises:
            ConfigError: with what `find_state_mismatches` returns, if that is not empty; then nothing changes.
        """
        if problems := self.find_state_mismatches(state):
            raise ConfigError(problems)
        self._restart_from(int(state["consumed"]), state["sources"])

    def find_state_mismatches(self, state: dict[str, Any]) -> list[str]:
        """Return the reasons why this loader cannot continue from a saved state; [] if it can.

        Each reason names something that samples depend on and that has changed: seed, seq_len, packing, the data or,
        with several sources, whether training.epochs is set. Batch sizes, data.weights and the number of epochs are
        not compared.
        """
        names = {"seed": "training.seed", "seq_len": "training.seq_len", "packing": "data.packing"}
        unknown = "it would be unknown which samples were already seen"
        problems = [
            f"{names[name]} was {state.get(name)!r} when the state was saved and is {value!r} now: "
            f"{unknown}; keep it, or start a new run"
            for name, value in self._identity().items()
            if name in names and state.get(name) != value
        ]
        if len(self.mix.sources) > 1 and state.get("in_epochs", False) != (self.epochs_to_train > 0):
            without, with_ = ("had not", "has") if self.epochs_to_train else ("had", "has not")
            problems.append(
                f"the run {without} training.epochs when the state was saved and {with_} now, and its sources would "
                f"take turns in another order: {unknown}; keep it, or start a new run"
            )
        if state.get("source") != self._identity()["source"]:
            problems.append(
                f"{self._describe_changed_data(state)}: {unknown}; give it that data again, or start a new run"
            )
        return problems

    def _describe_changed_data(self, state: dict[str, Any]) -> str:
        """Return a message on how the data differs from a saved state's: in the sources, or else in their order."""
        old_prints = str(state.get("source", "")).split(", ")
        old_data = dict(zip(old_prints, state.get("described", ()), strict=False))
        new_data = {source.fingerprint: source.description for source in self.mix.sources}
        only_old = [text for print_, text in old_data.items() if print_ not in new_data]
        only_new = [text for print_, text in new_data.items() if print_ not in old_prints]
        if sorted(old_prints) == sorted(new_data):
            return "the sources are in another order than when the state was saved"
        change_note = " (it has changed since)" if only_old == only_new else ""
        return (
            f"the data or its tokenizer is not what the run was trained on{change_note}; "
            f"was: {'; '.join(only_old) or 'not recorded'}; is now: {'; '.join(only_new) or 'only some of it'}"
        )

    @property
    def _packing(self) -> str:
        """The packing options that samples depend on, as text for the saved state and the log's header."""
        long_chats = f', long_chats = "{self.options.long_chats}"'
        has_long_chats = any(isinstance(s.packer, ChatPacker) and len(s.packer.long_L) for s in self.mix.sources)
        return self.options.packing + ", prefixes shared" * self.options.share_prefixes + long_chats * has_long_chats

    def _identity(self) -> dict[str, int | str]:
        """Return what a sample's contents depend on: seed, seq_len, packing and data; data.weights are not in it."""
        source = ", ".join(source.fingerprint for source in self.mix.sources)
        return {"seed": self.seed, "seq_len": self.layout.seq_len, "packing": self._packing, "source": source}


class ValidationSet:
    """The validation batches of one data rank, a list of microbatches per step.

    They are the same in each iteration, of which only one may run at a time. The sources take turns until each ends;
    padding fills the last step. An iteration ends there, or after validation.steps steps if that is not 0; it has as
    many steps on every data rank. `held_out` is `Loader.held_out`, which is read if validation.paths is empty.

    Raises:
        ConfigError: there is nothing to validate on, or it cannot be opened.
    """

    def __init__(self, config: Config, data_rank: int, data_ranks: int, held_out: Sequence[Documents] = ()):
        self.layout, self.steps = BatchLayout(config, data_rank, data_ranks), config.validation.steps
        self.mix = open_validation_sources(config, held_out)

    def __iter__(self) -> Iterator[list[Batch]]:
        layout = self.layout
        for step, samples in enumerate(self.planned_steps(), 1):
            samples_of_rank = [samples[j] for j in layout.round_robin_N.tolist()]
            yield layout.read(self.mix, samples_of_rank).chunk(layout.microbatches)
            if step == self.steps:
                return

    def planned_steps(self) -> Iterator[list[Sample | None]]:
        """Yield the planned samples of all data ranks for each step, until all sources end; None for padding.

        It does not stop at validation.steps, and never with random tokens.
        """
        samples_in_turn, size = self._interleave_sources(), self.layout.global_batch_size
        while samples := list(itertools.islice(samples_in_turn, size)):
            yield [*samples, *[None] * (size - len(samples))]

    def _interleave_sources(self) -> Iterator[Sample]:
        """Yield the planned samples of all sources, one of each in turn, until all sources have ended."""
        unfinished = [(k, source.packer.first_epoch()) for k, source in enumerate(self.mix.sources)]
        while unfinished:
            for k, sequences in tuple(unfinished):
                segments = next(sequences, None)
                if segments is None:
                    unfinished.remove((k, sequences))
                else:
                    yield Sample(k, segments)
