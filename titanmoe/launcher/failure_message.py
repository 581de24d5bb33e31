"""Write the last message of a failed run: which rank failed first, why, and where its log is.

Ranks leave notes as JSON files (titanmoe.train.launch_messages); what a rank could not write itself is told from its
exit code, from the notes of other ranks, and from its log.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from titanmoe.train.launch_messages import ADVICE_SUFFIX, note_paths

TAIL_LINES = 8
"""Number of lines of a log that are shown if the rank left no note."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """A rank that ended with an error or a signal."""

    rank: int
    exitcode: int
    """Exit code as in subprocess: negative for a signal."""
    timestamp: float
    """Seconds since the epoch when the launcher noticed; the note has the time of the failure."""
    log: Path
    """Text that the rank wrote to stderr."""
    note_file: Path
    """Note in JSON that the rank left, if it could."""
    during: str = ""
    """Phase of the step that the rank was in, as far as other ranks of this machine know."""
    ended_by_hang: bool = False
    """Whether the watch ended it, or it ended itself, because of a hang of another rank."""

    def note(self) -> dict:
        """Return the note that the rank left on why and when it failed, as `read_note` does; {} if it left none."""
        return read_note(self.note_file)

    @property
    def code(self) -> int:
        """Exit code as a shell reports it: 128 + the number of a signal."""
        return self.exitcode if self.exitcode >= 0 else 128 - self.exitcode

    @property
    def is_consequence(self) -> bool:
        """Whether another rank failed first, by the note; without one, whether a hang, SIGINT or SIGTERM ended it."""
        if note := self.note():
            return bool(note.get("consequence"))
        return self.ended_by_hang or self.code in (128 + signal.SIGINT, 128 + signal.SIGTERM)

    @property
    def is_refusal(self) -> bool:
        """Whether the rank ended before training, with a message that says what to change in the recipe."""
        return self.exitcode == 2 and bool(self.note())

    @property
    def has_own_cause(self) -> bool:
        """Whether the rank left a note on a failure of its own; False without a note, whatever its exit code."""
        return bool(self.note()) and not self.is_consequence


def read_note(file: Path) -> dict:
    """Return the JSON note that a rank left on why it ended, from its file, else its copy in memory; {} without one.

    Its keys are "message", "timestamp" (seconds since the epoch), and those that are arguments of
    `launch_messages.write_failure_note`: "consequence", "alike", "during" and "following".
    """
    for place in note_paths(file):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(place.read_text(encoding="utf-8"))
    return {}


def phases_of_late_ranks(notes: Iterable[Path]) -> dict[int, str]:
    """Return the phase of the step in which each late rank was, by global rank, in words for the user; {} if unknown.

    `notes` are the note files of this machine's ranks: the watch of a rank that waits writes the phases to its note.
    """
    parts: dict[int, str] = {}
    for file in notes:
        parts |= {int(rank): text for rank, text in read_note(file).get("during", {}).items()}
    return parts


def ranks_ended_by_hang(notes: Iterable[Path]) -> set[int]:
    """Return the global ranks that ended because the watch found a hang, not for a cause of their own.

    `notes` are the note files of this machine's ranks; a note on a hang lists the ranks that the watch ended.
    """
    return {rank for file in notes for rank in read_note(file).get("following", [])}


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure that caused the others: the earliest, those that follow from another rank's coming last.

    There must be one. Ranks that only lost the connection to another come after it, whatever the clocks say. If its
    note says that ranks failed alike, it is the lowest rank's with that message, even if that came later.
    """

    def order(failure: RankFailure) -> tuple[bool, float, int]:
        return failure.is_consequence, failure.note().get("timestamp", failure.timestamp), failure.rank

    ordered = sorted(failures, key=order)
    note = ordered[0].note()
    if not note.get("alike"):
        return ordered[0]
    return min(
        (failure for failure in ordered if failure.note().get("message") == note["message"]),
        key=lambda failure: failure.rank,
    )


def failure_message(failure: RankFailure, world: int, out_of_memory: bool = False) -> str:
    """Return the last message of a run that failed: lines on which rank failed first, why, and where its log is.

    Of a refusal it is the rank's message alone. Without a note or a signal it has the log's last TAIL_LINES lines.

    Args:
        failure: the first failure (`first_failure`), whose note and log are read.
        world: ranks of all nodes; with 1 the message names no rank.
        out_of_memory: whether the kernel has killed a process for lack of memory since the run began; used if the rank
            left no note and ended by SIGKILL.
    """
    note = failure.note()
    if failure.is_refusal:
        # A refusal: usually from all ranks, sometimes about one rank's machine, such as data missing there.
        return f"rank {failure.rank}: {note['message']}" if failure.rank else note["message"]
    who = f"rank {failure.rank} failed first" if world > 1 else "the run failed"
    log = f"its log: {failure.log}{'' if _tail(failure.log) else ' (empty)'}"
    if note.get("alike"):
        return "\n".join([f"error: {note['message']}", *([log] if _tail(failure.log) else [])])
    if note:
        return f"error: {who}, with exit code {failure.code}: {note['message'].removeprefix('error: ')}\n{log}"
    if failure.exitcode < 0:
        return f"error: {_killed(failure, world, out_of_memory)}\n{log}"
    lines = [f"error: {who}, with exit code {failure.code}", *_tail(failure.log), log]
    return "\n".join(lines)


def _killed(failure: RankFailure, world: int, out_of_memory: bool) -> str:
    who = f"rank {failure.rank}" if world > 1 else "the run"
    by_kernel = failure.exitcode == -signal.SIGKILL and out_of_memory
    if by_kernel:
        what = "was killed by the kernel (SIGKILL), because this machine, or this container, was out of memory"
    elif failure.exitcode == -signal.SIGKILL:
        what = "was killed by SIGKILL: from outside, or by the kernel for lack of memory (see dmesg)"
    else:
        what = f"died of {signal.Signals(-failure.exitcode).name}"
    during = [f"it was in {failure.during}"] * bool(failure.during)
    return "\n".join([f"{who} {what}", *during, *(_advice(failure) if by_kernel else [])])


def _advice(failure: RankFailure) -> list[str]:
    file = failure.note_file.with_name(failure.note_file.name + ADVICE_SUFFIX)
    return [place.read_text(encoding="utf-8") for place in note_paths(file) if place.exists()][:1]


def _tail(log: Path) -> list[str]:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    except OSError:
        return []
    return [f"  {line}" for line in lines[-TAIL_LINES:]]


def count_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended, in this container and on this machine.

    The two counts are added, so a kill in this container may count twice: the number is only compared before and after
    a run. 0 if the kernel tells neither.
    """
    count = 0
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            for line in Path(file).read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition(" ")
                count += int(value) if name == "oom_kill" else 0
        except (OSError, ValueError):
            continue
    return count
