"""How many chunks to cut the routed rows into, from the measured times of messages and products.

The model of a layer with R rows in n chunks has two workers, the wire and the experts, each of which does one thing at
a time. All n chunks are sent at once, and results queue behind them on the way back. If a chunk of R / n rows takes `a`
to arrive, `m` for the products and `b` to return, chunk i = 1..n

    arrives     i * a
    is done     done(i) = max(i * a, done(i - 1)) + m
    is back     back(i) = max(done(i), back(i - 1), n * a) + b              T(n) = back(n)

Backward is the same with its own products and with `a` and `b` swapped: it starts by sending the gradients of the
rows that came back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group, all_reduce, arrive, start
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.experts import Experts

MOST = 8
NEAR = 1.02
"""Take the fewest chunks within 2% of the least time: cutting costs memory traffic that the fit does not include."""
SHARES = (8, 4, 2, 1)
"""Messages and products are timed with the rows divided by each of these."""
ROUNDS, CALLS = 3, 4


class LinearCost(NamedTuple):
    """The seconds that a message or a product takes: latency + rows * slope."""

    latency: float
    slope: float

    def __call__(self, rows: float) -> float:
        return self.latency + rows * self.slope


def fit(rows: list[int], seconds: list[float]) -> LinearCost:
    """Least squares of the relative errors, so that small sizes, which determine the latency, count as much as large
    ones. Neither number is negative: if one would be, it is set to 0 and the other is fitted alone.
    """
    weight = [1 / s**2 for s in seconds]
    total = sum(weight)
    x = sum(w * r for w, r in zip(weight, rows, strict=True)) / total
    y = sum(w * s for w, s in zip(weight, seconds, strict=True)) / total
    spread = sum(w * (r - x) ** 2 for w, r in zip(weight, rows, strict=True))
    covariance = sum(w * (r - x) * (s - y) for w, r, s in zip(weight, rows, seconds, strict=True))
    slope = covariance / spread if spread else 0.0
    if slope <= 0:
        return LinearCost(y, 0.0)
    if y < slope * x:
        square = sum(w * r * r for w, r in zip(weight, rows, strict=True))
        return LinearCost(0.0, sum(w * r * s for w, r, s in zip(weight, rows, seconds, strict=True)) / square)
    return LinearCost(y - slope * x, slope)


def pipelined(there: LinearCost, products: LinearCost, back: LinearCost, rows: int, chunks: int) -> float:
    """T(n) of the module docstring."""
    a, m, b = (cost(rows / chunks) for cost in (there, products, back))
    done = returned = 0.0
    for i in range(1, chunks + 1):
        done = max(i * a, done) + m
        returned = max(done, returned, chunks * a) + b
    return returned


@dataclass(frozen=True)
class Costs:
    """Of one layer on the slowest rank. A row goes to its expert with its routing weight and comes back without it."""

    there: LinearCost
    back: LinearCost
    forward: LinearCost
    backward: LinearCost

    def forward_s(self, rows: int, chunks: int) -> float:
        return pipelined(self.there, self.forward, self.back, rows, chunks)

    def backward_s(self, rows: int, chunks: int) -> float:
        return pipelined(self.back, self.backward, self.there, rows, chunks)


def fewest(seconds: Callable[[int], float]) -> int:
    times = {chunks: seconds(chunks) for chunks in range(1, MOST + 1)}
    return next(chunks for chunks, time in times.items() if time <= NEAR * min(times.values()))


@dataclass(frozen=True)
class Choice:
    chunks: int
    alone: tuple[int, int]  # the best for forward alone, and for backward alone
    rows: int
    costs: Costs
    seconds: tuple[float, float]  # forward and backward in `chunks` chunks
    whole: tuple[float, float]  # forward and backward in one chunk

    def __str__(self) -> str:
        def text(pair: tuple[float, float]) -> str:
            return f"{pair[0] * 1e3:.3g} + {pair[1] * 1e3:.3g} ms"

        lines = ", ".join(
            f"{name} {line.latency * 1e6:.3g} us + {line.slope * 1e9:.3g} ns a row"
            for name, line in vars(self.costs).items()
        )
        return (
            f"{self.chunks} (forward alone {self.alone[0]}, backward alone {self.alone[1]}); routed path of a layer, "
            f"forward + backward, {self.rows} rows: {text(self.seconds)}, in one chunk {text(self.whole)}; fitted: "
            + lines
        )

    def numbers(self) -> dict[str, Any]:
        return {
            "chunks": self.chunks,
            "alone": self.alone,
            "rows": self.rows,
            "seconds": self.seconds,
            "whole": self.whole,
            "costs": {name: line._asdict() for name, line in vars(self.costs).items()},
        }


def choose_chunks(costs: Costs, rows: int, forwards: float = 1.0) -> Choice:
    """One number of chunks for forward and backward, because backward follows forward's graph: the one with the least
    total time. forwards: how often forward runs per backward, more than once under recomputation.
    """
    forward, backward = (lambda n: costs.forward_s(rows, n)), (lambda n: costs.backward_s(rows, n))
    chunks = fewest(lambda n: forwards * forward(n) + backward(n))
    times = [(forward(n), backward(n)) for n in (chunks, 1)]
    return Choice(chunks, (fewest(forward), fewest(backward)), rows, costs, *times)


def dummy_experts(
    model: Model, options: MoEOptions, ep: int, etp: int, dtype: torch.dtype, device: torch.device
) -> Experts:
    """A rank's experts of one layer, unsharded and with arbitrary weights, to time them."""
    local = replace(model, num_experts=model.num_experts // ep, expert_hidden=model.expert_hidden // etp)
    with torch.device(device):
        experts = Experts(local, options, dtype)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return experts


def measure(experts: Experts, rows: int, wire: Group, world: Group) -> Costs:
    """All ranks of the world call it together; a chunk travels among those of `wire`. It leaves no trace in the run."""
    local, _, dim = experts.w1.shape
    dtype, device = experts.w1.dtype, experts.w1.device
    parameters = list(experts.parameters())
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    # Equal pieces for every rank, at least one row each. A set, because small sizes coincide.
    sizes = sorted({-(-rows // (share * wire.size)) * wire.size for share in SHARES})
    table = []
    for size in sizes:
        x_RD = torch.randn(size, dim, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(1))
        weight_R1 = torch.full((size, 1), 0.5, dtype=torch.promote_types(dtype, torch.float32), device=device)
        count_e = torch.arange(local, device=device).add(size).div(local, rounding_mode="floor")

        def send(*sent: Tensor) -> None:
            with torch.no_grad():
                for flight in [start(x, wire) for x in sent]:
                    arrive(flight)

        def products(x_RD: Tensor = x_RD, weight_R1: Tensor = weight_R1, count_e: Tensor = count_e) -> list[Tensor]:
            inputs = [x_RD.detach().requires_grad_(), weight_R1.detach().requires_grad_()]
            # Each behind an autograd node of its own, like the rows of a layer.
            return [*inputs, experts.products(*(x.view_as(x) for x in inputs), count_e)]

        *inputs, y_RD = products()

        def backward(inputs: list[Tensor] = inputs, y_RD: Tensor = y_RD, grad_RD: Tensor = x_RD) -> None:
            found = torch.autograd.grad(y_RD, [*inputs, *parameters], grad_RD, retain_graph=True)
            torch._foreach_add_(gradients, found[2:])  # each chunk adds its gradients to the sum

        works = (lambda x=x_RD, w=weight_R1: send(x, w)), (lambda x=x_RD: send(x)), products, backward
        table.append([_seconds(work, world, device) for work in works])
    slowest = all_reduce(torch.tensor(table, dtype=torch.float64, device=device), world, "max").t().tolist()
    return Costs(*(fit(sizes, seconds) for seconds in slowest))


def _seconds(work: Callable[[], Any], world: Group, device: torch.device) -> float:
    """Seconds per call, several in a row; the best of a few rounds, after one call to warm up."""

    def settle() -> None:
        all_reduce(torch.zeros((), device=device), world)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    best = float("inf")
    for _ in range(ROUNDS):
        settle()
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - begin) / CALLS)
    return best
