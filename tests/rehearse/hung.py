"""A rank of a real run that hangs: in step 2, rank 2 never sends back the rows of layer 1. Every rank leaves a dump.

python -m tests.rehearse.hung FOLDER RANK
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from tests import parity
from tests.rehearse.small import FORCED
from titanmoe.rehearse.samples import Samples
from titanmoe.rehearse.world import recipe_to_rehearse
from titanmoe.train.trainer import Trainer

WORLD, GUILTY, LAYER, STEP = 4, 2, 1, 2
CHANGES = {"parallelism.tp": 2, "parallelism.experts.ep": 4, "training.global_batch_size": 2}
RECIPE = Path(__file__).resolve().parents[2] / "train_configs" / "debug.toml"


def recipe() -> list[str]:
    """As command-line arguments."""
    return ["--config", str(RECIPE), *parity.arguments(parity.TINY | FORCED | CHANGES)]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    threading.Thread(target=leave, args=(folder, rank), daemon=True).start()
    trainer = Trainer(
        recipe_to_rehearse(recipe(), WORLD, "cpu"), parity.runtime_here(), loader=Samples, garbage=parity.no_collection
    )
    dispatcher = trainer.moe_layers[LAYER].dispatcher
    back = dispatcher.leave

    def hangs(*args: Any) -> Any:
        if trainer.step == STEP:
            (folder / f"there_{rank}").touch()
            if rank == GUILTY:
                time.sleep(1000)
        return back(*args)

    dispatcher.leave = hangs
    try:
        while True:
            trainer.train_step()
    except RuntimeError:
        if not everybody(folder, "trace_rank"):
            raise
        time.sleep(1000)  # another rank has left, and this one is about to


def leave(folder: Path, rank: int) -> None:
    """As NCCL's watchdog does on a time-out, but once all have left a dump: what a rank's end does to the messages of
    others belongs in none.
    """
    while not everybody(folder, "there"):
        time.sleep(0.05)
    time.sleep(2)
    unfinished = folder / f"unfinished_{rank}"
    unfinished.write_bytes(_dump_fr_trace())
    unfinished.rename(folder / f"trace_rank_{rank}")
    while not everybody(folder, "trace_rank"):
        time.sleep(0.05)
    os._exit(0)


def everybody(folder: Path, name: str) -> bool:
    """Whether each rank has left this file."""
    return all((folder / f"{name}_{rank}").exists() for rank in range(WORLD))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
