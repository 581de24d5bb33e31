"""The messages of a rehearsed rank with the groups that they belong to, as the check of message order reads them.

Made of records of rehearsed ranks; titanmoe.rehearse.message_order finds messages that can never complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from titanmoe.rehearse.message_recorder import ALL_TO_ALLS, Log, Message

POINT_TO_POINT = ("send", "receive")
CreatedGroups = list[tuple[str, tuple[tuple[int, ...], ...]]]
"""The kind and the ranks of all groups that a world makes together, in order."""


class Communicator(NamedTuple):
    """A process group as the check of message order sees it."""

    kind: str
    """The communicator kind and the axes of the group, as text."""
    ranks: tuple[int, ...]
    """All ranks of the group."""
    members: tuple[int, ...]
    """The ranks of the group that were rehearsed."""


@dataclass(frozen=True)
class Program:
    """The messages that one rank issues and waits for in a step, and the groups that it creates."""

    rank: int
    log: Log
    comms: dict[str, Communicator]
    """The communicators by torch's name for the group, as in the log."""
    created_groups: CreatedGroups = field(default_factory=list)

    def comm(self, message: Message) -> Communicator:
        return self.comms[message.group]

    def peer(self, message: Message) -> int:
        """Return the rank at the other end of a send or receive of this program, a rank of the world."""
        return self.comm(message).ranks[message.peer]


def describe(program: Program, message: Message, number: int | None = None) -> str:
    """Return a sentence about a message for errors: rank, communicator, operation, size and line of code.

    Args:
        number: The index of the message among those of its communicator; None to leave it out.
    """
    comm = program.comm(message)
    number_text = f" {number}" if number is not None else ""
    layer = f" of {message.site.layer}" if message.site.layer else ""
    phase = " in backward" if message.backward else ""
    peer_text = f" with rank {program.peer(message)}" if message.op in POINT_TO_POINT else ""
    rows = f" in rows of {message.row_bytes}" if message.op in ALL_TO_ALLS else ""
    size = message.sent_bytes or message.received_bytes
    count = f"{size} bytes of {str(message.dtype).removeprefix('torch.')}{rows}"
    return (
        f"rank {program.rank}: operation{number_text} of {comm.kind} over ranks {ranks_text(comm.ranks)}: "
        f"{message.op}{peer_text}, {count}, {message.site}{layer}{phase}"
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks as text; of more than eight the first, the last and their number."""
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"
