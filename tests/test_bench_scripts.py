"""Every script of scripts/bench runs with --tiny: whoever borrows a GPU for minutes must not find one broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "scripts" / "bench"
NOT_RUN = {"torchtitan_side.py": "layers.py and step.py import it, and TorchTitan is no dependency"}
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if path.name not in NOT_RUN)
FURTHER = {"layers.py": ["--shapes", "gpt_oss", "--sides", "titanmoe", "--steps", "1", "--times", "1"]}


def run(script: str, *options: str) -> str:
    ended = processes.run([BENCH / script, "--tiny", *options], timeout=120)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(script: str) -> None:
    assert run(script, *FURTHER.get(script, [])).strip()
