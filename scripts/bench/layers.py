"""How fast real layers train on one device: MFU of whole steps, then each part of a layer against its floor.

    python scripts/bench/layers.py [--shapes mixtral qwen3 ...] [--sides titanmoe compiled fp8 plain] [--json FILE]
    python scripts/bench/layers.py --tiny      the same on CPUs with tiny shapes: checks that it runs, measures nothing

SHAPES are published models with as many layers as fit on one GPU of 139 GiB next to float32 weights, gradients and
both AdamW moments; if one does not fit, the next of its attempts (layers, samples per microbatch) is used, and the
output says which. A step is 32,768 tokens in sequences of 4,096, computed in bf16, dropless, without recomputation; its
time is that of Trainer.train_step: data, forward, backward, clipping, AdamW and the report.

    MFU = tokens per second * FLOPs per token / peak
    FLOPs per token = 3 * (2 * active parameters but the embedding + causal attention), titanmoe/models/count.py

Sides: "titanmoe" as it comes, "compiled" with torch.compile per part of a block, "fp8" with the experts' products in
8 bits (its MFU is still of the bf16 peak), and the yardsticks: "plain" with torch's operations instead of the kernels
and one product per expert instead of the grouped one; "torchtitan" is TorchTitan, if it has such layers and imports
(scripts/bench/torchtitan_side.py says what it needs), with CUDA graphs as it comes, or without them if they fail:
"torchtitan-eager". Routing: learned, or forced to be balanced.

A part's floor is the longer of its FLOPs at the device's peak and its bytes at the device's bandwidth, forward and
backward, each tensor read or written once. On one device nothing is sent: "dispatch" is finding each choice's row.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
from torchtitan_side import NotCompared, Side, reason  # noqa: E402


class Shape(NamedTuple):
    model: str
    attempts: list[tuple[int, int]]
    """(layers, samples per microbatch), the largest first."""
    goal: float | None = None
    """MFU to reach."""


SHAPES = {
    # As on one of 4 ep ranks, with both experts of a token; of 8, with all 8 of a token. With all experts on one GPU,
    # AdamW and copies of weights would be a large part of a step of Qwen3.
    "mixtral": Shape("family=mixtral size=8x7b num_experts=2", [(4, 8), (4, 4), (2, 4)], 0.55),
    "qwen3": Shape("family=qwen3_moe size=30b_a3b num_experts=16", [(6, 8), (6, 4), (3, 4)], 0.40),
    # As on one of 4 ep ranks: 8 of 32 experts, including all 4 of a token. Every other layer has a window.
    "gpt_oss": Shape("family=gpt_oss size=20b num_experts=8", [(4, 8), (4, 4), (2, 4)]),
    "qwen2": Shape("family=qwen2_moe size=57b_a14b", [(2, 8), (2, 4), (1, 4)]),
    # As on one of 8 ep ranks: 32 of 256 experts, including all 8 of a token.
    "deepseek": Shape(
        "family=deepseek_v3 size=671b num_experts=32 num_dense_layers=0 mtp_depth=0", [(2, 8), (2, 4), (1, 4)]
    ),
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
PEER_GOAL, PEER_SECONDS = 1.2, 90
"""titanmoe's tokens per second over the peer's; the time limit for one model of the peer."""
ROUTINGS = ("balanced", "learned")
SEQ_LEN, SAMPLES = 4096, 8
FP32_TFLOPS = {"H200": 67.0}
BANDWIDTH = {"H200": 4.8e12}
"""Bytes per second, and TFLOP/s without tensor cores, from the manufacturer's data sheet."""
TINY = (
    "dim=64 num_heads=4 num_kv_heads=4 head_dim=16 expert_hidden=32 vocab_size=256 num_experts=8 top_k=2 num_groups=1"
)
TINY_ONLY = {
    "deepseek": "kv_lora_rank=16 q_lora_rank=16 qk_nope_head_dim=12 qk_rope_head_dim=4 v_head_dim=16 shared_hidden=32",
    "qwen2": "shared_hidden=32",
}


def recipe(name: str, side: str, layers: int, batch: int, tiny: bool, further: list[str]) -> list[str]:
    words = [*SHAPES[name].model.split(), f"num_layers={layers}"]
    seq_len = SEQ_LEN
    if tiny:
        words += TINY.split() + TINY_ONLY.get(name, "").split() + ["top_groups=1"]
        seq_len = 32
    options = [f"--model.{word}" for word in words] + SIDES[side]
    options += [f"--training.{word}" for word in (f"seq_len={seq_len}", f"local_batch_size={batch}")]
    options += [f"--training.global_batch_size={SAMPLES}", "--training.steps=1000000", "--data.source=synthetic"]
    return options + [f"--{word}" for word in further]


def synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: Any, times: int) -> float:
    """For one call: the mean over several, after two that do not count."""
    for _ in range(2):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


def known(table: dict[str, float], device: Any) -> float | None:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return next((value for key, value in table.items() if key in name), None)


def breakdown(config: Any, device: Any, peak: float | None, times: int) -> list[dict[str, Any]]:
    """Forward and backward of each part of the first layer, alone, and of the head with the loss."""
    import torch
    from torch import Tensor

    from titanmoe.config.blocks import turned_width
    from titanmoe.mask import CAUSAL
    from titanmoe.models.families import mixers
    from titanmoe.models.layers import rope_angles
    from titanmoe.models.mixers.rules import elements
    from titanmoe.models.transformer import Block
    from titanmoe.models.vocabulary import Head
    from titanmoe.moe.assign import assign_all_rows, copy_rows
    from titanmoe.moe.permute import to_tokens
    from titanmoe.tokens import Tokens

    model, mixer, kernels = config.model, mixers(config.model)[0], config.moe.kernels
    B, L, D, E, K = SAMPLES, config.training.seq_len, model.dim, model.num_experts, model.top_k
    T, R, F, size = B * L, B * L * K, model.expert_hidden, 2
    with torch.device(device):
        block = Block(model, mixer, config.moe, config.training.seed, 0, 1, torch.bfloat16)
        chunks, vocabulary = config.training.loss_chunks, model.vocab_size
        head = Head(vocabulary, D, model.norm_eps, chunks, torch.bfloat16, kernels)
        for weight in (*block.parameters(), *head.parameters()):
            torch.nn.init.normal_(weight, std=0.02)
        for buffer in block.buffers():
            buffer.zero_()
        x_BLD = torch.randn(B, L, D, dtype=torch.bfloat16).requires_grad_()
        index = torch.arange(T)
        labels_BL = (index % vocabulary).view(B, L)
        everyone = torch.ones_like(index, dtype=torch.bool)
        tokens = Tokens(index.view(B, L) % L, index, index // L, everyone, torch.tensor(0))
        block.moe.begin_step(1, torch.tensor(float(T)), B)
    x_TD, moe = x_BLD.detach().flatten(0, 1).requires_grad_(), block.moe
    rope = rope_angles(tokens.position_BS, model, turned_width(model), torch.bfloat16)

    def both(make: Callable[[], Tensor | tuple[Tensor, ...]], inputs: list[Tensor]) -> Callable[[], Any]:
        """Forward and backward, with gradients that exist beforehand."""
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
    entry, slot, count_E = assign_all_rows(chosen_TK, E, 1, 1, kernels)
    rows, row_weights, sent = copy_rows(x_TD, weights_TK, entry, slot, kernels)
    rows, row_weights = (x.detach().requires_grad_() for x in (rows, row_weights))
    experts, attention = list(moe.experts.parameters()), list(block.attention.parameters())
    through = 2 * (T + R) * D * size
    projections = 3 * 2 * T * elements(mixer.matrices(model))
    fp32 = known(FP32_TFLOPS, device)
    parts: list[tuple[str, Callable[[], Any], float, float, float | None]] = [
        (
            "attention",
            both(lambda: block.attention(x_BLD, rope, CAUSAL), [x_BLD, *attention]),
            projections + 3 * T * mixer.flops(model, 0, L),
            0,
            peak,
        ),
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
            3 * 2 * T * D * E,
            (3 * T * D * size + 6 * T * E * 4),
            fp32 and fp32 * 1e12,
        ),
        ("dispatch", lambda: assign_all_rows(chosen_TK, E, 1, 1, kernels), 0, 5 * R * 8, peak),
        (
            "permute",
            both(lambda: copy_rows(x_TD, weights_TK, entry, slot, kernels)[:2], [x_TD, weights_TK]),
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
        ("combine", both(lambda: to_tokens(rows, sent.source_R, sent.slot_TJ, kernels), [rows]), 0, through, peak),
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
    bandwidth, found = known(BANDWIDTH, device), []
    for name, work, flops, moved, rate in parts:
        took = seconds(work, device, times)
        floors = [flops / rate if rate else 0.0, moved / bandwidth if bandwidth else 0.0]
        floor = max(floors) or None
        found.append({"part": name, "ms": took * 1e3, "flops": flops, "bytes": moved})
        found[-1] |= {"floor_ms": floor and floor * 1e3, "of_floor": floor and floor / took}
    return found


def one(args: argparse.Namespace) -> None:
    """One model on one side; a JSON line of its figures is the last thing printed."""
    import torch

    from titanmoe.models.count import flops_per_token, parameters
    from titanmoe.parts import PARTS
    from titanmoe.train.launch import read
    from titanmoe.train.metrics import peak_flops
    from titanmoe.train.runtime import start, stop

    name, side, layers, batch = args.one[0], args.one[1], int(args.one[2]), int(args.one[3])
    config = read(recipe(name, side, layers, batch, args.tiny, args.set), 1, PARTS)
    peer = side in PEERS
    runtime = None if peer else start(config)
    device, count = runtime.device if runtime else alone(), parameters(config.model)
    flops = flops_per_token(config.model, config.training.seq_len)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    peak = args.peak_tflops * 1e12 or peak_flops(device_name, "bfloat16")
    out: dict[str, Any] = {"shape": name, "side": side, "layers": layers, "samples": batch, "device": device_name}
    tokens = SAMPLES * config.training.seq_len
    out |= {"parameters": count.total, "active": count.active, "flops_per_token": flops, "tokens_per_step": tokens}
    try:
        if side == "titanmoe":
            out["parts"] = breakdown(config, device, peak, args.times)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        trainer = Side(config, device.type, graphs=side == "torchtitan") if peer else Ours(config, runtime)
        for routing in ROUTINGS:
            trainer.route(routing == "balanced")
            took = seconds(trainer.step, device, args.steps)
            out[routing] = {"s": took, "tokens_per_s": tokens / took, "imbalance": None}
            out[routing]["mfu"] = tokens / took * flops / peak if peak else None
            if not peer:
                out[routing]["imbalance"] = trainer.report["imbalance"]
        if device.type == "cuda":
            out["peak_GiB"] = torch.cuda.max_memory_reserved(device) / 2**30
            out["segments grow"] = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    except torch.OutOfMemoryError as error:
        out["out_of_memory"] = str(error).partition("\n")[0]
    except NotCompared as error:
        out["not compared"] = str(error)
    except Exception as error:
        if not peer:
            raise
        out["failed"] = reason(error)
    print(json.dumps(out), flush=True)
    stop()


def alone() -> Any:
    """What torchrun would set for a single rank, and its device."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Ours:
    def __init__(self, config: Any, runtime: Any):
        from titanmoe.train.build import build_training
        from titanmoe.train.trainer import Trainer

        self.config, self.trainer, self.report = config, Trainer(build_training(config, runtime)), {}

    def route(self, balanced: bool) -> None:
        self.config.moe.force_balance = balanced

    def step(self) -> None:
        self.report = self.trainer.train_step()


def measure(name: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    answer = first_that_fits(name, side, args)
    if side == "torchtitan" and "failed" in answer:
        print(f"{name} torchtitan: with CUDA graphs: {answer['failed']}", flush=True)
        answer = first_that_fits(name, "torchtitan-eager", args)
    if side in PEERS and (why := answer.get("failed") or answer.get("out_of_memory")):
        return {"shape": name, "side": answer["side"], "not compared": why}
    return answer


def first_that_fits(name: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """The first attempt that fits, in a process of its own."""
    attempts = [(1, SAMPLES)] if args.tiny else SHAPES[name].attempts
    answer: dict[str, Any] = {}
    for layers, batch in attempts:
        command = [sys.executable, str(HERE), "--one", name, side, str(layers), str(batch)]
        command += ["--steps", str(args.steps), "--times", str(args.times), "--peak-tflops", str(args.peak_tflops)]
        command += ["--tiny"] * args.tiny + ["--set", *args.set]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        limit = PEER_SECONDS if side in PEERS else None
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"shape": name, "side": side, "not compared": f"it took longer than {limit} s"}
        lines = run.stdout.strip().splitlines()
        if run.returncode or not lines:
            return {"shape": name, "side": side, "failed": f"exit status {run.returncode}; its error is above"}
        answer = json.loads(lines[-1])
        if "out_of_memory" not in answer:
            return answer
        print(f"{name} {side}: {layers} layers, {batch} samples at a time do not fit", flush=True)
    return answer


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def show(row: dict[str, Any]) -> None:
    if "not compared" in row:
        print(f"{row['shape']:<9} {row['side']}: not compared: {row['not compared']}", flush=True)
        return
    head = f"{row['shape']:<9} {row['side']:<16}"
    if "failed" in row or "out_of_memory" in row:
        print(head, row.get("failed") or row["out_of_memory"], flush=True)
        return
    goal = SHAPES[row["shape"]].goal
    for routing in ROUTINGS:
        of = row[routing]
        imbalance = "-" if of["imbalance"] is None else f"{of['imbalance']:.2f}"
        print(
            f"{head} {routing:<9} {row['layers']:>6} {row['samples']:>7} {row['parameters'] / 1e9:7.2f}B "
            f"{row['active'] / 1e9:6.2f}B {of['s'] * 1e3:9.1f} {of['tokens_per_s']:9.0f} {percent(of['mfu']):>6} "
            f"{percent(goal):>6} {imbalance:>9}",
            flush=True,
        )
    if "segments grow" in row:
        print(
            f"    peak {row['peak_GiB']:.1f} GiB; memory segments {'grow' if row['segments grow'] else 'do NOT grow'}"
        )
    for part in row.get("parts", []):
        floor = "-" if part["floor_ms"] is None else f"{part['floor_ms']:.3f}"
        print(f"    {part['part']:<10} {part['ms']:9.3f} ms   floor {floor:>8} ms   {percent(part['of_floor']):>6}")


def versions() -> dict[str, str]:
    code = (
        "import json, platform, torch, importlib.util as u; "
        "t = __import__('triton').__version__ if u.find_spec('triton') else 'none'; "
        "d = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(); "
        "print(json.dumps({'torch': torch.__version__, 'triton': t, 'cuda': str(torch.version.cuda), 'device': d}))"
    )
    return json.loads(
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    )


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Each goal and the result, by side and routing."""
    out = []
    for name, shape in SHAPES.items():
        for row in rows:
            if row["side"] in PEERS:
                continue
            if shape.goal and row["shape"] == name and "balanced" in row and row["balanced"]["mfu"] is not None:
                reached = ", ".join(f"{routing} {percent(row[routing]['mfu'])}" for routing in ROUTINGS)
                met = all(row[routing]["mfu"] >= shape.goal for routing in ROUTINGS)
                verdict = "met" if met else "not met"
                out.append(
                    f"goal for {name}: MFU of at least {percent(shape.goal)}; {row['side']}: {reached}: {verdict}"
                )
    return out + beside_peers(rows)


def beside_peers(rows: list[dict[str, Any]]) -> list[str]:
    """titanmoe's speed over TorchTitan's, for the same number of layers and batch size."""
    out = []
    for peer in rows:
        for row in rows:
            same = all(row.get(key) == peer.get(key) for key in ("shape", "layers", "samples"))
            ours = row["side"] not in {*PEERS, "plain"}
            if peer["side"] in PEERS and ours and same and "balanced" in peer and "balanced" in row:
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
    parser.add_argument("--times", type=int, default=10, help="timed calls of each part of a layer")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no more models after this time")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device in bf16; 0: known GPUs'")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a machine without a GPU")
    parser.add_argument("--set", nargs="*", default=[], help="more options of the run: table.field=value")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args)
    began = time.monotonic()
    about = versions() | {"python": platform.python_version(), "machine": platform.platform()}
    about["against"] = "titanmoe's own plain path" + " and TorchTitan" * bool(PEERS.intersection(args.sides))
    about["command"] = " ".join(["python", "scripts/bench/layers.py", *sys.argv[1:]])
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    head = "routing   layers samples  params  active   ms/step  tokens/s    MFU   goal imbalance"
    print(f"{'shape':<9} {'side':<16} {head}")
    rows, left_out = [], []
    for side in args.sides:
        for name in args.shapes:
            if time.monotonic() - began > args.seconds:
                left_out.append(f"{name} {side}")
                continue
            rows.append(measure(name, side, args))
            show(rows[-1])
            if args.json:
                args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
    for line in verdicts(rows):
        print(line)
    if left_out:
        print(f"left out, because {args.seconds:.0f} s were over: {', '.join(left_out)}")
    if any("failed" in row or "out_of_memory" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
