"""Out of memory: in which part of the step, what held how much, and the settings that help most."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold

PHRASES = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc")
"""How PyTorch, CUDA libraries and C++ put it, in lower case."""
PARTS = {  # the innermost one in the traceback counts
    "train/trainer.py:__init__": "building the model",
    "parallel/materialize.py": "making the weights",
    "train/checkpoints.py:load": "loading the checkpoint",
    "train/checkpoints.py": "saving a checkpoint",
    "train/validation.py": "validation",
    "data/": "reading data",
    "train/optimizer.py": "the optimizer's step",
    "parallel/norm.py": "clipping the gradients",
    "parallel/sharded.py": "gathering weights",
    "comm/": "sending between ranks",
    "models/transformer.py": "a block",
    "models/attention.py": "attention",
    "models/latent_attention.py": "attention",
    "parallel/attend.py": "attention",
    "parallel/context.py": "attention",
    "models/vocabulary.py": "embedding, head or loss",
    "moe/": "the MoE layer",
    "moe/assign.py": "sending rows to experts",
    "moe/dispatch.py": "sending rows to experts",
    "moe/experts.py": "the experts",
}


class FailedTrainer(Protocol):
    config: Config
    fold: Fold
    device: torch.device
    parameters: dict[str, Any]
    optimizer: Any
    step: int


def advice(trainer: FailedTrainer) -> str:
    """What a step will hold at least on this rank, and what to do if that, or the rest, is too much."""
    weights = _bytes(trainer.parameters.values())
    held = {"weights": weights, "gradients": weights, "optimizer state": 2 * weights}
    whole = _memory() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    rest = "activations, gathered weights and buffers"
    lines = ["each rank holds " + ", ".join(f"{name} {_size(size)}" for name, size in held.items()) + f"; and {rest}"]
    found = settings(trainer.config, trainer, held | {rest: max(0, whole - 4 * weights)})
    return "\n".join([*lines, *_listed(found)])


def _listed(found: list[str]) -> list[str]:
    return ["what helps most:", *(f"  {number}. {text}" for number, text in enumerate(found[:3], 1))]


def is_one(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in PHRASES)


def explain(error: BaseException, trainer: FailedTrainer | None, rank: int, config: Config) -> str:
    step = f"step {trainer.step}, " if trainer and trainer.step else ""
    lines = [f"rank {rank} is out of memory: {step}{_where(error)}: {_torch_said(error)}"]
    held: dict[str, int] = {}
    if trainer:
        held = holds(trainer)
        lines.append("held: " + ", ".join(f"{name} {_size(size)}" for name, size in held.items()))
    return "\n".join([*lines, *_listed(settings(config, trainer, held))])


def _where(error: BaseException) -> str:
    frames = list(traceback.extract_tb(error.__traceback__))
    part, backward = "starting", False
    for frame in frames:
        _, inside, path = frame.filename.rpartition("/titanmoe/")
        if inside:
            named = (f"{path}:{frame.name}", path)
            found = [at for at in PARTS if any(name.startswith(at) for name in named)]
            part = PARTS[max(found, key=len)] if found else part
        backward = backward or frame.name in ("_engine_run_backward", "backward")
    return f"in backward of {part}" if backward else f"in {part}"


def _torch_said(error: BaseException) -> str:
    """PyTorch's message without its file and line, and without advice on its allocator."""
    text = " ".join(str(error).split())
    text = text.rpartition("DefaultCPUAllocator: ")[2].removeprefix("CUDA out of memory. ")
    return text.partition(" See documentation")[0].partition(" If reserved but")[0].partition(" Error code")[0] or "?"


def holds(trainer: FailedTrainer) -> dict[str, int]:
    """Bytes on this rank; what is not named is activations, gathered weights and message buffers."""
    parameters = trainer.parameters.values()
    states = getattr(getattr(trainer.optimizer, "adamw", None), "state", {}).values()
    found = {
        "weights": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": _bytes(t for state in states for t in state.values() if isinstance(t, Tensor)),
    }
    if trainer.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(trainer.device)
        used = torch.cuda.memory_reserved(trainer.device)
        others = whole - free - used
    else:
        used, whole = _resident(), _memory()
        others = 0
    found["activations, gathered weights and buffers"] = max(0, used - sum(found.values()))
    if others > 0:
        found["other programs and libraries on this GPU"] = others
    return found | {"of": whole} if whole else found


def _bytes(tensors: Iterable[Any]) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def _resident() -> int:
    return _kib("/proc/self/status", "VmRSS:")


def _memory() -> int:
    """Of this machine or container, whichever is less."""
    whole = _kib("/proc/meminfo", "MemTotal:")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max"
        return whole
    return min(limit, whole) if whole else limit


def _kib(file: str, name: str) -> int:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def settings(config: Config, trainer: FailedTrainer | None, held: dict[str, int]) -> list[str]:
    """Those that shrink the larger part come first; none changes what the model learns."""
    state = sum(held.get(name, 0) for name in ("weights", "gradients", "optimizer state"))
    passing = sum(held.values()) - held.get("of", 0) - state
    first, second = list(_less_state(config, trainer)), list(_less_activation(config))
    if passing >= state or not held:
        first, second = second, first
    return [*first, *second]


def _less_activation(config: Config) -> Iterator[str]:
    training, parallelism = config.training, config.parallelism
    if training.local_batch_size > 1:
        half = training.local_batch_size // 2
        yield f"training.local_batch_size = {half} (it is {training.local_batch_size}): activations shrink with it"
    if config.activation_checkpoint.mode != "full":
        mode = config.activation_checkpoint.mode
        yield f'activation_checkpoint.mode = "full" (it is "{mode}"): blocks are computed again in backward'
    yield (
        f"parallelism.cp = {2 * parallelism.cp} (it is {parallelism.cp}): each rank has half of every sample; "
        "it takes twice the ranks, or half the data ranks"
    )


def _less_state(config: Config, trainer: FailedTrainer | None) -> Iterator[str]:
    parallelism, experts = config.parallelism, config.parallelism.experts
    if parallelism.dp_replicate > 1:
        yield f"parallelism.dp_replicate = 1 (it is {parallelism.dp_replicate}): all data ranks share one copy"
    if experts.edp_replicate > 1:
        yield f"parallelism.experts.edp_replicate = 1 (it is {experts.edp_replicate}): the same for the experts"
    yield "more ranks: weights, gradients and optimizer state are shared among dp_shard, and the experts' among edp"
    if parallelism.reshard_after_forward != "always":
        yield 'parallelism.reshard_after_forward = "always": gathered weights are dropped between forward and backward'
    if config.training.mixed_precision_param == "float32" and config.training.device != "cpu":
        yield 'training.mixed_precision_param = "bfloat16" (it is "float32"): gathered weights take half'
    if trainer is None or trainer.fold.stage % (2 * experts.ep * experts.etp) == 0:
        yield f"parallelism.experts.ep = {2 * experts.ep} (it is {experts.ep}): a rank gathers half as many experts"


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size > 2**28 else f"{size / 2**20:.0f} MiB"
