"""Tokenization of preference pairs in TRL's form: a prompt, a chosen completion and a rejected one.

Each is a text, or a list of messages. Without a prompt, or with a text prompt beside messages, the prompt is the common
beginning of both completions. A pair becomes two documents: the prompt with the chosen completion, and with the
rejected one. Only the completion and its EOS are labels.

Shapes: T tokens of a document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from titanmoe.data.chat import NAME_ONE, TOOLS, ChatEncoder, ChatError
from titanmoe.data.record_reader import json_type_name
from titanmoe.data.tokenizer import Tokenizer

PROMPT, CHOSEN, REJECTED = FIELDS = "prompt", "chosen", "rejected"

Document = tuple[np.ndarray, np.ndarray | None]
"""A tokenized document: its tokens, and each token's weight as a label; None if all count alike."""


def encode_pair(record: dict[str, Any], tokenizer: Tokenizer, chat: ChatEncoder | None) -> tuple[Document, Document]:
    """Return the tokens and label weights of a preference pair's two documents, chosen then rejected.

    Assistant messages of the prompt are no labels. A text completion ends with EOS. Nothing else is added, no BOS
    either: messages end with what the chat template writes. `chat` is needed only where completions are messages.

    Raises:
        ChatError: the record is not a usable pair.
        ConfigError: the chat template is unusable.
    """
    prompt, chosen, rejected = split_pair(record)
    tools = record.get(TOOLS)
    if isinstance(chosen, str):
        if tools:
            raise ChatError(
                f"the record has {TOOLS}, which a chat template writes, and completions that are texts: use messages"
            )
        return _encode_text(prompt, chosen, tokenizer), _encode_text(prompt, rejected, tokenizer)
    if chat is None:
        raise ChatError(f"the record has messages, and there is no chat template: {NAME_ONE}")
    earlier = [message | {"weight": 0} if message.get("role") == "assistant" else message for message in prompt]
    return chat.encode([*earlier, *chosen], tools), chat.encode([*earlier, *rejected], tools)


def split_pair(record: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return (prompt, chosen, rejected) of a record: three texts, or three lists of messages.

    Without a prompt, or with a text beside messages, the common beginning of both completions becomes the prompt and is
    taken off them, but for a space at the end of a text.

    Raises:
        ChatError: the record is not a usable pair.
    """
    prompt, chosen, rejected = (record.get(name) for name in FIELDS)
    for name, completion in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not completion:
            raise ChatError(f"has no {name} completion ({name!r} is missing or empty): a pair needs both")
        if not isinstance(completion, str | list):
            raise ChatError(f"{name!r} is {json_type_name(completion)}: write a text or a list of messages")
    if type(chosen) is not type(rejected):
        raise ChatError("one completion is a text and the other a list of messages: write both as one or the other")
    if chosen == rejected:
        raise ChatError("both completions are the same, so neither is better: leave the pair out")
    if isinstance(chosen, list):
        for message in (*chosen, *rejected, *(prompt if isinstance(prompt, list) else ())):
            if not isinstance(message, dict):
                raise ChatError('a message is not an object: write {"role": "user", "content": "..."}')
    if type(prompt) is type(chosen):
        return prompt, chosen, rejected
    if isinstance(prompt, list):
        raise ChatError("the prompt is a list of messages, and the completions are texts: write all three alike")
    alike = (a == b for a, b in zip(chosen, rejected, strict=False))
    shared = next((n for n, same in enumerate(alike) if not same), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):  # as TRL: the space belongs to the completions
        shared -= 1
    for name, completion in ((CHOSEN, chosen), (REJECTED, rejected)):
        if len(completion) == shared:
            raise ChatError(f"the {name} completion is a prefix of the other one: add a prompt")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _encode_text(prompt: str, completion: str, tokenizer: Tokenizer) -> Document:
    """Return the tokens of a prompt and its completion, as one text with EOS and no BOS, and their label weights.

    Labels of the completion and of EOS have weight 1, others 0. A token that spans the border counts as a label.
    """
    tokens_T, _, end_T = tokenizer.encode_with_offsets(prompt + completion)
    end = len(prompt)
    tokens_T = np.append(tokens_T, tokenizer.eos)
    return tokens_T, np.append(end_T > end, True).astype(np.float32)
