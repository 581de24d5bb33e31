"""Seconds of a collective on the links that its group crosses: a delay per message, and bytes over bandwidth.

A group is `size` ranks, `stride` apart, as every axis and every run of adjacent axes of a view is. Those of it within
one domain of the fast link talk over it, the others over the network card of each rank; both work at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from titanmoe.plan.devices import Device


@dataclass(frozen=True)
class Factors:
    """Efficiencies that no datasheet states.

    Fitted once to seven published runs (docs/planner.md), the same for every model, mapping and device.
    """

    matrix: float = 1.0
    """Factor on the device's curve of matrix rates."""
    attention: float = 0.939
    """Factor on the device's fraction of the peak in attention."""
    memory: float = 0.841
    """Fraction of the memory's bandwidth that element-wise work reaches."""
    link: float = 0.776
    """Fraction of the fast link's bandwidth."""
    network: float = 0.716
    """Fraction of the network's bandwidth."""
    all_to_all: float = 0.78
    """Fraction of both that is left in an all-to-all, whose messages are many and small."""
    block: float = 0.000448
    """Seconds that the device waits for the host in a block and microbatch, forward and backward."""


@dataclass(frozen=True)
class LinkGroup:
    """Group of `size` ranks whose numbers are `stride` apart."""

    size: int
    stride: int

    def ranks_per_domain(self, domain: int) -> int:
        """Return how many of the group's ranks are in one domain of fast links: at least 1.

        `domain` is the number of ranks of a domain.
        """
        return min(self.size, max(1, domain // self.stride))


FUSED_NETWORK = 0.86
"""Fraction of the network's bandwidth that one-sided kernels reach. HybridEP on H100s, bfloat16, PyTorch's time: 57,
47 and 41 GB/s on 16, 32 and 64 ranks, counting a token once for each node that it visits, its own included. So do 43
GB/s that leave the node, and half the time inside it, which hides behind them (deepseek-ai/DeepEP,
README_Hybrid-EP.md)."""
MESSAGES_AT_ONCE = 8
"""Messages of an all-to-all to ranks of one node that are sent at once; others follow one another. NCCL puts that many
into a batch (src/include/device.h, NCCL_MAX_DEV_WORK_P2P_PER_BATCH). Within a node the price is cautious:
eight H20 take 58 us for 1 to 4 MB (issue 314 of NVIDIA/nccl-tests)."""


class Links:
    """Seconds of messages over the fast link and the network of a device."""

    def __init__(self, device: Device, factors: Factors):
        self.domain = device.domain
        self.link, self.network = device.link * factors.link, device.network * factors.network
        self.all_to_all, self.fused = factors.all_to_all, device.network * FUSED_NETWORK
        self.link_latency, self.network_latency = device.link_latency, device.network_latency
        self.message_fraction = device.message_fraction

    def exposed(self, message: float, behind: float) -> float:
        """Return the seconds that a message adds to the computation that hides it.

        Where it is hidden, its kernels still slow the computation down, by `message_fraction` of their time.

        Args:
            message: seconds of the message alone.
            behind: seconds of the computation alone.
        """
        return max(0.0, message - behind) + self.message_fraction * min(message, behind)

    def _delay(self, group: LinkGroup) -> float:
        """Return the latency in seconds of a tree over the group, first inside domains, then between them.

        log2(ranks in a domain), at least 1, times the fast link's latency, plus log2(domains) times the network's.
        """
        near = group.ranks_per_domain(self.domain)
        domains = ceil(group.size / near)
        return self.link_latency * log2(max(near, 2)) + self.network_latency * (log2(domains) if domains > 1 else 0)

    def gather(self, group: LinkGroup, size: float) -> float:
        """Return the seconds of an all-gather to `size` bytes on each rank, or of a reduce-scatter from as many.

        0 for a group of one rank.
        """
        n, near = group.size, group.ranks_per_domain(self.domain)
        if n == 1:
            return 0.0
        inside = size * (n - 1) / n / self.link if near > 1 else 0.0
        between = size * (n - near) / n / (self.network * near)
        return self._delay(group) + max(inside, between)

    def exchange(self, group: LinkGroup, size: float) -> float:
        """Return the seconds of an all-to-all of `size` bytes per rank, including what stays on the rank.

        0 for a group of one rank.
        """
        n, near = group.size, group.ranks_per_domain(self.domain)
        if n == 1:
            return 0.0
        inside, across = size * (near - 1) / n / self.link, size * (n - near) / n / self.network
        delay = self.link_latency * (near - 1) + self.network_latency * (n - near) / min(near, MESSAGES_AT_ONCE)
        return delay + max(inside, across) / self.all_to_all

    def relay(self, group: LinkGroup, across: float, inside: float) -> float:
        """Return the seconds of an exchange by one-sided kernels (HybridEP).

        It is the longer of NVLink's time, and the network's with half of NVLink's.

        Args:
            group: the ranks that exchange.
            across: bytes that a rank sends out of its domain.
            inside: bytes that a rank sends within its domain, including what stays on the rank.
        """
        near = group.ranks_per_domain(self.domain)
        within = inside * (near - 1) / near / self.link
        return self._delay(group) + max(within, across / self.fused + within / 2)

    def send(self, stride: int, size: float) -> float:
        """Return the seconds to send `size` bytes from a rank to the one `stride` ranks after it.

        If `stride` is a domain or more, it is reached over the network.
        """
        if stride >= self.domain:
            return self.network_latency + size / self.network
        return self.link_latency + size / self.link

    def send_to_next(self, group: LinkGroup, size: float) -> float:
        """Return the seconds in which each rank of a ring sends `size` bytes to the next.

        If the ring crosses domains of fast links, every send takes as long as one between domains.
        """
        return self.send(group.stride if group.ranks_per_domain(self.domain) == group.size else self.domain, size)
