"""The process groups of a run, as all its ranks number them."""

from __future__ import annotations

from dataclasses import dataclass

from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Lanes
from titanmoe.fold.rank_groups import axes_of


@dataclass(frozen=True)
class LaneGroups:
    """The groups of a lane over the same axes."""

    lane: str
    parts: tuple[tuple[int, ...], ...]
    """The ranks of each group."""
    axes: str

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group that this rank is in."""
        return next((part for part in self.parts if rank in part), ())


def name_groups(lanes: Lanes, fold: Fold) -> list[LaneGroups]:
    """The same list on every rank, because all make their groups in the same order."""
    return [LaneGroups(lane, parts, axes_of(fold, lane, parts[0])) for lane, parts in lanes.groups]


def own_groups(lanes: Lanes) -> dict[str, int]:
    """Those that this rank is in: their numbers in that list, by torch's names."""
    return {group.group_name: i for i, group in enumerate(lanes.groups.values()) if group is not None}
