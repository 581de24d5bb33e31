"""Conversations to tokens, by a Jinja chat template, and which tokens the assistant said.

The assistant's part is what the template marks with {% generation %}; without marks, what each of its messages adds to
the conversation so far, rendered with the prompt for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.data.read import named
from titanmoe.data.tokenizer import SETTINGS, Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Mark the assistant's part while a template renders: Unicode guarantees that these are never characters."""


MOST_TEMPLATE = 1 << 17
"""Characters; the longest published template has some 30,000."""
MOST_TOKENS = 20_000
"""Jinja's tokens, not counting white space: they are what takes time to compile."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What data sets call a message's reasoning."""


class ChatError(ValueError):
    """A conversation that cannot be rendered."""


class Chat:
    def __init__(self, template: str, origin: str, tokenizer: Tokenizer):
        self.template, self.origin, self.tokenizer = template, origin, tokenizer
        try:
            import jinja2
        except ImportError:
            raise ConfigError([f"{origin}: chat templates need the package jinja2: pip install jinja2"]) from None
        if len(template) > MOST_TEMPLATE:
            raise ConfigError(
                [f"{origin}: the chat template has more than {MOST_TEMPLATE:,} characters, the limit for a template"]
            )
        environment = self._environment = _environment()
        self._errors = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
        self._of_type = (TypeError, jinja2.UndefinedError)
        try:
            tags = _tags(environment.lex(template), origin)
            self._compiled = environment.from_string(template)
        except ConfigError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError([f"{origin}:{error.lineno}: the chat template is not Jinja: {error.message}"]) from None
        except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
            text = _short(f"{type(error).__name__} {error}")
            raise ConfigError([f"{origin}: the chat template cannot be compiled: {text}"]) from None
        self.marks_generation = "generation" in tags and "endgeneration" in tags

    def encode(self, messages: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and which of them are the assistant's. ChatError: this conversation is at fault; ConfigError: the
        template is."""
        _check(messages)
        text, spans = self._marked(messages) if self.marks_generation else self._by_prefixes(messages)
        tokens_T, begin_T, end_T = self.tokenizer.with_offsets(text)
        said_T = np.zeros(len(tokens_T), bool)
        for begin, end in spans:
            said_T |= (begin_T < end) & (end_T > begin)
        return tokens_T, said_T

    def question(self, text: str) -> np.ndarray:
        """What a user says, up to where the answer begins."""
        return self.tokenizer.with_offsets(self._render([{"role": "user", "content": text}], prompt=True)).tokens_T

    def _render(self, messages: list[Any], prompt: bool = False) -> str:
        """As transformers' apply_chat_template, except that no null, list or object is written as Python writes it."""
        text = self._filled(messages, prompt)
        if "None" in text and (culprit := self._writes_none(messages, prompt, text.count("None"))):
            raise ChatError(
                f"the chat template {self.origin} writes {culprit}, which is null, as the word None: leave it out, "
                'make it "", or use a template that tests for it'
            )
        return text

    def _filled(self, messages: list[Any], prompt: bool) -> str:
        from titanmoe.data.template import OverBudget

        try:
            self._environment.begin(messages)
            seen = [_guarded(_with_reasoning(message), f"message {n}") for n, message in enumerate(messages, 1)]
            given = dict(messages=seen, tools=None, documents=None, add_generation_prompt=prompt)
            return self._compiled.render(given | self.tokenizer.marks)
        except OverBudget as error:
            raise ConfigError([f"the chat template {self.origin} {error}: use another (chat_template)"]) from None
        except RecursionError:
            raise ChatError(f"the chat template {self.origin} or its messages are nested too deeply") from None
        except _NotText as error:
            raise ChatError(
                f"the chat template {self.origin} writes {error} as Python writes it: make it text, or use a template "
                "that takes it apart or writes it with | tojson"
            ) from None
        except self._errors as error:
            odd = _not_text(messages) if isinstance(error, self._of_type) else ""
            raise ChatError(f"the chat template {self.origin} refuses it: {odd or _short(str(error))}") from None

    def _writes_none(self, messages: list[Any], prompt: bool, times: int) -> str:
        """The first null without which the word is written less often."""
        for n, message in enumerate(messages):
            for key in [key for key, value in message.items() if _has_null(value)]:
                other = [*messages[:n], message | {key: _without_null(message[key])}, *messages[n + 1 :]]
                try:
                    if self._filled(other, prompt).count("None") >= times:
                        continue
                except ChatError:  # it takes no text there, so it tests for the null
                    continue
                return f"message {n + 1}'s {key}" if message[key] is None else f"a value in message {n + 1}'s {key}"
        return ""

    def _marked(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]]]:
        parts, spans, length, began = [], [], 0, -1
        for char in _split(self._render(messages)):
            if char == OPEN:
                began = length
            elif char == CLOSE:
                spans.append((began, length))
            else:
                parts.append(char)
                length += len(char)
        return "".join(parts), spans

    def _by_prefixes(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]]]:
        whole, spans = self._render(messages), []
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._asked(messages[:n])
            answered = self._render(messages[: n + 1])
            for shorter, longer, what in (
                (
                    asked,
                    answered,
                    f"message {n + 1}, the assistant's, is rendered differently up to where it begins",
                ),
                (answered, whole, f"the first {n + 1} of {len(messages)} messages are rendered differently alone"),
            ):
                if not longer.startswith(shorter):
                    at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
                    raise ConfigError(
                        [
                            f"the chat template {self.origin} does not show what the assistant said: {what} (from "
                            f"character {at}: {shorter[at : at + 30]!r}, then {longer[at : at + 30]!r}). "
                            f"{self._how_to_mark(messages[:n], message)}"
                        ]
                    )
            spans.append((len(asked), len(answered)))
        return whole, spans

    def _asked(self, before: list[Any]) -> str:
        """What is there when the assistant begins."""
        try:
            return self._render(before, prompt=True)
        except ChatError:
            if before:
                raise
            raise ChatError(
                f"its first message is the assistant's, and the chat template {self.origin} cannot be rendered "
                "without a message before it: put one there, such as the system's"
            ) from None

    def _how_to_mark(self, before: list[Any], answer: dict[str, Any]) -> str:
        """With what this template writes around an answer, as far as that can be seen."""
        begun, asked = self._render(before), self._asked(before)
        turn, content = self._render([*before, answer]).removeprefix(begun), answer.get("content")
        head, tail = asked.removeprefix(begun), ""
        if isinstance(content, str) and content and content in turn:
            first, _, tail = turn.rpartition(content)
            head = head or first
        lines = self.template.splitlines()
        found = next((n for n, line in enumerate(lines, 1) if re.search(r"""["']assistant["']""", line)), 0)
        where = f" (from line {found} of the template on)" if found and len(lines) > 1 else ""
        end = f"{{{{ {tail!r} }}}}" if tail else ""
        return (
            "Mark what the assistant says in a copy of the template and name that with --chat-template or "
            f"data.chat_template: {{{{ {head!r} }}}}{{% generation %}}...{end}{{% endgeneration %}}, where ... is what "
            f"writes the answer{where}"
        )


class _NotText(Exception):
    """Says what was to be written as text."""


class _Objects(dict):
    """An object in a message. Templates may look into it and write it as JSON."""

    where = ""

    def __str__(self) -> str:
        raise _NotText(self.where)

    __repr__ = __str__


class _Parts(list):
    where = ""

    def __str__(self) -> str:
        raise _NotText(self.where)

    __repr__ = __str__


def _guarded(value: Any, where: str) -> Any:
    """A copy in which lists and objects cannot become text."""
    if isinstance(value, dict):
        joint = "." if "'s " in where else "'s "
        found = _Objects((key, _guarded(one, f"{where}{joint}{key}")) for key, one in value.items())
        found.where = f"{where}, an object,"
    elif isinstance(value, list):
        found = _Parts(_guarded(one, f"{where}[{n}]") for n, one in enumerate(value))
        found.where = f"{where}, a list,"
    else:
        return value
    return found


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under all names that templates read it by, as transformers 5 does."""
    said = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def _has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_null, value.values() if isinstance(value, dict) else value))
    return value is None


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items()}
    return [_without_null(one) for one in value] if isinstance(value, list) else "" if value is None else value


def _not_text(messages: list[Any]) -> str:
    """A content that templates often cannot take."""
    for n, message in enumerate(messages, 1):
        content = message.get("content", "")
        if not isinstance(content, str):
            return f"it takes text, and message {n}'s content is {named(content)}"
    return ""


def open_chat(template: str, tokenizer: Tokenizer) -> Chat:
    """The template in a file, or the tokenizer's own."""
    if template:
        file = Path(template).expanduser()
        try:
            return Chat(_read(file), str(file), tokenizer)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"chat template {file}: {getattr(error, 'strerror', None) or error}"]) from None
    folder = getattr(tokenizer, "file", None)
    if folder is None:
        raise ConfigError(["the byte tokenizer has no chat template of its own: name a Jinja file (chat_template)"])
    own, settings = folder.parent / "chat_template.jinja", folder.parent / SETTINGS
    if own.is_file():
        return Chat(_read(own), str(own), tokenizer)
    found = parse_json(settings.read_bytes()).get("chat_template") if settings.is_file() else None
    if isinstance(found, list):  # several, by name
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    if not found:
        raise ConfigError([f"{folder.parent} has no chat template ({own.name}, or in {SETTINGS}): name a Jinja file"])
    return Chat(found, str(settings), tokenizer)


def _tags(lexed: Iterable[tuple[int, str, str]], origin: str) -> set[str]:
    """All names in a template."""
    found, tokens = set(), 0
    for _, kind, value in lexed:
        tokens += kind != "whitespace"
        if tokens > MOST_TOKENS:
            raise ConfigError(
                [f"{origin}: the chat template has more than {MOST_TOKENS:,} tokens, the limit for a template"]
            )
        if kind == "name":
            found.add(value)
    return found


def _read(file: Path) -> str:
    with file.open(encoding="utf-8") as stream:
        return stream.read(MOST_TEMPLATE + 1)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ChatError("'messages' is not a list of messages, or is empty")
    for n, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f'message {n} is not like {{"role": "user", "content": "..."}}')
    try:
        text = json.dumps(messages, ensure_ascii=False, default=str)
    except RecursionError:
        raise ChatError("it is nested too deeply") from None
    if OPEN in text or CLOSE in text:
        raise ChatError("it contains U+FDD0 or U+FDD1, which are not characters")
    if all(message["role"] != "assistant" for message in messages):
        raise ChatError("the assistant says nothing in it, so there is nothing to learn from")


def _split(text: str) -> list[str]:
    return [part for part in re.split(f"([{OPEN}{CLOSE}])", text) if part]


def _environment() -> Any:
    """As the templates of published models expect it, without today's date (strftime_now): tokens must not depend on
    the day, and templates that ask for the date have a default of their own."""
    import jinja2.ext
    import jinja2.nodes

    from titanmoe.data.template import Counted

    class Generation(jinja2.ext.Extension):
        """{% generation %}...{% endgeneration %}"""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = [jinja2.nodes.Output([jinja2.nodes.TemplateData(char)], lineno=line) for char in (OPEN, CLOSE)]
            return [mark[0], *body, mark[1]]

    def refuse(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = Counted(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.set_filter("tojson", _json)
    environment.globals["raise_exception"] = refuse
    return environment


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
