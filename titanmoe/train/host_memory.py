"""The memory of this machine, or of the container or job that the process runs in; bytes, 0 if unknown."""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def resident() -> int:
    """The memory that this process uses."""
    return _kib("/proc/self/status", "VmRSS:")


def whole() -> int:
    """The smallest of the machine's memory and the limits of all control groups that the process is in."""
    limits = [_kib("/proc/meminfo", "MemTotal:")]
    for line in _lines("/proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, file = (CGROUPS / "memory", "memory.limit_in_bytes") if kinds else (CGROUPS, "memory.max")
        for folder in (root / path.lstrip("/") / "x").parents:
            with contextlib.suppress(OSError, ValueError):  # none, or "max"
                limits.append(int((folder / file).read_text(encoding="utf-8")))
    return min((size for size in limits if size > 0), default=0)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _kib(file: str, name: str) -> int:
    return next((int(line.split()[1]) * 1024 for line in _lines(file) if line.startswith(name)), 0)
