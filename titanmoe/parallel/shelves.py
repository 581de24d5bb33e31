"""Memory that the ranks of a group on one host see of each other: on CPUs FSDP's weights and gradients go through it.

A socket copies every number into the kernel and out again, and wakes both ranks for each few of them. Here a rank puts
what others want on a shelf of its own and says so; they read it there and say that they have. Only those two words, of
a byte each, go through the group. All ranks take shelves of the same sizes in the same order.

The memory is nameless (memfd): no file system bounds it, and it is gone with the last rank that has it open.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

SECRET = 16  # bytes
PAGE = mmap.ALLOCATIONGRANULARITY
WORD = torch.zeros(1, dtype=torch.uint8)


@dataclass
class Shelf:
    """The same stretch of every rank's memory."""

    number: int
    maps: list[Tensor]  # bytes
    taken: bool = True

    def of(self, rank: int, numbers: int, dtype: torch.dtype) -> Tensor:
        return self.maps[rank][: numbers * dtype.itemsize].view(dtype)


class Shelves:
    def __init__(self, group: dist.ProcessGroup, files: list[int]):
        self.group, self.files = group, files
        self.others = [r for r in range(group.size()) if r != group.rank()]
        self.shelves: list[Shelf] = []
        self.end = PAGE  # the secret lies before

    @staticmethod
    def between(group: dist.ProcessGroup) -> Shelves | None:
        """None where the ranks do not share a host, or the system does not let them see each other's memory."""
        secret, mine = secrets.token_bytes(SECRET), None
        if hasattr(os, "memfd_create"):
            mine = os.memfd_create("titanmoe")
            os.pwrite(mine, secret, 0)
        told: list = [None] * group.size()
        dist.all_gather_object(told, (f"/proc/{os.getpid()}/fd/{mine}", secret), group=group)
        files = [_opened(*one) for one in told]
        agreed: list = [None] * group.size()
        dist.all_gather_object(agreed, None not in files, group=group)
        if mine is not None:
            os.close(mine)  # files has it too
        if all(agreed):
            return Shelves(group, files)
        _close(files)
        return None

    def __del__(self) -> None:
        _close(self.files)

    def take(self, size: int) -> Shelf:
        """One of so many bytes or more that nobody uses: the smallest, else a new one."""
        free = [shelf for shelf in self.shelves if not shelf.taken and shelf.maps[0].numel() >= size]
        if not free:
            return self._new(size)
        shelf = min(free, key=lambda shelf: shelf.maps[0].numel())
        shelf.taken = True
        return shelf

    def _new(self, size: int) -> Shelf:
        size = max(-(-size // PAGE), 1) * PAGE
        for file in self.files:  # whoever comes first; memory that is not there is an error here, not a signal later
            os.posix_fallocate(file, self.end, size)
        maps = [mmap.mmap(file, size, offset=self.end) for file in self.files]
        self.end += size
        self.shelves.append(Shelf(len(self.shelves), [torch.frombuffer(m, dtype=torch.uint8) for m in maps]))
        return self.shelves[-1]

    def tell(self, shelf: Shelf) -> list[dist.Work]:
        """What the others want is on this rank's; the works are done when it is on theirs too."""
        return self._word(2 * shelf.number)

    def give_back(self, shelf: Shelf) -> None:
        """This rank has read what it wanted of the others'; waits until they have too.

        Nothing stays under way: gloo loses its way in a pair of ranks where a message is forgotten.
        """
        for work in self._word(2 * shelf.number + 1):
            work.wait()
        shelf.taken = False

    def _word(self, tag: int) -> list[dist.Work]:
        heard = [dist.irecv(torch.empty_like(WORD), group=self.group, group_src=r, tag=tag) for r in self.others]
        said = [dist.isend(WORD, group=self.group, group_dst=r, tag=tag) for r in self.others]
        return heard + said


def _opened(path: str, secret: bytes) -> int | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(file, SECRET, 0) == secret:  # another host's path may be something else here
        return file
    os.close(file)
    return None


def _close(files: list[int | None]) -> None:
    for file in files:
        if file is not None:
            os.close(file)


class Kept:
    """Memory of this rank that is used again as soon as no tensor lies in it.

    The heap cuts up what a step's gradients leave and grows for ten steps, at 4 CPU-seconds for each new gigabyte.
    """

    def __init__(self) -> None:
        self.pages: list[tuple[mmap.mmap, weakref.ref]] = []

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numbers = max(math.prod(size), 1)
        length = numbers * dtype.itemsize
        free = [i for i, (pages, user) in enumerate(self.pages) if user() is None and len(pages) >= length]
        if free:
            pages, _ = self.pages.pop(min(free, key=lambda i: len(self.pages[i][0])))
        else:
            pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        user = memoryview(pages)  # the tensor holds it as long as it lives
        self.pages.append((pages, weakref.ref(user)))
        return torch.frombuffer(user, dtype=dtype, count=numbers)[: math.prod(size)].view(size)
