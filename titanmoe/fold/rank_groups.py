"""Rank groups: which ranks are on the same axis. Plain arithmetic, for any rank of any world.

A rank is a mixed-radix number, one digit per axis of a view, outermost first. The group of some axes holds the ranks
that differ in those digits only. "dp" stands for dp_replicate and dp_shard together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Literal

from titanmoe.fold.degrees import Fold

View = Literal["attention", "experts"]
COMBINED_AXES = {"dp": ("dp_replicate", "dp_shard")}


def groups(fold: Fold, view: View, axes: str | tuple[str, ...]) -> list[tuple[int, ...]]:
    """Return every group of ranks along some axes, each in ascending order, sorted by their first ranks.

    Args:
        view: "attention" or "experts".
        axes: names of axes of the view, such as "tp" or ("cp", "tp"); ranks of a group differ in these alone.
    """
    return list(iter_groups(fold, view, axes))


def iter_groups(fold: Fold, view: View, axes: str | tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks along some axes one by one, each in ascending order, sorted by their first ranks.

    Args:
        view: "attention" or "experts".
        axes: names of axes of the view, such as "tp" or ("cp", "tp"); ranks of a group differ in these alone.
    """
    names = _axis_names(fold, view, axes)
    spans = _sizes_and_strides(fold, view)
    members = list(_ranks([spans[name] for name in spans if name in names]))
    for first in _ranks([spans[name] for name in spans if name not in names]):
        yield tuple(first + member for member in members)


def group_of(fold: Fold, view: View, axes: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks of the group along some axes that contains `rank`, in ascending order.

    Takes time in proportion to the group's size, not the world's.

    Args:
        view: "attention" or "experts".
        axes: names of axes of the view, such as "tp" or ("cp", "tp"); ranks of a group differ in these alone.
    """
    names = _axis_names(fold, view, axes)
    place = coordinates(fold, view, rank)
    spans = _sizes_and_strides(fold, view)
    first = rank - sum(place[name] * spans[name][1] for name in names)
    return tuple(first + member for member in _ranks([spans[name] for name in spans if name in names]))


COMMUNICATOR_AXES: dict[str, tuple[tuple[View, tuple[str, ...]], ...]] = {
    "blocking": (
        ("attention", ("tp",)),
        ("attention", ("cp",)),
        ("attention", ("dp",)),
        ("attention", ("cp", "tp")),
        ("attention", ("dp_shard", "cp", "tp")),
        ("experts", ("edp", "etp")),
    ),
    "dispatch": (("experts", ("ep", "etp")),),
    "shards": (("attention", ("dp_shard", "cp")), ("experts", ("edp",))),
    "replicas": (("attention", ("dp_replicate",)), ("experts", ("edp_replicate",))),
    "stages": (("attention", ("pp",)),),
}
"""The axes that the groups of each communicator kind (titanmoe.fold.meshes) may span."""
OPTIONAL_AXES: tuple[tuple[View, tuple[str, ...]], ...] = (
    ("experts", ("etp",)),
    ("attention", ("pp",)),
    ("attention", ("pp", "tp")),
)
"""The axes of blocking groups that only some runs have: with adapters, or with a vocabulary sharded over pp and tp."""


def axes_of(fold: Fold, kind: str, ranks: tuple[int, ...]) -> str:
    """Return the names of the axes that a process group spans, such as "ep x etp".

    Joined by " = " if groups along several axes have these ranks; "world" is one of them for a blocking group of all
    ranks. "ends of the pipeline" if none has; for a dispatch group "within a node" or "across nodes".

    Args:
        kind: the group's communicator kind, such as "blocking" or "stages 1" (titanmoe.fold.meshes).
        ranks: the ranks of the group, in ascending order.
    """

    def names_among(candidates: tuple[tuple[View, tuple[str, ...]], ...]) -> list[str]:
        spanned = [axes for view, axes in candidates if group_of(fold, view, axes, ranks[0]) == ranks]
        return list(dict.fromkeys(" x ".join(axis for axis in axes if getattr(fold, axis) > 1) for axes in spanned))

    names = names_among(COMMUNICATOR_AXES[kind.partition(" ")[0]])
    if kind == "blocking" and not names:
        names = names_among(OPTIONAL_AXES)
    if kind == "dispatch" and not names:
        names = ["within a node" if ranks[-1] - ranks[0] == len(ranks) - 1 else "across nodes"]
    if kind == "blocking" and len(ranks) == fold.world:
        names.append("world")
    return " = ".join(names) or "ends of the pipeline"


def coordinates(fold: Fold, view: View, rank: int) -> dict[str, int]:
    """Return the rank's coordinate on every axis of a view by name, outermost first; ValueError beyond the world."""
    if not 0 <= rank < fold.world:
        raise ValueError(f"rank {rank} is not in a world of {fold.world} ranks: use 0 to {fold.world - 1}")
    return {name: rank // stride % size for name, (size, stride) in _sizes_and_strides(fold, view).items()}


def crossing(fold: Fold, view: View, axes: str | tuple[str, ...], node: int) -> Literal["none", "some", "all"]:
    """Return whether "none", "some" or "all" groups along some adjacent axes have ranks on more than one node.

    Ranks fill the nodes in order.

    Args:
        view: "attention" or "experts".
        axes: names of axes of the view that are next to each other.
        node: number of ranks of a node.
    """
    names = _axis_names(fold, view, axes)
    spans = [span for name, span in _sizes_and_strides(fold, view).items() if name in names]
    size, stride = prod(size for size, _ in spans), spans[-1][1]
    # The groups tile blocks of size * stride ranks, from rank 0. If such blocks tile a node, no group leaves it.
    # Otherwise some group crosses a boundary; rank 0's group does not if it ends before the first.
    if size == 1 or node >= fold.world or node % (size * stride) == 0:
        return "none"
    return "all" if (size - 1) * stride >= node else "some"


def _axes(fold: Fold, view: View) -> dict[str, int]:
    if view == "attention":
        return fold.attention_axes
    if view == "experts":
        return fold.expert_axes
    raise ValueError(f"{view!r} is not a view: use 'attention' or 'experts'")


def _sizes_and_strides(fold: Fold, view: View) -> dict[str, tuple[int, int]]:
    """Return (size, stride) of every axis of a view by name, outermost first.

    The stride is the distance between the ranks of consecutive coordinates.
    """
    spans, stride = {}, fold.world
    for name, size in _axes(fold, view).items():
        stride //= size
        spans[name] = (size, stride)
    return spans


def _axis_names(fold: Fold, view: View, axes: str | tuple[str, ...]) -> set[str]:
    view_axes = _axes(fold, view)
    names: set[str] = set()
    for name in (axes,) if isinstance(axes, str) else axes:
        parts = COMBINED_AXES.get(name, (name,))
        if not all(part in view_axes for part in parts):
            raise ValueError(f"{name!r} is not an axis of the {view} view: use {', '.join(view_axes)}")
        names.update(parts)
    return names


def _ranks(spans: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the sum of coordinate * stride for every combination of coordinates, in ascending order.

    Args:
        spans: (size, stride) of each axis, outermost first.
    """
    steps = (range(0, size * stride, stride) for size, stride in spans)
    return map(sum, product(*steps))
