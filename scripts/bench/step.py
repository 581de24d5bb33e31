"""Time full training steps on CPUs: tokens per second, and per CPU-second of all ranks together.

    python scripts/bench/step.py [--models ds qwen] [--cases 1x2 ep4 ep2tp2] [--against DIR] [--torchtitan DIR]
        [--compile] [--json FILE]

Models are TorchTitan's debug flavours of DeepSeek-V3 and Qwen3-MoE: 4,096 tokens per step in sequences of 512, bf16,
nothing recomputed, dropless. Cases: one rank of two threads; four ranks of one thread with ep or with ep and tp.
CPU-seconds are user + system time of all ranks. "peak" is the rate of a matmul of 2048^3 on one thread; "floor" the
CPU-seconds of a step at that rate. The checkout of --against and TorchTitan (scripts/bench/torchtitan_side.py)
alternate with this one; each figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
BOTH = ["--training.seq_len=512", "--training.global_batch_size=8", "--data.source=synthetic", "--training.device=cpu"]
BOTH += ["--training.steps=1000000", "--model.vocab_size=2048", "--model.dim=256"]
BOTH += ["--parallelism.reshard_after_forward=never"]  # like recomputation, gathering weights twice is off
MODELS = {
    # 33.0M parameters
    "ds": "num_layers=6 num_heads=16 num_kv_heads=16 head_dim=192 kv_lora_rank=512 qk_nope_head_dim=128 "
    "qk_rope_head_dim=64 v_head_dim=128 num_dense_layers=1 dense_hidden=1024 num_experts=8 top_k=3 expert_hidden=256 "
    "shared_hidden=512 norm_topk=false",
    # 315.8M parameters
    "qwen": "num_layers=8 num_heads=16 num_kv_heads=8 head_dim=128 qk_norm=head rope_theta=1e6 norm_eps=1e-6 "
    "num_experts=64 top_k=8 expert_hidden=768",
}
CASES = {
    "1x2": (1, 2, ["--training.local_batch_size=8"]),
    "ep4": (4, 1, ["--training.local_batch_size=2", "--parallelism.experts.ep=4"]),
    "ep2tp2": (4, 1, ["--training.local_batch_size=4", "--parallelism.experts.ep=2", "--parallelism.tp=2"]),
}
TOKENS = 4096
STOP_SECONDS = 60
ROUTINGS = ("learned", "balanced")


def recipe(model: str, case: str) -> list[str]:
    """Return the command line's options that train a model of MODELS on the ranks of a case of CASES."""
    return BOTH + [f"--model.{word}" for word in MODELS[model].split()] + CASES[case][2]


class World:
    """Processes of the ranks that run one checkout of titanmoe, or TorchTitan; each runs steps when a line says so."""

    def __init__(self, root: Path, ranks: int, threads: int, options: list[str], torchtitan: Path | None = None):
        """Start the ranks and wait until all have built their model.

        Args:
            root: The checkout of titanmoe.
            ranks: The number of ranks.
            threads: The threads of each rank.
            options: The options of the run.
            torchtitan: The folder of an installed TorchTitan, which then runs instead, with the checkout's config.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        path = os.pathsep.join(str(folder) for folder in (root, torchtitan) if folder)
        shared |= {"MASTER_PORT": port, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        role = ["--torchtitan-rank"] if torchtitan else ["--rank-of", str(root)]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE), *role, *options],
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        self.shape = self._replies()[0]

    def _replies(self) -> list[dict[str, float]]:
        """Return the next line of JSON of each rank; end this program if a rank has ended or refuses to run."""
        lines = [rank.stdout.readline() for rank in self.ranks]
        if not all(lines):
            gone = self.ranks[lines.index("")]
            self.stop()
            killed = ", killed: out of memory?" * (gone.returncode == -9)
            raise SystemExit(f"a rank ended early, exit status {gone.returncode}{killed}; its error is above")
        replies = [json.loads(line) for line in lines]
        if refused := [reply["not compared"] for reply in replies if "not compared" in reply]:
            self.stop()
            raise SystemExit(refused[0])
        return replies

    def steps(self, number: int, routing: str) -> tuple[float, float]:
        """Run steps on all ranks; return the mean seconds of one step, and its CPU seconds of all ranks together.

        The seconds are those of the slowest rank. `routing` is "balanced" or "learned".
        """
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # of a rank that has ended: its reply is missing too
                rank.stdin.write(f"{number} {routing}\n")
                rank.stdin.flush()
        replies = self._replies()
        wall, cpu = max(a["wall"] for a in replies), sum(a["cpu"] for a in replies)
        return wall / number, cpu / number

    def stop(self) -> None:
        """End the ranks and wait for them; kill each that has not ended after STOP_SECONDS."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it may wait for a rank that has failed
                rank.kill()
                rank.wait()


def cpu_seconds() -> float:
    """Return the user and system time of this process so far, without its children's."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def serve(root: str, options: list[str]) -> None:
    """Run one rank: print the model's size as JSON; for each line of stdin run steps and print their seconds as JSON.

    A line is "STEPS ROUTING", such as "2 balanced", and its reply {"wall": ..., "cpu": ...}, of all these steps.
    Returns at the end of stdin. Raises SystemExit if titanmoe was imported from elsewhere than the checkout `root`.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.models.count import flops_per_token, parameters
    from titanmoe.train.build import build_training
    from titanmoe.train.launch import read_config
    from titanmoe.train.runtime import start, stop, world_size
    from titanmoe.train.trainer import Trainer
    from titanmoe.train.trainer import __file__ as origin

    if not Path(origin).is_relative_to(root):
        raise SystemExit(f"{origin} was imported and not the checkout {root}")
    config = read_config(options, world_size(), COMPONENTS)
    runtime = start(config)
    trainer = Trainer(build_training(config, runtime))
    count = parameters(config.model)
    flops = flops_per_token(config.model, config.training.seq_len)
    print(json.dumps({"total": count.total, "active": count.active, "flops": flops}), flush=True)
    for line in sys.stdin:
        number, routing = line.split()
        config.moe.force_balance = routing == "balanced"
        began, used = time.perf_counter(), cpu_seconds()
        for _ in range(int(number)):
            trainer.train_step()
        taken = {"wall": time.perf_counter() - began, "cpu": cpu_seconds() - used}
        print(json.dumps(taken), flush=True)
    stop()


def matrix_peak(dtype: str, size: int = 2048) -> float:
    """Return the FLOPs per CPU second that one thread reaches in a matmul of size^3: the fastest of four.

    `dtype` is the name of a dtype of torch. Sets torch to one thread.
    """
    import torch

    torch.set_num_threads(1)
    best = float("inf")
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in "ab")
    for _ in range(4):
        used = time.thread_time()
        a @ b
        best = min(best, time.thread_time() - used)
    return 2 * size**3 / best


def measure(model: str, case: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure a model in a case on all sides, in turn; return a row for each side and routing.

    Sides are "here", "against" and "titan"; `args` is the command line. Raises SystemExit if a rank ends early;
    TorchTitan's are left out with a message if that is before their timed steps.
    """
    ranks, threads, _ = CASES[case]
    threads = 1 if args.tiny else threads
    options = recipe(model, case) + ["--compile.enable"] * args.compile + [f"--{word}" for word in args.set]
    dtype = next((word.partition("=")[2] for word in args.set if "mixed_precision_param=" in word), "bfloat16")
    here = HERE.parents[2]
    sides: dict[str, tuple[Path, Path | None]] = {"here": (here, None)}
    if args.against:
        sides["against"] = args.against.resolve(), None
    if args.torchtitan:
        sides["titan"] = here, args.torchtitan.resolve()
    worlds: dict[str, World] = {}

    def begin(side: str) -> bool:
        """Start a side's ranks and run untimed steps; return False if TorchTitan does not run."""
        root, torchtitan = sides[side]
        try:
            worlds[side] = World(root, ranks, threads, options, torchtitan)
            for routing in args.routing:
                worlds[side].steps(args.warmup, routing)
        except SystemExit as error:
            if side != "titan":
                raise
            worlds.pop(side, None)
            print(f"{model:<5} {case:<7} titan: not compared: {error}", flush=True)
        return side in worlds

    peaks, shape = [], {}
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    try:
        for _ in range(args.rounds):
            peaks.append(matrix_peak(dtype, 64 if args.tiny else 2048))
            for side in list(sides):
                if side not in worlds and not begin(side):
                    del sides[side]
                    continue
                if side == "here":
                    shape = worlds[side].shape
                for routing in args.routing:
                    taken.setdefault((side, routing), []).append(worlds[side].steps(args.steps, routing))
                if args.apart:
                    worlds.pop(side).stop()
    finally:
        for world in worlds.values():
            world.stop()
    peak = max(peaks)
    rows: list[dict[str, object]] = []
    for (side, routing), of in taken.items():
        wall, cpu = (statistics.median(column) for column in zip(*of, strict=True))
        row = {"model": model, "case": case, "side": side, "routing": routing, **shape}
        row |= {"tokens/s": TOKENS / wall, "tokens/cpu-s": TOKENS / cpu, "cpu-s": cpu}
        row |= {"peak": peak, "floor cpu-s": TOKENS * shape["flops"] / peak}
        rows.append(row | {"of peak": row["floor cpu-s"] / cpu})
    return with_ratios(rows)


def with_ratios(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the rows, titanmoe's with "x titan": tokens per CPU second over TorchTitan's, if it ran that routing."""
    titan = {row["routing"]: row["tokens/cpu-s"] for row in rows if row["side"] == "titan"}
    return [
        row | {"x titan": row["tokens/cpu-s"] / titan[row["routing"]]}
        if row["side"] != "titan" and row["routing"] in titan
        else row
        for row in rows
    ]


def show(row: dict[str, object]) -> None:
    """Print a row of `measure`."""
    ratio = f"{row['x titan']:9.2f}" if "x titan" in row else ""
    print(
        f"{row['model']:<5} {row['case']:<7} {row['side']:<8} {row['routing']:<9} {row['total'] / 1e6:7.1f}M "
        f"{row['active'] / 1e6:6.1f}M {row['tokens/s']:9.0f} {row['tokens/cpu-s']:13.0f} {row['cpu-s']:7.2f} "
        f"{row['floor cpu-s']:7.2f} {row['of peak']:8.1%}{ratio}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each side and routing")
    parser.add_argument("--steps", type=int, default=2, help="steps of a round")
    parser.add_argument("--warmup", type=int, default=10, help="untimed steps of each routing")
    parser.add_argument("--against", type=Path, help="another checkout, to alternate with")
    parser.add_argument("--torchtitan", type=Path, help="the folder of an installed TorchTitan, to alternate with")
    parser.add_argument("--apart", action="store_true", help="run one side's ranks at a time, to save memory")
    parser.add_argument("--compile", action="store_true", help="compile parts of blocks with torch.compile")
    parser.add_argument("--set", nargs="*", default=[], help="more options of the run: table.field=value")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.models, args.cases, args.rounds, args.steps, args.warmup = ["ds"], ["1x2"], 1, 1, 1
        args.set = ["training.seq_len=16", "model.num_layers=2", "model.num_heads=2", *args.set]
        args.set += ["model.num_kv_heads=2", "model.vocab_size=64"]
    if args.torchtitan:
        from torchtitan_side import NotCompared, check

        try:
            check(args.torchtitan)
        except NotCompared as error:
            raise SystemExit(f"--torchtitan: {error}") from None
    import torch

    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": machine()}
    about |= {"command": " ".join(["python", "scripts/bench/step.py", *sys.argv[1:]])}
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    print(
        "model case    side     routing      params active  tokens/s  tokens/cpu-s   cpu-s   floor  of peak"
        + "  x titan" * bool(args.torchtitan)
    )
    rows = []
    for model in args.models:
        for case in args.cases:
            for row in measure(model, case, args):
                show(row)
                rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))


def machine() -> str:
    """Return the name and number of this machine's CPU cores, and "avx512_bf16" if they have it, as one text."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    wide = ", avx512_bf16" if any("avx512_bf16" in line for line in lines) else ""
    return f"{name}{wide}, {os.cpu_count()} cores"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        serve(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] == ["--torchtitan-rank"]:
        import torchtitan_side

        torchtitan_side.serve(sys.argv[2:], cpu_seconds)
    else:
        main()
