"""A format is chosen by name or extension; what is made with one is found again; one of your own is like the others."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_read_files import read
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.data.formats import FORMATS, format_of_extension, format_option
from titanmoe.data.read_files import find_files
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.data.tokenize import plan_shards
from titanmoe.data.tokenize_unit import TokenizeJob

ROOT = Path(__file__).resolve().parents[2]
OWN = """
from titanmoe.data.formats.format import Format
from titanmoe.data.record_reader import Record, decode_line


class Talks(Format):
    help = "talks: a question and its reply on each line."
    extensions = (".talk",)
    conversations = by_line = True

    def read(self, reader):
        for where, line in reader.lines():
            question, reply = decode_line(line, where).split(" = ")
            yield Record(where, [dict(role="user", content=question), dict(role="assistant", content=reply)])


FORMAT = Talks()
"""
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder in which a format lies, with files for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_talks", raising=False)
    Path("own_talks.py").write_text(OWN)
    Path("t.jinja").write_text(TEMPLATE)
    Path("in").mkdir()
    Path("in/a.talk").write_text("1 + 1 = 2\n2 + 2 = 4\n")
    Path("in/README.md").write_text("no talk")
    return tmp_path


def test_a_conversation_format_outside_the_package(own):
    words = ["tokenize", "in", "--format", "own_talks:FORMAT", "--chat-template", "t.jinja", "--out", "out"]
    assert main([*words, "--workers", "1"]) == 0
    shards = ShardDocuments(own / "out")
    assert shards.read(0, 10).tolist() == [256, *b"u1 + 1a2", 257]
    assert shards.label_mask(0, 10).tolist() == [False] * 8 + [True, False]
    entries = read([own / "in"], "own_talks:FORMAT", size=5)  # in several parts
    assert [entry.where() for entry in entries] == [f"{own}/in/a.talk:{line}" for line in (1, 2)]
    assert [entry.value[1]["content"] for entry in entries] == ["2", "4"]


def test_its_name_is_part_of_what_shards_are_found_by(own):
    Path("again.py").write_text(OWN)
    first, second = (
        plan_shards(TokenizeJob(["in"], "", format=f"{name}:FORMAT", chat_template="t.jinja"))
        for name in ("own_talks", "again")
    )
    assert first.identity != second.identity


@pytest.mark.parametrize(
    ("format", "field", "kind", "template"),
    [("auto", "text", "jsonl", ""), ("text", "text", "text", ""), ("chat", "text", "jsonl", TEMPLATE)],
)
def test_shards_of_earlier_versions_are_found_again(own, format, field, kind, template):
    file = own / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    job = TokenizeJob([str(file)], "", format=format, chat_template="t.jinja" if template else "")
    settings = {"format": format, "field": field, "chat_template": template, "shard_tokens": 1 << 27}
    settings |= {"version": 1, "tokenizer": "bytes"}
    stat = file.stat()
    inputs = [(str(file.resolve()), kind, stat.st_size, stat.st_mtime_ns)]
    identity = hashlib.blake2b(json.dumps([settings, inputs]).encode(), digest_size=16).hexdigest()
    assert plan_shards(job).identity == identity


def test_every_extension_has_one_format_and_others_are_text():
    extensions = [extension for name in FORMATS.table for extension in FORMATS.look_up(name).extensions]
    assert len(extensions) == len(set(extensions)) > 3
    assert all(extension in FORMATS.look_up(format_of_extension(extension)).extensions for extension in extensions)
    assert format_of_extension(".md") == format_of_extension("") == "text"


def test_commands_offer_what_they_can_read(capsys):
    assert "tokens" in FORMATS.table and "tokens" not in format_option(True).table
    assert "chat" in format_option(True).table and "chat" not in format_option(False).table
    assert main(["tokenize", "a", "--out", "b", "--format", "jsnl", "--workers", "0"]) == 2
    errors = capsys.readouterr().err
    assert '--format = "jsnl" is not one of auto, ' in errors and "did you mean jsonl?" in errors
    assert "--workers = 0" in errors
    assert main(["tokenizer", "train", "a", "--out", "b", "--format", "chat"]) == 2
    errors = capsys.readouterr().err
    assert '--format = "chat" is not one of auto, ' in errors and "--vocab-size is missing" in errors


def test_a_format_that_cannot_be_used_is_refused_where_extensions_are_looked_up(own, monkeypatch):
    monkeypatch.setitem(FORMATS.table, "broken", "no_such_module:FORMAT")
    Path("in/a.unusual").write_text("a")
    with pytest.raises(ConfigError, match='"broken" cannot be used: no_such_module cannot be imported: ModuleNot'):
        find_files(["in/a.unusual"], "auto")
    assert find_files(["in/a.unusual"], "text")[0].kind == "text" and "broken" in format_option(True).table


def test_a_template_is_for_conversations(own):
    words = ["--data.chat_template", "t.jinja", "--data.format"]
    for name in ("chat", "own_talks:FORMAT"):
        assert load([*words, name], COMPONENTS, lambda config: []).data.format == name
    with pytest.raises(ConfigError, match=r'is for chats, and data.format = "jsonl" reads none: set format = "chat"'):
        load([*words, "jsonl"], COMPONENTS, lambda config: [])


def test_a_format_that_reads_nothing_is_refused_when_it_is_named(own):
    Path("no_read.py").write_text(
        "from titanmoe.data.formats.format import Format\nclass Silent(Format): ...\nFORMAT = Silent()\n"
    )
    with pytest.raises(ConfigError, match=r'data.format = "no_read:FORMAT" cannot be used: no_read:FORMAT lacks read'):
        load(["--data.format", "no_read:FORMAT"], COMPONENTS, lambda config: [])


def test_a_recipe_is_read_without_numpy():
    code = (
        "import sys; from titanmoe.config import load; from titanmoe.components import COMPONENTS; "
        "formats = COMPONENTS.kind_of('data.format').table; "
        "[load(['--data.format', name], COMPONENTS, lambda config: []) for name in formats]; "
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
