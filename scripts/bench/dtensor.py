"""Time a product with a sharded weight on the host, forward and backward: as DTensors, and by local shards.

    python scripts/bench/dtensor.py

This process is rank 0 of 8, and the others do not exist: nothing is sent. The product is of 4 x 8 with 8 x 8 numbers.
The fastest of 20 rounds counts, because other work on the machine only ever adds to a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanmoe.comm.collectives import to_local
from titanmoe.fold import meshes as _registers_the_backend_fake  # noqa: F401


def microseconds(work: Callable[[], object], times: int) -> float:
    """Return the microseconds of a call, by the fastest of 20 rounds of `times` calls."""
    rounds = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append(time.perf_counter() - begin)
    return min(rounds) / times * 1e6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)], src_data_rank=None))
    plain, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8, requires_grad=True)
    replicated_x = DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False).requires_grad_()

    def product(x: Tensor, parameter: nn.Parameter, used: Callable[[nn.Parameter], Tensor]) -> Callable[[], object]:
        """Return a function that multiplies x with a weight, forward and backward.

        `used` makes the tensor to multiply with from `parameter`, the sharded weight.
        """

        def work() -> object:
            y = F.linear(x, used(parameter))
            return torch.autograd.grad(y, (x, parameter), y)

        return work

    cases = {
        "plain tensors": product(x, plain, lambda p: p),
        "the shard, by titanmoe.comm.collectives.to_local": product(x, weight, to_local),
        "the shard, by DTensor.to_local": product(x, weight, lambda p: p.to_local()),
        "DTensors": product(replicated_x, weight, lambda p: p),
    }
    for name, work in cases.items():
        print(f"{microseconds(work, 2 if '--tiny' in sys.argv else 500):6.1f} us  {name}")


if __name__ == "__main__":
    main()
