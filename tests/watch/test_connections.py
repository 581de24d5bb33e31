"""Which peers of this process acknowledge nothing, and which can be reached."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from titanmoe.watch import connections
from titanmoe.watch.connections import Connections, probe_connections, reachable_addresses, read_connections

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(local: str, remote: str, inode: int, state: str = "01", timer: str = "00", repeats: int = 0) -> str:
    """As Linux writes it on a little-endian machine."""
    ends = f"{local}:D431 {remote}:1F90 {state} 00000800:00000000 {timer}:00000A1B {repeats:08X}"
    return f"   0: {ends}     0        0 {inode} 2 0000000000000000 3200 4 0 10 -1\n"


def test_which_connections_are_not_acknowledged(tmp_path: Path) -> None:
    a, b, c = "0100000A", "0200000A", "0300000A"
    if sys.byteorder == "big":
        a, b, c = "0A000001", "0A000002", "0A000003"
    mapped = f"0000000000000000{'FFFF0000' if sys.byteorder == 'little' else '0000FFFF'}"
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(
        HEADER
        + line(a, b, 11, timer="01", repeats=3)
        + line(a, c, 12, timer="01", repeats=2)  # a packet was lost, which happens
        + line(a, c, 13, timer="04", repeats=9)  # its peer has no room: it may be stopped
        + line(a, "0900000A", 14, timer="01", repeats=5)  # another process's
        + line(a, "0800000A", 15, state="0A")  # listens
    )
    (tmp_path / "net/tcp6").write_text(HEADER + line(mapped + a, mapped + c, 16, timer="01", repeats=4))
    (tmp_path / "fd").mkdir()
    for inode in (11, 12, 13, 15, 16):
        (tmp_path / f"fd/{inode}").symlink_to(f"socket:[{inode}]")
    own, pairs = "10.0.0.1", [["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.3"]]
    assert read_connections(tmp_path) == Connections(pairs, [[own, "10.0.0.2"], [own, "10.0.0.3"]])
    assert read_connections(tmp_path / "nothing") == Connections()


@LINUX
def test_the_connections_of_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert ["127.0.0.1", "127.0.0.1"] in probe_connections().pairs


@LINUX
def test_a_host_that_refuses_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has no room for another connection and does not answer."""
    with socket.create_server(("127.0.0.2", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        monkeypatch.setattr(connections, "PORT", server.getsockname()[1])
        monkeypatch.setattr(connections, "PROBE_S", 0.2)
        before = len(os.listdir("/proc/self/fd"))
        assert reachable_addresses({"127.0.0.1", "127.0.0.2"}) == {"127.0.0.1"}
        assert len(os.listdir("/proc/self/fd")) == before
