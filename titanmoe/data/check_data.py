"""What can be refused of a run's data before there are ranks: files, fields, first records, tokenizers, templates.

Data that is tokenized already, or lies in the cache, is opened as a rank would open it. Of other data the first records
are read, as tokenizing all of it may take hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.data.open import open_documents, plan_to_tokenize
from titanmoe.data.quiz import read_task
from titanmoe.data.sources import STDLIB
from titanmoe.data.tokenize import check_first_records


def check_data(config: Config, state: Mapping[str, Any] | None = None) -> None:
    """Raise a ConfigError with everything that is wrong with the run's data.

    Args:
        config: its batch size and steps need not be derived.
        state: the loader's, in the record of a checkpoint that the run goes on from.
    """
    data, validation = config.data, config.validation
    problems, are_shards = [], True
    training = list(zip(data.paths, data.fields or [data.field] * len(data.paths), strict=True))
    for path, field in [*(training if data.source == "files" else []), *((path, "") for path in validation.paths)]:
        try:
            plan = plan_to_tokenize(config, path, field)
            if plan is None:
                open_documents(config, path, field)
            else:
                are_shards = False
                check_first_records(plan)
        except ConfigError as error:
            problems += error.problems
    for path in validation.answers.paths:
        try:
            read_task(path)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if data.source != STDLIB and are_shards:  # that takes seconds to tokenize, and nothing can be wrong with it
        _open(config, state)


def _open(config: Config, state: Mapping[str, Any] | None) -> None:
    """Open token shards, or random tokens, as a rank does, without counting all sequences of epochs."""
    loader = Loader(replace(config, training=replace(config.training, epochs=0)), 0, 1)
    if config.validation.interval and (config.validation.paths or config.validation.held_out):
        ValidationSet(config, 0, 1, loader.held_out)
    if state is None:
        return
    loader.epochs_to_train = config.training.epochs  # a run of epochs takes turns in another order
    try:
        problems = loader.why_not_from(dict(state))
    except (KeyError, IndexError, TypeError, ValueError):  # what is not a state is refused where it is loaded
        return
    if problems:
        raise ConfigError(problems)
