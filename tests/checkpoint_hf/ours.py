"""The same models in titanmoe, on one rank or folded: built by the parts that training uses, read piece by piece."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.hf.config_json import describe_folder
from titanmoe.checkpoint.hf.huggingface_source import open_hf
from titanmoe.checkpoint.state import persistent_buffers
from titanmoe.config.schema import Config, Experts, Model, Parallelism, Training
from titanmoe.data.batch import Batch
from titanmoe.fold.degrees import derive
from titanmoe.parallel.materialize import local_shard


class Saved:
    """A checkpoint of ours, read as a source."""

    def __init__(self, path: str):
        self.saved = Checkpoint(Path(path))
        self.model = Model(**self.saved.record["config"]["model"])

    def read(self, name: str, offset: Any, shape: Any) -> torch.Tensor:
        return self.saved.read(f"model.{name}", offset, shape)


def open_any(path: str) -> Any:
    if (Path(path) / "manifest.json").exists():
        return Saved(path)
    source = open_hf(path, describe_folder(Path(path)).model)
    source.check()
    return source


def load(part: Any, source: Any) -> None:
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            mine, offset = local_shard(parameter)
            mine.copy_(source.read(name, offset, tuple(mine.shape)))
        for name, buffer in persistent_buffers(part).items():
            buffer.copy_(source.read(name, (0,) * buffer.dim(), tuple(buffer.shape)))


def logits(folder: str, ids_BL: torch.Tensor, degrees: dict[str, Any], experts: dict[str, int]) -> Any:
    """For every rank of a mapping: which samples and positions it has, and their logits. Runs on ranks."""
    from titanmoe.fold.meshes import build_meshes
    from titanmoe.parallel.apply import build
    from titanmoe.parallel.batch_slice import take_slice
    from titanmoe.parallel.context import placement

    source = open_any(folder)
    model = source.model
    training = Training(seq_len=ids_BL.shape[1], mixed_precision_param="float32", device="cpu")
    requested = Parallelism(**degrees, experts=Experts(**experts))
    fold = derive(dist.get_world_size(), requested)
    config = Config(model=model, training=training, parallelism=dataclasses.replace(requested, dp_shard=fold.dp_shard))
    meshes = build_meshes(fold, "cpu")
    (part,) = build(config, meshes, 1, torch.device("cpu"))
    load(part, source)
    mine = ids_BL.chunk(meshes.data.size)[meshes.data.rank]
    batch = Batch(mine, mine, torch.ones_like(mine, dtype=torch.bool))
    cut_ids, tokens, *_ = take_slice(batch, 0, meshes, placement(config.parallelism), torch.device("cpu"))
    with torch.no_grad():
        for moe in part.moe_layers().values():
            moe.begin_step(1, torch.tensor(float(ids_BL.numel())), ids_BL.shape[0])
        out = part(cut_ids, tokens)
    return meshes.data.rank * len(mine), tokens.position_BS[0].tolist(), out.numpy()


def whole(results: list[Any], ids_BL: torch.Tensor) -> torch.Tensor:
    """Logits (B, L, V) from those of all ranks."""
    out = torch.full((*ids_BL.shape, results[0][2].shape[-1]), float("nan"))
    for first, positions, values in results:
        for row, value in enumerate(torch.from_numpy(values)):
            out[first + row, positions] = value
    return out
