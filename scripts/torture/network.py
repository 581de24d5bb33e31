"""A network between the ranks of a run: each rank in a network namespace of its own, all on one bridge.

Used by the trials of scripts/torture that cut or delay traffic. Needs root.
"""

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


def run_ip(*words: object) -> None:
    """Run the command `ip` with these words; raise CalledProcessError if it fails."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


def address(rank: int) -> str:
    """Return the IP address of a rank."""
    return f"10.77.0.{rank + 1}"


def enter_namespace(spaces: str, rank: int | str = "lan") -> None:
    """Move this thread into the network namespace of a rank, or of the bridge ("lan").

    `spaces` is what `network` yields. Raises OSError if there is no such namespace or this process may not enter it.
    """
    with open(f"/run/netns/{spaces}-{rank}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {spaces}-{rank}")


@contextlib.contextmanager
def network(ranks: int) -> Iterator[str]:
    """Create a network namespace for each rank and a bridge between them, for the duration of this context.

    Yields the common prefix of the namespaces' names, which the other functions take as `spaces`.
    """
    spaces = f"torture-{os.getpid()}"
    lan, *ends = names = [f"{spaces}-{name}" for name in ("lan", *range(ranks))]
    try:
        for name in names:
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        run_ip("-n", lan, "link", "add", DEVICE, "type", "bridge")
        run_ip("-n", lan, "addr", "add", f"{AGENT}/24", "dev", DEVICE)
        run_ip("-n", lan, "link", "set", DEVICE, "up")
        for rank, end in enumerate(ends):
            run_ip("link", "add", DEVICE, "netns", end, "type", "veth", "peer", "name", f"port{rank}", "netns", lan)
            run_ip("-n", lan, "link", "set", f"port{rank}", "master", DEVICE, "up")
            run_ip("-n", end, "addr", "add", f"{address(rank)}/24", "dev", DEVICE)
            run_ip("-n", end, "link", "set", DEVICE, "up")
        yield spaces
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def set_link(spaces: str, rank: int, state: str = "down") -> None:
    """Take the network link of a rank "down" or bring it "up". `spaces` is what `network` yields."""
    run_ip("-n", f"{spaces}-lan", "link", "set", f"port{rank}", state)


def delay_packets(spaces: str, ends: tuple[int, int], seconds: float, stall: float = 0.0) -> None:
    """Forward packets between two ranks with a delay, for ever; run it in a process of its own.

    Args:
        spaces: what `network` yields.
        ends: the two ranks.
        seconds: delay of each packet.
        stall: seconds from now on in which no packet arrives; these arrive afterwards.
    """
    devices, begin = [], time.monotonic() + stall
    for end in ends:
        enter_namespace(spaces, end)
        devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(devices[-1], TUNSETIFF, struct.pack("16sH22x", b"slow", IFF_TUN | IFF_NO_PI))
        run_ip("link", "set", "slow", "up")
    for end, other in (ends, ends[::-1]):
        enter_namespace(spaces, end)
        for device in ("all", "slow"):
            Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").write_text("0")
        run_ip("route", "add", f"{address(other)}/32", "dev", "slow")
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
