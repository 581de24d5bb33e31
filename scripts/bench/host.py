"""Time how long the host takes to launch a layer: Python and torch's dispatcher, with kernels that do almost nothing.

    python scripts/bench/host.py [RECIPE] [--against DIR] [--profile N] [--set TABLE.FIELD=VALUE ...]

One rank of the recipe's world takes steps in this process as on an H100, but with two and six narrow, short layers on
this CPU. Messages go nowhere and Triton's launches end before the driver's, so the time is this CPU's: compare it with
another checkout (--against). A layer is a quarter of the difference between six layers and two: CPU time, the first
decile over all microbatches. "Device" is the planner's time of one layer and microbatch of the full recipe.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve()
HARDWARE, LAYERS, ROUNDS = "h100", (2, 6), 5
NARROW = "dim=16 num_heads=8 num_kv_heads=8 head_dim=8 expert_hidden=8 vocab_size=256 num_dense_layers=0 mtp_depth=0"
LATENT = "head_dim=12 v_head_dim=8 kv_lora_rank=8 q_lora_rank=8 qk_nope_head_dim=8 qk_rope_head_dim=4"
POSITIONS = 16
"""The number of a sample's positions that a rank owns."""


class Hopper:
    """Stand-in for Triton's driver, of an H100 that does not exist."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def small_kernels() -> Iterator[None]:
    """Replace kernels within this context by stand-ins that compute next to nothing, to time the host's work alone.

    Integers that Triton's kernels would write are zeros, and loads are even, so that all shapes are legal.
    """
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from titanmoe.comm import host_sync
    from titanmoe.ops.kernels import installed, kernel_launch

    def norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return F.layer_norm(x, shape, weight)

    def grouped_product(x: Tensor, w: Tensor, offs: Tensor | None = None) -> Tensor:
        return x @ w[0] if w.dim() == 3 else x.new_zeros(len(offs), len(x), w.shape[1])

    def wide_product(a: Tensor, b: Tensor) -> Tensor:
        return a.new_zeros(len(a), b.shape[1], dtype=torch.float32)

    def counts_of_others(mine: Tensor, *_: Any) -> Tensor:
        return mine.clone()

    with ExitStack() as stack:
        changes: list[tuple[Any, str, Any]] = [(F, "rms_norm", norm), (torch, "_grouped_mm", grouped_product)]
        changes.append((host_sync, "launch_all_to_all", counts_of_others))
        if find_spec("titanmoe.moe.router_product"):  # not in older checkouts
            changes.append((import_module("titanmoe.moe.router_product"), "_product_on_gpu", wide_product))
        if installed():
            from triton.runtime import driver
            from triton.runtime.jit import JITFunction

            launch = JITFunction.run

            def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
                for x in args:
                    if isinstance(x, Tensor) and not x.is_floating_point():
                        x.data.zero_()  # through .data, because autograd may have saved the tensor
                if kernel.__name__ == "_assign_rows":
                    args[4].data.fill_(args[5] // args[4].numel())
                launch(kernel, *args, grid=grid, warmup=True, **options)

            changes += [(driver, "_active", Hopper()), (JITFunction, "run", run)]
            changes.append((kernel_launch, "can_run", lambda x: True))
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield


@contextmanager
def as_rank(world: int) -> Iterator[None]:
    """Make this process rank 0 of a world on H100s in this context, with `small_kernels` and no other processes."""
    from titanmoe.ops.device import HARDWARE as known
    from titanmoe.ops.device import imitate
    from titanmoe.rehearse.rehearsal import fake_world

    with warnings.catch_warnings(), imitate(known[HARDWARE]), fake_world(0, world), small_kernels():
        warnings.simplefilter("ignore")
        yield


def read_configs(recipe: str, overrides: list[str]) -> tuple[Any, int, dict[int, Any]]:
    """Return the recipe's config, its number of ranks, and the configs of narrow models by their number of layers.

    `recipe` is a file or name, `overrides` are further options, as --TABLE.FIELD=VALUE.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.config.load import read_draft
    from titanmoe.config.world_size import recipe_ranks
    from titanmoe.rehearse.rehearsal import recipe_to_rehearse

    words = [recipe, *overrides]
    world = recipe_ranks(read_draft(words, COMPONENTS))
    full = recipe_to_rehearse(words, world, HARDWARE)
    small = NARROW.split() + (LATENT.split() if full.model.kv_lora_rank else [])
    words += [f"--model.{word}" for word in small]
    words.append(f"--training.seq_len={POSITIONS * full.parallelism.tp * full.parallelism.cp}")
    narrow = {n: recipe_to_rehearse([*words, f"--model.num_layers={n}"], world, HARDWARE) for n in LAYERS}
    return full, world, narrow


class Steps:
    """A rank that runs forward and backward, with the observers that a watched run has on the rank that reports."""

    def __init__(self, config: Any, world: int):
        import torch

        from titanmoe.observe import Observer
        from titanmoe.rehearse.rehearsal import FakeLoader
        from titanmoe.train.build import build_training
        from titanmoe.train.runtime import GarbageCollection, Runtime
        from titanmoe.watch.heartbeat import Heartbeat
        from titanmoe.watch.run_watch import HeartbeatListener

        class NoCollection(GarbageCollection):
            def __init__(self, every: int):
                pass

        class BeginTimes(Observer):
            """Notes when each forward and backward begins."""

            def microbatch(self, stage: int, number: int, backward: bool) -> None:
                marks.append((backward, time.thread_time()))

        self.marks = marks = []
        runtime = Runtime(0, 0, world, torch.device("cpu"))
        self.training = build_training(config, runtime, loader=FakeLoader, garbage=NoCollection)
        with tempfile.TemporaryDirectory() as folder:
            heart = Heartbeat(Path(folder, "heart"), create=True)
        self.observers = [BeginTimes(), self.training.clock, HeartbeatListener(heart)]

    def run(self, steps: int = 2) -> tuple[list[float], list[float]]:
        """Run steps without updates; return the CPU seconds of each forward and of each backward.

        Each lasts until the next begins, so the last one of a step is left out.
        """
        from titanmoe import observe

        training, forward, backward = self.training, [], []
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observe.listening(observer))
            for step in range(steps):  # without an update: the numbers mean nothing
                self.marks.clear()
                batches = training.loader.next_step()
                observe.active.phase("forward_backward", step)
                slices, totals = training.slicer.slices(batches), training.slicer.count(batches)
                training.gradients.forward_backward(slices, totals, training.gradients.first_pass)
                training.gradients.drop()
                for (is_backward, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
                    (backward if is_backward else forward).append(end - begin)
        return forward, backward


def layer_seconds(runs: dict[int, Steps], rounds: int) -> tuple[float, ...]:
    """Return the CPU seconds of one layer's forward and of its backward, from the difference of two numbers of layers.

    `runs` has a rank for each number of LAYERS, whose time is the first decile over the microbatches of all rounds.
    """
    spans: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in runs}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for n, run in runs.items():
            for all_of, some in zip(spans[n], run.run(), strict=True):
                all_of.extend(some)
    gc.enable()
    few, many = ([statistics.quantiles(times, n=10)[0] for times in spans[n]] for n in LAYERS)
    return tuple((b - a) / (LAYERS[1] - LAYERS[0]) for a, b in zip(few, many, strict=True))


def device_seconds(config: Any, world: int) -> float:
    """Return the planner's seconds for the last layer's forward and backward of one microbatch, on the device.

    What backward recomputes is in them; messages and the host's launches are not. `world` is the number of ranks of the
    mapping.
    """
    from titanmoe.fold.degrees import derive
    from titanmoe.plan.devices import read_device
    from titanmoe.plan.dispatch_costs import DispatchChoice
    from titanmoe.plan.links import Factors
    from titanmoe.plan.price import Pricer

    fold, samples = derive(world, config.parallelism), config.training.local_batch_size
    costs = Pricer(config, read_device(HARDWARE), Factors())
    mode = config.activation_checkpoint.mode
    choice = DispatchChoice(config.moe.dispatcher)
    cost = costs.block(fold, samples, config.model.num_layers - 1, choice, mode)
    return cost.matrix + cost.attention + cost.memory


class Side:
    """A process that imports one of the checkouts of titanmoe that are compared, and measures when asked to.

    It also tells `device` (the planner's seconds of a layer), and the recipe's `layers` and `microbatches`. `root` is
    the checkout, `words` the command line without --root.
    """

    def __init__(self, root: Path, words: list[str]):
        command = [sys.executable, HERE, *words, "--root", root]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.device, self.layers, self.microbatches = self.read()

    def read(self) -> list[float]:
        """Wait for the next list of numbers that the process prints and return it; exit if the process has ended."""
        for line in self.process.stdout:
            if line.startswith("["):
                return json.loads(line)
        raise SystemExit("host.py: a side has failed; see above")

    def measure(self) -> list[float]:
        """Ask the process for a measurement; return the seconds of a layer's forward and of its backward."""
        print(file=self.process.stdin, flush=True)
        return self.read()


def serve(args: argparse.Namespace) -> None:
    """Print [the device's seconds of a layer, layers, microbatches] as JSON, then measure once for each line of stdin.

    A measurement prints [seconds forward, seconds backward] of a layer. With --profile, print a profile instead. `args`
    is the command line, with --root, the checkout to import.
    """
    sys.path.insert(0, str(args.root))
    import torch

    torch.set_num_threads(1)
    full, world, narrow = read_configs(args.recipe, [f"--{word}" for word in args.set])
    with as_rank(world):
        runs = {n: Steps(config, world) for n, config in narrow.items()}
        for run in runs.values():
            run.run()
        if args.profile:
            with cProfile.Profile() as profile:
                runs[LAYERS[1]].run()
            pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
            return
        microbatches = runs[LAYERS[0]].training.loader.microbatches
        print(json.dumps([device_seconds(full, world), full.model.num_layers, microbatches]), flush=True)
        for _ in sys.stdin:
            print(json.dumps(layer_seconds(runs, 1 if args.tiny else ROUNDS)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(HERE.parents[2] / "train_configs/qwen3_30b_a3b.toml"))
    parser.add_argument("--against", type=Path, help="another checkout, to take turns with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="show that many functions by their own time instead")
    parser.add_argument("--set", nargs="*", default=[], help="more options of the run: table.field=value")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.turns, args.recipe = 1, str(HERE.parents[2] / "train_configs/debug.toml")
    if args.profile and args.root is None:
        args.root = HERE.parents[2]
    if args.root is not None:
        return serve(args)
    words = [args.recipe, *(["--set", *args.set] if args.set else []), *["--tiny"] * args.tiny]
    roots = {"titanmoe": HERE.parents[2]} | ({"against": args.against.resolve()} if args.against else {})
    sides = {name: Side(root, words) for name, root in roots.items()}
    turns = {name: [] for name in sides}
    for _ in range(args.turns):
        for name, side in sides.items():
            turns[name].append(side.measure())
    for name, side in sides.items():
        side.process.stdin.close()
        forward, backward = (min(part) for part in zip(*turns[name], strict=True))
        both = forward + backward
        print(
            f"{name}: a layer takes the host {forward * 1e6:.0f} us forward and {backward * 1e6:.0f} us backward, "
            f"{both * side.layers * side.microbatches:.2f} s of a step ({side.layers} layers, {side.microbatches} "
            f"microbatches); the device {side.device * 1e6:.0f} us: {both / side.device:.0%}"
        )


if __name__ == "__main__":
    main()
