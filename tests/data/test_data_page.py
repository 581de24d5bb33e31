"""docs/data.md: what it shows runs."""

import re
import shlex
from pathlib import Path

from tests.data.test_read_files import lines
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.data.open_documents import open_documents
from titanmoe.launcher.train_command import parse_words

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()


def test_from_jsonl_to_a_run_in_three_commands(tmp_path, monkeypatch, capsys):
    console = re.search(r"```console\n(.*?)```", PAGE, re.DOTALL)[1]
    commands = [shlex.split(line.removeprefix("$ ")) for line in console.splitlines()]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_bytes(lines(["one", "two"]))
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    assert main(commands[0][1:]) == main(commands[1][1:]) == 0
    config = load(parse_words(commands[2][2:]).words, COMPONENTS, lambda config: [])
    assert config.data.source == "files" and len(open_documents(config, *config.data.paths)) == 2
    capsys.readouterr()
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert capsys.readouterr().out == "2 documents, the first of 5 tokens: [256 111 110 101]...\n"
