"""Differences of log-probabilities of the same samples by batch, packing and mapping, on CPUs.

    python -m scripts.bench.log_probs

A random model of 4 layers with 32 experts, 8 samples of 64 tokens; each case against one rank with one sample a
microbatch. "replayed" gives the routers the experts of that rank. The last column is the fraction of tokens whose
probability ratio is outside [0.9, 1.1].
"""

from __future__ import annotations

from typing import Any

import torch

from tests import parity, world
from titanmoe.data.batch import ROUTES
from titanmoe.session import NoLoader, Session

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
    "training.dtype": "float32",
    "training.mixed_precision_reduce": "float32",
}
EP2 = {"parallelism.experts.ep": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "the same again": (1, {}),
    "8 samples a microbatch": (1, {"training.local_batch_size": 8}),
    "4 samples packed into one": (1, {"training.seq_len": 4 * LENGTH, "training.global_batch_size": 2}),
    "ep 2": (2, EP2),
    "cp 2": (2, EP2 | {"parallelism.cp": 2}),
    "tp 2": (2, EP2 | {"parallelism.tp": 2}),
    "cp 2, replayed": (2, EP2 | {"parallelism.cp": 2}),
    "tp 2, replayed": (2, EP2 | {"parallelism.tp": 2}),
}


def measure(changes: dict[str, Any], routes: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the labels (samples, length - 1) and the experts of all tokens."""
    trainer = parity.make_trainer(changes, loader=NoLoader)
    session = Session(parity.read(changes, trainer.training.runtime.world), trainer.training)
    ids = torch.randint(0, 512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(5))
    row = session.config.training.seq_len
    documents = (torch.arange(row) // LENGTH).expand(SAMPLES * LENGTH // row, row)
    batch = session.batch(ids.view(-1, row), documents=documents if row > LENGTH else None)
    if routes is not None:
        batch = batch._replace(extra_fields={ROUTES: routes})
    log_probs, chosen = session.log_probs_and_routes(batch)
    return log_probs.view(SAMPLES, LENGTH)[:, :-1].double(), chosen.experts_NSLK


def main() -> None:
    """Print a line for each case and dtype."""
    for dtype in ("bfloat16", "float32"):
        base = MODEL | {"training.mixed_precision_param": dtype}
        alone, routes = world.run(1, measure, base, None)[0]
        for name, (size, changes) in CASES.items():
            other, _ = world.run(size, measure, base | changes, routes if "replayed" in name else None)[0]
            apart, ratio = (other - alone).abs(), (other - alone).exp()
            outside = ((ratio < 0.9) | (ratio > 1.1)).double().mean()
            print(f"{dtype:9} {name:26} largest {apart.max():.1e}  mean {apart.mean():.1e}  {outside:.1%}", flush=True)


if __name__ == "__main__":
    main()
