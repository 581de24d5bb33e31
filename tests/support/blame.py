"""Writes the text of a parity failure: the wrong tensors, the ranks with wrong shards, and the suspected axis.

The axis is derived from the errors, the most reliable sign first:

    ranks that hold the same shard have different numbers in it   the axis along which these ranks differ
    shards are wrong only at some positions of an axis            that axis
    a tensor is wrong by a constant factor                        the axes of that size
    all wrong tensors, and no right one, are summed in one way    the axis that they are summed over
    (docs/parallelism.md)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.support.parity_errors import nan_to_inf
from titanmoe.fold.degrees import Fold
from titanmoe.fold.rank_groups import View, coordinates

OF_MESH = {"fsdp": ("dp_shard", "cp")}
"""Axes of the mapping that an axis of a DeviceMesh combines, if it has another name."""
DATA = ("dp_replicate", "dp_shard", "cp", "edp_replicate", "edp")
MAX_SHOWN = 12


def view_of(parameter: torch.Tensor) -> View:
    """Return "experts" for a DTensor on the experts' mesh, "attention" for any other tensor."""
    on_experts = isinstance(parameter, DTensor) and "edp" in parameter.device_mesh.mesh_dim_names
    return "experts" if on_experts else "attention"


def sharded_axes(parameter: torch.Tensor) -> dict[str, bool]:
    """Return for each axis of the parameter's mesh whether the parameter is sharded along it, or else replicated.

    The axes are those of the mapping, such as "dp_shard" and "cp" for FSDP's; {} for a tensor without a mesh.
    """
    if not isinstance(parameter, DTensor):
        return {}
    placed = zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)
    return {axis: not isinstance(p, Replicate) for name, p in placed for axis in OF_MESH.get(name, (name,))}


def sums_in_backward(axis: str, is_sharded: dict[str, bool]) -> bool:
    """Return whether a gradient is summed over this axis of the mapping during backward, not after it as a router's is.

    Backward sums gradients of experts, and of what FSDP shards, over the axes in DATA. `is_sharded` is the parameter's
    `sharded_axes`.
    """
    return axis in DATA and ("edp" in is_sharded or is_sharded["dp_shard"])


def what_sums(axis: str, is_sharded: dict[str, bool]) -> str:
    """Return the name of what sums a gradient over an axis, in Markdown, or "sharded" if nothing does.

    `is_sharded` is the parameter's `sharded_axes`, and the axis a key of it.
    """
    if sums_in_backward(axis, is_sharded):
        if not is_sharded.get("edp", True):
            return "`UnshardedExperts`"
        return "FSDP reduce-scatter" if is_sharded[axis] else "FSDP all-reduce"
    return "sharded" if is_sharded[axis] else "`sum_replicated`"


class HeldShard(NamedTuple):
    """Shard of a tensor on one rank."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    view: View
    is_sharded: dict[str, bool]

    @property
    def place(self) -> tuple[slice, ...]:
        """Slices of the shard in the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def describe_shards(parameters: Mapping[str, torch.Tensor]) -> dict[str, HeldShard]:
    """Return by name where this rank's shards are in the full tensors."""
    from titanmoe.parallel.materialize import local_shard

    out = {}
    for name, parameter in parameters.items():
        part, offset = local_shard(parameter.detach())
        out[name] = HeldShard(offset, tuple(part.shape), view_of(parameter), sharded_axes(parameter))
    return out


Shards = list[dict[str, HeldShard]]
"""Shards by name, one dict per rank."""


def axes_of(fold: Fold, seen: View) -> dict[str, int]:
    """Return the sizes, by name, of those axes of a view that have several ranks."""
    sizes = fold.attention_axes if seen == "attention" else fold.expert_axes
    return {axis: size for axis, size in sizes.items() if size > 1}


def differing_axes(fold: Fold, seen: View, ranks: Iterable[int]) -> set[str]:
    """Return the axes of a view along which the first of two or more ranks differs from any of the others.

    If it differs from some of them along a single axis, only such axes are returned.
    """
    first, *others = (coordinates(fold, seen, rank) for rank in ranks)
    apart = [{axis for axis in first if first[axis] != other[axis]} for other in others]
    alone = [axes for axes in apart if len(axes) == 1]
    return set().union(*(alone or apart))


def axes_apart(fold: Fold, seen: View, wrong: set[int], right: set[int]) -> dict[str, set[int]]:
    """Return the axes of a view on which right and wrong shards share no position, with the wrong ones' positions.

    `wrong` and `right` are ranks; {} is returned if one of the two is empty.
    """
    out = {}
    for axis in axes_of(fold, seen) if wrong and right else ():
        bad, good = ({coordinates(fold, seen, rank)[axis] for rank in ranks} for ranks in (wrong, right))
        if not bad & good:
            out[axis] = bad
    return out


def constant_factor(got: torch.Tensor, want: torch.Tensor) -> float | None:
    """Return the factor by which a full tensor is wrong; None if that is about 1, or not the same for all elements.

    It is None also if `want` is zero or `got` is not finite. `got` and `want` are in float64.
    """
    scale = float(want.abs().max())
    if scale == 0.0 or not bool(got.isfinite().all()):
        return None
    times = float((got * want).sum() / (want * want).sum())
    off = float((got - times * want).abs().max()) / scale
    return times if off < 1e-6 * max(abs(times), 1.0) and abs(times - 1) > 1e-3 else None


class Wrong(NamedTuple):
    """Errors of a tensor with wrong numbers."""

    error: float
    ranks: set[int]
    """Ranks whose shard is wrong."""
    right: set[int]
    """Ranks whose shard is right."""
    differ: tuple[tuple[int, ...], ...]
    """Groups of ranks that hold the same shard with different numbers."""
    times: float | None
    """Constant factor by which the tensor is wrong; None if there is none."""


def describe_failure(
    fold: Fold,
    shards: Shards,
    errors: Callable[[str, int, HeldShard], float],
    allowed: float,
    differ: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
    times: Callable[[str], float | None] = lambda name: None,
) -> str:
    """Return the text of the failure: up to MAX_SHOWN wrong tensors, worst first, their ranks, and suspected axes.

    Args:
        fold: the mapping.
        shards: shards by name, one dict per rank.
        errors: returns the relative error of a tensor in a shard, from the tensor's name, the rank and its shard.
        allowed: largest error that is right.
        differ: groups of ranks that hold the same shard with different numbers, by tensor.
        times: returns the constant factor by which the tensor with a name is wrong, or None.
    """
    wrong, right, differ = {}, [], differ or {}
    holders: dict[str, dict[int, HeldShard]] = {}
    for rank, mine in enumerate(shards):
        for name, one in mine.items():
            holders.setdefault(name, {})[rank] = one
    for name, ranks in holders.items():
        off = {rank: errors(name, rank, one) for rank, one in ranks.items() if math.prod(one.shape)}
        bad = {rank for rank, error in off.items() if not error <= allowed}
        if bad:
            wrong[name] = Wrong(max(off.values()), bad, off.keys() - bad, differ.get(name, ()), times(name))
        else:
            right.append(name)
    lines = [f"{len(wrong)} of {len(holders)} tensors are wrong:"]
    for name, one in sorted(wrong.items(), key=lambda item: -item[1].error)[:MAX_SHOWN]:
        some = next(iter(holders[name].values()))
        axes = [f"{a} {what_sums(a, some.is_sharded)}" for a in axes_of(fold, some.view) if a in some.is_sharded]
        only = f"ranks {sorted(one.ranks)}" + ("" if one.right else ", all that have it")
        more = "".join(f"; ranks {list(group)} differ in one piece" for group in one.differ)
        more += f"; {one.times:.6g} times what it should be" if one.times is not None else ""
        lines.append(f"  {name}: {one.error:.1e} on {only} ({', '.join(axes) or 'not split'}){more}")
    if len(wrong) > MAX_SHOWN:
        lines.append(f"  and {len(wrong) - MAX_SHOWN} more")
    return "\n".join([*lines, *_suspected(fold, holders, wrong, right)])


def _suspected(
    fold: Fold, holders: dict[str, dict[int, HeldShard]], wrong: dict[str, Wrong], right: list[str]
) -> list[str]:
    def seen(name: str) -> View:
        return next(iter(holders[name].values())).view

    suspects: dict[str, str] = {}
    for name, one in wrong.items():
        for group in one.differ:
            for axis in differing_axes(fold, seen(name), group):
                suspects.setdefault(
                    axis, f"ranks {list(group)} have the same piece of {name} and differ along this axis"
                )
    if not suspects:
        for name, one in wrong.items():
            for axis, places in axes_apart(fold, seen(name), one.ranks, one.right).items():
                suspects.setdefault(axis, f"{name} is wrong only where {axis} is {sorted(places)}")
    if not suspects:
        for name, one in wrong.items():
            for axis, size in axes_of(fold, seen(name)).items():
                if one.times is not None and any(abs(one.times / f - 1) < 1e-6 for f in (size, 1 / size)):
                    suspects.setdefault(
                        axis, f"{name} is {one.times:.6g} times what it should be, and {axis} is {size}"
                    )
    if not suspects:
        suspects = _in_common(fold, holders, list(wrong), right)
    if not suspects:
        axes = {axis: size for name in wrong for axis, size in axes_of(fold, seen(name)).items()}
        if not axes:
            return ["suspected axis: none, because no axis has several ranks"]
        return [f"suspected axis: any of {', '.join(axes)}; they cannot be told apart"]
    return [f"suspected axis: {axis} ({why})" for axis, why in suspects.items()]


def _in_common(
    fold: Fold, holders: dict[str, dict[int, HeldShard]], wrong: list[str], right: list[str]
) -> dict[str, str]:
    """Return the axes over which all wrong tensors, and no right one, are summed in one way, with that way as text.

    `holders` has the shard of each rank by name and then rank; `wrong` and `right` are names. {} if none is wrong.
    The axis pp is there, as "stage n", if one stage alone holds all wrong tensors, and no right one.
    """

    def sums_of(name: str) -> set[tuple[str, str]]:
        one = next(iter(holders[name].values()))
        stages = {coordinates(fold, "attention", rank)["pp"] for rank in holders[name]}
        by = {(axis, what_sums(axis, one.is_sharded)) for axis in one.is_sharded if axis in axes_of(fold, one.view)}
        return by | ({("pp", f"stage {min(stages)}")} if fold.pp > 1 and len(stages) == 1 else set())

    shared = set.intersection(*(sums_of(name) for name in wrong)) if wrong else set()
    for name in right:
        shared -= sums_of(name)
    return {axis: f"all wrong tensors and no right one have it: {how}" for axis, how in sorted(shared)}


def describe_wrong_gradients(
    fold: Fold, shards: Shards, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], allowed: float
) -> str:
    """Return the failure's text for full gradients, given by name, even if none is wrong.

    Args:
        fold: the mapping.
        shards: shards by name, one dict per rank.
        got: full gradients by name.
        want: the right ones.
        allowed: largest difference relative to the largest entry of the right one.
    """
    floor = 1e-8 * max(float(w.abs().max()) for w in want.values())

    def errors(name: str, rank: int, one: HeldShard) -> float:
        scale = max(float(want[name].abs().max()), floor, 1e-300)
        return nan_to_inf(float((got[name].double() - want[name].double())[one.place].abs().max()) / scale)

    known = [{name: one for name, one in mine.items() if name in want} for mine in shards]
    return describe_failure(
        fold, known, errors, allowed, times=lambda name: constant_factor(got[name].double(), want[name].double())
    )


def describe_wrong_replicas(
    fold: Fold, gathered: list[dict[str, tuple[torch.Tensor, HeldShard]]], allowed: float
) -> str:
    """Return the failure's text if ranks that hold the same shard differ by more than `allowed`, else "".

    Args:
        fold: the mapping.
        gathered: of each rank, in order, the local tensor and its place in the full one by the tensor's name.
        allowed: largest difference relative to the shard's largest entry.
    """
    differ: dict[str, tuple[tuple[int, ...], ...]] = {}
    worst: dict[str, float] = {}

    def off(name: str, a: int, b: int) -> float:
        one, other = (gathered[rank][name][0] for rank in (a, b))
        return float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))

    for name in {name: None for mine in gathered for name in mine}:
        same: dict[tuple[Any, ...], list[int]] = {}
        for rank, mine in enumerate(gathered):
            if name in mine and mine[name][0].numel():
                same.setdefault((mine[name][1].offset, mine[name][1].shape), []).append(rank)
        groups = []
        for first, *others in same.values():
            apart = {rank: error for rank in others if not (error := off(name, first, rank)) <= allowed}
            if apart:
                groups.append((first, *apart))
                worst[name] = max(worst.get(name, 0.0), *map(nan_to_inf, apart.values()))
        if groups:
            differ[name] = tuple(groups)
    if not differ:
        return ""
    shards = [{name: one for name, (_, one) in mine.items()} for mine in gathered]

    def errors(name: str, rank: int, one: HeldShard) -> float:
        return worst[name] if any(rank in group for group in differ.get(name, ())) else 0.0

    text = describe_failure(fold, shards, errors, allowed, differ)
    name = next(iter(differ))
    return f"replicas of {name} differ by {worst[name]:.1e}; {text}"
