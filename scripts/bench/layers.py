"""Time how fast real layers train on one device: MFU of full steps, then each module of a layer against its floor.

    python scripts/bench/layers.py [--shapes mixtral qwen3 ...] [--sides titanmoe compiled fp8 plain] [--json FILE]
    python scripts/bench/layers.py --tiny      the same on CPUs with tiny shapes: checks that it runs, measures nothing

SHAPES are published models with as few layers as fit an H100, SIDES implementations: "plain" has torch's operations
instead of kernels, "torchtitan-eager" no CUDA graphs. A step is 32,768 tokens in sequences of 4,096, bf16, dropless,
nothing recomputed; MFU counts the FLOPs of titanmoe/models/count.py. A floor is the longer of FLOPs at the device's
peak and bytes at its bandwidth (titanmoe/plan/hardware); "dispatch" finds each choice's row. B samples, L positions, T
tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from titanmoe.plan.devices import Device

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
from torchtitan_side import NotCompared, Side, reason  # noqa: E402


class Shape(NamedTuple):
    """A published model with fewer layers or experts, so that it fits on one device."""

    model: str
    """Options of [model], separated by spaces."""
    attempts: list[tuple[int, int]]
    """The numbers of layers and of samples per microbatch to try, the largest first."""
    goal: float | None = None
    """The MFU to reach."""


SHAPES = {
    # As on one of 4 ep ranks, with both experts of a token; of 8, with all 8 of a token. With all experts on one GPU,
    # AdamW and copies of weights would be a large part of a step of Qwen3.
    "mixtral": Shape("family=mixtral size=8x7b num_experts=2", [(3, 8), (3, 4), (2, 4)], 0.55),
    "qwen3": Shape("family=qwen3_moe size=30b_a3b num_experts=16", [(6, 8), (6, 4), (3, 4)], 0.40),
    # As on one of 4 ep ranks: 8 of 32 experts, including all 4 of a token. Every other layer has a window.
    "gpt_oss": Shape("family=gpt_oss size=20b num_experts=8", [(4, 8), (4, 4), (2, 4)]),
    "qwen2": Shape("family=qwen2_moe size=57b_a14b", [(1, 4), (1, 2)]),
    # As on one of 8 ep ranks: 32 of 256 experts, including all 8 of a token.
    "deepseek": Shape("family=deepseek_v3 size=671b num_experts=32 num_dense_layers=0 mtp_depth=0", [(1, 4), (1, 2)]),
}
SIDES = {
    "titanmoe": [],
    "compiled": ["--compile.enable", "true"],
    "fp8": ["--moe.expert_dtype", "fp8"],
    "plain": ["--moe.kernels", "torch", "--moe.grouped_mm", "loop"],
    "torchtitan": [],
    "torchtitan-eager": [],
}
PEERS = {"torchtitan", "torchtitan-eager"}
PEER_SHAPES = ("qwen3", "deepseek")
"""The shapes whose layers TorchTitan has."""
PEER_GOAL, PEER_SECONDS = 1.2, 75
"""The goal for titanmoe's tokens per second over the peer's, and the seconds that one model of the peer may take."""
ROUTINGS = ("balanced", "learned")
SEQ_LEN, SAMPLES = 4096, 8
TINY = (
    "dim=64 num_heads=4 num_kv_heads=4 head_dim=16 expert_hidden=32 vocab_size=256 num_experts=8 top_k=2 num_groups=1"
)
TINY_ONLY = {
    "deepseek": "kv_lora_rank=16 q_lora_rank=16 qk_nope_head_dim=12 qk_rope_head_dim=4 v_head_dim=16 shared_hidden=32",
    "qwen2": "shared_hidden=32",
}


def recipe(name: str, side: str, *, layers: int, batch: int, tiny: bool, overrides: list[str]) -> list[str]:
    """Return the command line's options that train a model of SHAPES on a side, with synthetic data without end.

    A step has SAMPLES samples.

    Args:
        name: the model.
        side: the implementation, such as "compiled" or "torchtitan".
        layers: number of layers.
        batch: number of samples in a microbatch.
        tiny: whether to shrink the model.
        overrides: more options, as table.field=value.
    """
    words = [*SHAPES[name].model.split(), f"num_layers={layers}"]
    seq_len = SEQ_LEN
    if tiny:
        words += TINY.split() + TINY_ONLY.get(name, "").split() + ["top_groups=1"]
        seq_len = 32
    # CPUs have no products in 8 bits.
    of_side = ["--moe.expert_dtype", "fp8_emulated"] if tiny and side == "fp8" else SIDES[side]
    options = [f"--model.{word}" for word in words] + of_side
    options += [f"--training.{word}" for word in (f"seq_len={seq_len}", f"local_batch_size={batch}")]
    options += [f"--training.global_batch_size={SAMPLES}", "--training.steps=1000000", "--data.source=synthetic"]
    return options + [f"--{word}" for word in overrides]


def synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: Any, times: int) -> float:
    """Return the mean seconds of `times` calls of `work`, after two untimed ones. Waits for the device."""
    for _ in range(2):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


def gpu_name(device: Any) -> str:
    """Return what the driver calls the GPU; "" for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def rates(device: Any) -> Device | None:
    """Return the planner's rates of this GPU (titanmoe/plan/hardware); None for a CPU or an unknown GPU."""
    from titanmoe.plan.devices import known_device

    return known_device(gpu_name(device))


class RehearsedPeak:
    """A process, started at once, that rehearses a run on one rank, beside this one, to count its peak of memory.

    `options` of the run are from `recipe`, `hardware` from `rehearsed_as`.
    """

    def __init__(self, options: list[str], hardware: str):
        self.file = Path(tempfile.mkdtemp()) / "rehearsal.json"
        command = [sys.executable, "-m", "titanmoe", "rehearse", "--ranks", "1", "--hardware", hardware]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--json", str(self.file), *options], cwd=HERE.parents[2], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def result(self, seconds: float = 60) -> dict[str, Any]:
        """Wait `seconds` at most for the process; return {"rehearsed_GiB": peak}, or {"not rehearsed": reason}."""
        try:
            _, errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return {"not rehearsed": f"it took longer than {seconds:.0f} s"}
        if self.process.returncode:
            return {"not rehearsed": (errors.strip().splitlines() or ["it failed"])[-1]}
        return {"rehearsed_GiB": json.loads(self.file.read_text())["ranks"][0]["memory"]["peak"] / 2**30}


def rehearsed_as(device: Any) -> str:
    """Return the name of the hardware to rehearse: this GPU, an H100 for a GPU without rehearsal, or "cpu"."""
    from titanmoe.ops.device import HARDWARE

    name = device_rates.name if (device_rates := rates(device)) else ""
    return name if name in HARDWARE else "h100" if device.type == "cuda" else "cpu"


class Layers(NamedTuple):
    """Some layers of a model with random weights, the head, and inputs for them."""

    transformer: Any
    x_BLD: Any
    rope: Any
    tokens: Any
    labels_BL: Any


def make_layers(config: Any, device: Any, numbers: Sequence[int], samples: int) -> Layers:
    """Build layers of the model and its head in bfloat16, and random inputs, on one rank.

    `numbers` are those of the layers in the model, from 0 on; `samples` is B of the inputs.
    """
    import torch

    from titanmoe.comm.collectives import NO_GROUP
    from titanmoe.config.blocks import rotary_width
    from titanmoe.models.layers import rope_angles
    from titanmoe.models.transformer import Transformer
    from titanmoe.parallel.choose_attention import apply_context_parallel
    from titanmoe.tokens import Tokens

    model, L = config.model, config.training.seq_len
    with torch.device(device):
        transformer = Transformer(config, 1, torch.bfloat16, layers=numbers)
        for weight in transformer.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        for buffer in transformer.buffers():
            buffer.zero_()
        apply_context_parallel(transformer, config.parallelism, NO_GROUP)
        x_BLD = torch.randn(samples, L, model.dim, dtype=torch.bfloat16).requires_grad_()
        index = torch.arange(samples * L)
        labels_BL = (index % model.vocab_size).view(samples, L)
        everyone = torch.ones_like(index, dtype=torch.bool)
        tokens = Tokens(index.view(samples, L) % L, index, index // L, everyone, torch.tensor(0))
        for moe in transformer.moe_layers().values():
            moe.begin_step(1, torch.tensor(float(len(index))), samples)
    rope = rope_angles(tokens.position_BS, model, rotary_width(model), torch.bfloat16)
    return Layers(transformer, x_BLD, rope, tokens, labels_BL)


def breakdown(config: Any, device: Any, peak: float | None, times: int) -> Iterator[dict[str, Any]]:
    """Time forward and backward of each module of the first layer alone, and of the head with the loss.

    The second layer's attention is timed too if its window differs from the first one's; "dispatch" has no backward.

    Args:
        config: the config.
        device: the device.
        peak: the device's FLOP/s in bfloat16; None if unknown.
        times: number of timed calls of each module.

    Yields:
        A dict for each module: its name "part", its "ms", "flops" and "bytes" (0 if they do not count), the floor's
        "floor_ms" and the floor over the time "of_floor", both None if unknown.
    """
    import torch
    from torch import Tensor

    from titanmoe.config.blocks import splits_router_product, window
    from titanmoe.mask import CAUSAL
    from titanmoe.models.families import mixers
    from titanmoe.models.mixers.mixer_spec import elements
    from titanmoe.moe.permute import unpermute_tokens
    from titanmoe.moe.send_slots import assign_unpadded_slots, fill_slots

    model, kernels = config.model, config.moe.kernels
    # The second layer's attention too, if it sees further than the first.
    numbers = [0, 1] if model.num_layers > 1 and window(model, 0) != window(model, 1) else [0]
    B, L, D, E, K = SAMPLES, config.training.seq_len, model.dim, model.num_experts, model.top_k
    T, R, F, size = B * L, B * L * K, model.expert_hidden, 2
    transformer, x_BLD, rope, tokens, labels_BL = make_layers(config, device, numbers, B)
    vocabulary, head, blocks = model.vocab_size, transformer.head, list(transformer.blocks().values())
    block = blocks[0]
    x_TD, moe = x_BLD.detach().flatten(0, 1).requires_grad_(), block.moe

    def both(make: Callable[[], Tensor | tuple[Tensor, ...]], inputs: list[Tensor]) -> Callable[[], Any]:
        """Return a function that runs forward and backward, with output gradients made beforehand.

        `make` computes one output or several; it is also called once at once, for their shapes. The gradients of
        `inputs` are discarded.
        """
        made = make()
        made = made if isinstance(made, tuple) else (made,)
        cotangents = [torch.ones_like(y) for y in made]

        def run() -> None:
            outputs = make()
            torch.autograd.grad(outputs, inputs, cotangents)

        return run

    def route() -> tuple[Tensor, Tensor]:
        logits, scores, weights, chosen, count = moe.router(x_TD, tokens)
        return moe.balance(weights, logits, scores, count, tokens), chosen

    weights_TK, chosen_TK = (x.detach() for x in route())
    weights_TK.requires_grad_()
    entry, slot, count_E = assign_unpadded_slots(chosen_TK, E, 1, 1, kernels)
    rows, row_weights, sent = fill_slots(x_TD, weights_TK, entry, slot, kernels)
    rows, row_weights = (x.detach().requires_grad_() for x in (rows, row_weights))
    experts = list(moe.experts.parameters())
    through = 2 * (T + R) * D * size
    gpu = rates(device)
    # Products of bfloat16 parts are three times as many.
    by_parts = device.type == "cuda" and splits_router_product(config)
    router_times, router_peak = (3, peak) if by_parts else (1, gpu and gpu.peak_float32)
    parts: list[tuple[str, Callable[[], Any], float, float, float | None]] = []
    for number, layer in zip(numbers, blocks, strict=True):
        mixer = mixers(model)[number]
        flops = 3 * 2 * T * elements(mixer.matrices(model)) + 3 * T * mixer.flops(model, number, L)
        work = both(partial(layer.attention, x_BLD, rope, CAUSAL), [x_BLD, *layer.attention.parameters()])
        parts.append((f"attention {number}" if number else "attention", work, flops, 0, peak))
    parts += [
        (
            "norms",
            both(lambda: block.ffn_norm(block.attention_norm(x_BLD)), [x_BLD, block.ffn_norm.weight]),
            0,
            2 * 5 * T * D * size,
            peak,
        ),
        (
            "router",
            both(lambda: route()[0], [x_TD, moe.router.weight]),
            router_times * 3 * 2 * T * D * E,
            (3 * T * D * size + 6 * T * E * 4),
            router_peak,
        ),
        ("dispatch", lambda: assign_unpadded_slots(chosen_TK, E, 1, 1, kernels), 0, 5 * R * 8, peak),
        (
            "permute",
            both(lambda: fill_slots(x_TD, weights_TK, entry, slot, kernels)[:2], [x_TD, weights_TK]),
            0,
            through,
            peak,
        ),
        (
            "experts",
            both(lambda: moe.experts.products(rows, row_weights, count_E), [rows, row_weights, *experts]),
            3 * 3 * 2 * R * D * F,
            0,
            peak,
        ),
        (
            "combine",
            both(lambda: unpermute_tokens(rows, sent.source_S, sent.slot_TJ, kernels), [rows]),
            0,
            through,
            peak,
        ),
        (
            "head, loss",
            both(lambda: head(x_BLD, labels_BL), [x_BLD, *head.parameters()]),
            3 * 2 * T * D * vocabulary,
            0,
            peak,
        ),
    ]
    if moe.shared is not None:
        work = both(lambda: moe.shared(x_BLD), [x_BLD, *moe.shared.parameters()])
        parts.append(("shared", work, 3 * 3 * 2 * T * D * model.shared_hidden, 0, peak))
    for name, work, flops, moved, rate in parts:
        took = seconds(work, device, times)
        floor = max(flops / rate if rate else 0.0, moved / gpu.bandwidth if gpu else 0.0) or None
        row = {"part": name, "ms": took * 1e3, "flops": flops, "bytes": moved}
        yield row | {"floor_ms": floor and floor * 1e3, "of_floor": floor and floor / took}


def tell(**figures: Any) -> None:
    """Print figures as a line of JSON, which the process that started this one reads (`figures`)."""
    print(json.dumps(figures), flush=True)


def measure_one(args: argparse.Namespace) -> None:
    """Measure one model on one side in this process; each figure is printed as a line of JSON, {"end": true} the last.

    An error is printed as a figure too, not raised. Modules are timed only on the side "titanmoe". `args` is the
    command line, with --one SHAPE SIDE LAYERS SAMPLES.
    """
    import torch

    from titanmoe.components import COMPONENTS
    from titanmoe.models.count import flops_per_token, parameters
    from titanmoe.train.launch import read_config
    from titanmoe.train.metrics import peak_flops
    from titanmoe.train.runtime import start, stop

    faulthandler.dump_traceback_later(max(1.0, args.limit - 5))  # shows where it hangs
    name, side, layers, batch = args.one[0], args.one[1], int(args.one[2]), int(args.one[3])
    options = recipe(name, side, layers=layers, batch=batch, tiny=args.tiny, overrides=args.set)
    config = read_config(options, 1, COMPONENTS)
    peer = side in PEERS
    runtime = None if peer else start(config)
    device, count = runtime.device if runtime else alone(), parameters(config.model)
    flops = flops_per_token(config.model, config.training.seq_len)
    device_name = gpu_name(device) or platform.processor() or "cpu"
    gpu = rates(device)
    peak = args.peak_tflops * 1e12 or (gpu.peak_bfloat16 if gpu else peak_flops(device_name, "bfloat16"))
    tokens = SAMPLES * config.training.seq_len
    tell(
        device=device_name, torch=torch.__version__, parameters=count.total, active=count.active, flops_per_token=flops
    )
    tell(tokens_per_step=tokens, head=6 * config.model.dim * config.model.vocab_size / flops)
    rehearsed = None if peer else RehearsedPeak(options, rehearsed_as(device))
    try:
        at_peak = tokens * flops / peak if peak else None
        steps(side, config=config, runtime=runtime, device=device, args=args, at_peak=at_peak)
        if rehearsed:
            tell(**rehearsed.result())
    except torch.OutOfMemoryError as error:
        tell(out_of_memory=str(error).partition("\n")[0])
    except NotCompared as error:
        tell(**{"not compared": str(error)})
    except Exception as error:
        traceback.print_exc()
        tell(failed=reason(error))
    else:
        if side == "titanmoe" and args.times:
            parts(config, device, peak, args.times)
    tell(end=True)
    stop()


def steps(
    side: str, *, config: Any, runtime: Any, device: Any, args: argparse.Namespace, at_peak: float | None
) -> None:
    """Time full steps with balanced, then with learned routing, and print the figures as lines of JSON.

    On a GPU also print the peak of memory, and the times of steps within args.memory_limits.

    Args:
        side: The implementation, a key of SIDES.
        config: The config.
        runtime: The rank's runtime; None for TorchTitan.
        device: The device.
        args: The command line.
        at_peak: The seconds that a step would take at the device's peak; None if that is unknown.
    """
    import torch

    graphs = side == "torchtitan"
    trainer = Side(config, device.type, graphs) if side in PEERS else TitanmoeSide(config, runtime)
    if side in PEERS and trainer.note:
        tell(note=trainer.note)
    tokens = SAMPLES * config.training.seq_len
    for routing in ROUTINGS:
        trainer.route(routing == "balanced")
        took = seconds(trainer.step, device, args.steps)
        imbalance = None if side in PEERS else trainer.report["imbalance"]
        mfu = at_peak and at_peak / took
        tell(**{routing: {"s": took, "tokens_per_s": tokens / took, "mfu": mfu, "imbalance": imbalance}})
    if device.type == "cuda":
        tell(allocated_GiB=torch.cuda.max_memory_allocated(device) / 2**30)
        segments = torch.cuda.memory_snapshot()
        grow = any(segment.get("is_expandable") for segment in segments)
        tell(**{"peak_GiB": torch.cuda.max_memory_reserved(device) / 2**30, "segments grow": grow})
        for times in args.memory_limits:
            tell(limited=with_limited_memory(trainer.step, device, args.steps, times))


def with_limited_memory(step: Callable[[], Any], device: Any, steps: int, times: float) -> dict[str, float]:
    """Time steps whose allocator may reserve only `times` the peak of allocated memory so far. The limit stays.

    Returns "times", "s" (mean seconds of `steps` steps after two untimed ones, infinite if memory runs out), and
    "retries" of the allocator per step.
    """
    import torch

    limit = times * torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info(device)[1], device)
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    try:
        took = seconds(step, device, steps)
    except torch.OutOfMemoryError:
        took = float("inf")
    retries = (torch.cuda.memory_stats(device)["num_alloc_retries"] - before) / (steps + 2)
    return {"times": times, "s": took, "retries": retries}


def parts(config: Any, device: Any, peak: float | None, times: int) -> None:
    """Free the dropped trainer's memory, time each module of a layer (`breakdown`), and print a line of JSON for each.

    An error is printed too, as "parts failed", not raised.
    """
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        for part in breakdown(config, device, peak, times):
            tell(part=part)
    except Exception as error:
        traceback.print_exc()
        tell(**{"parts failed": reason(error)})


def alone() -> Any:
    """Set the environment variables that torchrun sets for a single rank; return the rank's device."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class TitanmoeSide:
    """titanmoe's trainer, run step by step, with the methods that torchtitan_side.Side has too."""

    def __init__(self, config: Any, runtime: Any):
        from titanmoe.train.build import build_training
        from titanmoe.train.trainer import Trainer

        self.config, self.trainer, self.report = config, Trainer(build_training(config, runtime)), {}

    def route(self, balanced: bool) -> None:
        """Route tokens evenly in the steps that follow if `balanced`, else as the router decides."""
        self.config.moe.force_balance = balanced

    def step(self) -> None:
        """Run one training step."""
        self.report = self.trainer.train_step()


def measure(name: str, side: str, args: argparse.Namespace, told: Callable[[dict, dict], None]) -> dict[str, Any]:
    """Measure a shape on a side, in other processes, and return its row.

    TorchTitan is measured without CUDA graphs if it fails with them; its row has under "not compared" why it has no
    figures, as for a model that it lacks. `told` is called with the row and its new figures as soon as there are any;
    `args` is the command line.
    """
    if side in PEERS and name not in PEER_SHAPES:
        row = {"shape": name, "side": side, "not compared": "it has no model like that"}
        told(row, row)
        return row
    row = first_that_fits(name, side, args, told)
    if side == "torchtitan" and "failed" in row and "balanced" not in row:
        row = first_that_fits(name, "torchtitan-eager", args, told)
    if side in PEERS and (why := row.get("failed") or row.get("out_of_memory")):
        row["not compared"] = why
    return row


def lines_of(command: list[str], limit: float) -> Iterator[str]:
    """Yield what a command prints, line by line, and kill it at the end or when the caller stops.

    Raises:
        TimeoutError: if it takes longer than `limit` seconds.
        ChildProcessError: if its exit status is not 0.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Read in a thread, because a process that the command started may keep the pipe open after the command has ended.
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or ()], daemon=True).start()
    end, ended = time.monotonic() + limit, False
    try:
        while not (ended and lines.empty()):
            try:
                yield lines.get(timeout=0.2).rstrip("\n")
            except queue.Empty:
                ended = process.poll() is not None
            if time.monotonic() > end:
                raise TimeoutError(f"it took longer than {limit:.0f} s")
        if process.returncode:
            raise ChildProcessError(f"exit status {process.returncode}; its error is above")
    finally:
        process.kill()
        process.wait()


def first_that_fits(name: str, side: str, args: argparse.Namespace, told: Callable[[dict, dict], None]) -> dict:
    """Measure a shape with the first number of layers and samples that fits into memory, and return its row.

    Each try is a process of its own. If none fits, the row is that of the last, with "out_of_memory"; another error is
    in "failed". `told` is called with the row and its new figures as soon as there are any.
    """
    attempts = [(2 if name == "gpt_oss" else 1, SAMPLES)] if args.tiny else SHAPES[name].attempts
    limit = min(args.limit, PEER_SECONDS) if side in PEERS else args.limit
    row: dict[str, Any] = {}
    for layers, batch in attempts:
        command = [sys.executable, str(HERE), "--one", name, side, str(layers), str(batch)]
        command += ["--steps", str(args.steps), "--times", str(args.times), "--peak-tflops", str(args.peak_tflops)]
        command += ["--limit", str(limit), *["--tiny"] * args.tiny]
        command += ["--memory-limits", *map(str, args.memory_limits), "--set", *args.set]
        row = {"shape": name, "side": side, "layers": layers, "samples": batch}
        try:
            for line in lines_of(command, limit):
                new = figures(line)
                if new.pop("end", False):
                    break  # the process may hang when it releases its device
                if limited := new.get("limited"):
                    row.setdefault("by memory", []).append(limited)
                if part := new.pop("part", None):
                    row.setdefault("parts", []).append(part)
                    told(row, {"part": part})
                row |= new
                told(row, new)
        except (TimeoutError, ChildProcessError) as error:
            row["failed"] = str(error)
            told(row, {"failed": str(error)})
        if "out_of_memory" not in row:
            return row
        print(f"{name} {side}: {layers} layers, {batch} samples at a time do not fit", flush=True)
    return row


def figures(line: str) -> dict[str, Any]:
    """Parse a line of JSON that `tell` printed; print any other line and return {}."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if isinstance(message, dict):
        return message
    print(line, flush=True)
    return {}


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} GiB"


def show(row: dict[str, Any], new: dict[str, Any]) -> None:
    """Print the new figures `new` of one row of results, in columns; `row` has all figures of the row so far."""
    head = f"{row['shape']:<9} {row['side']:<16}"
    for key in ("note", "not compared", "failed", "out_of_memory", "parts failed"):
        if key in new:
            print(f"{head} {key.replace('_', ' ')}: {new[key]}", flush=True)
    if "device" in new:
        print(f"{head} on {new['device']}, torch {new['torch']}", flush=True)
    goal = SHAPES[row["shape"]].goal
    for routing in (routing for routing in ROUTINGS if routing in new):
        of = new[routing]
        imbalance = "-" if of["imbalance"] is None else f"{of['imbalance']:.2f}"
        print(
            f"{head} {routing:<9} {row['layers']:>6} {row['samples']:>7} {row['parameters'] / 1e9:7.2f}B "
            f"{row['active'] / 1e9:6.2f}B {percent(row['head']):>6} {of['s'] * 1e3:9.1f} {of['tokens_per_s']:9.0f} "
            f"{percent(of['mfu']):>6} {percent(goal):>6} {imbalance:>9}",
            flush=True,
        )
    if "segments grow" in new:
        grow = "grow" if new["segments grow"] else "do NOT grow"
        print(f"    peak {gib(row['allocated_GiB'])} allocated, {gib(row['peak_GiB'])} reserved; segments {grow}")
    if "rehearsed_GiB" in new or "not rehearsed" in new:
        why = f" ({new['not rehearsed']})" if "not rehearsed" in new else ""
        rehearsed, allocated = gib(new.get("rehearsed_GiB")), gib(row.get("allocated_GiB"))
        print(f"    titanmoe rehearse counts {rehearsed}{why}; allocated {allocated}", flush=True)
    if limited := new.get("limited"):
        print("    {times:.3f} times the peak of memory: {s:.4f} s, {retries:.1f} retries a step".format(**limited))
    if part := new.get("part"):
        floor = "-" if part["floor_ms"] is None else f"{part['floor_ms']:.3f}"
        print(
            f"    {part['part']:<12} {part['ms']:9.3f} ms   floor {floor:>8} ms   {percent(part['of_floor']):>6}",
            flush=True,
        )


def versions() -> dict[str, str]:
    """Return the versions of torch and Triton by name, "none" if missing. Imports neither, which would take seconds."""
    return {name: version(name) if find_spec(name) else "none" for name in ("torch", "triton")}


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line of text for each goal and side of titanmoe: what was measured, and whether the goal is met.

    Goals whose figures are missing are left out.
    """
    out = []
    for name, shape in SHAPES.items():
        for row in rows:
            if row["side"] in PEERS:
                continue
            measured = all(routing in row and row[routing]["mfu"] is not None for routing in ROUTINGS)
            if shape.goal and row["shape"] == name and measured:
                reached = ", ".join(f"{routing} {percent(row[routing]['mfu'])}" for routing in ROUTINGS)
                met = all(row[routing]["mfu"] >= shape.goal for routing in ROUTINGS)
                verdict = "met" if met else "not met"
                out.append(
                    f"goal for {name}: MFU of at least {percent(shape.goal)}; {row['side']}: {reached}: {verdict}"
                )
    return out + beside_peers(rows)


def beside_peers(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line of text on titanmoe's speed over TorchTitan's, for each pair with equal layers and batch size.

    The side "plain" is left out. The goal is met if each of ROUTINGS reaches PEER_GOAL.
    """
    out = []
    for peer in rows:
        for row in rows:
            same = all(row.get(key) == peer.get(key) for key in ("shape", "layers", "samples"))
            ours = row["side"] not in {*PEERS, "plain"}
            measured = all(routing in x for routing in ROUTINGS for x in (peer, row))
            if peer["side"] in PEERS and ours and same and measured:
                ratios = {routing: peer[routing]["s"] / row[routing]["s"] for routing in ROUTINGS}
                reached = ", ".join(f"{routing} {ratio:.2f}" for routing, ratio in ratios.items())
                verdict = "met" if min(ratios.values()) >= PEER_GOAL else "not met"
                out.append(
                    f"goal for {row['shape']}: {PEER_GOAL} times the speed of {peer['side']}; {row['side']}: "
                    f"{reached}: {verdict}"
                )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["titanmoe", "plain"])
    parser.add_argument("--steps", type=int, default=5, help="timed steps per routing, after two untimed ones")
    parser.add_argument("--times", type=int, default=10, help="timed calls of each part of a layer; 0: no parts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no more models after this time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one model on one side, then it is killed")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device in bf16; 0: known GPUs'")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, 8 bits emulated, for a machine without a GPU")
    parser.add_argument(
        "--memory-limits", nargs="*", type=float, default=[], metavar="TIMES",
        help="on a GPU, also time steps with TIMES the peak of memory, such as 1.1 and 1.02: the allocator retries",
    )  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], help="more options of the run: table.field=value")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return measure_one(args)
    began = time.monotonic()
    about = versions() | {"python": platform.python_version(), "machine": platform.platform()}
    about["against"] = "titanmoe's own plain path" + " and TorchTitan" * bool(PEERS.intersection(args.sides))
    about["command"] = " ".join(["python", "scripts/bench/layers.py", *sys.argv[1:]])
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    head = "routing   layers samples  params  active   head   ms/step  tokens/s    MFU   goal imbalance"
    print(f"{'shape':<9} {'side':<16} {head}", flush=True)
    rows: list[dict[str, Any]] = []
    left_out = []

    def told(row: dict[str, Any], new: dict[str, Any]) -> None:
        show(row, new)
        if args.json:
            args.json.write_text(json.dumps(about | {"rows": [*rows, row]}, indent=1))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its process ends too
    for side in args.sides:
        for name in args.shapes:
            if time.monotonic() - began > args.seconds:
                left_out.append(f"{name} {side}")
                continue
            rows.append(measure(name, side, args, told))
            if args.json:
                args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
    if not args.tiny:
        print(*verdicts(rows), sep="\n")
    if left_out:
        print(f"left out, because {args.seconds:.0f} s were over: {', '.join(left_out)}")
    wrong = ("failed", "out_of_memory", "parts failed")
    if any(key in row for row in rows for key in wrong if row["side"] not in PEERS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
