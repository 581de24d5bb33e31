"""The TCP connections of this process: which peers acknowledge nothing, and which can be reached.

The watchdog reads them when a run hangs, to tell a link that is down from a rank that is late. gloo, the store, and
NCCL without InfiniBand or NVLink send over TCP. Linux sends a segment again that is not acknowledged after 0.2 s or
more, then after twice as long, and so on. A stopped process still acknowledges, because its kernel does. A host that
refuses a connection can be reached.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPEATS = 3
"""The number of retransmissions of a segment after which its connection counts as unanswered: 1.4 s at least."""
PROBE_S, PROBED, PORT = 0.7, 64, 1
"""Seconds that a probe waits, the most peers probed, and the port probed, where nobody needs to listen."""


@dataclass
class Connections:
    """The TCP connections of a process, each as [own, peer]: two IP addresses as text, without ports."""

    pairs: list[list[str]] = field(default_factory=list)
    """All established connections."""
    unanswered: list[list[str]] = field(default_factory=list)
    """The connections whose peer acknowledges nothing."""
    reached: list[list[str]] = field(default_factory=list)
    """The connections whose peer has just answered a probe."""


def read_connections(process: Path = Path("/proc/self")) -> Connections:
    """Return the established TCP connections of a process, given its folder in /proc; none without /proc.

    No peer is probed, so `reached` is empty.
    """
    pairs, unanswered, inodes = set[tuple[str, str]](), set[tuple[str, str]](), set[str]()
    with contextlib.suppress(OSError):
        inodes.update(_sockets(process))
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in (process / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                _, local, remote, state, _, timer, repeats, _, _, inode, *_ = line.split()
                if inode not in inodes or state != "01":  # 01: established
                    continue
                pair = _address(local, family), _address(remote, family)
                pairs.add(pair)
                if timer.startswith("01:") and int(repeats, 16) >= REPEATS:  # 01: a retransmission is due
                    unanswered.add(pair)
    return Connections(sorted(map(list, pairs)), sorted(map(list, unanswered)))


def probe_connections() -> Connections:
    """Return this process's TCP connections after probing up to 64 peers at other addresses, in at most 0.7 s."""
    connections = read_connections()
    to_other_hosts = [pair for pair in connections.pairs if pair[0] != pair[1]][:PROBED]
    reachable = reachable_addresses({peer for _, peer in to_other_hosts})
    connections.reached = [pair for pair in to_other_hosts if pair[1] in reachable]
    return connections


def reachable_addresses(addresses: Iterable[str]) -> set[str]:
    """Return the IP addresses whose host answers a TCP connection to port 1, accepted or refused, in 0.7 s for all."""
    codes, waiting = dict[str, int](), dict[socket.socket, str]()
    with contextlib.ExitStack() as probes:
        for address in addresses:
            probe = probes.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            probe.setblocking(False)
            codes[address] = probe.connect_ex((address, PORT))
            if codes[address] == errno.EINPROGRESS:
                waiting[probe] = address
        until = time.monotonic() + PROBE_S
        while waiting and (left := until - time.monotonic()) > 0:
            for probe in select.select([], list(waiting), [], left)[1]:
                codes[waiting.pop(probe)] = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return {address for address, code in codes.items() if code in (0, errno.ECONNREFUSED)}


def _sockets(process: Path) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    for entry in os.scandir(process / "fd"):
        with contextlib.suppress(OSError):  # closed by now
            kind, _, inode = os.readlink(entry.path).partition(":")
            if kind == "socket":
                yield inode.strip("[]")


def _address(text: str, family: socket.AddressFamily) -> str:
    """Return the IP address of an entry such as `0201A8C0:1F90` in /proc/net/tcp, without the port.

    Entries of /proc/net/tcp6 have the family AF_INET6. An IPv4 address in IPv6 form is returned as IPv4.
    """
    digits = text.partition(":")[0]
    words = (int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
