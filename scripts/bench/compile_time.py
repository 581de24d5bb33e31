"""Time how long torch.compile takes for each distinct block of a model, on one device.

    python scripts/bench/compile_time.py [--shapes qwen3 gpt_oss ...] [--cases "inductor cold" ...] [--json FILE]
    python scripts/bench/compile_time.py --tiny     the same with tiny shapes, for a machine without a GPU

Blocks are those that titanmoe/parallel/compiled.py makes graphs of, in shapes of scripts/bench/layers.py. Each is
called alone, forward and backward; its seconds are the first call's less the second's. A case is a process with empty
caches, but "inductor warm" has those of "inductor cold". "eager" compiles only Triton kernels and flex_attention;
"first graph", a product and a sum, loads the compiler. B samples, L positions, D model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
from layers import SHAPES, figures, gpu_name, lines_of, make_layers, recipe, synchronize, tell, versions  # noqa: E402
from torchtitan_side import reason  # noqa: E402

CASES = {"eager": "", "inductor cold": "inductor", "inductor warm": "inductor", "aot_eager": "aot_eager"}
"""The backend of each case, in the order of the processes; "" compiles nothing."""
LAYERS = {"gpt_oss": 2, "deepseek": 2}
"""The number of layers of shapes that have two kinds of layers; other shapes have 1."""
SAMPLES = 1


def read_shape(shape: str, tiny: bool, backend: str) -> Any:
    """Return the config of a model of SHAPES whose blocks are compiled by a backend; "" compiles nothing.

    `tiny` shrinks the model.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.train.launch import read_config

    options = ["compile.enable=true", f"compile.backend={backend}"] if backend else []
    if shape == "deepseek":
        options += ["model.num_dense_layers=1", *["model.dense_hidden=64"] * tiny]
    overrides = recipe(shape, "titanmoe", layers=LAYERS.get(shape, 1), batch=SAMPLES, tiny=tiny, overrides=options)
    return read_config(overrides, 1, COMPONENTS)


def make_blocks(config: Any, device: Any) -> tuple[Any, dict[str, Callable[[], None]]]:
    """Build the model; return it and, by name, a call of each distinct block, forward and backward.

    A call ends when the device has finished. Names are such as "attention, window 128", "MoE layer" and "head".
    """
    import torch

    from titanmoe.config.blocks import window

    transformer, x_BLD, rope, tokens, labels_BL = make_layers(config, device, range(config.model.num_layers), SAMPLES)

    def both(block: Any, *inputs: Any) -> None:
        """Run a block forward and backward."""
        y = block(x_BLD, *inputs)
        torch.autograd.grad(y, [x_BLD, *block.parameters()], torch.ones_like(y), allow_unused=True)
        synchronize(device)

    calls: dict[str, Callable[[], None]] = {}
    for number, block in transformer.blocks().items():
        width = window(config.model, number)
        name = f"attention, window {width}" if width else "attention"
        calls.setdefault(name, partial(both, block.attention, rope, tokens.mask))
        if block.moe is not None:
            calls.setdefault("MoE layer", partial(both, block.moe, tokens))
        else:
            calls.setdefault("dense layer", partial(both, block.ffn))
    return transformer, calls | {"head": partial(both, transformer.head, labels_BL)}


def first_call(work: Callable[[], Any]) -> float:
    """Call `work` twice; return how many seconds longer the first call took."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times[0] - times[1]


def time_case(shape: str, case: str, tiny: bool, device_name: str) -> None:
    """Time compiling all blocks of a model in this process; print each figure as a line of JSON.

    Args:
        shape: name of the model.
        case: a key of CASES.
        tiny: whether to shrink the model.
        device_name: "cuda" or "cpu"; "" for a GPU if there is one.
    """
    import torch
    from torch._dynamo.utils import counters

    from titanmoe.parallel.compiled import compile_model

    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = read_shape(shape, tiny, CASES[case])
    transformer, blocks = make_blocks(config, device)
    x = torch.ones(8, 8, device=device, requires_grad=True)

    def product() -> Any:
        return (x @ x).sum()

    compiled = torch.compile(product, backend=CASES[case]) if CASES[case] else product
    compile_model(transformer, config, False)
    for name, work in {"first graph": lambda: compiled().backward(), **blocks}.items():
        counters.clear()
        row = {"device": gpu_name(device) or "cpu", "block": name}
        try:
            row["s"] = first_call(work)
        except Exception as error:
            traceback.print_exc()
            row["failed"] = reason(error)
        row |= {"graphs": counters["stats"]["unique_graphs"], "fx_hits": counters["inductor"]["fxgraph_cache_hit"]}
        tell(**row, aot_hits=counters["aot_autograd"]["autograd_cache_hit"])


def measure(shape: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each case and block of a model, as soon as it is measured, each case in a process of its own.

    A row has "shape", "case", "block", and the seconds "s" or the reason "failed". A process that fails or is late
    gives a row for the block "the rest".
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for case in (case for case in CASES if case in args.cases):
            caches = Path(folder, CASES[case] or case)
            command = ["env", f"TORCHINDUCTOR_CACHE_DIR={caches}", f"TRITON_CACHE_DIR={caches / 'triton'}"]
            command += [sys.executable, str(HERE), "--one", shape, case, "--device", args.device]
            try:
                for line in lines_of(command + ["--tiny"] * args.tiny, args.limit):
                    if measured := figures(line):
                        yield {"shape": shape, "case": case} | measured
            except (TimeoutError, ChildProcessError) as error:
                yield {"shape": shape, "case": case, "block": "the rest", "failed": str(error)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `measure` as a Markdown table of seconds, with a column for each case; "-" where it failed."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [f"| shape | block | {' | '.join(cases)} |", "|---" * (2 + len(cases)) + "|"]
    for shape, block in dict.fromkeys((row["shape"], row["block"]) for row in rows):
        of = {row["case"]: row.get("s") for row in rows if (row["shape"], row["block"]) == (shape, block)}
        seconds = " | ".join("-" if of.get(case) is None else f"{of[case]:.1f}" for case in cases)
        lines.append(f"| {shape} | {block} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "gpt_oss", "deepseek"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="", help="cpu or cuda; without it, a GPU if there is one")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one case of one shape, then it is killed")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a machine without a GPU")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return time_case(*args.one, args.tiny, args.device)
    about = versions() | {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    about["command"] = shlex.join(["python", "scripts/bench/compile_time.py", *sys.argv[1:]])
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its process ends too
    for shape in args.shapes:
        for row in measure(shape, args):
            rows.append(row)
            result = f"failed: {row['failed']}" if "failed" in row else f"{row['s']:.2f} s"
            print(f"{shape} {row['case']}: {row['block']} {result}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
    print(table(rows))
    if any("failed" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
