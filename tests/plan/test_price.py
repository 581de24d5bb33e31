"""Time by component: what must hold of any formula."""

from __future__ import annotations

import pytest

from titanmoe.config import load
from titanmoe.config.schema import Config
from titanmoe.models.families import preset
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors, Group, Links
from titanmoe.plan.search import Found, evaluate

H100 = read_device("h100")


def found(world: int, *changes: str) -> Found:
    def ask(config: Config) -> list[str]:
        return []

    argv = ["--config", "train_configs/mixtral_8x22b.toml", *changes]
    return evaluate(load(argv, preset, ask), world, H100, Factors())


def test_messages_follow_the_links_that_groups_cross() -> None:
    links = Links(H100, Factors())
    inside, across = Group(8, 1), Group(8, 8)
    assert (inside.near(8), across.near(8), Group(16, 1).near(8), Group(4, 2).near(8)) == (8, 1, 8, 4)
    assert links.gather(inside, 1e9) == pytest.approx(7 / 8 * 1e9 / links.link, rel=0.02)
    assert links.gather(across, 1e9) == pytest.approx(7 / 8 * 1e9 / links.network, rel=0.02)
    assert links.exchange(Group(16, 1), 1e9) == pytest.approx(8 / 16 * 1e9 / links.network / links.rows, rel=0.02)
    assert links.gather(Group(1, 1), 1e9) == links.exchange(Group(1, 1), 1e9) == 0
    rack = Links(read_device("gb200"), Factors())
    assert rack.exchange(Group(64, 1), 1e9) < links.exchange(Group(64, 1), 1e9) / 5


def test_components() -> None:
    plain = found(128)
    full, slow = found(128, "--activation_checkpoint.mode", "full"), found(128, "--parallelism.experts.etp", "2")
    assert full.price.components["matrix work"] > 1.2 * plain.price.components["matrix work"] * 3 / 4
    assert full.peak < plain.peak
    rows = "rows to experts and back"
    assert slow.price.components[rows] > 2 * plain.price.components[rows]  # twice the rows, and across nodes
    one_stage = found(128, "--pipeline.schedule", "1F1B", "--pipeline.virtual_stages", "-1")
    assert one_stage.price.components["bubble"] > 5 * plain.price.components["bubble"]
    for one in plain, full, slow, one_stage:
        assert sum(one.price.components.values()) == pytest.approx(one.price.step)
        assert 0.1 < one.price.mfu < 0.7 and min(one.price.components.values()) >= 0
