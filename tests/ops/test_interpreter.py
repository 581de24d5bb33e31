"""The kernels' tests without a GPU. Triton's interpreter must be on before Triton is imported: in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanmoe.ops.kernels import installed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_kernels_line_by_line() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/ops/test_kernels.py"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
