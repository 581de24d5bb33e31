"""How many chunks to cut the routed rows of a recipe into, from the measured times of messages and products.

    torchrun --nproc-per-node 8 scripts/bench/chunks.py --config RECIPE.toml [--table.field value ...]
    python scripts/bench/chunks.py --tiny      the smallest sizes on one CPU rank: checks that it runs, measures nothing

Run it where the recipe will run, on as many ranks. It prints moe.overlap_chunks and what it was chosen from.

The model of a layer is the planner's, titanmoe/plan/rows_on_their_way.py, with measured times in place of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanmoe.comm.collectives import Group, all_reduce, arrive, start
from titanmoe.config.schema import Config, Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import Meshes
from titanmoe.moe.capacity import Capacity
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.moe.experts import Experts
from titanmoe.parallel.apply import make_meshes
from titanmoe.parts import PARTS
from titanmoe.plan.rows_on_their_way import fewest, seconds_in_chunks
from titanmoe.train.launch import read
from titanmoe.train.runtime import leave, stop, world_size
from titanmoe.train.runtime import start as start_process

MOST = 8
SHARES = (8, 4, 2, 1)
"""Messages and products are timed with the rows divided by each of these."""
TINY = ["--config", str(Path(__file__).resolve().parents[2] / "train_configs/debug.toml"), "--training.device=cpu"]
TINY += ["--parallelism.tp=1", "--parallelism.experts.ep=1", "--training.seq_len=32", "--training.local_batch_size=2"]
TINY += ["--training.global_batch_size=2"]
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
    return seconds_in_chunks(*(cost(rows / chunks) for cost in (there, products, back)), chunks)


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


def routed_rows(config: Config, meshes: Meshes) -> int:
    """Rows of one layer and microbatch on a rank, under even routing or with padded bins."""
    model, options, samples = config.model, config.moe, config.training.local_batch_size
    owned = samples * config.training.seq_len // (meshes.cp.size * meshes.tp.size)
    if not options.pad_to_capacity:
        return owned * model.top_k * meshes.fold.etp
    capacity = Capacity(model, options)
    capacity.sequence = meshes.sequence
    return capacity.bin(samples, owned) * model.num_experts * meshes.fold.etp


def main() -> int:
    config = read(TINY if sys.argv[1:] == ["--tiny"] else sys.argv[1:], world_size(), PARTS)
    runtime = start_process(config)
    meshes = make_meshes(
        derive(runtime.world, config.parallelism),
        parallelism=config.parallelism,
        moe=config.moe,
        training=config.training,
        device=runtime.device,
    )
    wire = meshes.within if DISPATCHERS.look_up(config.moe.dispatcher).nodes else meshes.dispatch
    compute = getattr(torch, config.training.mixed_precision_param)
    experts = dummy_experts(config.model, config.moe, meshes.fold.ep, meshes.fold.etp, compute, runtime.device)
    rows = routed_rows(config, meshes)
    costs = measure(experts, rows, wire, meshes.world)
    recomputed = config.activation_checkpoint
    forwards = 1 + (1 / recomputed.every if recomputed.mode in ("full", "moe") else 0)
    numbers = range(1, MOST + 1)
    chunks = fewest({n: forwards * costs.forward_s(rows, n) + costs.backward_s(rows, n) for n in numbers})
    if runtime.rank == 0:
        print(f"moe.overlap_chunks = {chunks}   ({rows} rows of a layer and microbatch)")
        for n in sorted({1, chunks}):
            seconds = costs.forward_s(rows, n), costs.backward_s(rows, n)
            print(f"  in {n}: forward {seconds[0] * 1e3:.3g} ms, backward {seconds[1] * 1e3:.3g} ms")
        for name, line in vars(costs).items():
            print(f"  {name}: {line.latency * 1e6:.3g} us + {line.slope * 1e9:.3g} ns a row")
    stop()
    return 0


if __name__ == "__main__":
    leave(main())
