"""Which tokenizer belongs to a checkpoint's model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data import shard_folders
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config, Data
from titanmoe.data.tokenizer import open_tokenizer
from titanmoe.generate.model import TrainedModel, tokenizer_of


def words(folder: Path, count: int) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir()
    Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    return folder


@pytest.fixture
def trained(tmp_path: Path) -> TrainedModel:
    return TrainedModel(tmp_path, Config(), 1)


def vocab_size_of(trained: TrainedModel, name: str | None = None, **data: object) -> int:
    """Its number of tokens."""
    return tokenizer_of(replace(trained, config=replace(trained.config, data=Data(**data))), name).vocab_size


def test_the_runs_own(trained: TrainedModel, tmp_path: Path) -> None:
    in_config, option = words(tmp_path / "named", 10), words(tmp_path / "given", 20)
    assert vocab_size_of(trained) == 259
    assert vocab_size_of(trained, tokenizer=str(in_config)) == 10
    assert vocab_size_of(trained, str(option), tokenizer=str(in_config)) == 20
    words(trained.path / "hf", 30)  # copied along from a Hugging Face model
    assert vocab_size_of(trained) == 30
    assert vocab_size_of(trained, tokenizer=str(in_config)) == 10
    assert vocab_size_of(trained, "bytes") == 259


def test_token_shards_say_whose_they_are(trained: TrainedModel, tmp_path: Path) -> None:
    def shards(name: str, identity: str) -> str:
        tokenizer = {"identity": identity, "bos": None, "eos": 1}
        return str(shard_folders.make(tmp_path / name, [[[2, 3]]], tokenizer=tokenizer))

    foreign_tokenizer = words(tmp_path / "theirs", 20)
    foreign = shards("foreign", open_tokenizer(str(foreign_tokenizer)).identity)
    assert vocab_size_of(trained, source="files", paths=[shards("bytes", "bytes")]) == 259
    with pytest.raises(ConfigError, match=r"token shards of the tokenizer .* name it with --tokenizer"):
        vocab_size_of(trained, source="files", paths=[foreign])
    assert vocab_size_of(trained, str(foreign_tokenizer), source="files", paths=[foreign]) == 20
    words(trained.path / "hf", 20)
    assert vocab_size_of(trained, source="files", paths=[foreign]) == 20
    assert vocab_size_of(trained, source="files", paths=[shards("ours", "bytes")]) == 259


def test_a_hugging_face_folder_without_one(trained: TrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: name one with --tokenizer"):
        vocab_size_of(replace(trained, step=None))
    assert vocab_size_of(replace(trained, step=None), "bytes") == 259
