"""What can be refused without any rank: what a run reads, as far as it is small, and the room its checkpoints need.

`titanmoe train` calls `resolve_checked` before it starts ranks, and under torchrun rank 0 does before the ranks meet: a
file that is missing is then not said after every rank has loaded PyTorch. Ranks still check all of it as they read it,
as it may be others that they see.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.choose_checkpoint import StartPoint, choose_start, run_folder, weights_under
from titanmoe.checkpoint.manifest import flat_record
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError
from titanmoe.config.fields import nested
from titanmoe.config.schema import Config
from titanmoe.train.waiting import waiting

T = TypeVar("T")


class Refusals:
    """The errors of several checks, to be raised together."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def collect(self, check: Callable[[], T]) -> T | None:
        """Return what a check returns, or None if it refuses something."""
        try:
            return check()
        except ConfigError as error:
            self.errors.append(error)
        except CheckpointError as error:
            self.errors.append(ConfigError([str(error)]))
        return None

    def raise_together(self) -> None:
        """Raise a ConfigError with all problems, if there are any, as it was raised if there is only one."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            named = [(f"{error.source}: " if error.source else "", error.problems) for error in self.errors]
            raise ConfigError([source + problem for source, problems in named for problem in problems])


def resolve_checked(config: Config, resolve: Callable[[Config], Config], checked: Config | None = None) -> Config:
    """Return the resolved config of a run whose inputs are there and right; raise a ConfigError with what is not.

    Inputs are checked before the config is resolved, which tokenizes the data of a run of epochs.

    Args:
        config: the run's, fitted to its ranks.
        resolve: fills in what is derived.
        checked: the config with what is used of it, if not all is, as for `titanmoe score`.
    """
    checked = checked or config
    waiting("checking what the run reads")
    refusals = Refusals()
    start, record = refusals.collect(lambda: _start(checked)) or (None, {})
    goes_on = record and start and not start.model_only
    refusals.collect(lambda: _check_data(checked, record.get("loader") if goes_on else None))
    if start is not None:
        refusals.collect(lambda: _check_first_weights(checked, start, record))
    refusals.raise_together()
    resolved = resolve(config)
    if checked.checkpoint.enable:
        from titanmoe.train.disk_room import disk_shortage

        if shortage := disk_shortage(resolved, record["step"] if goes_on else 0):
            raise ConfigError([shortage])
    return resolved


def _check_data(config: Config, state: Any) -> None:
    from titanmoe.data.check_data import check_data  # imports torch

    check_data(config, state)


def _start(config: Config) -> tuple[StartPoint, dict[str, Any]]:
    """Return where the run starts, and the record of the checkpoint that it starts from; its contents are not read."""
    from titanmoe.checkpoint.state import refused_record

    options = config.checkpoint
    start = choose_start(options, run_folder(config.job), lambda path: layout.damage(path, contents=False))
    if start.path is None:
        return start, {}
    record, now = layout.read_manifest(start.path).record, flat_record(nested(config))
    adapters = config.lora.rank > 0
    if problems := refused_record(record, now, start.path, adapters, start.model_only, options.initial_adapter):
        raise ConfigError(problems, str(start.path))
    return start, record


def _check_first_weights(config: Config, start: StartPoint, record: dict[str, Any]) -> None:
    """Check the model and the adapters that the run begins from, as far as it reads them again."""
    options, refusals = config.checkpoint, Refusals()
    if options.initial_hf and (start.path is None or (config.lora.rank and "base" in record)):
        refusals.collect(lambda: _check_model(config))
    if options.initial_adapter and (start.path is None or start.model_only):
        refusals.collect(lambda: _check_adapter(config))
    refusals.raise_together()


def _check_model(config: Config) -> None:
    from titanmoe.checkpoint.hf.fetch import is_remote, weights_folder
    from titanmoe.checkpoint.hf.files import config_and_tokenizer_files
    from titanmoe.checkpoint.hf.source import open_first_weights

    name = config.checkpoint.initial_hf
    if is_remote(name):
        waiting(f"fetching {name}")
    folder = weights_folder(name)
    open_first_weights(folder, config.model)
    if config.checkpoint.enable:
        config_and_tokenizer_files(folder)


def _check_adapter(config: Config) -> None:
    from titanmoe.checkpoint.hf.peft_base import first_adapters, refuse_name

    adapters = first_adapters(Path(config.checkpoint.initial_adapter), config.model, config.lora)
    refuse_name(adapters, weights_under(config.checkpoint))
