"""Where the pieces of matrices are that are cut over ranks, worked out from shapes alone.

The ranks that have all pieces of a weight between them are a team: those of attention's view over dp_shard, cp and tp,
those of the experts' view over edp and etp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import SILENT, Meshes
from titanmoe.fold.rank_groups import View, coordinates, group_of, groups
from titanmoe.models.matrices import Matrix

TEAM_AXES: dict[View, tuple[str, ...]] = {"attention": ("dp_shard", "cp", "tp"), "experts": ("edp", "etp")}


class Box(NamedTuple):
    """A rank's piece of a weight."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]


Axes = tuple[tuple[str, int, int], ...]
"""Mesh axes that cut a weight, outermost first: name, size, dim that it cuts."""


def axes_of(parameter: Tensor) -> Axes:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cuts = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return tuple((name, size, cut.dim) for name, size, cut in cuts if size > 1 and not isinstance(cut, Replicate))


def box_of(shape: tuple[int, ...], axes: Axes, place: Mapping[str, int]) -> Box:
    """place: the rank's on every axis. Inner axes cut first, each as torch.chunk does."""
    begin, end = [0] * len(shape), list(shape)
    for name, size, dim in reversed(axes):
        each = -(-(end[dim] - begin[dim]) // size)
        begin[dim] = min(begin[dim] + each * place[name], end[dim])
        end[dim] = min(begin[dim] + each, end[dim])
    return Box(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))


class Overlap(NamedTuple):
    """What a rank has of a matrix."""

    rows: tuple[tuple[int, int, int], ...]
    """Stretches: first row in the matrix, first row in the rank's piece, how many."""
    columns: tuple[int, int]
    """First in the matrix, how many. The piece has no others."""
    expert: int
    """Its place in the piece, -1 if that is no stack."""

    @property
    def shape(self) -> tuple[int, int]:
        return sum(count for _, _, count in self.rows), self.columns[1]

    def take(self, piece: Tensor) -> Tensor:
        piece = piece if self.expert < 0 else piece[self.expert]
        rows = [piece[first : first + count] for _, first, count in self.rows]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def put(self, piece: Tensor, value: Tensor) -> None:
        piece, done = piece if self.expert < 0 else piece[self.expert], 0
        for _, first, count in self.rows:
            piece[first : first + count] = value[done : done + count]
            done += count

    def of_whole(self, whole: Tensor) -> Tensor:
        """The same numbers in the whole matrix."""
        first, count = self.columns
        rows = [whole[begin : begin + n, first : first + count] for begin, _, n in self.rows]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def into_whole(self, whole: Tensor, value: Tensor) -> None:
        done, (first, columns) = 0, self.columns
        for begin, _, count in self.rows:
            whole[begin : begin + count, first : first + columns] = value[done : done + count]
            done += count


NOTHING = Overlap((), (0, 0), -1)


def overlap(matrix: Matrix, box: Box) -> Overlap:
    stack = len(box.begin) == 3
    expert = matrix.expert - box.begin[0] if stack else -1
    (top, left), (height, width) = box.begin[-2:], box.shape[-2:]
    if not width or (stack and not 0 <= expert < box.shape[0]):
        return NOTHING
    rows, before = [], 0
    for begin, end in matrix.spans:
        first, last = max(begin, top), min(end, top + height)
        if first < last:
            rows.append((before + first - begin, first - top, last - first))
        before += end - begin
    return Overlap(tuple(rows), (left, width), expert) if rows else NOTHING


def members_of(fold: Fold, view: View, rank: int) -> dict[int, dict[str, int]]:
    """The ranks of its team, with the place of each on every axis of the meshes."""
    out = {}
    for member in group_of(fold, view, TEAM_AXES[view], rank):
        place = out[member] = coordinates(fold, view, member)
        if view == "attention":
            place["fsdp"] = place["dp_shard"] * fold.cp + place["cp"]
    return out


@dataclass(frozen=True)
class Team:
    """The ranks that have all pieces of a view's weights, and this one's place among them."""

    group: Group
    places: tuple[dict[str, int], ...]
    """Of every member, on every axis of the meshes."""

    @classmethod
    def of(cls, meshes: Meshes, view: View, cuts: bool) -> Team:
        """Collective over the world if the view cuts matrices."""
        members = members_of(meshes.fold, view, dist.get_rank())
        places = tuple(members.values())
        if cuts:
            team = meshes.communicators.group("blocking", groups(meshes.fold, view, TEAM_AXES[view]))
            return cls(Group.of(team), places)
        return cls(Group(SILENT, len(members), list(members).index(dist.get_rank())), places)


ALONE = Team(NO_GROUP, ({},))


class WeightCut:
    """How a team has cut a weight and the matrices in it; weights that are alike share one."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, matrices: list[Matrix], team: Team):
        self.team = team
        self.boxes = [box_of(shape, axes, place) for place in team.places]
        self.box = self.boxes[team.group.rank]
        first_with: dict[Box, int] = {}
        self.senders = [first_with.setdefault(box, rank) == rank for rank, box in enumerate(self.boxes)]
        """Who of the ranks with the same piece sends it."""
        if len(shape) == 3:  # of all experts, the team's
            first = min(box.begin[0] for box in self.boxes)
            matrices = matrices[first : max(box.begin[0] + box.shape[0] for box in self.boxes)]
        self.matrices = matrices
        self.whole_experts = len(shape) == 3 and all(box.shape[1:] == shape[1:] for box in self.boxes)

    @cached_property
    def overlaps(self) -> list[list[Overlap]]:
        """By matrix, then by rank."""
        by_box: dict[tuple[int, Box], Overlap] = {}
        for i, matrix in enumerate(self.matrices):
            for box in set(self.boxes):
                by_box[i, box] = overlap(matrix, box)
        return [[by_box[i, box] for box in self.boxes] for i in range(len(self.matrices))]

    @cached_property
    def local(self) -> bool:
        if self.whole_experts or len(self.boxes) == 1:
            return True
        return all(
            own is NOTHING or own.shape == matrix.shape
            for matrix, owns in zip(self.matrices, self.overlaps, strict=True)
            for own in owns
        )

    @cached_property
    def sums_gram(self) -> bool:
        """Whether each matrix is cut along its larger dim alone."""
        return all(
            own is NOTHING or own.shape[matrix.shape.index(min(matrix.shape))] == min(matrix.shape)
            for matrix, owns in zip(self.matrices, self.overlaps, strict=True)
            for own in owns
        )

    def own(self) -> Iterable[tuple[Matrix, Overlap]]:
        """The matrices that this rank has something of."""
        rank = self.team.group.rank
        if self.whole_experts:
            return ((m, own) for m in self.matrices if (own := overlap(m, self.box)) is not NOTHING)
        pairs = zip(self.matrices, self.overlaps, strict=True)
        return ((m, owns[rank]) for m, owns in pairs if owns[rank] is not NOTHING)

    @cached_property
    def sent_numbers(self) -> tuple[int, int]:
        """What the team sends for it: to owners and back; for the sum of gram matrices."""
        others = len(self.boxes) - 1
        there = sum(prod(m.shape) for m in self.matrices)
        back = sum(prod(own.shape) for owns in self.overlaps for own in owns)
        gram = sum(2 * others * min(m.shape) ** 2 for m in self.matrices)
        return (there + back) * others // len(self.boxes), gram


class Piecewise(NamedTuple):
    """A weight of this rank that is made of matrices."""

    name: str
    cut: WeightCut


def piecewise(
    parameters: Mapping[str, Tensor], matrices: Mapping[str, list[Matrix]], team_of: Callable[[str], Team]
) -> list[Piecewise]:
    """matrices: of each of the parameters."""
    cuts: dict[tuple, WeightCut] = {}
    out = []
    for name, its in matrices.items():
        team, shape, axes = team_of(name), tuple(parameters[name].shape), axes_of(parameters[name])
        key = id(team), shape, axes, tuple(its)
        if key not in cuts:
            cuts[key] = WeightCut(shape, axes, its, team)
        out.append(Piecewise(name, cuts[key]))
    return out
