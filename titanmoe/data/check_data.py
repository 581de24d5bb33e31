"""Checks of a run's data before any rank is started: files, fields, first records, tokenizers, chat templates.

The launcher calls `check_data`. Token shards, also those in the cache, are opened as a rank opens them. Of other data
only the first records are read, since tokenizing all of it may take hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.data.open_documents import open_documents, plan_to_tokenize
from titanmoe.data.quiz import read_task
from titanmoe.data.sources import STDLIB
from titanmoe.data.tokenize import check_first_records


def check_data(config: Config, state: Mapping[str, Any] | None = None) -> None:
    """Check training, validation and quiz data before ranks start; raise a ConfigError with all problems.

    Of files to tokenize it reads the first records alone. If there are no problems and no such files, the data is also
    opened as a rank opens it and compared with `state`.

    Args:
        config: the recipe; derived values, such as the batch size and the steps, may still be missing.
        state: the loader's state in the checkpoint that the job resumes from; None for a new one.
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
    for path in validation.quiz.paths:
        try:
            read_task(path)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if data.source != STDLIB and are_shards:  # the standard library takes seconds to tokenize, and is always sound
        _open_as_rank(config, state)


def _open_as_rank(config: Config, state: Mapping[str, Any] | None) -> None:
    """Open training and validation data as rank 0 does; raise a ConfigError if it does not suit the recipe or `state`.

    Epochs are not counted. A malformed state passes, and is refused where it is loaded.
    """
    # Without epochs, of which all sequences would be counted.
    loader = Loader(replace(config, training=replace(config.training, epochs=0)), 0, 1)
    if config.validation.interval and (config.validation.paths or config.validation.held_out):
        ValidationSet(config, 0, 1, loader.held_out)
    if state is None:
        return
    loader.epochs_to_train = config.training.epochs  # it decides the order of the sources
    try:
        problems = loader.find_state_mismatches(dict(state))
    except (KeyError, IndexError, TypeError, ValueError):  # a malformed state is refused where it is loaded
        return
    if problems:
        raise ConfigError(problems)
