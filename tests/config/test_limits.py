"""Recipes and command lines made to take long, or to break what reads them, are answered like any others."""

import sys
from pathlib import Path

import pytest

from tests.config.test_load import problems
from titanmoe.config import recipe as recipes


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes my.toml into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("my.toml").write_text(text, encoding="utf-8")
        return "--config", "my.toml"

    return write


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 5000 + "]" * 5000, "x = " + "{a = " * 17 + "1" + "}" * 17, ".".join(["a"] * 500) + " = 1"]
)
def test_deep_nesting_in_a_recipe_is_one_problem(recipe, text):
    (found,) = problems(*recipe(text))
    why = "tables or lists are nested more than 16 deep, which no field needs: remove brackets or dots"
    assert found == f"my.toml: is not TOML: {why}"


def test_a_key_of_many_parts_is_refused_before_it_is_parsed(recipe, monkeypatch):
    """The parser's time grows with the square of their number."""
    monkeypatch.setattr(recipes, "toml_module", lambda: pytest.fail("it was parsed"))
    assert "more than 16 deep" in problems(*recipe(".".join(["a"] * 500) + " = 1"))[0]


def test_deep_nesting_in_an_override_is_one_problem():
    (found,) = problems("--data.paths=" + "[" * 5000)
    assert "is not a list of strings" in found and len(found) < 250


def test_integers_that_python_does_not_print(recipe):
    (found,) = problems(*recipe("[training]\nsteps = 0x" + "f" * 5000 + "\n"))
    assert found.startswith("my.toml:2: training.steps = 0xfff") and "below 2**63 = 9.2e18, because" in found


def test_a_recipe_that_never_ends_is_one_problem():
    assert problems("--config", "/dev/zero") == [
        "/dev/zero: has more than 1,048,576 bytes, too many for a recipe: name another file"
    ]


def test_lines_of_a_long_list_are_read_a_few_times(recipe, monkeypatch):
    read_again = []
    parsed = recipes.parse_toml
    monkeypatch.setattr(recipes, "parse_toml", lambda text: read_again.append(len(text)) or parsed(text))
    text = "[data]\npaths = [\n" + '"a.jsonl",\n' * 3000 + "]\nx = 1\n"
    assert problems(*recipe(text))[0].startswith("my.toml:3004: unknown key data.x")
    assert sum(read_again) < 4 * len(text)


def test_only_some_unknown_names_are_compared_with_every_field(recipe, monkeypatch):
    asked = []
    monkeypatch.setattr(sys.modules["titanmoe.config.load"], "nearest_field", lambda name: asked.append(name) or "")
    found = problems(*recipe("[training]\n" + "".join(f"unknown_{n} = 1\n" for n in range(100))))
    assert len(found) == 100 and len(asked) == 20
