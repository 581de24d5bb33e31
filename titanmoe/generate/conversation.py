"""The conversation of `titanmoe generate --chat` without prompts: one line of standard input at a time.

Only rank 0 reads; it sends each prompt to the others. While it waits for a line it sends a message every few seconds,
so that no collective times out.
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
from titanmoe.generate.prompts import with_begin

WAIT_MESSAGE_S = 10
"""Seconds between messages while rank 0 waits for input; shorter than any timeout of a collective."""


class Conversation:
    """The messages of a conversation and the chat template that encodes them."""

    def __init__(self, chat: ChatEncoder, system: str | None):
        self.chat = chat
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[int]:
        """Add a message of the user; return the conversation's token ids up to where the assistant message begins.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            return self.chat.encode_prompt(self.messages).tolist()
        except ChatError as error:
            raise ConfigError(f"--chat: {error}") from None


def read_lines() -> Iterator[str | None]:
    """Yield the lines of standard input that are not empty, and None every WAIT_MESSAGE_S seconds without one.

    Lines are stripped. Ends with the input. On a terminal it asks for each line with "> " on stderr.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    # A daemon thread, so that waiting for a line does not keep the process from ending.
    threading.Thread(target=read, daemon=True).start()
    asks = True
    while True:
        if asks and sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = lines.get(timeout=WAIT_MESSAGE_S)
        except queue.Empty:
            asks = False
            yield None
            continue
        if not line:
            return
        asks = True
        if text := line.strip():
            yield text


def turns(conversation: Conversation, first: bool, broadcast: Callable[[Any], Any]) -> Iterator[tuple[str, Prompt]]:
    """Yield each line that the user types and, as a prompt, the conversation up to it, on every rank.

    Collective over the world. Ends with the input. The caller adds each assistant message to `conversation.messages`,
    on rank 0, before the next turn.

    Args:
        conversation: the messages so far; used on rank 0.
        first: whether this is rank 0, which reads standard input.
        broadcast: gets a value of any type, and returns rank 0's on all ranks; collective.

    Raises:
        ConfigError: on all ranks, if the chat template refuses the messages.
    """
    lines, number = read_lines() if first else iter(()), 0
    while True:
        message: Any = "end"
        if first and (text := next(lines, "")) is None:
            message = "wait"
        elif first and text:
            try:
                message = text, with_begin(conversation.ask(text), conversation.chat.tokenizer)
            except ConfigError as error:
                message = error
        message = broadcast(message)
        if message == "end":
            return
        if isinstance(message, ConfigError):
            raise message
        if message != "wait":
            text, ids = message
            yield text, Prompt(number, ids)
            number += 1
