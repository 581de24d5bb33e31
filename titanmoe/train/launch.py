"""From the command line to a running Trainer: read the recipe, refuse what is illegal, start the process, train."""

from __future__ import annotations

import sys
from dataclasses import replace

from titanmoe.checkpoint.choose_checkpoint import has_begun, record_ahead
from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.config import ConfigError, exit_with, load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import FoldError, derive
from titanmoe.fold.refit import refit
from titanmoe.models.families import preset
from titanmoe.train.legal import ranks_of_a_node, refusals
from titanmoe.train.runtime import die_with_launcher, grow_segments, restarted, say, start, stop, world_size


def resolve(config: Config, world: int) -> Config:
    """Derived degrees and batch sizes filled in: what will run."""
    fold = derive(world, config.parallelism)
    experts = replace(config.parallelism.experts, edp=fold.edp, edp_replicate=fold.edp_replicate)
    parallelism = replace(config.parallelism, dp_shard=fold.dp_shard, experts=experts)
    if config.moe.dispatcher == "hierarchical":
        parallelism = replace(parallelism, node=ranks_of_a_node(config))
    training = config.training
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=training.local_batch_size * fold.dp)
        # A batch that nobody chose stays what it was, also on more or fewer ranks.
        before = record_ahead(config).get("config", {}).get("training", {}).get("global_batch_size", -1)
        if before not in (-1, training.global_batch_size):
            training = replace(training, global_batch_size=before)
            if broken := refusals(replace(config, training=training), world):
                raise ConfigError(broken, "the checkpoint's global batch, as training.global_batch_size is not given")
    return replace(config, parallelism=parallelism, training=training)


def fitted(config: Config, world: int) -> tuple[Config, str]:
    """The config that a run started again has, and a line on what of its mapping gave way to another number of ranks.

    The first start of a run gets the mapping it asks for or is refused.
    """
    if not (restarted() or has_begun(config)):
        return config, ""
    parallelism, gave = refit(world, config.parallelism)
    return replace(config, parallelism=parallelism), gave


def read(argv: list[str], world: int) -> Config:
    """The resolved config of a command line; raises ConfigError with every problem."""
    grow_segments()  # before a law asks for the GPU
    gave = ""

    def check(config: Config) -> list[str]:
        try:
            return refusals(fitted(config, world)[0], world)
        except FoldError as error:
            return error.problems

    def finish(config: Config) -> Config:
        nonlocal gave
        config, gave = fitted(config, world)
        return resolve(config, world)

    config = load(argv, preset, check, finish)
    if gave:
        say(f"mapping: {gave}")
    return config


def main(argv: list[str]) -> int:
    die_with_launcher()
    try:
        runtime = start(config := read(argv, world_size()))
    except ConfigError as error:
        exit_with(error.problems, error.source)
    # After the config is known to be good: torch takes seconds to load.
    from titanmoe.train.console import stamp
    from titanmoe.train.trainer import NonFinite, Trainer

    stamp(runtime.rank)
    abandon = False
    try:
        signal = Trainer(config, runtime).train()
        return 128 + signal if signal else 0
    except ConfigError as error:
        exit_with(error.problems, error.source)
    except CheckpointError as error:  # of a save, told by all ranks alike
        abandon = True  # its thread may be stuck in a message
        if runtime.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except NonFinite as error:  # known to all ranks, and so told by one
        if runtime.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if runtime.rank == 0:
            print("stopped", file=sys.stderr)
        return 130
    finally:
        stop(abandon)
