"""A long sequence over 1, 2, 4 and 8 context-parallel ranks: activation bytes per rank fall as 1/cp.

python -m pytest -m slow tests/parallel/test_context_memory.py -s        prints the table of docs/parallelism.md
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import parity, world
from tests.support.live_bytes import LiveBytes

LENGTH = 8192


def activation_bytes(changes: dict[str, Any]) -> int:
    """Peak of live tensors during forward and backward of one microbatch, less the level before forward."""
    from titanmoe.parallel.batch_slice import take_slice

    trainer = parity.make_trainer(changes, loader=parity.samples())
    batches = trainer.training.loader.next_step()
    totals = trainer.training.slicer.count(batches)
    for moe in trainer.training.moe_layers.values():
        moe.begin_step(1, totals.tokens, 1)
    batch_slice = take_slice(
        batches[0], 0, trainer.training.meshes, trainer.training.slicer.placement, trainer.training.device
    )
    with LiveBytes() as live:
        gradients = trainer.training.gradients
        gradients.engine.run([batch_slice], gradients.objective)
    return live.peak


def recipe(cp: int, kind: str) -> dict[str, Any]:
    preset = parity.preset_of("mixtral")
    model = {key: preset[key.removeprefix("model.")] for key in parity.TINY if key.startswith("model.")}
    return model | {
        "model.num_layers": 2,
        "training.dtype": "float32",
        "training.mixed_precision_param": "float32",
        "training.mixed_precision_reduce": "float32",
        "training.seq_len": LENGTH,
        "training.global_batch_size": 1,
        "parallelism.cp": cp,
        "parallelism.cp_kind": kind,
        # Equal loads, so that no rank's share depends on the router.
        "moe.force_balance": True,
    }


@pytest.mark.slow
def test_activation_bytes_fall_as_one_over_cp() -> None:
    table = {}
    for kind in ("ring", "ulysses", "allgather"):
        for cp in (1, 2, 4, 8):
            if cp > 1 or kind == "ring":
                table[kind, cp] = max(world.run(cp, activation_bytes, recipe(cp, kind), timeout=900))
                world.restart(cp)
    whole = table["ring", 1]
    print("\n| cp | ring | ulysses | allgather |\n|---|---|---|---|")
    for cp in (2, 4, 8):
        sizes = (table[kind, cp] for kind in ("ring", "ulysses", "allgather"))
        cells = (f"{size / 2**20:.1f} MiB, {size * cp / whole:.2f}/{cp}" for size in sizes)
        print(f"| {cp} | " + " | ".join(cells) + " |")
    print(f"cp 1: {whole / 2**20:.1f} MiB")
    for (kind, cp), size in table.items():
        if kind != "allgather" and cp > 1:  # what twice the ranks save: some 8 MiB do not depend on cp
            saved = table.get((kind, cp // 2), whole) - size
            assert abs(saved * cp / whole - 1) <= 0.15, f"{kind} cp {cp}: {saved * cp / whole:.3f} of 1/{cp}"
