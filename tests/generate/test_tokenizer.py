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
from titanmoe.generate.model import Trained, tokenizer_of


def words(folder: Path, count: int) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir()
    Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    return folder


@pytest.fixture
def found(tmp_path: Path) -> Trained:
    return Trained(tmp_path, Config(), 1)


def of(found: Trained, asked: str | None = None, **data: object) -> int:
    """Its number of tokens."""
    return tokenizer_of(replace(found, config=replace(found.config, data=Data(**data))), asked).vocab_size


def test_the_runs_own(found: Trained, tmp_path: Path) -> None:
    named, given = words(tmp_path / "named", 10), words(tmp_path / "given", 20)
    assert of(found) == 259
    assert of(found, tokenizer=str(named)) == 10
    assert of(found, str(given), tokenizer=str(named)) == 20
    words(found.path / "hf", 30)  # copied along from a Hugging Face model
    assert of(found) == 30
    assert of(found, tokenizer=str(named)) == 10
    assert of(found, "bytes") == 259


def test_token_shards_say_whose_they_are(found: Trained, tmp_path: Path) -> None:
    def shards(name: str, identity: str) -> str:
        message = {"identity": identity, "bos": None, "eos": 1}
        return str(shard_folders.make(tmp_path / name, [[[2, 3]]], tokenizer=message))

    theirs = words(tmp_path / "theirs", 20)
    foreign = shards("foreign", open_tokenizer(str(theirs)).identity)
    assert of(found, source="files", paths=[shards("bytes", "bytes")]) == 259
    with pytest.raises(ConfigError, match=r"token shards of the tokenizer .* name it with --tokenizer"):
        of(found, source="files", paths=[foreign])
    assert of(found, str(theirs), source="files", paths=[foreign]) == 20
    words(found.path / "hf", 20)
    assert of(found, source="files", paths=[foreign]) == 20
    assert of(found, source="files", paths=[shards("ours", "bytes")]) == 259


def test_a_hugging_face_folder_without_one(found: Trained) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: name one with --tokenizer"):
        of(replace(found, step=None))
    assert of(replace(found, step=None), "bytes") == 259
