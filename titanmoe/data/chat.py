"""Rendering of chats to tokens by a Jinja chat template, with a label weight for each token that the assistant said.

The assistant's tokens are those that the template marks with {% generation %}. Without that tag they are what each
assistant message adds to the conversation before it, rendered with the generation prompt. A message's "weight" is the
weight of its tokens in the loss: 1 unless given; 0 for a message that is not to be learned.

Shapes: T tokens of a conversation.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.config.recipe import SHIPPED
from titanmoe.data.chat_layouts import ROLES, TOOLS, ChatError, parse_tool_calls
from titanmoe.data.chat_template import ChatTemplate, NotText, OverBudget
from titanmoe.data.record_reader import json_type_name
from titanmoe.data.tokenizer import CHAT_TEMPLATE, SETTINGS, Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Characters that mark the assistant's spans while a template renders: Unicode guarantees that they are never used."""


NAME_ONE = (
    "name a Jinja file with data.chat_template (--chat-template of titanmoe tokenize), such as "
    f"{SHIPPED / 'chatml.jinja'}, which is ChatML"
)
"""Advice of messages about a missing chat template."""
USE_ANOTHER = "use another (chat_template)"
"""Advice of messages about a chat template that cannot be used."""
ASSISTANT_TEXT = "\ufdd2"
"""Stands for the text of an assistant message while a template renders what follows: a character that is never used."""
PROBE = "zebra"
"""Text of an assistant message that shows what a template writes after one."""
MAX_TEMPLATE = 1 << 17
"""Limit of a template in characters; the longest published one has some 30,000."""
WEIGHT, MAX_WEIGHT = "weight", 1e6
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which data sets store its reasoning."""


class ChatEncoder:
    """Encoder of conversations: a Jinja chat template with the tokenizer of its text.

    Args:
        template: text of the template.
        origin: where the template comes from, for messages.

    Raises:
        ConfigError: the template is too long or cannot be compiled, or jinja2 is missing.
    """

    def __init__(self, template: str, origin: str, tokenizer: Tokenizer):
        self.template, self.origin, self.tokenizer = template, origin, tokenizer
        try:
            import jinja2
        except ImportError:
            raise ConfigError(f"{origin}: chat templates need the package jinja2: pip install jinja2") from None
        if len(template) > MAX_TEMPLATE:
            raise ConfigError(
                f"{origin}: the chat template has more than {MAX_TEMPLATE:,} characters, the limit: {USE_ANOTHER}"
            )
        self._errors = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
        self._type_errors = (TypeError, jinja2.UndefinedError)
        try:
            self._compiled = ChatTemplate(template, OPEN, CLOSE)
        except OverBudget as error:
            raise ConfigError(f"{origin}: compiling the chat template {error}: {USE_ANOTHER}") from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}:{error.lineno}: the chat template is not Jinja: {error.message}: correct it there"
            ) from None
        except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
            text = _shorten(f"{type(error).__name__} {error}")
            raise ConfigError(f"{origin}: the chat template cannot be compiled: {text}: {USE_ANOTHER}") from None
        self.has_generation_tags = self._compiled.has_generation_tags
        self._tools: list[dict[str, Any]] | None = None
        """Tools of the conversation that is being encoded."""

    def encode(self, messages: Any, tools: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a conversation and their weights as labels, which are 0 outside assistant messages.

        Both are (T,), the weights in float32. A token that reaches into a message's characters has its weight.

        Args:
            messages: a record's list of {"role": ..., "content": ...}, unchecked; "weight" may be another key.
            tools: list of JSON schemas that the template writes, or such a list as JSON text; None or empty for none.

        Raises:
            ChatError: the conversation cannot be rendered, or has nothing to learn from.
            ConfigError: the template is unusable.
        """
        if isinstance(messages, list):
            messages = [parse_tool_calls(number, message) for number, message in enumerate(messages, 1)]
        _check_messages(messages, self.template)
        self._tools = self._read_tools(tools)
        try:
            return self._encode_checked(messages)
        finally:
            self._tools = None

    def _read_tools(self, tools: Any) -> list[dict[str, Any]] | None:
        """Return a record's tools, a list of JSON schemas or such a list as JSON text, as a list; None if it has none.

        Raises:
            ChatError: the tools are malformed, or the template does not write tools.
        """
        if isinstance(tools, str):
            try:
                tools = parse_json(tools.encode()) if tools.strip() else None
            except ValueError as error:
                raise ChatError(f"{TOOLS!r} is a text that is not JSON: {_shorten(str(error))}") from None
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ChatError(f"{TOOLS!r} is {json_type_name(tools)}: write a list of JSON schemas, or one as a text")
        if not re.search(rf"\b{TOOLS}\b", self.template):
            raise ChatError(
                f"the record has {TOOLS}, and the chat template {self.origin} does not write them: use one that does, "
                f"or leave the field {TOOLS!r} out"
            )
        return tools

    def _encode_checked(self, messages: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        text, spans = (
            self._render_with_marks(messages) if self.has_generation_tags else self._render_by_prefixes(messages)
        )
        tokens_T, begin_T, end_T = self.tokenizer.encode_with_offsets(text)
        weight_T = np.zeros(len(tokens_T), np.float32)
        for (begin, end), weight in zip(spans, self._weights(messages, len(spans)), strict=True):
            weight_T[(begin_T < end) & (end_T > begin)] = weight
        if not weight_T.any():
            raise ChatError(
                f"the chat template {self.origin} leaves no token to learn from: what the assistant says, with "
                "what ends it, has to stand between {% generation %} and {% endgeneration %}"
                if self.has_generation_tags
                else f"the chat template {self.origin} writes nothing that the assistant says: use another template"
            )
        return tokens_T, weight_T

    def _weights(self, messages: list[Any], spans: int) -> list[float]:
        """Return the label weight of each of `spans` spans that the assistant says, from the weights of its messages.

        Raises:
            ChatError: messages have weights other than 1, and the spans are not one for each of the assistant's.
        """
        weights = [float(message.get(WEIGHT, 1)) for message in messages if message["role"] == "assistant"]
        if len(weights) == spans or set(weights) == {1.0}:
            return weights if len(weights) == spans else [1.0] * spans
        raise ChatError(
            f"messages have weights, but the chat template {self.origin} marks {spans} parts of {len(weights)} "
            "assistant messages: mark each of them once with {% generation %}"
        )

    def encode_prompt(self, messages: list[dict[str, str]]) -> np.ndarray:
        """Return the token ids of a conversation followed by the generation prompt, for sampling a reply.

        Unlike `encode`, it takes no tools and does not check the messages.

        Raises:
            ChatError: the template refuses the messages.
            ConfigError: rendering exceeds a limit of time or memory.
        """
        return self.tokenizer.encode_with_offsets(self._render_without_marks(messages, prompt=True)).tokens_T

    def encode_reply(self, messages: list[dict[str, str]], reply: dict[str, str]) -> np.ndarray:
        """Return the token ids between an assistant message and the next one, if a reply follows it.

        They begin with what the template writes after the text, such as <|im_end|>, and end with the generation
        prompt.

        Args:
            messages: the messages before the assistant message.
            reply: the message after it.

        Raises:
            ChatError: the template refuses the messages, does not write the assistant message once, or leaves the reply
                out.
            ConfigError: rendering exceeds a limit of time or memory.
        """
        through_assistant = [*messages, {"role": "assistant", "content": ASSISTANT_TEXT}]
        text = self._render_without_marks([*through_assistant, reply], prompt=True)
        if text == self._render_without_marks(through_assistant, prompt=True):
            raise ChatError(f"the chat template {self.origin} writes nothing for a message of role {reply['role']!r}")
        _, *rest = text.split(ASSISTANT_TEXT)
        if len(rest) != 1:
            raise ChatError(
                f"the chat template {self.origin} does not write an assistant message once: nothing can follow it"
            )
        return self.tokenizer.encode_with_offsets(rest[0]).tokens_T

    def end_of_turn_token(self) -> int | None:
        """Return the id of the special token that ends an assistant message, such as <|im_end|>; None if none does."""
        try:
            text = self._render_without_marks(
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
            )
        except ChatError:  # the template refuses the probe
            return None
        tail = text[text.rfind(PROBE) + len(PROBE) :].lstrip() if PROBE in text else ""
        return self.tokenizer.leading_special_token(tail)

    def describe_additions(self) -> dict[str, str]:
        """Return what the template writes for a message, with "..." for its content, by role.

        The roles are system, user and assistant, one after the other; one that the template refuses is left out.
        """
        additions, messages, before = {}, [], ""
        for role in ("system", "user", "assistant"):
            with suppress(ChatError):
                text = self._render_without_marks([*messages, {"role": role, "content": PROBE}])
                messages.append({"role": role, "content": PROBE})
                additions[role] = text.removeprefix(before).replace(PROBE, "...")
                before = text
        return additions

    def _render_without_marks(self, messages: list[Any], prompt: bool = False) -> str:
        return self._render(messages, prompt).replace(OPEN, "").replace(CLOSE, "")

    def _render(self, messages: list[Any], prompt: bool = False) -> str:
        return self._render_all([(messages, prompt)])[0]

    def _render_all(self, requests: list[tuple[list[Any], bool]]) -> list[str]:
        """Return the text of each request, a list of messages and whether the generation prompt follows.

        Renders as transformers' apply_chat_template does, but with the marks OPEN and CLOSE around what stands between
        {% generation %} and {% endgeneration %}.

        Raises:
            ChatError: the template refuses the messages, or would write a null, list or object as Python writes it.
            ConfigError: rendering exceeds a limit of time or memory.
        """
        requests = [(list(map(_with_reasoning, messages)), prompt) for messages, prompt in requests]
        texts = self._render_unchecked(requests)
        for (messages, prompt), text in zip(requests, texts, strict=True):
            if "None" in text and (culprit := self._find_written_null(messages, prompt, text.count("None"))):
                raise ChatError(
                    f"the chat template {self.origin} writes {culprit}, which is null, as the word None: leave it "
                    'out, make it "", or use a template that tests for it'
                )
        return texts

    def _render_unchecked(self, requests: list[tuple[list[Any], bool]]) -> list[str]:
        shared = {TOOLS: self._tools, "documents": None} | self.tokenizer.special_tokens
        try:
            return self._compiled.render(
                *({"messages": messages, "add_generation_prompt": prompt} | shared for messages, prompt in requests)
            )
        except OverBudget as error:
            raise ConfigError(f"the chat template {self.origin} {error}: {USE_ANOTHER}") from None
        except RecursionError:
            raise ChatError(
                f"the chat template {self.origin}, or the messages, are nested too deeply: flatten them"
            ) from None
        except NotText as error:
            raise ChatError(
                f"the chat template {self.origin} writes {error} as Python writes it: make it text, or use a template "
                "that takes it apart or writes it with | tojson"
            ) from None
        except self._errors as error:
            odd = _describe_content_not_text(requests[0][0]) if isinstance(error, self._type_errors) else ""
            raise ChatError(
                f"the chat template {self.origin} refuses the messages: {odd or _shorten(str(error))}"
            ) from None

    def _find_written_null(self, messages: list[Any], prompt: bool, times: int) -> str:
        """Return the place of the first null that the template writes as the word "None"; "" if there is none.

        The place is a text such as "message 2's content", with messages counted from 1. It is found by rendering with
        "" in place of each null.

        Args:
            messages: the conversation.
            prompt: whether the generation prompt follows.
            times: how often the rendered text has the word None.
        """
        for n, message in enumerate(messages):
            for key in [key for key, value in message.items() if _has_null(value)]:
                changed = [*messages[:n], message | {key: _without_null(message[key])}, *messages[n + 1 :]]
                try:
                    if self._render_unchecked([(changed, prompt)])[0].count("None") >= times:
                        continue
                except ChatError:  # the template refuses text there, so it tests for null
                    continue
                return f"message {n + 1}'s {key}" if message[key] is None else f"a value in message {n + 1}'s {key}"
        return ""

    def _render_with_marks(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text, unmarked, and the characters [begin, end) of each {% generation %} block."""
        texts, spans, length, span_start = [], [], 0, -1
        for text in re.split(f"([{OPEN}{CLOSE}])", self._render(messages)):
            if text == OPEN:
                span_start = length
            elif text == CLOSE:
                spans.append((span_start, length))
            else:
                texts.append(text)
                length += len(text)
        return "".join(texts), spans

    def _render_by_prefixes(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text, and the characters [begin, end) that each assistant message adds to it.

        The range begins where the text of the earlier messages with the generation prompt ends.

        Raises:
            ChatError: the template refuses the messages, or those before an assistant message.
            ConfigError: the template renders the turns before a message differently once the message follows.
        """
        places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        through_assistant = [(messages[: n + 1], False) for n in places]
        before_assistant = [(messages[:n], True) for n in places if n]
        full_text, *texts = self._render_all([(messages, False), *through_assistant, *before_assistant])
        prompts = [*([] if places[0] else [self._prompt_without_messages()]), *texts[len(places) :]]
        spans = []
        for n, prompt, through in zip(places, prompts, texts, strict=False):
            for shorter, longer, what in (
                (prompt, through, f"message {n + 1}, the assistant's, is rendered differently up to where it begins"),
                (through, full_text, f"the first {n + 1} of {len(messages)} messages are rendered differently alone"),
            ):
                if not longer.startswith(shorter):
                    at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
                    raise ConfigError(
                        f"the chat template {self.origin} does not show what the assistant said: {what} (from "
                        f"character {at}: {shorter[at : at + 30]!r}, then {longer[at : at + 30]!r}). "
                        f"{self._marking_advice(self._render(messages[:n]), prompt, through, messages[n])}"
                    )
            spans.append((len(prompt), len(through)))
        return full_text, spans

    def _prompt_without_messages(self) -> str:
        """Return the generation prompt alone; raise a ChatError if the template needs a message before it."""
        try:
            return self._render([], prompt=True)
        except ChatError:
            raise ChatError(
                f"the first message is the assistant's, and the chat template {self.origin} cannot be rendered "
                "without a message before it: put one there, such as the system's"
            ) from None

    def _marking_advice(self, before: str, prompt: str, through: str, message: dict[str, Any]) -> str:
        """Return a sentence for an error: where to put {% generation %} in the template.

        It quotes what the template writes around the assistant's `message`, as far as it can, by the rendered texts of
        the messages before it, without and with the generation prompt (`before`, `prompt`), and `through` it.
        """
        rendered, content = through.removeprefix(before), message.get("content")
        head, tail = prompt.removeprefix(before), ""
        if isinstance(content, str) and content and content in rendered:
            before_content, _, tail = rendered.rpartition(content)
            head = head or before_content
        lines = self.template.splitlines()
        first_line = next((n for n, line in enumerate(lines, 1) if re.search(r"""["']assistant["']""", line)), 0)
        where = f" (from line {first_line} of the template on)" if first_line and len(lines) > 1 else ""
        end = f"{{{{ {tail!r} }}}}" if tail else ""
        return (
            "Mark what the assistant says in a copy of the template and name that with --chat-template or "
            f"data.chat_template: {{{{ {head!r} }}}}{{% generation %}}...{end}{{% endgeneration %}}, where ... is what "
            f"writes the message{where}"
        )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the message with its reasoning under both "thinking" and "reasoning_content".

    Templates read either. A null counts as missing. A message without reasoning is returned unchanged.
    """
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    fields = {key: value for key, value in message.items() if key != "thinking" or value is not None}
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_null, value.values() if isinstance(value, dict) else value))
    return value is None


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items()}
    return [_without_null(item) for item in value] if isinstance(value, list) else "" if value is None else value


def _describe_content_not_text(messages: list[Any]) -> str:
    """Return a text that names the first message whose content is not text, for an error; "" if there is none."""
    for n, message in enumerate(messages, 1):
        content = message.get("content", "")
        if not isinstance(content, str):
            kind = json_type_name(content)
            return f'it takes text, and message {n}\'s content is {kind}: make it text, "" if there is none'
    return ""


def open_chat_encoder(template: str, tokenizer: Tokenizer) -> ChatEncoder:
    """Return an encoder of conversations with the chat template in the file `template`; "" for the tokenizer's own.

    That is the file chat_template.jinja beside it, else the one in tokenizer_config.json; of several "default".

    Raises:
        ConfigError: there is no template, or it cannot be read or compiled.
    """
    if template:
        file = Path(template).expanduser()
        try:
            return ChatEncoder(_read_template(file), str(file), tokenizer)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"chat template {file}: {reason}: name a Jinja file (chat_template), or none for the tokenizer's own"
            ) from None
    folder = getattr(tokenizer, "file", None)
    if folder is None:
        raise ConfigError(f"the byte tokenizer has no chat template of its own: {NAME_ONE}")
    template_file, settings = folder.parent / CHAT_TEMPLATE, folder.parent / SETTINGS
    if template_file.is_file():
        return ChatEncoder(_read_template(template_file), str(template_file), tokenizer)
    template_text = parse_json(settings.read_bytes()).get("chat_template") if settings.is_file() else None
    if isinstance(template_text, list):  # several, by name
        template_text = next((entry["template"] for entry in template_text if entry.get("name") == "default"), None)
    if not template_text:
        lacks = f"{folder.parent} has no chat template ({template_file.name}, or in {SETTINGS})"
        raise ConfigError(f"{lacks}: copy one there, or {NAME_ONE}")
    return ChatEncoder(template_text, str(settings), tokenizer)


def _read_template(file: Path) -> str:
    with file.open(encoding="utf-8") as stream:
        return stream.read(MAX_TEMPLATE + 1)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _check_messages(messages: Any, template: str) -> None:
    """Raise a ChatError if a conversation's messages are malformed, or the assistant says nothing to learn from.

    Roles, weights and reserved characters are checked, but not the type of a message's content. `template` is the text
    of the chat template, which may name further roles.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError(
            '"messages" is not a list of messages, or is empty: write [{"role": "user", "content": "..."}, ...]'
        )
    for n, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f'message {n} has no "role" that is a text: write {{"role": "user", "content": "..."}}')
        role, known = message["role"], dict.fromkeys(ROLES.values())
        if role not in known and not re.search(rf"""["']{re.escape(role)}["']""", template):
            usual = f'"{ROLES[role]}"' if role in ROLES else f"one of {', '.join(known)}"
            raise ChatError(f"message {n} has the role {role!r}, which the chat template does not name: use {usual}")
        weight = message.get(WEIGHT, 1)
        if role == "assistant" and weight and not _says_something(message):
            raise ChatError(f"message {n} is empty, so there is nothing to learn from: leave it out")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
            raise ChatError(f"message {n} has the weight {weight!r}: use a number from 0 to {MAX_WEIGHT:g}")
    try:
        text = json.dumps(messages, ensure_ascii=False, default=str)
    except RecursionError:
        raise ChatError("the messages are nested too deeply: flatten them") from None
    if OPEN in text or CLOSE in text:
        raise ChatError("the messages contain U+FDD0 or U+FDD1, which are not characters: remove them")
    assistant_messages = [message for message in messages if message["role"] == "assistant"]
    if assistant_messages and not any(message.get(WEIGHT, 1) for message in assistant_messages):
        raise ChatError("all of the assistant's messages have the weight 0, so there is nothing to learn from")
    if not assistant_messages:
        shown = ", ".join(map(repr, dict.fromkeys(message["role"] for message in messages)))
        raise ChatError(
            f"the assistant says nothing, so there is nothing to learn from: the roles are {shown}, and one has to be "
            "'assistant'"
        )


def _says_something(message: dict[str, Any]) -> bool:
    """Return False only if an assistant message is a blank text, with neither reasoning nor a tool call."""
    content = message.get("content")
    if not isinstance(content, str) or content.strip():
        return True
    return any(value for key, value in message.items() if key not in ("role", "content", WEIGHT))
