"""Checkpoints of small models, and what ranks make of them; the plain model's logits for the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import parity, reference
from tests.support import case_features
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.fields import to_tables
from titanmoe.config.schema import Config
from titanmoe.ops import counter_rng

NEXT = case_features.MODELS["qwen3_next"]
MODELS = case_features.MODELS | {
    "gla": NEXT | {"model.own": NEXT["model.own"] | {"linear_gate": "gla", "conv_width": 1}},
    "wide_convolution": NEXT | {"model.own": NEXT["model.own"] | {"conv_width": 32}},
}

# What training adds to routing and must not have an effect here.
TRAINED_WITH = {"moe.capacity_factor": 0.5, "moe.jitter": 0.3, "moe.aux_loss": 0.1}


def write(path: Path, changes: dict[str, Any]) -> tuple[Config, dict[str, Tensor], dict[str, Tensor]]:
    """The config, weights and selection biases of a new checkpoint, none of them zero."""
    config = parity.read(changes | TRAINED_WITH, 1)
    weights = reference.initial_weights(config.model, 0)
    for name, tensor in weights.items():
        tensor += 0.1 * counter_rng.normal(counter_rng.key(name), torch.arange(tensor.numel()), tensor.dtype).view_as(
            tensor
        )
    bias = {
        name: counter_rng.uniform(counter_rng.key(name), torch.arange(len(zero)))
        for name, zero in reference.initial_bias(config.model).items()
    }
    tensors = {
        f"model.{name}": LazyTensor(tuple(tensor.shape), tensor.dtype, slice_of_full(lambda tensor=tensor: tensor))
        for name, tensor in (weights | bias).items()
    }
    write_checkpoint(path, tensors, {"step": 7, "config": to_tables(config)})
    return config, weights, bias


def plain_logits(config: Config, weights: dict[str, Tensor], bias: dict[str, Tensor], ids: list[int]) -> Tensor:
    """(S, V), for the whole sequence at once, without a cache."""
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity_factor=0.0, jitter=0.0))
    ids_1S = torch.tensor([ids])
    tokens = reference.Tokens.of([[reference.Batch(ids_1S, ids_1S, torch.ones_like(ids_1S, dtype=torch.bool))]])
    return reference.forward(config, reference.with_whole_norms(config.model, weights), tokens, bias)[0][0]


def generator(
    path: Path | None,
    degrees: dict[str, int],
    eos: int | None = None,
    adapter: Path | None = None,
    records: bool = False,
) -> Any:
    """On a rank. A Hugging Face folder computes in float64 here."""
    from titanmoe.fold.degrees import derive
    from titanmoe.fold.meshes import build_meshes
    from titanmoe.generate.build_model import build
    from titanmoe.generate.loop import Generator
    from titanmoe.generate.model import config_to_run, find_model

    trained, device = find_model(path, adapter), torch.device("cpu")
    dtype = "float64" if trained.step is None else None
    config = config_to_run(
        trained.config, dist.get_world_size(), {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1} | degrees, dtype, "cpu"
    )
    meshes = build_meshes(derive(dist.get_world_size(), config.parallelism), "cpu", trains=False)
    model = build(config, meshes, trained, device)
    return Generator(model, meshes, device, config.model.vocab_size, [eos], records)


def forced(
    path: Path | None, degrees: dict[str, int], rows: list[list[int]], prompts: list[int], adapter: Path | None = None
) -> dict[int, Tensor]:
    """On a rank: by row number, the logits after a prompt of that many tokens, after each following token but the last
    two, and after these together."""
    text_generator = generator(path, degrees, adapter=adapter)
    data = text_generator.meshes.data
    own_rows = list(range(len(rows)))[data.rank :: data.size]
    steps_of_rows = {len(row) - prompt for row, prompt in zip(rows, prompts, strict=True)}
    (steps,) = steps_of_rows
    with torch.no_grad():
        text_generator.cached_texts.begin_prompts([prompts[i] for i in own_rows], [1] * len(own_rows))
        logits = [text_generator.forward([token for i in own_rows for token in rows[i][: prompts[i]]])[0]]
        for step in range(steps - 1):
            count = 1 if step < steps - 2 else 2
            text_generator.cached_texts.begin_tokens(count)
            new_ids = [rows[i][prompts[i] + step :][:count] for i in own_rows]
            logits.append(text_generator.forward([token for row in new_ids for token in row])[0])
    return {i: torch.stack([logits_BV[b] for logits_BV in logits]) for b, i in enumerate(own_rows)}


def tokens(
    path: Path,
    degrees: dict[str, int],
    prompts: list[list[int]],
    size: int,
    most: int,
    eos: int | None,
    sampling: dict[str, Any],
) -> list[tuple[int, list[int], str]]:
    """On a rank: number, tokens and end of every prompt."""
    from titanmoe.generate.loop import Prompt, Stop
    from titanmoe.generate.sampling import Sampling

    numbered_prompts = [Prompt(number, ids) for number, ids in enumerate(prompts)]
    batches = generator(path, degrees, eos).batches(numbered_prompts, size, Stop(most), Sampling(**sampling))
    return [(generated.number, generated.content, generated.end) for batch in batches for generated in batch]


def complete(generator: Any, ids: list[int], most: int, number: int = 0, **sampling: Any) -> Any:
    """On a rank: the text that is generated for one prompt."""
    from titanmoe.generate.loop import Prompt, Stop
    from titanmoe.generate.sampling import Sampling

    ((generated,),) = generator.batches([Prompt(number, ids)], 1, Stop(most), Sampling(**sampling))
    return generated


def turns(
    path: Path, degrees: dict[str, int], prompts: list[list[int]], most: int
) -> list[tuple[list[int], list[int]]]:
    """On a rank: of each prompt, one after the other, the most probable tokens after it, and how many tokens each
    forward read. A prompt begins with as many tokens of what is cached then as its first number says."""
    text_generator, out = generator(path, degrees), []
    forward = text_generator.forward
    for number, (same, *more) in enumerate(prompts):
        counts: list[int] = []
        text_generator.forward = lambda ids, counts=counts: counts.append(len(ids)) or forward(ids)
        ids = text_generator.cached_ids[:same] + more
        out.append((ids + complete(text_generator, ids, most, number, temperature=0.0).tokens, counts))
    return out
