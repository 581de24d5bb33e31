"""Bitwise checks against silent data corruption: replicas on several ranks, and two passes over one batch.

`[debug] replicas_every` uses `ReplicaCheck`: a rank computes one fingerprint of weights, moments, router biases and
counters for each set of ranks that it shares them with; one all-gather distributes these. `[debug] rerun` uses
`repeat_pass`: each rank compares fingerprints of its loss, routing counts and gradients in two passes. Hidden states
travel between ranks, so only the first layer that differs shows where the fault is.

Shapes: M microbatches of a step, X counted numbers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.comm.collectives import all_gather, to_local
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.rank_groups import View, group_of, groups
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.train.gradients import Gradients, PassSums, StepSums, StepWork
from titanmoe.train.training import RankModel

# By axis of a mesh (titanmoe.fold.meshes): the axes of the fold that it combines.
AXES: dict[View, dict[str, tuple[str, ...]]] = {
    "attention": {"dp_replicate": ("dp_replicate",), "fsdp": ("dp_shard", "cp"), "tp": ("tp",)},
    "experts": {axis: (axis,) for axis in ("edp_replicate", "edp", "ep", "etp")},
}
MOST_NAMED = 6
"""The number of tensors and ranks that a message names."""
BLOCK = 1 << 18
"""The number of words hashed at a time. Hashing briefly needs three times their size in memory."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as a flat tensor of int64; of integers as wide as its elements if those do not fit.

    They do not if the tensor's size is no multiple of eight bytes. It is a view where that is possible.
    """
    flat = tensor.detach().reshape(-1)
    if flat.nbytes % 8:
        return flat.view(WORDS[flat.element_size()])
    if flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits as an int64 scalar on its device, without a host sync.

    It is the sum of all words, each times an odd number, modulo 2**64. One changed bit always changes it. Two words
    that swap places usually do, but not if only their highest bits differ or their blocks give them one factor.
    """
    integers = as_integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not integers.numel():
        return total
    odd = torch.arange(1, 2 * min(BLOCK, integers.numel()), 2, device=tensor.device)
    for number, block in enumerate(integers.split(BLOCK)):
        total += (block * odd[: block.numel()]).sum() * (2 * number + 1)
    return total


@torch.no_grad()
def combine_fingerprints(fingerprints: list[Tensor]) -> Tensor:
    """Return one hash, an int64 scalar, of at least one fingerprint (int64 scalars); their order matters."""
    return (torch.stack(fingerprints) * torch.arange(1, 2 * len(fingerprints), 2, device=fingerprints[0].device)).sum()


class ReplicaGroup(NamedTuple):
    """Axes along which tensors are replicated: ranks whose coordinates differ only in these axes hold equal tensors."""

    view: View
    """"attention" or "experts": the mesh that has the axes."""
    axes: tuple[str, ...]


class ReplicaDifference(NamedTuple):
    """A group of ranks whose replicas of some tensors are not equal."""

    kind: ReplicaGroup
    group: tuple[int, ...]
    """All ranks of the group."""
    ranks: list[int]
    """The ranks that differ from the majority; all ranks of the group if there is none."""


class ReplicaCheck:
    """The check that replicas of weights, moments, buffers and counters are bitwise equal on all ranks."""

    def __init__(self, training: RankModel, options: Options, seed: int):
        self.training, self.fold, self.seed = training, training.fold, seed
        self.with_moments = not options.offload
        self.kinds = [*self._view_groups("experts"), *self._view_groups("attention")]  # the last one is the whole stage
        self.kind_of = {name: self._replica_group(p) for name, p in training.parameters.items()}
        self.kind_of |= dict.fromkeys(training.buffers, self.kinds[-1] if self.fold.stage > 1 else None)
        self.world = ReplicaGroup("attention", ("pp", *chain.from_iterable(AXES["attention"].values())))
        if self.fold.world > 1:
            self.kinds.append(self.world)
        self.agreed = -1
        """The last step after which all ranks agreed; -1 if none."""

    def _view_groups(self, view: View) -> Iterator[ReplicaGroup]:
        """Yield a ReplicaGroup for each non-empty set of a view's mesh axes, of those with more than one rank."""
        axes = {name: names for name, names in AXES[view].items() if len(group_of(self.fold, view, names, 0)) > 1}
        for count in range(1, len(axes) + 1):
            for combination in combinations(axes.values(), count):
                yield ReplicaGroup(view, tuple(chain.from_iterable(combination)))

    def _replica_group(self, parameter: nn.Parameter) -> ReplicaGroup | None:
        """Return the axes along which a parameter is replicated; None if no other rank holds the same shard."""
        if not isinstance(parameter, DTensor):
            return None
        mesh = parameter.device_mesh
        view: View = "attention" if "fsdp" in mesh.mesh_dim_names else "experts"
        replicated = {
            name
            for name, size, placement in zip(mesh.mesh_dim_names, mesh.shape, parameter.placements, strict=True)
            if size > 1 and isinstance(placement, Replicate)
        }
        kind = ReplicaGroup(
            view, tuple(chain.from_iterable(axes for name, axes in AXES[view].items() if name in replicated))
        )
        return kind if replicated else None

    def replicated_state(self) -> Iterator[tuple[str, Tensor, ReplicaGroup]]:
        """Yield (name, local tensor, replica group) of each weight, buffer and moment that other ranks hold too.

        Moments in host memory are left out.
        """
        training = self.training
        moments = training.optimizer.moments() if self.with_moments else {}
        for name, kind in self.kind_of.items():
            if kind is not None:
                tensor = training.buffers[name] if name in training.buffers else to_local(training.parameters[name])
                yield name, tensor, kind
                yield from ((f"{moment} of {name}", x, kind) for moment, x in moments.get(name, {}).items())

    def fingerprints(self) -> Tensor:
        """Return one int64 for each ReplicaGroup of `self.kinds`: a hash of this rank's tensors replicated along it.

        Not collective. It is 0 if this rank has no such tensor. That of `self.world`, the last, is of `_counters` too.
        """
        prints: dict[ReplicaGroup, list[Tensor]] = {kind: [] for kind in self.kinds}
        for _, tensor, kind in self.replicated_state():
            prints[kind].append(fingerprint(tensor))
        if self.world in prints:
            prints[self.world].append(torch.full((), self._counters(), device=self.training.device))
        nothing = torch.zeros((), dtype=torch.int64, device=self.training.device)
        return torch.stack(
            [combine_fingerprints(kind_prints) if kind_prints else nothing for kind_prints in prints.values()]
        )

    def _counters(self) -> int:
        """Return a 64-bit hash of step, tokens, seed, skip rule and loader's state, which all ranks must have alike."""
        state = self.training.state
        counts = state.step, state.tokens, self.seed, state.skips.state_dict()
        text = repr((*counts, self.training.loader.state_dict()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def compare(self, step: int) -> str:
        """Return a text that names the ranks and tensors whose replicas differ after a step; "" if all agree.

        Ranks exchange one hash for each ReplicaGroup, and those of single tensors only if these differ. Collective over
        the world; all ranks return the same text. If all agree, `agreed` becomes `step`.
        """
        if not self.kinds:
            return ""
        table = all_gather(self.fingerprints(), 0, self.training.meshes.world).view(self.fold.world, -1).tolist()
        differences = [
            ReplicaDifference(kind, group, ranks)
            for column, kind in enumerate(self.kinds)
            for group in groups(self.fold, *kind)
            if (ranks := differing_ranks(group, [table[rank][column] for rank in group]))
        ]
        if not differences:
            self.agreed = step
            return ""
        return self._message(differences, step)

    def _message(self, differences: list[ReplicaDifference], step: int) -> str:
        """Return a text that names the ranks and tensors whose replicas differ after a step.

        `differences` are the same on all ranks, at least one. Collective over the world: exchanges the fingerprints of
        single tensors.
        """
        rank = dist.get_rank()
        kinds = {difference.kind for difference in differences if rank in difference.group}
        prints_of_ranks = on_all_ranks(
            dist.group.WORLD,
            lambda: {(kind, name): int(fingerprint(x)) for name, x, kind in self.replicated_state() if kind in kinds},
        )
        lines = []
        for kind, group, ranks in differences:
            first = prints_of_ranks[group[0]]
            differing_names = {
                name
                for of_kind, name in first
                if of_kind == kind and any(prints_of_ranks[other][kind, name] != first[kind, name] for other in group)
            }
            names = sorted(differing_names) or ["the counts of steps, updates or samples"]
            lines.append(f"{_ranks_text(ranks, group)} ({' x '.join(kind.axes)}): {first_few(names)}")
        text = f"after step {step} {'; '.join(dict.fromkeys(lines))}"
        return text if self.agreed < 0 else f"{text}; they agreed after step {self.agreed}"


def differing_ranks(group: tuple[int, ...], values: list[int]) -> list[int]:
    """Return the ranks of `group` whose value, of one for each, is not the majority's.

    [] if all are equal; all ranks if there is no majority.
    """
    (majority_value, count), *others = Counter(values).most_common()
    if not others:
        return []
    if 2 * count > len(group):
        return [rank for rank, value in zip(group, values, strict=True) if value != majority_value]
    return list(group)


def _ranks_text(ranks: list[int], group: tuple[int, ...]) -> str:
    if len(ranks) == len(group):
        return (
            f"ranks {first_few(ranks)} should hold the same and differ, and there is no majority to say which is wrong"
        )
    ranks_that_differ = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {first_few(ranks)} differ"
    return f"{ranks_that_differ} from {len(group) - len(ranks)} ranks that agree"


def first_few(items: list) -> str:
    """Return the first `MOST_NAMED` items as text, such as "0, 1, 2", with " and 4 more" if there are others."""
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return ", ".join(map(str, items[:MOST_NAMED])) + more


# ---- two passes over one batch


def pass_fingerprints(gradients: Gradients, local_sums: PassSums) -> dict[str, int]:
    """Return fingerprints of a rank's last forward and backward, by name, in the order in which a fault spreads.

    They are of the routing counts of each MoE layer, the loss, and the gradient shards. The host waits for them.
    `local_sums` are this rank's of the pass, before they were summed over ranks.
    """
    prints: dict[str, Tensor] = {}
    for number, moe in sorted(gradients.moe_layers.items()):
        prints[f"the router of layer {number}"] = fingerprint(moe.balance.counts.counts_MX)
    prints["the loss"] = fingerprint(torch.stack((local_sums.loss, local_sums.mtp_loss)))
    for name, parameter in gradients.trained.items():
        prints[f"the gradient of {name}"] = fingerprint(local_grad(parameter))
    return dict(zip(prints, torch.stack(list(prints.values())).tolist(), strict=True))


def repeat_pass(gradients: Gradients, work: StepWork, local_sums: PassSums) -> tuple[StepSums, str]:
    """Repeat a step's forward and backward, and compare the results with those of the first pass bit by bit.

    Collective over the world. `gradients` must still hold the gradients of the first pass; those of the second replace
    them. `local_sums` are this rank's of the first pass, before they were summed over ranks.

    Returns:
        The sums of the second pass, and a text that names the ranks that are not reproducible ("" if all are).
    """
    first = pass_fingerprints(gradients, local_sums)
    gradients.drop()
    sums = gradients.sums(work)
    second = pass_fingerprints(gradients, sums.local)
    differences = on_all_ranks(dist.group.WORLD, lambda: [name for name in first if first[name] != second[name]])
    return sums, describe_differences(differences)


def describe_differences(differences: list[list[str]]) -> str:
    """Return a text on the ranks on which two passes differ: those with the earliest difference; "" if none differs.

    `differences` has for each rank the names of the fingerprints that differ, in the order of `pass_fingerprints`.
    """
    differing = {rank: names for rank, names in enumerate(differences) if names}
    if not differing:
        return ""

    def order(name: str) -> tuple[int, int]:
        if name.startswith("the router"):
            return 0, int(name.rpartition(" ")[2])
        return (1, 0) if name == "the loss" else (2, 0)

    earliest = min((names[0] for names in differing.values()), key=order)
    ranks = [rank for rank, names in differing.items() if order(names[0]) == order(earliest)]
    earliest_text = "gradients" if earliest.startswith("the gradient") else earliest
    text = f"not reproducible on rank{'s' * (len(ranks) > 1)} {first_few(ranks)}, first seen in {earliest_text}"
    rest = len(differing) - len(ranks)
    return text + (f"; what {rest} other rank{'s' * (rest > 1)} computed from it differs too" if rest else "")
