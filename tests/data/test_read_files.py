"""Documents come out as they went in, however compressed and split; problems are reported with file and line."""

import gzip
import json
import re
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from titanmoe.config import ConfigError
from titanmoe.data.read_files import find_files, read_records, split_spans
from titanmoe.data.record_reader import BadRecord, RecordReader

TEXTS = ["one", "zwei\nlines", "", "drei 日本", "vier " * 50]


def lines(texts, field="text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def write(file, kind, texts):
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": [0] * len(texts)}), file, row_group_size=2)
    elif kind.endswith("gz"):
        file.write_bytes(gzip.compress(lines(texts[:2])) + gzip.compress(lines(texts[2:])))
    elif kind.endswith("zst"):
        packer = zstandard.ZstdCompressor()
        file.write_bytes(packer.compress(lines(texts[:2])) + packer.compress(lines(texts[2:])))
    else:
        file.write_bytes(lines(texts))
    return file


def read(paths, format="auto", field="text", size=1 << 20):
    entries = []
    for source in find_files([str(path) for path in paths], format):
        for span in split_spans(source, size):
            reader = RecordReader(span, field)
            entries += read_records(reader)
            assert 0 <= reader.at <= span.bytes
    return entries


def values(entries):
    return [entry.value for entry in entries]


@pytest.mark.parametrize("size", [1 << 20, 40])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet"])
def test_records_of_every_kind(tmp_path, kind, size):
    assert values(read([write(tmp_path / f"a.{kind}", kind, TEXTS)], size=size)) == TEXTS


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=6), max_size=8), st.integers(1, 60), st.booleans())
def test_cuts_lose_and_repeat_no_line(tmp_path_factory, texts, size, ends):
    file = tmp_path_factory.getbasetemp() / "cut.jsonl"
    text = lines(texts) + b"\n" * (not texts)
    file.write_bytes(text if ends else text.rstrip(b"\n") or b"\n")
    entries = read([file], size=size)
    assert values(entries) == texts
    for entry in entries[-1:]:
        assert entry.where() == f"{file}:{len(texts)}"


def test_a_text_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("über\n\nalles\r\n".encode())
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"packed"))
    assert values(read([tmp_path])) == ["über\n\nalles\r\n", "packed"]


def test_folders_and_globs(tmp_path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "README.md", "sub/c.jsonl", "sub/.git/d.jsonl", ".e.jsonl"):
        (tmp_path / name).write_bytes(lines([name]))

    def names(paths, format="auto"):
        return [
            source.file.removeprefix(str(tmp_path) + "/")
            for source in find_files([str(tmp_path / p) for p in paths], format)
        ]

    assert names(["b.jsonl", "a.jsonl"]) == ["b.jsonl", "a.jsonl"]
    assert names([""]) == ["README.md", "a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names([""], "jsonl") == names([""], "chat") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names(["**/*.jsonl"]) == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names(["s*"]) == ["sub/c.jsonl"]
    assert names(["s*/**"]) == ["sub/c.jsonl"], "a folder and the file inside it both match"
    assert names(["README.md"], "jsonl") == ["README.md"]


def test_paths_without_files_are_reported_together(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "00000-000.tokens").write_bytes(b"1")
    with pytest.raises(ConfigError) as error:
        find_files([str(tmp_path / name) for name in ("gone", "empty", "a.jsonl", "*.txt", "shards")], "auto")
    gone, empty, glob, shards, zero = error.value.problems
    assert "gone' does not exist" in gone and "empty' contains no files" in empty and "*.txt' does not exist" in glob
    assert "a.jsonl is empty" in zero and "holds token shards" in shards


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a', r"is not JSON \(Unterminated string"),
        (b'{"text": "a"} {"text": "b"}', "one whole object per line"),
        (b'["a"]', "is a list, not an object"),
        (b'"a"', "is a text, not an object"),
        (b'{"body": "a", "id": 3}', "has no field 'text', it has 'body', 'id'"),
        (b'{"messages": []}', "read it with --format chat"),
        (b'{"text": "\xff"}', "byte 10 of the line is not UTF-8"),
        (b'{"text": "a\\ud800"}', "half a surrogate pair"),
        (b"[" * 20_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_reported_by_file_and_number(tmp_path, line, says):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(["one", "two"]) + b"\n" + line + b"\n" + lines(["three"]))
    for size in (1 << 20, 7 + len(line) // 20):
        first, second, bad, three = read([file], size=size)
        assert (first.value, second.value, three.value) == ("one", "two", "three")
        assert isinstance(bad, BadRecord)
        assert re.search(f"^{re.escape(str(file))}:4: .*{says}", bad.why), bad.why


def test_bad_files(tmp_path):
    def why(name, data):
        (tmp_path / name).write_bytes(data)
        try:
            (entry,) = read([tmp_path / name])
        except ConfigError as error:
            return error.problems[0]
        return entry.why

    assert why("a.txt", b"ab\nc\xffd").endswith("a.txt:2: byte 4 is not UTF-8 (invalid start byte)")
    assert why("b.txt.gz", gzip.compress(b"")).endswith("b.txt.gz is empty")
    assert why("b.jsonl.gz", gzip.compress(b"")).endswith("b.jsonl.gz is empty")
    long = lines([str(n) for n in range(3000)])
    assert "in the middle of compressed data" in why("c.jsonl.gz", gzip.compress(long)[:-200])
    assert "in the middle of compressed data" in why("c.jsonl.zst", zstandard.ZstdCompressor().compress(long)[:-200])
    assert "c.jsonl.gz cannot be read" in why("c.jsonl.gz", b"no gzip")
    assert "c.jsonl.zst cannot be read" in why("c.jsonl.zst", b"no zstandard")
    assert "d.parquet cannot be read" in why("d.parquet", b"no parquet")


def test_conversations_of_parquet(tmp_path):
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [talk, talk[1:]]}), tmp_path / "a.parquet")
    assert values(read([tmp_path], format="chat", field="messages")) == [talk, talk[1:]]


def test_bad_rows(tmp_path):
    file = write(tmp_path / "a.parquet", "parquet", ["one", None, "three"])
    assert [entry.where() for entry in read([file], size=1)] == [f"{file}: row {n}" for n in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"a.parquet: has no field 'body', it has 'text', 'n'"):
        read([file], field="body")


@pytest.mark.parametrize(("module", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow.parquet", "a.parquet")])
def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, module, name):
    write(tmp_path / name, name.partition(".")[2], TEXTS)
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"needs the package {module.partition('.')[0]}: pip install"):
        read([tmp_path / name])
