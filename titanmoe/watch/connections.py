"""The TCP connections of this process: which peers acknowledge nothing, and which can be reached?

gloo, the store, and NCCL where it has no other network send over TCP. Linux repeats a segment that is not acknowledged
after 0.2 s or more, then twice as long, and so on; a process that is stopped still acknowledges, because its kernel
does. A host that refuses a connection can be reached.
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
"""How often Linux must have repeated a segment until its connection counts as unanswered: for 1.4 s at least."""
PROBE_S, PROBED, PORT = 0.7, 64, 1
"""How long a probe waits, how many peers are probed at most, and at which port, where nobody needs to listen."""


@dataclass
class Connections:
    """A process's TCP connections, as pairs of its own address and the peer's."""

    pairs: list[list[str]] = field(default_factory=list)
    """All of them."""
    unanswered: list[list[str]] = field(default_factory=list)
    """Those whose peer acknowledges nothing."""
    reached: list[list[str]] = field(default_factory=list)
    """Those whose peer has just answered a probe."""


def read_connections(process: Path = Path("/proc/self")) -> Connections:
    """Return the connections of a process, without probes; none where the system does not list them."""
    pairs, unanswered, inodes = set[tuple[str, str]](), set[tuple[str, str]](), set[str]()
    with contextlib.suppress(OSError):
        inodes.update(_sockets(process))
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in (process / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                _, local, remote, state, _, timer, repeats, _, _, inode, *_ = line.split()
                if inode not in inodes or state != "01":  # 1: established
                    continue
                pair = _address(local, family), _address(remote, family)
                pairs.add(pair)
                if timer.startswith("01:") and int(repeats, 16) >= REPEATS:  # 1: it waits to send again
                    unanswered.add(pair)
    return Connections(sorted(map(list, pairs)), sorted(map(list, unanswered)))


def probed_connections() -> Connections:
    """Return the connections of this process, whose peers on other hosts it tries to reach. Waits 0.7 s at most."""
    found = read_connections()
    elsewhere = [pair for pair in found.pairs if pair[0] != pair[1]][:PROBED]
    reachable = reach({peer for _, peer in elsewhere})
    found.reached = [pair for pair in elsewhere if pair[1] in reachable]
    return found


def reach(addresses: Iterable[str]) -> set[str]:
    """Return those that accept or refuse a connection."""
    reached, waiting = set[str](), dict[socket.socket, str]()
    for address in addresses:
        probe = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        probe.setblocking(False)
        code = probe.connect_ex((address, PORT))
        if code == errno.EINPROGRESS:
            waiting[probe] = address
            continue
        reached |= {address} if code in (0, errno.ECONNREFUSED) else set()
        probe.close()
    until = time.monotonic() + PROBE_S
    while waiting and (left := until - time.monotonic()) > 0:
        for probe in select.select([], list(waiting), [], left)[1]:
            code, address = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), waiting.pop(probe)
            reached |= {address} if code in (0, errno.ECONNREFUSED) else set()
            probe.close()
    for probe in waiting:
        probe.close()
    return reached


def _sockets(process: Path) -> Iterator[str]:
    """Yield the inodes of its sockets."""
    for entry in os.scandir(process / "fd"):
        with contextlib.suppress(OSError):  # closed by now
            kind, _, inode = os.readlink(entry.path).partition(":")
            if kind == "socket":
                yield inode.strip("[]")


def _address(text: str, family: socket.AddressFamily) -> str:
    """Return the address in `0201A8C0:1F90`, whose words of 4 bytes are in the machine's order."""
    digits = text.partition(":")[0]
    words = (int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
