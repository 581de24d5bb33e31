"""What all kernels' launches share."""

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
    """Rows and columns of a program that holds that many numbers at a time, for rows of that width."""
    columns = min(triton.next_power_of_2(width), numbers)
    return numbers // columns, columns


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def can_run(x: Tensor) -> bool:
    """Whether kernels can run on this tensor. A rehearsal's is usually on the CPU."""
    return x.is_cuda or interpreted()


def kernel(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function that launches kernels becomes torch's operation of that name, for compilers and for modes
    that watch or count. Without either it is called directly: torch's dispatcher would take longer than the launch.
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
