"""Rewards of completions, computed by worker processes with limits of time and memory.

A worker that hangs or dies costs the completion that it has, and is replaced. Which worker computes which reward
changes nothing, so their number does not either.
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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.config.schema import RL
from titanmoe.rl import reward_worker

START_S = 60
"""Seconds after which a process that is not ready is given up."""
LONGEST_REPLY = 1 << 20
"""Bytes of the longest line that a program may write."""
LARGEST = 1e30
"""Bound of rewards, whose squares are summed, and which float32 has to hold."""
LONGEST_PROBLEM = 300
"""Characters of an error of a reward that events show."""
UNFINISHED = (
    "the environment's message has no place in rl.max_turns turns and generation.max_tokens tokens, and no reward is "
    "beside it"
)


class Reward(NamedTuple):
    """The reward of a completion, or the message of an environment to its turns so far."""

    value: float
    """The reward, if the completion is over; NaN if there is none."""
    problem: str = ""
    """Reason why there is no reward; "" if there is one."""
    message: str | None = None
    """Reply of the environment, after which the model goes on; None if the completion is finished."""
    role: str = "user"
    """Role of the message in a chat."""
    ids: list[int] | None = None
    """Token ids of the message; None if the completion is over, finished or not."""


class _Failed(Exception):
    """A worker gives no reward; its process has to be replaced."""


class Rewards:
    """Workers that compute rewards in the background."""

    def __init__(self, options: RL):
        """Make workers, whose processes start when each gets its first completion."""
        self.options = options
        self.executor = ThreadPoolExecutor(options.reward_workers)
        self.workers = [_Worker(worker_command(options)) for _ in range(options.reward_workers)]
        self.idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        """Workers that compute nothing."""
        for worker in self.workers:
            self.idle.put(worker)

    def submit(
        self,
        prompt: str,
        turns: list[str],
        record: dict[str, Any],
        encode: Callable[[Reward], Reward] = lambda one: one,
    ) -> Future[Reward]:
        """Compute the reward of a completion in the background.

        The future has a `Reward`, also if the worker fails: then NaN with a problem.

        Args:
            turns: texts of the completion's turns and of the messages between them; one if rl.max_turns is 1.
            record: the prompt's line of its file.
            encode: called with the reward in a thread of this object; returns it with the ids of its message.
        """
        completion = turns if self.options.max_turns > 1 else turns[0]
        request = {"prompt": prompt, "completion": completion, "record": record}
        return self.executor.submit(lambda: encode(self._compute(request)))

    def _compute(self, request: dict[str, Any]) -> Reward:
        worker = self.idle.get()
        try:
            return worker.reward(request, self.options.reward_timeout_s)
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """Kill all workers and wait for their ends. Futures that wait are cancelled, those being computed get NaN."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.interrupt()
        self.executor.shutdown()
        for worker in self.workers:
            worker.kill()


def worker_command(options: RL) -> list[str]:
    """Return the command that starts titanmoe.rl.reward_worker for rl.reward, with its memory limit."""
    memory = str(int(options.reward_memory_gb * 1e9))
    program = options.reward.partition("run ")[2] if options.reward.startswith("run ") else ""
    what = ["run", *shlex.split(program)] if program else ["call", options.reward]
    return [sys.executable, "-m", reward_worker.__name__, memory, *what]


def check_reward(options: RL) -> None:
    """Raise a ConfigError unless a worker of the recipe's reward starts, or the program that it runs can be found.

    The worker is started to import the function, which is not called; a program ("run ...") is not started.
    """
    name, usage = options.reward, f'give {", ".join(reward_worker.BUILT_IN)}, "module:function", or "run PROGRAM ..."'
    if name.startswith("run "):
        from shutil import which

        try:
            words = shlex.split(name)[1:]
        except ValueError as error:
            raise ConfigError(f"rl.reward = {name!r} cannot be read as a command: {error}") from None
        if not words:
            raise ConfigError(f"rl.reward = {name!r} names no program: {usage}")
        if which(words[0]) is None:
            raise ConfigError(f"rl.reward = {name!r}: there is no program {words[0]!r} here: name one on PATH")
        return
    try:
        done = subprocess.run(
            worker_command(options), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S
        )
        why = done.returncode and (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"it was not imported in {START_S} seconds"
    if why:
        raise ConfigError(f"rl.reward = {name!r} cannot be used: {why}; {usage}")


def parse_reply(line: bytes) -> Reward:
    """Return the reward or message in a worker's line of JSON, or NaN with the reason why it has none.

    A message without a reward has NaN and a `problem`, too, for the case that the completion cannot go on. A reward of
    magnitude LARGEST (1e30) or more, or NaN, counts as none.

    Args:
        line: a number, {"reward": NUMBER}, {"message": TEXT} or both, perhaps with "role", or {"error": TEXT}.

    Raises:
        _Failed: the line is anything else.
    """
    try:
        reply = parse_json(line)
        if not isinstance(reply, dict):
            reply = {"reward": reply}
        if error := reply.get("error"):
            return Reward(math.nan, " ".join(str(error).split())[:LONGEST_PROBLEM])
        message, role = reply.get("message"), reply.get("role", "user")
        if message is not None:
            "".join([message, role]).encode()  # an error if they are no texts
            if "reward" not in reply:
                return Reward(math.nan, UNFINISHED, message, role)
        if isinstance(reply["reward"], str):
            raise TypeError("a text")
        value = float(reply["reward"])
    except OverflowError:
        value = math.inf
    except (ValueError, KeyError, TypeError):
        text = line.strip()[:80].decode(errors="replace")
        expected = '{"reward": 1.0} or {"message": "..."}'
        raise _Failed(f"the program wrote {text!r}, which is not like {expected}") from None
    problem = "" if abs(value) < LARGEST else f"the reward is {value}"
    return Reward(math.nan if problem else value, problem, message, role)


class _Worker:
    """A worker, whose process starts with the first request and is replaced by a new one when it fails."""

    def __init__(self, command: list[str]):
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None
        self.unread = b""

    def reward(self, request: dict[str, Any], seconds: float) -> Reward:
        """Return the reward of a completion; NaN with a problem if the process fails, which is killed then.

        Args:
            request: "prompt", "completion" and "record", the line for the process.
            seconds: time limit, without that for starting a process.
        """
        try:
            if self.process and self.process.poll() is not None:  # it ended after its last reply
                self.kill()
            if not self.process:
                self.process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
                )
                os.set_blocking(self.process.stdin.fileno(), False)
                self._exchange(b"", START_S, f"the reward's process was not ready after {START_S} seconds")
            late = f"the reward took more than rl.reward_timeout_s = {seconds:g} seconds"
            return parse_reply(self._exchange(json.dumps(request).encode() + b"\n", seconds, late))
        except (_Failed, OSError) as error:  # OSError: no process can be started
            self.kill()
            return Reward(math.nan, str(error))

    def _exchange(self, unsent: bytes, seconds: float, late: str) -> bytes:
        """Send bytes to the process and return the line that comes back, without its end.

        Raises _Failed if none does within the time limit, or several do.

        Args:
            unsent: the bytes; b"" only waits for a line.
            late: message of the error after the time limit.
        """
        deadline, source, target = time.monotonic() + seconds, self.process.stdout, self.process.stdin
        while b"\n" not in self.unread:
            pipes = select.poll()
            pipes.register(source, select.POLLIN)
            if unsent:
                pipes.register(target, select.POLLOUT)
            ready = dict(pipes.poll(1000 * max(0.0, deadline - time.monotonic())))
            if not ready:
                raise _Failed(late)
            if source.fileno() in ready:
                self._read(deadline)
            else:
                try:
                    unsent = unsent[target.write(unsent) :]
                except BrokenPipeError:  # its output ends, too, or the time is up
                    unsent = b""
        line, _, self.unread = self.unread.partition(b"\n")
        if unsent or self.unread:
            raise _Failed("the program wrote more than one line for a completion")
        return line

    def _read(self, deadline: float) -> None:
        """Add what the process has written to `unread`, waiting without limit if there is nothing.

        Raises _Failed if its output has ended or a line has more than LONGEST_REPLY bytes.

        Args:
            deadline: time.monotonic() until which a process whose output has ended may exit.
        """
        more = os.read(self.process.stdout.fileno(), 1 << 16)
        self.unread += more
        if len(self.unread) > LONGEST_REPLY:
            raise _Failed(f"the program wrote a line of more than {LONGEST_REPLY:,} bytes")
        if not more:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
            code = self.process.returncode
            how = "closed its output" if code is None else f"ended with exit code {code}"
            raise _Failed(f"the reward's process {how}")

    def interrupt(self) -> None:
        """Kill the process and what it has started; do nothing if there is none."""
        process = self.process
        with suppress(ProcessLookupError):
            if process:
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and what it has started, and wait for its end."""
        self.interrupt()
        if self.process:
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                pipe.close()
        self.process, self.unread = None, b""
