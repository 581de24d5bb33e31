"""Helpers that all kernels' launches share; `kernel` makes a launching function an operation of torch.

Operations of torch can be compiled and rehearsed; eager calls skip its dispatcher, which costs the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import triton.language as tl
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from titanmoe.ops.kernels import interpreted

_PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that a kernel reads as they are. A parameter of another kind of tensor is of that tensor's type."""


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. On the host, triton.cdiv and triton.next_power_of_2 take 2 us a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, for n above 0."""
    return 1 << (n - 1).bit_length()


def tile_shape(width: int, elements: int) -> tuple[int, int]:
    """Return (rows, columns) of a Triton program's tile of about `elements` elements, powers of two.

    Args:
        width: the number of columns of the tensor; the tile is no wider than the power of two above it.
        elements: the elements of the tile, a power of two.
    """
    columns = min(next_power_of_2(width), elements)
    return elements // columns, columns


def expert_tile(experts: int, elements: int, min_rows: int = 1) -> dict[str, int]:
    """Return a kernel's constants by name: E, the experts; P, their next power of two; ROWS of a tile of P columns.

    Args:
        elements: the elements of the tile, a power of two, or more if `min_rows` rows have more.
    """
    padded = next_power_of_2(experts)
    return {"E": experts, "P": padded, "ROWS": max(min_rows, elements // padded)}


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype in which sums over numbers of this dtype are taken: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def adjacent_numbers(x: Tensor) -> Tensor:
    """Return x, made contiguous if its last dim is strided; other dims may be strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def can_run(x: Tensor) -> bool:
    """Return whether Triton kernels can run on this tensor's device: on GPUs, or on CPUs if Triton interprets."""
    return x.is_cuda or interpreted()


def kernel(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function that launches kernels as a torch operation.

    Compilers and dispatch modes see the operation, and need its shapes: pass a function that allocates the outputs, if
    there are any, to the decorated function's `register_fake`. So do fake and meta tensors. Other calls go to the
    function directly: torch's dispatcher would take longer than the launch.

    Args:
        name: the name of the operation, such as "titanmoe::rotate".
        mutates_args: the names of arguments that it changes in place.
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
    """Return whether kernels can run on all tensors among `args`: plain ones, neither fake nor meta, where they run."""
    return all(type(x) in _PLAIN and can_run(x) and not x.is_meta for x in args if isinstance(x, Tensor))
