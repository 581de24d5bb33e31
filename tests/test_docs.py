"""The pages: links lead somewhere, quoted messages, outputs and keys are right, the site has every page once."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load, other_names
from titanmoe.config.field_values import WrongType, convert
from titanmoe.config.fields import fields, tables
from titanmoe.config.recipe import toml_module
from titanmoe.launcher import fit_ranks, train_command
from titanmoe.launcher.fit_ranks import Machine
from titanmoe.launcher.train_command import parse_words

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(DOCS.glob("*.md"))]


def prose(page: Path) -> str:
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    found = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def rows(page: str, first: str) -> list[list[str]]:
    """The rows of the page's tables whose first column has that heading."""
    found, inside = [], False
    for line in prose(DOCS / page).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            inside = False
        elif cells[0].startswith(first):
            inside = True
        elif inside and not re.fullmatch("-+", cells[0]):
            found.append(cells)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        target = (page.parent / link) if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_the_site_has_every_page_once() -> None:
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed: list[str] = []

    def walk(item: Any) -> None:
        if isinstance(item, str):
            listed.append(item)
        else:
            for part in item.values() if isinstance(item, dict) else item:
                walk(part)

    walk(site["nav"])
    outside = ["index.md", "CONTRIBUTING.md", "CHANGELOG.md"]  # README.md is the first page
    assert sorted(listed) == sorted([*outside, *(page.name for page in DOCS.glob("*.md"))])


# ---- messages


@cache
def texts() -> list[str]:
    """Every string of the program, with a gap for what is filled in."""

    def flat(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(flat, node.values))
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    nodes = (node for file in (ROOT / "titanmoe").rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return [flat(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


def test_quoted_messages_are_those_of_the_program() -> None:
    quoted = [cells[0] for cells in rows("troubleshooting.md", "message")]
    assert len(quoted) > 40
    for cell in quoted:
        message = cell.strip("`")
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
        found = any(pattern.search(text) for text in texts())
        assert found, f"nothing says {message!r}: see docs/troubleshooting.md"


def test_quoted_errors_are_those_of_the_program() -> None:
    """Lines with numbers and names filled in, in blocks without a command."""
    blocks = [block for page in PAGES for block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)]
    lines = [line for language, block in blocks if language in ("", "text") for line in block.splitlines()]
    errors = [line for line in lines if re.match(r"error: (?!\d+ problem)", line)]
    pieces = [text.split("\0") for text in set(texts())]
    patterns = [re.compile(".*".join(map(re.escape, each))) for each in pieces if sum(map(len, each)) >= 20]
    assert len(errors) > 4
    assert [line for line in errors if not any(pattern.search(line) for pattern in patterns)] == []


# ---- outputs


def quoted_outputs() -> Iterator[tuple[str, str, str]]:
    """Yield the page, the code and its output of commands of ours, and of Python above a text block.

    Left out are commands whose output is a measurement or a model's words.
    """
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, shown = command.partition("\n")
                if shown.strip() and re.match(r"titanmoe (?!generate)", line):
                    yield page.name, line, shown.strip("\n")
        for code, shown in re.findall(r"^```python\n((?:(?!^```).)*)```\n\n```text\n(.*?)\n```$", text, re.M | re.S):
            yield page.name, code, shown


QUOTED = list(quoted_outputs())


@pytest.mark.parametrize(
    ("page", "code", "shown"), QUOTED, ids=[f"{page}:{code.split(chr(10))[0]}" for page, code, _ in QUOTED]
)
def test_quoted_outputs_are_printed(
    page: str, code: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "..." stands for anything. Nothing is started: a quoted `titanmoe train` is one that is refused."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(fit_ranks, "this_machine", lambda device: Machine(0, 2, 24 << 30))
    monkeypatch.setattr(train_command, "start", lambda prepared: pytest.fail(f"{code} is not refused"))
    if code.startswith("titanmoe "):
        main(shlex.split(code, comments=True)[1:])
    else:
        exec(code, {})
    printed = "".join(capsys.readouterr()).strip("\n")
    assert re.fullmatch(".*".join(map(re.escape, shown.split("..."))), printed, re.DOTALL), (
        f"{page}: now it is\n{printed}"
    )


# ---- keys


def keys(cell: str) -> list[tuple[str, str]]:
    """Each `table.key` or `table.key = value` of a cell; paths and commands are something else."""
    found = re.findall(r"`((?:[a-z_]+\.)+[a-z_]+\d?)(?: = ([^`]+))?`", cell)
    return [(key, value) for key, value in found if key.split(".")[0] in tables()]


COMING_FROM = [("from_megatron.md", "Megatron-LM"), ("from_torchtitan.md", "TorchTitan"), ("from_trl.md", "TRL")]


@pytest.mark.parametrize(("page", "first"), COMING_FROM)
def test_keys_for_newcomers_exist_and_take_the_values_shown(page: str, first: str) -> None:
    table = rows(page, first)
    assert len(table) > 15 and all(len(cells) == 3 for cells in table)
    shown = [pair for cells in table for pair in keys(cells[1])]
    assert len(shown) > 15
    for key, value in shown:
        assert key in fields(), f"{page}: {key}"
        given = toml_module().loads(f"value = {value}")["value"]
        assert not isinstance(convert(given, fields()[key]), WrongType), f"{page}: {key} = {value}"


@pytest.mark.parametrize("page", ["from_megatron.md", "from_torchtitan.md"])
def test_tables_of_other_names_are_current(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert other_names.MARKED.search(text)
    assert other_names.update_page(text) == text, f"rewrite them: python -m titanmoe.config docs/{page}"


def test_options_for_newcomers_are_answered_as_on_their_page() -> None:
    """Every flag of Megatron-LM's page, and every field of the others' tables that is not ours too."""
    flags = re.findall(r"(?<!\w)--([a-z][a-z0-9-]+)", re.sub("`titanmoe [^`]*`", "", prose(DOCS / "from_megatron.md")))
    assert len(set(flags)) > 100 and [flag for flag in flags if not other_names.hint(flag, [])] == []
    of: dict[str, set[str]] = {}
    for page, first in COMING_FROM:
        pattern = r"--([a-z0-9-]+)" if first == "Megatron-LM" else r"`([a-z_.]+)"
        for cells in rows(page, first):
            for name in re.findall(pattern, cells[0]):
                of.setdefault(name.replace("-", "_"), set()).update(key for key, _ in keys(cells[1]))
    dotted = {name for name in of if "." in name and name not in fields()}
    assert len(dotted) > 10 and [name for name in dotted if not other_names.hint(name, [])] == []
    shown = {name: path for name, path in other_names.FIELDS.items() if name in of}
    assert len(shown) > 30 and [name for name, path in shown.items() if path not in of[name]] == []


def test_options_for_newcomers_exist() -> None:
    options = re.compile(r"--([a-z_]+\.[a-z_.]*[a-z_])")
    said = {path for text in other_names.ADVICE.values() for path in options.findall(text)}
    assert len(said) > 30 and (said | set(other_names.FIELDS.values())) - fields().keys() == set()
    assert fields().keys().isdisjoint(other_names.FIELDS.keys() | other_names.ADVICE.keys())


@pytest.mark.parametrize("page", ["troubleshooting", "moe", "generate"])
def test_keys_named_in_prose_exist(page: str) -> None:
    named = {key for key, _ in keys(prose(DOCS / f"{page}.md"))}
    assert named - fields().keys() - tables().keys() - {"metrics.jsonl"} == set()


# ---- code and commands


def test_the_load_of_experts_is_read_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "debug").mkdir(parents=True)
    (tmp_path / "runs" / "debug" / "experts.jsonl").write_text('{"step": 20, "load": {"0": [30, 10], "1": [20, 20]}}\n')
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", (DOCS / "troubleshooting.md").read_text(), re.DOTALL)
    assert code
    exec(code[1], {})
    assert capsys.readouterr().out == "20 0 1.5\n20 1 1.0\n"


def starts() -> list[tuple[str, list[str]]]:
    """Recipe and overrides of every start of a run that a page shows."""
    found = []
    for page in [page for page in PAGES if page.name != "extending.md"]:  # whose recipe exists in a copy only
        for line in re.findall(r"^\$ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if not any(re.fullmatch(r"train_configs/\w+\.toml", word) for word in words):
                continue
            start = next((words[i + 1 :] for i, word in enumerate(words) if word in ("train.py", "train")), None)
            if start:
                request = parse_words(start)
                assert not request.problems, line
                found.append((request.recipe, request.rest))
    return found


def test_runs_are_started_with_options_that_exist() -> None:
    shown = starts()
    assert len(shown) > 10
    for recipe, overrides in shown:
        wanted = [word for word in overrides if word != "--print-config"]
        load(
            ["--config", str(ROOT / recipe), *wanted, "--model.hf="], COMPONENTS, lambda config: []
        )  # its model is not here
