"""Repeat the step of a bundle: python -m titanmoe.watch.replay FOLDER [--table.field value ...]

In one process, or under torchrun with any number of ranks: as many as the run had repeat it under its mapping, other
numbers with data parallelism alone. The exit code is 0 if the step is finite here, else 1.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.train import failure
from titanmoe.train.launch import read
from titanmoe.train.runtime import leave, start, stop, world_size
from titanmoe.watch.numbers import checks

ALONE = ("pp", "dp_replicate", "cp", "tp", "experts.ep", "experts.etp")
DERIVED = ("dp_shard", "experts.edp", "experts.edp_replicate")
OFF: dict[str, Any] = {
    "checkpoint.enable": "false",
    "checkpoint.local": 0,
    "checkpoint.model_only": "true",
    "checkpoint.initial_hf": "",
    "compile.enable": "false",
    "debug.culprit": "name",
    "debug.on_difference": "stop",
    "debug.replicas_every": 0,
    "debug.rerun": "false",
    "optimizer.skip_spikes": 0,
    "validation.interval": 0,
    "validation.held_out": 0,
    "validation.paths": "",
}


def arguments(folder: Path, world: int) -> list[str]:
    """The command line with which the bundle's config is read."""
    values = OFF | {"checkpoint.load": folder / "weights"}
    if world != json.loads((folder / "report.json").read_text())["ranks"]:
        values |= {f"parallelism.{axis}": 1 for axis in ALONE} | {f"parallelism.{axis}": -1 for axis in DERIVED}
        values |= {"moe.dispatcher": "alltoall", "pipeline.schedule_csv": ""}
    return ["--config", str(folder / "config.toml"), *(f"--{path}={value}" for path, value in values.items())]


def repeat(folder: Path, config: Any, runtime: Any) -> str:
    """What is wrong with the step; "" if it is finite."""
    from titanmoe.checkpoint.folder import open_checkpoint
    from titanmoe.train.checkpoints import Checkpoints
    from titanmoe.train.checks import Unsound
    from titanmoe.train.trainer import Trainer
    from titanmoe.watch.bundle import Bundled

    trainer = Trainer(config, runtime, loader=partial(Bundled, folder), checks=checks)
    Checkpoints(trainer, folder).load(open_checkpoint(folder / "weights"), model_only=True)
    trainer.step = json.loads((folder / "report.json").read_text())["step"] - 1
    try:
        report = trainer.train_step()
    except Unsound as error:
        return str(error)
    if runtime.rank == 0:
        print(f"step {trainer.step} is finite here: loss {report['loss']}, gradient norm {report['grad_norm']}")
    return ""


def main(argv: list[str]) -> int:
    try:
        if not argv or argv[0] in ("-h", "--help"):
            raise ConfigError([__doc__.strip()])
        folder = Path(argv[0])
        if not (folder / "report.json").is_file():
            raise ConfigError([f"{folder} is not a bundle: it has no report.json"])
        config = read([*arguments(folder, world_size()), *argv[1:]], world_size())
        runtime = start(config)
    except ConfigError as error:
        failure.refuse(error)
    try:
        text = repeat(folder, config, runtime)
    finally:
        stop()
    if text and runtime.rank == 0:
        print(text)
    return 1 if text else 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
