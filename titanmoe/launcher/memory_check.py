"""Check before ranks are started whether a run fits into memory, by the planner's closed form, and suggest a remedy.

The form is a lower bound of what a step holds, with balanced routing; for [rl] also of what is held while completions
are generated that are as long as they may be. On GPUs each rank has memory of its own; without them the ranks of a
machine share it. A config's mapping must be legal for `world`, the ranks of all machines, `per_machine` of them on
each; all are taken to be like `machine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_layers
from titanmoe.config.fields import with_values
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.files import format_bytes
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.launcher.fit_ranks import Machine
from titanmoe.models.count import parameters
from titanmoe.moe.dispatchers.dispatcher_spec import with_planned_dispatcher
from titanmoe.plan import memory
from titanmoe.plan.devices import Device, known_device, names, read_device
from titanmoe.plan.generation_costs import GENERATING, GeneratorCosts
from titanmoe.plan.links import Factors
from titanmoe.plan.search import fits
from titanmoe.rl.prompt_records import contradictions
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS

MEMORY_TOLERANCE = 0.1
"""Largest relative difference between the memory of this machine's GPU and of a known device that stands for it."""
DOUBLINGS = 4
"""Number of worlds that are tried, each twice the one before, from the first that could hold the weights."""


@dataclass(frozen=True)
class MemoryNeed:
    """The least memory that a run needs."""

    rank: int
    """Bytes on the rank that needs most."""
    state: int
    """Bytes of weights, gradients and optimizer moments on that rank."""
    machine: int
    """Bytes on all ranks of the machine that needs most."""
    generating: bool = False
    """Whether that is while the rank generates completions for [rl]."""


def memory_need(config: Config, world: int, per_machine: int, machine: Machine) -> MemoryNeed:
    """Return a lower bound of the memory that a run needs, by the planner's formulas.

    Optimizer moments that GPUs offload to the host are left out. A rank of [rl] may be fullest while it generates.
    """
    fold = derive(world, config.parallelism)
    if config.moe.overlap != "auto":  # with halves, which that may become, it is alltoall
        config = with_planned_dispatcher(config, fold, per_machine, machine.gpus > 0)
    if not machine.gpus:  # there attention is by blocks, without a mask of documents
        config = with_values(config, {"data.packing": "stream"})
    stages = memory.rank_memories(config, fold)
    if config.optimizer.offload and machine.gpus:
        stages = [replace(stage, moments=0, components=stage.components | {"moments": 0}) for stage in stages]
    if config.rl.reward and not any(contradictions(config)):  # these are refused elsewhere
        stages = _beside_generator(stages, config, world, machine)
    fullest = max(stages, key=lambda stage: stage.peak)
    machines = [range(first, min(first + per_machine, world)) for first in range(0, world, per_machine)]
    return MemoryNeed(
        fullest.peak,
        fullest.weights + fullest.gradients + fullest.moments,
        max(sum(stages[rank // fold.stage].peak for rank in ranks) for ranks in machines),
        fullest.peak_during in GENERATING,
    )


def _beside_generator(
    stages: list[memory.RankMemory], config: Config, world: int, machine: Machine
) -> list[memory.RankMemory]:
    """Return each pipeline rank's memory in its fullest moment, of training or of generating completions for [rl].

    `stages` has that of training, which is returned if [generation.parallelism] is refused.
    """
    device = similar_device(machine)[0] if machine.gpus else read_device("cpu")
    if not machine.gpus:  # the host's memory is the same
        config = with_values(config, {"generation.offload_training": False})
    try:
        plan = GeneratorCosts(config, world, device, Factors()).plan(config.generation.parallelism)
    except ConfigError:  # [generation.parallelism] cannot be, which is refused elsewhere
        return stages
    return [plan.beside(stage) for stage in stages]


def need_if_too_large(config: Config, world: int, per_machine: int, machine: Machine) -> MemoryNeed | None:
    """Return a lower bound of a run's memory if the machine has less; None if it fits, or memory is unknown."""
    if not machine.memory:  # unknown
        return None
    need = memory_need(config, world, per_machine, machine)
    return need if (need.rank if machine.gpus else need.machine) > machine.memory else None


def describe_shortage(config: Config, world: int, per_machine: int, machine: Machine, command: str) -> str:
    """Return a text on why a run does not fit into memory, and what would; "" if it fits or memory is unknown.

    `command` is the recipe and its overrides as a shell's words ("debug --training.seq_len 64"), for a suggested
    command.
    """
    need = need_if_too_large(config, world, per_machine, machine)
    if need is None:
        return ""
    when = " to generate completions" * need.generating
    if machine.gpus:
        text = f"a rank needs at least {format_bytes(need.rank)} of memory{when}, and a GPU of this machine has "
    else:
        who = f"{per_machine} ranks need" if per_machine > 1 else "the rank needs"
        text = f"{who} at least {format_bytes(need.machine)} of memory here{when}, and this machine has "
    text += format_bytes(machine.memory)
    text += f" (weights, gradients and optimizer state alone are {format_bytes(need.state)} a rank)"
    if change := smallest_change(config, world, per_machine, machine):
        return f"{text}: {change} fits"
    return f"{text}: {suggest_gpus(config, world, machine, command)}"


# ---- what would do


def smallest_change(config: Config, world: int, per_machine: int, machine: Machine) -> str:
    """Return the fewest options that make the run fit, such as "--activation_checkpoint.mode full"; "" if none do.

    They change recomputation, microbatch and generation batch, where the state is, or the dispatcher, but not what the
    model learns.
    """
    for change in sorted(product(*_alternatives(config, world, machine)), key=lambda options: sum(map(bool, options))):
        values: dict[str, Any] = {path: value for option in change for path, value in option.items()}
        changed = with_values(config, values)
        if values and not violations(changed, world) and not need_if_too_large(changed, world, per_machine, machine):
            return " ".join(f"--{path} {str(value).lower()}" for path, value in values.items())
    return ""


def _alternatives(config: Config, world: int, machine: Machine) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of alternative changes that save memory, from mild to costly; a combination takes one from each list.

    A change is a dict of new values by option; {} changes nothing.
    """
    training, parallelism, options = config.training, config.parallelism, config.activation_checkpoint
    modes = ["moe", "full_except_dispatch", "full"]
    modes = modes[modes.index(options.mode) + 1 :] if options.mode in modes else modes
    modes = [mode for mode in modes if mode == "full" or moe_layers(config.model)]
    every = {"activation_checkpoint.every": 1} if options.every > 1 else {}
    yield [{}, *({"activation_checkpoint.mode": mode} | every for mode in modes)]
    batch, same_batch = training.local_batch_size, {}
    if training.global_batch_size == -1:  # it would become smaller too
        same_batch = {"training.global_batch_size": batch * derive(world, parallelism).dp}
    smaller = [batch >> n for n in range(1, batch.bit_length())]
    yield [{}, *({"training.local_batch_size": size} | same_batch for size in smaller)]
    yield [{}, {"parallelism.dp_replicate": 1}] if parallelism.dp_replicate > 1 else [{}]
    offloads = machine.gpus and "offload" in OPTIMIZERS.look_up(config.optimizer.name).reads
    yield [{}, {"optimizer.offload": True}] if offloads and not config.optimizer.offload else [{}]
    if config.rl.reward:
        generation, least = config.generation, config.rl.completions
        size = generation.batch_size
        fewer = [size >> n for n in range(1, size.bit_length()) if size >> n >= least]
        yield [{}, *({"generation.batch_size": size} for size in fewer)]
        yield [{}, {"generation.offload_training": True}] if machine.gpus and not generation.offload_training else [{}]
    yield [{}, {"moe.dispatcher": "alltoall"}] if config.moe.dispatcher in ("auto", "symm_mem") else [{}]


def suggest_gpus(config: Config, world: int, machine: Machine, command: str) -> str:
    """Return a sentence with a number of GPUs on which the run fits, and the command that plans a mapping on them.

    GPUs are like this machine's, or H100s if it has none; what CUDA reserves for itself is subtracted. Numbers are
    tried by doubling from `world`, or from 1 without GPUs; if none fits, the sentence has the command alone. `command`
    is as in `describe_shortage`.
    """
    training, (device, figures) = config.training, similar_device(machine)
    usable = device.memory - device.reserved
    optimizer = OPTIMIZERS.look_up(config.optimizer.name)
    state = 2 * WIDTHS[training.dtype] * parameters(config.model).total  # with gradients
    state += optimizer.state_numbers(config) * optimizer.moment_width(config)
    count = world if machine.gpus else 1
    while state / count > usable:
        count *= 2
    for gpus in (count << n for n in range(DOUBLINGS)):
        batch = training.global_batch_size
        gpus_training = replace(training, global_batch_size=training.local_batch_size * gpus if batch == -1 else batch)
        if fits(replace(config, training=gpus_training), gpus, device, Factors()):
            kind = f"{device.name.upper()} GPU" if device.name else f"GPU of {format_bytes(device.memory)}"
            kind = f"1 {kind} is" if gpus == 1 else f"{gpus} {kind.replace('GPU', 'GPUs')} are"
            taken = f" (figures of {figures})" if " " in figures else ""
            how = " with another mapping" if machine.gpus and gpus == world else ""
            plan = f"titanmoe plan {command} --ranks {gpus} --hardware"
            shows = f"{plan} {device.name} shows" if device.name else f"{plan} FILE shows, with their figures in FILE"
            return f"{kind} enough{how}, as {shows}{taken}"
    return f"titanmoe plan {command} --ranks {count} says what helps"


def similar_device(machine: Machine) -> tuple[Device, str]:
    """Return the planner's device for this machine's GPUs, an H100 if it has none, and words on how it was chosen.

    Their name decides; if it is unknown, the nearest memory. GPUs with other memory than the device, such as A100s of
    40 GB, get it with their memory and without its name (""). The words are the device's name in capitals; unless name
    and memory match, with how it differs ("A100 but for memory") or why it was taken.
    """
    h100 = read_device("h100")
    if not machine.gpus:
        return h100, "H100"
    named = known_device(machine.gpu_name)
    why = "" if named else f", as the planner does not know {machine.gpu_name or 'the name of these GPUs'}"
    candidates = [named] if named else [h100, *(read_device(name) for name in names() if name != "cpu")]
    memory = machine.memory or candidates[0].memory
    device = min(candidates, key=lambda device: abs(device.memory - memory))
    if abs(device.memory - memory) <= MEMORY_TOLERANCE * memory:
        return device, device.name.upper() + (why and f" by memory{why}")
    device = candidates[0]
    unnamed = replace(device, name="", memory=memory, reserved=min(device.reserved, memory / 10))
    return unnamed, f"{device.name.upper()} but for memory{why}"
