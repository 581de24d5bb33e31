"""Find which part of each matrix a rank has, where weights are sharded over ranks. Uses shapes alone, no communication.

Optimizers that need full matrices (Muon) call it, and titanmoe.parallel.full_matrices exchanges the shards. The ranks
that together have all shards of a weight are its shard group: over dp_shard, cp and tp in attention's view, over edp
and etp in the experts' view. Replicas are shard groups of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

SHARD_AXES: dict[View, tuple[str, ...]] = {"attention": ("dp_shard", "cp", "tp"), "experts": ("edp", "etp")}
"""Mesh axes of a shard group, by view."""


class ShardRegion(NamedTuple):
    """The block of a weight that a rank has: first index and length in each dim."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]


Axes = tuple[tuple[str, int, int], ...]
"""Mesh axes that shard a weight, outermost first: name, size, and the dim of the weight that the axis shards."""


def axes_of(parameter: Tensor) -> Axes:
    """Return the mesh axes that shard a parameter, outermost first; empty for a tensor that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return tuple((name, size, p.dim) for name, size, p in axes if size > 1 and not isinstance(p, Replicate))


def shard_region(shape: tuple[int, ...], axes: Axes, coordinate: Mapping[str, int]) -> ShardRegion:
    """Return the region of a weight that a rank has. Inner axes shard first, each as torch.chunk does.

    Args:
        axes: mesh axes that shard the weight.
        coordinate: the rank's coordinate on each axis, by the axis's name.
    """
    begin, end = [0] * len(shape), list(shape)
    for name, size, dim in reversed(axes):
        each = -(-(end[dim] - begin[dim]) // size)
        begin[dim] = min(begin[dim] + each * coordinate[name], end[dim])
        end[dim] = min(begin[dim] + each, end[dim])
    return ShardRegion(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))


class MatrixShard(NamedTuple):
    """The rows and columns of one matrix that a rank has, and where they are in the rank's shard of the weight.

    Without rows, as of NO_SHARD, `read` and `slice_of_full` fail, and `write` and `write_to_full` do nothing.
    """

    rows: tuple[tuple[int, int, int], ...]
    """Ranges of consecutive rows: first row in the matrix, first row in the weight's shard, number of rows."""
    columns: tuple[int, int]
    """First column in the matrix and number of columns, which are all columns of the weight's shard."""
    expert: int
    """Index of the expert in the weight's shard; -1 if the weight is no stack of experts."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and number of columns of this shard."""
        return sum(count for _, _, count in self.rows), self.columns[1]

    def read(self, weight_shard: Tensor) -> Tensor:
        """Return this rank's rows and columns of the matrix, of shape `shape`: a view if the rows are one range.

        Args:
            weight_shard: the rank's shard of the weight, which may have further matrices.
        """
        part = weight_shard if self.expert < 0 else weight_shard[self.expert]
        rows = [part[first : first + count] for _, first, count in self.rows]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def write(self, weight_shard: Tensor, value: Tensor) -> None:
        """Write this rank's rows and columns of the matrix into its shard of the weight, in place.

        Args:
            weight_shard: the rank's shard of the weight; what it has of further matrices is unchanged.
            value: the new values, of shape `shape`.
        """
        part, done = weight_shard if self.expert < 0 else weight_shard[self.expert], 0
        for _, first, count in self.rows:
            part[first : first + count] = value[done : done + count]
            done += count

    def slice_of_full(self, matrix: Tensor) -> Tensor:
        """Return this rank's rows and columns, shape `shape`, out of the full matrix."""
        first, count = self.columns
        rows = [matrix[begin : begin + n, first : first + count] for begin, _, n in self.rows]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def write_to_full(self, matrix: Tensor, value: Tensor) -> None:
        """Write this rank's values, of shape `shape`, into their rows and columns of the full matrix, in place."""
        done, (first, columns) = 0, self.columns
        for begin, _, count in self.rows:
            matrix[begin : begin + count, first : first + columns] = value[done : done + count]
            done += count


NO_SHARD = MatrixShard((), (0, 0), -1)
"""The shard of a rank that has nothing of a matrix."""


def matrix_shard(matrix: Matrix, region: ShardRegion) -> MatrixShard:
    """Return the shard of a matrix on a rank that has a region of the weight; NO_SHARD if none of the matrix is in it.

    Args:
        matrix: one of the matrices that the weight consists of.
        region: the block of the weight that the rank has.
    """
    stack = len(region.begin) == 3
    expert = matrix.expert - region.begin[0] if stack else -1
    (top, left), (height, width) = region.begin[-2:], region.shape[-2:]
    if not width or (stack and not 0 <= expert < region.shape[0]):
        return NO_SHARD
    rows, before = [], 0
    for begin, end in matrix.spans:
        first, last = max(begin, top), min(end, top + height)
        if first < last:
            rows.append((before + first - begin, first - top, last - first))
        before += end - begin
    return MatrixShard(tuple(rows), (left, width), expert) if rows else NO_SHARD


def shard_group_members(fold: Fold, view: View, rank: int) -> dict[int, dict[str, int]]:
    """Return the global ranks of a rank's shard group, each with its mesh coordinates: {rank: {axis: number}}.

    In the attention view there is also the axis "fsdp": dp_shard and cp as one.
    """
    out = {}
    for member in group_of(fold, view, SHARD_AXES[view], rank):
        coordinate = out[member] = coordinates(fold, view, member)
        if view == "attention":
            coordinate["fsdp"] = coordinate["dp_shard"] * fold.cp + coordinate["cp"]
    return out


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that together have all shards of a view's weights, and this rank's position among them."""

    group: Group
    coordinates: tuple[dict[str, int], ...]
    """Coordinate of every member on every mesh axis."""

    @classmethod
    def of(cls, meshes: Meshes, view: View, communicates: bool) -> ShardGroup:
        """Return this rank's shard group in a view. Collective over the world if the group communicates.

        Args:
            view: "attention" or "experts".
            communicates: whether any matrix of this view is sharded. If not, no process group is made.
        """
        members = shard_group_members(meshes.fold, view, dist.get_rank())
        places = tuple(members.values())
        if communicates:
            process_group = meshes.communicators.group("blocking", groups(meshes.fold, view, SHARD_AXES[view]))
            return cls(Group.of(process_group), places)
        return cls(Group(SILENT, len(members), list(members).index(dist.get_rank())), places)


NOT_SHARDED = ShardGroup(NO_GROUP, ({},))
"""The shard group of a single rank, which has full weights."""


class WeightSharding:
    """The shards of a weight, and of the matrices in it, in a shard group. Equal weights share one object."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, matrices: list[Matrix], shard_group: ShardGroup):
        self.shard_group = shard_group
        self.regions = [shard_region(shape, axes, coordinate) for coordinate in shard_group.coordinates]
        """Each member's region of the weight."""
        self.local_region = self.regions[shard_group.group.rank]
        first_with: dict[ShardRegion, int] = {}
        self.is_sender = [first_with.setdefault(region, rank) == rank for rank, region in enumerate(self.regions)]
        """Whether each member sends its shard: among members with the same shard only the first does."""
        if len(shape) == 3:  # the shard group may have a part of all experts
            first = min(region.begin[0] for region in self.regions)
            matrices = matrices[first : max(region.begin[0] + region.shape[0] for region in self.regions)]
        self.matrices = matrices
        self.has_full_experts = len(shape) == 3 and all(region.shape[1:] == shape[1:] for region in self.regions)

    @cached_property
    def shards(self) -> list[list[MatrixShard]]:
        """Shards of the matrices, shards[i][r]: the shard of matrix i on rank r of the shard group."""
        by_region: dict[tuple[int, ShardRegion], MatrixShard] = {}
        for i, matrix in enumerate(self.matrices):
            for region in set(self.regions):
                by_region[i, region] = matrix_shard(matrix, region)
        return [[by_region[i, region] for region in self.regions] for i in range(len(self.matrices))]

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank of the shard group has all of a matrix or nothing of it, for each matrix."""
        if self.has_full_experts or len(self.regions) == 1:
            return True
        return all(
            shard is NO_SHARD or shard.shape == matrix.shape
            for matrix, shards in zip(self.matrices, self.shards, strict=True)
            for shard in shards
        )

    @cached_property
    def can_sum_grams(self) -> bool:
        """Whether each matrix is sharded along its larger dim alone, so that its Gram matrix is a sum over shards."""
        return all(
            shard is NO_SHARD or shard.shape[matrix.shape.index(min(matrix.shape))] == min(matrix.shape)
            for matrix, shards in zip(self.matrices, self.shards, strict=True)
            for shard in shards
        )

    def local_matrices(self) -> Iterator[tuple[Matrix, MatrixShard]]:
        """Return an iterator over the matrices of which this rank has a shard: (matrix, this rank's shard of it)."""
        rank = self.shard_group.group.rank
        if self.has_full_experts:
            pairs = ((m, matrix_shard(m, self.local_region)) for m in self.matrices)
        else:
            pairs = ((m, shards[rank]) for m, shards in zip(self.matrices, self.shards, strict=True))
        return ((m, shard) for m, shard in pairs if shard is not NO_SHARD)

    @cached_property
    def sent_elements(self) -> tuple[int, int]:
        """Elements that all ranks of the shard group send: if matrices go to owners; if Gram matrices are summed.

        The first is the mean over all owners that a matrix may have, to whom what an owner has already is not sent.
        """
        others = len(self.regions) - 1
        to_owners = sum(prod(m.shape) for m in self.matrices)
        from_owners = sum(prod(shard.shape) for shards in self.shards for shard in shards)
        gram = sum(2 * others * min(m.shape) ** 2 for m in self.matrices)
        return (to_owners + from_owners) * others // len(self.regions), gram


class ShardedWeight(NamedTuple):
    """A weight of this rank that consists of matrices, by name, and how it is sharded."""

    name: str
    sharding: WeightSharding


def sharded_weights(
    parameters: Mapping[str, Tensor], matrices: Mapping[str, list[Matrix]], shard_group_of: Callable[[str], ShardGroup]
) -> list[ShardedWeight]:
    """Return the weights that consist of matrices, each with its sharding, in the order of `matrices`.

    Args:
        matrices: the matrices of each weight, by name; every name is one of the parameters.
        shard_group_of: returns the shard group of a parameter by its name.
    """
    shardings: dict[tuple, WeightSharding] = {}
    out = []
    for name, of_weight in matrices.items():
        shard_group, shape = shard_group_of(name), tuple(parameters[name].shape)
        axes = axes_of(parameters[name])
        key = id(shard_group), shape, axes, tuple(of_weight)
        if key not in shardings:
            shardings[key] = WeightSharding(shape, axes, of_weight, shard_group)
        out.append(ShardedWeight(name, shardings[key]))
    return out
