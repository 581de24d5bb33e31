"""The text of a parity failure: which tensors are wrong, on which ranks, and which axis of the mapping is suspected.

The axis is derived from what differs, the most reliable sign first:

    ranks with the same piece have different numbers in it       the axis along which these ranks differ
    pieces are wrong only at some positions of an axis           that axis
    a tensor is wrong by a constant factor                       the axes of that size
    all wrong tensors, and no right one, are summed in one way   the axis that they are summed over
    (docs/parallelism.md)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.support.parity_errors import number
from titanmoe.fold.degrees import Fold
from titanmoe.fold.rank_groups import View, coordinates

OF_MESH = {"fsdp": ("dp_shard", "cp")}
"""The axes that an axis of a mesh combines, if it has a name of its own."""
DATA = ("dp_replicate", "dp_shard", "cp", "edp_replicate", "edp")
SHOWN = 12


def view(parameter: Any) -> View:
    on_experts = isinstance(parameter, DTensor) and "edp" in parameter.device_mesh.mesh_dim_names
    return "experts" if on_experts else "attention"


def cuts(parameter: Any) -> dict[str, bool]:
    """For each axis of the parameter's mesh, whether the parameter is cut along it (otherwise it is replicated)."""
    if not isinstance(parameter, DTensor):
        return {}
    placed = zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)
    return {axis: not isinstance(p, Replicate) for name, p in placed for axis in OF_MESH.get(name, (name,))}


def sums_in_backward(axis: str, cuts: dict[str, bool]) -> bool:
    """Whether the gradient is summed over this axis as backward goes: not that of a router."""
    return axis in DATA and ("edp" in cuts or cuts["dp_shard"])


def adds_up(axis: str, cuts: dict[str, bool]) -> str:
    """What sums a gradient over an axis of a stage, by the axes that the parameter is cut along."""
    if sums_in_backward(axis, cuts):
        if not cuts.get("edp", True):
            return "`UnshardedExperts`"
        return "FSDP reduce-scatter" if cuts[axis] else "FSDP all-reduce"
    return "cut" if cuts[axis] else "`sum_replicated`"


class Held(NamedTuple):
    """A rank's piece of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    view: View
    cuts: dict[str, bool]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def held(parameters: Mapping[str, Any]) -> dict[str, Held]:
    """On a rank: where its pieces are in the whole tensors."""
    from titanmoe.parallel.materialize import local_shard

    found = {}
    for name, parameter in parameters.items():
        part, offset = local_shard(parameter.detach())
        found[name] = Held(offset, tuple(part.shape), view(parameter), cuts(parameter))
    return found


Pieces = list[dict[str, Held]]
"""One entry per rank."""


def axes_of(fold: Fold, seen: View) -> dict[str, int]:
    sizes = fold.attention_axes if seen == "attention" else fold.expert_axes
    return {axis: size for axis, size in sizes.items() if size > 1}


def between(fold: Fold, seen: View, ranks: Iterable[int]) -> set[str]:
    """The axes along which the first of these ranks differs from the others; if it differs from some along a single
    axis, only those axes.
    """
    first, *others = (coordinates(fold, seen, rank) for rank in ranks)
    apart = [{axis for axis in first if first[axis] != other[axis]} for other in others]
    alone = [axes for axes in apart if len(axes) == 1]
    return set().union(*(alone or apart))


def at_one_place(fold: Fold, seen: View, wrong: set[int], right: set[int]) -> dict[str, set[int]]:
    """The axes on which right and wrong pieces have no position in common, with the positions of the wrong ones."""
    found = {}
    for axis in axes_of(fold, seen) if wrong and right else ():
        bad, good = ({coordinates(fold, seen, rank)[axis] for rank in ranks} for ranks in (wrong, right))
        if not bad & good:
            found[axis] = bad
    return found


def factor(got: torch.Tensor, want: torch.Tensor) -> float | None:
    """The factor by which a whole tensor is wrong, if it is the same everywhere."""
    scale = float(want.abs().max())
    if scale == 0.0 or not bool(got.isfinite().all()):
        return None
    times = float((got * want).sum() / (want * want).sum())
    off = float((got - times * want).abs().max()) / scale
    return times if off < 1e-6 * max(abs(times), 1.0) and abs(times - 1) > 1e-3 else None


class Wrong(NamedTuple):
    """A tensor with wrong numbers."""

    error: float
    ranks: set[int]
    right: set[int]
    differ: tuple[tuple[int, ...], ...]  # ranks with different numbers in the same piece
    times: float | None


def judge(
    fold: Fold,
    pieces: Pieces,
    errors: Callable[[str, int, Held], float],
    allowed: float,
    differ: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
    times: Callable[[str], float | None] = lambda name: None,
) -> str:
    """errors: the relative error of a tensor in a rank's piece. differ: ranks with different numbers in the same piece.
    times: the factor by which a tensor is wrong.
    """
    wrong, right, differ = {}, [], differ or {}
    holders: dict[str, dict[int, Held]] = {}
    for rank, mine in enumerate(pieces):
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
    for name, one in sorted(wrong.items(), key=lambda item: -item[1].error)[:SHOWN]:
        some = next(iter(holders[name].values()))
        axes = [f"{a} {adds_up(a, some.cuts)}" for a in axes_of(fold, some.view) if a in some.cuts]
        only = f"ranks {sorted(one.ranks)}" + ("" if one.right else ", all that have it")
        more = "".join(f"; ranks {list(group)} differ in one piece" for group in one.differ)
        more += f"; {one.times:.6g} times what it should be" if one.times is not None else ""
        lines.append(f"  {name}: {one.error:.1e} on {only} ({', '.join(axes) or 'not split'}){more}")
    if len(wrong) > SHOWN:
        lines.append(f"  and {len(wrong) - SHOWN} more")
    return "\n".join([*lines, *_suspected(fold, holders, wrong, right)])


def _suspected(fold: Fold, holders: dict[str, dict[int, Held]], wrong: dict[str, Wrong], right: list[str]) -> list[str]:
    def seen(name: str) -> View:
        return next(iter(holders[name].values())).view

    found: dict[str, str] = {}
    for name, one in wrong.items():
        for group in one.differ:
            for axis in between(fold, seen(name), group):
                found.setdefault(axis, f"ranks {list(group)} have the same piece of {name} and differ along this axis")
    if not found:
        for name, one in wrong.items():
            for axis, places in at_one_place(fold, seen(name), one.ranks, one.right).items():
                found.setdefault(axis, f"{name} is wrong only where {axis} is {sorted(places)}")
    if not found:
        for name, one in wrong.items():
            for axis, size in axes_of(fold, seen(name)).items():
                if one.times is not None and any(abs(one.times / f - 1) < 1e-6 for f in (size, 1 / size)):
                    found.setdefault(axis, f"{name} is {one.times:.6g} times what it should be, and {axis} is {size}")
    if not found:
        found = _in_common(fold, holders, list(wrong), right)
    if not found:
        axes = {axis: size for name in wrong for axis, size in axes_of(fold, seen(name)).items()}
        if not axes:
            return ["suspected axis: none, because no axis has several ranks"]
        return [f"suspected axis: any of {', '.join(axes)}; they cannot be told apart"]
    return [f"suspected axis: {axis} ({why})" for axis, why in found.items()]


def _in_common(fold: Fold, holders: dict[str, dict[int, Held]], wrong: list[str], right: list[str]) -> dict[str, str]:
    """Axes over which all wrong tensors, and no right one, are summed in one way."""

    def sums_of(name: str) -> set[tuple[str, str]]:
        one = next(iter(holders[name].values()))
        stages = {coordinates(fold, "attention", rank)["pp"] for rank in holders[name]}
        by = {(axis, adds_up(axis, one.cuts)) for axis in one.cuts if axis in axes_of(fold, one.view)}
        return by | ({("pp", f"stage {min(stages)}")} if fold.pp > 1 and len(stages) == 1 else set())

    shared = set.intersection(*(sums_of(name) for name in wrong)) if wrong else set()
    for name in right:
        shared -= sums_of(name)
    return {axis: f"all wrong tensors and no right one have it: {how}" for axis, how in sorted(shared)}


def of_gradients(
    fold: Fold, pieces: Pieces, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], allowed: float
) -> str:
    """For whole tensors, compared as in `tests.support.parity_errors.error`."""
    floor = 1e-8 * max(float(w.abs().max()) for w in want.values())

    def errors(name: str, rank: int, one: Held) -> float:
        scale = max(float(want[name].abs().max()), floor, 1e-300)
        return number(float((got[name].double() - want[name].double())[one.place].abs().max()) / scale)

    known = [{name: one for name, one in mine.items() if name in want} for mine in pieces]
    return judge(fold, known, errors, allowed, times=lambda name: factor(got[name].double(), want[name].double()))


def of_replicas(fold: Fold, gathered: list[dict[str, tuple[torch.Tensor, Held]]], allowed: float) -> str:
    """What differs by more than `allowed` between ranks with the same piece of a tensor; empty if nothing does."""
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
                worst[name] = max(worst.get(name, 0.0), *map(number, apart.values()))
        if groups:
            differ[name] = tuple(groups)
    if not differ:
        return ""
    pieces = [{name: one for name, (_, one) in mine.items()} for mine in gathered]

    def errors(name: str, rank: int, one: Held) -> float:
        return worst[name] if any(rank in group for group in differ.get(name, ())) else 0.0

    text = judge(fold, pieces, errors, allowed, differ)
    name = next(iter(differ))
    return f"replicas of {name} differ by {worst[name]:.1e}; {text}"
