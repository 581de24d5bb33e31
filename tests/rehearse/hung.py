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
        if rank == GUILTY and trainer.step == STEP:
            (folder / "hangs").touch()
            time.sleep(1000)
        return back(*args)

    dispatcher.leave = hangs
    try:
        while True:
            trainer.train_step()
    except RuntimeError:
        if not (folder / "hangs").exists():
            raise
        time.sleep(1000)  # a rank has left before this one: its dump comes first


def leave(folder: Path, rank: int) -> None:
    """As NCCL's watchdog does on a time-out."""
    while not (folder / "hangs").exists():
        time.sleep(0.05)
    time.sleep(2)
    (folder / f"trace_rank_{rank}").write_bytes(_dump_fr_trace())
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
