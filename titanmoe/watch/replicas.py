"""Copies on several ranks must have the same bits: replicas of weights and moments, routers' biases, counters.

For everything that it shares with the same ranks, a rank computes one number. One message gives all ranks these
numbers, and the host waits once.
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

from titanmoe.comm.collectives import all_gather, local
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.groups import View, group_of, groups
from titanmoe.train.training import Training
from titanmoe.watch.bits import combined, fingerprint

# The axes of the meshes (titanmoe.fold.meshes), as axes of the fold.
AXES: dict[View, dict[str, tuple[str, ...]]] = {
    "attention": {"dp_replicate": ("dp_replicate",), "fsdp": ("dp_shard", "cp"), "tp": ("tp",)},
    "experts": {axis: (axis,) for axis in ("edp_replicate", "edp", "ep", "etp")},
}
NAMED = 6
"""How many tensors and ranks a message names."""


class ReplicaGroup(NamedTuple):
    """Ranks that differ only in these axes of the view hold the same."""

    view: View
    axes: tuple[str, ...]


class Odd(NamedTuple):
    kind: ReplicaGroup
    group: tuple[int, ...]
    ranks: list[int]
    """The ranks that differ from the majority; the whole group if there is none."""


class Replicas:
    def __init__(self, training: Training, options: Options, seed: int):
        self.training, self.fold, self.seed = training, training.fold, seed
        self.with_moments = not options.offload
        self.kinds = [*self._of_view("experts"), *self._of_view("attention")]  # the last one is the whole stage
        self.kind_of = {name: self._kind(p) for name, p in training.parameters.items()}
        self.kind_of |= dict.fromkeys(training.buffers, self.kinds[-1] if self.fold.stage > 1 else None)
        self.world = ReplicaGroup("attention", ("pp", *chain.from_iterable(AXES["attention"].values())))
        if self.fold.world > 1:
            self.kinds.append(self.world)
        self.agreed = -1
        """The last step after which all ranks agreed."""

    def _of_view(self, view: View) -> Iterator[ReplicaGroup]:
        axes = {name: parts for name, parts in AXES[view].items() if len(group_of(self.fold, view, parts, 0)) > 1}
        for count in range(1, len(axes) + 1):
            for some in combinations(axes.values(), count):
                yield ReplicaGroup(view, tuple(chain.from_iterable(some)))

    def _kind(self, parameter: nn.Parameter) -> ReplicaGroup | None:
        if not isinstance(parameter, DTensor):
            return None
        mesh = parameter.device_mesh
        view: View = "attention" if "fsdp" in mesh.mesh_dim_names else "experts"
        alike = {
            name
            for name, size, placement in zip(mesh.mesh_dim_names, mesh.shape, parameter.placements, strict=True)
            if size > 1 and isinstance(placement, Replicate)
        }
        kind = ReplicaGroup(
            view, tuple(chain.from_iterable(axes for name, axes in AXES[view].items() if name in alike))
        )
        return kind if alike else None

    def held(self) -> Iterator[tuple[str, Tensor, ReplicaGroup]]:
        """The part of the run's state that other ranks hold too, except moments that are in the host's memory."""
        training = self.training
        moments = training.optimizer.moments() if self.with_moments else {}
        for name, kind in self.kind_of.items():
            if kind is not None:
                tensor = training.buffers[name] if name in training.buffers else local(training.parameters[name])
                yield name, tensor, kind
                yield from ((f"{moment} of {name}", x, kind) for moment, x in moments.get(name, {}).items())

    def table(self) -> Tensor:
        """A number for each kind."""
        prints: dict[ReplicaGroup, list[Tensor]] = {kind: [] for kind in self.kinds}
        for _, tensor, kind in self.held():
            prints[kind].append(fingerprint(tensor))
        if self.world in prints:
            prints[self.world].append(torch.full((), self._counters(), device=self.training.device))
        nothing = torch.zeros((), dtype=torch.int64, device=self.training.device)
        return torch.stack([combined(some) if some else nothing for some in prints.values()])

    def _counters(self) -> int:
        """How far the run is. Seed and step are the whole state of its random numbers."""
        state = self.training.state
        counts = state.step, state.tokens, self.seed, state.skips.state_dict()
        text = repr((*counts, self.training.loader.state_dict()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def compare(self, step: int) -> str:
        """Which ranks differ in the state after a step, and in what; "" if none does.

        All ranks call it together and get the same answer.
        """
        if not self.kinds:
            return ""
        table = all_gather(self.table(), 0, self.training.meshes.world).view(self.fold.world, -1).tolist()
        found = [
            Odd(kind, group, odd)
            for column, kind in enumerate(self.kinds)
            for group in groups(self.fold, *kind)
            if (odd := differing(group, [table[rank][column] for rank in group]))
        ]
        if not found:
            self.agreed = step
            return ""
        return self._message(found, step)

    def _message(self, found: list[Odd], step: int) -> str:
        rank = dist.get_rank()
        mine: dict[str, int] = {}
        for odd in found:
            if rank in odd.group:
                mine |= {name: int(fingerprint(x)) for name, x, kind in self.held() if kind == odd.kind}
        everyone: list[dict[str, int]] = [{} for _ in range(self.fold.world)]
        dist.all_gather_object(everyone, mine)
        lines = []
        for kind, group, ranks in found:
            named = {n for n in everyone[group[0]] for other in group if everyone[other][n] != everyone[group[0]][n]}
            what = sorted(named) or ["the counts of steps, updates or samples"]
            lines.append(f"{_ranks(ranks, group)} ({' x '.join(kind.axes)}): {few(what)}")
        text = f"after step {step} {'; '.join(dict.fromkeys(lines))}"
        return text if self.agreed < 0 else f"{text}; they were alike after step {self.agreed}"


def differing(group: tuple[int, ...], values: list[int]) -> list[int]:
    (most, count), *others = Counter(values).most_common()
    if not others:
        return []
    if 2 * count > len(group):
        return [rank for rank, value in zip(group, values, strict=True) if value != most]
    return list(group)


def _ranks(odd: list[int], group: tuple[int, ...]) -> str:
    if len(odd) == len(group):
        return f"ranks {few(odd)} should hold the same and differ, and there is no majority to say which is wrong"
    who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {few(odd)} differ"
    return f"{who} from {len(group) - len(odd)} ranks that agree"


def few(items: list) -> str:
    """The first of them, as text."""
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(map(str, items[:NAMED])) + more
