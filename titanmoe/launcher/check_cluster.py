"""Check that a cluster is fit to train on: compare every parallelism with one rank, and time each axis.

    torchrun --nproc-per-node 8 -m titanmoe.launcher.check_cluster                       # one node
    torchrun --nproc-per-node 8 -m titanmoe.launcher.check_cluster --config RECIPE.toml  # wires of that mapping
    torchrun --nproc-per-node 8 -m titanmoe.launcher.check_cluster --only dispatcher --json cluster.json

With several nodes, add --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500; `titanmoe slurm --check` does. Loss
and gradient norm of two steps of a small float32 model must equal those of one rank, under each mapping, dispatcher and
schedule. Then every axis sends messages of two sizes. Ends with exit status 0 or 1; docs/launch.md explains the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanmoe.checkpoint.on_all_ranks import from_rank, on_all_ranks
from titanmoe.comm.collectives import Group
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.command_line import to_words
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import Meshes
from titanmoe.parallel.apply import make_meshes
from titanmoe.train.build import build_training
from titanmoe.train.launch import read_config
from titanmoe.train.runtime import Runtime, exit_now, print_rank_0, start, stop, world_size
from titanmoe.train.trainer import Trainer

STEPS = 2
TOLERANCE = 1e-4
"""Largest relative difference of loss and gradient norm in float32: sums in another order differ by less than 1e-5, a
wrong sum by over 1e-3."""
SMALL, LARGE = 1 << 16, 1 << 26  # bytes of a message
BASE: dict[str, Any] = {
    "data.source": "synthetic", "model.num_layers": 4, "model.num_heads": 8, "model.num_kv_heads": 8,
    "training.seq_len": 128, "training.local_batch_size": 2, "training.steps": 10, "training.dtype": "float32",
    "training.mixed_precision_param": "float32", "training.mixed_precision_reduce": "float32",
    "parallelism.tp": 1, "parallelism.experts.ep": 1, "metrics.tensorboard": False,
    "checkpoint.enable": False,
}  # fmt: skip


def cases(world: int, node: int) -> dict[str, dict[str, Any]]:
    """Return the test cases by name, each as new values of fields by path ("parallelism.tp": 2), in place of BASE's.

    {} is the case of BASE itself. Cases that cannot run on this cluster, of `world` ranks, `node` of them on a node,
    are among them; `compare` skips these.
    """
    everywhere = {"parallelism.experts.ep": world}
    nodes = {"parallelism.node": node if node < world else max(1, world // 2)}
    pipeline, pairs = {"parallelism.pp": 2}, {"parallelism.pp": 2, "parallelism.experts.ep": 2}
    ring = {"parallelism.cp": 2}
    return {
        "data parallel": {},
        "data parallel, replicated": {"parallelism.dp_replicate": 2},
        "tensor parallel": {"parallelism.tp": 2},
        "context parallel, ring": ring,
        "context parallel, ring, plain attention": ring | {"parallelism.attention_backend": "plain"},
        "context parallel, ulysses": ring | {"parallelism.cp_kind": "ulysses"},
        "context parallel, allgather": ring | {"parallelism.cp_kind": "allgather"},
        "pipeline, 1F1B": pipeline,
        "pipeline, ZBVZeroBubble": pipeline | {"pipeline.schedule": "ZBVZeroBubble"},
        "pipeline, DualPipeV": pairs | {"pipeline.schedule": "DualPipeV"},
        "pipeline, DualPipeV in pairs": pairs | {"pipeline.schedule": "DualPipeV", "moe.overlap": "pairs"},
        "dispatcher alltoall": everywhere,
        "dispatcher alltoall, in halves": everywhere | {"moe.overlap": "halves"},
        "dispatcher allgather": everywhere | {"moe.dispatcher": "allgather"},
        "dispatcher hierarchical": everywhere | nodes | {"moe.dispatcher": "hierarchical"},
        "dispatcher symm_mem": everywhere | {"moe.dispatcher": "symm_mem", "moe.symm_mem_factor": 2.0},
        "expert tensor parallel": {"parallelism.experts.etp": 2},
        "folded: tp 2 with ep over all": everywhere | {"parallelism.tp": 2},
        "folded: all five dimensions": {
            "parallelism.pp": 2, "parallelism.cp": 2, "parallelism.tp": 2,
            "parallelism.experts.ep": 2, "parallelism.experts.etp": 2,
        },
    }  # fmt: skip


def command_line(world: int, changes: dict[str, Any], device: str) -> list[str]:
    """Return the words of `titanmoe train` for a test case: `--config debug`, then `--TABLE.FIELD VALUE` of each field.

    Model and batches depend on `world` alone, so that a run of one rank computes the same.

    Args:
        world: ranks of all nodes.
        changes: the fields in which the case differs from BASE: new values by path, such as "parallelism.tp".
        device: training.device: "auto", "cpu" or "cuda".
    """
    sizes = {
        "model.num_experts": world * math.ceil(8 / world),
        "training.global_batch_size": 4 * world,
        "training.device": device,
    }
    return ["--config", "debug", *to_words(BASE | sizes | changes)]


# ---- the same numbers as one rank


@dataclass
class Comparison:
    """The steps of a test case compared with those of one rank."""

    name: str
    error: float = math.nan
    """The largest relative difference from one rank, of losses and gradient norms."""
    seconds: float = math.nan
    """Duration of the second step."""
    skipped: str = ""
    """Reason why the case cannot run here; "" if it ran."""

    @property
    def is_ok(self) -> bool:
        """Whether the numbers agree, or the case was skipped."""
        return bool(self.skipped) or self.error <= TOLERANCE

    def line(self) -> str:
        if self.skipped:
            return f"  -     {self.name:<42} not run: {self.skipped}"
        verdict = "ok   " if self.is_ok else "WRONG"
        return f"  {verdict} {self.name:<42} off by {self.error:.1e}   {self.seconds:8.3f} s a step"


def run_steps(config: Config, runtime: Runtime) -> tuple[list[float], float]:
    """Train a model of this config for STEPS steps. Collective over all ranks.

    Returns loss and gradient norm of each step in turn, as one list of 2 * STEPS numbers; and the seconds of the last
    step on this rank.
    """
    training = build_training(config, runtime)
    trainer = Trainer(training)
    try:
        out: list[float] = []
        for _ in range(STEPS):
            began = time.perf_counter()
            report = trainer.train_step()
            out += [report["loss"], report["grad_norm"]]
        return out, time.perf_counter() - began
    finally:
        training.loader.close()


def run_steps_on_one_rank(world: int, device: str) -> list[float]:
    """Return loss and gradient norm of each step in turn, as computed by one rank in a process of its own.

    Called on rank 0 alone while the others wait; it waits for the process. Model and batches depend on `world`, the
    ranks of all nodes. Raises RuntimeError, with the end of its stderr, if the process fails.
    """
    launcher_variables = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher_variables)}
    command = [sys.executable, "-m", "titanmoe.launcher.check_cluster", "--alone", str(world), "--device", device]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"one rank alone failed:\n{run.stderr[-4000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def compare(runtime: Runtime, only: list[str], node: int, expected: list[float]) -> list[Comparison]:
    """Run the test cases and compare them with one rank, printing a line each. Collective over all ranks.

    Args:
        runtime: this rank's runtime.
        only: run cases whose names contain one of these words; all if empty.
        node: ranks of a node.
        expected: loss and gradient norm of each step in turn, on one rank, as `run_steps` returns them.

    Returns:
        A Comparison for each of these cases, in the order of `cases`; those that cannot run here have `skipped` set.

    Raises:
        ConfigError: no case's name contains one of these words.
    """
    known, rows = cases(runtime.world, node), []
    wanted = {name: changes for name, changes in known.items() if not only or any(word in name for word in only)}
    if not wanted:
        raise ConfigError(f"--only {' '.join(only)} names none of the cases {', '.join(known)}")
    for name, changes in wanted.items():
        try:
            config = read_config(command_line(runtime.world, changes, runtime.device.type), runtime.world, COMPONENTS)
        except ConfigError as error:
            row = Comparison(name, skipped=error.problems[0])
        else:
            actual, seconds = run_steps(config, runtime)
            errors = [abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)]
            row = Comparison(name, max(errors, key=lambda x: math.inf if math.isnan(x) else x), seconds)
        rows.append(row)
        print_rank_0(row.line())
    return rows


# ---- what each axis carries


@dataclass
class AxisTiming:
    """The speed of one collective along one axis of the mapping."""

    axis: str
    ranks: int
    message: str
    """Name of the collective."""
    microseconds: float
    """Time of a SMALL message."""
    gigabytes: float
    """Rate of a LARGE message (on CPUs of LARGE / 32), in GB per second out of and into each rank."""

    def line(self) -> str:
        return (
            f"  {self.axis:<24} {self.ranks:>5} ranks   {self.message:<15} {self.microseconds:9.1f} us for "
            f"{SMALL >> 10} KiB   {self.gigabytes:8.2f} GB/s"
        )


def seconds_per_call(runtime: Runtime, send: Callable[[], Any], rounds: int) -> float:
    """Return the mean seconds of a call of `send` on the slowest rank. Collective over all ranks.

    Calls it `rounds` times, the same on all ranks, after two calls that are not timed.
    """

    def wait() -> None:
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        send()
    wait()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(rounds):
        send()
    wait()
    seconds = torch.tensor((time.perf_counter() - began) / rounds, device=runtime.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # of the slowest group
    return float(seconds)


def build_collectives(group: Group, size: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return functions that run a collective in bfloat16 over a group, by name: all-gather, reduce-scatter, all-to-all.

    All ranks of the group call such a function together; it waits for its result (on GPUs, the stream waits). `size` is
    about the bytes of the all-gather's result on each rank, and of what each rank puts into the others.
    """
    ops, name, ranks = torch.ops._c10d_functional, group.name, group.size
    count = max(1, size // 2 // ranks)
    shard = torch.zeros(count, dtype=torch.bfloat16, device=device)
    full = torch.zeros(count * ranks, dtype=torch.bfloat16, device=device)
    return {
        "all-gather": lambda: ops.wait_tensor(ops.all_gather_into_tensor(shard, ranks, name)),
        "reduce-scatter": lambda: ops.wait_tensor(ops.reduce_scatter_tensor(full, "sum", ranks, name)),
        "all-to-all": lambda: ops.wait_tensor(ops.all_to_all_single(full, [count] * ranks, [count] * ranks, name)),
    }


def time_axes(meshes: Meshes, runtime: Runtime) -> list[AxisTiming]:
    """Time the collectives that each axis sends in training; return an AxisTiming of each, the same on every rank.

    Collective over all ranks; rank 0 prints a line for each. Axes of one rank are left out. cp has an all-gather,
    whatever cp_kind is. HSDP's all-reduces and the pipeline's messages use the same links and are not timed.
    """
    by_node = meshes.across.size > 1
    axes = {
        "tp": (meshes.tp, ("all-gather", "reduce-scatter")),
        "cp": (meshes.cp, ("all-gather",)),
        "ep x etp" + " in a node" * by_node: (meshes.within, ("all-to-all",)),
        "ep between nodes": (meshes.across, ("all-to-all",)),
        "FSDP of attention": (_fsdp_group(meshes.dense_data), ("all-gather", "reduce-scatter")),
        "FSDP of experts": (_fsdp_group(meshes.expert_data), ("all-gather", "reduce-scatter")),
    }
    out, large_size = [], LARGE if runtime.device.type == "cuda" else LARGE >> 5
    for axis, (group, messages) in axes.items():
        if group.size == 1:
            continue
        small, large = (build_collectives(group, size, runtime.device) for size in (SMALL, large_size))
        for message in messages:
            latency = seconds_per_call(runtime, small[message], 20)
            rate = large_size * (1 - 1 / group.size) / seconds_per_call(runtime, large[message], 5)
            out.append(AxisTiming(axis, group.size, message, latency * 1e6, rate / 1e9))
            print_rank_0(out[-1].line())
    return out


def _fsdp_group(mesh: DeviceMesh) -> Group:
    """Return the group over which FSDP gathers and scatters: the last dim of its mesh, without the replicas of HSDP."""
    return Group.of(mesh.get_group(mesh.ndim - 1))


# ---- all checks


def versions(runtime: Runtime) -> list[str]:
    """Return lines for the terminal with the versions of torch, CUDA and NCCL."""
    lines = [f"torch {torch.__version__}, {runtime.world} ranks"]
    if runtime.device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        lines.append(f"CUDA {torch.version.cuda}, NCCL {nccl}")
    return lines


def check(runtime: Runtime, only: list[str], recipe: str) -> dict[str, Any]:
    """Run all comparisons and timings, and print them. Collective over all ranks.

    Raises ConfigError if the recipe cannot run on so many ranks, or `only` names no case.

    Args:
        runtime: this rank's runtime.
        only: run cases whose names contain one of these words; all if empty.
        recipe: file or name of the recipe whose mapping's axes are timed; "" for tp within a node and ep over all
            ranks.

    Returns:
        "rows" (a Comparison for each case), "wires" (an AxisTiming for each axis and collective) and "problems" (error
        lines; none if the cluster is fit). All but the Comparisons' seconds are the same on every rank. If one rank
        alone fails, "rows" and "wires" are empty.
    """
    node = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world))
    device = f"{runtime.device.type} {torch.cuda.get_device_name() if runtime.device.type == 'cuda' else ''}".strip()
    places = on_all_ranks(dist.group.WORLD, lambda: (socket.gethostname(), device, torch.__version__))
    hosts = sorted(set(places))
    lines = [*versions(runtime), *(f"{host}: {kind}, torch {version}" for host, kind, version in hosts), ""]
    print_rank_0("\n".join(lines))
    problems = [] if len({place[1:] for place in places}) == 1 else ["the ranks' devices or versions of torch differ"]

    def expected_or_problem() -> list[float] | str:
        try:
            return run_steps_on_one_rank(runtime.world, runtime.device.type)
        except RuntimeError as error:
            return str(error)

    expected = from_rank(dist.group.WORLD, 0, expected_or_problem)
    if isinstance(expected, str):
        return {"rows": [], "wires": [], "problems": [expected]}
    print_rank_0(f"two steps in float32 against one rank (allowed: {TOLERANCE:.0e})")
    rows = compare(runtime, only, node, expected)
    problems += [f"{row.name} is off by {row.error:.1e}" for row in rows if not row.is_ok]

    widest = math.gcd(node, 8)
    mapping = ["--parallelism.tp", str(widest), "--parallelism.experts.ep", str(runtime.world)]
    default = [*command_line(runtime.world, {}, runtime.device.type), *mapping]
    config = read_config(["--config", recipe] if recipe else default, runtime.world, COMPONENTS)
    print_rank_0(f"\nmessages along {recipe or f'tp {widest} and ep {runtime.world}'}; the slowest group counts")
    meshes = make_meshes(derive(runtime.world, config.parallelism), config, runtime.device)
    return {"rows": rows, "wires": time_axes(meshes, runtime), "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="", help="a recipe, whose mapping's axes are measured")
    parser.add_argument("--only", nargs="+", default=[], help="run the cases whose names contain one of these words")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--alone", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        config = read_config(command_line(options.alone, {}, options.device), 1, COMPONENTS)
        print(json.dumps(run_steps(config, start(config))[0]))
        return 0
    try:
        runtime = start(read_config(command_line(world_size(), {}, options.device), world_size(), COMPONENTS))
        result = check(runtime, options.only, options.config)
    except ConfigError as error:
        print_rank_0("\n".join(f"error: {problem}" for problem in error.problems))
        return 2
    finally:
        stop()
    if options.json and runtime.rank == 0:
        rows = [asdict(row) for row in result["rows"]]
        Path(options.json).write_text(
            json.dumps({"rows": rows, "wires": [asdict(w) for w in result["wires"]], "problems": result["problems"]})
        )
    print_rank_0("\n" + "\n".join(result["problems"] or ["this cluster is fit"]))
    return bool(result["problems"])


if __name__ == "__main__":
    exit_now(main())
