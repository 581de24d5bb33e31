#!/usr/bin/env python
"""Say where a step's time on the GPU goes: trace one step of a model of layers.py and print a summary.

    python scripts/bench/trace_step.py qwen3 [--layers 4 --samples 8] [--side compiled] [--set training.seq_len=64]

It prints the step's time without and with the profiler and how much of it the GPU was busy; how long the GPU was idle
after the host had waited for it (the one sync of a dropless MoE layer); kernels launched, in total and per layer; the
time of matmuls, attention, SwiGLU, router, loss and other groups; and the 15 kernels that took longest. Each has its
fraction of the roofline: the longer of its operation's FLOPs at the device's peak and its bytes at the device's
bandwidth (titanmoe/plan/hardware), over the time it took. Last comes the step's peak of memory beside what `titanmoe
rehearse` counts for the same run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
import layers  # noqa: E402

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
WIDTH = {"double": 8, "float": 4, "int": 4, "long int": 8, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1}
PRODUCTS = ("mm", "bmm", "linear", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
KEEP_MIB = 3
"""The largest compressed trace that is kept, in MiB."""
GROUPS = {
    "messages": r"nccl",
    "attention": r"flash|fmha|attention|flex|sdpa",  # before products: cuDNN's kernels have wgmma in their names
    "optimizer": r"adam|multi_tensor|foreach",
    "8 bits": r"^_quantise",
    "matrix products": r"gemm|cutlass|nvjet|wgmma|cublas|grouped|^_add_gradient|aten::(mm|bmm|addmm|_scaled_mm) *$",
    "swiglu": r"swiglu|silu",
    "router": r"^_route|^_bfloat16_terms|topk|sigmoid",
    "loss": r"^_loss|loss_slice|cross_entropy|log_softmax|nll",
    "norms": r"norm|rsqrt|mean",
    "rotation (RoPE)": r"rope|rotat|CatArray|complex|^_(join|split|copy_heads)$|^_(join|split|copy_heads) ",
    "embedding": r"embedding",
    "routed rows": r"^_(fetch|sum|assign|regroup)_rows|^_count_choices|^_(put|take)|permute_tokens"
    r"|reorder|scatter|gather|index|sort|cumsum|histogram",
    "copies": r"memcpy|memset|copy",
}
"""Groups of kernels, with a pattern of their names; the first match counts, and kernels without one are 'other'."""


@dataclass
class Kernel:
    """A kernel, copy or memset that ran on the GPU. Times are in microseconds."""

    name: str
    begin: float
    """Time when the kernel began, on the trace's clock."""
    time: float
    """Duration."""
    operation: str = ""
    """Name of the torch operation that launched it; "" if unknown."""
    floor: float = 0.0
    """Least time of that operation by its FLOPs and bytes, at its longest kernel; 0 at its others, and if unknown."""


@dataclass(kw_only=True)
class Summary:
    """The time of a traced step by what the GPU did. Times are in microseconds."""

    step: float
    """Duration of the step."""
    busy: float
    """Time in which a kernel ran."""
    idle_after_waits: float
    """Time in which the GPU had no work because the host had waited for it."""
    waits: int
    """Number of times that the host waited for the GPU, copies of more than 100 microseconds included."""
    kernels: list[Kernel]
    layers: int
    groups: dict[str, list[Kernel]] = field(default_factory=dict)
    """The kernels of each group."""
    attention: list[str] = field(default_factory=list)
    """The names of the kernels that attention ran in."""

    def lines(self, most: int = 15) -> list[str]:
        """Return the summary as lines of text: totals, a table of groups, and a table of the `most` longest kernels."""
        count = len(self.kernels)
        out = [
            f"step {self.step / 1e3:.2f} ms; the GPU worked {self.busy / self.step:.1%} of it",
            f"the host waited for the GPU {self.waits} times; the GPU then stood idle for "
            f"{self.idle_after_waits / 1e3:.2f} ms ({self.idle_after_waits / self.step:.1%})",
            f"{count} kernels, {count / self.layers:.0f} per layer",
            "attention ran in " + (", ".join(name[:70] for name in self.attention) or "no kernel with such a name"),
            "",
            f"{'ms':>9} {'time':>6} {'calls':>6} {'roofline':>9}  group",
            *(self.line(name, kernels) for name, kernels in sort_longest_first(self.groups)),
            "",
            f"{'ms':>9} {'time':>6} {'calls':>6} {'roofline':>9}  kernel (operation)",
        ]
        return out + self.longest(most)

    def line(self, name: str, kernels: list[Kernel]) -> str:
        """Return a table's line on some kernels: milliseconds, fraction of busy time, calls, fraction of the roofline.

        `name` is its last column. The roofline is that of those kernels that have a floor.
        """
        time = sum(kernel.time for kernel in kernels)
        with_floor = [kernel for kernel in kernels if kernel.floor]
        floor = sum(kernel.floor for kernel in with_floor)
        part = f"{floor / sum(kernel.time for kernel in with_floor):.0%}" if with_floor else "-"
        return f"{time / 1e3:9.3f} {time / self.busy:6.1%} {len(kernels):6} {part:>9}  {name}"

    def longest(self, most: int) -> list[str]:
        """Return a table's line for each of the `most` (kernel name, operation) pairs that took longest in total."""
        rows: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            rows[kernel.name, kernel.operation].append(kernel)
        out = []
        for (name, operation), kernels in sort_longest_first(rows)[:most]:
            short = name if len(name) <= 70 else f"{name[:67]}..."
            out.append(self.line(short + f" ({operation})" * bool(operation), kernels))
        return out


Key = TypeVar("Key")


def sort_longest_first(kernels: dict[Key, list[Kernel]]) -> list[tuple[Key, list[Kernel]]]:
    """Return (key, kernels) pairs in the order of the kernels' total time, longest first."""
    return sorted(kernels.items(), key=lambda item: -sum(kernel.time for kernel in item[1]))


def group_of(kernel: str, operation: str) -> str:
    """Return the first group of GROUPS whose pattern fits a kernel, or the torch operation that launched it.

    Returns "other" if there is none.
    """
    words = f"{kernel} {operation}"
    return next((name for name, fits in GROUPS.items() if re.search(fits, words, re.IGNORECASE)), "other")


def elements(dims: Any) -> int:
    """Return the number of elements of a tensor by its sizes; 0 if `dims` is empty or has other than integers."""
    return math.prod(dims) if dims and all(isinstance(d, int) for d in dims) else 0


def floor(operation: dict[str, Any], peak: float, bandwidth: float) -> float:
    """Return the least microseconds that an operation can take by its FLOPs and the bytes of its inputs; 0 if unknown.

    It is 0 for attention, indexing and all that is not aten's, such as our own autograd functions: a trace has neither
    attention's mask, nor which rows an index selects, nor what these functions read besides their arguments.

    Args:
        operation: the operation's event in the trace.
        peak: The device's FLOP/s.
        bandwidth: The device's bytes per second.
    """
    if re.match(r"(?!aten::)|.*(attention|index|gather|scatter)", operation["name"]):
        return 0.0
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
    """Summarize the trace of a step; exit with an error if no kernel ran on a GPU.

    Args:
        events: The events of one step, as torch's profiler exports them.
        layers: The number of layers.
        peak: The device's FLOP/s.
        bandwidth: The device's bytes per second.
    """
    events = [e for e in events if e.get("ph") == "X"]
    operations = {
        e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_gpu:
        raise SystemExit("trace_step.py: the trace has no kernel: it needs a CUDA device")
    kernels, longest = [], {}
    for event in sorted(on_gpu, key=lambda e: e["ts"]):
        kernel = Kernel(event["name"], event["ts"], event["dur"])
        number = event.get("args", {}).get("External id")
        if number is not None and number in operations:
            kernel.operation = operations[number]["name"]
            longest[number] = max(kernel, longest.get(number, kernel), key=lambda k: k.time)
        kernels.append(kernel)
    for number, kernel in longest.items():  # an operation may begin with a memset or end with a small reduction
        kernel.floor = floor(operations[number], peak, bandwidth)
    work = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")] + on_gpu
    begin, end = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)

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

    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[group_of(kernel.name, kernel.operation)].append(kernel)
    attention = sorted({kernel.name for kernel in groups.get("attention", []) if not kernel.name.startswith("Mem")})
    return Summary(
        step=end - begin,
        busy=busy,
        idle_after_waits=idle,
        waits=len(waits),
        kernels=kernels,
        layers=layers,
        groups=dict(groups),
        attention=attention,
    )


def traced(options: argparse.Namespace, file: Path) -> tuple[Any, float, float, list[str]]:
    """Train some steps, trace the last one and write the trace to a file, a .json.gz of torch's profiler.

    Returns the config, the device's FLOP/s and bytes per second (infinite if unknown), and lines of text on the time of
    a step without the profiler and on the memory. `options` is the command line.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    from titanmoe.components import COMPONENTS
    from titanmoe.train.launch import read_config
    from titanmoe.train.runtime import start

    recipe = layers.recipe(
        options.shape,
        options.side,
        layers=options.layers,
        batch=options.samples,
        tiny=options.tiny,
        overrides=options.set,
    )
    config = read_config(recipe, 1, COMPONENTS)
    runtime = start(config)
    device, on_gpu = runtime.device, runtime.device.type == "cuda"
    rehearsed = layers.RehearsedPeak(recipe, layers.rehearsed_as(device))
    ours = layers.TitanmoeSide(config, runtime)
    ours.step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    lines = [f"step without the profiler: {layers.seconds(ours.step, device, options.steps) * 1e3:.2f} ms"]
    allocated = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(
        activities=kinds,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(file)),
        record_shapes=True,
    ) as trace:
        for _ in range(2):
            ours.step()
            layers.synchronize(device)
            trace.step()
    counted = rehearsed.result()
    why = f" ({counted['not rehearsed']})" if "not rehearsed" in counted else ""
    lines.append(f"peak of memory: {layers.gib(allocated)} allocated, titanmoe rehearse counts "
                 f"{layers.gib(counted.get('rehearsed_GiB'))}{why}")  # fmt: skip
    gpu = layers.rates(device)
    return config, gpu.peak_bfloat16 if gpu else math.inf, gpu.bandwidth if gpu else math.inf, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="qwen3", choices=layers.SHAPES)
    parser.add_argument("--side", default="titanmoe", choices=[x for x in layers.SIDES if x not in layers.PEERS])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="per microbatch")
    parser.add_argument("--steps", type=int, default=3, help="timed steps without the profiler")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs; also without a GPU")
    parser.add_argument("--set", nargs="*", default=[], help="more options of the run: table.field=value")
    parser.add_argument("--keep", type=Path, help="keep the trace in this file, for https://ui.perfetto.dev")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json.gz")
        config, peak, bandwidth, lines = traced(options, file)
        print(f"{options.shape}, {options.layers} layers, {options.side}", *lines, sep="\n", flush=True)
        with gzip.open(file, "rt") as text:
            events = json.load(text)["traceEvents"]
        if options.keep and file.stat().st_size < KEEP_MIB * 2**20:
            shutil.copy(file, options.keep)
        elif options.keep:
            print(f"the trace has {file.stat().st_size / 2**20:.1f} MiB and is not kept: {KEEP_MIB} are the most")
    if options.tiny and not any(event.get("cat") == "kernel" for event in events):
        print("no GPU, so no kernels")
        return 0
    print("\n".join(summary(events, config.model.num_layers, peak, bandwidth).lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
