"""Output of commands: aligned columns, byte counts in three digits, reports with files. For plan and rehearse.

Commands return lines, files and an exit code; printing, writing and error messages are here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from titanmoe.config import ConfigError
from titanmoe.config.load import format_problems


def columns(body: list[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    """Format a table as indented lines with aligned columns; [] without rows.

    Args:
        body: the cells of each row.
        right: indices of the columns that are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    lines = []
    for row in body:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("    " + "  ".join(x.rjust(w) if i in right else x.ljust(w) for i, (x, w) in cells).rstrip())
    return lines


Report = tuple[list[str], dict[Path | None, str], int]
"""The lines to print, the text of each file (None for a file that was not requested), and the exit code."""


def print_report(problems: list[str], report: Callable[[], Report]) -> int:
    """Print a command's report and write its files; return the report's exit code, or 2 after an error.

    Args:
        problems: messages on what is wrong with the command line; if there are any, only these are printed.
        report: returns the lines to print, the text of each file by its path (one under None is not written), and the
            exit code; may raise a ConfigError, which is then printed.
    """
    if problems:
        print(format_problems(problems), file=sys.stderr)
        return 2
    try:
        lines, files, code = report()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    for file, text in files.items():
        try:
            if file is not None:
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: cannot write {file}: {error.strerror}", file=sys.stderr)
            return 2
    return code
