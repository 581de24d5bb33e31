"""Simulates a disk that is full for one file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titanmoe.checkpoint import safe_files


def fail_writes(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Let writes of titanmoe.checkpoint.safe_files to the file fail as on a full disk, until the patch is undone."""
    real = safe_files.open_in

    def open_in(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
        full = folder / name == file and flags & os.O_WRONLY
        return os.open("/dev/full", os.O_WRONLY) if full else real(folder, name, flags)

    monkeypatch.setattr(safe_files, "open_in", open_in)
