#!/usr/bin/env python
"""What the watch over a run costs: blocks of steps with it and without it, in turns, on the same ranks.

torchrun --nproc-per-node 4 scripts/bench/watch.py --config train_configs/debug.toml [--table.field value ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanmoe.train.launch import read
from titanmoe.train.runtime import leave, start, stop, world_size

BLOCK, TURNS = 5, 12


def main() -> None:
    config = read(sys.argv[1:], world_size())
    runtime = start(config)
    from titanmoe.train.trainer import Trainer
    from titanmoe.watch.heartbeat import TOTAL
    from titanmoe.watch.watch import Watch

    trainer = Trainer(config, runtime)
    for _ in range(BLOCK):
        trainer.train_step()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    sent = 0
    for turn in range(2 * TURNS):
        watched = turn % 2 == 0
        watch = Watch(trainer) if watched else nullcontext()
        with watch:
            began = time.perf_counter()
            for _ in range(BLOCK):
                trainer.train_step()
            seconds[watched].append((time.perf_counter() - began) / BLOCK)
            sent = watch.heart.numbers[TOTAL] // BLOCK if watched else sent
    if runtime.rank == 0:
        on, off = (statistics.median(seconds[watched]) for watched in (True, False))
        pairs = [a / b - 1 for a, b in zip(seconds[True], seconds[False], strict=True)]
        print(
            f"{runtime.world} ranks, {2 * TURNS} turns of {BLOCK} steps: {on * 1e3:.2f} ms watched, {off * 1e3:.2f} ms "
            f"not; median of the ratios {statistics.median(pairs):+.2%}; {sent} messages a step"
        )
        heart, x = watch_alone()
        began = time.perf_counter()
        for _ in range(100_000):
            heart.issued("all-reduce", x, "0")
            heart.arrived()
        each = (time.perf_counter() - began) / 1e5
        print(f"{each * 1e6:.2f} us for a message, so {each * sent * 1e3:.3f} ms a step, {each * sent / off:.2%}")
    stop()


def watch_alone():
    """A listener whose only group is called "0"."""
    import tempfile

    import torch

    from titanmoe.watch.heartbeat import Heartbeat
    from titanmoe.watch.listener import Listener

    class One:
        made = {}

    with tempfile.TemporaryDirectory() as folder:
        listener = Listener(Heartbeat(Path(folder, "0"), create=True), One(), lambda: 0)
    listener.groups["0"] = 0
    return listener, torch.zeros(8)


if __name__ == "__main__":
    main()
    leave(0)
