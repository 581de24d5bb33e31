"""Pairs of ranks that are killed while they save. They are not the pools of tests.world, which are meant to live."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import world

RANKS = 2


@contextlib.contextmanager
def pair(target: Any, *args: Any, log: Path) -> Iterator[list[BaseProcess]]:
    """target(rank, *args) on two ranks with a process group; killed at the end if they are still alive."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = world._forkserver()
    ranks = [context.Process(target=_rank, args=(rank, store.port, log, target, args)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(rank: int, port: int, log: Path, target: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # including how the other rank dies of its loss
    os.dup2(2, 1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    target(rank, *args)
    os._exit(0)


# ---- a writer that dies at its n-th step


def contents(step: int) -> dict[str, torch.Tensor]:
    """What a checkpoint of that step must hold."""
    return {"model.a": torch.arange(12.0).view(4, 3) + step, "model.b": torch.full((5,), float(step))}


def save_two(rank: int, folder: str, mode: str, victim: int, at: int, steps_seen: str) -> None:
    """Save step 1, then step 2 over it; the victim dies before its at-th disk operation for step 2. If at is 0, nobody
    dies, and each leaves a copy of the folder from before each such operation. mode: how to save.
    """
    from titanmoe.checkpoint import write_tensors
    from titanmoe.checkpoint.saver import Saver
    from titanmoe.checkpoint.write_tensors import TensorShard
    from titanmoe.config.schema import Checkpoint

    saver = Saver(Path(folder), Checkpoint(enable=True, save=mode, keep_last=1))

    def save(step: int) -> None:
        a, b = contents(step).values()
        # a is on both ranks, half each; b is whole on both
        pieces = {
            "model.a": TensorShard(a[rank * 2 : rank * 2 + 2].clone(), (rank * 2, 0), (4, 3)),
            "model.b": TensorShard(b, (0,), (5,)),
        }
        saver.save(step, pieces, {"step": step})
        saver.wait()

    save(1)
    calls: list[str] = []

    def doing(what: str) -> None:
        calls.append(what)
        if rank == victim and len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if at == 0:
            shutil.copytree(folder, Path(steps_seen, f"{rank}-{len(calls)}"))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        # rmtree names what it removes relative to an open folder
        if event in ("os.remove", "os.rmdir") or (event in ("os.mkdir", "os.rename") and folder in str(args[0])):
            doing(event)
        elif event == "open" and folder in str(args[0]) and isinstance(args[2], int) and args[2] & os.O_CREAT:
            doing("open for writing")

    sys.addaudithook(audit)
    write, close = write_tensors._ChecksummedFile.write, write_tensors._ChecksummedFile.close
    write_tensors._ChecksummedFile.write = lambda self, data: (doing("write"), write(self, data))[1]
    write_tensors._ChecksummedFile.close = lambda self: (None if self.closed else doing("fsync"), close(self))[1]
    save(2)
    seen_by_me = list(calls)
    Path(steps_seen, str(rank)).write_text("\n".join(seen_by_me))


# ---- a whole run, saving at every step


def train(rank: int, folder: str, changes: dict[str, Any]) -> None:
    from tests import parity
    from tests.checkpoint import runs

    parity.make_trainer(runs.RUN | {"job.dump_folder": folder} | changes).train()


def train_until_killed(rank: int, folder: str, changes: dict[str, Any], step: int, when: str) -> None:
    """Rank 0, which writes the lines, dies "before" or "after" saving that step."""
    from titanmoe.train.checkpoints import Checkpoints

    save = Checkpoints._save

    def dying(checkpoints: Checkpoints) -> float:
        last = rank == 0 and checkpoints.state.step == step
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        took = save(checkpoints)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return took

    Checkpoints._save = dying
    train(rank, folder, changes)


def train_with_losses(
    rank: int, folder: str, changes: dict[str, Any], losses: dict[int, float], step: int = 0, when: str = ""
) -> None:
    """Train with these validation losses by step; rank 0 dies "before" or "after" saving a step, if one is given."""
    from titanmoe.train.evaluation import Validation

    Validation.measure = lambda self: (losses[self.state.step], {})
    if step:
        train_until_killed(rank, folder, changes, step, when)
    else:
        train(rank, folder, changes)


def kill(ranks: list[BaseProcess], order: list[int], between_s: float) -> None:
    for number, rank in enumerate(order):
        if number:
            time.sleep(between_s)
        ranks[rank].kill()
    for process in ranks:
        process.join()
