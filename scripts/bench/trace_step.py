#!/usr/bin/env python
"""Where a step's time on the GPU goes, as text: one traced step of a model of layers.py.

    python scripts/bench/trace_step.py qwen3 [--layers 4 --samples 4] [--side compiled] [--keep trace.json.gz]

Prints the step's time and how much of it the GPU worked; how long it stood idle after the host had waited for it (the
one sync of a dropless MoE layer); kernels launched, in all and per layer; the share of norms, rotation and other
regions; and the 15 kernels that took longest, each with the part of the roofline that its operation's shapes allow: the
longer of its FLOPs at the device's peak and its bytes at the device's bandwidth, over what it took.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
WIDTH = {"double": 8, "float": 4, "int": 4, "long int": 8, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1}
PRODUCTS = ("mm", "bmm", "linear", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
GROUPS = {
    "matrix products": r"gemm|cutlass|nvjet|wgmma|cublas|grouped",
    "attention": r"flash|fmha|attention|flex",
    "norms": r"norm|rsqrt|mean",
    "rotation (RoPE)": r"rope|rotat|CatArray|complex",
    "routed rows": r"to_rows|to_tokens|reorder|scatter|gather|index|sort|cumsum|histogram",
    "optimizer": r"adam|multi_tensor|foreach",
    "messages": r"nccl",
}
"""Kinds of kernels, by a pattern of their names; the first match counts, and without one it is 'other'."""


@dataclass
class Kernel:
    name: str
    begin: float
    """Microseconds, as all times here."""
    time: float
    operation: str = ""
    floor: float = 0.0


@dataclass
class Summary:
    step: float
    busy: float
    idle_after_waits: float
    waits: int
    kernels: list[Kernel]
    layers: int
    shares: dict[str, float] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    """The kernels that it ran in."""

    def lines(self, most: int = 15) -> list[str]:
        count = len(self.kernels)
        out = [
            f"step {self.step / 1e3:.2f} ms; the GPU worked {self.busy / self.step:.1%} of it",
            f"the host waited for the GPU {self.waits} times; the GPU then stood idle for "
            f"{self.idle_after_waits / 1e3:.2f} ms ({self.idle_after_waits / self.step:.1%})",
            f"{count} kernels, {count / self.layers:.0f} per layer",
            "attention ran in " + (", ".join(name[:70] for name in self.attention) or "no kernel with such a name"),
            "",
            *(f"{share:7.1%}  {name}" for name, share in sorted(self.shares.items(), key=lambda item: -item[1])),
            "",
            f"{'ms':>9} {'share':>6} {'calls':>6} {'roofline':>9}  kernel (operation)",
        ]
        return out + self.longest(most)

    def longest(self, most: int) -> list[str]:
        rows: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            rows[kernel.name, kernel.operation].append(kernel)
        out = []
        for (name, operation), all_of in sorted(rows.items(), key=lambda row: -sum(k.time for k in row[1]))[:most]:
            time, floor = sum(k.time for k in all_of), sum(k.floor for k in all_of)
            part = f"{floor / time:.0%}" if floor else "-"
            short = name if len(name) <= 70 else f"{name[:67]}..."
            out.append(
                f"{time / 1e3:9.3f} {time / self.busy:6.1%} {len(all_of):6} {part:>9}  {short}"
                + f" ({operation})" * bool(operation)
            )
        return out


def elements(dims: Any) -> int:
    return math.prod(dims) if dims and all(isinstance(d, int) for d in dims) else 0


def floor(operation: dict[str, Any], peak: float, bandwidth: float) -> float:
    """The least microseconds that an operation on these inputs can take; 0 if the trace does not have the inputs."""
    args = operation.get("args", {})
    dims, types = args.get("Input Dims", []), args.get("Input type", [])
    read = sum(elements(d) * WIDTH.get(t, 0) for d, t in zip(dims, types, strict=False))
    flops = 0.0
    if operation["name"].removeprefix("aten::") in PRODUCTS:
        matrices = [d for d in dims if len(d) >= 2 and elements(d)][-2:]
        if len(matrices) == 2:
            a, b = matrices
            shared = a[-1]
            columns = elements(b) // shared // (b[0] if len(b) == 3 else 1)
            flops = 2.0 * elements(a) * columns
    return max(flops / peak, read / bandwidth) * 1e6


def summary(events: Iterable[dict[str, Any]], layers: int, peak: float, bandwidth: float) -> Summary:
    """peak: FLOP/s, bandwidth: bytes per second. events: of one step, as torch's profiler exports them."""
    events = [e for e in events if e.get("ph") == "X"]
    operations = {
        e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e["args"]
    }
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_gpu:
        raise SystemExit("trace_step.py: the trace has no kernel: it needs a CUDA device")
    kernels, counted = [], set()
    for event in sorted(on_gpu, key=lambda e: e["ts"]):
        kernel = Kernel(event["name"], event["ts"], event["dur"])
        number = event.get("args", {}).get("External id")
        if number is not None and (operation := operations.get(number)):
            kernel.operation = operation["name"]
            if number not in counted:  # of an operation's several kernels, the first has its floor
                kernel.floor = floor(operation, peak, bandwidth)
                counted.add(number)
        kernels.append(kernel)
    begin = min(min(e["ts"] for e in events), kernels[0].begin)
    end = max(e["ts"] + e["dur"] for e in events)

    spans, busy, reached = [], 0.0, -math.inf
    for kernel in kernels:  # several streams may work at once
        finish = kernel.begin + kernel.time
        if kernel.begin > reached:
            spans.append((reached, kernel.begin))
        busy += max(0.0, finish - max(reached, kernel.begin))
        reached = max(reached, finish)
    waits = [e for e in events if e["name"] in WAITS or (e["name"] == "cudaMemcpyAsync" and e["dur"] > 100)]
    over = [e["ts"] + e["dur"] for e in waits]
    idle = sum(stop - start for start, stop in spans if any(start <= moment <= stop for moment in over))

    shares: dict[str, float] = defaultdict(float)
    attention = set()
    total = sum(kernel.time for kernel in kernels)
    for kernel in kernels:
        words = f"{kernel.name} {kernel.operation}"
        group = next((name for name, fits in GROUPS.items() if re.search(fits, words, re.IGNORECASE)), "other")
        shares[group] += kernel.time / total
        if group == "attention":
            attention.add(kernel.name)
    return Summary(end - begin, busy, idle, len(waits), kernels, layers, dict(shares), sorted(attention))


def traced(options: argparse.Namespace, file: Path) -> tuple[Any, float, float]:
    """Trains three steps and traces the last; returns the config, and the device's peak and bandwidth."""
    import layers
    import torch
    from torch.profiler import ProfilerActivity, profile

    from titanmoe.parts import PARTS
    from titanmoe.train.launch import read
    from titanmoe.train.metrics import peak_flops
    from titanmoe.train.runtime import start

    config = read(
        layers.recipe(options.shape, options.side, options.layers, options.samples, options.tiny, []), 1, PARTS
    )
    runtime = start(config)
    ours = layers.Ours(config, runtime)
    for _ in range(2):
        ours.step()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime.device.type == "cuda" else [])]
    with profile(activities=kinds, record_shapes=True) as trace:
        ours.step()
        layers.synchronize(runtime.device)
    trace.export_chrome_trace(str(file))
    name = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "cpu"
    peak, bandwidth = peak_flops(name, "bfloat16"), layers.known(layers.BANDWIDTH, runtime.device)
    return config, peak or math.inf, bandwidth or math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="qwen3", choices=["mixtral", "qwen3", "qwen2", "deepseek"])
    parser.add_argument("--side", default="titanmoe", choices=["titanmoe", "compiled", "fp8", "plain"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="per microbatch")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs on a GPU")
    parser.add_argument("--keep", type=Path, help="keep the trace in this file, for https://ui.perfetto.dev")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.keep or Path(folder, "trace.json.gz")
        config, peak, bandwidth = traced(options, file)
        with gzip.open(file, "rt") as text:
            found = summary(json.load(text)["traceEvents"], config.model.num_layers, peak, bandwidth)
    print(f"{options.shape}, {options.layers} layers, {options.side}")
    print("\n".join(found.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
