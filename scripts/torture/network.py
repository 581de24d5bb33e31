"""A network between the ranks of a run: each in a namespace of its own, all on one bridge; and a link that is slow."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

VARIABLE, DEVICE, AGENT = "TORTURE_NETWORK", "eth0", "10.77.0.254"
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def enter(spaces: str, rank: int | str = "lan") -> None:
    with open(f"/run/netns/{spaces}-{rank}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {spaces}-{rank}")


@contextlib.contextmanager
def network(ranks: int) -> Iterator[str]:
    spaces = f"torture-{os.getpid()}"
    lan, *ends = names = [f"{spaces}-{name}" for name in ("lan", *range(ranks))]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", lan, "link", "add", DEVICE, "type", "bridge")
        ip("-n", lan, "addr", "add", f"{AGENT}/24", "dev", DEVICE)
        ip("-n", lan, "link", "set", DEVICE, "up")
        for rank, end in enumerate(ends):
            ip("link", "add", DEVICE, "netns", end, "type", "veth", "peer", "name", f"port{rank}", "netns", lan)
            ip("-n", lan, "link", "set", f"port{rank}", "master", DEVICE, "up")
            ip("-n", end, "addr", "add", f"{address(rank)}/24", "dev", DEVICE)
            ip("-n", end, "link", "set", DEVICE, "up")
        yield spaces
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def cut(spaces: str, rank: int, state: str = "down") -> None:
    """Take a rank's link down, or with "up" mend it."""
    ip("-n", f"{spaces}-lan", "link", "set", f"port{rank}", state)


def carry(spaces: str, ends: tuple[int, int], seconds: float, stall: float = 0.0) -> None:
    """Packets between two ranks, each held back for so long, and none before `stall` is over."""
    devices, begin = [], time.monotonic() + stall
    for end in ends:
        enter(spaces, end)
        devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(devices[-1], TUNSETIFF, struct.pack("16sH22x", b"slow", IFF_TUN | IFF_NO_PI))
        ip("link", "set", "slow", "up")
    for end, other in (ends, ends[::-1]):
        enter(spaces, end)
        for device in ("all", "slow"):
            Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").write_text("0")
        ip("route", "add", f"{address(other)}/32", "dev", "slow")
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        until = max(0.0, held[0][0] - time.monotonic()) if held else None
        for device in select.select(devices, [], [], until)[0]:
            other = devices[1 - devices.index(device)]
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, 65536)
                    held.append((max(begin, time.monotonic() + seconds), other, packet))
        while held and held[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # its queue is full: TCP sends it again
                os.write(*held.popleft()[1:])
