"""Every legal mapping, against an independent enumeration, and the nearest to an illegal one."""

from __future__ import annotations

from itertools import product
from math import gcd, prod

import pytest

from tests.support.covering_mappings import legal_folds
from titanmoe.components import COMPONENTS
from titanmoe.config.schema import Config, Experts, Model, Parallelism, Training
from titanmoe.fold.degrees import Fold
from titanmoe.fold.legal_mappings import changes, nearest
from titanmoe.fold.legality import violations

MODEL = Model(
    vocab_size=320, dim=64, num_layers=4, num_heads=8, num_kv_heads=4, num_experts=8, expert_hidden=96
)  # fmt: skip


def factorisations(world: int) -> list[Fold]:
    """All tuples of nine degrees whose products fit, tried one by one."""
    sizes = range(1, world + 1)
    fits = [four for four in product(sizes, repeat=4) if world % prod(four) == 0]
    names = ("dp_replicate", "dp_shard", "cp", "tp", "edp_replicate", "edp", "ep", "etp")
    return [
        Fold(world=world, pp=world // prod(attention), **dict(zip(names, attention + experts, strict=True)))
        for attention in fits
        for experts in fits
        if prod(attention) == prod(experts)
    ]


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 17), (4, 117), (6, 289), (8, 517)])
def test_every_mapping_of_a_world(world, count):
    folds = list(legal_folds(world))
    assert len(folds) == len(set(folds)) == count
    assert set(folds) == set(factorisations(world))


@pytest.mark.parametrize("world", [6, 8])
@pytest.mark.parametrize("batch", [-1, 4])
def test_every_mapping_of_a_model(world, batch):
    def legal(fold: Fold) -> bool:
        edp_fits = MODEL.num_experts // fold.ep % fold.edp == 0 or MODEL.dim % fold.edp == 0
        return (
            fold.tp in (1, 2, 4, 8)  # heads, vocabulary; of key heads there are 4
            and fold.pp <= 4
            and 48 % ((2 if fold.cp > 1 else 1) * fold.cp * fold.tp) == 0
            and fold.ep in (1, 2, 4, 8)
            and 96 % fold.etp == 0
            and edp_fits
            and (batch == -1 or batch % fold.dp == 0)
            and (fold.pp == 1 or (1 if batch == -1 else batch // fold.dp) >= fold.pp)  # as 1F1B requires
        )

    config = Config(model=MODEL, training=Training(seq_len=48, global_batch_size=batch), components=COMPONENTS)
    folds = set(legal_folds(world, config))
    assert folds == set(filter(legal, factorisations(world)))
    for fold in factorisations(world):
        assert (violations(wish_for(config, fold), world) == []) == (fold in folds)


def wish_for(config: Config, fold: Fold) -> Config:
    experts = Experts(ep=fold.ep, etp=fold.etp, edp=fold.edp, edp_replicate=fold.edp_replicate)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    parallelism = Parallelism(**{name: getattr(fold, name) for name in names}, experts=experts)
    return Config(model=config.model, training=config.training, parallelism=parallelism, components=COMPONENTS)


def test_nearest_changes_little():
    parallelism = Parallelism(tp=3, experts=Experts(ep=3))
    config = Config(model=MODEL, training=Training(seq_len=64), parallelism=parallelism, components=COMPONENTS)
    folds = nearest(16, parallelism, config)
    assert [changes(parallelism, fold) for fold in folds] == [
        {"tp": (3, 4), "ep": (3, 4)},
        {"tp": (3, 4), "ep": (3, 2)},
        {"tp": (3, 2), "ep": (3, 4)},
    ]
    assert all(fold in set(legal_folds(16, config)) for fold in folds)
    # the changed recipe derives exactly the mapping that is named
    assert all(fold.edp_replicate == gcd(fold.dp_replicate, fold.edp_replicate * fold.edp) for fold in folds)


def test_nearest_to_a_legal_mapping_is_itself():
    parallelism = Parallelism(tp=2, dp_replicate=2, experts=Experts(ep=2))
    (fold,) = nearest(8, parallelism)
    assert changes(parallelism, fold) == {}
    assert (fold.dp_shard, fold.edp_replicate, fold.edp) == (2, 2, 2)


def test_nearest_changes_a_given_derived_degree_too():
    parallelism = Parallelism(dp_shard=3, experts=Experts(edp=3))
    assert [changes(parallelism, fold) for fold in nearest(8, parallelism)] == [
        {"dp_shard": (3, 8), "edp": (3, 8)},
        {"dp_replicate": (1, 2), "dp_shard": (3, 4), "edp": (3, 4)},
        {"pp": (1, 2), "dp_shard": (3, 4), "edp": (3, 4)},
    ]


def test_nearest_writes_down_an_edp_replicate_that_is_not_derived():
    config = Config(
        model=Model(dim=62, num_experts=8, num_layers=1), training=Training(seq_len=64), components=COMPONENTS
    )
    parallelism = Parallelism()
    assert {"edp_replicate": (-1, 3)} in [changes(parallelism, fold) for fold in nearest(12, parallelism, config)]


def test_nearest_leaves_out_needless_changes():
    parallelism = Parallelism(tp=4, experts=Experts(ep=8))
    config = Config(model=MODEL, training=Training(seq_len=65), components=COMPONENTS)
    folds = [changes(parallelism, fold) for fold in nearest(16, parallelism, config, count=5)]
    assert folds == [{"tp": (4, 1)}]


def test_nothing_is_nearest_if_nothing_is_legal():
    # 7 data ranks or 7 of anything: neither batch, heads nor experts divide by it
    config = Config(model=MODEL, training=Training(seq_len=48, global_batch_size=4), components=COMPONENTS)
    assert list(legal_folds(7, config)) == []
    assert nearest(7, Parallelism(), config) == []
    assert nearest(0, Parallelism()) == []
