"""Plants the bugs of tests/support/small_bugs.py one at a time in a copy of the tree and records the test that fails.

    python -m tests.support.plant_small_bugs      run what is missing; then write docs/small_bugs.jsonl
        --only router                             only those whose function or description contains a text
        --results FILE                            one JSON line each; runs/mutations.jsonl if not given

Run by hand, not part of the tests: each takes a pytest run. It resumes where it stopped, and repeats those that
survived or could not run. The exit status is 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.small_bugs import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
NOTICED = ROOT / "docs" / "small_bugs.jsonl"
"""File with a line for each bug: its function, what it breaks, and the test that failed."""
SURVIVED = "SURVIVED"
TIMEOUT_S = 900


@functools.cache
def _definitions(root: Path) -> dict[str, list[tuple[Path, ast.stmt]]]:
    """Return functions, classes and constants of titanmoe/ by qualified name, each with its file."""
    definitions: dict[str, list[tuple[Path, ast.stmt]]] = {}

    def enter(node: ast.AST, outer: str, path: Path) -> None:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None)
            if isinstance(child, ast.Assign):
                name = getattr(child.targets[0], "id", None)
            if isinstance(child, ast.stmt) and name:
                definitions.setdefault(outer + name, []).append((path, child))
            enter(child, f"{outer}{name}." if name else outer, path)

    for path in sorted((root / "titanmoe").rglob("*.py")):
        enter(ast.parse(path.read_text()), "", path)
    return definitions


def _parse(code: str) -> ast.expr | ast.stmt:
    """Return the syntax tree of one expression or statement."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def plant(mutant: Mutant, root: Path = ROOT) -> tuple[Path, str]:
    """Return the file that defines the mutant's function, and its text with the bug in it. Writes nothing.

    Raises ValueError if the code to replace does not occur exactly once.
    """
    old, new = _parse(mutant.old), _parse(mutant.new)
    code, spots = ast.unparse(old), []
    for path, definition in _definitions(root).get(mutant.function, []):
        for node in ast.walk(definition):
            if type(node) is type(old) and ast.unparse(node) == code:
                spots.append((path, node))
    if len(spots) != 1:
        raise ValueError(
            f"functions {mutant.function} hold {code!r} {len(spots)} times: tests/support/small_bugs.py is out of date"
        )
    ((path, node),) = spots
    lines = path.read_bytes().splitlines(keepends=True)  # columns count bytes
    first, last = (sum(map(len, lines[: at - 1])) for at in (node.lineno, node.end_lineno))
    text, change = b"".join(lines), ast.unparse(new)
    change = f"({change})" if isinstance(new, ast.expr) else change
    text = text[: first + node.col_offset] + change.encode() + text[last + node.end_col_offset :]
    return path, text.decode()


def copy_tree(to: Path) -> Path:
    """Copy the tree's files, those that git tracks and new ones, into a folder; return the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.splitlines()):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def first_failed_test(status: int, output: str) -> str:
    """Return the id of the first test that failed, without its parameters, or SURVIVED.

    `status` is pytest's exit status, `output` what it printed. Raises RuntimeError if no test has run or pytest was
    killed.
    """
    if status == 0:
        return SURVIVED
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?::\S+?)(?:\[.*)?(?: - .*)?$", output, re.MULTILINE)
    if status != 1 or not failed:
        raise RuntimeError(f"pytest ended with {status}:\n{output[-2000:]}")
    return failed[1]


def run_mutant(mutant: Mutant, tree: Path, number: int) -> str:
    """Plant a bug in the copied tree, run its tests, remove the bug; return the first test that failed, or SURVIVED.

    `number` is another one for each bug, from 1 on: the file's time, by which Python recompiles it. Raises ValueError
    if the table of bugs is out of date, RuntimeError if no test has run or the tests took longer than TIMEOUT_S.
    """
    (file, wrong), output = plant(mutant, tree), tree / "output"
    right = file.read_text()
    try:
        file.write_text(wrong)
        os.utime(file, (number, number))  # Python finds its own compiled files by time and size
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(mutant.tests.split(), tree, output))
        process.start()
        process.join(TIMEOUT_S)
        process.kill()
        process.join()
        return first_failed_test(process.exitcode, output.read_text())
    finally:
        file.write_text(right)
        os.utime(file, (0, 0))


def _pytest(words: list[str], tree: Path, output: Path) -> None:
    """Run pytest on the copy of the code in `tree` and exit; called in a fork of a process that has imported torch.

    `words` are tests and options of pytest; stdout and stderr are written to the file `output`.
    """
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC * (stream == 1) | os.O_APPEND), stream)
    for module in list(sys.modules):
        if module.partition(".")[0] in ("tests", "titanmoe"):
            del sys.modules[module]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    code = pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *words])
    sys.stdout.flush()
    os._exit(code)


def run(results: Path, only: str = "") -> dict[Mutant, str]:
    """Run the tests of all bugs that none has noticed, and return the verdicts of these and earlier ones.

    A verdict is the first test that failed, or SURVIVED.

    Args:
        results: file of verdicts, a line of JSON each; new ones are appended.
        only: text that the function or the description of a bug to run must contain.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = map(json.loads, results.read_text().splitlines() if results.exists() else [])
    noticed = {Mutant(*line["mutant"]): line["noticed"] for line in lines}
    done = {mutant: noticed[mutant] for mutant in MUTANTS if noticed.get(mutant, SURVIVED) != SURVIVED}
    todo = [m for m in MUTANTS if m not in done and only in f"{m.function} {m.breaks}"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(Path(folder)) if todo else Path(folder)
        for number, mutant in enumerate(todo, 1):
            done[mutant] = run_mutant(mutant, tree, number)
            print(f"{number}/{len(todo)}  {mutant.function}: {mutant.breaks}: {done[mutant]}", flush=True)
            with results.open("a") as file:
                file.write(json.dumps({"mutant": mutant, "noticed": done[mutant]}) + "\n")
    return {mutant: done[mutant] for mutant in MUTANTS if mutant in done}


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch
    for module in ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "hypothesis"):
        importlib.import_module(module)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutations.jsonl")
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    done = run(options.results, options.only)
    survived = [mutant for mutant, test in done.items() if test == SURVIVED]
    for mutant in survived:
        print(f"survived: {mutant.function}: {mutant.breaks}")
    if not survived and len(done) == len(MUTANTS):
        rows = [{"function": each.function, "breaks": each.breaks, "noticed": test} for each, test in done.items()]
        NOTICED.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bool(survived)


if __name__ == "__main__":
    raise SystemExit(main())
