"""Out of memory: in which part of the step, what held how much, and the settings that help most."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.models.count import parameters
from titanmoe.ops.device import chosen
from titanmoe.train import host_memory
from titanmoe.train.runtime import world_size

if TYPE_CHECKING:
    from titanmoe.train.training import Training

PHRASES = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc")
"""How PyTorch, CUDA libraries and C++ put it, in lower case."""
PARTS = {
    "build.py:build_training": "building the model",
    "checkpoint": "loading or saving a checkpoint",
    "validation": "validation",
    "/data/": "reading data",
    "optimizer": "the optimizer's step",
    "sharded": "gathering weights",
    "/comm/": "sending between ranks",
    "atten": "attention",
    "vocabulary": "embedding, head or loss",
    "/moe/": "the MoE layer",
}
"""By what the innermost of our files and functions has in its name."""
REST = "activations, gathered weights and buffers"


def advice(training: Training, config: Config) -> str:
    """What a step will hold at least on this rank, and what to do if that, or the rest, is too much."""
    held = _state(_bytes(training.parameters.values()), config, training.device)
    state, room = sum(held.values()), _room(training.device)
    lines = settings(config, state, max(0, room - state), room)
    return "\n".join([f"each rank holds {_listed(held)}; and {REST}", *lines])


def is_one(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in PHRASES)


def explain(error: BaseException, training: Training | None, rank: int, config: Config) -> str:
    step = training.state.step if training else 0
    where = f"step {step}, {_where(error, 'a block')}" if step else _where(error, "starting")
    lines = [f"rank {rank} is out of memory: {where}: {_torch_said(error)}"]
    if training is None:
        device, rest = torch.device(chosen(config.training.device)), 0
        weights = parameters(config.model).total * WIDTHS[config.training.dtype] // world_size()
    else:
        device, held = training.device, holds(training)
        weights, rest = held["weights"], held[REST]
        lines.append(f"held: {_listed(held)}")
    state = sum(_state(weights, config, device).values())
    return "\n".join([*lines, *settings(config, state, rest, _room(device))])


def _state(weights: int, config: Config, device: torch.device) -> dict[str, int]:
    """Bytes that a step needs for weights of so many."""
    moments = 0 if config.optimizer.offload and device.type == "cuda" else 2 * weights
    return {"weights": weights, "gradients": weights, "optimizer state": moments}


def _listed(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in held.items())


def _where(error: BaseException, otherwise: str) -> str:
    part, backward = otherwise, False
    for frame in traceback.extract_tb(error.__traceback__):
        _, inside, path = frame.filename.rpartition("/titanmoe/")
        if inside:
            part = next((text for name, text in PARTS.items() if name in f"/{path}:{frame.name}"), part)
        backward = backward or frame.name in ("_engine_run_backward", "backward")
    return f"in backward of {part}" if backward else f"in {part}"


def _torch_said(error: BaseException) -> str:
    """PyTorch's message without its file and line, and without advice on its allocator."""
    text = " ".join(str(error).split())
    text = text.rpartition("DefaultCPUAllocator: ")[2].removeprefix("CUDA out of memory. ")
    return text.partition(" See documentation")[0].partition(" If reserved but")[0].partition(" Error code")[0] or "?"


def holds(training: Training) -> dict[str, int]:
    """Bytes on this rank; what is not named is activations, gathered weights and message buffers."""
    weights = training.parameters.values()
    states = getattr(getattr(training.optimizer, "adamw", None), "state", {}).values()
    found = {
        "weights": _bytes(weights),
        "gradients": _bytes(p.grad for p in weights if p.grad is not None),
        "optimizer state": _bytes(t for state in states for t in state.values() if isinstance(t, Tensor)),
    }
    if training.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(training.device)
        used = torch.cuda.memory_reserved(training.device)
        others = whole - free - used
    else:
        used, whole, others = host_memory.resident(), host_memory.whole(), 0
    found[REST] = max(0, used - sum(found.values()))
    if others > 0:
        found["other programs and libraries on this GPU"] = others
    return found | {"of": whole} if whole else found


def _bytes(tensors: Iterable[Any]) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def _room(device: torch.device) -> int:
    """Bytes for this rank, 0 if unknown: its GPU, or its share of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host_memory.whole() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def settings(config: Config, state: int, rest: int, room: int) -> list[str]:
    """What shrinks the larger part comes first; none changes what the model learns. state: bytes of a rank's weights,
    gradients and moments. rest: of what else it holds."""
    first, second = list(_less_state(config)), list(_less_activation(config))
    if 0 < room < state:
        said = f"weights, gradients and optimizer state alone are {_size(state)} a rank, and it has {_size(room)}"
        lines = [f"{said}: smaller batches, recomputation and cp cannot help; what does:"]
    else:
        lines, first = ["what helps most:"], [*second, *first] if rest >= state else [*first, *second]
    return [*lines, *(f"  {number}. {text}" for number, text in enumerate(first[:3], 1))]


def _less_activation(config: Config) -> Iterator[str]:
    batch, mode, cp = config.training.local_batch_size, config.activation_checkpoint.mode, config.parallelism.cp
    if batch > 1:
        yield f"training.local_batch_size = {batch // 2} (it is {batch}): activations shrink with it"
    if mode != "full":
        yield f'activation_checkpoint.mode = "full" (it is "{mode}"): blocks are computed again in backward'
    if config.parallelism.pp > 1 and config.parallelism.reshard_after_forward != "always":
        yield 'parallelism.reshard_after_forward = "always": gathered weights are dropped between forward and backward'
    yield f"parallelism.cp = {2 * cp} (it is {cp}): each rank has half of every sample, on twice the ranks"


def _less_state(config: Config) -> Iterator[str]:
    parallelism, experts = config.parallelism, config.parallelism.experts
    if parallelism.dp_replicate > 1:
        yield f"parallelism.dp_replicate = 1 (it is {parallelism.dp_replicate}): all data ranks share one copy"
    if experts.edp_replicate > 1:
        yield f"parallelism.experts.edp_replicate = 1 (it is {experts.edp_replicate}): the same for the experts"
    yield "more ranks, on more GPUs or machines: weights, gradients and optimizer state are shared among them"
    if not config.optimizer.offload and config.training.device != "cpu":
        yield "optimizer.offload = true: on GPUs, the optimizer's moments are kept in the host's memory"


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size > 2**28 else f"{size / 2**20:.0f} MiB"
