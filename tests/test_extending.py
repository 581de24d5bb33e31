"""docs/extending.md: its files and changes work in a copy of the code, as shown by the tests that it contains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def test_the_examples_work(tmp_path: Path) -> None:
    for name in ("titanmoe", "tests", "train_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with its compiled files, which stay valid
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    for path, language, text in blocks:
        file = tmp_path / path
        assert file.exists() == (language == "diff"), path
        file.write_text(changed(file.read_text(encoding="utf-8"), text) if language == "diff" else text)
    tests = [path for path, _, _ in blocks if path.startswith("tests/")]
    assert len(blocks) == page.count("```") // 2 and len(tests) == 4, "a block has no path above it"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"^6 passed", run.stdout, re.MULTILINE), run.stdout[-2000:]
