"""Names and docstrings use the field's words: docs/architecture.md's glossary, and none with a private meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("titanmoe", "scripts", "tests/support")
WORDS = {
    **dict.fromkeys(("again",), "recomputed"),
    **dict.fromkeys(("answer",), "completion, assistant message, result"),
    **dict.fromkeys(("bin",), "slot, expert buffer"),
    **dict.fromkeys(("box", "cut", "piece"), "shard, slice, sharded"),
    **dict.fromkeys(("kept",), "saved, cached"),
    **dict.fromkeys(("lane",), "communicator, stream"),
    **dict.fromkeys(("lap",), "overlap"),
    **dict.fromkeys(("likeliest",), "top_k"),
    **dict.fromkeys(("share",), "fraction"),
    **dict.fromkeys(("whole",), "full, unsharded"),
    **dict.fromkeys(
        ("ahead", "back", "board", "further", "handed", "like", "outlet", "said", "there", "way"), "the thing"
    ),
}
"""Words that no name contains, because they stood for something else once, and what to call that."""
ALONE = {"found": "the thing", "own": "the thing"}
"""Words that are no names by themselves."""
EXCEPTIONS = {
    ("titanmoe/data/quiz.py", "answer"): "the key of a quiz line",
    ("titanmoe/config/schema.py", "cut"): "texts that a limit cuts off: options of [rl]",
    ("titanmoe/config/schema.py", "share"): "a verb: data.share_prefixes",
    ("titanmoe/data/lengths.py", "bin"): "the bins of a histogram",
    ("titanmoe/data/pack_preferences.py", "share"): "a verb: data.share_prefixes",
    ("titanmoe/models/stages.py", "share"): "a verb: whether stages share the vocabulary",
    ("titanmoe/report/charts.py", "box"): "a rectangle of a drawing",
    ("titanmoe/report/draw.py", "box"): "a rectangle of a drawing",
    ("titanmoe/rl/rollouts.py", "cut"): "texts that a limit cuts off",
    ("titanmoe/train/report_targets.py", "board"): "TensorBoard",
    ("titanmoe/watch/late_ranks.py", "cut"): "ranks that the network cuts off",
    ("titanmoe/rl/reward_worker.py", "found"): "whatever a function of the user returns",
    ("scripts/gpu/symmetric.py", "share"): "a verb: torch's share_memory",
    **{
        (file, "own"): "the table [model.own]"
        for file in (
            "titanmoe/checkpoint/hf/config_json.py",
            "titanmoe/config/load.py",
            "titanmoe/config/schema.py",
            "titanmoe/models/families/__init__.py",
            "titanmoe/models/families/family.py",
            "tests/support/reference_linear.py",
        )
    },
}
"""Reasons why a name in a file may contain such a word, by file and word."""
PHRASES = re.compile(
    r"\b(on (?:its|their) way|computed again|rows travel|the same, but|as above|of those that|likeliest)\b",
    re.IGNORECASE,
)
"""Phrases that no docstring contains: say what a thing is without the line above, and "in flight" or "recomputed"."""


def identifiers(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of the syntax tree defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def words(name: str) -> list[str]:
    """Return the words of a snake_case, CamelCase or UPPER_CASE name in lower case, plurals as singulars."""
    return [re.sub(r"(?<=x)es$|s$", "", w.lower()) for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def problems(source: str, file: str = "") -> list[str]:
    """Return the names and docstrings of a module that use a word or phrase with a private meaning, with their lines.

    Args:
        source: text of the module.
        file: its path, for EXCEPTIONS.
    """
    out = []
    for node in ast.walk(ast.parse(source)):
        for name in identifiers(node):
            private = WORDS | ALONE if len(words(name)) == 1 else WORDS
            out += [
                f"{file}:{node.lineno}: {name}: say {private[word]}"
                for word in words(name)
                if word in private and (file, word) not in EXCEPTIONS
            ]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = " ".join(node.value.value.split())
            out += [f"{file}:{node.lineno}: {phrase!r} in a docstring" for phrase in PHRASES.findall(text)]
    return out


def test_names_and_docstrings_have_no_private_meaning() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 400
    found: list[str] = []
    for path in files:
        found += problems(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    assert not found


def test_words_are_found_within_names_and_docstrings() -> None:
    assert words("_whole_of_block") == ["whole", "of", "block"] and words("HeldBoxes2_T") == ["held", "box", "t"]
    found = problems(
        '"""Rows on their\nway."""\ndef f(in_bins, is_own, own): self.cutBytes = 1\nclass Lap:\n    """As above."""'
    )
    assert {line.split(": ")[1] for line in found} == {
        "'on their way' in a docstring",
        "'As above' in a docstring",
        *("in_bins", "own", "cutBytes", "Lap"),
    }


def test_every_exception_is_used() -> None:
    for file, word in EXCEPTIONS:
        nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        assert any(word in words(name) for node in nodes for name in identifiers(node)), (file, word)


def test_the_glossary_has_at_most_40_terms_once_each() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Glossary")[2].partition("\n## ")[0]
    terms = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert 20 <= len(terms) <= 40 and len(set(terms)) == len(terms)
