"""Time RMSNorm of wide and of narrow rows, by torch and by Triton, forward and backward.

    python scripts/gpu/norms.py [--device cuda|cpu] [--json FILE]

Rows are those of 32,768 tokens of Qwen3-30B-A3B: 2,048 numbers for a block's norms, 36 times 128 for queries and keys,
in bfloat16. GB/s count each tensor read or written once: x and y forward; x and the gradients of y and x backward.
The error is the largest of y, dx and dw of 4,096 rows against float64, over the largest number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import rms_norm as torchs_norm

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from rows import Rows, median_seconds  # noqa: E402

from titanmoe.models.layers import plain_norm  # noqa: E402
from titanmoe.ops import kernels  # noqa: E402

CHOICES = ((16, 16), (16, 20), (8, 32), (32, 12))
"""Pairs of elements per thread and warps per multiprocessor; titanmoe/ops/kernels/rms_norm.py uses the second."""


def seconds(run: Callable[[], Any], device: str) -> float:
    """Return the median seconds of a call, after untimed ones; on a GPU those of its kernels alone.

    They are queued behind a pause. `device` is "cuda" or "cpu".
    """
    run()
    if device == "cuda":
        torch.cuda._sleep(10**8)
    return median_seconds(run, device)


def run(rows: int, width: int, choice: tuple[int, int] | None, device: str) -> dict[str, Any]:
    """Time one implementation of RMSNorm; return GB/s and microseconds forward and backward, and the error, by name.

    Returns only a "note" if the implementation is missing. Raises AssertionError if the error is 0.02 or more.

    Args:
        rows: number of rows of the input.
        width: numbers in a row.
        choice: one of CHOICES, which Triton's kernel then uses in this process; None for torch's implementation.
        device: "cuda" or "cpu".
    """
    norm = lambda x, weight: torchs_norm(x, weight.shape, weight, 1e-6)  # noqa: E731
    if choice is not None:
        if lack := kernels.missing(device == "cuda"):
            return {"note": f"unsupported: {lack}"}
        from titanmoe.ops.kernels import rms_norm

        rms_norm.NUMBERS, rms_norm.WARPS = choice[0], 132 * choice[1]
        norm = lambda x, weight: rms_norm.rms_norm(x, weight, 1e-6)  # noqa: E731
    x, grad, weight = (torch.randn(n, width, device=device, dtype=torch.bfloat16) for n in (rows, rows, 1))
    leaves = [x.requires_grad_(), weight[0].requires_grad_()]
    few, exact = ([t.detach()[:4096].to(dtype).requires_grad_() for t in leaves] for dtype in (x.dtype, torch.float64))
    y, want = norm(*few), plain_norm(*exact, 1e-6)
    got = [y.detach(), *torch.autograd.grad(y, few, grad[:4096])]
    true = [want.detach(), *torch.autograd.grad(want, exact, grad[:4096].double())]
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, true, strict=True))
    assert error < 0.02, f"y, dx or dw is off by {error:.3g} of its largest number"
    y = norm(*leaves)
    begin = seconds(lambda: norm(*leaves), device)
    backward = seconds(lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True), device)
    rates = {"forward GB/s": 2 * x.nbytes / begin / 1e9, "backward GB/s": 3 * x.nbytes / backward / 1e9}
    return rates | {"forward us": begin * 1e6, "backward us": backward * 1e6, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, shrink = Rows(args.json), 1 if args.device == "cuda" else 4096
    for count, width in ((32768, 2048), (32768 * 36, 128)):
        for choice in (None, *CHOICES):
            name = "torch" if choice is None else f"triton {choice[0]} x {choice[1]}"
            rows.check(f"{count} x {width} {name}", partial(run, count // shrink, width, choice, args.device))
    return rows.status()


if __name__ == "__main__":
    sys.exit(main())
