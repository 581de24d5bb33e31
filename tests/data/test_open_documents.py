"""An entry of data.paths becomes documents once, whichever run or rank asks first."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.data.shard_folders import make
from tests.data.test_read_files import lines
from tests.support import processes
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data import open_documents as open_module
from titanmoe.data.held_out import split_held_out
from titanmoe.data.open_documents import open_documents

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path) -> Config:
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "zwei"]))
    config = Config()
    config.data.source, config.data.paths = "files", [str(tmp_path / "a.jsonl")]
    config.job.dump_folder = str(tmp_path / "runs")
    return config


def problem(config, entry) -> str:
    with pytest.raises(ConfigError) as error:
        open_documents(config, str(entry))
    (only,) = error.value.problems
    return only


def test_the_second_start_finds_what_the_first_made(config, tmp_path, capsys, monkeypatch):
    (entry,) = config.data.paths
    first = open_documents(config, entry)
    assert (first.name, len(first), first.vocab_size) == ("a.jsonl", 2, 259)
    assert first.read(0, 5).tolist() == [256, *b"one", 257]
    assert "data: a.jsonl: " in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        assert open_documents(config, entry).fingerprint == first.fingerprint
    assert capsys.readouterr().out == ""
    (tmp_path / "a.jsonl").write_bytes(lines(["three"]))
    assert open_documents(config, entry).fingerprint != first.fingerprint
    config.data.cache = str(tmp_path / "elsewhere")
    assert len(open_documents(config, entry)) == 1 and len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_cache_that_cannot_be_made_is_refused(config, tmp_path):
    config.data.cache = str(tmp_path / "a.jsonl")
    assert f"data.cache: cannot write to {config.data.cache}/" in (message := problem(config, config.data.paths[0]))
    assert message.endswith("name another folder, or make shards with `titanmoe tokenize` and name those in data.paths")


def test_ranks_that_start_together_make_it_once(config, tmp_path):
    code = f"""
import sys
from titanmoe.config.schema import Config
from titanmoe.data.open_documents import open_documents
config = Config()
config.data.paths, config.job.dump_folder = {config.data.paths}, {config.job.dump_folder!r}
documents = open_documents(config, config.data.paths[0])
print(documents.fingerprint)
assert "torch" not in sys.modules
"""
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "zwei"] * 20_000))
    ranks = [processes.Started(["-c", code], os.environ | {"RANK": rank}) for rank in "01"]
    output = [rank.wait().stdout.splitlines() for rank in ranks]
    assert output[0][-1] == output[1][-1] and output[0][-1].startswith("tokens:")
    assert [len(line) for line in output] == [2, 1]  # rank 0 prints what was made
    assert len(list((tmp_path / "runs" / "cache").iterdir())) == 1


def test_a_vocabulary_that_does_not_fit_is_reported_before_the_work(config, tmp_path, monkeypatch, bpe):
    monkeypatch.setattr(open_module, "tokenize", None)
    config.model.vocab_size = 258
    message = problem(config, config.data.paths[0])
    assert "model.vocab_size = 258 is below 259" in message and "use 259 or more (320" in message
    config.data.tokenizer = str(bpe)
    assert "is below 295" in problem(config, config.data.paths[0])
    assert "is below 1000" in problem(config, make(tmp_path / "shards", [[[1, 2]]]))


def test_shards_are_known_by_their_manifest_and_share_a_tokenizer(config, tmp_path):
    config.model.vocab_size = 1000
    first, same = make(tmp_path / "first", [[[1, 2]]]), make(tmp_path / "same", [[[3]]])
    other = make(tmp_path / "other", [[[4]]], tokenizer={"identity": "else", "bos": None, "eos": 0})
    config.data.paths = [str(first), str(same), str(other), *config.data.paths]
    assert open_documents(config, str(first)).read(0, 2).tolist() == [1, 2]
    assert open_documents(config, str(same)).name == "same"
    assert "was made with another tokenizer (else) than" in problem(config, other)
    assert "another tokenizer (bytes)" in problem(config, config.data.paths[-1])
    config.data.format = "tokens"
    assert len(open_documents(config, str(same))) == 1
    assert "contains no token shards: there is no" in problem(config, tmp_path)


def test_an_unfinished_folder_is_not_read_as_text(config, tmp_path):
    (tmp_path / "half" / "work").mkdir(parents=True)
    (tmp_path / "half" / "work" / "plan.json").write_text("{}")
    assert "holds unfinished token shards: give the titanmoe tokenize command again" in problem(
        config, tmp_path / "half"
    )


def test_weights_of_labels_come_from_chats(config, tmp_path):
    config.data.label_weights = True
    assert "has no weights of labels: make its shards from chats with titanmoe tokenize --label-weights" in problem(
        config, config.data.paths[0]
    )
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 2}]
    (tmp_path / "chats.jsonl").write_bytes(lines([talk], field="messages"))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config.data.format, config.data.chat_template = "chat", str(tmp_path / "t.jinja")
    documents = open_documents(config, str(tmp_path / "chats.jsonl"))
    assert documents.label_weights(0, 4).tolist() == [0, 0, 2, 0]
    whole, rest = split_held_out(documents, 1, 1)
    assert len(whole) == 0 and rest.label_weights(1, 3).tolist() == [0, 2]
