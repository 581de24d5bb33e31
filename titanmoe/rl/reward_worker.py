"""A process that computes rewards: `python -m titanmoe.rl.reward_worker BYTES call|run WHAT...`. Imports no torch.

It limits its own memory to BYTES (0: no limit), and is killed when the process that started it dies. "call" calls a
Python function for each line of JSON that it reads, and writes a line of JSON; "run" becomes the program WHAT, which
does the same. It writes an empty line first, when it is ready. With rl.max_turns above 1 the completion is a list of
turns, and {"message": "..."} lets the model go on.

    {"prompt": "2 + 3 =", "completion": " 5", "record": {"prompt": "2 + 3 =", "solution": "5"}}     read
    {"reward": 1.0}                                                                             written
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

PR_SET_PDEATHSIG = 1
"""Linux's prctl option that sets the signal which a process gets when its parent dies."""

Reward = Callable[[Any, dict[str, Any]], Any]
"""Returns the reward of a completion of the prompt of a record, which is a line of the prompts' file; or a reply as a
program writes it. The completion is a text, or with rl.max_turns above 1 the texts of its turns and of the messages
between them."""


def exact(completion: str, record: dict[str, Any]) -> float:
    """Return 1 if the completion is the record's "solution", except for white space around either, else 0."""
    return float(completion.strip() == str(record["solution"]).strip())


def regex(completion: str, record: dict[str, Any]) -> float:
    """Return 1 if the record's regular expression "solution" is found in the completion, else 0."""
    return float(re.search(str(record["solution"]), completion) is not None)


BUILT_IN = {"exact": exact, "regex": regex}


def find_function(name: str) -> Reward:
    """Return the reward function with this name, importing it if it is not built in.

    Args:
        name: "exact", "regex" or "module:function"; the module may lie in the working directory, which is put first on
            sys.path.

    Raises:
        TypeError: what is found is no function.
        Exception: any error of the import, or an AttributeError if the module has no such name.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    attribute = getattr(import_module(module), function)
    if not callable(attribute):
        raise TypeError(f"{name} is no function")
    return attribute


def call_for_lines(name: str) -> None:
    """Call a reward function for each request on standard input, and write each reply to standard output.

    `name` is that of `find_function`. An empty line comes first. An exception of the function, but MemoryError, becomes
    {"error": "..."}. What it prints goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is not a reply
    function = find_function(name)
    print(file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = function(request["completion"], request["record"])
            if isinstance(found, str):  # float would read a digit that is a completion
                raise TypeError(f"a reward is a number, and this is the text {found!r}")
            reply = json.dumps(found if isinstance(found, dict) else {"reward": float(found)}, default=float)
        except MemoryError:
            raise
        except Exception as error:  # the function is the user's
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(reply, file=replies, flush=True)


def main(words: list[str]) -> None:
    """Limit this process, then compute rewards until standard input ends, or with "run" become the program.

    Args:
        words: the command line: bytes of memory, "call" or "run", and the function's name or the program's words.
    """
    memory, how, *what = words
    if int(memory):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if how == "run":
        os.write(1, b"\n")
        os.execvp(what[0], what)
    call_for_lines(what[0])


if __name__ == "__main__":
    main(sys.argv[1:])
