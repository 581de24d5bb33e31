"""Measure what the watch over a run costs a step of the debug model, with each call timed where it happens.

    torchrun --standalone --nproc-per-node 4 scripts/bench/watch_overhead.py [--steps 40]

Rank 0 prints how often a step calls the watch's observers and how long these calls take in place, with the caches as
the step has left them; and how long a tick of the watchdog thread takes, which also holds Python's lock. torch's flight
recorder, which is on by default, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanmoe.components import COMPONENTS
from titanmoe.observe import POINTS, Observer, listening
from titanmoe.train.build import build_training
from titanmoe.train.launch import read_config
from titanmoe.train.runtime import exit_now, start, stop, world_size
from titanmoe.train.trainer import Trainer
from titanmoe.watch.number_checks import checks
from titanmoe.watch.run_watch import Watch
from titanmoe.watch.watchdog import TICK_S

CONFIG = ["--config", "train_configs/debug.toml", "--training.device=cpu", "--training.steps=1000000"]
CONFIG += ["--checkpoint.enable=false"]


class Timed(Observer):
    """Observer that passes every call on to another observer; `calls` counts them and `ns` sums their nanoseconds.

    Each observer needs a subclass of its own, because the class is marked with the points that it observes.
    """

    def __init__(self, observer: Observer):
        self.calls, self.ns = 0, 0
        for point in POINTS:
            if getattr(type(observer), point) is not getattr(Observer, point):
                setattr(type(self), point, None)  # marks the point as observed
                setattr(self, point, self._timed(getattr(observer, point)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            begin = time.perf_counter_ns()
            result = call(*args, **more)
            self.ns += time.perf_counter_ns() - begin
            self.calls += 1
            return result

        return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.steps = 2
    alone = ["--parallelism.tp=1", "--parallelism.experts.ep=1"]
    config = read_config([*CONFIG, *(alone if world_size() == 1 else [])], world_size(), COMPONENTS)
    runtime = start(config)
    training = build_training(config, runtime, checks=checks)
    trainer, watch = Trainer(training), Watch(config.training, config.checkpoint, training)
    kinds = [type(f"Timed{type(one).__name__}", (Timed,), {})(one) for one in watch.observers]
    steps, ticks = [], []
    for step in range(args.steps):
        if step == args.steps // 4:  # by then the heap has settled
            steps = []
            for timed in kinds:
                timed.calls = timed.ns = 0
        begin = time.perf_counter()
        with listening(kinds[0]), listening(kinds[1]):
            trainer.train_step()
        steps.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        watch.watchdog.tick()
        ticks.append(time.perf_counter() - begin)
    calls, seconds = (sum(getattr(one, name) for one in kinds) / len(steps) for name in ("calls", "ns"))
    step_s, tick_s = statistics.median(steps), statistics.median(ticks)
    fraction = seconds * 1e-9 / step_s + tick_s / TICK_S
    if runtime.rank == 0:
        print(
            f"{calls:.0f} calls a step, {seconds / calls / 1e3:.2f} us each: {seconds / 1e6:.3f} ms of a step of "
            f"{step_s * 1e3:.0f} ms ({seconds * 1e-9 / step_s:.3%})\n"
            f"a tick takes {tick_s * 1e6:.0f} us, every {TICK_S} s ({tick_s / TICK_S:.3%}): {fraction:.3%} in all"
        )
    stop()
    return 0


if __name__ == "__main__":
    exit_now(main())
