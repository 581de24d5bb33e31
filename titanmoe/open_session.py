"""Opening of a `titanmoe.session.Session`: the run of a recipe is built on this rank, without a loader and a loop.

`titanmoe.open` calls it. If your code has joined a process group already, that is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanmoe.components import COMPONENTS
from titanmoe.config.command_line import to_words
from titanmoe.config.schema import Config
from titanmoe.moe.dispatchers.dispatcher_spec import with_dispatcher
from titanmoe.session import Session
from titanmoe.train.build import build_training
from titanmoe.train.launch import read_config, scoring_config
from titanmoe.train.runtime import Runtime, read_environment, start, uses_gpu, world_size
from titanmoe.train.world_batch import NoLoader


def open_session(
    recipe: str | Path, changes: Mapping[str, Any] | None = None, trains: bool = True, ids: int = 0
) -> Session:
    """Build the run of a recipe on this rank, without its data, and load its weights. Collective over the world.

    The recipe's validation, quizzes and scheduled checkpoints are off, training.epochs is 0 unless `changes` sets it,
    and the dispatchers "symm_mem" and "auto" become "alltoall".

    Args:
        recipe: a TOML file, or the name of a shipped recipe.
        changes: options to set in place of the recipe's, by path, such as {"training.steps": 100}; values are strings,
            numbers, booleans or lists of these. checkpoint.load names a checkpoint to go on from,
            checkpoint.initial_hf a Hugging Face model.
        trains: False for a run that only computes log-probabilities, such as a reference model: no gradients, no
            optimizer state.
        ids: number of ids that the sampler knows, if model.vocab_size is padded beyond them: the others get no
            probability. 0 for all.

    Raises:
        ConfigError: with every problem of the recipe, before any message between ranks; later if the weights cannot be
            loaded, or `ids` leave a rank of the vocabulary without any.
    """
    # The recipe's data is not opened, so it cannot say how many steps an epoch has.
    words = [str(recipe), *to_words({"training.epochs": 0} | dict(changes or {}))]
    config = read_config(words, world_size(), COMPONENTS)
    if not trains:
        config = scoring_config(config)
    if config.moe.dispatcher in ("symm_mem", "auto"):  # a step of several calls cannot be rerun with larger buffers
        config = with_dispatcher(config, "alltoall")
    quiz = replace(config.validation.quiz, interval=0)
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, enable=False),
        validation=replace(config.validation, interval=0, quiz=quiz),
    )
    joined = dist.is_initialized()
    runtime = _joined_runtime(config) if joined else start(config)
    if config.moe.overlap == "auto":
        from titanmoe.plan.planned_overlap import plan_overlap_of_run

        config, _ = plan_overlap_of_run(config, runtime)
    training = build_training(config, runtime, loader=NoLoader, garbage=lambda every: None)
    with training.checkpoints.in_folder(Path(config.job.dump_folder)) as checkpoints:
        checkpoints.begin()
    return Session(config, training, owns_process_group=not joined, ids=ids)


def _joined_runtime(config: Config) -> Runtime:
    """Return the runtime of a process that has joined a process group.

    A GPU is the one that torch has as its current one; ConfigError if training.device is "cuda" and there is none. The
    group's timeouts stay as they are.
    """
    rank, local = dist.get_rank(), read_environment().local_rank
    on_gpu = uses_gpu(config.training.device)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Runtime(rank, local, dist.get_world_size(), device, keep_timeouts=True)
