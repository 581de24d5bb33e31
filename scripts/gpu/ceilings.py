"""Measure what the device can do at best: memory bandwidth, matmuls of several shapes, kernel launches.

    python scripts/gpu/ceilings.py [--device cuda|cpu] [--json FILE] [--grid]

Matmuls are in bfloat16 on random data. Experts are those of Mixtral-8x7B (4096 x 14336), Qwen3-30B-A3B (2048 x 768)
and gpt-oss (2880 x 2880); grouped matmuls have 65,536 routed tokens, evenly over E experts, forward and both gradients.
`--grid` measures matmuls of many sizes instead, for the planner's curves. On a CPU all sizes are smaller than the names
of the rows say: this only shows that the script runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from rows import Rows, elapsed, median_seconds, without_and_with_backward  # noqa: E402

from titanmoe.moe.grouped_mm import Groups, grouped_product  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--grid", action="store_true", help="measure matmuls of many sizes, and nothing else")
    args = parser.parse_args()
    device, cuda = args.device, args.device == "cuda"
    rows, (scale, narrow) = Rows(args.json), (1, 1) if cuda else (32, 8)
    make = {"device": device, "dtype": torch.bfloat16}

    def copy() -> dict[str, float]:
        source = torch.empty(2**32 // scale**2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        took = median_seconds(lambda: target.copy_(source), device)
        return {"TB/s": 2 * source.nbytes / took / 1e12}

    def product(m: int, n: int, k: int) -> dict[str, float]:
        a, b = torch.randn(m, k, **make), torch.randn(n, k, **make)
        took = median_seconds(lambda: a @ b.T, device)
        return {"TFLOP/s": 2 * m * n * k / took / 1e12, "ms": took * 1e3}

    def grouped(experts: int, hidden: int, dim: int, routed: int = 65536 // scale) -> dict[str, float]:
        x = torch.randn(routed, dim, **make).requires_grad_()
        weight = torch.randn(experts, hidden, dim, **make).requires_grad_()
        count = torch.full((experts,), routed // experts, device=device)
        forward, both = (
            median_seconds(run, device, 10)
            for run in without_and_with_backward(lambda: grouped_product(x, weight, Groups(count)), (x, weight))
        )
        flops = 2 * routed * dim * hidden
        return {"forward TFLOP/s": flops / forward / 1e12, "both TFLOP/s": 3 * flops / both / 1e12, "ms": both * 1e3}

    def launches() -> dict[str, float]:
        x = torch.zeros(1, device=device)

        def many() -> None:
            for _ in range(1000):
                x.add_(1)

        took = median_seconds(many, device, 5)
        wait = sorted(elapsed(x.item) for _ in range(20))[10]
        return {"us a launch": took * 1e3, "us to read a number": wait * 1e6}

    if args.grid:
        widths = [width // narrow for width in (512, 768, 1024, 2048, 4096, 8192, 14336)]
        for m in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
            for n in widths:
                for k in (k for k in widths if m * n * k <= 2**40):
                    rows.check(f"product {m} x {n} x {k}", lambda sizes=(m // scale, n, k): product(*sizes))
        for experts in (8, 32, 128):
            for each in (32, 128, 512, 2048):  # rows of an expert
                for dim, hidden in ((2048, 768), (4096, 1536), (7168, 2048), (4096, 14336)):
                    sizes = experts, hidden // narrow, dim // narrow, max(8, each // scale) * experts
                    name = f"grouped E={experts} rows={each} {dim} -> {hidden}"
                    if experts * dim * hidden < 2**32:
                        rows.check(name, lambda sizes=sizes: grouped(*sizes))
        return rows.status()
    rows.check("copy", copy)
    size = 8192 // scale
    rows.check("product 8192 x 8192 x 8192", lambda: product(size, size, size))
    for m, n, k in ((32768, 768, 2048), (32768, 2048, 768), (32768, 2880, 2880), (32768, 4096, 2048)):
        rows.check(f"product {m} x {n} x {k}", lambda sizes=(m, n, k): product(*(size // narrow for size in sizes)))
    for experts, dim, hidden in ((8, 4096, 14336), (16, 2048, 768), (32, 2880, 2880), (128, 2048, 768)):
        sizes = experts, hidden // narrow, dim // narrow
        rows.check(f"grouped E={experts} {dim} -> {hidden}", lambda sizes=sizes: grouped(*sizes))
    rows.check("launches", launches)
    return rows.status()


if __name__ == "__main__":
    sys.exit(main())
