"""The stateful loader: which samples a data rank sees in a step, and how far the run has come.

Sample j of an optimizer step has the global number `samples consumed before the step + j`. Microbatch m of data rank d
has samples j = (m * data_ranks + d) * local_batch_size + b, so that consecutive samples go round the data ranks, unless
data.balance_work distributes them by their work.

Every rank plans every step: which pieces of which documents its samples are made of. Plans need no reading and advance
one state, the same on all ranks, so it does not depend on data ranks or workers. A rank then reads its own samples
ahead of the step that needs them: in a thread, or in worker processes. Each step comes with the state after it, and the
loader's state is that of the last step handed out, however far plans and workers have got.

Shapes: M microbatches of a step, B samples of a microbatch, N = M * B, S positions.
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
from titanmoe.config.schema import Config
from titanmoe.data.balanced_work import DocumentWork, assign
from titanmoe.data.batch import Batch
from titanmoe.data.documents import Documents
from titanmoe.data.mix import Mix, Sample
from titanmoe.data.pack_chats import ChatFit
from titanmoe.data.prefetch import Prefetcher
from titanmoe.data.sources import keeps_documents_apart, training_sources, validation_sources


class Share:
    """Which samples of a step belong to a data rank."""

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        training = config.training
        self.rank, self.ranks, self.size = data_rank, data_ranks, training.local_batch_size
        per_round = self.size * data_ranks
        self.global_batch_size = per_round if training.global_batch_size == -1 else training.global_batch_size
        self.microbatches = self.global_batch_size // per_round
        self.seq_len, self.separate_documents = training.seq_len, keeps_documents_apart(config)
        self.with_weights = config.data.label_weights
        # Random tokens are of the whole vocabulary.
        self.media_tokens = [] if config.data.source == "synthetic" else config.model.media_tokens
        every_MRB = np.arange(self.global_batch_size).reshape(self.microbatches, data_ranks, self.size)
        self.round_robin_N = every_MRB[:, data_rank].ravel()

    def read(self, mix: Mix, samples: list[Sample | None], number_N: np.ndarray | None = None) -> Batch:
        """All microbatches of a step, concatenated."""
        *arrays, further = mix.read(samples, self.seq_len, self.separate_documents, self.with_weights)
        for token in self.media_tokens:
            if (arrays[0] == token).any():
                raise ConfigError(
                    [
                        f"the data has token {token}, which stands for an image or a video (model.media_tokens = "
                        f"{self.media_tokens}), and only text is trained: leave documents with it out, or set "
                        "media_tokens = [] to train it as any other token"
                    ]
                )
        fields = (None if x is None else torch.from_numpy(x) for x in arrays)
        number_B = None if number_N is None else torch.from_numpy(number_N)
        return Batch(*fields, number_B=number_B, further={name: torch.from_numpy(x) for name, x in further.items()})


class StepPlan(NamedTuple):
    """A rank's part of a step."""

    samples: list[Sample | None]
    number_N: np.ndarray | None
    state_after: dict[str, Any]


class StepPlans:
    """Every step from here on, endlessly: after the last epoch of padding."""

    def __init__(self, mix: Mix, share: Share, work: DocumentWork | None, consumed: int, state: list[list[int]]):
        self.mix, self.share, self.work, self.consumed, self.state = mix, share, work, consumed, state

    def __iter__(self) -> Iterator[StepPlan]:
        share, consumed = self.share, self.consumed
        self.mix.state = self.state
        while True:
            samples = self.mix.take(consumed, share.global_batch_size)
            consumed = self.mix.after(consumed, share.global_batch_size)
            own = self.own(samples)
            state_after = {"consumed": consumed, "sources": self.mix.state, "epochs": self.mix.epochs}
            yield StepPlan(*own, state_after)

    def own(self, samples: list[Sample | None]) -> tuple[list[Sample | None], np.ndarray | None]:
        """This rank's of a step's, and their numbers in it unless these are the usual ones."""
        share, number_N = self.share, None
        if self.work:
            work_N = np.array([self.work(length_P) for length_P in self.mix.lengths(samples)])
            number_N = assign(work_N, share.microbatches, share.ranks, share.size)[:, share.rank].ravel()
        which_N = share.round_robin_N if number_N is None else number_N
        return [samples[j] for j in which_N.tolist()], number_N


class SampleReader:
    """From a plan to tensors; in a worker process, if there are any."""

    def __init__(self, mix: Mix, share: Share):
        self.mix, self.share = mix, share

    def __getitem__(self, plan: StepPlan) -> tuple[Batch, dict[str, Any]]:
        return self.share.read(self.mix, plan.samples, plan.number_N), plan.state_after


class Loader:
    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        self.share = Share(config, data_rank, data_ranks)
        self.global_batch_size, self.microbatches = self.share.global_batch_size, self.share.microbatches
        self.seed, self.options = config.training.seed, config.data
        self.epochs_to_train, self.steps = config.training.epochs, config.training.steps
        self.mix, self.held_out = training_sources(config)
        self.work = DocumentWork(config.model) if config.data.balance_work else None
        self.wait_s = 0.0
        """Seconds that the last step waited for its samples."""
        self._prefetcher: Prefetcher | None = None
        self._restart_from(0, self.mix.state)

    def next_step(self) -> list[Batch]:
        """This data rank's microbatches of the next optimizer step."""
        begin = time.perf_counter()
        whole, state_after = self._start_prefetcher().next()
        self.wait_s = time.perf_counter() - begin
        self.first = self.consumed
        self.consumed, self.state = state_after["consumed"], state_after["sources"]
        self.epoch_messages = [
            f"data: {name} begins epoch {int(epoch) + 1}"
            for name, epoch in state_after["epochs"].items()
            if int(epoch) > int(self.epochs[name]) and int(epoch) != self.epochs_to_train
        ]
        self.epochs = state_after["epochs"]
        return whole.chunk(self.microbatches)

    def peek(self) -> list[Batch]:
        """What next_step will return."""
        whole, _ = self._start_prefetcher().peek()
        return whole.chunk(self.microbatches)

    def identify(self, batches: list[Batch]) -> dict[int, str]:
        """Of the samples in the last step's batches: their numbers in the run, from 0, and a digest of their tokens."""
        number_N = self.share.round_robin_N
        if batches[0].number_B is not None:
            number_N = torch.cat([batch.number_B for batch in batches]).numpy()
        rows = [row for batch in batches for row in batch.tokens_BS.numpy()]
        digests = [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]
        return {self.first + number: digest for number, digest in zip(number_N.tolist(), digests, strict=True)}

    def report(self) -> dict[str, float]:
        return {"data_wait_s": self.wait_s} | {f"data.epoch.{name}": epoch for name, epoch in self.epochs.items()}

    def notes(self) -> dict[str, str]:
        """What the run's header says about a mix."""
        sources, packing = self.mix.sources, self._packing
        total = sum(source.weight for source in sources)
        shares = ", ".join(f"{source.name} {source.weight / total:.1%}" for source in sources)
        notes = {"sources": f"{shares} of the samples"} if len(sources) > 1 and not self.epochs_to_train else {}
        if epochs := self.mix.epochs_to_take:
            padded = (epochs.total - self.consumed) % self.global_batch_size > 0
            notes["epochs"] = (
                f"{self.epochs_to_train} of every source: {epochs.total:,} sequences in {self.steps:,} steps"
                f"{', the last filled up with padding' * padded}"
            )
        notes |= self.mix.lost()
        even = ", distributed by their work" if self.work else ""
        return notes if packing == "stream" else notes | {"packing": f"{packing}{even}"}

    def close(self) -> None:
        """End the thread and the workers that read ahead."""
        if self._prefetcher is not None:
            self._close_prefetcher()
            self._prefetcher = None

    def _start_prefetcher(self) -> Prefetcher:
        if self._prefetcher is None:
            plans = StepPlans(self.mix, self.share, self.work, self.consumed, self.state)
            reader = SampleReader(self.mix, self.share)
            self._prefetcher = Prefetcher(reader, plans, self.options.workers, self.options.prefetch)
            self._close_prefetcher = weakref.finalize(self, self._prefetcher.close)
        return self._prefetcher

    def _restart_from(self, consumed: int, state: list[list[int]]) -> None:
        self.close()
        self.consumed = self.first = consumed
        """Samples, over all data ranks; first: before the last step."""
        self.state = state
        """Of each source."""
        self.mix.state = state
        self.epochs = self.mix.epochs
        """How many times each source has been read."""
        self.epoch_messages: list[str] = []
        """What to log about sources that the last step started over."""

    def state_dict(self) -> dict[str, Any]:
        descriptions = [source.description for source in self.mix.sources]
        state = {"consumed": self.consumed, "sources": self.state, "described": descriptions} | self._identity()
        state["in_epochs"] = self.epochs_to_train > 0
        return state | ({"tokenizer": self.mix.tokenizer.identity} if self.mix.tokenizer else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a run of the same samples stopped; the batch size and the number of data ranks may differ."""
        if problems := self.why_not_from(state):
            raise ConfigError(problems)
        self._restart_from(int(state["consumed"]), state["sources"])

    def why_not_from(self, state: dict[str, Any]) -> list[str]:
        """Return why this loader cannot continue from that state: what its samples depend on has changed."""
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
        """What the run was trained on, and what it is given now: sources that are the same are left out."""
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
        long_chats = f', long_chats = "{self.options.long_chats}"'
        cut = any(isinstance(source.packer, ChatFit) and len(source.packer.long_L) for source in self.mix.sources)
        return self.options.packing + ", prefixes shared" * self.options.share_prefixes + long_chats * cut

    def _identity(self) -> dict[str, int | str]:
        """What the content of a sample with a given number depends on, apart from the weights of sources."""
        source = ", ".join(source.fingerprint for source in self.mix.sources)
        return {"seed": self.seed, "seq_len": self.share.seq_len, "packing": self._packing, "source": source}


class ValidationSet:
    """The same samples each time: sources in turn, each until it ends, the last step filled up with padding."""

    def __init__(self, config: Config, data_rank: int, data_ranks: int, held_out: Sequence[Documents] = ()):
        self.share, self.steps = Share(config, data_rank, data_ranks), config.validation.steps
        self.mix = validation_sources(config, held_out)

    def __iter__(self) -> Iterator[list[Batch]]:
        share = self.share
        for step, samples in enumerate(self.steps_of_samples(), 1):
            own_samples = [samples[j] for j in share.round_robin_N.tolist()]
            yield share.read(self.mix, own_samples).chunk(share.microbatches)
            if step == self.steps:
                return

    def steps_of_samples(self) -> Iterator[list[Sample | None]]:
        """Those of all data ranks, to the end of the set."""
        turns, size = self._take_turns(), self.share.global_batch_size
        while samples := list(itertools.islice(turns, size)):
            yield [*samples, *[None] * (size - len(samples))]

    def _take_turns(self) -> Iterator[Sample]:
        unfinished = [(k, source.packer.first_epoch()) for k, source in enumerate(self.mix.sources)]
        while unfinished:
            for k, sequences in tuple(unfinished):
                pieces = next(sequences, None)
                if pieces is None:
                    unfinished.remove((k, sequences))
                else:
                    yield Sample(k, pieces)
