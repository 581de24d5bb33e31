"""The prompts of a run of reinforcement learning: their text, token ids and records, read from JSONL files.

`titanmoe.rl.policy_trainer` completes them. `contradictions` and `check_prompts` refuse what cannot be run: the first
when a recipe is read, the second before ranks start.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from titanmoe.config.load import ConfigError
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config

if TYPE_CHECKING:  # titanmoe.components imports this module for every command, which may not need numpy
    from titanmoe.data.chat import ChatEncoder
    from titanmoe.data.tokenizer import Tokenizer
    from titanmoe.generate.prompts import Messages


class PromptRecord(NamedTuple):
    """A prompt of the files, with its token ids."""

    number: int
    """Number of the record in the files, from 0."""
    text: str
    """The prompt's text; of a chat its last message."""
    ids: list[int]
    """Token ids that the model continues."""
    record: dict[str, Any]
    """The line of the file, for the reward."""


class Prompts(NamedTuple):
    """All prompts of a run, with what is needed to complete them."""

    trained: list[PromptRecord]
    held_out: list[PromptRecord]
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    """The chat template; None if no prompt is a chat."""
    ends: set[int]
    """Token ids that end a completion."""
    digest: str
    """Digest of the prompts' token ids."""

    def encode_message(self, prompt: PromptRecord, last: int, message: str, role: str) -> list[int]:
        """Return the token ids that go between a turn of a completion and the next one: those of a message.

        To a prompt that is a text the message is added as it is; in a chat the template writes it, up to where the
        model goes on, without an end mark that is `last` already. Raises a ChatError or ConfigError if it cannot.

        Args:
            last: the turn's last token.
            message: what the environment says to it.
            role: role of the message in a chat.
        """
        from titanmoe.generate.prompts import read_prompt

        messages = read_prompt(prompt.record)
        if isinstance(messages, str):
            return self.tokenizer.encode_all([message])[0].tolist()
        ids = self.chat.encode_reply(messages, {"role": role, "content": message}).tolist()
        return ids[1:] if ids[:1] == [last] else ids  # the end mark has been sampled


def contradictions(config: Config) -> Iterator[Violation]:
    """Yield a violation for each contradiction between [rl], [generation] and other options of a recipe.

    Without rl.reward the one violation can be that rl.prompts is set.
    """
    rl, generation = config.rl, config.generation
    if not rl.reward:
        if rl.prompts:
            yield Violation(
                ("rl.prompts", "rl.reward"), 'rl.prompts is set, but rl.reward is not: set it, such as "exact"'
            )
        return
    if not rl.prompts:
        yield Violation(("rl.reward", "rl.prompts"), "rl.reward is set, but rl.prompts is empty: name JSONL files")
    if rl.max_turns > 1 and rl.reward in ("exact", "regex"):
        yield Violation(
            ("rl.max_turns", "rl.reward"),
            f"rl.max_turns = {rl.max_turns}, but rl.reward = {rl.reward!r} ends each completion at its first turn: use "
            "max_turns = 1, or a function or program that is an environment",
        )
    if rl.completions < 2:
        yield Violation(
            ("rl.completions",), "rl.completions = 1 has no other completion to compare with: use 2 or more"
        )
    if rl.completions > generation.batch_size:
        yield Violation(
            ("rl.completions", "generation.batch_size"),
            f"rl.completions = {rl.completions} do not fit into generation.batch_size = {generation.batch_size}: "
            "raise it",
        )
    if bool(rl.eval_interval) != bool(rl.held_out):
        yield Violation(
            ("rl.eval_interval", "rl.held_out"),
            f"rl.eval_interval = {rl.eval_interval} and rl.held_out = {rl.held_out}: set both, or both to 0",
        )
    if rl.kl and not config.lora.rank:
        yield Violation(
            ("rl.kl", "lora.rank"),
            f"rl.kl = {rl.kl} keeps the model near the weights under its adapters, and there are none: set lora.rank, "
            "or kl = 0",
        )
    if rl.replay == "old" and rl.updates == 1:
        yield Violation(
            ("rl.replay", "rl.updates"),
            'rl.replay = "old" with rl.updates = 1 replays the experts that the routers choose anyway, because no step '
            'lies between: use replay = "off", or updates = 2 or more',
        )
    checkpoint, seq_len = config.checkpoint, config.training.seq_len
    if generation.max_tokens >= seq_len:
        yield Violation(
            ("generation.max_tokens", "training.seq_len"),
            f"generation.max_tokens = {generation.max_tokens} leaves no room for prompts in training.seq_len = "
            f"{seq_len}: lower it, or raise seq_len",
        )
    saves_best = checkpoint.keep_best or config.training.stop_after
    for option, interval in (
        ("checkpoint.interval", checkpoint.interval),
        ("rl.eval_interval", rl.eval_interval if saves_best else 0),
    ):
        if checkpoint.enable and interval % rl.updates:
            yield Violation(
                ("rl.updates", option),
                f"{option} = {interval} is no multiple of rl.updates = {rl.updates}, and a checkpoint has no "
                f"completions that were not learned from: use {max(1, interval // rl.updates) * rl.updates}",
            )
    for path, value, plain in (
        ("training.epochs", config.training.epochs, 0),
        ("training.objective", config.training.objective, "cross_entropy"),
        ("model.mtp_depth", config.model.mtp_depth, 0),
        ("moe.jitter", config.moe.jitter, 0.0),
        ("moe.capacity_factor", config.moe.capacity_factor, 0.0),
        ("data.skip_steps", config.data.skip_steps, []),
        ("validation.interval", config.validation.interval, 0),
        ("validation.quiz.interval", config.validation.quiz.interval, 0),
    ):
        if value != plain:
            yield Violation(("rl.reward", path), f"{path} = {value!r} cannot be used with [rl]: use {path} = {plain!r}")


def check_prompts(config: Config) -> None:
    """Raise a ConfigError with every reason why a run of reinforcement learning cannot start.

    Reads the prompts, starts a worker of the reward for a moment, and checks that the model can generate under
    [generation.parallelism]. Does nothing if rl.reward is "".
    """
    if not config.rl.reward:
        return
    from titanmoe.generate.model import generation_config
    from titanmoe.rl.rewards import check_reward

    problems = []
    for check, table in (
        (lambda: read_prompts(config), ""),
        (lambda: check_reward(config.rl), ""),
        (lambda: generation_config(config, config.job.ranks, "cpu"), "generation: "),
    ):
        try:
            check()
        except ConfigError as error:
            problems += [table + problem for problem in error.problems]
    if problems:
        raise ConfigError(problems)


def read_prompts(config: Config) -> Prompts:
    """Read the prompts of [rl] and return them; every rl.held_out-th record, if that is not 0, is held out.

    Raises:
        ConfigError: records are invalid (the first five are named), too few, or do not fit rl.reward, or the vocabulary
            is smaller than the tokenizer's; an error of the chat template is raised alone.
    """
    from titanmoe.data.chat import open_chat_encoder
    from titanmoe.data.tokenizer import open_tokenizer
    from titanmoe.generate.prompts import read_json_lines, read_prompt

    rl, longest = config.rl, config.training.seq_len - config.generation.max_tokens
    tokenizer = open_tokenizer(config.data.tokenizer)
    chat: ChatEncoder | None = None
    records: list[PromptRecord] = []
    problems: list[str] = []
    for path in rl.prompts:
        for place, record in read_json_lines(path, "rl.prompts", problems):
            try:
                if not isinstance(record, dict):
                    raise ValueError('is not like {"prompt": "..."}')
                prompt = read_prompt(record)
                if isinstance(prompt, list):
                    chat = chat or open_chat_encoder(config.data.chat_template, tokenizer)
                text, ids = _encode(prompt, tokenizer, chat, longest)
                _check_solution(record, rl.reward)
                records.append(PromptRecord(len(records), text, ids, record))
            except ConfigError:  # of the chat template
                raise
            except ValueError as error:
                problems.append(f"{place} {error}")
    if len(problems) > 5:
        problems = [*problems[:5], f"and {len(problems) - 5} more lines like these"]
    trained, held_out = [], []
    for one in records:
        (held_out if rl.held_out and one.number % rl.held_out == rl.held_out - 1 else trained).append(one)
    if not problems and (not trained or (rl.held_out and not held_out)):
        problems.append(
            f"rl.prompts have {len(records)} records, of which {len(held_out)} are held out: give more, or change "
            "rl.held_out"
        )
    if tokenizer.vocab_size > config.model.vocab_size:
        problems.append(
            f"model.vocab_size = {config.model.vocab_size} is below the {tokenizer.vocab_size} of data.tokenizer = "
            f"{config.data.tokenizer!r}: use {tokenizer.vocab_size} or more"
        )
    if problems:
        raise ConfigError(problems)
    ends = {tokenizer.eos} | ({chat.end_of_turn_token()} - {None} if chat else set())
    digest = hashlib.blake2b(json.dumps([one.ids for one in records]).encode(), digest_size=8).hexdigest()
    return Prompts(trained, held_out, tokenizer, chat, ends, digest)


def _check_solution(record: dict[str, Any], reward: str) -> None:
    """Raise a ValueError if a record has no "solution" that a built-in reward can compare completions with.

    Args:
        reward: the recipe's rl.reward; any but "exact" and "regex" needs no solution.
    """
    if reward in ("exact", "regex") and "solution" not in record:
        raise ValueError(f'has no "solution", which rl.reward = "{reward}" compares completions with')
    if reward == "regex":
        try:
            re.compile(str(record["solution"]))
        except re.error as error:
            raise ValueError(f'has a "solution" that is no regular expression: {error}') from None


def _encode(
    prompt: str | Messages, tokenizer: Tokenizer, chat: ChatEncoder | None, longest: int
) -> tuple[str, list[int]]:
    """Return a prompt's text, of a chat its last message, and its token ids; ValueError if it cannot be completed.

    The ids begin with the tokenizer's begin token, if it has one, and of a chat are those of all messages.

    Args:
        chat: the chat template; not None if the prompt is a chat.
        longest: the most tokens that it may have.
    """
    from titanmoe.generate.prompts import with_begin

    try:
        json.dumps(prompt, ensure_ascii=False).encode()  # each tokenizer fails in its own way
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no character: leave it out") from None
    if isinstance(prompt, str):
        text, ids = prompt, tokenizer.encode_all([prompt])[0].tolist()
    else:
        text, ids = str(prompt[-1].get("content")), chat.encode_prompt(prompt).tolist()
    ids = with_begin(ids, tokenizer)
    if not ids:
        raise ValueError("is empty, and the tokenizer has no begin mark: give it some text")
    if len(ids) > longest:
        raise ValueError(
            f"has {len(ids):,} tokens, more than training.seq_len - generation.max_tokens = {longest:,}: shorten it, "
            "or raise seq_len"
        )
    return text, ids
