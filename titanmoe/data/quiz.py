"""Multiple-choice questions as sequences in which only the choices are labels (validation.quiz).

Question and choice become tokens as in lm-evaluation-harness (0.4.13, TemplateLM._encode_pair): spaces at the end of
the context belong to the choice, both are encoded as one text, and the choice's tokens are those beyond the number that
the context alone has. BOS comes first, if the tokenizer has one.

Shapes: N sequences of a step, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.data.loader import BatchLayout
from titanmoe.data.pack import empty_arrays, pack_best_fit
from titanmoe.data.token_shards import StoredTokenizer
from titanmoe.data.tokenizer import Tokenizer, open_tokenizer

CHOICE = "choice"
"""Extra field of a batch: the number, among all choices, of the one that a position belongs to; -1 for padding."""
SHOWN = 5
"""Limit of problems of one file that are listed."""


@dataclass(frozen=True)
class Question:
    """A multiple-choice question."""

    context: str
    """Text before the choices."""
    choices: list[str]
    answer: int
    """Index of the right choice."""
    line: int
    """Number of the question's line in its file."""


@dataclass(frozen=True)
class Task:
    """The questions of one file; `name` is the file's name without its extension."""

    name: str
    questions: list[Question]


class ScoredSequence(NamedTuple):
    """Token ids of which the last ones, such as those of a choice, are scored, each given all before it."""

    ids: list[int]
    labels: int
    """Number of last tokens that are scored."""


def read_task(path: str) -> Task:
    """Return the multiple-choice questions of a JSONL file.

    Its lines are {"question": TEXT, "choices": [TEXT, TEXT, ...], "answer": INDEX} or blank.

    Raises:
        ConfigError: the file cannot be read, has no questions, or lines are malformed; it names at most SHOWN.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        why = f"{file.absolute()} cannot be read: {error.strerror}: check the path and its permissions"
        raise ConfigError(f"validation.quiz.paths: {why}") from None
    questions, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                questions.append(_question(parse_json(line), number))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"{path}: {len(problems) - SHOWN} more lines like these"]
    if not questions and not problems:
        problems = [f"{path} has no questions: give it lines of JSON, or leave it out of validation.quiz.paths"]
    if problems:
        raise ConfigError(problems)
    return Task(file.stem, questions)


def _question(record: Any, line: int) -> Question:
    """Return the question in a parsed line: {"question": TEXT, "choices": [TEXT, TEXT, ...], "answer": INDEX}.

    Raises:
        ValueError: the line is no question; says what is wrong, and what to write.
    """
    if not isinstance(record, dict):
        raise ValueError('is no JSON object: write {"question": "...", "choices": ["...", "..."], "answer": 0}')
    context, choices, answer = (record.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(context, str):
        raise ValueError('has no "question", or none that is a text: write "question": "..."')
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(x, str) and x for x in choices):
        raise ValueError('needs "choices", a list of two texts or more, none of them empty')
    if answer is None:
        raise ValueError('has choices but no "answer": give the number of the right one, counted from 0')
    if type(answer) is not int or not 0 <= answer < len(choices):
        last = len(choices) - 1
        raise ValueError(f'"answer" is {answer!r}, and the {len(choices)} choices have the numbers 0 to {last}')
    return Question(context, choices, answer, line)


def encode_choices(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> list[ScoredSequence]:
    """Return the tokens of each (question, choice), of which those of the choice are scored.

    A choice has to begin with its delimiter. BOS comes first, if the tokenizer has one; else an empty question is EOS.
    `labels` is below 1 if the choice adds no token to the question.
    """
    contexts = [context.rstrip() for context, _ in pairs]
    alone = tokenizer.encode_all(contexts)
    joined = tokenizer.encode_all([context + choice for context, choice in pairs])
    begin, encoded = [] if tokenizer.bos is None else [tokenizer.bos], []
    for context, first, both in zip(contexts, alone, joined, strict=True):
        # As the harness does: BOS, or else EOS, stands for an empty context.
        begin_tokens = begin if context else begin or [tokenizer.eos]
        encoded.append(ScoredSequence([*begin_tokens, *both.tolist()], len(both) - len(first)))
    return encoded


class QuizSet:
    """The batches of all multiple-choice questions for one data rank, a list of microbatches per step.

    Each sequence packs several choices, which do not attend to each other; padding fills the last step. Every iteration
    gives the same batches, and as many on every data rank. They have the extra field CHOICE. `stored` is the tokenizer
    of the training data's token shards; None if there are none.

    Raises:
        ConfigError: a file, a question or the tokenizer cannot be used, or a choice does not fit training.seq_len.
    """

    def __init__(self, config: Config, data_rank: int, data_ranks: int, stored: StoredTokenizer | None):
        options, self.layout, self.tasks = config.validation.quiz, BatchLayout(config, data_rank, data_ranks), []
        name = "bytes" if config.data.source == "stdlib" else config.data.tokenizer
        tokenizer = open_tokenizer(name) if stored is None else stored.open(name)
        problems: list[str] = []
        self.encoded: list[ScoredSequence] = []
        for path in options.paths:
            try:
                self.tasks.append(read_task(path))
            except ConfigError as error:
                problems += error.problems
                continue
            questions = self.tasks[-1].questions
            pairs = [(one.context, options.delimiter + choice) for one in questions for choice in one.choices]
            lines = [one.line for one in questions for _ in one.choices]
            encoded = encode_choices(tokenizer, pairs)
            problems += [
                f"{path}:{line}: the tokenizer adds no token to the question for {choice!r}: end the question elsewhere"
                for line, (_, choice), one in zip(lines, pairs, encoded, strict=True)
                if one.labels < 1
            ]
            longest = max(len(one.ids) - 1 for one in encoded)
            if longest > config.training.seq_len:
                problems.append(
                    f"{path} has a question and choice of {longest} tokens, more than training.seq_len = "
                    f"{config.training.seq_len}: shorten it, or raise seq_len"
                )
            self.encoded += encoded
        if problems:
            raise ConfigError(problems)
        self.sequences = pack_best_fit([len(one.ids) - 1 for one in self.encoded], config.training.seq_len)

    def __iter__(self) -> Iterator[list[Batch]]:
        layout = self.layout
        for first in range(0, len(self.sequences), layout.global_batch_size):
            numbers = (first + layout.round_robin_N).tolist()
            sequences = [self.sequences[n] if n < len(self.sequences) else [] for n in numbers]
            yield self._batch(sequences).chunk(layout.microbatches)

    def _batch(self, sequences: list[list[int]]) -> Batch:
        """Return one batch of sequences, each given as the numbers of the choices that fill it; [] is padding."""
        out = empty_arrays(len(sequences), self.layout.seq_len, separate_documents=True)
        choice_NS = np.full(out.tokens_NS.shape, -1, np.int64)
        for n, numbers in enumerate(sequences):
            begin = 0
            for number in numbers:
                ids, labels = self.encoded[number]
                end = begin + len(ids) - 1
                places = slice(begin, end)
                out.tokens_NS[n, places], out.labels_NS[n, end - labels : end] = ids[:-1], ids[-labels:]
                out.valid_NS[n, places], choice_NS[n, places] = True, number
                out.document_NS[n, places], out.position_NS[n, places] = number, np.arange(end - begin)
                begin = end
        fields = (torch.from_numpy(x) for x in out[:5])
        return Batch(*fields, extra_fields={CHOICE: torch.from_numpy(choice_NS)})
