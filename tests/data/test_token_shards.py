"""Token shards read as one sequence of documents, open quickly however large, and show damage before they are read."""

import json
import os
import pickle
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.shard_folders import edit, make, manifest
from titanmoe.config import ConfigError
from titanmoe.data.documents import find_documents
from titanmoe.data.token_shards import (
    BLOCK,
    DTYPES,
    FORMAT,
    MANIFEST,
    WORK,
    ShardDocuments,
    StoredTokenizer,
    digest_file,
    verify,
)
from titanmoe.data.tokenizer import FILE, open_tokenizer
from titanmoe.data.write_token_shards import ShardWriter, write_json

documents = st.lists(st.integers(0, 999), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(documents, min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_shards_are_one_row(tmp_path_factory, shards, data):
    opened = ShardDocuments(make(tmp_path_factory.mktemp("shards") / "x", shards))
    every = [document for shard in shards for document in shard]
    tokens = np.concatenate(every)
    starts = np.cumsum([0, *map(len, every)])
    assert len(opened) == len(every) and len(opened.starts) == len(starts)
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(tokens))] * 2)))
    assert opened.read(a, b).tolist() == tokens[a:b].tolist()
    assert opened.label_mask(a, b) is None
    at = np.array(data.draw(st.lists(st.integers(-len(starts), len(starts) - 1), max_size=9)), np.int64)
    assert opened.starts[at].tolist() == starts[at].tolist()
    i, j, step = data.draw(
        st.tuples(*[st.one_of(st.none(), st.integers(-30, 30))] * 2, st.sampled_from([None, 1, 2, -1]))
    )
    assert opened.starts[i:j:step].tolist() == starts[i:j:step].tolist()
    assert [opened.starts[k] for k in (0, -1)] == [0, len(tokens)]
    with pytest.raises(IndexError):
        opened.starts[len(starts)]
    token = np.arange(len(tokens))
    assert find_documents(opened, token).tolist() == np.repeat(np.arange(len(every)), [*map(len, every)]).tolist()


@pytest.mark.parametrize(("dtype", "top"), [("uint16", 65535), ("uint32", 200_000)])
def test_tokens_keep_their_width_and_masks_their_place(tmp_path, dtype, top):
    shards, label_masks = [[[1, top], [3]], [[4, 5, 6]]], [[[0, 1], [1]], [[0, 0, 1]]]
    opened = ShardDocuments(make(tmp_path / "x", shards, label_masks, dtype=dtype, vocab_size=top + 1))
    opened = pickle.loads(pickle.dumps(opened))  # as in a worker process of the loader
    assert opened.read(0, 6).tolist() == [1, top, 3, 4, 5, 6] and opened.read(0, 6).dtype == dtype
    assert opened.label_mask(1, 6).tolist() == [True, True, False, False, True]
    assert opened.label_mask(1, 6).dtype == bool
    assert len(pickle.dumps(opened)) < 2000  # the maps stay here


def test_a_stored_tokenizer_is_the_one_that_made_the_shards(tmp_path, bpe):
    folder = tmp_path / "shards" / "tokenizer"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes((bpe / FILE).read_bytes())
    identity = open_tokenizer(str(folder / FILE)).identity
    stored = StoredTokenizer(identity, folder, {FILE: digest_file(folder / FILE)})
    assert stored.open("bytes").identity == identity
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    with pytest.raises(ConfigError, match=r"tokenizer has .*: remove from it what was added later"):
        stored.open("bytes")


def test_the_fingerprint_is_of_the_content(tmp_path):
    def of(name, shards):
        return ShardDocuments(make(tmp_path / name, shards)).fingerprint

    assert of("a", [[[1, 2]], [[3]]]) == of("b", [[[1, 2]], [[3]]])
    assert len({of("c", [[[1, 2]], [[3]]]), of("d", [[[1, 2]], [[4]]]), of("e", [[[1], [2]], [[3]]])}) == 3


def test_a_hundred_billion_tokens_open_in_seconds_and_little_memory(tmp_path):
    """Sparse files: 240 shards of 2^29 tokens, 2^19 documents of 2^10 each. No index is read unless it is needed."""
    per_shard, each, shards = 1 << 19, 1 << 10, 240
    record = {"documents": per_shard, "tokens": per_shard * each, "crc32": {"tokens": 0, "starts": 0}}
    records = [{"name": f"{n:05d}-000"} | record for n in range(shards)]
    starts = np.arange(0, per_shard * each + 1, each, dtype="<u8").tobytes()
    for n, shard in enumerate(records):
        with (tmp_path / f"{shard['name']}.tokens").open("wb") as file:
            file.truncate(per_shard * each * 2)
        with (tmp_path / f"{shard['name']}.starts").open("wb") as file:
            if n in (0, 120, 239):
                file.write(starts)
            file.truncate(len(starts))
    write_json(tmp_path / MANIFEST, manifest(records))

    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened = ShardDocuments(tmp_path)
    total = opened.starts[-1]
    middle = 120 * per_shard
    assert total == shards * per_shard * each > 100e9
    assert opened.starts[[middle, middle + 5, total // each - 1]].tolist() == [
        middle * each,
        (middle + 5) * each,
        total - each,
    ]
    assert opened.read(total - 10, total).tolist() == [0] * 10
    for n in range(shards):  # every shard mapped: a process may have few open files
        assert len(opened.read(n * per_shard * each, n * per_shard * each + 4)) == 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # KB; the index alone has 1 GB
    assert len(os.listdir("/proc/self/fd")) < 200


def problems(folder) -> str:
    with pytest.raises(ConfigError) as error:
        ShardDocuments(folder)
    return "\n".join(error.value.problems)


def test_damage_is_reported_when_opened(tmp_path):
    folder = make(tmp_path / "x", [[[1, 2], [3]], [[4, 5]]])
    (folder / "00001-000.tokens").write_bytes(b"1")
    (folder / "00000-000.starts").unlink()
    message = problems(folder)
    assert "00001-000.tokens has 1 bytes, but 4 in its manifest" in message
    assert "00000-000.starts: No such file" in message


def test_manifests_that_cannot_be_believed(tmp_path):
    folder = make(tmp_path / "x", [[[1, 2], [3]]])
    for changes, says in (
        ({"version": 2}, "is of version 2, and this titanmoe reads version 1"),
        ({"format": "other"}, "is not a manifest of token shards"),
        ({"tokens": 9}, "do not add up"),
        ({"dtype": "int3"}, "was changed"),
        ({"shards": 3}, "was changed"),
    ):
        before = (folder / MANIFEST).read_text()
        edit(folder, **changes)
        assert says in problems(folder)
        (folder / MANIFEST).write_text(before)
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT}))
    assert "is of version None, and this titanmoe reads version 1" in problems(folder)
    (folder / MANIFEST).write_text('{"format": "titan')
    assert f"{folder / MANIFEST} cannot be read" in problems(folder)
    (folder / MANIFEST).unlink()
    assert "contains no token shards: there is no" in problems(folder)
    (folder / WORK).mkdir()
    assert "unfinished token shards: give the titanmoe tokenize command again" in problems(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/secret", "x/../../secret", "x\0", "", ".", "..", ".hidden", 3, None]
)
def test_names_in_a_manifest_stay_in_its_folder(tmp_path, name):
    folder = make(tmp_path / "x", [[[1, 2], [3]]])
    for file in folder.glob("00000-000.*"):
        file.rename(tmp_path / file.name.replace("00000-000", "secret"))
    (shard,) = json.loads((folder / MANIFEST).read_text())["shards"]
    edit(folder, shards=[shard | {"name": name}])
    assert f"was changed: {name!r} in it is no file of that folder: make the shards again" in problems(folder)
    with pytest.raises(ConfigError, match="is no file of that folder"):
        list(verify(folder))


def large(folder, with_label_masks=False):
    """Three blocks of tokens, one of starts."""
    tokens = (np.arange(BLOCK + 100) % 999).reshape(-1, 2).tolist()
    return make(folder, [tokens, [[7]]], [[[0, 1]] * len(tokens), [[1]]] if with_label_masks else None)


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def refused(read):
    with pytest.raises(ConfigError) as error:
        read()
    return str(error.value)


def test_changed_bytes_are_noticed_when_they_are_first_read(tmp_path):
    folder = large(tmp_path / "x", with_label_masks=True)
    flip(folder / "00000-000.tokens", BLOCK + 10)
    flip(folder / "00000-000.counted", 5)
    opened = ShardDocuments(folder)
    assert opened.has_sums and opened.read(0, 100).tolist() == list(range(100))
    message = refused(lambda: opened.read(BLOCK // 2 - 1, BLOCK // 2 + 1))
    assert "00000-000.tokens has changed since it was written, between bytes 65,536 and 131,072" in message
    assert f"titanmoe data verify {folder}" in message
    (_, [tokens, _]), _ = verify(folder)
    assert "00000-000.tokens has changed since it was written, first between bytes 65,536 and 131,072: check" in tokens
    assert "00000-000.counted has changed" in refused(lambda: opened.label_mask(0, 8))
    assert len(opened.read(BLOCK + 99, BLOCK + 101)) == 2, "the third block, and the next shard, are as they were"
    flip(folder / "00000-000.tokens", 0)
    assert len(opened.read(0, 100)) == 100, "a block is checked once"
    flip(folder / "00000-000.starts", 8 * 20000)
    assert "00000-000.starts has changed" in refused(lambda: ShardDocuments(folder).starts[20001])
    assert "00000-000.starts has changed" in refused(lambda: ShardDocuments(folder).starts[20000:20002])
    assert ShardDocuments(folder).starts[[1, 2]].tolist() == [2, 4]


def test_tokens_beyond_the_vocabulary_are_named_with_their_place(tmp_path):
    folder = large(tmp_path / "x")
    edit(folder, vocab_size=998)
    assert "00000-000.tokens contains token 998, beyond the vocabulary of 998" in problems(folder)
    shards = json.loads((folder / MANIFEST).read_text())["shards"]
    edit(folder, shards=[{name: shard[name] for name in ("name", "documents", "tokens", "crc32")} for shard in shards])
    opened = ShardDocuments(folder)  # as made before there were sums
    assert not opened.has_sums and len(opened.read(0, 998)) == 998
    message = refused(lambda: opened.read(900, 1100))
    assert "00000-000.tokens has token 998 at position 998, beyond the vocabulary of 998" in message


def test_changed_contents_are_found_by_reading_them(tmp_path):
    folder = make(tmp_path / "x", [[[1, 2], [3]], [[4, 5]]], [[[0, 1], [1]], [[1, 1]]])
    assert list(verify(folder)) == [("00000-000", []), ("00001-000", [])]
    (folder / "00001-000.counted").write_bytes(b"\1\0")
    (folder / "00000-000.tokens").write_bytes(np.array([1, 2, 2000], "<u2").tobytes())
    ShardDocuments(folder)
    (_, [beyond, sums]), (_, [masks]) = verify(folder)
    assert "contains token 2000, beyond the vocabulary of 1000" in beyond
    assert "00000-000.tokens has changed since it was written, first between bytes 0 and 6: checksum" in sums
    assert "00001-000.counted has changed since it was written, first between bytes 0 and 2: checksum" in masks


def test_a_shard_is_written_as_it_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(ShardWriter, "FLUSH", 3)
    opened = ShardDocuments(make(tmp_path / "x", [[[1, 2], [3, 4], [], [5]]]))
    assert opened.read(0, 5).tolist() == [1, 2, 3, 4, 5] and opened.starts[:].tolist() == [0, 2, 4, 4, 5]
    assert list(verify(tmp_path / "x")) == [("00000-000", [])]


def test_a_document_without_the_label_weights_of_its_shard_is_refused(tmp_path):
    (tmp_path / WORK).mkdir()
    tokens, weights = np.arange(3), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="shard x has a label mask, and a document came without label weights"):
        ShardWriter(tmp_path, "x", DTYPES["uint16"], with_label_mask=True, with_weights=True).add(tokens)
    with pytest.raises(ValueError, match="shard y has no label mask for these label weights"):
        ShardWriter(tmp_path, "y", DTYPES["uint16"], with_label_mask=False).add(tokens, weights)
