"""The process groups of a run, numbered alike on all ranks.

Heartbeats, flight recorders and reports name a group by its index in `name_groups`.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Communicators
from titanmoe.fold.rank_groups import axes_of


@dataclass(frozen=True)
class AxisGroups:
    """All process groups along the same mesh axes that carry the same kind of messages, such as dispatch or FSDP's."""

    communicator: str
    """The kind (`titanmoe.fold.meshes.CommunicatorKind`)."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each group."""
    axes: str
    """The names of the axes, such as "ep x etp"."""

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that `rank` is in; () if it is in none."""
        return next((ranks for ranks in self.ranks if rank in ranks), ())


def name_groups(communicators: Communicators, fold: Fold) -> list[AxisGroups]:
    """Return all process groups of the training job, one AxisGroups for each kind of messages and axes.

    All ranks return the same order, whose index is the group's number in heartbeats, flight recorders and reports. No
    communication.
    """
    return [AxisGroups(kind, ranks, axes_of(fold, kind, ranks[0])) for kind, ranks in communicators.groups]


def own_groups(communicators: Communicators) -> dict[str, int]:
    """Return, by torch's name for it, the number in `name_groups` of each process group that this rank is in."""
    return {group.group_name: i for i, group in enumerate(communicators.groups.values()) if group is not None}
