"""Prompts as token ids, and generated token ids as text, for `titanmoe generate` and [validation.samples].

`read_samples` reads the prompts of a recipe's [validation.samples]. `contradictions` and `check_samples` refuse what
cannot be completed: the first when the recipe is read, the second before ranks start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titanmoe.config.load import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.data.formats import FORMATS

if TYPE_CHECKING:  # titanmoe.components imports this module for every command, which may not need numpy
    from titanmoe.data.tokenizer import Tokenizer

Messages = list[dict[str, Any]]


def begin_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids that documents begin with: BOS, or none."""
    return [] if tokenizer.bos is None else [tokenizer.bos]


def with_begin(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return token ids after BOS, which is added unless they have it or the tokenizer has none."""
    begin = begin_tokens(tokenizer)
    return ids if ids[: len(begin)] == begin else begin + ids


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Return the text that generated tokens add to that of the prompt, both given as token ids.

    They are decoded together, because some tokenizers drop the space before a text's first word.
    """
    return tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]


# ---- the prompts of [validation.samples]


class SamplePrompt(NamedTuple):
    """A prompt of [validation.samples]."""

    text: str
    """The text to show; of a chat its last message."""
    ids: list[int]
    """Token ids that the model continues."""


class SamplePrompts(NamedTuple):
    """All prompts of [validation.samples], with what is needed to complete them."""

    prompts: list[SamplePrompt]
    tokenizer: Tokenizer
    ends: set[int]
    """Token ids that end a completion."""


def has_samples(config: Config) -> bool:
    """Return whether a recipe has prompts to complete during the run."""
    return bool(config.validation.samples.prompts or config.validation.samples.path)


def contradictions(config: Config) -> Iterator[Violation]:
    """Yield each contradiction of [validation.samples].

    These are sampling options without effect at temperature 0, and prompts in a recipe without validation or with
    synthetic data.
    """
    samples, table = config.validation.samples, "validation.samples"
    if samples.temperature == 0 and (samples.top_k or samples.top_p < 1):
        yield Violation(
            (f"{table}.temperature", f"{table}.top_k", f"{table}.top_p"),
            f"{table}.temperature = 0 samples nothing, and top_k and top_p would have no effect: set a temperature, "
            "such as 0.8, or leave them out",
        )
    if not has_samples(config):
        return
    if not config.validation.interval:
        yield Violation(
            (f"{table}.prompts", f"{table}.path", "validation.interval"),
            f"{table} has prompts, which are completed after validations, but validation.interval = 0 makes none: set "
            "it, such as 100, with validation.held_out or validation.paths",
        )
    if config.data.source == "synthetic":
        yield Violation(
            (f"{table}.prompts", f"{table}.path", "data.source"),
            f'{table} has prompts, but data.source = "synthetic" has no tokenizer to read them with: leave the prompts '
            "out, or train on text",
        )


def check_samples(config: Config) -> None:
    """Raise a ConfigError with every reason why the prompts of [validation.samples] cannot be completed.

    Reasons are a model or a number of ranks that cannot generate, and what `read_samples` refuses. Takes the resolved
    config. Does nothing if there are no prompts.
    """
    if not has_samples(config):
        return
    from titanmoe.generate.model import samples_config

    problems = []
    try:
        samples_config(config, config.job.ranks, "cpu")
    except ConfigError as error:
        problems += [f"validation.samples has prompts: {text}; leave the prompts out" for text in error.problems]
    try:
        read_samples(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def read_samples(config: Config) -> SamplePrompts:
    """Return the prompts of [validation.samples]; ConfigError with everything that is wrong with them.

    A text becomes a user's message if the format is chat, or auto and the run is trained on chats. Prompts without a
    token and those longer than seq_len are refused.
    """
    from titanmoe.data.chat import ChatError, open_chat_encoder

    samples = config.validation.samples
    prompts: list[tuple[str, str | Messages]] = [
        (f"validation.samples.prompts[{i}]", text) for i, text in enumerate(samples.prompts)
    ]
    problems: list[str] = []
    if samples.path:
        for place, record in read_json_lines(samples.path, "validation.samples.path", problems):
            try:
                prompts.append((place, read_prompt(record)))
            except ValueError as error:
                problems.append(f"{place}: {error}")
        if len(prompts) == len(samples.prompts) and not problems:
            problems.append(
                f"{samples.path} has no prompts: give it lines of JSON, or leave out validation.samples.path"
            )
    tokenizer, of_chats = _tokenizer_of_data(config)
    as_chat = samples.format == "chat" or (samples.format == "auto" and of_chats)
    chat = None
    if any(as_chat or isinstance(prompt, list) for _, prompt in prompts):
        chat = open_chat_encoder(config.data.chat_template, tokenizer)
    encoded, seq_len = [], config.training.seq_len
    for place, prompt in prompts:
        if as_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            ids = tokenizer.encode_all([prompt])[0] if isinstance(prompt, str) else chat.encode_prompt(prompt)
            ids = with_begin(ids.tolist(), tokenizer)
        except ChatError as error:
            problems.append(f"{place}: {error}")
            continue
        if not ids:
            problems.append(f"{place} is empty, and the tokenizer has no begin mark: give it some text")
        if len(ids) > seq_len:
            problems.append(
                f"{place} has {len(ids):,} tokens, more than training.seq_len = {seq_len:,}: shorten it, or raise "
                "seq_len"
            )
        text = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        encoded.append(SamplePrompt(text if isinstance(text, str) else "(a message that is not text)", ids))
    if problems:
        raise ConfigError(problems)
    ends = {tokenizer.eos, chat.end_of_turn_token()} - {None} if chat else {tokenizer.eos}
    return SamplePrompts(encoded, tokenizer, ends)


def read_json_lines(path: str, option: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield place ("PATH:LINE", from 1) and parsed contents of each line of a JSONL file; empty lines are left out.

    `problems` gets a message for each line that cannot be read, or for the file; `option` names the path there.
    """
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        problems.append(f"{option}: {Path(path).expanduser().absolute()}: {error.strerror}")
        return
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            if line.strip():
                yield place, parse_json(line)
        except ValueError as error:
            problems.append(f"{place}: {error}")


def read_prompt(record: Any) -> str | Messages:
    """Return the prompt in a record of a JSONL file: a text, or messages without the assistant's at their end.

    The record is a text, {"prompt": a text or messages}, or a chat in one of titanmoe.data.chat_layouts.

    Raises:
        ValueError: the record has none, with a message that goes on after the record's place.
    """
    from titanmoe.data.chat_layouts import read_chat

    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise ValueError('is no prompt: write "a text", {"prompt": "..."} or {"messages": [...]}')
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else read_chat(record)[0]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise ValueError('has messages that are not like {"role": "user", "content": "..."}')
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("has no message before the assistant's: begin with what a user says")
    return messages


def _tokenizer_of_data(config: Config) -> tuple[Tokenizer, bool]:
    """Open the tokenizer that makes a run's tokens; also return whether it is trained on chats.

    Preferences, and token shards with a label mask, count as chats.

    Raises:
        ConfigError: it cannot be opened, or is another than the one that made the run's token shards.
    """
    from titanmoe.data.token_shards import ShardDocuments, is_shards
    from titanmoe.data.tokenizer import open_tokenizer

    data = config.data
    if data.source == "stdlib":
        return open_tokenizer("bytes"), False
    shards = [ShardDocuments(path) for entry in data.paths if is_shards(path := Path(entry).expanduser())]
    spec = FORMATS.look_up(data.format)
    of_chats = spec.conversations or spec.completions_per_prompt > 1 or any(one.has_label_mask for one in shards)
    if not shards:
        return open_tokenizer(data.tokenizer), of_chats
    return shards[0].stored_tokenizer.open(data.tokenizer), of_chats
