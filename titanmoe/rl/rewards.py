"""Rewards of answers, computed by worker processes with limits of time and memory.

A worker that hangs or dies costs the answer that it has, and is replaced. Which worker computes which reward changes
nothing, so their number does not either.
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.config.schema import RL
from titanmoe.rl import reward_worker


class Reward(NamedTuple):
    """The reward of an answer."""

    value: float
    """The reward; NaN if there is none."""
    problem: str = ""
    """Why there is no reward; "" if there is one."""


class _Failed(Exception):
    """A worker gives no reward; its process has to be replaced."""


class Rewards:
    """Workers that compute rewards in the background."""

    def __init__(self, options: RL):
        """Start no process yet.

        Args:
            options: the recipe's [rl].
        """
        self.options = options
        self.command = worker_command(options)
        self.executor = ThreadPoolExecutor(options.reward_workers)
        self.idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        """Workers that compute nothing; None for one whose process has not been started."""
        for _ in range(options.reward_workers):
            self.idle.put(None)

    def submit(self, prompt: str, answer: str, record: dict[str, Any]) -> Future[Reward]:
        """Compute the reward of an answer in the background.

        Args:
            prompt: the prompt's text.
            answer: the answer's text.
            record: the prompt's line of its file.
        """
        return self.executor.submit(self._compute, {"prompt": prompt, "answer": answer, "record": record})

    def _compute(self, request: dict[str, Any]) -> Reward:
        worker = self.idle.get()
        try:
            worker = worker or _Worker(self.command)
            return parse_reply(worker.ask(json.dumps(request), self.options.reward_timeout_s))
        except _Failed as error:
            worker.kill()
            worker = None
            return Reward(math.nan, str(error))
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """End all workers."""
        self.executor.shutdown(cancel_futures=True)
        while not self.idle.empty():
            if worker := self.idle.get():
                worker.kill()


def worker_command(options: RL) -> list[str]:
    """Return the command of a worker process.

    Args:
        options: the recipe's [rl].
    """
    memory = str(int(options.reward_memory_gb * 1e9))
    program = options.reward.partition("run ")[2] if options.reward.startswith("run ") else ""
    what = ["run", *shlex.split(program)] if program else ["call", options.reward]
    return [sys.executable, "-m", reward_worker.__name__, memory, *what]


def check_reward(options: RL) -> None:
    """Raise a ConfigError unless a worker of the recipe's reward starts and its function can be imported.

    Args:
        options: the recipe's [rl].
    """
    if options.reward.startswith("run "):
        from shutil import which

        program = shlex.split(options.reward)[1]
        if which(program) is None:
            raise ConfigError(
                [f"rl.reward = {options.reward!r}: there is no program {program!r} here: name one on PATH"]
            )
        return
    code = f"from {reward_worker.__name__} import find_function; find_function({options.reward!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise ConfigError(
            [
                f"rl.reward = {options.reward!r} cannot be used: {why}; give {', '.join(reward_worker.BUILT_IN)}, "
                '"module:function", or "run PROGRAM ..."'
            ]
        )


def parse_reply(line: str) -> Reward:
    """Return the reward that a worker's line of JSON has, or why it has none."""
    try:
        reply = json.loads(line)
        if not isinstance(reply, dict):
            reply = {"reward": reply}
        if "error" in reply:
            return Reward(math.nan, str(reply["error"]))
        value = float(reply["reward"])
    except (ValueError, KeyError, TypeError):
        return Reward(math.nan, f'the program wrote {line.strip()[:80]!r}, which is not like {{"reward": 1.0}}')
    return Reward(value) if math.isfinite(value) else Reward(math.nan, f"the reward is {value}")


class _Worker:
    """A worker's process."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.unread = b""

    def ask(self, line: str, seconds: float) -> str:
        """Send a line and return the line that comes back; raise _Failed if none does."""
        deadline, output = time.monotonic() + seconds, self.process.stdout
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            while b"\n" not in self.unread:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([output], [], [], left)[0]:
                    raise _Failed(f"the reward took more than rl.reward_timeout_s = {seconds:g} seconds")
                if not (more := os.read(output.fileno(), 1 << 16)):
                    raise BrokenPipeError
                self.unread += more
        except BrokenPipeError:
            code = self.process.wait()
            raise _Failed(f"the reward's process ended with exit code {code}") from None
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and what it has started, and wait for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
