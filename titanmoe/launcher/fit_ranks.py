"""Choose how many ranks a recipe runs on, and suggest the legal mapping nearest to its own that fits them.

Called by `titanmoe train` and `titanmoe finetune`. The nearest mapping changes the fewest degrees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titanmoe.config.fields import with_values
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import DEGREE_PATHS
from titanmoe.fold.legal_mappings import changes, nearest
from titanmoe.this_process import usable_cores
from titanmoe.train import host_resources

MOST_PER_CORE = 4
"""Most ranks per CPU core that a recipe may start by default: one written for 128 GPUs would only fill memory."""
SMALLER_WORLDS = 64
"""Number of smaller worlds that are tried if the given number of ranks has no legal mapping."""


@dataclass(frozen=True)
class Machine:
    """The GPUs, CPU cores and memory of a machine."""

    gpus: int
    """Number of GPUs; 0 if the run does not use them."""
    cores: int
    memory: int = 0
    """Bytes of the smallest GPU's memory, or of the machine's if it has no GPUs; 0 if unknown."""
    gpu_name: str = ""
    """Name of the smallest GPU, such as "NVIDIA H100 80GB HBM3"; "" if unknown."""

    @property
    def ranks(self) -> int:
        """Number of ranks that `--ranks auto` stands for: one per GPU, or without GPUs one per core."""
        return self.gpus or self.cores

    def __str__(self) -> str:
        if self.gpus:
            return f"{self.gpus} GPU{'s' * (self.gpus > 1)}"
        return f"{self.cores} CPU core{'s' * (self.cores > 1)} and no GPU in use"


def this_machine(device: str) -> Machine:
    """Return the GPUs, CPU cores and memory of this machine for a run with training.device = `device`, also "auto"."""
    import torch

    cores = usable_cores()
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if not gpus:
        return Machine(0, cores, host_resources.memory_limit())
    smallest = min(map(torch.cuda.get_device_properties, range(gpus)), key=lambda gpu: gpu.total_memory)
    return Machine(gpus, cores, smallest.total_memory, smallest.name)


def choose_ranks(requested: str, nodes: int, recipe_ranks: int, machine: Machine) -> int:
    """Return the number of ranks, on all nodes together, that a run starts.

    Args:
        requested: the option --ranks: the number on all nodes, "auto", or "" if absent.
        nodes: number of nodes.
        recipe_ranks: the recipe's job.ranks; 0 if it has none.
        machine: this machine; each node gets its `ranks` for "auto", and by default.
    """
    if requested == "auto" or not (requested or recipe_ranks):
        return machine.ranks * nodes
    return int(requested or recipe_ranks)


def why_too_many(
    world: int, nodes: int, machine: Machine, recipe: str, shortage_if_fitted: Callable[[], str] = lambda: ""
) -> str:
    """Return why these nodes cannot take so many ranks, and what to type; "" if they can.

    A GPU takes one rank. Without GPUs a recipe's job.ranks may be MOST_PER_CORE on each core, or 8 if that is more.

    Args:
        world: ranks of all nodes.
        nodes: number of nodes.
        machine: this machine; all nodes are taken to be alike.
        recipe: the recipe whose job.ranks it is; "" if the number comes from --ranks, which CPUs do not limit.
        shortage_if_fitted: returns what --ranks auto --fit would lack on this machine; "" if nothing.
    """
    who = f"{recipe} is for {world} ranks (job.ranks)" if recipe else f"--ranks = {world}"
    if world % nodes:
        even = " or ".join(str(n) for n in (world // nodes * nodes, -(-world // nodes) * nodes) if n)
        return f"{who}, which {nodes} nodes cannot share evenly: give --ranks {even}"
    per_node = world // nodes
    # A number on the command line is meant, also on CPUs.
    most = machine.gpus or (max(8, MOST_PER_CORE * machine.cores) if recipe else per_node)
    if per_node <= most:
        return ""
    here = f", {per_node} of them here," if nodes > 1 else ""
    reason = f"{who}{here} and this machine has {machine}"
    if not recipe:
        return f"{reason}: give {most * nodes} or fewer, --ranks auto, or --training.device cpu"
    count = -(-world // (machine.gpus or 8))
    several = f"--nnodes {count} on each of {count} nodes (docs/launch.md)"
    if shortage := shortage_if_fitted():
        return f"{reason}: use {several}; with --ranks auto --fit, {shortage}"
    return f"{reason}: use {several}, or --ranks auto --fit to run it here"


def nearest_changes(config: Config, world: int) -> dict[str, tuple[int, int]]:
    """Return the degrees that differ between a recipe's mapping and the nearest legal one of `world` ranks.

    They are (old, new) by option, such as parallelism.tp; an old value of -1 was to be derived. {} if none differs, or
    no mapping is legal.
    """
    mappings = nearest(world, config.parallelism, config, count=1)
    by_name = changes(config.parallelism, mappings[0]) if mappings else {}
    return {DEGREE_PATHS[name]: change for name, change in by_name.items()}


def suggest_mapping(
    config: Config, world: int, nodes: int, shortage: Callable[[Config, int], str] = lambda *_: ""
) -> str:
    """Return a sentence with the nearest mapping that fits the number of ranks, or a smaller number that has one.

    Smaller numbers are tried on one node only. If there is neither, the sentence says so, and what to change.

    Args:
        config: the recipe, whose mapping does not fit.
        world: ranks of all nodes.
        nodes: number of nodes.
        shortage: returns a text on the memory that a config on so many ranks would lack on this machine, with which
            the sentence ends; "" if none.
    """
    if change := nearest_changes(config, world):
        reason = f"The nearest mapping that fits {world} rank{'s' * (world > 1)}: {changes_text(change)}"
        return f"{reason}; {shortage(with_values(config, new_values(change)), world) or '--fit takes it'}."
    if nodes == 1:
        for smaller in range(world - 1, max(0, world - SMALLER_WORLDS), -1):
            if change := nearest_changes(config, smaller):
                reason = f"No mapping of {world} ranks fits this model and batch; one of {smaller} does"
                if missing := shortage(with_values(config, new_values(change)), smaller):
                    return f"{reason}, but {missing}."
                return f"{reason}: --ranks {smaller} --fit ({changes_text(change)})."
    return f"No mapping of {world} ranks fits this model and batch: change training.global_batch_size, or the ranks."


def new_values(change: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Return the new value of each changed option, given (old, new) by option."""
    return {path: value for path, (_, value) in change.items()}


def changes_text(change: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{path} {'derived' if old == -1 else old} -> {new}" for path, (old, new) in change.items())
