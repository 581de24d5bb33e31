"""Differences of log-probabilities of the same samples by batch, packing and mapping.

    torchrun --standalone --nproc-per-node 2 scripts/bench/log_probs.py

A random model of 4 layers with 32 experts, 8 samples of 64 tokens; each case against one sample a microbatch, no rank
sharing a layer with another. "experts given" replays the experts of that case. The last column is the fraction of
tokens whose probability ratio is outside [0.9, 1.1]. One process alone runs the cases that need no second rank.

N samples, S positions, L MoE layers, K top-k.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import titanmoe
from titanmoe.train.runtime import exit_now, stop, world_size

SAMPLES, LENGTH = 8, 64
MODEL = {
    "model.dim": 256,
    "model.num_layers": 4,
    "model.head_dim": 32,
    "model.expert_hidden": 256,
    "model.num_experts": 32,
    "model.top_k": 4,
    "model.vocab_size": 512,
    "model.init_std": 0.06,
    "training.seq_len": LENGTH,
    "training.global_batch_size": SAMPLES,
    "training.local_batch_size": 1,
    "training.dtype": "float32",
    "moe.aux_loss": 0.0,
    "job.ranks": 0,
    "parallelism.tp": 1,
    "parallelism.experts.ep": 1,
}
TINY = {"model.dim": 32, "model.num_layers": 2, "model.expert_hidden": 32, "model.num_experts": 8}
EP2 = {"parallelism.experts.ep": 2}
CP2, TP2 = EP2 | {"parallelism.cp": 2}, EP2 | {"parallelism.tp": 2}
CASES: dict[str, dict[str, Any]] = {
    "the same again": {},
    "8 samples a microbatch": {"training.local_batch_size": 8, "training.global_batch_size": 16},
    "4 samples packed into one": {"training.seq_len": 4 * LENGTH, "training.global_batch_size": 2},
    "ep 2": EP2,
    "cp 2": CP2,
    "tp 2": TP2,
    "cp 2, experts given": CP2,
    "tp 2, experts given": TP2,
}


def measure(changes: dict[str, Any], experts_NSLK: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Open the debug recipe with `changes`; return log-probabilities of fixed random samples, and experts. Collective.

    The former are float64 on the CPU, (SAMPLES, LENGTH - 1); samples are packed as documents if training.seq_len is
    longer than LENGTH. `changes` are new values of the recipe's fields by path. `experts_NSLK` are the experts that
    tokens are sent to, as a call with the same samples per sequence returned them; None lets the routers choose.
    """
    run = titanmoe.open("debug", changes, trains=False)
    ids = torch.randint(0, 512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(5))
    row = run.config.training.seq_len
    documents = (torch.arange(row) // LENGTH).expand(SAMPLES * LENGTH // row, row) if row > LENGTH else None
    columns = {} if experts_NSLK is None else {"routes": experts_NSLK}
    log_probs, routes = run.log_probs_and_routes(run.batch(ids.view(-1, row), documents=documents, **columns))
    return log_probs.cpu().view(SAMPLES, LENGTH)[:, :-1].double(), routes.experts_NSLK


def main() -> None:
    """Print a line for each case and dtype on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    tiny = TINY if parser.parse_args().tiny else {}
    try:
        for dtype in ("bfloat16", "float32"):
            base = MODEL | tiny | {"training.mixed_precision_param": dtype}
            alone, experts_NSLK = measure(base, None)
            for name, changes in CASES.items():
                if "2" in name and world_size() == 1:
                    continue
                other, _ = measure(base | changes, experts_NSLK if "given" in name else None)
                difference, ratio = (other - alone).abs(), (other - alone).exp()
                outside = ((ratio < 0.9) | (ratio > 1.1)).double().mean()
                if torch.distributed.get_rank() == 0:
                    line = f"largest {difference.max():.1e}  mean {difference.mean():.1e}  {outside:.1%}"
                    print(f"{dtype:9} {name:26} {line}", flush=True)
    finally:
        stop()


if __name__ == "__main__":
    main()
    exit_now(0)
