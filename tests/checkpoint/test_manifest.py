"""manifest.json: every bit flip is noticed, and no type in it is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import folders
from titanmoe.checkpoint import layout, manifest
from titanmoe.checkpoint.manifest import Checksum, Manifest
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.state import refused_record
from titanmoe.cli import main
from titanmoe.config.fields import flatten
from titanmoe.config.schema import Config

HERE = Path("run/step-00000003/manifest.json")
RECORD = {"step": 3, "tokens": 96.0, "loader": {"consumed": 12, "sources": [[0, 5]], "seed": 1}}


def test_every_flip_of_every_bit_is_noticed() -> None:
    data = Manifest(3, 1, {"a.distcp": Checksum(10, 77), "hf/config.json": Checksum(2, 5)}, RECORD).text().encode()
    assert manifest.parse(data, HERE).record == RECORD
    unnoticed = []
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        try:
            manifest.parse(bytes(flipped), HERE)
            unnoticed.append(at)
        except CheckpointError as error:
            assert str(error).startswith(f"{HERE} is damaged")
    assert unnoticed == []


def test_a_manifest_without_its_checksum_is_damaged_and_one_of_an_older_format_is_not_read(tmp_path: Path) -> None:
    path = folders.make(tmp_path, 3)
    content = folders.manifest_of(path)
    content.pop("sha256")
    with pytest.raises(CheckpointError, match="there is no SHA-256 at the top"):
        manifest.parse(json.dumps(content).encode(), HERE)
    with pytest.raises(CheckpointError, match="has checkpoint format 1, this titanmoe reads format 2: use the version"):
        manifest.parse(json.dumps(content | {"format": 1}).encode(), HERE)


DEEP: Any = 1
for _ in range(40):
    DEEP = [DEEP]

WRONG = {
    "step": ({"step": "3"}, 'step is "3", not a count'),
    "negative": ({"step": -3}, "step is -3, not a count"),
    "true": ({"number": True}, "number is true, not a count"),
    "files": ({"files": []}, "files is [], not a table"),
    "sum": ({"files": {"a": 3}}, "files.a is 3, not a table"),
    "bytes": ({"files": {"a": {"bytes": 2**70, "crc32": "00000000"}}}, "files.a.bytes is"),
    "crc32": ({"files": {"a": {"bytes": 2, "crc32": "-1"}}}, 'files.a.crc32 is "-1", not 8 hexadecimal digits'),
    "record": ({"record": None}, "record is None, not a table"),
    "tokens": ({"record": {"tokens": "many"}}, 'record.tokens is "many", not a number'),
    "config": ({"record": {"config": {"model": 3}}}, "record.config.model is 3, not a table"),
    "batch": ({"record": {"config": {"training": {"global_batch_size": "8"}}}}, "global_batch_size is"),
    "loader": ({"record": {"loader": 7}}, "record.loader is 7, not a table"),
    "sources": ({"record": {"loader": {"sources": [[0, "x"]]}}}, 'record.loader.sources[0][1] is "x", not int'),
    "mapping": ({"record": {"mapping": {"attention": {"tp": 1.5}}}}, "record.mapping.attention.tp is 1.5, not a count"),
    "versions": ({"record": {"versions": [2]}}, "record.versions is [2], not a table"),
    "deep": ({"record": {"x": DEEP}}, "record.x... is nested deeper than 16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_one_line_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    entries, words = WRONG[name]
    path = folders.make(tmp_path, 7)
    folders.rewrite(path, **entries)
    with pytest.raises(CheckpointError) as refused:
        layout.read_manifest(path)
    assert words in str(refused.value) and f"{path / layout.MANIFEST} is damaged" in str(refused.value)
    for action in ("inspect", "verify"):
        assert main(["checkpoint", action, str(path)]) in (1, 2)
        out, err = capsys.readouterr()
        assert words in out + err and (out + err).count("\n") == 1


NONSENSE = [b"[" * 100_000, b'{"format": ' * 5_000, b"\xff\xfe\x00", b'{"format": ' + b"9" * 10_000]


@pytest.mark.parametrize("text", NONSENSE, ids=["lists", "tables", "bytes", "digits"])
def test_nesting_and_nonsense_are_one_line(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="is damaged"):
        manifest.parse(text, HERE)


def test_a_manifest_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"manifest\.json has more than 100 bytes"):
        layout.read_manifest(folders.make(tmp_path, 7))


def test_a_config_of_wrong_types_is_not_built(tmp_path: Path) -> None:
    words = r'm: model.dim = "big" is not an integer; moe.dispatcher = 3 is not a string'
    with pytest.raises(CheckpointError, match=words):
        manifest.recorded_fields({"config": {"model": {"dim": "big"}, "moe": {"dispatcher": 3}}}, Path("m"))
    assert manifest.recorded_fields({"config": {"model": {"dim": 64}}}, Path("m")) == {"model.dim": 64}


def test_an_unknown_field_of_a_config_is_refused_by_name(tmp_path: Path) -> None:
    words = r'm: this titanmoe does not know model.later = \[2\], news.is = "good": use the version that wrote it'
    with pytest.raises(CheckpointError, match=words):
        manifest.recorded_fields({"config": {"model": {"dim": 64, "later": [2]}, "news": {"is": "good"}}}, Path("m"))
    path, now = folders.make(tmp_path, 3), flatten(Config())
    folders.rewrite(path, record={"config": {"optimizer": {"later": 3.0}}})
    problems = refused_record(layout.read_manifest(path).record, now, path, False, True, "")
    assert problems == ["this titanmoe does not know optimizer.later = 3.0: use the version that wrote it"]
