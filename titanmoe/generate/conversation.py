"""`titanmoe generate --chat` without prompts: a conversation, a line of standard input at a time.

Rank 0 alone reads, and tells the others what to continue. While it waits for a line it says so every few seconds, so
that no rank believes the others to be hung.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.data.chat import ChatEncoder, ChatError
from titanmoe.generate.loop import Prompt

SAYS_SO_EVERY_S = 10
"""Below any timeout of a collective."""


class Conversation:
    """What has been said so far, as the chat template writes it."""

    def __init__(self, chat: ChatEncoder, system: str | None):
        self.chat = chat
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[int]:
        """Return the tokens of the conversation up to where the answer to `text` begins."""
        self.messages.append({"role": "user", "content": text})
        try:
            return self.chat.encode_prompt(self.messages).tolist()
        except ChatError as error:
            raise ConfigError([f"--chat: {error}"]) from None

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def read_lines() -> Iterator[str | None]:
    """Yield the lines of standard input that are not empty, and None every few seconds without one."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    # A thread that waits for a line does not keep the process from ending.
    threading.Thread(target=read, daemon=True).start()
    asks = True
    while True:
        if asks and sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = lines.get(timeout=SAYS_SO_EVERY_S)
        except queue.Empty:
            asks = False
            yield None
            continue
        if not line:
            return
        asks = True
        if text := line.strip():
            yield text


def turns(
    conversation: Conversation, begin: list[int], first: bool, share: Callable[[Any], Any]
) -> Iterator[tuple[str, Prompt]]:
    """On every rank, what the user says and the prompt that it makes, one after the other. Each answer goes to
    `conversation` before the next.

    begin: the begin mark, if a sequence has one. first: whether this is rank 0. share: gives what rank 0 has to all.
    """
    lines, number = read_lines() if first else iter(()), 0
    while True:
        message: Any = "end"
        if first and (text := next(lines, "")) is None:
            message = "wait"
        elif first and text:
            try:
                ids = conversation.ask(text)
                message = text, ids if ids[: len(begin)] == begin else begin + ids
            except ConfigError as error:
                message = error
        message = share(message)
        if message == "end":
            return
        if isinstance(message, ConfigError):
            raise message
        if message != "wait":
            text, ids = message
            yield text, Prompt(number, ids)
            number += 1
