"""Launches of kernels, compiled for Hopper as they would be on a GPU, and what the machine code takes.

Triton compiles a kernel anew for each combination of dtypes and constants, and of arguments that are 1 or that 16
divides, addresses included: it then reads several numbers at once. So each launch goes through Triton's own code with
all of its arguments, and only does not run. Where memory is, is known without a GPU: CUDA's allocator aligns every
storage to 512 bytes, so an address is a tensor's place in its storage.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from titanmoe.components import COMPONENTS
from titanmoe.config.load import read_draft
from titanmoe.config.schema import Config, Pipeline
from titanmoe.config.world_size import recipe_ranks
from titanmoe.ops import kernels
from titanmoe.ops.kernels import put
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

Kernel = tuple[str, Any]
"""Its name, and what Triton made of it."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""


class Hopper:
    """Triton's driver for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "sm_90"

    def get_current_stream(self, device: str) -> int:
        return 0


class Pointer:
    """What Triton asks of a tensor."""

    def __init__(self, x: Tensor):
        self.dtype, self.address = x.dtype, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return self.address


@contextmanager
def compiling() -> Iterator[list[Kernel]]:
    """Launches compile. Collects the kernels, each once."""
    made: dict[int, Kernel] = {}
    real = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        args, options = (
            [Pointer(x) if isinstance(x, Tensor) else x for x in args],
            {name: Pointer(x) if isinstance(x, Tensor) else x for name, x in options.items()},
        )
        kernel = real(self, *args, grid=grid, warmup=True, **options)
        made[id(kernel)] = f"{self.__module__.rpartition('.')[2]}.{self.__name__}", kernel

    collected: list[Kernel] = []
    with mock.patch.object(driver, "_active", Hopper()), mock.patch.object(JITFunction, "run", run):
        yield collected
    collected += made.values()


def launch(operation: str) -> Callable[..., Any]:
    """The function of titanmoe/ops/kernels that launches kernels for an operation of torch's dispatcher."""
    modules = (import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__))
    return next(getattr(module, operation) for module in modules if hasattr(module, operation)).__wrapped__


def cut(config: Config) -> Config:
    """One stage with a layer or two of each kind, and one microbatch: the same shapes in little time."""
    model, parallelism = config.model, config.parallelism
    batch = config.training.local_batch_size * parallelism.dp_replicate * parallelism.dp_shard
    kinds = max(2 * max(1, model.moe_every), model.full_attention_every)
    return replace(
        config,
        model=replace(model, num_layers=min(model.num_layers, model.num_dense_layers + kinds)),
        parallelism=replace(parallelism, pp=1),
        pipeline=Pipeline(),
        training=replace(config.training, global_batch_size=batch),
    )


def recipe_of(recipe: Path, *overrides: str) -> tuple[Config, int]:
    """Its config, and its number of ranks."""
    ranks = recipe_ranks(read_draft([str(recipe)], COMPONENTS))
    return recipe_to_rehearse(["--config", str(recipe), *overrides], ranks, "h100"), ranks


def kernels_of(recipe: Path, *overrides: str) -> list[Kernel]:
    """All that a rank of the recipe launches in a step, compiled; also what benchmarks, 8 bits, norms by
    Triton, gradients that are accumulated and symm_mem need."""
    whole, ranks = recipe_of(recipe, *overrides)
    config, ranks = cut(whole), ranks // whole.parallelism.pp
    real = FakeRecorder.compute

    def compute(self: FakeRecorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "titanmoe":
            launch(func._overloadpacket.__name__)(*args, **kwargs)
        return real(self, func, args, kwargs)

    with compiling() as compiled, mock.patch.object(FakeRecorder, "compute", compute):
        rehearse(config, ranks, 0, "h100")
        narrow = config.training.mixed_precision_param == "bfloat16"
        others = replace(config.moe, force_balance=True, expert_dtype="fp8" if narrow else "compute")
        others = replace(others, accumulate_weight_gradients=True, kernels="triton")
        rehearse(replace(config, moe=others), ranks, 0, "h100")
        place_N = torch.empty(64, dtype=torch.int64, device="meta")
        compute_dtype = getattr(torch, config.training.mixed_precision_param)
        wide = torch.promote_types(compute_dtype, torch.float32)
        for width, dtype in ((config.model.dim, compute_dtype), (1, wide)):  # rows, and their routing weights
            rows_ND = torch.empty(64, width, dtype=dtype, device="meta")
            put.put_rows(rows_ND, place_N, place_N, 64)
            put.take_rows(rows_ND, place_N)
    return compiled


class Resources(NamedTuple):
    registers: int
    stack: int
    local: int
    shared: int
    """Bytes, as are stack and local."""


@cache
def resources(kernel: Any) -> Resources:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        code = Path(folder, "kernel.cubin")
        code.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", code], check=True, capture_output=True, text=True).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    # The tool's SHARED is what CUDA reserves; Triton asks for its own when it launches.
    return Resources(*map(int, usage), kernel.metadata.shared)


def registers(compiled: list[Kernel]) -> dict[str, str]:
    """Of a thread, the fewest and the most of a kernel's variants."""
    used: dict[str, set[int]] = {}
    for name, kernel in compiled:
        used.setdefault(name, set()).add(resources(kernel).registers)
    return {name: " to ".join(map(str, sorted({min(of), max(of)}))) for name, of in sorted(used.items())}


if __name__ == "__main__":
    every = [kernel for recipe in sys.argv[1:] for kernel in kernels_of(Path(recipe))]
    print(f"| kernel | Triton {triton.__version__} |", "|---|---|", sep="\n")
    print(*(f"| `{name}` | {used} |" for name, used in registers(every).items()), sep="\n")
