"""docs/config.md says what the schema and the messages say."""

import re
from pathlib import Path

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.fields import docstrings, fields, tables, update_page
from titanmoe.fold.legality import violations

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def test_tables_of_fields_are_current():
    assert update_page(PAGE) == PAGE, "rewrite them: python -m titanmoe.config docs/config.md"


def test_every_field_and_table_is_explained():
    assert [path for path in fields() if not docstrings()[path]] == []
    assert [name for name, cls in tables().items() if cls.__doc__.startswith(f"{cls.__name__}(")] == []


def test_the_wrong_recipe_gives_the_message_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(block("toml"))
    with pytest.raises(ConfigError) as caught:
        load(["--config", "my.toml"], COMPONENTS, check=lambda config: violations(config, 4))
    assert f"{caught.value}\n" == block("text")


def test_overrides_shown_are_read():
    shown = re.search(r"## Overrides(.*?)##", PAGE, re.DOTALL)[1]
    for cell in re.findall(r"`(--[^`]+)`", shown):
        source = [] if "paths=" in cell else ["--data.source", "files", "--data.paths", "a"]
        load([*source, *cell.split()], COMPONENTS, check=lambda config: [])


def test_code_runs(capsys):
    exec(block("python"), {})
    assert "[training]\nsteps = 10\n" in capsys.readouterr().out
