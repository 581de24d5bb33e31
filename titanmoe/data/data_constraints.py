"""Constraints between options of [data] and [validation]: sources, weights, packing, epochs, what is held out.

titanmoe.components passes them to titanmoe.config.load, which reports them together with all other contradictions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, Data
from titanmoe.data.formats import completions_in
from titanmoe.models.families import mixers


def parse_skip_steps(texts: list[str]) -> list[range]:
    """Return the range of steps that each entry of data.skip_steps names: "120", or "120-130" with both ends.

    Raises:
        ValueError: an entry is malformed.
    """
    steps = []
    for text in texts:
        first, _, last = text.partition("-")
        if not re.fullmatch(r"[1-9]\d{0,17}(-[1-9]\d{0,17})?", text) or int(last or first) < int(first):
            raise ValueError(f"data.skip_steps has {text!r}, which is neither a step nor a range: write 120 or 120-130")
        steps.append(range(int(first), int(last or first) + 1))
    return steps


def contradictions(config: Config) -> Iterator[Violation]:
    """Yield each contradiction of options of [data] and [validation]: with each other, with epochs, with the model.

    No file is read but the manifests of token shards. What a data format contradicts is in its spec (`FormatSpec`).
    """
    yield from _check_sources(config.data)
    try:
        parse_skip_steps(config.data.skip_steps)
    except ValueError as error:
        yield Violation(("data.skip_steps",), str(error))
    yield from _check_mix(config)
    yield from _check_epochs(config)
    yield from _check_packing(config)
    yield from _check_shared_prefixes(config)
    yield from _check_validation(config)
    yield from _check_quiz(config)


def _check_sources(data: Data) -> Iterator[Violation]:
    if data.source == "files" and not data.paths:
        yield Violation(
            ("data.source", "data.paths"),
            'data.source = "files" reads data.paths, which is empty: name files or folders, such as paths = ["corpus"]',
        )
    if data.source == "stdlib" and data.paths:
        yield Violation(
            ("data.source", "data.paths"),
            'data.source = "stdlib" does not read data.paths, which is set: use source = "files", or paths = []',
        )


def _check_mix(config: Config) -> Iterator[Violation]:
    weights, paths = config.data.weights, config.data.paths
    if (names := config.data.fields) and len(names) != len(paths):
        yield Violation(
            ("data.fields", "data.paths"),
            f"data.fields has {len(names)} names for {len(paths)} entries of data.paths: give one for each, or none, "
            "which takes data.field for all",
        )
    fields = ("data.weights", "data.paths")
    if weights and len(weights) != len(paths):
        yield Violation(
            fields,
            f"data.weights has {len(weights)} numbers for {len(paths)} entries of data.paths: give one for each, or "
            "none, which weighs sources by their tokens",
        )
    elif weights and not sum(weights):
        yield Violation(fields, f"data.weights = {weights} sums to 0, so no source would be read: make one positive")
    else:
        for path, weight in zip(paths, weights, strict=False):
            if not weight:
                text = f"data.weights gives {path!r} the weight 0: remove both, or give it a positive weight"
                yield Violation(fields, text)


def _check_epochs(config: Config) -> Iterator[Violation]:
    data, epochs = config.data, config.training.epochs
    if epochs and data.source == "synthetic":
        yield Violation(
            ("training.epochs", "data.source"),
            f'training.epochs = {epochs}, but data.source = "synthetic" never ends: set training.steps, or another '
            "source",
        )
    if epochs and data.weights:
        yield Violation(
            ("training.epochs", "data.weights"),
            f"training.epochs = {epochs} goes through every source as often, and data.weights = {data.weights} asks "
            "for other fractions: set weights = [], or training.steps instead of epochs",
        )


def _check_packing(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.source == "synthetic" and data.packing != "stream":
        yield Violation(
            ("data.packing", "data.source"),
            f'data.packing = "{data.packing}" is about documents, and data.source = "synthetic" has none: set packing '
            '= "stream", or another source',
        )
    elif data.balance_work and data.packing == "stream":
        yield Violation(
            ("data.balance_work", "data.packing"),
            'data.balance_work = true evens out the cost of samples, but with data.packing = "stream" all cost the '
            'same: set packing = "documents" or "best_fit", or balance_work = false',
        )


def _check_shared_prefixes(config: Config) -> Iterator[Violation]:
    data = config.data
    if not data.share_prefixes:
        return
    if data.source != "files" or not all(completions_in(path, config) > 1 for path in data.paths):
        yield Violation(
            ("data.share_prefixes", "data.format"),
            "data.share_prefixes = true is for preference pairs, whose completions share a prompt, and the data has "
            'none: set it to false, or data.format = "preference"',
        )
    if data.balance_work:
        yield Violation(
            ("data.share_prefixes", "data.balance_work"),
            "data.balance_work = true weighs documents by their lengths, and with data.share_prefixes = true two "
            "completions share a prefix: set either to false",
        )
    for name in sorted({mixer.name for mixer in mixers(config.model) if not mixer.attends}):
        yield Violation(
            ("data.share_prefixes", "model.family"),
            f"data.share_prefixes = true lets two completions share a prompt, and the {name} of model.family = "
            f'"{config.model.family}" takes tokens one after the other: set it to false',
        )


def _check_validation(config: Config) -> Iterator[Violation]:
    validation, source = config.validation, config.data.source
    if validation.interval and source != "synthetic" and not validation.paths and not validation.held_out:
        yield Violation(
            ("validation.interval", "validation.paths", "validation.held_out"),
            f"validation.interval = {validation.interval} has nothing to validate on: name validation.paths, or set "
            "validation.held_out = 100 to keep every 100th document of the training data for it",
        )
    if validation.paths and validation.held_out:
        yield Violation(
            ("validation.paths", "validation.held_out"),
            f"validation.held_out = {validation.held_out} holds out documents that nothing reads, as validation.paths "
            "is set: drop one of them",
        )
    if validation.paths and not validation.interval:
        yield Violation(
            ("validation.paths", "validation.interval"),
            "validation.paths is set, but validation.interval = 0 never reads it: set interval, such as 100, or "
            "paths = []",
        )
    if validation.held_out == 1:
        yield Violation(
            ("validation.held_out",),
            "validation.held_out = 1 holds out every document and leaves none to train on: use 2 or more, such as 100",
        )
    if source == "synthetic" and validation.interval and not validation.paths and not validation.steps:
        yield Violation(
            ("validation.steps", "data.source"),
            'validation.steps = 0 asks for the full set, but data.source = "synthetic" never ends: set steps = 10',
        )


def _check_quiz(config: Config) -> Iterator[Violation]:
    quiz, fields = config.validation.quiz, ("validation.quiz.paths", "validation.quiz.interval")
    if quiz.paths and not quiz.interval:
        yield Violation(
            fields,
            "validation.quiz.paths is set, but validation.quiz.interval = 0 never reads it: set interval, such "
            "as 100, or paths = []",
        )
    if quiz.interval and not quiz.paths:
        yield Violation(
            fields,
            f"validation.quiz.interval = {quiz.interval} has no questions: name validation.quiz.paths, or set "
            "interval = 0",
        )
    names = [Path(path).stem for path in quiz.paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield Violation(
            fields[:1],
            f"validation.quiz.paths has several files called {', '.join(twice)}, and results are reported by that "
            "name: rename all but one",
        )
    if quiz.paths and config.data.source == "synthetic":
        yield Violation(
            ("validation.quiz.paths", "data.source"),
            'validation.quiz.paths has questions, but data.source = "synthetic" has no tokenizer to read them with: '
            "use another source, or paths = []",
        )
