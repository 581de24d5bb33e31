"""Every exception of the package reads the same on another rank: it survives pickling."""

from __future__ import annotations

import ast
import pickle
from importlib import import_module
from pathlib import Path

import titanmoe

ROOT = Path(titanmoe.__file__).parent
PROBLEMS = (["no such file: a b", "ranks = 3"], "a.toml")
ARGUMENTS = {
    "ConfigError": PROBLEMS,
    "MappingMisfit": PROBLEMS,
    "FoldError": PROBLEMS[:1],
    "ComponentError": (("a.b",), "no component"),
}
"""Of those with a constructor of their own; the others take a text."""


def exceptions() -> list[type[BaseException]]:
    """Found in the source, since to import every module would take as long as all of these tests."""
    classes = {}
    for file in ROOT.rglob("*.py"):
        module = ".".join(["titanmoe", *file.relative_to(ROOT).with_suffix("").parts])
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = module, {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}

    def is_exception(name: str) -> bool:
        if name in classes:
            return any(map(is_exception, classes[name][1]))
        return name.endswith(("Error", "Exception", "Warning"))

    return [getattr(import_module(classes[name][0]), name) for name in sorted(classes) if is_exception(name)]


def test_they_survive_a_round_trip() -> None:
    found = exceptions()
    assert {"ConfigError", "FoldError", "MappingMisfit", "CheckpointError", "NumericalFault"} <= {
        kind.__name__ for kind in found
    }
    for kind in found:
        error = kind(*ARGUMENTS.get(kind.__name__, ("step-00000003: no\nand why",)))
        error.more = {"fields": [1]}
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
        assert "no" in str(error)
