"""The loader: the same samples however they are distributed, read ahead and resumed; which data is refused."""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_read_files import lines
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data import loader as module
from titanmoe.data.documents import MemoryDocuments
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.data.pack import StreamPacker, empty_arrays
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.data.tokenizer import ByteTokenizer
from titanmoe.tokens import IGNORE

PACKINGS = ("stream", "documents", "best_fit")


def text(words: int, salt: int) -> str:
    return " ".join(f"{salt}w{i}" for i in range(words))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Short documents in one folder and longer ones in another, tokenized once. Two files each: every loader lists
    them."""
    folder = tmp_path_factory.mktemp("texts")
    for name, count, longest in (("short", 60, 9), ("long", 40, 60)):
        (folder / name).mkdir()
        for half in (range(count // 2), range(count // 2, count)):
            documents = lines([text(1 + i * 7 % longest, i) for i in half])
            (folder / name / f"{half.start:03}.jsonl").write_bytes(documents)
    return folder


@pytest.fixture
def config(texts) -> Config:
    config = Config()
    config.data.source, config.data.paths = "files", [str(texts / "short"), str(texts / "long")]
    config.job.dump_folder = str(texts / "runs")
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 32, 2, 24
    config.data.prefetch = 1
    return config


def step_samples(config: Config, data_ranks: int, steps: int, state: dict | None = None) -> list[dict[int, tuple]]:
    """For every step, the samples by their number in it, from all data ranks."""
    loaders = [Loader(config, rank, data_ranks) for rank in range(data_ranks)]
    out = []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    for _ in range(steps):
        samples: dict[int, tuple] = {}
        for rank, loader in enumerate(loaders):
            for m, batch in enumerate(loader.next_step()):
                size = len(batch.tokens_BS)
                in_turn = [(m * data_ranks + rank) * size + b for b in range(size)]
                numbers = in_turn if batch.number_B is None else batch.number_B.tolist()
                for b, number in enumerate(numbers):
                    assert number not in samples
                    samples[number] = tuple(None if x is None else tuple(x[b].tolist()) for x in batch[:5])
        out.append(dict(sorted(samples.items())))
    for loader in loaders:
        loader.close()
    return out


@pytest.fixture(scope="module")
def of_one_rank() -> dict[tuple[str, bool], list[dict[int, tuple]]]:
    """Samples by how they are packed and whether they are distributed by their work."""
    return {}


@pytest.mark.parametrize(
    ("packing", "balance"),
    [("stream", False), ("documents", True), ("best_fit", False), ("best_fit", True), ("synthetic", False)],
)
@pytest.mark.parametrize(("data_ranks", "local"), [(4, 3), (12, 2), (3, 8)])
def test_samples_are_the_same_however_they_are_shared_out(config, of_one_rank, packing, data_ranks, local, balance):
    if packing == "synthetic":
        config.data.source = "synthetic"
    else:
        config.data.packing = packing
    config.data.balance_work = balance
    if (packing, balance) not in of_one_rank:
        of_one_rank[packing, balance] = step_samples(config, 1, 3)
    config.training.local_batch_size = local
    assert step_samples(config, data_ranks, 3) == of_one_rank[packing, balance]


def test_samples_are_identified_alike_however_they_are_distributed(config):
    config.data.packing, identities = "best_fit", []
    for config.data.balance_work in (False, True):
        loaders = [Loader(config, rank, 4) for rank in range(4)]
        steps = [(loader.next_step(), loader.next_step())[1] for loader in loaders]
        parts = [loader.digest_samples(step) for loader, step in zip(loaders, steps, strict=True)]
        identities.append({number: digest for part in parts for number, digest in part.items()})
    assert identities[0] == identities[1] and set(identities[0]) == set(range(24, 48))


def test_other_steps_and_other_seeds_have_other_samples(config):
    first, second = step_samples(config, 1, 2)
    assert not set(first.values()) & set(second.values())
    config.training.seed = 1
    assert step_samples(config, 1, 1)[0] != first


def ids(samples: list[dict[int, tuple]]) -> Counter:
    return Counter(sample for step in samples for sample in step.values())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_resume_on_other_data_ranks_loses_and_repeats_nothing(config, packing, workers):
    """Over epochs, with samples already read ahead when the state is taken, and another global batch afterwards."""
    config.data.packing, config.data.balance_work = packing, packing == "best_fit"
    config.data.weights = [3.0, 1.0]  # the short ones start over several times
    straight = step_samples(config, 1, 12)
    config.data.workers, config.data.prefetch = workers, 3
    loader = Loader(config, 1, 2)
    for _ in range(7):
        loader.next_step()
    loader.peek()
    state = loader.state_dict()
    assert state["consumed"] == 7 * 24 and loader.epochs["short"] > 1
    loader.close()
    config.training.local_batch_size, config.data.workers, config.data.prefetch = 1, 0, 1
    assert step_samples(config, 3, 5, state) == straight[7:]

    config.training.global_batch_size = 12
    halves = step_samples(config, 2, 10, state)
    assert ids(halves) == ids(straight[7:])


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_has_every_pair_once(config, packing):
    """Pairs of a token and its label, by their place in the sequence of all tokens."""
    config.data.packing, config.data.paths = packing, config.data.paths[1:]
    config.training.global_batch_size = 2
    (source,) = Loader(config, 0, 1).mix.sources
    packer = source.packer
    starts = packer.documents.starts
    for epoch in range(2):
        times_read = Counter()
        while (packer.state[0] if packing == "best_fit" else packer.sequences_taken // packer.per_epoch) == epoch:
            (segments,) = packer.take(1)
            assert segments.pairs_G.sum() <= 32
            for start, pairs in zip(segments.start_G.tolist(), segments.pairs_G.tolist(), strict=True):
                times_read.update(range(start, start + pairs))
        assert set(times_read.values()) == {1}
        if packing == "best_fit":
            assert set(times_read) == set(range(starts[-1])) - {end - 1 for end in starts[1:]}
        else:
            assert len(times_read) == packer.per_epoch * 32 > starts[-1] - 33


def test_windows_begin_elsewhere_in_other_epochs():
    stream = StreamPacker(
        MemoryDocuments("row", np.arange(1000), np.array([0, 1000])), 32, seed=0, separate_documents=False
    )
    offsets = set()
    for _ in range(40):
        (offset,) = {int(segments.start_G[0]) % 32 for segments in stream.take(stream.per_epoch)}
        offsets.add(offset)
    assert offsets == set(range(999 % 32 + 1)), "anywhere in the rest of the row, which an epoch leaves out"


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_lengths_are_those_of_the_documents_in_a_sequence(config, packing):
    """By which work is distributed."""
    config.data.packing = packing
    packer = Loader(config, 0, 1).mix.sources[0].packer
    sequences = list(packer.first_epoch())
    for segments, length_G in zip(sequences, packer.lengths(sequences), strict=True):
        out = empty_arrays(1, 32, separate_documents=True)
        packer.fill(segments, out, 0)
        assert length_G.tolist() == np.bincount(out.document_NS[out.valid_NS]).tolist()


def test_shares_are_those_of_the_weights_and_epochs_are_reported(config):
    loader = Loader(config, 0, 1)
    tokens = [int(source.packer.documents.starts[-1]) for source in loader.mix.sources]
    begun = []
    for _ in range(60):
        loader.next_step()
        begun += loader.epoch_messages
    report = loader.report()
    counts = [state for (state,) in loader.state]
    assert counts[0] / counts[1] == pytest.approx(
        tokens[0] / tokens[1], rel=0.15
    )  # by tokens: one pass over everything
    assert report["data.epoch.short"] == pytest.approx(counts[0] / (tokens[0] // 32), rel=0.01)
    assert report["data_wait_s"] >= 0
    assert begun[0].startswith("data: ") and begun[0].endswith("begins epoch 2")
    assert len(begun) == int(report["data.epoch.short"]) + int(report["data.epoch.long"])

    assert loader.header_rows()["sources"].startswith(f"short {tokens[0] / sum(tokens):.1%}, long ")

    config.data.weights = [1, 9]
    loader = Loader(config, 0, 1)
    assert loader.header_rows() == {"sources": "short 10.0%, long 90.0% of the samples"}
    for _ in range(60):
        loader.next_step()
    counts = [state for (state,) in loader.state]
    assert counts[1] / sum(counts) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_contents_of_a_sequence(config, packing):
    config.data.packing = packing
    decode = ByteTokenizer().decode
    loader = Loader(config, 0, 1)
    documents = [decode(s.packer.documents.read(a, b)) for s in loader.mix.sources for a, b in bounds(s)]
    row = "".join(documents)
    for batch in loader.next_step() + loader.next_step():
        assert batch.tokens_BS.dtype == batch.labels_BS.dtype == torch.int64
        for n in range(2):
            tokens, labels, valid = (x[n] for x in batch[:3])
            scored = labels != IGNORE
            assert not (scored & ~valid).any()
            if packing == "stream":
                assert batch.document_BS is None and batch.position_BS is None
                assert valid.all() and scored.all() and torch.equal(tokens[1:], labels[:-1])
                assert decode(tokens.tolist()) in row
                continue
            document, position = batch.document_BS[n], batch.position_BS[n]
            assert (document[~valid] == -1).all() and (document[valid] >= 0).all()
            assert packing == "best_fit" or valid.all()
            for number in document[valid].unique().tolist():
                own = document == number
                assert position[own].tolist() == list(range(int(own.sum())))
                inputs, next_ones = tokens[own].tolist(), labels[own].tolist()
                assert inputs[1:] == next_ones[:-1]
                assert any(decode([*inputs, *[t for t in next_ones[-1:] if t != IGNORE]]) in d for d in documents)
                assert ByteTokenizer.bos not in inputs[1:] and ByteTokenizer.bos not in next_ones
                if packing == "documents" and ByteTokenizer.eos in inputs:
                    assert next_ones[inputs.index(ByteTokenizer.eos)] == IGNORE
                if packing == "best_fit":
                    assert ByteTokenizer.eos not in inputs and IGNORE not in next_ones


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_document_that_ends_with_a_window_is_not_followed_by_the_next_ones_first_token(config, packing, monkeypatch):
    """Windows of 32 over documents of 32: each begins at a multiple of 32, its last label is the next document's."""
    tokens = np.arange(32 * 50 + 1)
    documents = MemoryDocuments("even", tokens, np.append(np.arange(0, 32 * 50, 32), len(tokens)))
    monkeypatch.setattr("titanmoe.data.sources._open_sources", lambda config, paths, fields: [documents])
    config.data.packing = packing
    (batch, *_) = Loader(config, 0, 1).next_step()
    assert (batch.tokens_BS[:, 0] % 32 == 0).all() and (batch.tokens_BS.diff()[:, :30] == 1).all()
    crosses = packing == "stream"
    assert torch.equal(batch.labels_BS[:, 31] == IGNORE, torch.full((2,), not crosses))


def bounds(source) -> list[tuple[int, int]]:
    starts = source.packer.documents.starts
    return [(int(starts[i]), int(starts[i + 1])) for i in range(len(starts) - 1)]


def test_best_fit_pads_little_and_cuts_only_what_is_too_long(config):
    config.data.packing = "best_fit"
    source = Loader(config, 0, 1).mix.sources[1]
    sequences = list(source.packer.first_epoch())
    used = sum(int(segments.pairs_G.sum()) for segments in sequences)
    assert used / (32 * len(sequences)) > 0.95
    whole = {(a, b - a - 1) for a, b in bounds(source)}
    segments = {(s, n) for p in sequences for s, n in zip(p.start_G.tolist(), p.pairs_G.tolist(), strict=True)}
    assert {(s, n) for s, n in whole if n <= 32} <= segments


@pytest.mark.parametrize("packing", PACKINGS)
def test_labels_that_do_not_count_are_ignored(config, packing, monkeypatch):
    """Only even tokens are labels here, as in a chat only those of assistant messages are."""
    tokens = np.arange(3000) % 250
    documents = MemoryDocuments("chat", tokens, np.arange(0, 3001, 20), tokens % 2 == 0)
    monkeypatch.setattr("titanmoe.data.sources._open_sources", lambda config, paths, fields: [documents])
    config.data.packing = packing
    for batch in Loader(config, 0, 1).next_step():
        scored = batch.labels_BS[batch.labels_BS != IGNORE]
        assert len(scored) and (scored % 2 == 0).all()
        even = (batch.tokens_BS % 2 == 1) & batch.valid_BS
        assert (batch.labels_BS[even] != IGNORE).float().mean() > 0.85  # all but those at boundaries


def test_workers_and_a_thread_read_the_same(config):
    config.data.packing, config.data.weights = "best_fit", [1.0, 1.0]
    by_thread = step_samples(config, 2, 4)
    config.data.workers, config.data.balance_work = 2, False
    assert step_samples(config, 2, 4) == by_thread


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_while_reading_ahead_are_reported(config, workers, monkeypatch):
    config.data.workers = workers
    loader = Loader(config, 0, 1)
    monkeypatch.setattr(ShardDocuments, "read", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loader.next_step()
    loader.close()

    def changed(*_: object) -> None:
        raise ConfigError(["a.tokens has changed"])

    loader = Loader(config, 0, 1)
    monkeypatch.setattr(ShardDocuments, "read", changed)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            loader.next_step()
        assert refused.value.problems == ["a.tokens has changed"]
    loader.close()


def test_tokens_that_stand_for_images_are_refused(config):
    usual, never = ord("w"), 300
    config.model.media_tokens = [never]
    loader = Loader(config, 0, 1)
    loader.next_step()
    loader.close()
    config.model.media_tokens = [never, usual]
    loader = Loader(config, 0, 1)
    with pytest.raises(
        ConfigError, match=rf"the data has token {usual}, which stands for an image .* media_tokens = \[\]"
    ):
        loader.next_step()
    loader.close()
    config.data.source = "synthetic"
    loader = Loader(config, 0, 1)
    loader.next_step()
    loader.close()


def test_a_signal_to_the_group_leaves_the_workers_alone(config):
    """Without this the rank could not take the steps, or the save, that a signal asks for."""
    import multiprocessing
    import os

    config.data.workers, config.data.prefetch = 2, 1
    before = set(multiprocessing.active_children())
    loader = Loader(config, 0, 1)
    loader.next_step()
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    loader.peek()
    assert len({os.getpgid(worker.pid) for worker in workers} | {os.getpgid(0)}) == 3
    loader.close()
    assert not any(worker.is_alive() for worker in workers)


def test_resuming_continues_where_the_state_was_taken(config):
    loader = Loader(config, 1, 2)
    loader.next_step()
    state = loader.state_dict()
    peeked = loader.peek()[0].tokens_BS
    assert loader.state_dict() == state
    expected = [batch.tokens_BS for batch in loader.next_step()]
    assert torch.equal(peeked, expected[0])

    loader.load_state_dict(state)
    assert loader.consumed == 24
    assert all(torch.equal(a, b.tokens_BS) for a, b in zip(expected, loader.next_step(), strict=True))


def test_resuming_on_other_data_is_refused_with_every_difference(config, tmp_path):
    state = Loader(config, 0, 1).state_dict()
    config.training.seed, config.training.seq_len, config.data.packing = 7, 16, "documents"
    (tmp_path / "000.txt").write_text("another" * 100)
    config.data.paths = [str(tmp_path)]
    config.job.dump_folder = str(tmp_path / ".runs")
    with pytest.raises(ConfigError) as error:
        Loader(config, 0, 1).load_state_dict(state)
    assert len(error.value.problems) == 4
    assert "training.seed was 0" in error.value.problems[0] and "7 now" in error.value.problems[0]
    was, now = error.value.problems[3].split("; is now: ")
    assert "the data or its tokenizer is not what the run was trained on; was: " in was
    assert "60 documents" in was and f"{tmp_path} through tokenizer 'bytes', 1 documents, 702 tokens" in now
    assert not re.search("[0-9a-f]{16}", was.replace(str(config.data.paths), "")), "a digest explains nothing"


def test_held_out_documents_are_never_trained_on_and_the_rest_is(config):
    config.data.packing, config.data.paths, config.training.global_batch_size = "best_fit", config.data.paths[1:], 4
    (every,) = Loader(config, 0, 1).mix.sources
    config.validation.held_out, config.validation.steps = 6, 0
    (rest,) = Loader(config, 0, 1).mix.sources
    sets = []
    for source in (every, rest):
        sets.append([tuple(source.packer.documents.read(a, b).tolist()) for a, b in bounds(source)])
    assert sets[1] == [document for i, document in enumerate(sets[0]) if i % 6 != 5]
    validated = []
    for batches in ValidationSet(config, 0, 1, Loader(config, 0, 1).held_out):
        for batch in batches:
            for tokens, labels, document in zip(batch.tokens_BS, batch.labels_BS, batch.document_BS, strict=True):
                for number in set(document.tolist()) - {-1}:
                    own = document == number
                    validated.append((*tokens[own].tolist(), int(labels[own][-1])))
    held_out = sorted(document for i, document in enumerate(sets[0]) if i % 6 == 5)
    pairs = sorted(document[a : a + 33] for document in held_out for a in range(0, len(document) - 1, 32))
    assert sorted(validated) == pairs


def test_each_source_may_name_its_text_differently(config, tmp_path):
    for name, rows in {"a.jsonl": {"text": "x" * 40, "body": "no"}, "b.jsonl": {"body": "y" * 40}}.items():
        (tmp_path / name).write_text(json.dumps(rows) + "\n")
    config.data.paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    config.training.local_batch_size = config.training.global_batch_size = 1
    with pytest.raises(ConfigError, match=r"b.jsonl:1: has no field 'text', it has 'body': .* data.fields for each"):
        Loader(config, 0, 1)
    config.data.fields = ["text", "body"]
    read = [source.packer.documents.read(1, 41).tolist() for source in Loader(config, 0, 1).mix.sources]
    assert read == [[*b"x" * 40], [*b"y" * 40]]


def test_sources_too_small_to_hold_out_from(config):
    config.validation.held_out, config.data.packing = 50, "best_fit"
    short, long = ValidationSet(config, 0, 1, Loader(config, 0, 1).held_out).mix.sources
    assert (short.name, len(short.packer.documents)) == ("short", 1)  # of 60 documents; the other has 40
    whole = int(Loader(config, 0, 1).mix.sources[1].packer.documents.starts[-1])
    held_out_tokens = int(long.packer.documents.starts[-1])
    assert long.name == "long" and held_out_tokens == (whole + held_out_tokens) // 50
    config.validation.held_out = 700
    with pytest.raises(ConfigError, match="holds out every 700th document, but no source has that many, or enough"):
        ValidationSet(config, 0, 1, Loader(config, 0, 1).held_out)


@pytest.mark.parametrize("data_ranks", [1, 3])
def test_a_validation_set_is_whole_once_and_alike_each_time(config, data_ranks):
    config.validation.paths, config.validation.steps, config.training.local_batch_size = config.data.paths, 0, 1
    sets = [ValidationSet(config, rank, data_ranks) for rank in range(data_ranks)]
    rows = []
    for _ in range(2):
        samples = Counter()
        lengths = {sum(1 for _ in validation_set) for validation_set in sets}
        assert len(lengths) == 1
        for validation_set in sets:
            for batches in validation_set:
                for batch in batches:
                    assert (batch.valid_BS.any(1) == batch.valid_BS.all(1)).all()
                    samples.update(tuple(row.tolist()) for row in batch.tokens_BS[batch.valid_BS.any(1)])
        rows.append(samples)
    assert rows[0] == rows[1]
    config.validation.steps = 1
    assert sum(1 for _ in ValidationSet(config, 0, 1)) == 1
    packers = [source.packer for source in sets[0].mix.sources]
    assert sum(rows[0].values()) == sum(packer.per_epoch for packer in packers)


def test_validation_on_synthetic_tokens_is_alike_each_time(config):
    config.data.source, config.data.paths, config.validation.steps = "synthetic", [], 2
    validation_set = ValidationSet(config, 0, 1)
    first, again = ([batch.tokens_BS for batches in validation_set for batch in batches] for _ in range(2))
    assert torch.equal(torch.cat(first), torch.cat(again)) and not torch.equal(first[0], first[-1])


def test_synthetic_tokens_are_about_zipf_and_fill_the_vocabulary(config):
    config.data.source, config.data.paths, config.model.vocab_size, config.training.seq_len = "synthetic", [], 100, 2000
    tokens = torch.tensor([sample[0] for step in step_samples(config, 1, 4) for sample in step.values()])
    share = torch.bincount(tokens.flatten(), minlength=100) / tokens.numel()
    rank = torch.arange(100.0)
    expected = torch.log((rank + 2) / (rank + 1)) / torch.log(torch.tensor(101.0))
    assert len(share) == 100
    assert (share - expected).abs().max() < 0.005


def test_the_standard_library_is_found_and_alike_on_every_rank():
    config = Config()
    a, b = Loader(config, 0, 2), Loader(config, 1, 2)
    assert a.state_dict() == b.state_dict()
    assert a.mix.sources[0].packer.pairs > 1_000_000
    assert not torch.equal(a.peek()[0].tokens_BS, b.peek()[0].tokens_BS)


def test_data_errors_are_one_clear_line_each(config, tmp_path, monkeypatch):
    def problems() -> list[str]:
        with pytest.raises(ConfigError) as error:
            Loader(config, 0, 1)
        return error.value.problems

    (tmp_path / "empty").mkdir()
    short = config.data.paths[0]
    config.data.paths = [str(tmp_path / "gone"), str(tmp_path / "empty"), short]
    gone, empty = problems()
    assert "gone' does not exist" in gone and "empty' contains no files" in empty

    config.data.paths, config.training.seq_len = [short], 5000
    documents = [line for file in Path(short).glob("*.jsonl") for line in file.read_text().splitlines()]
    tokens = sum(len(json.loads(line)["text"]) + 2 for line in documents)
    assert "needs 5001 tokens" in problems()[0] and f"has {tokens}" in problems()[0]

    config.training.seq_len, config.training.global_batch_size = 200, 24
    assert f"{tokens // 200} samples" in problems()[0] and "global_batch_size = 24" in problems()[0]

    config.training.seq_len, config.model.vocab_size = 32, 258
    assert "model.vocab_size = 258" in problems()[0] and "259 or more" in problems()[0]

    config.data.source, config.model.vocab_size = "stdlib", 320
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    assert "finds no .py files" in problems()[0] and "data.paths" in problems()[0]

    none = MemoryDocuments("none", np.zeros(0, np.int64), np.zeros(1, np.int64))
    marks = MemoryDocuments("marks", np.full(9, 257), np.arange(10))
    monkeypatch.setattr("titanmoe.data.sources._open_sources", lambda config, paths, fields: [none, marks])
    config.data.packing = "best_fit"
    first, second = problems()
    assert "none (data.source) has no documents" in first and "two tokens are the least" in second


def test_a_loader_that_is_dropped_ends_its_thread(config):
    import gc
    import threading

    loader = Loader(config, 0, 1)
    loader.next_step()
    threads = [t for t in threading.enumerate() if t.name == "titanmoe-data"]
    assert module and threads
    del loader
    gc.collect()
    assert not any(t.is_alive() for t in threads)
