"""The stacks of this process's threads, which the watchdog thread reads while the step may hang, and of errors.

A line is "FILE:LINE in FUNCTION", with paths relative to the repository; a stack has the innermost line first.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import FrameType

import titanmoe

ROOT = os.path.dirname(os.path.dirname(titanmoe.__file__)) + os.sep
"""The folder that holds the package, which is removed from paths."""
DEEPEST = 40
"""The most lines of a stack."""


def stack_of(frame: FrameType | None) -> list[str]:
    """Return the stack that ends in a frame as lines, innermost first; at most `DEEPEST`."""
    lines = []
    while frame is not None and len(lines) < DEEPEST:
        code = frame.f_code
        lines.append(f"{code.co_filename.removeprefix(ROOT)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return lines


def stack_of_error(error: BaseException) -> list[str]:
    """Return the stack from where an error was raised to where it was caught as lines, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename.removeprefix(ROOT)}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]


def main_stack() -> list[str]:
    """Return the stack of the main thread, which runs the training step, as lines, innermost first."""
    return stack_of(sys._current_frames().get(threading.main_thread().ident))


def other_stacks() -> dict[str, list[str]]:
    """Return the stacks of this process's other threads that run titanmoe's code, by the thread's name.

    The calling thread is left out.
    """
    frames, stacks = sys._current_frames(), {}
    for thread in threading.enumerate():
        if thread in (threading.main_thread(), threading.current_thread()) or thread.ident not in frames:
            continue
        lines = stack_of(frames[thread.ident])
        if any(line.startswith("titanmoe/") for line in lines):
            stacks[thread.name] = lines
    return stacks


OTHER_CODE = ("/torch/", "<frozen", "/lib/python", "titanmoe/comm/", "titanmoe/watch/")
"""Parts of the paths of torch, of Python itself, and of our code that communicates or watches."""


def innermost_own_line(stack: list[str]) -> str:
    """Return the innermost line of a stack outside of torch, Python's library, and our comm and watch; "" if none."""
    return next((line for line in stack if not any(path in line for path in OTHER_CODE)), "")


def is_communicating(stack: list[str]) -> bool:
    """Return whether a stack (innermost line first) is inside a communication: torch.distributed or titanmoe.comm.

    Only lines inside of `innermost_own_line` count: FSDP or a pipeline that calls our code does not communicate.
    """
    inner = stack[: stack.index(line)] if (line := innermost_own_line(stack)) else stack
    return any("/torch/distributed/" in line or "titanmoe/comm/" in line for line in inner)
