"""[moe] overlap = "halves": in a block one half of the samples is computed while rows of the other travel. No number
changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests import parity
from tests.support import case_features
from tests.support.covering_mappings import all_folds, case_id, cover, has_several_ranks
from titanmoe.fold.degrees import Fold

HALVES = {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 8}
SHARED = {"model.shared_hidden": 16}
EP2 = {"parallelism.experts.ep": 2, "moe.aux_loss": 0.02}
CASES: dict[str, dict[str, Any]] = {
    "recomputed": EP2 | SHARED | {"activation_checkpoint.mode": "full"},
    "dispatch saved": EP2 | SHARED | {"activation_checkpoint.mode": "full_except_dispatch"},
    "experts recomputed, cp, balance over data ranks": {
        "parallelism.cp": 2,
        "parallelism.experts.etp": 2,
        "moe.aux_loss_global": 0.02,
        "moe.jitter": 0.1,
        "activation_checkpoint.mode": "moe",
    },
    "an odd number of samples, two nodes": SHARED
    | {"training.local_batch_size": 3, "training.global_batch_size": 12, "moe.aux_loss_sequence": 0.02}
    | {"parallelism.experts.ep": 2, "moe.dispatcher": "hierarchical", "parallelism.node": 1},
    "a schedule that splits backward": EP2
    | {"parallelism.pp": 2, "parallelism.experts.ep": 1, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4},
    "compiled": EP2 | SHARED | {"compile.enable": True, "compile.backend": "aot_eager"},
    "adapters, two predictions": EP2
    | {"lora.rank": 6, "lora.experts_rank": 3, "lora.alpha": 7.0, "model.mtp_depth": 1},
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name == "compiled" else name for name in CASES]
)
def test_no_number_changes(case: str) -> None:
    parity.check(2, HALVES | CASES[case], documents=case == "recomputed", steps=1)


def every_pair() -> list[Any]:
    """Of axes, used or not, and of features that go with halves."""
    decks = {
        name: list(choices) for name, choices in case_features.FEATURES.items() if name not in ("batch", "dropping")
    }
    decks["dispatcher"] = ["alltoall", "hierarchical"]
    pool, number = [], 0
    for _ in range(40):
        for fold in all_folds(4):
            number += 1
            choice = {name: deck[(number * (7 + 2 * i)) % len(deck)] for i, (name, deck) in enumerate(decks.items())}
            alone = fold.edp == 1 and choice["trained"] != "adapters"
            left_out = {
                "schedule": fold.pp == 1,
                "cp": fold.cp == 1,
                "option": choice["option"] == "accumulated" and not alone,
            }
            pool.append((fold, {name: value for name, value in choice.items() if not left_out.get(name)}))
    chosen = cover([has_several_ranks(fold) | choice for fold, choice in pool])
    return [pytest.param(*pool[i], id="-".join([case_id(pool[i][0]), *pool[i][1].values()])) for i in sorted(chosen)]


@pytest.mark.sweep
@pytest.mark.parametrize(("fold", "choice"), every_pair())
def test_every_pair_of_choices(fold: Fold, choice: dict[str, str]) -> None:
    changes = case_features.changes(fold, choice | {"batch": "2"}) | {"moe.overlap": "halves"}
    steps = case_features.steps(choice)
    parity.check(4, changes, documents=choice["documents"] == "yes", steps=steps)
