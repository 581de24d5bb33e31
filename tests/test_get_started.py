"""docs/get_started.md: its files are written and its commands run, from top to bottom, as a newcomer would."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from quickstart import resume_command  # noqa: E402

BLOCK = re.compile(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MORE = 2
"""Steps of a run after those that it has made, where the page takes minutes."""


class Newcomer:
    """Someone in a folder of their own, with the pages beside them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.said: dict[str, list[str]] = {}
        """By the first words of a command, what it printed each time."""

    def types(self, line: str) -> None:
        words = shlex.split(line)
        kind = " ".join(words[:2])
        if kind == "titanmoe train":
            said = self.trains(words[1:])
        elif words[0] in ("titanmoe", "python"):
            said = self.has(["-m", *words] if words[0] == "titanmoe" else words[1:])
        else:
            said = subprocess.run(line, shell=True, cwd=self.folder, check=True, capture_output=True, text=True).stdout
        self.said.setdefault(kind, []).append(said)

    def starts(self, words: list[str], said: str = "") -> processes.Started:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        return processes.Started(words, environment, cwd=self.folder, forks=True, stdin=said)

    def has(self, words: list[str], code: int = 0, said: str = "") -> str:
        return self.sees(self.starts(words, said), code)

    def sees(self, run: processes.Started, code: int) -> str:
        done = run.wait()
        assert done.returncode == code, f"{run.args}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def trains(self, words: list[str]) -> str:
        """The first run is interrupted, as the page says; later ones make a few steps."""
        if "titanmoe train" in self.said:
            name = Path(words[-1]).stem
            made = len(lines(self.folder / "runs" / name / "metrics.jsonl"))
            return self.has(["-m", "titanmoe", *words, "--training.steps", str(made + MORE)])
        run, deadline = self.starts(["-m", "titanmoe", *words]), time.monotonic() + 120
        while len(lines(self.folder / "runs/mine/metrics.jsonl")) < 2:
            assert time.monotonic() < deadline and run.process.is_alive(), run.out.read_text() + run.err.read_text()
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        return self.sees(run, 130)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_the_page_works_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    newcomer = Newcomer(tmp_path)
    page = (ROOT / "docs/get_started.md").read_text(encoding="utf-8").partition("\n## Recipes\n")[0]
    blocks = BLOCK.findall(page)
    assert len(blocks) == page.count("```") // 2
    for file, language, text in blocks:
        if language == "console":
            commands = text.splitlines()
            assert all(command.startswith("$ ") for command in commands)
            for command in commands:
                newcomer.types(command.removeprefix("$ "))
        else:
            (tmp_path / file).write_text(text, encoding="utf-8")

    said = newcomer.said
    first, second, chat = said["titanmoe train"]
    assert "SIGINT: saving after this step" in first
    (saved,) = re.findall(r"^saved +(\S+)$", first, re.MULTILINE)
    assert re.search(rf"^begins from +{saved}, after step ", second, re.MULTILINE) and "\ndone " in second
    assert re.search(r"^begins from +weights of runs/mine/", chat, re.MULTILINE) and "\ndone " in chat
    assert "experts     ep 2" in first and "val loss" in second
    assert (tmp_path / "runs/mine/report/report.html").exists()
    text, reply = said["titanmoe generate"]
    assert text.startswith("A checkpoint ")
    (asked,) = said["python ask.py"]
    assert asked.strip() and reply.endswith(asked), "transformers and titanmoe say the same"


def test_the_command_that_resumes_keeps_no_option_that_would_begin_anew() -> None:
    arguments = ["--checkpoint.load=none", "--training.steps", "50", "--optimizer.lr", "1e-3"]
    said = resume_command(Path("runs/debug"), 4, arguments, 50)
    assert said.endswith("--ranks 4 --optimizer.lr 1e-3 --job.name debug --training.steps 100")
