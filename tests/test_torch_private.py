"""What titanmoe uses of torch that is private is in a table, and this version of torch has all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

import titanmoe
from tests.support.torch_private import PRIVATE, missing_names

ROOT = Path(titanmoe.__file__).parent
OTHERS = {
    *("_asdict", "_replace"),  # of named tuples
    *("_exit", "_getframe", "_current_frames", "_SubParsersAction"),  # of Python's library
    *("_Namespace__attrs",),  # of jinja2
}


def private_names(file: Path) -> Iterator[str]:
    """Dotted where they are imported: names that begin with an underscore and are not the file's own."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        else:
            dotted = []
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                yield from {node.attr} - own
        yield from (name for name in dotted if any(part.startswith("_") for part in name.split(".")))


def test_every_use_is_in_the_table() -> None:
    unknown = []
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        mine = [one for one in PRIVATE if path.startswith(one.where)]
        names = {name for one in mine for name in (*one.names, *one.owner.split("."))}
        dotted = {f"{one.owner}.{name}" for one in mine for name in one.names} | {one.owner for one in mine}
        for name in private_names(file):
            known = name in names or any(whole == name or whole.startswith(f"{name}.") for whole in dotted)
            if not known and name not in OTHERS:
                unknown.append(f"{path}: {name}")
    assert not unknown, "add them to tests/support/torch_private.py"


def test_the_table_has_nothing_that_is_not_used() -> None:
    text = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    for one in PRIVATE:
        bodies = [body for path, body in text.items() if path.startswith(one.where)]
        for name in one.names:
            assert any(name in body or one.owner.split(".")[-1] in body for body in bodies), (one.where, name)


def test_this_torch_has_all_of_it() -> None:
    assert missing_names() == {}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    monkeypatch.delattr(torch, "_scaled_grouped_mm")
    monkeypatch.delattr(torch.utils._mode_utils, "no_dispatch")
    missing = {name: one.where for one, names in missing_names().items() for name in names}
    assert missing == {
        "_get_default_store": "watch/machines.py",
        "_scaled_grouped_mm": "moe/fp8.py",
        "no_dispatch": "rehearse",
    }
