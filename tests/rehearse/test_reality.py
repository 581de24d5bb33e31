"""A rehearsal compared with real ranks: every message, byte, split size and line, in host order."""

from __future__ import annotations

from typing import Any

import pytest

from tests import world
from tests.rehearse.real import measured, rehearsed
from tests.rehearse.small import comparable
from tests.support import case_features
from tests.support.covering_mappings import all_folds, as_changes, case_id, cover, has_several_ranks

ONE = {"model.num_layers": 1, "training.global_batch_size": 4}
LEARNED = {"moe.force_balance": False, "model.top_k": 3}
"""Ragged: what each rank chose is recorded and given to the rehearsal."""
EP4 = ONE | {"parallelism.experts.ep": 4}
PP2 = {"parallelism.pp": 2, "parallelism.experts.ep": 2}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp, ragged ep": (4, "cpu", EP4 | LEARNED | {"parallelism.tp": 2, "model.num_layers": 2}),
    "as on GPUs: etp, HSDP": (
        4,
        "h100",
        ONE | {"parallelism.dp_replicate": 2, "parallelism.experts.ep": 1, "parallelism.experts.etp": 2},
    ),
    "as on GPUs: pipeline": (4, "h100", PP2 | {"training.global_batch_size": 4, "moe.aux_loss": 0.01}),
    "as on GPUs: vocabulary over the pipeline": (
        4,
        "h100",
        {"parallelism.pp": 2, "parallelism.tp": 2, "parallelism.vocab": "pipeline", "model.vocab_size": 49}
        | {"training.global_batch_size": 4, "model.mtp_depth": 1},
    ),
    "ring, ragged": (
        4,
        "cpu",  # the ring's GPU kernel does not run on CPUs
        ONE | LEARNED | {"parallelism.cp": 2, "parallelism.cp_kind": "ring", "parallelism.experts.ep": 2},
    ),
    "padded": (4, "cpu", EP4 | {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}),
    "gathered": (4, "cpu", EP4 | {"moe.dispatcher": "allgather"}),
    "as on GPUs: symmetric memory, ragged": (4, "h100", EP4 | LEARNED | {"moe.dispatcher": "symm_mem"}),
    "as on GPUs: across nodes, ragged": (
        8,
        "h100",
        LEARNED
        | {"model.num_layers": 1, "parallelism.experts.ep": 8, "parallelism.node": 4, "training.global_batch_size": 8}
        | {"moe.dispatcher": "hierarchical"},
    ),
}


def check(size: int, hardware: str, changes: dict[str, Any], ranks: tuple[int, ...] = (-1,), steps: int = 1) -> None:
    real = world.run(size, measured, changes, hardware, steps, timeout=100)
    for rank in ranks:
        rank %= size
        rehearsal = rehearsed(changes, size, rank, hardware, real, steps)
        own_messages, real_messages = comparable(rehearsal.log, rehearsal.groups), real[rank].messages
        first = next((i for i, (a, b) in enumerate(zip(own_messages, real_messages, strict=False)) if a != b), None)
        assert first is None, (
            f"rank {rank}, event {first}: rehearsed {own_messages[first]}, real {real_messages[first]}"
        )
        assert len(own_messages) == len(real_messages)
        assert (rehearsal.parameter_bytes, rehearsal.optimizer_bytes) == (real[rank].weights, real[rank].moments)
        assert rehearsal.gradient_bytes == real[rank].gradients


@pytest.mark.parametrize("name", CASES)
def test_every_message_is_the_real_one(name: str) -> None:
    check(*CASES[name])


# ---- wider

WIDE = {"model.num_layers": 2, "training.global_batch_size": 8}
FEATURES = {
    **{f"second step, {name}": case for name, case in CASES.items()},
    **{f"cp {name}": (4, "cpu", WIDE | of | {"parallelism.cp": 2}) for name, of in case_features.CP_KINDS.items()},
    **{f"recompute {name}": (4, "h100", EP4 | of) for name, of in case_features.RECOMPUTE.items()},
    **{
        f"balance {name}": (4, "cpu", EP4 | of | LEARNED)
        for name, of in case_features.BALANCE.items()
        if name != "forced"
    },
    **{f"model {name}": (4, "cpu", WIDE | of | {"parallelism.tp": 2}) for name, of in case_features.MODELS.items()},
    **{
        f"schedule {name}": (4, "h100", PP2 | of | {"model.num_layers": 4, "training.global_batch_size": 8})
        for name, of in case_features.SCHEDULES.items()
    },
    **{
        f"dispatcher {name}": (4, "h100", EP4 | of | {"parallelism.node": 4 if name == "symm_mem" else 2})
        for name, of in case_features.DISPATCHERS.items()
    },
    "pairs": (
        4,
        "h100",
        PP2
        | case_features.SCHEDULES["DualPipeV"]
        | {"moe.overlap": "pairs", "model.num_layers": 4, "training.global_batch_size": 8},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    size, hardware, changes = FEATURES[name]
    check(size, hardware, changes, (0, size - 1), 2 if name.startswith("second") else 1)


FOLDS = all_folds(8)
COVER = [FOLDS[i] for i in cover([has_several_ranks(fold) for fold in FOLDS])]


@pytest.mark.slow
@pytest.mark.parametrize("fold", [pytest.param(fold, id=case_id(fold)) for fold in COVER])
def test_mappings(fold: Any) -> None:
    changes = as_changes(fold) | {"training.global_batch_size": 8 * max(1, fold.pp)}
    check(8, "cpu" if fold.cp > 1 else "h100", WIDE | changes, (0, 7))
