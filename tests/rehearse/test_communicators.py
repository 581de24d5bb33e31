"""How many communicators a rank of a large world has, and that no step sends Python objects."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fold.test_meshes import living
from tests.parity import no_collection
from tests.rehearse.small import config_of
from titanmoe.ops.device import HARDWARE, imitate
from titanmoe.parallel import apply
from titanmoe.plan.communicators import communicators
from titanmoe.rehearse.rehearsal import FakeLoader, _without_values, fake_world, rehearse
from titanmoe.train.build import build_training
from titanmoe.train.runtime import Runtime
from titanmoe.train.trainer import Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs/launch.md"
MOST = 15
EVERY_AXIS = {
    "parallelism.pp": 8,
    "parallelism.dp_replicate": 2,
    "parallelism.cp": 2,
    "parallelism.tp": 4,
    "parallelism.experts.ep": 8,
    "parallelism.experts.etp": 2,
    "model.num_layers": 8,
    "model.num_kv_heads": 4,
    "model.num_heads": 8,
    "model.num_experts": 8,
    "model.tie_embeddings": True,
    "training.seq_len": 32,
    "training.global_batch_size": 128,
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "hierarchical"])
def test_a_rank_of_1024_has_at_most_15(dispatcher: str) -> None:
    """With pp, HSDP, FSDP, cp, tp, ep, etp and a tied embedding. Saving adds a gloo group, which is none of NCCL's."""
    config = config_of(EVERY_AXIS | {"moe.dispatcher": dispatcher}, 1024, "h100")
    materialize = _without_values(FakeTensorMode(allow_non_fake_inputs=True))
    without_numbers = partial(apply.build, materialize=materialize)
    on_page = dict(
        re.findall(r"^\| `(\w+)` \| (\d+) ", PAGE.read_text().partition("## Communicators")[2], re.MULTILINE)
    )
    for rank in (0, 600, 1023):  # of the first, a middle and the last stage
        with fake_world(rank, 1024), imitate(HARDWARE["h100"]):
            runtime = Runtime(rank, rank % 8, 1024, torch.device("cpu"))
            training = build_training(config, runtime, loader=FakeLoader, garbage=no_collection, build=without_numbers)
            counts = Counter(
                kind for (kind, _), group in training.meshes.communicators.groups.items() if group is not None
            )
            assert len(living()) == sum(counts.values()) <= MOST
            planned = Counter(kind for kind, _ in communicators(config, training.meshes.fold, 8))
            by_kind = Counter(kind.partition(" ")[0] for kind in counts.elements())
            assert counts == planned or rank == 600  # which is at no end of the pipeline
            if dispatcher == "hierarchical" and rank == 0:
                assert on_page == {kind: str(count) for kind, count in by_kind.items()}


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_sends_no_objects(pp: int) -> None:
    def sends(*_: Any, **__: Any) -> None:
        raise AssertionError("an object is sent")

    real = Trainer.train_step

    def train_step(trainer: Trainer) -> Any:
        names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
        names += ("send_object_list", "recv_object_list")
        with mock.patch.multiple(dist, **dict.fromkeys(names, sends)):
            return real(trainer)

    changes = {"parallelism.pp": pp, "parallelism.tp": 2, "parallelism.experts.ep": 2, "model.num_layers": 2}
    with mock.patch.object(Trainer, "train_step", train_step):
        rehearse(config_of(changes, 8, "h100"), 8, 0, "h100")
