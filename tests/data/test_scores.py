"""Scores beside a folder of shards: read as written, by model and length, and refused if they are of something else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.shard_folders import make
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.data.held_out import split
from titanmoe.data.scores import EXTENSION, SCORES, ScoreWriter, scores_of
from titanmoe.data.shards import MANIFEST, ShardDocuments

MODEL = "0123456789abcdef"


@pytest.fixture
def documents(tmp_path: Path) -> ShardDocuments:
    return ShardDocuments(make(tmp_path / "shards", [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]]))


def written(documents: ShardDocuments, seq_len: int = 8) -> Path:
    writer = ScoreWriter(documents, MODEL, seq_len, "float64")
    assert scores_of(documents, MODEL, seq_len) is None  # until it is complete
    writer.put(3, np.arange(3, 7) / 3)
    writer.close()
    assert [file.name for file in (documents.folder / SCORES).iterdir()] == [MODEL]
    return documents.folder / SCORES / MODEL


def test_they_are_read_as_written_over_all_shards_and_in_a_part(documents: ShardDocuments) -> None:
    written(documents)
    assert documents.scores(0, 9) is None
    documents.stored_scores = scores_of(documents, MODEL, 8)
    whole = documents.scores(0, 9)
    np.testing.assert_array_equal(whole, [np.nan] * 3 + [1, 4 / 3, 5 / 3, 2] + [np.nan] * 2)
    rest, held_out = split(documents, 2, 1)
    np.testing.assert_array_equal(held_out.scores(0, 2), whole[3:5])
    np.testing.assert_array_equal(rest.scores(2, 5), whole[[2, 5, 6]])
    assert rest.ranges(2, 5) == [(2, 3), (5, 7)]


def test_they_are_of_a_model_and_of_sequences_at_least_that_long(documents: ShardDocuments) -> None:
    written(documents)
    assert scores_of(documents, MODEL, 4) is not None
    assert scores_of(documents, MODEL, 9) is None and scores_of(documents, "0" * 16, 8) is None
    written(documents, 9)
    assert scores_of(documents, MODEL, 9) is not None


def test_whatever_else_they_are_is_refused(documents: ShardDocuments, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(documents)
    file, manifest = folder / f"00001-000.{EXTENSION}", folder / MANIFEST
    assert main(["data", "verify", str(documents.folder)]) == 0
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\1")
    assert main(["data", "verify", str(documents.folder)]) == 1
    assert f"{file} has changed since it was written: remove {folder}" in capsys.readouterr().err
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="is missing or was truncated: remove "):
        scores_of(documents, MODEL, 8)
    for change, says in (
        ({"shards": "tokens:other"}, "has scores of other shards .tokens:other, and "),
        ({"format": "another"}, "is no manifest of scores"),
        ({"dtype": "int8"}, "was changed: it cannot be read"),
    ):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
        with pytest.raises(ConfigError, match=says):
            scores_of(documents, MODEL, 8)
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": "titanmoe scores"}))
