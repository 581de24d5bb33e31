"""Where the threads of this process are, as a separate thread sees it while the step hangs."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import titanmoe

ROOT = os.path.dirname(os.path.dirname(titanmoe.__file__)) + os.sep
DEEPEST = 40


def stack_of(frame: FrameType | None) -> list[str]:
    """Innermost first: FILE:LINE in FUNCTION."""
    lines = []
    while frame is not None and len(lines) < DEEPEST:
        code = frame.f_code
        lines.append(f"{code.co_filename.removeprefix(ROOT)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return lines


def main_stack() -> list[str]:
    return stack_of(sys._current_frames().get(threading.main_thread().ident))


def other_stacks() -> dict[str, list[str]]:
    """The stacks of other threads that run titanmoe's code, such as one that saves or reads data."""
    frames, stacks = sys._current_frames(), {}
    for thread in threading.enumerate():
        if thread in (threading.main_thread(), threading.current_thread()) or thread.ident not in frames:
            continue
        lines = stack_of(frames[thread.ident])
        if any(line.startswith("titanmoe/") for line in lines):
            stacks[thread.name] = lines
    return stacks


OTHER_CODE = ("/torch/", "<frozen", "/lib/python", "titanmoe/comm/", "titanmoe/watch/")
"""Marks the lines of torch, of Python itself, and of the code that sends messages or watches."""


def line_in(stack: list[str]) -> str:
    """The innermost line that has none of these marks."""
    return next((line for line in stack if not any(part in line for part in OTHER_CODE)), "")


def in_message(stack: list[str]) -> bool:
    """Whether it is inside a function that sends, below that line."""
    inner = stack[: stack.index(line)] if (line := line_in(stack)) else stack
    return any("/torch/distributed/" in line or "titanmoe/comm/" in line for line in inner)
