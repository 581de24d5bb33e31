"""A step saved in a folder, so that it can be repeated without the run: its batch, the weights before it, the config.

batch.safetensors   all samples of the step, ordered by number
weights/            a checkpoint of weights and biases alone, for any mapping
config.toml         the run's config
report.json         the step, the number of ranks, and what was found
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from titanmoe.checkpoint import state
from titanmoe.checkpoint.folder import together, write_checkpoint
from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.config.fields import to_toml
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Share
from titanmoe.train.trainer import Trainer

BATCH, WEIGHTS, CONFIG, REPORT = "batch.safetensors", "weights", "config.toml", "report.json"


def write_bundle(trainer: Trainer, batches: list[Batch], text: str) -> str:
    """Returns the command that repeats the step, or why there is no bundle. All ranks call it together."""
    folder = trainer.folder / "bundles" / f"step-{trainer.step:08d}"
    group = dist.group.WORLD if trainer.runtime.world > 1 else None
    several = trainer.meshes.pp.rank or trainer.meshes.sequence.rank  # another rank has the same samples
    mine = None if several else (list(trainer.loader.identify(batches)), joined(batches))
    first = trainer.runtime.rank == 0
    everyone: list[Any] = [mine] * trainer.runtime.world
    if group is not None:
        dist.gather_object(mine, everyone if first else None)

    def files() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(in_order([theirs for theirs in everyone if theirs]), folder / BATCH)
        (folder / CONFIG).write_text(to_toml(trainer.config), encoding="utf-8")
        report = {"step": trainer.step, "ranks": trainer.runtime.world, "text": text}
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    tied = trainer.config.model.tie_embeddings
    pieces = state.pieces(state.targets(trainer.parameters, trainer.buffers, None, tied))
    record = {"step": trainer.step - 1, "made": "for a bundle", "config": dataclasses.asdict(trainer.config)}
    try:
        together(group, lambda: files() if first else None)
        write_checkpoint(folder / WEIGHTS, pieces, record, overwrite=True, group=group)
    except CheckpointError as error:
        return f"there is no bundle: {error}"
    return f"to repeat the step: python -m titanmoe.watch.replay {shlex.quote(str(folder))}"


def joined(batches: list[Batch]) -> dict[str, Tensor]:
    parts = {name: [getattr(batch, name) for batch in batches] for name in Batch.__annotations__ if name != "number_B"}
    return {name: torch.cat(tensors) for name, tensors in parts.items() if tensors[0] is not None}


def in_order(parts: list[tuple[list[int], dict[str, Tensor]]]) -> dict[str, Tensor]:
    """All samples, sorted by their numbers, which are kept too."""
    number_N = torch.tensor([number for numbers, _ in parts for number in numbers])
    order_N = number_N.argsort()
    out = {name: torch.cat([tensors[name] for _, tensors in parts])[order_N] for name in parts[0][1]}
    return out | {"number_N": number_N[order_N]}


class Bundled:
    """A loader that has only the step of a bundle, under any mapping."""

    def __init__(self, folder: Path, config: Config, data_rank: int, data_ranks: int):
        share = Share(config, data_rank, data_ranks)
        self.tensors, self.mine_N = load_file(folder / BATCH), torch.from_numpy(share.in_turn_N)
        self.global_batch_size, self.microbatches = share.global_batch_size, share.microbatches

    def next_step(self) -> list[Batch]:
        rows = {name: tensor[self.mine_N].chunk(self.microbatches) for name, tensor in self.tensors.items()}
        rows.pop("number_N")
        return [Batch(**{name: parts[m] for name, parts in rows.items()}) for m in range(self.microbatches)]

    def identify(self, batches: list[Batch]) -> dict[int, str]:
        return dict.fromkeys(self.tensors["number_N"][self.mine_N].tolist(), "")
