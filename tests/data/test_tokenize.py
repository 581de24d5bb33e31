"""titanmoe tokenize: the same bytes whoever does the work, however often it is killed, and plain words for what is
wrong."""

import fcntl
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.test_read_files import lines
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.data import tokenize as tokenize_module
from titanmoe.data import tokenize_workers
from titanmoe.data.chat import open_chat_encoder
from titanmoe.data.token_shards import MANIFEST, ShardDocuments, verify
from titanmoe.data.tokenize import plan_shards, tokenize
from titanmoe.data.tokenize_unit import TokenizeJob, UnitTokenizer, dtype_name
from titanmoe.data.tokenizer import ByteTokenizer, open_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"{n}: the quick brown fox jumps over the lazy dog number {n}, " * (1 + n % 7) for n in range(60)]


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(tokenize_module, "MIN_UNIT_BYTES", 2500)


@pytest.fixture
def here(monkeypatch):
    """The work is done in this process: another takes a quarter of a second to start."""

    def in_process(job, todo, workers, meter):
        tokenizer = open_tokenizer(job.tokenizer)
        chat = open_chat_encoder(job.chat_template, tokenizer) if job.format_spec.conversations else None
        for number, spans, records in todo:
            items = records[-1]["items"] if records else 0
            UnitTokenizer(job, tokenizer, chat, number=number, shard=len(records), items=items).run(spans, meter.add)

    monkeypatch.setattr(tokenize_module, "run_workers", in_process)


def corpus(folder: Path, texts=TEXTS) -> Path:
    """Three JSONL files and a text file."""
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.jsonl").write_bytes(lines(texts[n::3]))
    (folder / "last.txt").write_text("the end")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def documents(folder: Path) -> list[list[int]]:
    shards = ShardDocuments(folder)
    starts = shards.starts[:]
    return [shards.read(a, b).tolist() for a, b in pairwise(starts)]


def run(tmp_path, name, *paths, workers=1, **job):
    job = TokenizeJob([str(path) for path in paths], str(tmp_path / name), **{"shard_tokens": 1500} | job)
    return tokenize(plan_shards(job), workers, log=lambda line: None)


def problems(tmp_path, name, *paths, **job) -> str:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, name, *paths, **job)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_documents_come_in_the_inputs_order_however_many_work(tmp_path, small_units, kind, bpe):
    name = "bytes" if kind == "bytes" else str(bpe)
    source = corpus(tmp_path / "in")
    manifest = run(tmp_path, "one", source, tokenizer=name)
    assert run(tmp_path, "three", source, workers=3, tokenizer=name) == manifest
    assert tree(tmp_path / "one") == tree(tmp_path / "three")

    expected = [text for n in range(3) for text in TEXTS[n::3]] + ["the end"]
    tokenizer = open_tokenizer(name)
    marks = [[] if tokenizer.bos is None else [tokenizer.bos], [tokenizer.eos]]
    rows = [[*marks[0], *row.tolist(), *marks[1]] for row in tokenizer.encode_all(expected)]
    assert documents(tmp_path / "one") == rows
    assert len(manifest["shards"]) > 5 and manifest["documents"] == 61
    assert all(shard["tokens"] <= 1500 for shard in manifest["shards"])
    assert all(not wrong for _, wrong in verify(tmp_path / "one"))


SITE = """
import os, signal, sys

worker = "titanmoe.data.tokenize_unit" in sys.orig_argv
who, at, whom = os.environ["KILL"].split(":")
if worker == (who == "worker"):
    left = [int(at)]

    def deadly(call):
        def wrapped(*args):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid() if whom == "self" else os.getppid(), signal.SIGKILL)
            return call(*args)
        return wrapped

    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
"""
VICTIM = """
import sys
from titanmoe.data import tokenize
tokenize.MIN_UNIT_BYTES = 2500
import argparse
from titanmoe.data.tokenize_command import add_tokenize
parser = argparse.ArgumentParser()
add_tokenize(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""


TORN = """
import os, signal, sys

for _ in range(2):  # the job, and a unit
    sys.stdin.readline()
sys.stdout.write('{"problems": ["half a li')
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_dies_within_a_line_is_named_and_nothing_is_lost(tmp_path, small_units, monkeypatch):
    source, start, started = corpus(tmp_path / "in"), tokenize_workers._start_worker, []

    def first_dies(job):
        started.append(job)
        if len(started) > 1:
            return start(job)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", TORN], text=True, **pipes)
        process.stdin.write("{}\n")
        return process

    monkeypatch.setattr(tokenize_workers, "_start_worker", first_dies)
    assert "was killed by signal 9" in problems(tmp_path, "out", source, workers=2)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert run(tmp_path, "out", source)["documents"] == 61


def test_no_manifest_is_written_while_a_unit_is_unfinished(tmp_path, small_units, monkeypatch):
    source = corpus(tmp_path / "in")
    monkeypatch.setattr(tokenize_module, "run_workers", lambda *all_done: None)
    assert "units are unfinished" in problems(tmp_path, "out", source)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(tmp_path, small_units):
    """Real kills, just before a file is synced or gets its name: of a worker, of the parent by a worker that continues,
    of the parent by itself. In between, finished work is not touched."""
    source = corpus(tmp_path / "in")
    run(tmp_path, "whole", source)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    out = tmp_path / "out"
    words = ["tokenize", str(source), "--out", str(out), "--shard-tokens", "1500", "--workers", "2"]

    def victim(kill: str) -> subprocess.CompletedProcess:
        paths = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "KILL": kill}
        command = [sys.executable, "-c", VICTIM, *words]
        return subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=60)

    ended, finished = [], {}
    for kill in (
        "parent:2:self",
        "worker:3:self",
        "worker:6:parent",
        "worker:8:parent",
        "worker:12:parent",
        "parent:1:self",
    ):
        died = victim(kill)
        ended.append(died.returncode)
        if died.returncode == 2:
            assert "was killed by signal 9" in died.stderr and "the same command resumes" in died.stderr
        for name, stat in finished.items():
            assert (out / name).stat().st_mtime_ns == stat.st_mtime_ns
        records = [json.loads(file.read_text())["shard"] for file in (out / "work").glob("0*.json")]
        names = [f"{shard['name']}.tokens" for shard in records if shard]
        finished = {name: (out / name).stat() for name in names}
        assert not (out / MANIFEST).exists()
    assert ended == [-9, 2, -9, -9, -9, -9]
    assert len(finished) > 6
    with pytest.raises(ConfigError, match="unfinished token shards: give the titanmoe tokenize command again"):
        ShardDocuments(out)

    last = victim("parent:99:self")
    assert last.returncode == 0 and "resuming: " in last.stdout, last.stderr
    files, expected_files = tree(out), tree(tmp_path / "whole")
    assert files == expected_files
    again = victim("worker:1:self")  # finished: there is nothing to do
    assert again.returncode == 0 and "61 documents" in again.stdout
    assert tree(out) == files


def test_ended_at_every_point_in_turn(tmp_path, small_units, here, monkeypatch):
    """As above, without processes: before each single file is synced or gets its name."""
    source = corpus(tmp_path / "in", TEXTS[:30])
    run(tmp_path, "whole", source)
    whole, left = tree(tmp_path / "whole"), [0]

    def deadly(call):
        def wrapped(*args):
            left[0] -= 1
            if left[0] == 0:
                raise SystemExit
            return call(*args)

        return wrapped

    monkeypatch.setattr(os, "fsync", deadly(lambda file: None))
    monkeypatch.setattr(os, "replace", deadly(os.replace))
    points = 0
    while True:
        points += 1
        left[0] = points
        try:
            run(tmp_path, f"out-{points}", source)
            break
        except SystemExit:
            left[0] = -1
            run(tmp_path, f"out-{points}", source)
            assert tree(tmp_path / f"out-{points}") == whole, points
    assert points > 30


def test_a_finished_shard_is_made_again_only_if_it_is_gone(tmp_path, small_units, here, monkeypatch):
    source = corpus(tmp_path / "in")
    run(tmp_path, "whole", source)
    job = TokenizeJob([str(source)], str(tmp_path / "out"), shard_tokens=1500)
    plan, stop = plan_shards(job), lambda *args: (_ for _ in ()).throw(InterruptedError())
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_module, "_manifest", stop)  # all but the manifest is there
        with pytest.raises(ConfigError):
            tokenize(plan, 1, log=lambda line: None)
    removed, intact = tmp_path / "out" / "00001-001.starts", tmp_path / "out" / "00001-000.tokens"
    removed.unlink()
    before = intact.stat().st_mtime_ns
    logged = []
    tokenize(plan, 1, log=logged.append)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert intact.stat().st_mtime_ns == before and logged == ["resuming: 7 of 8 units are made"]


def test_bad_lines_end_it_or_are_counted(tmp_path, small_units):
    source = corpus(tmp_path / "in")
    with (source / "1.jsonl").open("ab") as file:
        file.write(b'{"text": ""}\n{"text": 3}\nrubbish\n' + lines(["fine"]))
    message = problems(tmp_path, "out", source)
    assert message.startswith(f"{source / '1.jsonl'}:22: 'text' is a number, not text (correct it, or ")
    assert f"{source / '1.jsonl'}:23: " in message  # both at once
    # Finished work is reused by a command that skips them.
    manifest = run(tmp_path, "out", source, bad_lines="skip")
    assert (manifest["documents"], manifest["skipped"], manifest["empty"]) == (62, 2, 1)
    assert [line.partition(" ")[0] for line in manifest["examples"]] == [f"{source / '1.jsonl'}:{n}:" for n in (22, 23)]
    message = problems(tmp_path, "out", source)
    assert message.startswith(f'{tmp_path / "out"} was made with bad_lines = "skip" and lacks 2 bad lines, such as ')
    run(tmp_path, "fresh", source, bad_lines="skip")
    files, expected_files = tree(tmp_path / "out"), tree(tmp_path / "fresh")
    assert {**files, MANIFEST: b""} == {**expected_files, MANIFEST: b""}
    assert ByteTokenizer().decode(documents(tmp_path / "out")[-2 - len(TEXTS) // 3]) == "fine"


def test_a_folder_that_a_failed_command_began_does_not_block_its_correction(tmp_path, small_units):
    source = tmp_path / "code.jsonl"
    source.write_bytes(b"".join(json.dumps({"content": text}).encode() + b"\n" for text in TEXTS))
    message = problems(tmp_path, "out", source)
    assert (
        "has no field 'text', it has 'content': name the one that holds text with --field (data.field, or " in message
    )
    assert (tmp_path / "out/work").is_dir()
    run(tmp_path, "out", source, field="content")
    run(tmp_path, "fresh", source, field="content")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_mistakes_are_reported_before_any_work(tmp_path, here):
    source = corpus(tmp_path / "in")
    with pytest.raises(ConfigError) as error:
        plan_shards(TokenizeJob([str(tmp_path / "gone")], "out", tokenizer="nowhere"))
    assert len(error.value.problems) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "other has other files in it: name a folder that is new or empty" in problems(tmp_path, "other", source)
    (tmp_path / "only.jsonl").write_bytes(lines(["", ""]))
    assert "there are no documents (0 bad lines and 2 empty" in problems(tmp_path, "x", tmp_path / "only.jsonl")
    assert "in/x is inside " in problems(tmp_path, "in/x", source)
    run(tmp_path, "x", source)
    (source / "0.jsonl").write_bytes(lines(["changed"]))
    message = problems(tmp_path, "x", source)
    assert "was made, in another way: bytes was" in message and "Name another --out" in message
    assert "field was 'text' and is 'body'" in problems(tmp_path, "x", source, field="body")
    with (tmp_path / "x" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "another process is writing to" in problems(tmp_path, "x", source)


def test_chats_are_stored_with_what_counts(tmp_path, bpe, here):
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the fox"}]
    bad = [{"role": "user", "content": "why"}]
    (tmp_path / "a.jsonl").write_bytes(lines([talk, bad, talk[::-1]], field="messages"))
    message = problems(tmp_path, "x", tmp_path / "a.jsonl", format="chat", tokenizer=str(bpe))
    assert message.endswith(
        "a.jsonl:2: the assistant says nothing, so there is nothing to learn from: the roles are 'user', and one "
        "has to be 'assistant' (correct it, or skip such records: bad_lines = \"skip\")"
    )
    manifest = run(tmp_path, "x", tmp_path / "a.jsonl", format="chat", tokenizer=str(bpe), bad_lines="skip")
    shards, tokenizer = ShardDocuments(tmp_path / "x"), open_tokenizer(str(bpe))
    assert (len(shards), manifest["skipped"]) == (2, 1)
    first, second = zip(shards.starts[:-1], shards.starts[1:], strict=True)

    def learned_in(span) -> str:
        tokens, label_mask = shards.read(*span), shards.label_mask(*span)
        assert (
            tokens[-1] == tokenizer.eos and not label_mask[-1]
        )  # the template wrote no end mark: it is not part of the assistant message
        return tokenizer._plain.decode(tokens[label_mask].tolist(), skip_special_tokens=False)

    assert learned_in(first) == "the fox<|im_end|>\n"
    assert learned_in(second) == "the fox<|im_end|>\n"  # the generation prompt is not said without a question either
    assert manifest["counted"] == shards.label_mask(0, shards.starts[-1]).sum()

    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (tmp_path / "a.jsonl").write_bytes(lines([talk + talk], field="messages"))
    options = dict(
        format="chat", chat_template=str(template), bad_lines="skip"
    )  # the template's fault, not a bad line's
    assert "a.jsonl:1: the chat template" in problems(tmp_path, "y", tmp_path / "a.jsonl", **options)
    template.write_text("{% for m in messages %}{{ m.content * 10 ** 9 }}{% endfor %}")
    (tmp_path / "a.jsonl").write_bytes(lines([[{"role": "assistant", "content": ""}], talk], field="messages"))
    message = problems(tmp_path, "z", tmp_path / "a.jsonl", **options)
    assert (
        f"a.jsonl:2: the chat template {template} takes more than 256 MiB of memory, the limit for this conv" in message
    )


def test_a_begin_mark_is_not_written_twice(tmp_path, here):
    (tmp_path / "a.jsonl").write_bytes(lines([[{"role": "assistant", "content": "ab"}]], field="messages"))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    run(tmp_path, "x", tmp_path / "a.jsonl", format="chat", chat_template=str(tmp_path / "t.jinja"))
    assert documents(tmp_path / "x") == [[256, 97, 98, 257]]
    assert ShardDocuments(tmp_path / "x").label_mask(0, 4).tolist() == [False, True, True, False]


def test_the_command(tmp_path, capsys):
    source = corpus(tmp_path / "in")
    out, size = str(tmp_path / "out"), sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    assert main(["tokenize", str(source), "--out", out, "--workers", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"4 files, {size:,} bytes\n") and "tokens in 61 documents and 1 shard\n" in output
    assert main(["data", "verify", out]) == 0
    assert "1 shard is as it was written\n" in capsys.readouterr().out
    with (tmp_path / "out" / "00000-000.tokens").open("r+b") as file:
        file.write(b"x")
    assert main(["data", "verify", out, str(source)]) == 1
    output = capsys.readouterr().err
    assert (
        "00000-000.tokens has changed since it was written" in output and f"{source} contains no token shards" in output
    )
    assert main(["tokenize", "--workers", "0", "--chat-template", "t"]) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in ("name files, folders", "--out is missing", "--format chat", "--workers = 0"))


def test_units_depend_on_sizes_alone(monkeypatch):
    from titanmoe.data.record_reader import InputFile

    def shape(sizes, shard_tokens=1 << 27):
        sources = [InputFile(f"{n}.jsonl", "jsonl", size, 0) for n, size in enumerate(sizes)]
        units = tokenize_module.split_units(sources, shard_tokens)
        parts = [(span.file, span.start, span.stop) for unit in units for span in unit]
        assert sum(stop - start for _, start, stop in parts) == sum(sizes)
        return [sum(span.bytes for span in unit) for unit in units]

    mib = 1 << 20
    assert shape([mib] * 20) == [8 * mib, 8 * mib, 4 * mib]  # small files share a unit
    assert shape([20 * mib]) == [8 * mib, 8 * mib, 4 * mib]
    assert len(shape([10 << 30])) == 256
    assert max(shape([4 << 40])) == 512 * mib
    assert max(shape([4 << 30], 1 << 20)) == 8 * mib


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch):
    clock, logged = [0.0], []
    monkeypatch.setattr(tokenize_workers.time, "monotonic", lambda: clock[0])
    with tokenize_workers.ProgressMeter(10**9, 2 * 10**8, logged.append) as meter:  # a fifth was made before
        for _ in range(8):
            clock[0] += 10
            meter.add(5 * 10**7, 10**8)
    assert logged == [
        "35.0% of 1.00 GB, 10.00 M tokens/s, about 2 min to go",
        "50.0% of 1.00 GB, 10.00 M tokens/s, about 2 min to go",
    ]


def test_ids_take_two_bytes_as_long_as_they_fit():
    assert [dtype_name(SimpleNamespace(vocab_size=size)) for size in (1 << 16, (1 << 16) + 1)] == ["uint16", "uint32"]


def test_weights_of_messages_are_stored_and_read(tmp_path, bpe, here):
    def talk(*weights):
        replies = [{"role": "assistant", "content": "the fox", **weight} for weight in weights]
        return [message for reply in replies for message in ({"role": "user", "content": "why"}, reply)]

    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([talk({"weight": 0.25}, {"weight": 0}, {})], field="messages"))
    options = dict(format="chat", tokenizer=str(bpe))
    message = problems(tmp_path, "x", file, **options)
    assert "a.jsonl:1: a message has the weight 0.25, and without label_weights a message counts (1) or" in message
    run(tmp_path, "x", file, label_weights=True, **options)
    shards = ShardDocuments(tmp_path / "x")
    weights = shards.label_weights(0, shards.starts[-1])
    mask = shards.label_mask(0, shards.starts[-1])
    length = int(mask.sum()) // 2
    assert weights.dtype == np.float32 and weights[mask].tolist() == [0.25] * length + [1] * length
    assert not weights[~mask].any() and shards.has_sums

    file.write_bytes(lines([talk({"weight": 0}, {"weight": 1})], field="messages"))
    run(tmp_path, "y", file, **options)
    shards = ShardDocuments(tmp_path / "y")
    assert shards.label_weights(0, 4) is None and shards.label_mask(0, shards.starts[-1]).sum() == length
    for weight, what in ((-1, "has the weight -1: use a number from 0"), (True, "has the weight True")):
        file.write_bytes(lines([talk({"weight": weight})], field="messages"))
        assert what in problems(tmp_path, "z", file, **options)
    file.write_bytes(lines([talk({"weight": 0})], field="messages"))
    assert "all of the assistant's messages have the weight 0" in problems(tmp_path, "z", file, **options)


def test_a_folder_that_another_process_begins_to_fill_is_not_taken_for_a_foreign_one(tmp_path, monkeypatch):
    """Ranks that start together: one makes the folder of work between the other's looks at it."""
    (tmp_path / "a.txt").write_text("one")
    out = tmp_path / "x"
    out.mkdir()
    (out / ".lock").touch()
    real = Path.iterdir

    def iterdir(path):
        if path == out:
            (out / "work").mkdir(exist_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert run(tmp_path, "x", tmp_path / "a.txt")["documents"] == 1
