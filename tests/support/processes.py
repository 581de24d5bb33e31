"""Runs programs as forks of a process that has imported torch, which saves four CPU-seconds for each.

    done = processes.run(["train.py", "--config", recipe])       # as subprocess.run: returncode, stdout, stderr
    done = processes.run(["-c", code]);  processes.run(["-m", "titanmoe", ...])

They are forks of the process that tests/world.py makes its ranks from; they get signals, exit and write like `python
FILE`. Ranks that torchrun or `titanmoe train` starts there are new processes, or with `forks` forks too.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import world

ROOT = Path(__file__).resolve().parents[2]


class Started:
    """Running process, whose output can be read at any time from the files `out` and `err`."""

    def __init__(
        self,
        words: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        forks: bool = False,
        stdin: str = "",
    ):
        """Start `python WORDS` in a fork, and return at once.

        Args:
            words: arguments of python: a file, or -c and code, or -m and a module, and its arguments.
            env: its environment; None for this process's.
            cwd: its working directory.
            forks: whether ranks that it starts are forks, too.
            stdin: text on its standard input.
        """
        self.args = [str(word) for word in words]
        self.folder = tempfile.TemporaryDirectory(prefix="titanmoe-process-")
        self.out, self.err = (Path(self.folder.name, name) for name in ("out", "err"))
        given = dict(os.environ if env is None else env)
        self.process = world._forkserver().Process(
            target=_become, args=(self.args, given, str(cwd), str(self.out), str(self.err), forks, stdin)
        )
        self.process.start()
        self.pid = self.process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout, self.out.read_text(), self.err.read_text())
        return subprocess.CompletedProcess(self.args, self.process.exitcode, self.out.read_text(), self.err.read_text())


def run(
    words: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    return Started(words, env, cwd).wait(timeout)


def fork_ranks() -> None:
    """Let ranks that torchrun starts in this process from now on be forks of it."""
    from scripts.torture import runs

    runs.fork_ranks()


def _become(words: list[str], env: dict[str, str], cwd: str, out: str, err: str, forks: bool, stdin: str) -> None:
    """Run a file, a module or code in the forked process, as python does. It exits or returns when that ends.

    The parameters are those of `Started`; stdout and stderr are appended to the files `out` and `err`.
    """
    world.begin_in_fork()
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    if cwd != str(ROOT) and Path(cwd, "titanmoe").is_dir():  # another copy of the code
        for name in [name for name in sys.modules if name.split(".")[0] in ("titanmoe", "tests", "scripts")]:
            del sys.modules[name]
    sys.stdin = io.StringIO(stdin)
    sys.stdout.reconfigure(line_buffering=True)
    if forks:
        fork_ranks()
    what, rest = words[0], words[1:]
    if what in ("-c", "-m"):
        sys.argv = [what, *rest[1:]]
        if what == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(what, run_name="__main__")
