"""Conversion of chats as published data sets store them to messages: ShareGPT, Alpaca, prompt and completion.

`read_chat` takes the first layout of LAYOUTS whose fields a record has, or the one that the user names by its first
field (data.field). Equal content gives equal messages in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from titanmoe.config.parse_json import parse_json
from titanmoe.data.record_reader import CHAT_LAYOUTS, json_type_name

Record = Mapping[str, Any]
TOOLS = "tools"
"""Field of a record, beside its messages, with the tools that the assistant may call: a list of JSON schemas."""
TOOL_CALLS = "tool_calls"
"""Key of an assistant message with the calls of tools that it makes."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool", "developer")}
"""Role of a message by its "from" in ShareGPT's layout. The values are all roles."""
CALL = "function_call"
""" "from" of ShareGPT's messages in which the assistant calls a tool, as JSON with a name and arguments."""
SYSTEM = "system"
"""Field with the system prompt, beside the other fields of a layout."""


class ChatError(ValueError):
    """Error about a conversation that cannot be rendered."""


def read_chat(record: Record, field: str = "") -> tuple[Any, Any]:
    """Return a record's messages as a list of {"role": ..., "content": ...}, and its tools or None; both unchecked.

    Args:
        record: fields of the record by name; null is as absent.
        field: the field that the user names, a key of LAYOUTS or another that holds messages; "" for the first layout
            that fits.

    Raises:
        ChatError: the record has no chat, or one that cannot be converted.
    """
    record = _without_nulls(record)
    if (name := field or layout_of(record)) not in record:
        has = ", ".join(repr(part) for part in record if part != TOOLS) or "none"
        raise ChatError(f"has no {name or 'messages'!r}, or null; of the fields that chats are read from it has {has}")
    return LAYOUTS.get(name, _from_messages)(record, name), record.get(TOOLS)


def layout_of(record: Record) -> str:
    """Return the first field of the layout that a record has, a key of LAYOUTS; "" if none. Null is as absent."""
    record = _without_nulls(record)
    return next((fields[0] for fields in CHAT_LAYOUTS if record.keys() >= {*fields}), "")


def _without_nulls(record: Record) -> Record:
    return {name: value for name, value in record.items() if value is not None}


def _from_messages(record: Record, name: str) -> Any:
    """Return the messages in a record's field `name`, ShareGPT's "from" and "value" converted, and JSON text parsed.

    If the field is not "messages", the record's system prompt comes first unless the messages begin with one. A value
    that is no list is returned as it is, to be refused later.

    Raises:
        ChatError: the field is another text, or a message cannot be converted.
    """
    messages = _parsed(record[name])
    if isinstance(messages, str):
        raise ChatError(
            f'{name!r} is a text that is not a list of messages in JSON: write [{{"role": "user", "content": "..."}}]'
        )
    if not isinstance(messages, list):
        return messages
    messages = [_from_sharegpt(number, message) for number, message in enumerate(messages, 1)]
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    has_system = first.get("role") == SYSTEM
    return messages if has_system or name == "messages" else [*_system(record), *messages]


def _parsed(value: Any) -> Any:
    """Return the list that a JSON text holds; any other value, such as a text that is no JSON list, as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value.encode())
        except ValueError:
            return value
        return parsed if isinstance(parsed, list) else value
    return value


def _from_sharegpt(number: int, message: Any) -> Any:
    """Return ShareGPT's message, with "from" and "value", as one with "role" and "content"; any other as it is.

    Raises:
        ChatError: "from" is unknown, or a call of a tool is not JSON.
    """
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    speaker, text = message["from"], message.get("value")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker == CALL:
        return {"role": "assistant", "content": "", TOOL_CALLS: _calls(number, text)} | rest
    if speaker not in ROLES:
        raise ChatError(f"message {number} is from {speaker!r}: use one of {', '.join([*ROLES, CALL])}")
    return {"role": ROLES[speaker], "content": text} | rest


def _calls(number: int, text: Any) -> list[dict[str, Any]]:
    try:
        calls = parse_json(text.encode()) if isinstance(text, str) else text
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ChatError(f'message {number} calls a tool, but not in JSON: write {{"name": "...", "arguments": {{}}}}')
    return [{"type": "function", "function": call} for call in calls]


def parse_tool_calls(number: int, message: Any) -> Any:
    """Return a message whose "tool_calls" are JSON text with the list in their place; any other message as it is.

    Only the list is parsed: arguments of a call that are JSON text stay text. Blank text gives an empty list.

    Raises:
        ChatError: the text is not a list of calls in JSON; names the message by `number`.
    """
    if not isinstance(message, dict) or not isinstance(text := message.get(TOOL_CALLS), str):
        return message
    calls = _parsed(text) if text.strip() else []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ChatError(
            f"message {number}'s {TOOL_CALLS} are a text that is not a list of calls in JSON: write a list of objects"
        )
    return message | {TOOL_CALLS: calls}


def _from_alpaca(record: Record, name: str) -> list[dict[str, Any]]:
    question = "\n\n".join(filter(None, (_text(record, name), _text(record, "input"))))
    return [*_system(record), _message("user", question), _message("assistant", _assistant_text(record, "output"))]


def _from_prompt(record: Record, name: str) -> list[Any]:
    prompt, completion = _messages_or_text(record[name]), _messages_or_text(record.get("completion"))
    if completion == []:
        raise ChatError("'completion' is missing or empty, so there is nothing to learn from: add a text")
    if isinstance(prompt, list) and isinstance(completion, list):
        earlier = [
            message | {"weight": 0} if isinstance(message, dict) and message.get("role") == "assistant" else message
            for message in prompt
        ]
        return [*_system(record), *earlier, *completion]
    if isinstance(prompt, list) or isinstance(completion, list):
        raise ChatError(
            "one of prompt and completion is a text, the other a list of messages: write both as one or the other"
        )
    return [
        *_system(record),
        _message("user", _text(record, name)),
        _message("assistant", _assistant_text(record, "completion")),
    ]


def _messages_or_text(value: Any) -> Any:
    """Return the list of messages that a JSON text holds; any other value as it is."""
    parsed = _parsed(value)
    is_messages = isinstance(parsed, list) and all(isinstance(message, dict) for message in parsed)
    return parsed if is_messages or not isinstance(value, str) else value


def _system(record: Record) -> list[dict[str, Any]]:
    return [_message(SYSTEM, text)] if (text := _text(record, SYSTEM)) else []


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(record: Record, name: str) -> str:
    text = record.get(name, "")
    if not isinstance(text, str):
        raise ChatError(f"{name!r} is {json_type_name(text)}: write a text")
    return text


def _assistant_text(record: Record, name: str) -> str:
    if not (text := _text(record, name)).strip():
        raise ChatError(f"{name!r} is missing or empty, so there is nothing to learn from: add a text")
    return text


DESCRIPTIONS = {
    "conversations": "conversations (ShareGPT)",
    "instruction": "instruction, input and output (Alpaca)",
    "prompt": "prompt and completion",
}
"""The fields of layouts other than messages, for people."""
LAYOUTS: dict[str, Callable[[Record, str], Any]] = {
    "messages": _from_messages,
    "conversations": _from_messages,
    "instruction": _from_alpaca,
    "prompt": _from_prompt,
}
"""Function that converts a record, by the field that tells its layout."""
CHAT_FIELDS = (*LAYOUTS, "input", "output", "completion", SYSTEM)
"""All fields that layouts read."""
