"""Time the attention of one layer by kernel and mask, forward and backward, beside plain float64 results.

    python scripts/gpu/attention_backends.py [--device cuda|cpu] [--json FILE] [--seconds S]

Shapes of Qwen3-30B-A3B: 32 heads of 128, 4 key heads, bfloat16. "causal" has 8 sequences of 4,096, "packed" the same
with documents of log-normal lengths, "long" one of 32,768, "window" 128 positions with sinks as in gpt-oss (64 and 8
heads of 64). TFLOP/s count the pairs that see each other: 4 FLOPs a pair and channel forward, 2.5 times that backward.
The error is that of the output against float64, over the largest number, on the first 1,024 positions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from rows import Rows, median_seconds, without_and_with_backward  # noqa: E402

from titanmoe.comm.collectives import NO_GROUP  # noqa: E402
from titanmoe.mask import CAUSAL, Mask, ends, spans  # noqa: E402
from titanmoe.models.attention import plain_attention  # noqa: E402
from titanmoe.parallel import attention_kernel  # noqa: E402
from titanmoe.parallel.choose_attention import attend  # noqa: E402
from titanmoe.parallel.context import Placement  # noqa: E402
from titanmoe.parallel.flex import Masks, flex_attention_over  # noqa: E402


class Case(NamedTuple):
    """An attention to time: its mask, kernel and shape."""

    mask: str
    kernel: str
    """An `attention_kernel`, "flex", or "plain" for the backend of devices without flex_attention."""
    samples: int = 8
    length: int = 4096


CASES = (
    Case("causal", "cudnn"),
    Case("causal", "fa2"),
    Case("causal", "flex"),
    Case("packed", "flex"),
    Case("packed", "plain"),
    Case("window", "flex"),
    Case("window", "plain"),
    Case("long", "cudnn", 1, 32768),
    Case("long", "fa2", 1, 32768),
    Case("packed", "flex", 1, 32768),
)


def documents(samples: int, length: int, device: str) -> Mask:
    """Return the mask of samples that are filled with documents of log-normal lengths, median 512 tokens.

    Each sample has `length` tokens and other documents, the same in every call; the mask is on `device`.
    """
    random = np.random.default_rng(0)
    rows = [
        np.repeat(np.arange(length), random.lognormal(np.log(512), 1.0, length).clip(16).astype(int))[:length]
        for _ in range(samples)
    ]
    on_host = spans(ends(torch.from_numpy(np.stack(rows))))
    return on_host.to(lambda x: x.to(device))


def run(case: Case, device: str) -> dict[str, Any]:
    """Time one case and return by name its milliseconds and TFLOP/s, forward and with backward, and its "error".

    Returns only a "note" if the kernel is missing. On a CPU samples and length are 1/16, and all kernels are "plain".

    Raises:
        ValueError: if the output is wrong.
    """
    shrink = 1 if device == "cuda" else 16
    samples, length = max(1, case.samples // shrink), case.length // shrink
    heads, key_heads, width = (64, 8, 64) if case.mask == "window" else (32, 4, 128)
    make = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(samples, length, n, width, **make).requires_grad_() for n in (heads, key_heads, key_heads))
    sinks = torch.randn(heads, **make).requires_grad_() if case.mask == "window" else None
    mask = documents(samples, length, device) if case.mask == "packed" else CAUSAL
    if sinks is not None:
        mask = Mask(window=min(128, length // 2))
    kernel = case.kernel if case.kernel in attention_kernel.MAJORS else "fa2"
    if case.kernel == kernel and (lack := attention_kernel.missing(kernel, width)):
        return {"note": f"unsupported: {lack}"}
    attention_kernel.use(kernel)
    one = Placement(1, zigzag=False)
    layout = {"masks": Masks(one, 0), "group": NO_GROUP}

    def forward() -> torch.Tensor:
        if case.kernel == "flex" and device == "cuda":
            return flex_attention_over(q, k, v, mask, sinks, **layout)
        return attend(q, k, v, mask, sinks, backend="plain", cp_kind="allgather", placement=one, **layout)

    leaves = [x for x in (q, k, v, sinks) if x is not None]
    begin, both = (median_seconds(call, device, 10) for call in without_and_with_backward(forward, leaves))
    flops = 4 * mask.count(length, samples) * heads * width
    near = min(length, 1024)
    with torch.no_grad():
        exact = plain_attention(
            *(x[:1, :near].double().transpose(1, 2) for x in (q, k, v)),
            Mask(None if mask.until_BL is None else mask.until_BL[:1, :near], None, mask.window),
            sinks.double() if sinks is not None else None,
        ).transpose(1, 2)
        error = float((forward()[:1, :near].double() - exact).abs().max() / exact.abs().max())
    if not error < 0.02:
        raise ValueError(f"the output is off by {error:.3g} of its largest number")
    return {
        "forward ms": begin * 1e3,
        "both ms": both * 1e3,
        "forward TFLOP/s": flops / begin / 1e12,
        "both TFLOP/s": 3.5 * flops / both / 1e12,
        "error": error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    args = parser.parse_args()
    rows = Rows(args.json, args.seconds)
    for case in CASES:
        rows.check(f"{case.mask} {case.length} {case.kernel}", lambda case=case: run(case, args.device))
    return rows.status()


if __name__ == "__main__":
    sys.exit(main())
