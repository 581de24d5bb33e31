"""The sources of a run: opened, checked, packed into sequences and mixed. Called by the loader on every rank.

Shapes: L tokens of one sequence, S positions, V vocabulary, N sequences, G segments of one, K sources, E epochs.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from titanmoe.config import ConfigError
from titanmoe.config.blocks import separates_documents
from titanmoe.config.schema import Config
from titanmoe.data.batch import WEIGHT
from titanmoe.data.documents import Documents, MemoryDocuments, is_masked
from titanmoe.data.epochs import EpochOrder, count_sequences
from titanmoe.data.held_out import split_held_out
from titanmoe.data.open_documents import attach_teacher_log_probs, open_documents
from titanmoe.data.pack import BatchArrays, BestFitPacker, Segments, StreamPacker
from titanmoe.data.pack_chats import ChatPacker
from titanmoe.data.pack_preferences import PreferencePacker
from titanmoe.data.read_files import walk
from titanmoe.data.source_mix import Source, SourceMix
from titanmoe.data.token_shards import ShardDocuments, StoredTokenizer
from titanmoe.data.tokenizer import ByteTokenizer
from titanmoe.ops.counter_rng import bits, key, uniform

STDLIB = "stdlib"
# Tests hold little prose, and site-packages differ between machines.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"}


class SyntheticPacker:
    """Packer of endless random tokens with Zipf frequencies, as words have: token t has about 1 / (t + 1)."""

    epochs = None

    def __init__(self, vocab_size: int, seq_len: int, seed: int, held_out: bool = False):
        self.vocab_size, self.seq_len, self.sequences_taken = vocab_size, seq_len, 0
        self._key = key("synthetic held out" if held_out else "synthetic", seed)

    def take(self, count: int) -> list[Segments]:
        """Return the plans of the next `count` sequences, and advance the state. `start_G` is a sequence's number."""
        number_N = np.arange(self.sequences_taken, self.sequences_taken + count)
        self.sequences_taken += count
        full_1 = np.array([self.seq_len])
        return [Segments(number_N[i : i + 1], full_1) for i in range(count)]

    def first_epoch(self) -> Iterator[Segments]:
        """Yield plans of all sequences from the first on, without end: random tokens have no epochs. Sets the state."""
        self.sequences_taken = 0
        while True:
            yield from self.take(1)

    @property
    def state(self) -> list[int]:
        """State to save: the number of sequences taken."""
        return [self.sequences_taken]

    @state.setter
    def state(self, state: list[int]) -> None:
        (self.sequences_taken,) = state

    def lengths(self, sequences: list[Segments]) -> list[np.ndarray]:
        return [segments.pairs_G for segments in sequences]

    def fill(self, segments: Segments, out: BatchArrays, n: int) -> None:
        """Draw the tokens of a planned sequence into sequence n of `out`, by the seed and the sequence's number alone.

        floor((V + 1)^u) - 1 with u uniform has P(t) = ln((t + 2) / (t + 1)) / ln(V + 1).
        """
        number_1 = bits(self._key, torch.from_numpy(segments.start_G))
        u_L = uniform(number_1, torch.arange(self.seq_len + 1), torch.float64)
        tokens = (((self.vocab_size + 1.0) ** u_L).to(torch.int64).clamp(max=self.vocab_size) - 1).numpy()
        out.tokens_NS[n], out.labels_NS[n], out.valid_NS[n] = tokens[:-1], tokens[1:], True
        if WEIGHT in out.extra_fields:
            out.extra_fields[WEIGHT][n] = 1


def open_training_sources(config: Config) -> tuple[SourceMix, Sequence[Documents]]:
    """Open the training data that the recipe names, tokenizing it into the cache if needed.

    Every rank calls it. The first one that locks the cache's folder tokenizes, and those that share the folder wait.

    Returns:
        The mix of the sources, and the documents of each source that validation.held_out holds out; () without it.

    Raises:
        ConfigError: the data cannot be opened, do not fit the recipe, or are too few.
    """
    data, training, every = config.data, config.training, config.validation.held_out
    if data.source == "synthetic":
        packer = SyntheticPacker(config.model.vocab_size, training.seq_len, training.seed)
        name, vocabulary = "synthetic", config.model.vocab_size
        source = Source(name, f"{name}:{vocabulary}", f"{name}, {vocabulary:,} kinds of tokens", 1.0, packer)
        return SourceMix([source], training.seed), ()
    corpora = _open_sources(config, data.paths if data.source == "files" else [STDLIB], data.fields)
    attach_teacher_log_probs(config, corpora)
    where = "data.paths" if data.source == "files" else "data.source"
    shards = [corpus for corpus in corpora if isinstance(corpus, ShardDocuments)]
    shards.sort(key=lambda corpus: not corpus.has_label_mask)  # first those of chats, which have the chat template
    tokenizer = shards[0].stored_tokenizer if shards else StoredTokenizer(ByteTokenizer.identity, Path(), {})
    held_out: Sequence[Documents] = ()
    if every:
        corpora, held_out = zip(
            *(split_held_out(corpus, every, training.seq_len + 1) for corpus in corpora), strict=True
        )
        where = f"{where} minus validation.held_out = {every}"
    sources = _pack_and_mix(config, corpora, data.weights, where, training.global_batch_size).sources
    epochs = None
    if training.epochs:
        count_KE = [count_sequences(source.packer, training.epochs) for source in sources]
        epochs = EpochOrder([*zip(*count_KE, strict=True)], training.seed)
    return SourceMix(sources, training.seed, tokenizer, epochs), held_out


def count_steps_of_epochs(config: Config, step: int, consumed: int) -> int:
    """Return the number of the last step of a training job with training.epochs, the one that padding may fill up.

    Opens the training data, which tokenizes it if the cache lacks it, and counts the sequences of all epochs. The first
    `step` steps took `consumed` samples.

    Raises:
        ConfigError: the data cannot be opened, do not fit the recipe, or are too few.
    """
    mix, _ = open_training_sources(config)
    return step + -(-max(0, mix.epoch_order.total - consumed) // config.training.global_batch_size)


def open_validation_sources(config: Config, held_out: Sequence[Documents]) -> SourceMix:
    """Return the mix of the validation data: validation.paths, random tokens, or the held-out documents.

    Every rank calls it: validation.paths are tokenized into the cache by the rank that locks it first, and others wait.
    `held_out` has the held-out documents of each training source.

    Raises:
        ConfigError: nothing is held out, or the data cannot be opened or is too short.
    """
    training, validation = config.training, config.validation
    if validation.paths:
        return _pack_and_mix(config, _open_sources(config, validation.paths, []), [], "validation.paths", 1)
    if config.data.source == "synthetic":
        packer = SyntheticPacker(config.model.vocab_size, training.seq_len, training.seed, held_out=True)
        return SourceMix([Source("synthetic", "", "", 1.0, packer)], training.seed)
    nonempty = [corpus for corpus in held_out if len(corpus)]
    if not nonempty:
        raise ConfigError(
            f"validation.held_out = {validation.held_out} holds out every {validation.held_out}th document, but no "
            "source has that many, or enough tokens to hold out the last of them (training.seq_len + 1 = "
            f"{training.seq_len + 1}): lower it, or name validation.paths"
        )
    return _pack_and_mix(config, nonempty, [], f"validation.held_out = {validation.held_out}", 1)


def _pack_and_mix(
    config: Config, corpora: Sequence[Documents], weights: list[float], option: str, min_sequences: int
) -> SourceMix:
    """Return the mix of sources, each with the packer that fits it, without tokenizer and order of epochs.

    Preference pairs are packed as pairs whatever data.packing is. Each source has its own seed, and of namesakes the
    later ones are called NAME-2, NAME-3.

    Args:
        config: the recipe.
        corpora: documents of each source.
        weights: data.weights; empty to weigh sources by their tokens.
        option: name of the option that names the sources, for messages.
        min_sequences: number of sequences that the sources must give together.

    Raises:
        ConfigError: a source gives no sequence, all together give too few, or data.long_chats refuses a chat.
    """
    seq_len, seed, problems, sources = config.training.seq_len, config.training.seed, [], []
    for k, corpus in enumerate(corpora):
        namesakes = sum(other.name == corpus.name for other in corpora[:k])
        name = f"{corpus.name}-{namesakes + 1}" if namesakes else corpus.name
        # Each source has its own shuffled order.
        packer_seed = seed if k == 0 else key("source", seed, k)
        packer: StreamPacker | BestFitPacker
        if corpus.completions_per_prompt > 1:
            packer = PreferencePacker(corpus, seq_len, packer_seed, config.data.share_prefixes)
        elif config.data.packing == "best_fit" and is_masked(corpus):
            packer = ChatPacker(corpus, seq_len, packer_seed, config.data.long_chats)
        elif config.data.packing == "best_fit":
            packer = BestFitPacker(corpus, seq_len, packer_seed)
        else:
            packer = StreamPacker(corpus, seq_len, packer_seed, separates_documents(config))
        tokens = int(corpus.starts[len(corpus)])
        if not len(corpus):
            problems.append(f"{name} ({option}) has no documents: leave it out, or add some")
        elif isinstance(packer, PreferencePacker) and not packer.per_epoch:
            problems.append(f"{name} ({option}) has no pair that fits training.seq_len = {seq_len}: raise it")
        elif isinstance(packer, ChatPacker) and (refusal := packer.refusal()):
            problems.append(f"{name} ({option}): {refusal}")
        elif not packer.per_epoch:
            problems.append(
                f"training.seq_len = {seq_len} needs {seq_len + 1} tokens per sample, but {name} ({option}) has "
                f"{tokens}: lower seq_len or add text"
                if config.data.packing != "best_fit"
                else f"{name} ({option}) has {len(corpus)} documents but only {tokens} tokens, and two tokens are "
                "the least that can be learned from: give it longer ones"
            )
        weight = weights[k] if weights else float(tokens)
        sources.append(Source(name, corpus.fingerprint, corpus.description, weight, packer))
    available = sum(source.packer.per_epoch for source in sources)
    if not problems and available < min_sequences:
        problems.append(
            f"{option} gives {available} samples of training.seq_len = {seq_len}, fewer than "
            f"training.global_batch_size = {min_sequences}: lower either, or add text"
        )
        problems += SourceMix(sources, seed).truncation_rows().values()
    if problems:
        raise ConfigError(problems)
    return SourceMix(sources, seed)


def _open_sources(config: Config, paths: list[str], fields: list[str]) -> list[Documents]:
    """Return the documents of each path; raise a ConfigError with the problems of all.

    `fields` has the field of the records that holds the document, one per path; empty for data.field.
    """
    opened, problems = [], []
    for path, field in zip(paths, fields or [config.data.field] * len(paths), strict=True):
        try:
            opened.append(_open_source(config, path, field))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return opened


def _open_source(config: Config, path: str, field: str) -> Documents:
    """Return the documents of one path: of Python's standard library as bytes, or of an entry of data.paths.

    The path is STDLIB for Python's library with data.source = "stdlib": its .py files without tests, in memory. `field`
    of the records holds the document. An entry is tokenized if the cache lacks it.

    Raises:
        ConfigError: they cannot be opened, or the vocabulary is too small for bytes.
    """
    if config.data.source != "stdlib" or path != STDLIB:
        return open_documents(config, path, field)
    tokenizer = ByteTokenizer()
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is below the byte tokenizer's {tokenizer.vocab_size}: "
            f"use {tokenizer.vocab_size} or more (320 suits tp up to 64)"
        )
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in walk(root, NOT_STDLIB) if file.suffix == ".py"]
    if not files:
        raise ConfigError(
            f'data.source = "stdlib" finds no .py files under {root}, this Python\'s library: '
            'use data.source = "files" with data.paths'
        )
    try:
        tokens = [tokenizer.document(file.read_bytes()) for file in files]
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}: check the path and its permissions"
        raise ConfigError(why) from None
    documents = MemoryDocuments(
        STDLIB, np.concatenate(tokens), np.append(0, np.cumsum([len(file_tokens) for file_tokens in tokens]))
    )
    documents.description = f"the library of Python {platform.python_version()}, {documents.description}"
    return documents
