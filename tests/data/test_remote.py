"""Files at URLs give what the same files on the disk do; the store is fsspec's, in memory or below file://."""

import re
import subprocess
import sys

import pytest

from tests.data.test_open_documents import config  # noqa: F401 - a fixture
from tests.data.test_read_files import TEXTS, lines, read, values, write
from titanmoe.config import ConfigError
from titanmoe.data import remote
from titanmoe.data.open_documents import open_documents
from titanmoe.data.read_files import find_files

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def store():
    """Puts files below memory:///bucket/."""
    system = fsspec.filesystem("memory")

    def put(name, data):
        system.pipe(f"/bucket/{name}", data)
        return f"memory:///bucket/{name}"

    yield put
    system.rm("/bucket", recursive=True)


def problems(*paths, format="auto"):
    with pytest.raises(ConfigError) as caught:
        find_files(list(paths), format)
    return caught.value.problems


@pytest.mark.parametrize("size", [1 << 20, 40])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_records_of_every_kind(tmp_path, store, kind, size):
    url = store(f"a.{kind}", write(tmp_path / f"a.{kind}", kind, TEXTS).read_bytes())
    assert values(read([url], size=size)) == TEXTS


def test_a_text_is_a_document(store):
    assert values(read([store("a.txt", b"one\ntwo")])) == ["one\ntwo"]


def test_folders_and_globs_are_those_of_a_disk(tmp_path, store):
    for name in ("b/2.jsonl", "b/1.jsonl", "b/.hidden.jsonl", "b/.no/x.jsonl", "b/deep/3.jsonl", "b/README.md", "c.md"):
        store(name, data := lines(["x"]))
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for pattern in ("b", "b/*.jsonl", "b/**/*.jsonl", "b/2.jsonl", "*"):
        for format in ("auto", "jsonl"):
            there = find_files([f"memory:///bucket/{pattern}"], format)
            here = find_files([f"{tmp_path}/{pattern}"], format)
            names = [source.file.removeprefix("memory:///bucket/") for source in there]
            assert sorted(names) == sorted(source.file.removeprefix(f"{tmp_path}/") for source in here), pattern
            assert {s.kind for s in there} == {s.kind for s in here} and names == sorted(names)
            assert all(source.bytes == len(data) for source in there)


def test_bad_lines_are_named_by_url_and_line(store):
    url = store("a.jsonl", lines(["one", "two"]) + b"no json\n")
    bad = read([url], size=20)[-1]
    assert bad.why.startswith(f"{url}:3: is not JSON")


def test_what_is_missing_or_no_data_is_refused_at_once(store):
    store("empty/a.jsonl", b"")
    store("shards/0.tokens", b"x")
    store("other/a.md", b"x")
    bucket = "memory:///bucket"
    refusals = problems(
        f"{bucket}/none.jsonl", f"{bucket}/shards", f"{bucket}/empty", f"{bucket}/other", format="jsonl"
    )
    assert len(refusals) == 4
    assert re.match(rf"{bucket}/none.jsonl cannot be read: FileNotFoundError: ", refusals[0])
    assert refusals[1] == f"'{bucket}/shards' contains no files of format jsonl"
    assert refusals[2] == f"'{bucket}/other' contains no files of format jsonl"
    assert refusals[3] == f"{bucket}/empty/a.jsonl is empty: remove it, or leave it out"
    (shards,) = problems(f"{bucket}/shards")
    assert shards == (
        f"{bucket}/shards holds token shards, which are a source of their own: copy it to a disk and name it by itself"
    )


def test_a_web_page_is_a_file_unless_its_name_ends_in_a_slash(monkeypatch):
    class Web:
        """Of fsspec's for http, what is asked; isdir would read the page."""

        def info(self, path):
            return {"name": path, "size": 7, "type": "file", "ETag": "abc"}

        def find(self, path, detail):
            return {f"{path}{name}": {"size": None, "type": "file"} for name in ("a.jsonl", "b.txt")}

        def unstrip_protocol(self, path):
            return path

    monkeypatch.setattr(remote, "file_system", lambda url: (Web(), url))
    for url in ("https://host/a.jsonl?download=true", "https://host/folder"):
        assert [file.url for file in remote.find_remote_files(url)] == [url]
    (source,) = find_files(["https://host/folder/"], "jsonl")
    assert (source.file, source.bytes) == ("https://host/folder/a.jsonl", 7)


def test_a_driver_or_the_package_that_is_missing_is_named(monkeypatch):
    (driver,) = problems("nowhere://bucket/a.jsonl")
    why = "Protocol not known: nowhere: check the address and the credentials"
    assert driver == f"nowhere://bucket/a.jsonl cannot be read: ValueError: {why}"
    monkeypatch.setitem(sys.modules, "fsspec", None)
    (package,) = problems("s3://bucket/a.jsonl")
    assert package == 's3://bucket/a.jsonl: reading it needs the package fsspec: pip install "titanmoe[remote]"'


def test_a_store_that_fails_while_it_is_read_is_one_line(store, monkeypatch):
    url = store("a.jsonl", lines(["one"]))
    (source,) = find_files([url], "auto")

    class Lost(Exception):
        pass

    class Failing:
        def __getattr__(self, name):
            raise Lost("the connection\nwent away")

    from titanmoe.data.read_files import read_records
    from titanmoe.data.record_reader import RecordReader

    monkeypatch.setattr(remote.file_system(url)[0], "open", lambda *args: Failing(), raising=False)
    with pytest.raises(ConfigError) as caught:
        list(read_records(RecordReader(source.span(0, source.bytes, source.bytes), "text")))
    assert caught.value.problems == [
        f"{url} cannot be read: Lost: the connection went away: check the address and the credentials"
    ]


def test_shards_made_from_a_url_are_those_of_the_file(config, tmp_path, monkeypatch):  # noqa: F811
    (entry,) = config.data.paths
    here, there = open_documents(config, entry), open_documents(config, f"file://{entry}")
    assert [there.read(0, 5).tolist(), len(there)] == [here.read(0, 5).tolist(), 2]
    assert there.fingerprint != "" and there.name == "a.jsonl"
    monkeypatch.chdir("/")  # a URL is the same from every folder
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        assert open_documents(config, f"file://{entry}").fingerprint == there.fingerprint
    (tmp_path / "a.jsonl").write_bytes(lines(["two", "vier"]))  # as many bytes
    assert open_documents(config, f"file://{entry}").read(0, 5).tolist() == [256, *b"two", 257]


def test_token_shards_are_read_from_a_disk(config):  # noqa: F811
    config.data.format = "tokens"
    with pytest.raises(ConfigError, match="token shards are read from a disk: copy their folder to one"):
        open_documents(config, "memory:///bucket/shards")
