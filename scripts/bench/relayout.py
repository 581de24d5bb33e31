"""Time how long a model takes from one mapping to another by messages, beside a save and a load of a checkpoint.

    torchrun --standalone --nproc-per-node 4 scripts/bench/relayout.py [--before KEY=VALUE ...] [--after KEY=VALUE ...]

"plan" is done once, "move" once for each change of the weights, "export" makes all Hugging Face tensors on rank 0.
"save" and "load" are a checkpoint of the weights alone, whose files are in the page cache when they are read. Seconds
are medians, each of the slowest rank; GB are those of all weights, once.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanmoe.checkpoint.checkpoint_folder import Checkpoint, write_checkpoint
from titanmoe.checkpoint.hf.live_export import LiveExport
from titanmoe.checkpoint.relayout import Relayout
from titanmoe.checkpoint.state import Targets, persistent_buffers, shards_to_load, shards_to_save
from titanmoe.components import COMPONENTS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.parallel.apply import build, make_meshes
from titanmoe.train.launch import read_config
from titanmoe.train.runtime import Runtime, exit_now, start, stop, world_size

MODEL = [
    "--model.family=mixtral", "--model.dim=1024", "--model.num_layers=4", "--model.vocab_size=8192",
    "--model.num_heads=8", "--model.num_kv_heads=8", "--model.head_dim=128", "--model.expert_hidden=2560",
    "--data.source=synthetic", "--training.seq_len=64", "--training.global_batch_size=16",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--before", nargs="*", default=["parallelism.pp=2", "parallelism.experts.ep=2"], metavar="KEY=VALUE"
    )
    parser.add_argument(
        "--after", nargs="*", default=["parallelism.tp=2", "parallelism.experts.ep=4"], metavar="KEY=VALUE"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    model = [*MODEL, *["--model.dim=64", "--model.vocab_size=256", "--model.expert_hidden=32"] * args.tiny]
    if world_size() == 1:
        args.before = args.after = []
    configs = [
        read_config(model + [f"--{x}" for x in some], world_size(), COMPONENTS) for some in (args.before, args.after)
    ]
    runtime = start(configs[0])
    folders = [tempfile.mkdtemp(prefix="titanmoe-bench-") if runtime.rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    try:
        lines = measure(configs, runtime, Path(folders[0]), 1 if args.tiny else args.rounds)
        if runtime.rank == 0:
            print("\n".join(lines))
    finally:
        stop()
        if runtime.rank == 0:
            shutil.rmtree(folders[0], ignore_errors=True)


def shards(config: Config, runtime: Runtime) -> Targets:
    """Build a model under the config's mapping; return its live weights and persistent buffers. Collective.

    The result has (stored tensor's name, this rank's shard) by the weight's name.
    """
    meshes = make_meshes(derive(runtime.world, config.parallelism), config, runtime.device)
    stages = build(config, meshes, 4, runtime.device)
    parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    buffers = {name: buffer for stage in stages for name, buffer in persistent_buffers(stage).items()}
    return shards_to_load(parameters, buffers, None, config.model.tie_embeddings)


def measure(configs: list[Config], runtime: Runtime, folder: Path, rounds: int) -> list[str]:
    """Time planning and making a move between two mappings, beside a save, a load and an export. Collective.

    `configs` are those of source and destination, `folder` is for the checkpoint. Returns lines of text: bytes sent,
    then median seconds of each kind of work.
    """
    source, destination = (shards(config, runtime) for config in configs)
    plan, export = Relayout(source, destination), LiveExport(source, configs[0].model)
    gb = sum(prod(place.shape) * place.dtype.itemsize for place in export.held.values()) / 1e9
    path = folder / "saved"
    works: dict[str, Callable[[], object]] = {
        "plan": lambda: Relayout(source, destination),
        "move": lambda: plan.move(source, destination),
        "save": lambda: write_checkpoint(path, shards_to_save(source), {}, True, group=dist.group.WORLD),
        "load": lambda: Checkpoint(path).fill(destination),
        "export": lambda: [None for _ in export.tensors(source)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(slowest(work, runtime.device))
    sent, received = plan.plan.sent, plan.plan.received
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        f"{gb:.2f} GB on {runtime.world} ranks of {runtime.device.type}, torch {torch.__version__}: a move sends "
        f"{sum(sent) / 1e9:.2f} GB, at most {max(sent) / 1e9:.2f} from a rank and {max(received) / 1e9:.2f} to one, in "
        f"{plan.plan.rounds} rounds",
        *(f"{name:<7}{took:8.3f} s {took / gb:8.3f} s per GB" for name, took in medians.items()),
    ]


def slowest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that one call of `work` takes on the slowest rank, begun after a barrier. Collective."""
    dist.barrier()
    began = time.monotonic()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor(time.monotonic() - began, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main()
    exit_now(0)
