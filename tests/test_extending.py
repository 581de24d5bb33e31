"""The examples of the pages on extending work: in a copy of the code with their tests, and from outside the package."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.support import processes
from titanmoe.models.families import names

ROOT = Path(__file__).resolve().parent.parent
PAGES = [(ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("extending", "extending_families")]
CHECKS = "tests/support/extending"
"""Folder with a recipe of the examples, and with tests that the pages link to; they only run in the copy."""
BLOCK = re.compile(r"^`([\w./]+)`:\n\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def changed(text: str, diff: str) -> str:
    """The text with the lines marked + added after the unmarked ones."""
    before, after = [], []
    for line in diff.splitlines(keepends=True):
        after.append(line[1:])
        if line[0] == " ":
            before.append(line[1:])
    assert text.count("".join(before)) == 1, f"not there once: {before}"
    return text.replace("".join(before), "".join(after))


LISTS = (
    *("tests/config/test_config_page.py", "tests/config/test_laws.py"),
    *("tests/models/test_families.py", "tests/models/test_count.py", "tests/models/test_transformer.py"),
    "tests/data/test_formats.py",
    *(
        "tests/test_recipes.py",
        "tests/test_project.py::test_every_recipe_loads_and_is_on_its_page",
        "tests/models/test_tensors.py::test_names_are_those_of_the_modules[more0-conv_moe]",
        "tests/models/test_tensors.py::test_names_of_adapters_are_those_of_the_modules[conv_moe]",
        "tests/moe/test_facts.py::test_facts_are_true[every_expert]",
        "tests/train/test_optimizer.py::test_spec_is_true[momentum]",
    ),
)
"""Tests that know dispatchers, families, formats, optimizers and recipes by name."""
KNOWN = " or ".join(names())
"""Families of which these tests say the same in the copy."""
ELSEWHERE = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "dist", "wheels", ".*_cache", ".hypothesis")
ROW = "| [debug_small_moe](../train_configs/debug_small_moe.toml) | 2 | the examples |"


def blocks_of_pages() -> list[tuple[str, str, str]]:
    """Return path, language and text of each block."""
    blocks = [block for page in PAGES for block in BLOCK.findall(page)]
    assert len(blocks) == sum(page.count("```") // 2 - page.count("```console") for page in PAGES), "one has no path"
    return blocks


def run(folder: Path, *words: str, **how: bool) -> subprocess.CompletedProcess[str]:
    return processes.Started(words, os.environ | {"PYTHONPATH": str(folder)}, folder, **how).wait(400)


def test_the_examples_work(tmp_path: Path) -> None:
    copy, blocks = tmp_path / "copy", blocks_of_pages()
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ELSEWHERE)  # with compiled files, which stay valid
    for path, language, text in blocks:
        file = copy / path
        assert file.exists() == (language == "diff"), path
        file.write_text(changed(file.read_text(encoding="utf-8"), text) if language == "diff" else text)
    shutil.copy(copy / CHECKS / "debug_small_moe.toml", copy / "train_configs")
    recipes = copy / "docs" / "get_started.md"
    rows = recipes.read_text(encoding="utf-8")
    recipes.write_text(rows.replace("| [debug](", f"{ROW}\n| [debug](", 1))
    tests = [path for path, _, _ in blocks if path.startswith("tests/")]
    tests += [f"{CHECKS}/{path.name}" for path in sorted((copy / CHECKS).glob("check_*.py"))]
    assert len(tests) == 5 + 4
    done = run(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", f"not ({KNOWN})", *tests, *LISTS
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    # Only a run that asks for a family notices that its file is gone.
    (copy / "titanmoe/models/families/conv_moe.py").unlink()
    start = ("-m", "titanmoe", "train", "debug", "--print-config")
    refused = run(copy, *start, "--model.family", "conv_moe")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    assert 'model.family = "conv_moe" cannot be used: titanmoe.models.families.conv_moe cannot be' in refused.stderr
    assert run(copy, *start).returncode == 0


def test_lines_are_added_where_the_pages_say() -> None:
    for path, language, text in blocks_of_pages():
        assert (ROOT / path).exists() == (language == "diff"), path
        if language == "diff" and "conv_moe" not in text:  # it comes after small_moe, which is not there
            changed((ROOT / path).read_text(encoding="utf-8"), text)


def test_all_components_of_the_pages_outside_the_package(tmp_path: Path) -> None:
    """In the folder where the run starts, with the options of both pages' commands and of the other components."""
    for path, language, text in blocks_of_pages():
        if language == "python" and path.startswith("titanmoe/"):
            own = text.replace('family="small_moe"', 'family="small_moe:FAMILY"')  # its name outside
            (tmp_path / Path(path).name).write_text(own)
    commands = [re.findall(r"^\$ titanmoe train debug (.*)$", page, re.MULTILINE) for page in PAGES]
    assert list(map(len, commands)) == [1, 1]
    shown = [word for (words,) in commands for word in shlex.split(words)]
    (tmp_path / "table.tsv").write_text("name\ttext\n" + "one\tsphinx of black quartz, judge my vow\n" * 200)
    term = "router_variance:RouterVariance 0.1"
    others = ("--moe.dispatcher", "every_expert:EveryExpert", "--moe.balance_losses", term)
    others += ("--data.source", "files", "--data.paths", "table.tsv", "--data.format", "tsv:FORMAT")
    small = ("--ranks", "2", "--parallelism.experts.ep", "2", "--training.steps", "2", "--training.seq_len", "64")
    small += ("--validation.interval", "0", "--checkpoint.enable", "false", "--job.dump_folder", "runs/outside")
    started = run(tmp_path, "-m", "titanmoe", "train", "debug", *shown, *others, *small, forks=True)
    assert started.returncode == 0, started.stdout[-2000:] + started.stderr[-2000:]
    (metrics,) = (tmp_path / "runs/outside").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == 2 and all(line["router_variance"] > 0 for line in lines)
    sizes = run(tmp_path, "-m", "titanmoe", "train", "debug", "--model.family", "small_moe:FAMILY", "--print-config")
    assert sizes.returncode == 0 and 'score_function = "sigmoid"' in sizes.stdout, sizes.stderr
