"""Names in titanmoe/ use the field's words: docs/architecture.md's glossary, and no word with a private meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = {
    **dict.fromkeys(("again", "experts_again"), "recomputed"),
    **dict.fromkeys(("bin", "bins"), "slot, expert buffer"),
    **dict.fromkeys(("lap", "laps"), "overlap"),
    **dict.fromkeys(("lane", "lanes"), "communicator, stream"),
    **dict.fromkeys(("likeliest",), "top_k"),
    **dict.fromkeys(("answer", "answers"), "completion, assistant message, result"),
    **dict.fromkeys(("ahead", "further", "said", "outlet", "board", "handed_on"), "the thing itself"),
}
"""Words that stood for something else once, and what to call it."""
KNOWN: dict[str, set[str]] = {"data/pack.py": {"bin", "bins"}, "data/quiz.py": {"answer"}}
"""Where such a word is the field's: bins of bin packing, the key of a quiz line."""


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that a module defines, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_names_have_no_private_meaning() -> None:
    found = []
    for path in sorted((ROOT / "titanmoe").rglob("*.py")):
        file = path.relative_to(ROOT / "titanmoe").as_posix()
        found += [
            f"{file}:{line}: {name}: say {PRIVATE[word]}"
            for name, line in names(ast.parse(path.read_text(encoding="utf-8")))
            if (word := name.strip("_").lower()) in PRIVATE and word not in KNOWN.get(file, set())
        ]
    assert not found


def test_the_glossary_has_at_most_40_terms_once_each() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Glossary")[2].partition("\n## ")[0]
    terms = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert 20 <= len(terms) <= 40 and len(set(terms)) == len(terms)
