import sysconfig

import pytest
import torch

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader
from titanmoe.data.tokenizer import ByteTokenizer
from titanmoe.tokens import IGNORE


@pytest.fixture
def config(tmp_path) -> Config:
    """A short text, so that a test does not read the whole standard library."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("Sphinx of black quartz, judge my vow. " * 40)
    (tmp_path / ".hidden").write_text("not read")
    config = Config()
    config.data.source, config.data.paths = "files", [str(tmp_path)]
    config.job.dump_folder = str(tmp_path / ".runs")
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 32, 2, 24
    return config


def step_samples(config: Config, data_ranks: int, steps: int) -> list[torch.Tensor]:
    """Tokens of every step in global sample order, put together from all data ranks."""
    loaders = [Loader(config, rank, data_ranks) for rank in range(data_ranks)]
    out = []
    for _ in range(steps):
        batches = [loader.next_step() for loader in loaders]
        rounds = range(loaders[0].microbatches)
        out.append(torch.cat([batches[rank][m].tokens_BS for m in rounds for rank in range(data_ranks)]))
    return out


@pytest.mark.parametrize("source", ["files", "synthetic"])
@pytest.mark.parametrize(("data_ranks", "local"), [(2, 2), (4, 3), (12, 2), (3, 8)])
def test_samples_are_the_same_however_they_are_shared_out(config, source, data_ranks, local):
    config.data.source = source
    alone = step_samples(config, 1, 3)
    config.training.local_batch_size = local
    for ours, reference in zip(step_samples(config, data_ranks, 3), alone, strict=True):
        assert torch.equal(ours, reference)


def test_other_steps_and_other_seeds_have_other_samples(config):
    first, second = step_samples(config, 1, 2)
    assert not torch.equal(first, second)
    config.training.seed = 1
    assert not torch.equal(step_samples(config, 1, 1)[0], first)


def test_a_batch_is_windows_of_the_text_with_the_next_tokens_as_labels(config):
    loader = Loader(config, 0, 2)
    text = ByteTokenizer().decode(loader.source.tokens.tolist())
    assert text.startswith("The quick") and text.endswith("vow. ") and "not read" not in text
    batches = loader.next_step()
    assert len(batches) == 6
    for batch in batches:
        assert batch.tokens_BS.shape == batch.labels_BS.shape == batch.valid_BS.shape == (2, 32)
        assert batch.tokens_BS.dtype == batch.labels_BS.dtype == torch.int64
        assert torch.equal(batch.tokens_BS[:, 1:], batch.labels_BS[:, :-1])
        assert batch.valid_BS.all() and batch.document_BS is None
        assert not (batch.labels_BS == IGNORE).any()
        for row in batch.tokens_BS:
            assert ByteTokenizer().decode(row.tolist()) in text


def test_every_window_can_be_drawn(config, tmp_path):
    (tmp_path / "short").write_text("ab")  # <bos> a b <eos>: two windows of three tokens
    config.data.paths, config.training.seq_len = [str(tmp_path / "short")], 2
    rows = {tuple(row) for row in step_samples(config, 1, 4)[0].tolist()}
    assert rows == {(256, 97), (97, 98)}


def test_synthetic_tokens_are_about_zipf_and_fill_the_vocabulary(config):
    config.data.source, config.model.vocab_size, config.training.seq_len = "synthetic", 100, 2000
    tokens = torch.cat(step_samples(config, 1, 4))
    share = torch.bincount(tokens.flatten(), minlength=100) / tokens.numel()
    rank = torch.arange(100.0)
    expected = torch.log((rank + 2) / (rank + 1)) / torch.log(torch.tensor(101.0))
    assert len(share) == 100
    assert (share - expected).abs().max() < 0.005


def test_resuming_continues_where_the_state_was_taken(config):
    loader = Loader(config, 1, 2)
    loader.next_step()
    state = loader.state_dict()
    peeked = loader.peek()[0].tokens_BS
    expected = [batch.tokens_BS for batch in loader.next_step()]
    assert torch.equal(peeked, expected[0])

    resumed = Loader(config, 1, 2)
    resumed.load_state_dict(state)
    assert resumed.consumed == 24
    assert all(torch.equal(a, b.tokens_BS) for a, b in zip(expected, resumed.next_step(), strict=True))


def test_resuming_on_other_data_is_refused_with_every_difference(config, tmp_path):
    state = Loader(config, 0, 1).state_dict()
    config.training.seed, config.training.seq_len = 7, 16
    (tmp_path / "a.txt").write_text("changed" * 100)
    with pytest.raises(ConfigError) as error:
        Loader(config, 0, 1).load_state_dict(state)
    assert len(error.value.problems) == 3
    assert "training.seed was 0" in error.value.problems[0] and "7 now" in error.value.problems[0]


def test_the_standard_library_is_found_and_alike_on_every_rank():
    config = Config()
    a, b = Loader(config, 0, 2), Loader(config, 1, 2)
    assert a.state_dict() == b.state_dict()
    assert len(a.source.tokens) > 1_000_000
    assert not torch.equal(a.peek()[0].tokens_BS, b.peek()[0].tokens_BS)


def test_data_errors_are_one_clear_line_each(config, tmp_path, monkeypatch):
    def problems() -> list[str]:
        with pytest.raises(ConfigError) as error:
            Loader(config, 0, 1)
        return error.value.problems

    (tmp_path / "empty").mkdir()
    config.data.paths = [str(tmp_path / "gone"), str(tmp_path / "empty"), str(tmp_path / "a.txt")]
    assert "gone' does not exist" in problems()[0]
    config.data.paths = config.data.paths[1:]
    assert "empty' holds no files" in problems()[0]

    config.data.paths, config.training.seq_len = [str(tmp_path / "a.txt")], 5000
    assert "needs 5001 tokens" in problems()[0] and "has 1802" in problems()[0]

    config.training.seq_len, config.model.vocab_size = 32, 258
    assert "model.vocab_size = 258" in problems()[0] and "use 259 or more" in problems()[0]

    config.data.source, config.model.vocab_size = "stdlib", 320
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    assert "finds no .py files" in problems()[0] and "data.paths" in problems()[0]
