"""The script that makes the tables of docs/planner.md and docs/folding.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "planner_page.py"


@pytest.fixture(scope="session")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_page", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_page"] = module
    spec.loader.exec_module(module)
    return module
