"""The time of a collective on the links that its group crosses: a delay per message, and bytes over bandwidth.

A group is `size` ranks, `stride` apart, as every axis and every run of adjacent axes of a view is. Those of it within
one domain of the fast link talk over it, the others over the network card of each rank; both work at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from titanmoe.plan.devices import Device


@dataclass(frozen=True)
class Factors:
    """What no datasheet says. Fitted once to eight published runs (docs/planner.md), the same for every model,
    mapping and device."""

    matrix: float = 1.0
    """On the device's curve of matrix rates."""
    attention: float = 0.982
    """On the device's share for attention."""
    memory: float = 0.891
    """Of the memory's bandwidth, in element-wise work."""
    link: float = 0.657
    """Of the fast link's bandwidth."""
    network: float = 0.623
    """Of the network's bandwidth."""
    hidden: float = 1.0
    """Of the computation behind which weights and gradients travel."""
    block: float = 0.00023
    """Seconds in which a block and microbatch, forward and backward, keeps the device waiting for the host."""
    busiest: float = 1.12
    """Rows of the busiest rank over the mean under learned routing."""


@dataclass(frozen=True)
class Group:
    size: int
    stride: int

    def near(self, domain: int) -> int:
        """How many of its ranks share a domain."""
        return min(self.size, max(1, domain // self.stride))


class Links:
    def __init__(self, device: Device, factors: Factors):
        self.domain, self.link, self.network = (
            device.domain,
            device.link * factors.link,
            device.network * factors.network,
        )
        self.link_latency, self.network_latency = device.link_latency, device.network_latency

    def _delay(self, group: Group) -> float:
        near = group.near(self.domain)
        domains = ceil(group.size / near)
        return self.link_latency * log2(max(near, 2)) + self.network_latency * (log2(domains) if domains > 1 else 0)

    def gather(self, group: Group, whole: float) -> float:
        """All-gather to `whole` bytes on each rank, or the reduce-scatter of as many."""
        n, near = group.size, group.near(self.domain)
        if n == 1:
            return 0.0
        inside = whole * (n - 1) / n / self.link if near > 1 else 0.0
        between = whole * (n - near) / n / (self.network * near)
        return self._delay(group) + max(inside, between)

    def exchange(self, group: Group, sent: float, across: float | None = None) -> float:
        """All-to-all of `sent` bytes per rank, its own included. across: those that leave the domain, if it is not
        their even share."""
        n, near = group.size, group.near(self.domain)
        if n == 1:
            return 0.0
        across = sent * (n - near) / n if across is None else across
        return self._delay(group) + max(sent * (near - 1) / n / self.link, across / self.network)

    def send(self, stride: int, size: float) -> float:
        """From a rank to the one `stride` ranks after it."""
        if stride >= self.domain:
            return self.network_latency + size / self.network
        return self.link_latency + size / self.link
