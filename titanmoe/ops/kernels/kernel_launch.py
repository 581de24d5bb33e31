"""Helpers that all kernels' launches share; `kernel` makes a launching function an operation of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from titanmoe.ops.kernels import interpreted


def tile(width: int, numbers: int) -> tuple[int, int]:
    """Return the rows and columns of a program that holds so many numbers at a time, for rows of this width."""
    columns = min(triton.next_power_of_2(width), numbers)
    return numbers // columns, columns


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of sums: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def can_run(x: Tensor) -> bool:
    """Return whether kernels can run on this tensor. A rehearsal's is usually on the CPU."""
    return x.is_cuda or interpreted()


def kernel(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function that launches kernels an operation of torch, of this name.

    Compilers, and modes that watch or count, see the operation. Without either the function is called directly: torch's
    dispatcher would take longer than the launch.
    """

    def decorate(launch: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, launch, mutates_args=mutates_args)

        @wraps(launch)
        def call(*args: Any, **kwargs: Any) -> Any:
            watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or not _real(args)
            return (op if watched else launch)(*args, **kwargs)

        call.register_fake = op.register_fake  # type: ignore[attr-defined]
        return call

    return decorate


def _real(args: tuple) -> bool:
    return all(type(x) is Tensor and can_run(x) and not x.is_meta for x in args if isinstance(x, Tensor))
