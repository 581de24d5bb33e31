"""A model's weights moved to another mapping by messages are those that a checkpoint would give, to the bit."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.checkpoint import relayouts
from tests.checkpoint.test_resume import BIASED, FOUR, V, mapping
from tests.support.case_features import MODELS, TRAINED
from tests.support.covering_mappings import all_folds, as_changes
from titanmoe.checkpoint.relayout import WORD, MessagePlan, Region, TensorPlaces, flat_views
from titanmoe.comm.collectives import Group
from titanmoe.config.load import ConfigError

TIED = {"model.tie_embeddings": True}
INTERLEAVED = {"pipeline.schedule": "Interleaved1F1B", "model.num_layers": 4}
MTP = FOUR | TIED | {"model.mtp_depth": 1}
MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
HSDP = {"parallelism.dp_replicate": 2}
FROZEN = MIXED | TRAINED["subset"]
ADAPTERS = MIXED | TRAINED["adapters"]
DEEP = MODELS["deepseek_v3"] | FOUR
FEW = {"model.num_experts": 4}
ROUND = 5000
"""Bytes of a round, of which most pairs need several: they end within tensors and within rows."""

PAIRS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pp4 to ep4": (4, mapping(pp=4) | FOUR, mapping(ep=4) | FOUR),
    "every rank alone to sharded": (8, mapping() | {"parallelism.dp_replicate": 8}, mapping(ep=4)),
    "sharded to every rank alone": (8, mapping(tp=2, cp=2, ep=2, etp=2), mapping() | {"parallelism.dp_replicate": 8}),
    "biases, few sinks, replicas": (8, mapping(ep=2) | BIASED | HSDP, mapping(tp=2, ep=2, etp=2) | BIASED),
    "tied ends of a V": (8, mapping(ep=2) | V | TIED, mapping(tp=2, ep=4) | FOUR | TIED),
    "interleaved to stages": (8, mapping(pp=2, ep=2) | INTERLEAVED | DEEP, mapping(pp=4, etp=2) | DEEP),
    "data ranks to etp": (4, mapping(), mapping(etp=4)),
    "model dim of experts to their number": (8, mapping(ep=2) | FEW, mapping(ep=4) | FEW),
    "linear attention": (
        8,
        mapping(pp=2, tp=2, ep=2) | MODELS["qwen3_next"],
        mapping(cp=2, ep=2) | MODELS["qwen3_next"],
    ),
    "adapters on a frozen base": (4, mapping(ep=2) | ADAPTERS, mapping(tp=2, etp=2) | ADAPTERS),
    "multi-token prediction beside a tied embedding": (4, mapping(pp=2, ep=2) | MTP, mapping(tp=2, ep=2) | MTP),
    "to a model that generates": (
        8,
        mapping(pp=2, ep=2) | FOUR | {"model.mtp_depth": 1},
        FOUR | {"generate": {"tp": 2, "ep": 4}},
    ),
}


@pytest.mark.parametrize(("size", "before", "after"), PAIRS.values(), ids=PAIRS)
def test_what_arrives_is_what_a_checkpoint_would_give(
    size: int, before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    check(world.run(size, relayouts.move, str(tmp_path / "saved"), before, after, ROUND), ROUND)


def check(ranks: list[relayouts.Moved], round_bytes: int) -> None:
    assert [line for rank in ranks for line in rank.wrong] == []
    needed = sum(rank.needed for rank in ranks)
    sent = sum(sent for rank in ranks for sent, _ in rank.messages)
    assert needed <= sent <= 1.05 * needed
    assert len({len(rank.messages) for rank in ranks}) == 1, "all ranks make the same rounds"
    most = max((n for rank in ranks for message in rank.messages for n in message), default=0)
    assert most <= round_bytes + WORD * len(ranks)
    for rank in ranks:  # gloo's thread may hold a round's messages into the next one
        assert rank.peak <= 2 * max(map(sum, rank.messages), default=0), "only messages take memory"


SWITCHES = {
    "pipeline.schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
    "parallelism.reshard_after_forward": ("auto", "always"),
}
FOLDS = [fold for fold in all_folds(8) if fold.pp < 8]


def random_mapping(draw: random.Random, model: dict[str, Any], generates: bool) -> dict[str, Any]:
    """A legal mapping of 8 ranks for the model, drawn at random."""
    while True:
        changes: dict[str, Any] = {name: draw.choice(values) for name, values in SWITCHES.items()}
        changes |= as_changes(draw.choice(FOLDS))
        if generates:
            changes = {"generate": {name: draw.choice((1, 2, 4, 8)) for name in ("tp", "ep", "etp")}}
        with contextlib.suppress(ConfigError):
            relayouts.read(model | changes, 8)
            return model | changes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_pairs(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    model = draw.choice([*MODELS.values(), BIASED]) | FOUR | draw.choice((MIXED, {})) | draw.choice((TIED, {}))
    model |= draw.choice([{}, {}, ADAPTERS, FROZEN, {"model.mtp_depth": 1}, {"model.num_experts": 4, "model.top_k": 2}])
    before, after = (random_mapping(draw, model, generates) for generates in (False, draw.random() < 0.2))
    round_bytes = draw.choice((1000, 7777, 1 << 20))
    check(world.run(8, relayouts.move, str(tmp_path / "saved"), before, after, round_bytes), round_bytes)


def test_equal_mappings_send_nothing(tmp_path: Path) -> None:
    ranks = world.run(4, relayouts.move, str(tmp_path / "saved"), mapping(tp=2, ep=2), mapping(tp=2, ep=2), ROUND)
    assert [rank.messages for rank in ranks] == [[]] * 4
    check(ranks, ROUND)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (
            {"model.dim": 32},
            [
                "model.embed.weight has shape (48, 16) in the source and (48, 32) in the destination",
                "and 15 more tensors",
            ],
        ),
        (
            {"model.num_layers": 1, "model.qk_norm": "full"},
            [
                "the source has no model.layers.0.attention.q_norm.weight (32,)",
                "the destination has no model.layers.1.attention.wq.weight (32, 16)",
            ],
        ),
    ],
    ids=["shapes", "names"],
)
def test_another_model_is_refused_on_all_ranks_with_names_and_shapes(after: dict[str, Any], words: list[str]) -> None:
    texts = world.run(4, relayouts.refused, mapping(tp=2), mapping(ep=2) | after)
    assert len(set(texts)) == 1 and all(word in texts[0] for word in words), texts[0]


def test_what_may_be_left_out_is_named() -> None:
    with_mtp, without = mapping(ep=2) | {"model.mtp_depth": 1}, mapping(ep=2)
    assert "the destination has no model.mtp.0." in world.run(2, relayouts.refused, with_mtp, without)[0]
    assert world.run(2, relayouts.refused, with_mtp, without, ("model.mtp.",)) == ["", ""]


def test_other_shards_than_planned_are_refused() -> None:
    assert (
        world.run(2, relayouts.other_shards, mapping(ep=2), mapping(tp=2))
        == ["these are other shards than the move was planned for"] * 2
    )


@pytest.mark.parametrize("after", [mapping(ep=4) | MIXED, mapping(pp=2, ep=2) | MIXED], ids=["ep4", "pp2 ep2"])
def test_a_forward_after_a_move_computes_with_what_came(after: dict[str, Any]) -> None:
    """Not with weights that FSDP has gathered before, nor with copies of the experts in the compute dtype."""
    for first, moved, loaded in world.run(4, relayouts.losses, mapping(tp=2, etp=2) | MIXED, after):
        assert moved == loaded and (moved != first or not moved)


def group(rank: int, size: int) -> Group:
    return Group("", size, rank)


def test_holders_share_what_is_sent() -> None:
    """64 ranks: each quarter of every tensor is on four of them, and 40 others need all of it."""
    held, wanted = {}, {}
    for name, rows in (("large", 400), ("small", 40), ("bias", 4)):
        boxes = [((quarter * rows // 4, 0), (rows // 4, 8)) for quarter in range(4)]
        holders = {box: set(range(quarter, 16, 4)) for quarter, box in enumerate(boxes)}
        held[name] = TensorPlaces(torch.float32, (rows, 8), holders)
        wanted[name] = TensorPlaces(torch.bfloat16, (rows, 8), {((0, 0), (rows, 8)): set(range(24, 64))})
    plans = [MessagePlan(held, wanted, group(rank, 64)) for rank in range(64)]
    for rank, plan in enumerate(plans):
        assert (plan.sent, plan.received) == (plans[0].sent, plans[0].received)
        assert plan.sent[rank] == sum(stream.starts[-1] for stream in plan.sends.values())
        for receiver, stream in plan.sends.items():
            assert plans[receiver].receives[rank].blocks == stream.blocks
    assert sum(plans[0].sent) == 40 * 444 * 8 * 2
    assert plans[0].sent == [40 * 444 * 8 * 2 // 16] * 16 + [0] * 48
    assert not plans[20].sends and not plans[20].receives, "it neither holds nor needs anything"


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ({((0,), (4,)): {0}, ((4,), (3,)): {1}}, "overlap, or are not all of it"),
        ({((0,), (5,)): {0}, ((4,), (4,)): {1}}, "overlap, or are not all of it"),
        ({}, "overlap, or are not all of it"),
    ],
    ids=["a gap", "an overlap", "nothing"],
)
def test_shards_that_do_not_make_up_a_tensor_are_refused(boxes: dict[Region, set[int]], words: str) -> None:
    wanted = {"x": TensorPlaces(torch.float32, (8,), {((0,), (8,)): {0, 1}})}
    with pytest.raises(ConfigError, match=words):
        MessagePlan({"x": TensorPlaces(torch.float32, (8,), boxes)}, wanted, group(0, 2))


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 1, 5)])
def test_views_of_consecutive_elements(shape: tuple[int, ...]) -> None:
    x = torch.arange(2 * torch.Size(shape).numel()).view(*shape, 2)[..., 0]
    flat = x.flatten().tolist()
    for first in range(len(flat)):
        for count in range(1, len(flat) - first + 1):
            views = list(flat_views(x, first, count))
            assert [n for view in views for n in view.flatten().tolist()] == flat[first : first + count]
            assert len(views) <= max(1, 2 * len(shape) - 1)
            assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)
