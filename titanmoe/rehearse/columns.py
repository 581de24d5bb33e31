"""Aligned columns of text, and byte counts in three digits."""

from __future__ import annotations

UNITS = ("B", "KB", "MB", "GB", "TB")


def format_bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}"


def columns(body: list[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    if not body:
        return []
    widths = [max(len(row[i]) for row in body) for i in range(len(body[0]))]
    lines = []
    for row in body:
        cells = zip(row, widths, range(len(row)), strict=True)
        lines.append("    " + "  ".join(x.rjust(w) if i in right else x.ljust(w) for x, w, i in cells).rstrip())
    return lines
