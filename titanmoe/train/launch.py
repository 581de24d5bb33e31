"""Runs one rank from the command line to the end of training: `main`, which train.py and `titanmoe train` call.

It reads the recipe (or the config that the launcher has passed on), refuses what is illegal, joins the other ranks,
builds the run and trains. Imports of torch wait until the config is known to be legal.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from titanmoe.checkpoint.choose_checkpoint import has_begun, record_to_resume
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError
from titanmoe.config.component_kinds import Components
from titanmoe.config.load import Draft, read_draft
from titanmoe.config.schema import Config
from titanmoe.config.world_size import recipe_ranks
from titanmoe.data.hub_datasets import pin_datasets
from titanmoe.fold.degrees import DERIVED, FoldError, derive, with_degrees
from titanmoe.fold.legal_mappings import refit
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.train import launch_messages
from titanmoe.train.launch_messages import CheckedConfig, read_passed_config, show_status
from titanmoe.train.refusals import check_inputs_and_resolve, ranks_per_node, refusals
from titanmoe.train.runtime import (
    Runtime,
    die_with_launcher,
    print_rank_0,
    read_environment,
    start,
    stop,
    use_expandable_segments,
    was_restarted,
    world_size,
)

if TYPE_CHECKING:
    from titanmoe.train.trainer import Trainer
    from titanmoe.train.training import Training


def resolve(config: Config, world: int, read_record: Callable[[Config], dict[str, Any]] = record_to_resume) -> Config:
    """Return the config with derived values filled in: degrees, number of ranks, global batch size, steps of epochs.

    Ranks per machine are filled in only for a dispatcher that works by machine.

    Args:
        config: the config as given, whose degrees are legal on `world` ranks.
        read_record: returns what the checkpoint that the run resumes from records besides tensors; {} without one. A
            global batch size of -1 becomes that of the record; without one, local_batch_size for each data rank.

    Raises:
        ConfigError: the record's global batch size cannot be used on so many ranks, or the data cannot be counted.
    """
    fold = derive(world, config.parallelism)
    parallelism = with_degrees(config.parallelism, {name: getattr(fold, name) for name in DERIVED})
    if DISPATCHERS.look_up(config.moe.dispatcher).works_by_node:
        parallelism = replace(parallelism, node=ranks_per_node(config))
    training = config.training
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=training.local_batch_size * fold.dp)
        # A global batch that the user did not set stays the same on more or fewer ranks.
        before = read_record(config).get("config", {}).get("training", {}).get("global_batch_size", -1)
        if before not in (-1, training.global_batch_size):
            training = replace(training, global_batch_size=before)
            if broken := refusals(replace(config, training=training), world):
                raise ConfigError(broken, "the checkpoint's global batch, as training.global_batch_size is not set")
    if training.epochs:
        training = replace(training, steps=_steps_of_epochs(replace(config, training=training), read_record(config)))
    return replace(config, job=replace(config.job, ranks=world), parallelism=parallelism, training=training)


def _steps_of_epochs(config: Config, record: dict[str, Any]) -> int:
    """Return the number of steps that training.epochs take, those before a resume included.

    Args:
        record: what the checkpoint that the run resumes from records besides tensors; {} without one.

    Raises:
        ConfigError: profile.steps has a step after the last, or the data cannot be opened.
    """
    from titanmoe.data.sources import count_steps_of_epochs

    steps = count_steps_of_epochs(config, record.get("step", 0), record.get("loader", {}).get("consumed", 0))
    if late := [step for step in config.profile.steps if step > steps]:
        raise ConfigError(
            f"profile.steps has {late[0]}, and training.epochs = {config.training.epochs} take {steps} steps: "
            "choose earlier ones"
        )
    return steps


def with_ranks_per_node(config: Config, ranks: int) -> Config:
    """Return the config with parallelism.node set to this number of ranks per machine, unless it is set."""
    node = ranks if config.parallelism.node == -1 else config.parallelism.node
    return replace(config, parallelism=replace(config.parallelism, node=node))


def fit_to_world(config: Config, node: int, world: int) -> tuple[Config, str]:
    """Set the ranks per machine, and adapt the mapping of a restarted or resumed run to the number of ranks it has now.

    The mapping of a run that starts for the first time is not changed.

    Args:
        node: ranks per machine, if parallelism.node is not set; -1 if unknown.

    Returns:
        The config, and one line on what changed in the mapping, "" if nothing did.

    Raises:
        FoldError: the mapping cannot be adapted to so many ranks.
        ConfigError: the disk with the run's checkpoints does not answer.
    """
    config = with_ranks_per_node(config, node)
    if not (was_restarted() or has_begun(config)):
        return config, ""
    parallelism, change = refit(world, config.parallelism)
    return replace(config, parallelism=parallelism), change


def read_config(argv: list[str], world: int, components: Components, check_inputs: bool = False) -> Config:
    """Read recipe and command line, check them, and return the resolved config.

    With --help or --print-config it prints and exits; without a launcher --print-config takes the recipe's number of
    ranks in place of `world`. A run that restarts or resumes gets its mapping adapted to `world` before the checks. Not
    collective.

    Args:
        argv: arguments of the command line, such as ["recipe.toml", "--training.steps", "10"].
        components: the components (optimizers, dispatchers, ...) that a recipe may name.
        check_inputs: whether to check the files that the run reads, too; one rank does so for all.

    Raises:
        ConfigError: with every problem.
    """
    use_expandable_segments()  # before a check initialises CUDA
    change, node = "", -1
    draft = read_draft(argv, components)
    if draft.command_line.print_config and not read_environment().launched:
        world = node = recipe_ranks(draft)
        if not world:
            draft.finish(lambda config: [])  # and exits: what follows from the number of ranks stays open

    def check(config: Config) -> list[str]:
        try:
            problems = refusals(fit_to_world(config, node, world)[0], world)
        except FoldError as error:
            problems = error.problems
        return problems_without_launcher(config, draft) or problems if problems else []

    def finish(config: Config) -> Config:
        nonlocal change
        config, change = fit_to_world(pin_datasets(config, record_to_resume), node, world)
        if check_inputs and not draft.command_line.print_config:
            return check_inputs_and_resolve(config, lambda config: resolve(config, world))
        return resolve(config, world)

    config = draft.finish(check, finish)
    if change:
        print_rank_0(f"mapping: {change}")
    return config


def receive_config(checked: CheckedConfig, world: int) -> Config:
    """Return the resolved config of a rank whose launcher has read and checked the recipe.

    A restart may have another number of ranks than the config was checked for, and is then checked again.

    Raises:
        ConfigError: if the config cannot run on this number of ranks.
    """
    use_expandable_segments()
    try:
        config, change = fit_to_world(checked.config, -1, world)
        problems = refusals(config, world) if world != checked.ranks else []
    except FoldError as error:
        problems = error.problems
    if problems:
        raise ConfigError(problems, checked.source)
    config = resolve(config, world)
    if change:
        print_rank_0(f"mapping: {change}")
    return config


def scoring_config(config: Config) -> Config:
    """Return the config for a run that only computes log-probabilities: all weights frozen, nothing saved.

    Of a checkpoint only the weights are loaded (checkpoint.model_only). Adapters stay trainable, because a checkpoint
    of adapters needs them.
    """
    training = config.training if config.lora.rank else replace(config.training, freeze=["*"])
    checkpoint = replace(config.checkpoint, enable=False, model_only=True)
    return replace(config, training=training, checkpoint=checkpoint)


def problems_without_launcher(config: Config, draft: Draft) -> list[str]:
    """Return the problems of a recipe for several ranks that was started as one process, not by a launcher.

    The last line gives the command that starts all ranks. [] if there is a launcher, or the recipe is for one rank.

    Args:
        config: the recipe, not yet fitted to a number of ranks.
        draft: the command line that gave it, from which the number of ranks and the command come.
    """
    recipe = draft.command_line.recipe
    if read_environment().launched or recipe is None:
        return []
    ranks = recipe_ranks(draft)
    if ranks < 2:
        return []
    rest = [word for word in draft.argv if word not in ("--config", f"--config={recipe}", recipe)]
    command = shlex.join(["titanmoe", "train", recipe, *rest])
    problems = refusals(with_ranks_per_node(config, ranks), ranks)
    return [*problems, f"this recipe is for {ranks} ranks, and this is one process without a launcher: {command}"]


def main(
    argv: list[str],
    components: Components,
    watch: Callable[[Config, Training], AbstractContextManager[None]] = lambda config, training: nullcontext(),
    overlap: Callable[[Config, Runtime], tuple[Config, str]] = lambda config, runtime: (config, ""),
    trainer: Callable[[Config, Training], Trainer] | None = None,
    **replacements: Any,
) -> int:
    """Run one rank, from the command line to the end of training, and return its exit code.

    It is 0, 128 plus the number of the signal that stopped training, 130 after a KeyboardInterrupt, and 1 after a
    CheckpointError, a NumericalFault or lack of memory, which are printed. A refused config ends the process with code
    2, and any other error is raised. For `titanmoe score`, which its launcher's config tells, log-probabilities are
    computed instead of training.

    Args:
        argv: arguments of the command line, such as ["recipe.toml", "--training.steps", "10"].
        components: the components (optimizers, dispatchers, ...) that a recipe may name.
        watch: makes from the config and the Training a context that is entered while the run trains.
        overlap: sets a moe.overlap that is "auto"; returns the config and the header's text on the choice.
        trainer: makes the training loop from the config and the Training; None for `Trainer`.
        replacements: keyword arguments of build_training that replace objects of the run, such as `checks`.
    """
    die_with_launcher()
    try:
        if checked := read_passed_config(components):
            config = receive_config(checked, world_size())
            config = scoring_config(config) if checked.scores else config
        else:
            show_status("reading the recipe")
            config = read_config(argv, world_size(), components, check_inputs=read_environment().rank == 0)
        if config.checkpoint.initial_hf:
            from titanmoe.checkpoint.hf.fetch import fetch_first_weights

            fetch_first_weights(config, show_status)
        show_status("loading PyTorch and meeting the other ranks")
        runtime = start(config)
    except ConfigError as error:
        show_status("")
        launch_messages.exit_refused(error)
    # Imported only once the config is known to be legal: torch takes seconds to load.
    from titanmoe.train import out_of_memory
    from titanmoe.train.build import build_training
    from titanmoe.train.checks import NumericalFault
    from titanmoe.train.console import prefix_output_with_rank
    from titanmoe.train.trainer import Trainer

    prefix_output_with_rank(runtime.rank)
    abandon, training = False, None
    try:
        config, why = overlap(config, runtime) if config.moe.overlap == "auto" else (config, "")
        show_status("building the model")
        returns_top_k = bool(checked) and checked.scores == "top-k"
        notes = {"overlap": why} if why else {}
        training = build_training(config, runtime, returns_top_k=returns_top_k, notes=notes, **replacements)
        launch_messages.write_memory_advice(partial(out_of_memory.memory_advice, training, config))
        if checked and checked.scores:
            from titanmoe.train.reference import run_scoring

            return run_scoring(config, training, returns_top_k)
        loop = trainer(config, training) if trainer else Trainer(training)
        with watch(config, training):
            signal = loop.train()
        return 128 + signal if signal else 0
    except ConfigError as error:
        show_status("")
        launch_messages.exit_refused(error)
    except (CheckpointError, NumericalFault) as error:  # raised on all ranks, printed by one
        abandon = isinstance(error, CheckpointError)  # its saving thread may be stuck in a message
        if not launch_messages.write_failure_note(str(error), alike=True) and runtime.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if runtime.rank == 0:
            print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if not out_of_memory.is_out_of_memory(error):
            launch_messages.write_error_note(error)
            raise
        abandon = True  # other ranks are in the middle of a message
        text = out_of_memory.explain(error, training, runtime.rank, config)
        if not launch_messages.write_failure_note(text):
            print(f"error: {text}", file=sys.stderr)
        return 1
    finally:
        stop(abandon)
