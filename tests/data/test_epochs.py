"""Runs of epochs: every sequence of every source once in each, whoever reads it; how many steps that is; what is
refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.data.shard_folders import make
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.load import read_draft
from titanmoe.config.schema import Config
from titanmoe.data import epochs as module
from titanmoe.data import pack
from titanmoe.data.loader import Loader
from titanmoe.data.sources import count_steps_of_epochs, open_training_sources
from titanmoe.train.launch import read_config, resolve

S, EPOCHS = 24, 2
SIZES = ([5 + 7 * n % 31 for n in range(40)], [2 + 5 * n % 50 for n in range(23)], [61, 3, 9])
"""Tokens of the documents of three sources."""
PACKINGS = ("stream", "documents", "best_fit")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[str]:
    """No two positions of all sources have the same token."""
    folder, first, paths = tmp_path_factory.mktemp("shards"), 0, []
    for name, sizes in zip("abc", SIZES, strict=True):
        ends = first + np.cumsum([0, *sizes])
        documents = [list(range(a, b)) for a, b in pairwise(ends)]
        paths.append(str(make(folder / name, [documents[:20], documents[20:]], vocab_size=10_000)))
        first = int(ends[-1])
    return paths


@pytest.fixture
def config(shards, monkeypatch) -> Config:
    monkeypatch.setattr(pack, "BUFFER", 7)  # several buffers
    config = Config()
    config.model.vocab_size = 10_000
    config.data.source, config.data.paths, config.data.prefetch = "files", list(shards), 1
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = S, 2, 24
    config.training.epochs = EPOCHS
    return config


def loaders(config: Config, ranks: int, state: dict | None = None) -> list[Loader]:
    made = [Loader(config, rank, ranks) for rank in range(ranks)]
    for loader in made:
        if state is not None:
            loader.load_state_dict(state)
    return made


def inputs(batches) -> list[tuple[int, ...]]:
    """Of each sample, the tokens that are not padding."""
    return [tuple(row[valid].tolist()) for b in batches for row, valid in zip(b.tokens_BS, b.valid_BS, strict=True)]


def whole_run(config: Config, ranks: int, state: dict | None = None, steps: int | None = None) -> list[tuple[int, ...]]:
    """All samples that are not padding, step by step; stops when a step has none."""
    made, out = loaders(config, ranks, state), []
    while steps != 0:
        step = sorted(sample for loader in made for sample in inputs(loader.next_step()) if sample)
        if not step:
            break
        out, steps = [*out, step], None if steps is None else steps - 1
        assert len(out) < 200, "it never ends"
    for loader in made:
        loader.close()
    return [sample for step in out for sample in step]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_sequence_comes_once_an_epoch_over_a_resume_on_other_ranks(config, packing, balance):
    config.data.packing = packing
    config.data.balance_work = balance and packing != "stream"
    whole = whole_run(config, 1)
    mix, _ = open_training_sources(config)
    assert len(whole) == mix.epoch_order.total
    if packing == "best_fit":
        pairs = sum(size - 1 for sizes in SIZES for size in sizes)
        seen = Counter(token for sample in whole for token in sample)
        assert len(seen) == pairs and set(seen.values()) == {EPOCHS}
    else:
        windows = sum((sum(sizes) - 1) // S for sizes in SIZES)
        assert len(whole) == EPOCHS * windows and {len(sample) for sample in whole} == {S}
        assert max(Counter(token for sample in whole for token in sample).values()) == EPOCHS

    # Three steps on two ranks, then the rest on three, with half of the batch.
    (first, other) = loaders(config, 2)
    before = [sample for _ in range(3) for loader in (first, other) for sample in inputs(loader.next_step())]
    state = json.loads(json.dumps(first.state_dict()))
    for loader in (first, other):
        loader.peek(), loader.close()
    config.training.global_batch_size = 12
    after = whole_run(config, 3, state)
    assert Counter(before + after) == Counter(whole)
    assert count_steps_of_epochs(config, 3, state["consumed"]) == 3 + -(-len(after) // 12)


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_the_first_epoch_is_over_before_the_second_begins(config, packing):
    config.data.packing, config.training.global_batch_size, config.training.local_batch_size = packing, 1, 1
    mix, _ = open_training_sources(config)
    samples = whole_run(config, 1)
    size = int(mix.epoch_order.count_EK[0].sum())
    for epoch in (samples[:size], samples[size:]):
        assert set(Counter(token for sample in epoch for token in sample).values()) == {1}
    names = ["abc"[source] for source in mix.epoch_order.source_indices(0, size)]
    assert len(set(names[: size // 2])) == 3, "sources are mixed within an epoch"
    assert mix.epoch_order.source_indices(0, size).tolist() != mix.epoch_order.source_indices(size, size).tolist()


def test_after_the_last_epoch_there_is_only_padding(config):
    config.data.packing, config.training.global_batch_size = "best_fit", 14
    mix, _ = open_training_sources(config)
    total = mix.epoch_order.total
    assert total % 14, "the last batch is not full"
    steps = count_steps_of_epochs(config, 0, 0)
    config.training.steps = steps
    (loader,) = loaders(config, 1)
    messages = []
    for _ in range(steps):
        batches = loader.next_step()
        messages += loader.epoch_messages
    filled = [sample for sample in inputs(batches) if sample]
    assert len(filled) == total - 14 * (steps - 1) and loader.consumed == total
    assert [*loader.digest_samples(batches)] == [*range(14 * (steps - 1), 14 * steps)]
    assert all((b.labels_BS[~b.valid_BS] == -100).all() for b in batches)
    assert not any(b.valid_BS.any() for b in loader.next_step()) and loader.consumed == total
    assert sorted(messages) == [f"data: {name} begins epoch 2" for name in "abc"]
    note = f"2 of every source: {total:,} sequences in {steps:,} steps"
    assert Loader(config, 0, 1).header_rows()["epochs"] == f"{note}, the last filled up with padding"


def test_a_run_that_is_over_goes_on_with_another_epoch(config):
    config.data.packing, config.training.global_batch_size, config.training.local_batch_size = "best_fit", 10, 1
    two, made = whole_run(config, 1), loaders(config, 1)
    steps = count_steps_of_epochs(config, 0, 0)
    for _ in range(steps):
        made[0].next_step()
    state = made[0].state_dict()
    config.training.epochs = 3
    third = whole_run(config, 2, state)
    assert set(Counter(token for sample in two + third for token in sample).values()) == {3}
    assert count_steps_of_epochs(config, steps, state["consumed"]) == steps + -(-len(third) // 10)


def test_the_number_of_sequences_is_kept_beside_the_shards(config, monkeypatch, tmp_path):
    folder = make(tmp_path / "kept", [[list(range(n, n + 10)) for n in range(0, 200, 10)]])
    config.data.packing, config.data.paths, config.training.seed = "best_fit", [str(folder)], 5
    config.training.global_batch_size = 2
    counted = open_training_sources(config)[0].epoch_order.count_EK.tolist()
    (kept,) = json.loads((folder / module.FILE).read_text()).values()
    assert [[n] for n in kept] == counted
    packed = []
    whole = pack.BestFitPacker._pack
    monkeypatch.setattr(pack.BestFitPacker, "_pack", lambda self: packed.append(self.epoch) or whole(self))
    assert open_training_sources(config)[0].epoch_order.count_EK.tolist() == counted and not packed
    config.training.epochs = 3
    assert open_training_sources(config)[0].epoch_order.count_EK[:2].tolist() == counted and set(packed) == {2}
    for field, value in (("seq_len", 30), ("seed", 6)):
        packed.clear()
        setattr(config.training, field, value)
        open_training_sources(config)
        assert packed, "another order"
    config.validation.held_out = 4
    packed.clear()
    open_training_sources(config)
    assert packed, "other documents"
    (folder / module.FILE).write_text('{"broken": ["many"]')
    assert open_training_sources(config)[0].epoch_order.total > 0


def test_a_folder_that_cannot_be_written_to_is_counted_each_time(config, monkeypatch, tmp_path):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    folder = make(tmp_path / "read_only", [[list(range(9))] * 9])
    config.data.packing, config.data.paths, config.training.global_batch_size = "best_fit", [str(folder)], 2
    monkeypatch.setattr(module, "write_json", refuse)
    assert open_training_sources(config)[0].epoch_order.total == 2 * sum(
        open_training_sources(config)[0].sources[0].packer.count(1)
    )
    assert not (folder / module.FILE).exists()


def test_several_sources_do_not_change_between_steps_and_epochs(config):
    state = Loader(config, 0, 1).state_dict()
    config.training.epochs = 0
    with pytest.raises(ConfigError, match=r"had training\.epochs when the state was saved and has not now"):
        Loader(config, 0, 1).load_state_dict(state)
    state = Loader(config, 0, 1).state_dict()
    config.training.epochs = 1
    with pytest.raises(ConfigError, match=r"had not training\.epochs when the state was saved and has now"):
        Loader(config, 0, 1).load_state_dict(state)
    config.data.paths = config.data.paths[:1]
    alone = Loader(config, 0, 1).state_dict()
    config.training.epochs = 0
    Loader(config, 0, 1).load_state_dict(alone)


def problems(*words: str) -> str:
    return "\n".join(read_draft([*words], COMPONENTS).problems)


def test_what_contradicts_epochs_is_refused(shards):
    files = ["--data.source=files", f"--data.paths={shards[0]}"]
    assert not problems("--training.epochs=2", *files)
    assert "--training.steps" not in problems("--training.epochs=2", "--training.steps=-1", *files)
    both = problems("--training.epochs=2", "--training.steps=100", *files)
    assert "training.epochs = 2 and training.steps = 100 both say how long the run is" in both
    assert "training.epochs = 0: set either" in problems("--training.steps=-1")
    assert "never ends" in problems("--training.epochs=2", "--data.source=synthetic")
    weighted = problems("--training.epochs=2", *files, "--data.weights=3")
    assert "goes through every source as often, and data.weights = [3.0]" in weighted
    both = problems("--training.epochs=2", "--training.steps=7", "--data.source=synthetic", "--data.weights=3")
    assert "both say" in both and "never ends" in both and "as often" in both


def test_steps_follow_from_epochs_wherever_a_run_stands(shards, capsys):
    words = ["--data.source=files", f"--data.paths={shards[0]}", "--training.epochs=3", f"--training.seq_len={S}"]
    words += ["--training.global_batch_size=8", "--model.vocab_size=10048"]
    config = read_draft(words, COMPONENTS).config
    assert config.training.steps == -1
    windows = (sum(SIZES[0]) - 1) // S
    total = 3 * windows
    assert resolve(config, 1, lambda _: {}).training.steps == -(-total // 8)
    record = {"step": 3, "loader": {"consumed": 12}}  # with a batch of 4
    assert resolve(config, 1, lambda _: record).training.steps == 3 + -(-(total - 12) // 8)
    over = {"step": 9, "loader": {"consumed": total + 5}}  # of a run that had a number of steps
    assert resolve(config, 1, lambda _: over).training.steps == 9
    config.profile.steps = [-(-total // 8) + 1]
    with pytest.raises(ConfigError, match=f"training.epochs = 3 take {-(-total // 8)} steps: choose earlier ones"):
        resolve(config, 1, lambda _: {})

    with pytest.raises(SystemExit):
        read_config([*words, "--job.ranks=1", "--print-config"], 1, COMPONENTS)
    printed = capsys.readouterr().out
    assert f"\nsteps = -1  # {-(-total // 8)} here\nepochs = 3\n" in printed


@pytest.mark.parametrize("folder_name", ["chats", "text"])
def test_chats_are_packed_whole_unless_packing_is_set(tmp_path: Path, folder_name):
    chats = folder_name == "chats"
    folder = make(tmp_path / folder_name, [[[1, 2, 3]]], [[[False, True, True]]] if chats else None)
    words = ["--data.source=files", f"--data.paths={folder}"]
    packing = "best_fit" if chats else "stream"
    assert read_draft(words, COMPONENTS).config.data.packing == packing
    assert read_draft([*words, "--data.packing=documents"], COMPONENTS).config.data.packing == "documents"
    assert read_draft([*words, "--data.format=chat"], COMPONENTS).config.data.packing == "best_fit"
    assert read_draft([f"--data.paths={folder}"], COMPONENTS).config.data.packing == "stream", "it reads no files"
