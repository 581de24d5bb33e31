"""How many chunks to cut the routed rows into, from what messages and products were measured to cost.

A step of R rows in n chunks is played with two workers, the wire and the experts, each of which does one thing at a
time. All n chunks are sent at once, and what the experts have done goes back behind them. With the costs of a chunk of
R / n rows, `a` there, `m` for the products and `b` back, chunk i = 1..n

    arrives     i * a
    is done     done(i) = max(i * a, done(i - 1)) + m
    is back     back(i) = max(done(i), back(i - 1), n * a) + b              T(n) = back(n)

Backward is the same with its own products, and the ways exchanged: it begins with the gradients of what came back.
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
"""The fewest chunks within 2% of the least time: cutting costs memory traffic that is in no fitted number."""
SHARES = (8, 4, 2, 1)
"""Messages and products are timed at these parts of the rows."""
ROUNDS, CALLS = 3, 4


class Line(NamedTuple):
    """Seconds of a message or a product: latency + rows * slope."""

    latency: float
    slope: float

    def __call__(self, rows: float) -> float:
        return self.latency + rows * self.slope


def fit(rows: list[int], seconds: list[float]) -> Line:
    """Least squares of the relative errors, so that small sizes, which tell the latency, count as much as large ones.
    Neither number is negative: where one would be, it is 0 and the other is fitted alone.
    """
    weight = [1 / s**2 for s in seconds]
    total = sum(weight)
    x = sum(w * r for w, r in zip(weight, rows, strict=True)) / total
    y = sum(w * s for w, s in zip(weight, seconds, strict=True)) / total
    spread = sum(w * (r - x) ** 2 for w, r in zip(weight, rows, strict=True))
    together = sum(w * (r - x) * (s - y) for w, r, s in zip(weight, rows, seconds, strict=True))
    slope = together / spread if spread else 0.0
    if slope <= 0:
        return Line(y, 0.0)
    if y < slope * x:
        square = sum(w * r * r for w, r in zip(weight, rows, strict=True))
        return Line(0.0, sum(w * r * s for w, r, s in zip(weight, rows, seconds, strict=True)) / square)
    return Line(y - slope * x, slope)


def pipelined(there: Line, products: Line, back: Line, rows: int, chunks: int) -> float:
    """T(n) of the head of this page."""
    a, m, b = (cost(rows / chunks) for cost in (there, products, back))
    done = home = 0.0
    for i in range(1, chunks + 1):
        done = max(i * a, done) + m
        home = max(done, home, chunks * a) + b
    return home


@dataclass(frozen=True)
class Costs:
    """Of one layer on the slowest rank. A row goes to its expert with its routing weight, and comes back without."""

    there: Line
    back: Line
    forward: Line
    backward: Line

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
    alone: tuple[int, int]  # what forward and backward would take, each for itself
    rows: int
    costs: Costs
    seconds: tuple[float, float]  # of forward and backward in so many chunks,
    whole: tuple[float, float]  # and in one

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


def choose(costs: Costs, rows: int, forwards: float = 1.0) -> Choice:
    """One count for both ways, because backward follows the graph that forward left: the one with the least sum.
    forwards: how often forward runs for a backward, which is above 1 under recomputation.
    """
    forward, backward = (lambda n: costs.forward_s(rows, n)), (lambda n: costs.backward_s(rows, n))
    chunks = fewest(lambda n: forwards * forward(n) + backward(n))
    times = [(forward(n), backward(n)) for n in (chunks, 1)]
    return Choice(chunks, (fewest(forward), fewest(backward)), rows, costs, *times)


def stand_in(model: Model, options: MoEOptions, ep: int, etp: int, dtype: torch.dtype, device: torch.device) -> Experts:
    """A rank's experts of one layer, in no shards and of no particular weights."""
    local = replace(model, num_experts=model.num_experts // ep, expert_hidden=model.expert_hidden // etp)
    with torch.device(device):
        experts = Experts(local, options, dtype)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return experts


def measure(experts: Experts, rows: int, wire: Group, world: Group) -> Costs:
    """By all ranks of the world together; a chunk travels among those of `wire`. Nothing of the run changes."""
    local, _, dim = experts.w1.shape
    dtype, device = experts.w1.dtype, experts.w1.device
    parameters = list(experts.parameters())
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    # Even pieces for every rank, at least a row each; a size may stand there once only.
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
            # Behind a node each, as the rows of a layer are.
            return [*inputs, experts.products(*(x.view_as(x) for x in inputs), count_e)]

        *inputs, y_RD = products()

        def backward(inputs: list[Tensor] = inputs, y_RD: Tensor = y_RD, grad_RD: Tensor = x_RD) -> None:
            found = torch.autograd.grad(y_RD, [*inputs, *parameters], grad_RD, retain_graph=True)
            torch._foreach_add_(gradients, found[2:])  # every chunk adds its own

        works = (lambda x=x_RD, w=weight_R1: send(x, w)), (lambda x=x_RD: send(x)), products, backward
        table.append([_seconds(work, world, device) for work in works])
    slowest = all_reduce(torch.tensor(table, dtype=torch.float64, device=device), world, "max").t().tolist()
    return Costs(*(fit(sizes, seconds) for seconds in slowest))


def _seconds(work: Callable[[], Any], world: Group, device: torch.device) -> float:
    """Of one call among several in a row; the best of some rounds, after one for the warm-up."""

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
