"""From the command line to a running Trainer: read the recipe, refuse what is illegal, start the process, train."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from titanmoe.checkpoint.choose_checkpoint import has_begun, record_to_resume
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError
from titanmoe.config.kinds import Parts
from titanmoe.config.load import Draft, read_draft
from titanmoe.config.schema import Config
from titanmoe.config.world_size import recipe_ranks
from titanmoe.fold.degrees import FoldError, derive
from titanmoe.fold.legal_mappings import refit
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.train import launch_messages
from titanmoe.train.launch_messages import Checked, read_handed_config, show_status
from titanmoe.train.refusals import ranks_of_a_node, refusals, resolve_checked
from titanmoe.train.runtime import (
    Runtime,
    die_with_launcher,
    grow_segments,
    read_environment,
    restarted,
    say,
    start,
    stop,
    world_size,
)


def resolve(
    config: Config,
    world: int,
    ahead: Callable[[Config], dict[str, Any]] = record_to_resume,
) -> Config:
    """The config with derived degrees and batch sizes filled in. ahead: reads the record that the run resumes from."""
    fold = derive(world, config.parallelism)
    experts = replace(config.parallelism.experts, edp=fold.edp, edp_replicate=fold.edp_replicate)
    parallelism = replace(config.parallelism, dp_shard=fold.dp_shard, experts=experts)
    if DISPATCHERS.look_up(config.moe.dispatcher).works_by_node:
        parallelism = replace(parallelism, node=ranks_of_a_node(config))
    training = config.training
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=training.local_batch_size * fold.dp)
        # A global batch that the user did not set stays the same on more or fewer ranks.
        before = ahead(config).get("config", {}).get("training", {}).get("global_batch_size", -1)
        if before not in (-1, training.global_batch_size):
            training = replace(training, global_batch_size=before)
            if broken := refusals(replace(config, training=training), world):
                raise ConfigError(broken, "the checkpoint's global batch, as training.global_batch_size is not set")
    if training.epochs:
        training = replace(training, steps=_steps(replace(config, training=training), ahead(config)))
    return replace(config, job=replace(config.job, ranks=world), parallelism=parallelism, training=training)


def _steps(config: Config, record: dict[str, Any]) -> int:
    """Of a run of epochs. record: of the checkpoint that it resumes from."""
    from titanmoe.data.sources import steps_of_epochs

    steps = steps_of_epochs(config, record.get("step", 0), record.get("loader", {}).get("consumed", 0))
    if late := [step for step in config.profile.steps if step > steps]:
        raise ConfigError(
            [
                f"profile.steps has {late[0]}, and training.epochs = {config.training.epochs} take {steps} steps: "
                "choose earlier ones"
            ]
        )
    return steps


def on_nodes(config: Config, ranks: int) -> Config:
    """The config on machines of that many ranks, unless it says how many they have."""
    node = ranks if config.parallelism.node == -1 else config.parallelism.node
    return replace(config, parallelism=replace(config.parallelism, node=node))


def fitted(config: Config, node: int, world: int) -> tuple[Config, str]:
    """The config on machines of `node` ranks; of a restarted run, a line on what changed in its mapping to fit another
    number of ranks.

    The first start of a run gets the mapping that it asks for or is refused.
    """
    config = on_nodes(config, node)
    if not (restarted() or has_begun(config)):
        return config, ""
    parallelism, change = refit(world, config.parallelism)
    return replace(config, parallelism=parallelism), change


def read(argv: list[str], world: int, parts: Parts, check_inputs: bool = False) -> Config:
    """Return the resolved config of a command line; raise a ConfigError with every problem.

    check_inputs: also check what the run reads, which one of its ranks does for all.
    """
    grow_segments()  # before a check initialises CUDA
    change, node = "", -1
    draft = read_draft(argv, parts)
    if draft.command_line.print_config and not read_environment().launched:
        world = node = recipe_ranks(draft)
        if not world:
            draft.finish(lambda config: [])  # and exits: what follows from the number of ranks stays open

    def check(config: Config) -> list[str]:
        try:
            problems = refusals(fitted(config, node, world)[0], world)
        except FoldError as error:
            problems = error.problems
        return for_launcher(config, draft) or problems if problems else []

    def finish(config: Config) -> Config:
        nonlocal change
        config, change = fitted(config, node, world)
        if check_inputs and not draft.command_line.print_config:
            return resolve_checked(config, lambda config: resolve(config, world))
        return resolve(config, world)

    config = draft.finish(check, finish)
    if change:
        say(f"mapping: {change}")
    return config


def receive(checked: Checked, world: int) -> Config:
    """The resolved config that a launcher has handed on. A restart may have other ranks than it was checked for."""
    grow_segments()
    try:
        config, change = fitted(checked.config, -1, world)
        problems = refusals(config, world) if world != checked.ranks else []
    except FoldError as error:
        problems = error.problems
    if problems:
        raise ConfigError(problems, checked.source)
    config = resolve(config, world)
    if change:
        say(f"mapping: {change}")
    return config


def only_forward(config: Config) -> Config:
    """The same model without anything that only training needs; adapters stay, and are left out of what is counted."""
    training = config.training if config.lora.rank else replace(config.training, freeze=["*"])
    checkpoint = replace(config.checkpoint, enable=False, model_only=True)
    return replace(config, training=training, checkpoint=checkpoint)


def for_launcher(config: Config, draft: Draft) -> list[str]:
    """What to say of one process where the recipe's own number of ranks would do: not how to change the mapping."""
    recipe = draft.command_line.recipe
    if read_environment().launched or recipe is None:
        return []
    ranks = recipe_ranks(draft)
    if ranks < 2:
        return []
    rest = [word for word in draft.argv if word not in ("--config", f"--config={recipe}", recipe)]
    command = shlex.join(["titanmoe", "train", recipe, *rest])
    there = refusals(on_nodes(config, ranks), ranks)
    return [*there, f"this recipe is for {ranks} ranks, and this is one process without a launcher: {command}"]


def main(
    argv: list[str],
    parts: Parts,
    watch: Callable[[Config, Any], AbstractContextManager[None]] = lambda config, training: nullcontext(),
    overlap: Callable[[Config, Runtime], tuple[Config, str]] = lambda config, runtime: (config, ""),
    **seams: Any,
) -> int:
    """parts: what a recipe may name. watch: called with the config and the Training, and entered for as long as it
    trains. overlap: fills in moe.overlap if it is "auto", and says why, for the header. seams:
    arguments of build_training, such as what checks the numbers of each step.
    """
    die_with_launcher()
    try:
        if checked := read_handed_config(parts):
            config = receive(checked, world_size())
            config = only_forward(config) if checked.scores else config
        else:
            show_status("reading the recipe")
            config = read(argv, world_size(), parts, check_inputs=read_environment().rank == 0)
        if config.checkpoint.initial_hf:
            from titanmoe.checkpoint.hf.fetch import fetch_first_weights

            fetch_first_weights(config, show_status)
        show_status("loading PyTorch and meeting the other ranks")
        runtime = start(config)
    except ConfigError as error:
        show_status("")
        launch_messages.refuse(error)
    # Imported only once the config is known to be legal: torch takes seconds to load.
    from titanmoe.train import out_of_memory
    from titanmoe.train.build import build_training
    from titanmoe.train.checks import NumericalFault
    from titanmoe.train.console import stamp
    from titanmoe.train.trainer import Trainer

    stamp(runtime.rank)
    abandon, training = False, None
    try:
        config, why = overlap(config, runtime)
        show_status("building the model")
        likeliest = bool(checked) and checked.scores == "likeliest"
        notes = {"overlap": why} if why else {}
        training = build_training(config, runtime, likeliest=likeliest, notes=notes, **seams)
        launch_messages.leave_advice(partial(out_of_memory.advice, training, config))
        if checked and checked.scores:
            from titanmoe.train.reference import count

            return count(config, training, likeliest)
        with watch(config, training):
            signal = Trainer(training).train()
        return 128 + signal if signal else 0
    except ConfigError as error:
        show_status("")
        launch_messages.refuse(error)
    except (CheckpointError, NumericalFault) as error:  # raised on all ranks, printed by one
        abandon = isinstance(error, CheckpointError)  # its saving thread may be stuck in a message
        if not launch_messages.leave_note(str(error), alike=True) and runtime.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if runtime.rank == 0:
            print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if not out_of_memory.is_one(error):
            launch_messages.leave_traceback(error)
            raise
        abandon = True  # other ranks are in the middle of a message
        text = out_of_memory.explain(error, training, runtime.rank, config)
        if not launch_messages.leave_note(text):
            print(f"error: {text}", file=sys.stderr)
        return 1
    finally:
        stop(abandon)
