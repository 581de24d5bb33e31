"""Compiles a recipe's Triton kernels for Hopper without a GPU, and reads registers and memory of the machine code.

Triton compiles a variant of a kernel for each combination of dtypes and constants, and of arguments that are 1 or
divisible by 16, addresses included. So each launch goes through Triton's own code with all arguments, but does not run.
CUDA's allocator aligns every storage to 512 bytes, so a tensor's offset in its storage serves as its address. N rows of
D numbers.
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
"""Name of a kernel, and Triton's compiled object."""
SHARED_MEMORY = 227 * 1024
"""Largest bytes of shared memory of a block on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""


class Hopper:
    """Driver of Triton for a Hopper GPU that does not exist."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "sm_90"

    def get_current_stream(self, device: str) -> int:
        return 0


class Pointer:
    """Stand-in for a tensor, with the dtype and address that Triton reads."""

    def __init__(self, x: Tensor):
        self.dtype, self.address = x.dtype, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return self.address


@contextmanager
def compile_launches() -> Iterator[list[Kernel]]:
    """Return a context in which launches only compile; its list has each compiled kernel once, after it has ended."""
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


def launcher_of(operation: str) -> Callable[..., Any]:
    """Return the function of titanmoe/ops/kernels that launches the kernels of the operation titanmoe::OPERATION."""
    modules = (import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__))
    return next(getattr(module, operation) for module in modules if hasattr(module, operation)).__wrapped__


def shrink(config: Config) -> Config:
    """Return the config with one stage, one or two layers of each kind and one microbatch: the same shapes."""
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


def read_recipe(recipe: Path, *overrides: str) -> tuple[Config, int]:
    """Return a recipe's config with `overrides`, words of a command line, and the recipe's own number of ranks."""
    ranks = recipe_ranks(read_draft([str(recipe)], COMPONENTS))
    return recipe_to_rehearse(["--config", str(recipe), *overrides], ranks, "h100"), ranks


def compile_kernels(recipe: Path, *overrides: str) -> list[Kernel]:
    """Return all kernels that a rank of the recipe launches in a step, compiled.

    Included are those of 8-bit experts, Triton's norms, accumulated weight gradients, moe.force_balance and symm_mem.
    `overrides` are words of a command line, such as "--training.dtype", "float64".
    """
    recipe_config, ranks = read_recipe(recipe, *overrides)
    config, ranks = shrink(recipe_config), ranks // recipe_config.parallelism.pp
    real = FakeRecorder.compute

    def compute(self: FakeRecorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "titanmoe":
            launcher_of(func._overloadpacket.__name__)(*args, **kwargs)
        return real(self, func, args, kwargs)

    with compile_launches() as compiled, mock.patch.object(FakeRecorder, "compute", compute):
        rehearse(config, ranks, 0, "h100")
        # 8-bit experts multiply bfloat16, and take no adapters.
        eight_bits = config.training.mixed_precision_param == "bfloat16" and not config.lora.rank
        others = replace(config.moe, force_balance=True, expert_dtype="fp8" if eight_bits else "compute")
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
    """Resources of a compiled kernel: registers per thread, and bytes of memory."""

    registers: int
    stack: int
    local: int
    shared: int


@cache
def resources(kernel: Any) -> Resources:
    """Return the resources that the kernel's machine code needs, by cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        code = Path(folder, "kernel.cubin")
        code.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", code], check=True, capture_output=True, text=True).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    # The tool's SHARED is what CUDA reserves; Triton asks for its own when it launches.
    return Resources(*map(int, usage), kernel.metadata.shared)


def register_ranges(compiled: list[Kernel]) -> dict[str, str]:
    """Return by kernel the fewest and most registers per thread of its variants, as "32 to 40" or "32"."""
    used: dict[str, set[int]] = {}
    for name, kernel in compiled:
        used.setdefault(name, set()).add(resources(kernel).registers)
    return {name: " to ".join(map(str, sorted({min(of), max(of)}))) for name, of in sorted(used.items())}


if __name__ == "__main__":
    every = [kernel for recipe in sys.argv[1:] for kernel in compile_kernels(Path(recipe))]
    print(f"| kernel | Triton {triton.__version__} |", "|---|---|", sep="\n")
    print(*(f"| `{name}` | {used} |" for name, used in register_ranges(every).items()), sep="\n")
