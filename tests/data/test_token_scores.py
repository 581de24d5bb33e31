"""Scores beside a folder of shards: read as written, by model and length, and refused if they are of something else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.shard_folders import make
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.data import pack
from titanmoe.data.batch import TEACHER_LOG_P
from titanmoe.data.held_out import split_held_out
from titanmoe.data.token_scores import (
    EXTENSION,
    LOCK,
    SCORES,
    SUMS,
    ScoreWriter,
    TopK,
    find_scores,
    open_teacher_log_probs,
)
from titanmoe.data.token_shards import MANIFEST, ShardDocuments

MODEL = "0123456789abcdef"


@pytest.fixture
def documents(tmp_path: Path) -> ShardDocuments:
    return ShardDocuments(make(tmp_path / "shards", [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]]))


def written(documents: ShardDocuments, seq_len: int = 8) -> Path:
    writer = ScoreWriter(documents, MODEL, seq_len, "float64")
    assert find_scores(documents, MODEL, seq_len) is None  # until it is complete
    writer.write(3, np.arange(3, 7) / 3)
    writer.close()
    assert [file.name for file in (documents.folder / SCORES).iterdir()] == [MODEL]
    return documents.folder / SCORES / MODEL


def test_they_are_read_as_written_over_all_shards_and_in_a_part(documents: ShardDocuments) -> None:
    written(documents)
    assert documents.reference_log_probs(0, 9) is None
    documents.stored_reference_log_probs = find_scores(documents, MODEL, 8)
    whole = documents.reference_log_probs(0, 9)
    np.testing.assert_array_equal(whole, [np.nan] * 3 + [1, 4 / 3, 5 / 3, 2] + [np.nan] * 2)
    rest, held_out = split_held_out(documents, 2, 1)
    np.testing.assert_array_equal(held_out.reference_log_probs(0, 2), whole[3:5])
    np.testing.assert_array_equal(rest.reference_log_probs(2, 5), whole[[2, 5, 6]])
    assert rest.stored_ranges(2, 5) == [(2, 3), (5, 7)]


def test_they_are_of_a_model_and_of_sequences_at_least_that_long(documents: ShardDocuments) -> None:
    written(documents)
    assert find_scores(documents, MODEL, 4) is not None
    assert find_scores(documents, MODEL, 9) is None and find_scores(documents, "0" * 16, 8) is None
    written(documents, 9)
    assert find_scores(documents, MODEL, 9) is not None


def test_whatever_else_they_are_is_refused(documents: ShardDocuments, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(documents)
    file, manifest = folder / f"00001-000.{EXTENSION}", folder / MANIFEST
    assert main(["data", "verify", str(documents.folder)]) == 0
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\1")
    assert main(["data", "verify", str(documents.folder)]) == 1
    assert f"{file} has changed since it was written: remove {folder}" in capsys.readouterr().err
    file.write_bytes(whole)
    sums = file.with_suffix(f".{SUMS}")
    sums.write_bytes(bytes([sums.read_bytes()[0] ^ 1]) + sums.read_bytes()[1:])
    assert main(["data", "verify", str(documents.folder)]) == 1
    assert f"{sums} has changed since it was written: remove {folder}" in capsys.readouterr().err
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="is missing or was truncated: remove "):
        find_scores(documents, MODEL, 8)
    for change, says in (
        ({"shards": "tokens:other"}, "has scores of other shards .tokens:other, and "),
        ({"format": "another"}, "is no manifest of scores"),
        ({"dtype": "int8"}, "was changed: it cannot be read"),
    ):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
        with pytest.raises(ConfigError, match=says):
            find_scores(documents, MODEL, 8)
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": "titanmoe scores"}))


def test_a_changed_bit_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    documents = ShardDocuments(make(tmp_path / "shards", [[[1] * 20_000], [[2] * 100]]))
    folder = written(documents)
    file = folder / f"00000-000.{EXTENSION}"
    data = bytearray(file.read_bytes())
    data[70_000] ^= 4  # in the second of three blocks of 64 KiB
    file.write_bytes(data)
    scores = find_scores(documents, MODEL, 8)
    assert scores.read(0, 100).shape == scores.read(19_000, 20_100)[:100].shape
    text = rf"{file} has changed since it was written, between bytes 65,536 and 131,072: remove {folder}, and the"
    for _ in range(2):
        with pytest.raises(ConfigError, match=text):
            scores.read(8_000, 9_000)
    (folder / f"00000-000.{SUMS}").write_bytes(bytes(12))
    with pytest.raises(ConfigError, match=rf"00000-000.{SUMS} has changed since it was written"):
        find_scores(documents, MODEL, 8).read(0, 1)


@pytest.mark.parametrize("how", ["sums", "no sums, as in folders made before"])
def test_zeroed_scores_are_refused(how: str, documents: ShardDocuments) -> None:
    folder = written(documents)
    file, manifest = folder / f"00001-000.{EXTENSION}", folder / MANIFEST
    file.write_bytes(bytes(file.stat().st_size))
    if how != "sums":
        for sums in folder.glob(f"*.{SUMS}"):
            sums.unlink()
        manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != SUMS}))
    scores = find_scores(documents, MODEL, 8)
    np.testing.assert_array_equal(scores.read(3, 5), [1, 4 / 3])  # of another shard
    with pytest.raises(ConfigError, match=rf"{file} has changed since it was written, between bytes 0 and 32"):
        scores.read(4, 6)


def test_records_are_checked_too(documents: ShardDocuments) -> None:
    top_k = TopK(2, 1.0, 16)
    writer = ScoreWriter(documents, MODEL, 8, "float32", top_k)
    writer.close()
    name = top_k.name(MODEL)
    assert len(open_teacher_log_probs(documents, name, top_k, 8).read(0, 9)) == 9
    file = documents.folder / SCORES / name / f"00000-000.{EXTENSION}"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(ConfigError, match="has changed since it was written"):
        open_teacher_log_probs(documents, name, top_k, 8).read(0, 9)


KILLED = """
import os, signal, sys
from pathlib import Path
from titanmoe.data.token_scores import ScoreWriter
from titanmoe.data.token_shards import ShardDocuments
ScoreWriter(ShardDocuments(Path(sys.argv[1])), sys.argv[2], 8, "float64")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_count_are_removed_and_not_those_of_another_that_goes_on(
    documents: ShardDocuments,
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(documents.folder), MODEL], check=False)
    (left,) = (file for file in (documents.folder / SCORES).iterdir() if file.is_dir())
    going_on = left.with_name(f".{MODEL}.elsewhere.1")
    going_on.mkdir()
    with going_on.with_name(going_on.name + LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = ScoreWriter(documents, MODEL, 8, "float64")
        assert going_on.is_dir() and not left.exists()
    writer.close()
    ScoreWriter(documents, MODEL, 9, "float64").close()
    assert [file.name for file in (documents.folder / SCORES).iterdir()] == [MODEL]


def test_a_full_disk_is_named_with_file_and_size(documents: ShardDocuments, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"00000-000.{EXTENSION}: No space left .*: 40 more bytes are needed and "):
        ScoreWriter(documents, MODEL, 8, "float64")
    assert not list((documents.folder / SCORES).iterdir())


def test_all_is_on_the_disk_before_the_folder_has_its_name(
    documents: ShardDocuments, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fsync, rename = [], os.fsync, os.rename

    def synced(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        calls.append(f"rename to {new.name}")
        rename(old, new)

    writer = ScoreWriter(documents, MODEL, 8, "float64")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    writer.close()
    before, after = calls[: calls.index(f"rename to {MODEL}")], calls[calls.index(f"rename to {MODEL}") + 1 :]
    assert {f"0000{n}-000.{kind}" for n in range(2) for kind in (EXTENSION, SUMS)} < {*before}
    assert before[-1] == writer.unfinished.name and after == [SCORES]


def test_labels_that_a_teacher_has_not_scored_teach_nothing(documents: ShardDocuments) -> None:
    """The file has NaN as log-probabilities of such labels, and a batch gives no class of them any probability."""
    top_k = TopK(2, 1.0, 16)
    writer = ScoreWriter(documents, MODEL, 8, "float32", top_k)
    writer.write(1, np.array([((3, 4), (-1, -2, -3))] * 2, top_k.record(np.dtype("float32"))))
    writer.close()
    documents.stored_teacher_log_probs = open_teacher_log_probs(documents, top_k.name(MODEL), top_k, 8)
    assert np.isnan(documents.teacher_log_probs(3, 9)["log_p"]).all()
    out = pack.empty_arrays(1, 8, False, pack.extra_field_specs(documents))
    pack._fill_labels(documents, 0, 9, out, 0, slice(0, 8))
    np.testing.assert_array_equal(out.extra_fields[TEACHER_LOG_P][0], [[-1, -2, -3]] * 2 + [[-np.inf] * 3] * 6)
