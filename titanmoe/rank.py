"""Entry point of one rank: `python -m titanmoe.rank --config RECIPE.toml`.

`titanmoe train` starts it and train.py calls it. It passes the tools that watch a run, and those that
complete prompts during it, to `titanmoe.train.launch`.
"""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

gc.disable()  # imports leave hardly any garbage, and collecting it takes a fifth of their time

from titanmoe.components import COMPONENTS  # noqa: E402
from titanmoe.config.schema import Config  # noqa: E402
from titanmoe.generate.prompts import has_samples  # noqa: E402
from titanmoe.train.launch import main  # noqa: E402
from titanmoe.train.runtime import Runtime, exit_now  # noqa: E402
from titanmoe.watch.number_checks import checks  # noqa: E402

if TYPE_CHECKING:
    from titanmoe.data.loader import Loader
    from titanmoe.train.evaluation import Evaluation
    from titanmoe.train.trainer import Trainer
    from titanmoe.train.training import RankModel, Training

gc.enable()


def watch(config: Config, training: Training) -> AbstractContextManager[Any]:
    """Return a context in which hung ranks are watched for; if a rank is late, the process ends with a report.

    With training.stragglers it also measures which ranks are slow. Collective over the world. It does nothing for a
    single rank or with `training.watch = false`.
    """
    if training.runtime.world == 1 or not config.training.watch:
        return nullcontext()
    from titanmoe.watch.run_watch import Watch

    return Watch(config.training, config.checkpoint, training)


def plan_overlap(config: Config, runtime: Runtime) -> tuple[Config, str]:
    """Replace moe.overlap = "auto" by the planner's choice, on CPUs "none"; return the config and the reason.

    Any other value stays, with the reason "". Collective over the world on GPUs: rank 0's device is planned for.
    """
    from titanmoe.plan.planned_overlap import plan_overlap_of_run

    return plan_overlap_of_run(config, runtime)


def sample_completions(config: Config, model: RankModel) -> Evaluation | None:
    """Build the evaluation that completes the prompts of [validation.samples]; None if it has no prompts.

    It generates under a mapping of its own, to which the run's weights are copied. Collective over the world.
    """
    if not has_samples(config):
        return None
    from titanmoe.generate.sample_completions import SampleCompletions

    return SampleCompletions(config, model)


def make_loader(config: Config, data_rank: int, data_ranks: int) -> Loader:
    """Return the loader of data rank `data_rank` (from 0): of the run's data, or of [rl]'s prompts with rl.reward."""
    if config.rl.reward:
        from titanmoe.rl.policy_trainer import PromptLoader

        return PromptLoader(config, data_rank, data_ranks)
    from titanmoe.data.loader import Loader

    return Loader(config, data_rank, data_ranks)


def make_trainer(config: Config, training: Training) -> Trainer:
    """Return this rank's training loop: with rl.reward that of reinforcement learning, else the usual one.

    Collective over the world.
    """
    if config.rl.reward:
        from titanmoe.rl.policy_trainer import PolicyTrainer

        return PolicyTrainer(config, training)
    from titanmoe.train.trainer import Trainer

    return Trainer(training)


def run() -> None:
    """Run this rank from the command line to the end, and exit the process with its exit code."""
    replacements = {"checks": checks, "samples": sample_completions, "loader": make_loader}
    try:
        tools = {"watch": watch, "overlap": plan_overlap, "trainer": make_trainer}
        code = main(sys.argv[1:], COMPONENTS, **tools, **replacements)
    except SystemExit as end:
        code = end.code
    exit_now(code)


if __name__ == "__main__":
    run()
