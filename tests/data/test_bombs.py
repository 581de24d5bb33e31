"""A small file that expands to a large document is refused with name, line and limit, and never held as a whole."""

import gzip
import json
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from titanmoe.config import Config, ConfigError
from titanmoe.data import decompress
from titanmoe.data.decompress import open_decompressed
from titanmoe.data.formats import jsonl
from titanmoe.data.open_documents import open_documents
from titanmoe.data.read_files import find_files, read_records, split_spans
from titanmoe.data.record_reader import BadRecord, RecordReader

PACK = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: zstandard.ZstdCompressor().compress(data)}
LINE = json.dumps({"text": "one"}).encode() + b"\n"


def read(file, most_mb=1, size=1 << 30):
    records = []
    for source in find_files([str(file)], "auto"):
        for span in split_spans(source, size):
            records += read_records(RecordReader(span, "text", most_mb))
    return records


def why(file, size=1 << 30):
    with pytest.raises(ConfigError) as error:
        read(file, size=size)
    (problem,) = error.value.problems
    return problem


def long_line(mb: float) -> bytes:
    return json.dumps({"text": "a" * int(mb * (1 << 20))}).encode() + b"\n"


@pytest.mark.parametrize("packed", PACK)
def test_a_line_is_refused_by_number_and_limit(tmp_path, packed):
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(PACK[packed](LINE * 2 + b"\n" + long_line(1.1) + LINE))
    assert why(file) == (
        f"{file}:4: the line has more than 1 MiB unpacked, the limit for a document (max_document_mb): raise that, or "
        "leave it out"
    )
    assert [len(record.value) for record in read(file, most_mb=2)] == [3, 3, int(1.1 * (1 << 20)), 3]
    file.write_bytes(PACK[packed](LINE + long_line(0.9)))
    assert len(read(file)) == 2


def test_a_cut_into_a_long_line_is_refused_by_its_number(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(LINE + long_line(3))
    (source,) = find_files([str(file)], "auto")
    last = list(split_spans(source, 1 << 20))[1]
    with pytest.raises(ConfigError, match=r"a.jsonl:2: the line has more than 1 MiB"):
        list(read_records(RecordReader(last, "text", 1)))


@pytest.mark.parametrize("packed", PACK)
def test_a_text_is_refused_as_a_whole(tmp_path, packed):
    file = tmp_path / f"a.txt{packed}"
    file.write_bytes(PACK[packed](b"a" * ((1 << 20) + 1)))
    assert why(file).startswith(f"{file}: the text has more than 1 MiB unpacked")
    file.write_bytes(PACK[packed](b"a" * (1 << 20)))
    assert len(read(file)[0].value) == 1 << 20


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_memory_follows_the_limit_and_not_the_file(tmp_path, kind, packed, monkeypatch):
    file = tmp_path / f"a.{kind}{packed}"
    monkeypatch.setattr(decompress, "CHUNK", 64)
    file.write_bytes(PACK[packed](long_line(16)))
    assert file.stat().st_size < 1 << 17
    tracemalloc.start()
    try:
        why(file)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_zst_is_unpacked_in_small_pieces_of_the_file(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(PACK[".zst"](b"".join(json.dumps({"text": str(n)}).encode() + b"\n" for n in range(5000))))
    block_sizes, make = [], decompress._zstd_class

    class Watched:
        def __init__(self, frame):
            self.frame = frame

        def decompress(self, block):
            block_sizes.append(len(block))
            return self.frame.decompress(block)

        def __getattr__(self, name):
            return getattr(self.frame, name)

    monkeypatch.setattr(decompress, "_zstd_class", lambda file: lambda: Watched(make(file)()))
    with open_decompressed(str(file)) as (stream, _):
        assert len(stream.read()) == sum(len(json.dumps({"text": str(n)})) + 1 for n in range(5000))
    assert max(block_sizes) == decompress.CHUNK and sum(block_sizes) == file.stat().st_size


def test_what_is_too_long_is_not_skipped(tmp_path):
    """Skipping it would mean unpacking it; and the limit, like bad_lines, does not affect the shards' identity."""
    (tmp_path / "a.jsonl.zst").write_bytes(PACK[".zst"](LINE + long_line(1.1)))
    config = Config()
    config.job.dump_folder = str(tmp_path / "runs")
    config.data.bad_lines, config.data.max_document_mb = "skip", 1
    entry = str(tmp_path / "a.jsonl.zst")
    with pytest.raises(ConfigError, match=r"a.jsonl.zst:2: the line has more than 1 MiB"):
        open_documents(config, entry)
    config.data.max_document_mb = 2
    assert len(open_documents(config, entry)) == 2
    config.data.max_document_mb = 1
    assert len(open_documents(config, entry)) == 2


def test_values_of_a_line_are_counted_before_they_are_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_VALUES", 100)
    monkeypatch.setattr(jsonl, "MIB", 7)
    file = tmp_path / "a.jsonl"
    talk = json.dumps({"text": '[{,"\\\\' * 60})  # brackets and commas in a text are just text
    file.write_text(talk + "\n" + json.dumps({"text": "a", "n": [[]] * 60}) + "\n" + '{"text": ' + '"",' * 90 + "\n")
    fine, many, texts = read(file, most_mb=1000)
    assert fine.value == json.loads(talk)["text"]
    assert many == BadRecord(f"{file}:2: has more than 100 values, the limit for a line")
    assert texts == BadRecord(f"{file}:3: has more than 100 values, the limit for a line")


@pytest.mark.parametrize("depth", [900, 990, 1010, 50_000])
def test_nesting_near_what_python_bears(tmp_path, depth):
    """Reading may accept what writing does not: either way the result is a record or one line."""
    (tmp_path / "a.jsonl").write_text('{"text": "\\u00e9", "n": ' + "[" * depth + "]" * depth + "}\n")
    (tmp_path / "b.jsonl").write_text('{"text": ' + "[" * depth + '"\\u00e9"' + "]" * depth + "}\n")
    for name in "a.jsonl", "b.jsonl":
        (entry,) = read(tmp_path / name)
        assert not isinstance(entry, BadRecord) or f"{name}:1: JSON nested too deeply" in entry.why
    assert depth < 50_000 or isinstance(entry, BadRecord)


def test_a_value_that_can_be_read_and_not_written_again(tmp_path, monkeypatch):
    def deep(value):
        raise RecursionError

    monkeypatch.setattr(jsonl, "_has_surrogate", deep)
    (tmp_path / "a.jsonl").write_text('{"text": "\\u00e9"}\n')
    (entry,) = read(tmp_path / "a.jsonl")
    assert f"{tmp_path}/a.jsonl:1: JSON nested too deeply" in entry.why


# ---- Parquet


def parquet(file, texts, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts)))}), file, **options)


def test_a_long_value_of_parquet(tmp_path):
    file = tmp_path / "a.parquet"
    parquet(file, ["a" * (1 << 20) + "b", "c"], compression="none")
    assert why(file).startswith(f"{file}: row 1: 'text' has more than 1 MiB unpacked")
    assert len(read(file, most_mb=2)) == 2


def test_a_group_of_rows_that_unpacks_to_much(tmp_path):
    file = tmp_path / "a.parquet"
    parquet(file, ["one"] * 3 + ["a" * (2 << 20)], compression="zstd", row_group_size=3)
    problem = why(file)
    assert problem.startswith(f"{file}: row group 2: 'text', ") and "packed 256 to 1, has more than 1 MiB" in problem


def test_a_long_value_many_times_over_is_held_few_times(tmp_path):
    file = tmp_path / "a.parquet"
    parquet(file, ["a" * (1 << 19)] * 64, compression="none", use_dictionary=True, dictionary_pagesize_limit=8 << 20)
    assert file.stat().st_size < 1 << 20
    before = pyarrow.default_memory_pool().max_memory()
    reader = RecordReader(next(split_spans(find_files([str(file)], "auto")[0], 1 << 30)), "text", 1)
    for record in read_records(reader):
        assert len(record.value) == 1 << 19
        assert pyarrow.total_allocated_bytes() < 12 << 20
    assert pyarrow.default_memory_pool().max_memory() <= max(before, 12 << 20)
