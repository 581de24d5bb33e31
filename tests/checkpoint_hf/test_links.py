"""Hugging Face folders: the files they name are in them, and no link leads out of one, except in their cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from titanmoe.checkpoint.hf.config_json import read_json
from titanmoe.checkpoint.hf.safetensors_folder import INDEX, SINGLE, SafetensorsFolder, config_and_tokenizer_files
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    (tmp_path / "id_rsa").write_text("secret")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/../{}/x.safetensors", "a/../../x.safetensors", "/dev/zero"])
def test_an_index_names_files_of_its_folder(model: Path, name: str) -> None:
    (model / "a").mkdir()
    name = name.format(str(model.parent).lstrip("/"))
    (model / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigError) as refused:
        SafetensorsFolder(model)
    (problem,) = refused.value.problems
    assert f"{model} names {name!r}, which is not in it" in problem


def test_weights_and_companions_must_not_be_links(model: Path) -> None:
    (model / SINGLE).symlink_to("../x.safetensors")
    with pytest.raises(ConfigError, match="is a link to"):
        SafetensorsFolder(model)
    assert config_and_tokenizer_files(model) == {}
    (model / "tokenizer.json").symlink_to("../id_rsa")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to .*id_rsa"):
        config_and_tokenizer_files(model)
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        config_and_tokenizer_files(model)
    (model / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"config\.json is a link to /dev/zero"):
        read_json(model / "config.json")


def test_the_cache_of_hugging_face_consists_of_links_to_its_blobs(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "models--a--b"
    folder = cache / "snapshots/0123"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    os.rename(tmp_path / "x.safetensors", cache / "blobs/aa")
    (cache / "blobs/bb").write_text("{}")
    (folder / SINGLE).symlink_to("../../blobs/aa")
    (folder / "tokenizer.json").symlink_to("../../blobs/bb")
    assert SafetensorsFolder(folder).read("x", (0,), (3,)).tolist() == [1, 1, 1]
    assert config_and_tokenizer_files(folder)["tokenizer.json"].read_text() == "{}"
    (cache / "blobs/cc").symlink_to(tmp_path / "id_rsa")
    (folder / "vocab.json").symlink_to("../../blobs/cc")
    with pytest.raises(CheckpointError, match=r"vocab\.json is a link to .*id_rsa"):
        config_and_tokenizer_files(folder)
    (folder / "vocab.json").unlink()
    os.rename(cache / "blobs", tmp_path / "blobs")
    (cache / "blobs").symlink_to(tmp_path / "blobs")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to"):
        config_and_tokenizer_files(folder)
