"""Recipes by name, from a checkout and from a wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.recipe import SHIPPED, find_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]


def test_a_name_stands_for_the_shipped_recipe_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_recipes() == sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))
    assert find_recipe("debug") == SHIPPED / "debug.toml" and find_recipe("debug").samefile(
        ROOT / "train_configs" / "debug.toml"
    )
    assert load(["--config", "debug"], COMPONENTS, lambda config: []).job.name == "debug"
    Path("debug").mkdir()  # a run's folder, for example
    assert find_recipe("debug") == SHIPPED / "debug.toml"
    Path("mine.toml").touch()
    Path("mixtral_8x7b").touch()
    for path in ("mine.toml", "mixtral_8x7b", "nowhere/debug", "debug.toml"):
        assert find_recipe(path) == Path(path)


@pytest.mark.parametrize("name", ["debugg", "debug.toml", "train_configs/debug.toml"])
def test_a_near_name_is_suggested(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: there is no such file: did you mean debug, which comes with"):
        load(["--config", name], COMPONENTS, lambda config: [])


def test_a_wheel_has_them(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    for folder in ("titanmoe", "train_configs"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {"titanmoe/py.typed", *(f"titanmoe/train_configs/{name}.toml" for name in shipped_recipes())} <= set(files)
    assert not [file for file in files if file.startswith(("tests/", "train_configs/", "scripts/"))]
