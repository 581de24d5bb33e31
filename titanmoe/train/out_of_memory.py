"""Message for a rank that is out of memory: what it was doing, what held how many bytes, which settings help most.

Called by titanmoe.train.launch, when a rank fails and before, for the case that the kernel kills it. Weights, gradients
and moments are counted; the remainder is taken for activations.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from typing import Any

import torch

from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.unsharded_experts import experts_are_unsharded, has_compute_copies, reshards_after_forward
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.ops.device import kind_of_setting
from titanmoe.train import host_resources
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS
from titanmoe.train.runtime import world_size
from titanmoe.train.training import Training

OUT_OF_MEMORY = re.compile("not enough memory|can(no|')t allocate memory|out of memory|bad_alloc", re.IGNORECASE)
"""Pattern of out-of-memory messages of PyTorch, CUDA libraries and C++."""
ACTIVITIES = {
    "build.py:build_training": "building the model",
    "checkpoint": "loading or saving a checkpoint",
    "validation": "validation",
    "/data/": "reading data",
    "optimizer": "the optimizer's step",
    "fsdp": "gathering weights or summing gradients",
    "/comm/": "sending between ranks",
    "atten": "attention",
    "vocabulary": "embedding, head or loss",
    "/moe/": "the MoE layer",
}
"""Activities by a word in "file:function" of titanmoe's innermost frame; the first that matches counts."""
OTHER_MEMORY = "activations, gathered weights and buffers"
"""Name of all memory that is not weights, gradients or optimizer state."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None)


def memory_advice(training: Training, config: Config) -> str:
    """Return text for the case that the kernel kills this rank: bytes that it holds, and settings that save memory.

    The bytes are an estimate of weights, gradients and optimizer state; activations are not measured. The launcher
    prints the text (launch_messages.write_memory_advice).
    """
    state = _state_bytes(*_weights(training), config, training.device)
    size, room = sum(state.values()), _capacity(training.device)
    lines = advise_settings(config, size, max(0, room - size), room)
    return "\n".join([f"each rank holds {_format_sizes(state)}; and {OTHER_MEMORY}", *lines])


def explain(error: BaseException, training: Training | None, rank: int, config: Config) -> str:
    """Return the message for a rank that is out of memory: what it was doing, what holds how much, what would help.

    Args:
        training: the run; None if it was still being built: then what is held is not said, and an even share of the
            weights is assumed for the advice.
    """
    step = training.state.step if training else 0
    where = f"step {step}, {_activity(error, 'a block')}" if step else _activity(error, "starting")
    lines = [f"rank {rank} is out of memory: {where}: {_torch_message(error)}"]
    if training is None:
        device = torch.device(kind_of_setting(config.training.device))
        held = {
            "weights": parameters(config.model).total * WIDTHS[config.training.dtype] // world_size(),
            OTHER_MEMORY: 0,
        }
    else:
        device, held = training.device, held_bytes(training)
        lines.append(f"held: {_format_sizes(held)}")
    trained = held["weights"] if training is None else _weights(training)[1]
    state = sum(_state_bytes(held["weights"], trained, config, device).values())
    return "\n".join([*lines, *advise_settings(config, state, held[OTHER_MEMORY], _capacity(device))])


def _weights(training: Training) -> tuple[int, int]:
    """Return the bytes of all weights of this rank, and the bytes of its trained weights."""
    return _bytes(training.parameters.values()), _bytes(training.gradients.trained.values())


def _state_bytes(weights: int, trained: int, config: Config, device: torch.device) -> dict[str, int]:
    """Estimate the bytes on the device of "weights", "gradients" and "optimizer state", by these names.

    Args:
        weights: bytes of this rank's weights.
        trained: bytes of this rank's trained weights.
        device: device of the model; optimizer state that is offloaded from a GPU counts 0.
    """
    optimizer = OPTIMIZERS.look_up(config.optimizer.name)
    moments = optimizer.state_numbers(config) * optimizer.moment_width(config)
    numbers = max(1, trained_parameters(config.model, Tuning.of(config)))
    state = trained * moments // (numbers * WIDTHS[config.training.dtype])
    moments = 0 if config.optimizer.offload and device.type == "cuda" else state
    return {"weights": weights, "gradients": trained, "optimizer state": moments}


def _activity(error: BaseException, otherwise: str) -> str:
    """Return what titanmoe was doing when an error was raised, as "in attention" or "in backward of attention".

    The innermost frame of the traceback that is known, by ACTIVITIES, decides.

    Args:
        otherwise: text in place of "attention" if no frame of the traceback is known.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{f.filename}:{f.name}".rpartition("/titanmoe")[2] for f in frames if "/titanmoe/" in f.filename]
    activities = (text for place in reversed(ours) for words, text in ACTIVITIES.items() if words in place)
    backward = any(frame.name in ("_engine_run_backward", "backward") for frame in frames)
    return f"in {'backward of ' if backward else ''}{next(activities, otherwise)}"


def _torch_message(error: BaseException) -> str:
    """Return the text of PyTorch's out-of-memory error without its file and line and its advice on the allocator."""
    text = re.sub(r".*DefaultCPUAllocator: |CUDA out of memory\. ", "", " ".join(str(error).split()))
    return re.split(" See documentation| If reserved but| Error code", text)[0] or "?"


def held_bytes(training: Training) -> dict[str, int]:
    """Return the bytes of memory in use on this rank by purpose.

    The names are weights, gradients, optimizer state, OTHER_MEMORY for the rest of what PyTorch has reserved on the GPU
    (without one: of what is resident), on a GPU the use of other programs, and "of" with the bytes that this rank may
    use, if known.
    """
    weights = training.parameters.values()
    held = {
        "weights": _bytes(weights),
        "gradients": _bytes(p.grad for p in weights),
        "optimizer state": _bytes(training.optimizer.device_tensors),
    }
    used, room, others = host_resources.resident_memory(), _capacity(training.device), 0
    if training.device.type == "cuda":
        used = torch.cuda.memory_reserved(training.device)
        others = room - torch.cuda.mem_get_info(training.device)[0] - used
    held[OTHER_MEMORY] = max(0, used - sum(held.values()))
    more = {"other programs and libraries on this GPU": others, "of": room}
    return held | {name: size for name, size in more.items() if size > 0}


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the total bytes of this rank's shards of the tensors; entries that are None count 0."""
    shards = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, torch.Tensor))
    return sum(t.nbytes for t in shards)


def _capacity(device: torch.device) -> int:
    """Return the bytes that this rank may use, 0 if unknown: its GPU's memory, or the host's divided by its ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host_resources.memory_limit() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def advise_settings(config: Config, state: int, rest: int, room: int) -> list[str]:
    """Return a heading and at most three numbered settings, first those that reduce the larger of `state` and `rest`.

    None of them changes what the model learns.

    Args:
        state: bytes of this rank's weights, gradients and moments.
        rest: bytes of everything else that this rank holds.
        room: bytes that this rank may use; if `state` exceeds it, only what reduces `state` is named; 0 if unknown.
    """
    batch, mode, cp = config.training.local_batch_size, config.activation_checkpoint.mode, config.parallelism.cp
    copies, expert_copies = config.parallelism.dp_replicate, config.parallelism.experts.edp_replicate
    has_unsharded_experts = experts_are_unsharded(config.parallelism, config.training, config.parallelism.experts.edp)
    keeps_weights = not reshards_after_forward(config.parallelism) or (
        has_unsharded_experts and has_compute_copies(config.training)
    )
    offloads = "offload" in OPTIMIZERS.look_up(config.optimizer.name).reads
    can_offload = offloads and not config.optimizer.offload and config.training.device != "cpu"
    less_activation = [
        (batch > 1, f"training.local_batch_size = {batch // 2} (it is {batch}): activations shrink with it"),
        (mode != "full", f'activation_checkpoint.mode = "full" (it is "{mode}"): backward recomputes the blocks'),
        (keeps_weights, 'parallelism.reshard_after_forward = "always": backward gathers or casts weights again'),
        (True, f"parallelism.cp = {2 * cp} (it is {cp}): each rank has half of every sample, on twice the ranks"),
    ]
    less_state = [
        (copies > 1, f"parallelism.dp_replicate = 1 (it is {copies}): all data ranks shard one copy of the weights"),
        (expert_copies > 1, f"parallelism.experts.edp_replicate = 1 (it is {expert_copies}): the same for the experts"),
        (True, "more ranks, on more GPUs or machines: weights, gradients and optimizer state are shared among them"),
        (can_offload, "optimizer.offload = true: on GPUs, the optimizer's moments are kept in the host's memory"),
    ]
    advised = [*less_activation, *less_state] if rest >= state else [*less_state, *less_activation]
    opening = "what helps most:"
    if 0 < room < state:
        advised = less_state
        opening = f"weights, gradients and optimizer state alone are {_size(state)} a rank, and it has {_size(room)}: "
        opening += "smaller batches, recomputation and cp cannot help; what does:"
    texts = [text for applies, text in advised if applies]
    return [opening, *(f"  {number}. {text}" for number, text in enumerate(texts[:3], 1))]


def _format_sizes(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in held.items())


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size > 2**28 else f"{size / 2**20:.0f} MiB"
