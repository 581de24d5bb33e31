"""The frame of the project: what a newcomer reads and runs is there and true."""

import hashlib
import re
import sys
from pathlib import Path

import pytest

import titanmoe
from titanmoe.config import load
from titanmoe.models.families import preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_version_is_in_the_changelog():
    assert re.search(rf"^## {re.escape(titanmoe.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_license_is_the_standard_text():
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_in_the_readme(recipe):
    with recipe.open("rb") as file:
        assert tomllib.load(file)
    load(["--config", str(recipe)], preset, lambda config: [])
    assert f"train_configs/{recipe.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone


def test_every_page_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []


def test_declared_python_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.10"
    assert sys.version_info >= (3, 10)
    assert "torch>=2.11,<2.14" in project["dependencies"]
