#!/usr/bin/env python
"""Slows a rank, a link between two or a rank's data in runs of 4 CPU ranks, and checks who is named, and for what.

    python scripts/torture_stragglers.py                         # 4 mappings x 3 faults x 5 trials, and a table
    python scripts/torture_stragglers.py --mapping pp --only link --trials 1 --first 3        # repeat one
    python scripts/torture_stragglers.py --results FILE --out docs/reliability.md   # the table between its marks there

With --results the trials that are already in the file are not made again; --for 200 begins none after 200 seconds.

Each rank is in a network namespace of its own, on one bridge. A link becomes slow when a program carries the packets
between its two ends and holds each back for some milliseconds; the others stay on the bridge. It needs root on Linux.
A world trains on while one trial follows another, in ranks and strengths drawn from seeds. The first that is named must
be right, and between trials nobody may be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import random
import select
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture import workplace, write
from torture_runs import TINY, Missed, Wrong, last_words

RANKS, LIMIT_S, CALM = 4, 100.0, 64
"""LIMIT_S: for a name. CALM: steps at the start of a world, in which nobody may be named."""
NAME, TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = "titanmoe", 0x400454CA, 1, 0x1000, 0x40000000
LONG = TINY | {
    "model.num_layers": 1, "training.steps": 100_000, "training.timeout_s": 60, "lr_schedule.decay": "none",
    "checkpoint.enable": "false", "metrics.log_every": 1, "moe.force_balance": "true",
}  # fmt: skip
MAPPINGS: dict[str, dict[str, Any]] = {
    "dp": {"parallelism.experts.ep": 2},
    "tp": {"parallelism.tp": 2, "parallelism.experts.ep": 4},
    "cp": {"parallelism.cp": 2, "parallelism.experts.ep": 2},
    "pp": {"parallelism.pp": 2, "parallelism.experts.ep": 2, "model.num_layers": 2},
}


# ---- the network


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def space(rank: int | str) -> str:
    return f"{NAME}-{os.getppid() if multiprocessing.parent_process() else os.getpid()}-{rank}"


def enter(name: str) -> None:
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


@contextmanager
def network() -> Iterator[None]:
    names = [space(name) for name in ("lan", *range(RANKS))]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "lan", "type", "bridge")
        ip("-n", names[0], "link", "set", "lan", "up")
        for rank, name in enumerate(names[1:]):
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{rank}", "netns", names[0])
            ip("-n", names[0], "link", "set", f"port{rank}", "master", "lan", "up")
            ip("-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def carry(ends: tuple[int, int], seconds: float) -> None:
    """Packets between two ranks, each held back for so long."""
    devices = []
    for end in ends:
        enter(space(end))
        devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(devices[-1], TUNSETIFF, struct.pack("16sH22x", b"slow", IFF_TUN | IFF_NO_PI))
        ip("link", "set", "slow", "up")
    for end, other in (ends, ends[::-1]):
        enter(space(end))
        for device in ("all", "slow"):
            Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").write_text("0")
        ip("route", "add", f"{address(other)}/32", "dev", "slow")
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        until = max(0.0, held[0][0] - time.monotonic()) if held else None
        for device in select.select(devices, [], [], until)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    held.append(
                        (time.monotonic() + seconds, devices[1 - devices.index(device)], os.read(device, 65536))
                    )
        while held and held[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # its queue is full: TCP sends it again
                os.write(held[0][1], held[0][2])
            held.popleft()


# ---- the ranks


def train(rank: int, words: list[str], log: Path, slow_reads: Path) -> None:
    """A rank's process. It reads slowly as long as there is a file of that name, for as many seconds as it says."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    enter(space(rank))
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    from titanmoe.data.loader import SampleReader
    from titanmoe.train.launch import main
    from titanmoe.train.runtime import leave
    from titanmoe.watch.begin import watched
    from titanmoe.watch.numbers import checks

    read = SampleReader.__getitem__

    def slowly(self: SampleReader, plan: Any) -> Any:
        with contextlib.suppress(OSError, ValueError):
            time.sleep(float(slow_reads.read_text()))
        return read(self, plan)

    SampleReader.__getitem__ = slowly
    leave(main(words, watch=watched, checks=checks))


class World:
    def __init__(self, folder: Path, mapping: str):
        self.folder, self.run, self.log = folder, folder / "run", folder / "log"
        folder.mkdir(parents=True)
        options = LONG | MAPPINGS[mapping] | {"job.dump_folder": folder}
        words = [f"--{name}={value}" for name, value in options.items()]
        context = multiprocessing.get_context("fork")
        self.ranks = [
            context.Process(target=train, args=(rank, words, self.log, self.slow_reads(rank))) for rank in range(RANKS)
        ]
        for rank in self.ranks:
            rank.start()
        self.seen: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    def slow_reads(self, rank: int) -> Path:
        return self.folder / f"slow{rank}"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Whole ones so far."""
        at, found = self.seen.get(name, (0, []))
        with contextlib.suppress(OSError), (self.run / name).open("rb") as file:
            file.seek(at)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            found += map(json.loads, whole.splitlines())
            self.seen[name] = at + len(whole), found
        return found

    @property
    def step(self) -> int:
        lines = self.lines("metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def names(self) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["kind"] == "straggler"]

    def wait(self, condition: Callable[[], object], what: str, limit: float = LIMIT_S) -> None:
        end = time.monotonic() + limit
        while not condition():
            if not all(rank.is_alive() for rank in self.ranks):
                raise Missed(f"the run has ended: {last_words(self.log)}")
            if time.monotonic() > end:
                raise Wrong(f"{what} did not happen within {limit:.0f} s; {self.numbers()}")
            time.sleep(0.05)

    def numbers(self) -> dict[str, float]:
        last = self.lines("metrics.jsonl")[-1]
        return {name: float(f"{value:.3g}") for name, value in last.items() if "straggler" in name or "step" in name}

    def calm(self, steps: int) -> None:
        """Until nobody has been named for so many steps from now on."""
        now = self.step

        def quiet() -> bool:
            last = self.lines("metrics.jsonl")[-steps:]
            calm = last and not any(line.get("straggler.cause", 0) for line in last)
            return bool(calm) and last[-1]["step"] > now + steps

        self.wait(quiet, "calm", 3 * LIMIT_S)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()


# ---- faults


@contextmanager
def pulses(world: World, draw: random.Random) -> Iterator[tuple[list[int], str]]:
    """A rank is stopped and goes on, many times a second."""
    rank, stopped, runs = draw.randrange(RANKS), draw.uniform(0.02, 0.06), draw.uniform(0.01, 0.03)
    over, pid = threading.Event(), world.ranks[rank].pid

    def pulse() -> None:
        while not over.is_set():
            for number, seconds in ((signal.SIGSTOP, stopped), (signal.SIGCONT, runs)):
                os.kill(pid, number)
                time.sleep(seconds)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield [rank], "compute"
    finally:
        over.set()
        thread.join()


@contextmanager
def data(world: World, draw: random.Random) -> Iterator[tuple[list[int], str]]:
    """A rank reads the samples of a step in one and a half to three times as long as a step takes."""
    rank = draw.randrange(RANKS)
    step_s = statistics.median(line["step_time_s"] for line in world.lines("metrics.jsonl")[-20:])
    file = world.slow_reads(rank)
    file.with_suffix(".new").write_text(str(draw.uniform(1.5, 3) * step_s))
    file.with_suffix(".new").rename(file)
    try:
        yield [rank], "data"
    finally:
        file.unlink()


@contextmanager
def link(world: World, draw: random.Random) -> Iterator[tuple[list[int], str]]:
    """3 to 10 ms on every packet between two ranks."""
    ends = tuple(sorted(draw.sample(range(RANKS), 2)))
    carrier = multiprocessing.get_context("fork").Process(target=carry, args=(ends, draw.uniform(0.003, 0.01)))
    carrier.start()
    try:
        yield list(ends), "link"
    finally:
        carrier.kill()
        carrier.join()


Fault = Callable[[World, random.Random], AbstractContextManager[tuple[list[int], str]]]
KINDS: dict[str, Fault] = {"pulses": pulses, "link": link, "data": data}
WHAT = {
    "pulses": "a rank pulsed by SIGSTOP",
    "link": "packets between two ranks held back",
    "data": "slow data on one rank",
}


def trial(world: World, kind: str, seed: int) -> dict[str, Any]:
    result = {"fault": kind, "seed": seed, "named": False, "false": 0}
    before, step, began = len(world.names()), world.step, time.monotonic()
    with KINDS[kind](world, random.Random(f"{kind} {seed}")) as (ranks, cause):
        world.wait(lambda: len(world.names()) > before, f"{kind}: a name ({cause} of {ranks})")
        name = world.names()[before]
    result["named"] = (name["ranks"], name["cause"]) == (ranks, cause)
    result |= {"steps": name["step"] - step, "seconds": round(time.monotonic() - began, 1), "text": name["text"]}
    result |= {"links_ms": name["links_ms"]} if "links_ms" in name else {}
    print(
        f"{kind}, seed {seed}: {cause} of {ranks} {'' if result['named'] else 'NOT '}named: {name['text']}", flush=True
    )
    world.calm(8)
    result["false"] = len(world.names()) - before - 1
    return result


def table(results: list[dict[str, Any]]) -> str:
    head = ("what was slow", "trials", "named rightly", "others named meanwhile", "steps until then: median", "max")
    lines = [f"| {' | '.join(head)} |", "| --- | --- | --- | --- | --- | --- |"]
    for kind, what in WHAT.items():
        if mine := [one for one in results if one["fault"] == kind]:
            steps = [one["steps"] for one in mine if "steps" in one]
            right, wrong = sum(one["named"] for one in mine), sum(one["false"] for one in mine)
            lines.append(
                f"| {what} | {len(mine)} | {right} | {wrong} | {statistics.median(steps):.0f} | {max(steps)} |"
            )
    if calm := [one for one in results if one["fault"] == "none"]:
        lines.append(f"| nothing, {sum(one['steps'] for one in calm):,} steps | {len(calm)} | | "
                     f"{sum(one['false'] for one in calm)} | | |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapping", choices=MAPPINGS, help=f"one of: {', '.join(MAPPINGS)}; else all")
    parser.add_argument("--only", choices=KINDS, metavar="KIND", help=f"one of: {', '.join(KINDS)}")
    parser.add_argument("--trials", type=int, default=5, metavar="N", help="of each fault and mapping (default 5)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first trial of each")
    parser.add_argument("--results", metavar="FILE", help="a line per trial; the table is of all its lines")
    parser.add_argument("--for", type=float, default=1e9, metavar="SECONDS", dest="most", help="begin no trial later")
    parser.add_argument("--out", metavar="FILE", help="also write the table there, between its marks")
    args = parser.parse_args()
    if not sys.platform.startswith("linux") or os.geteuid():
        parser.error("this needs root on Linux: it makes network namespaces")
    import titanmoe.train.trainer
    import titanmoe.watch.watch  # noqa: F401 (before the first fork)

    results: list[dict[str, Any]] = []
    if args.results and Path(args.results).exists():
        results = [json.loads(line) for line in Path(args.results).read_text(encoding="utf-8").splitlines()]
    made = {(one["mapping"], one["fault"], one.get("seed")) for one in results}
    kinds, seeds = [args.only] if args.only else list(KINDS), range(args.first, args.first + args.trials)
    end = time.monotonic() + args.most

    def add(mapping: str, result: dict[str, Any]) -> None:
        results.append({"mapping": mapping} | result)
        if args.results:
            with open(args.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1]) + "\n")

    with workplace() as folder, network():
        for mapping in [args.mapping] if args.mapping else MAPPINGS:
            todo = [(kind, seed) for kind in kinds for seed in seeds if (mapping, kind, seed) not in made]
            if not todo or time.monotonic() > end:
                continue
            world, (kind, seed) = World(folder / mapping, mapping), todo[0]
            try:
                world.wait(lambda: world.step, "the first step")  # noqa: B023 (used at once)
                world.calm(CALM)
                add(mapping, {"fault": "none", "steps": world.step, "false": len(world.names())})
                for kind, seed in todo:
                    if time.monotonic() < end:
                        add(mapping, trial(world, kind, seed))
            except (Wrong, Missed) as wrong:
                print(f"{mapping}: {wrong}", flush=True)
                add(mapping, {"fault": kind, "seed": seed, "named": False, "false": 0, "text": str(wrong)})
            finally:
                world.close()
                world.log.replace(folder / f"{mapping}.log")
    text = table(results)
    print("\n" + text)
    if args.out:
        write(Path(args.out), "stragglers", text)
    return 0 if all(one.get("named", not one["false"]) for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
