"""The `titanmoe` command: its help, its version, and the usage line of what is refused."""

from __future__ import annotations

import pytest

import titanmoe
from titanmoe.cli import main


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--version"], 0, f"titanmoe {titanmoe.__version__}\n"),
        (["--help"], 0, "inspect, verify or compare a run"),
        (["--help"], 0, "verify token shards"),
        (["convert", "--to-hf", "a", "b", "--bogus"], 2, "usage: titanmoe convert [-h]"),
        (["convert", "--to-hf", "a", "b", "--bogus"], 2, "titanmoe convert: error: unrecognized arguments: --bogus"),
    ],
)
def test_what_argparse_says(words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == code and says in (err if code else out)
