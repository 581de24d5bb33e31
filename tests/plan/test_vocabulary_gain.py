"""The gain of sharing the vocabulary among all pipeline stages is counted, and proposed only where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.pipeline_schedules import simulate, single_order
from titanmoe.fold.vocabulary_passes import insert_passes
from titanmoe.models.count import layer_flops
from titanmoe.models.stages import split_layers
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.price import Pricer
from titanmoe.plan.search import GAIN, search

ROOT = Path(__file__).parents[2]


def recipe(name: str) -> Config:
    argv = ["--config", str(ROOT / f"train_configs/{name}.toml"), "--data.source", "synthetic"]
    return load(argv, COMPONENTS, lambda _: [])


def gains(name: str, pp: int) -> tuple[float, float]:
    """Time of a 1F1B step of 4 * pp microbatches with the head on the last stage, for even numbers of layers and for
    those of the best split, over that with the vocabulary over all stages. Only FLOPs count."""
    config, plain = recipe(name), single_order("1F1B", pp, 4 * pp)
    layers, head = layer_flops(config.model, 4096)
    n = len(layers)

    def seconds(parts: list[range], at_end: float) -> list[float]:
        costs = [float(sum(layers[i] for i in part)) for part in parts]
        costs[-1] += at_end
        return costs

    even = [range(i * n // pp, (i + 1) * n // pp) for i in range(pp)]
    best = split_layers(config.model, 4096, pp, [])
    before = [simulate(plain, pp, seconds(parts, head))[1] for parts in (even, best)]
    own = seconds(split_layers(config.model, 4096, pp, [], True), 0)
    shared = simulate(insert_passes(plain, pp), pp, own, 3 * head / pp)[1]
    return before[0] / shared, before[1] / shared


COUNTED = {
    ("qwen3_30b_a3b", 4): (1.21, 1.02),
    ("qwen3_30b_a3b", 8): (1.45, 1.05),
    ("qwen3_30b_a3b", 16): (1.97, 1.48),
    ("qwen3_5_35b_a3b", 4): (1.41, 1.03),
    ("qwen3_5_35b_a3b", 8): (1.91, 1.38),
    ("qwen3_5_35b_a3b", 16): (2.74, 2.28),
}


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: f"{case[0]} pp {case[1]}")
def test_the_counted_gain_is_that_of_the_page(case: tuple[str, int]) -> None:
    got = gains(*case)
    assert got == pytest.approx(COUNTED[case], abs=0.006)
    name = {"qwen3_30b_a3b": "Qwen3-30B-A3B", "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B"}[case[0]]
    row = f"| {name} | {case[1]} | {COUNTED[case][0]:.2f} | {COUNTED[case][1]:.2f} |"
    assert row in (ROOT / "docs/parallelism.md").read_text()


def with_pipeline(name: str, pp: int, vocab: str) -> Config:
    config = recipe(name)
    experts = replace(config.parallelism.experts, ep=1, etp=1, edp=-1, edp_replicate=-1)
    parallelism = replace(config.parallelism, pp=pp, tp=1, cp=1, dp_shard=-1, dp_replicate=1, experts=experts)
    training = replace(config.training, local_batch_size=1, global_batch_size=4 * pp * 8)
    moe = replace(config.moe, dispatcher="alltoall", overlap="none")
    pipeline = replace(config.pipeline, schedule="1F1B", virtual_stages=-1)
    return replace(config, parallelism=replace(parallelism, vocab=vocab), training=training, moe=moe, pipeline=pipeline)


@pytest.mark.parametrize(("ids", "pp", "pays"), [(600_000, 16, True), (151_936, 4, False)])
def test_the_price_of_a_large_vocabulary_is_lower_and_that_of_a_small_one_is_not(ids: int, pp: int, pays: bool) -> None:
    steps = {}
    for vocab in ("tensor", "pipeline"):
        config = with_pipeline("qwen3_30b_a3b", pp, vocab)
        config = replace(config, model=replace(config.model, vocab_size=ids))
        fold = derive(8 * pp, config.parallelism)
        price = Pricer(config, read_device("h100"), Factors()).price(config, fold)
        steps[vocab] = price.step
        assert sum(price.components.values()) == pytest.approx(price.step)
    assert (steps["tensor"] > GAIN * steps["pipeline"]) is pays


@pytest.mark.parametrize(
    ("ids", "microbatches", "depth"), [(151_936, 8, 0), (600_000, 64, 0), (600_000, 16, 0), (600_000, 16, 1)]
)
def test_the_bound_of_a_price_is_below_it(ids: int, microbatches: int, depth: int) -> None:
    """The search leaves out a simulation where this bound shows no gain."""
    config = with_pipeline("qwen3_30b_a3b", 8, "pipeline")
    training = replace(config.training, global_batch_size=8 * microbatches)
    config = replace(config, model=replace(config.model, vocab_size=ids, mtp_depth=depth), training=training)
    fold, pricer = derive(64, config.parallelism), Pricer(config, read_device("h100"), Factors())
    least, price = (pricer.price(config, fold, least) for least in (True, False))
    assert 0.7 * price.step < least.step <= price.step


def test_multi_token_prediction_is_a_block_of_the_last_stage_alone() -> None:
    """Multi-token prediction doubles the tokens that each rank's part of the head computes."""
    config = with_pipeline("qwen3_30b_a3b", 7, "pipeline")
    deeper, wider = (
        replace(config, model=replace(config.model, **change))
        for change in ({"mtp_depth": 1}, {"vocab_size": 2 * config.model.vocab_size})
    )
    stages = [[len(layers) for layers in split_layers(deeper.model, 4096, pp, [], True)] for pp in (4, 7)]
    assert [sorted(layers) for layers in stages] == [[11, 12, 12, 13], [6, *[7] * 6]]
    assert [layers[-1] for layers in stages] == [11, 6]
    work = []
    for one in (deeper, wider):
        price = Pricer(one, read_device("h100"), Factors()).price(one, derive(56, one.parallelism))
        assert sum(price.components.values()) == pytest.approx(price.step)
        work.append(price.components["matrix work"])
    assert work[0] == pytest.approx(work[1], rel=0.01)


def test_a_last_stage_without_layers_has_a_price() -> None:
    config = with_pipeline("qwen3_30b_a3b", 2, "tensor")
    config = replace(config, pipeline=replace(config.pipeline, layers_per_stage=[48, 0]))
    steps = []
    for depth in (0, 1):
        deeper = replace(config, model=replace(config.model, mtp_depth=depth))
        steps.append(Pricer(deeper, read_device("h100"), Factors()).price(deeper, derive(16, config.parallelism)).step)
    assert 0 < steps[0] < steps[1]


def test_stages_have_as_much_state_as_each_other() -> None:
    """The layers are even, and so are parameters and moments; with the head on the last stage they are not."""
    for vocab, even in ("pipeline", True), ("tensor", False):
        config = with_pipeline("qwen3_30b_a3b", 16, vocab)
        ranks = rank_memories(config, derive(128, config.parallelism))
        state = [rank.weights + rank.moments for rank in ranks]
        assert (max(state) < 1.1 * min(state)) is even


def test_the_search_proposes_it_only_where_it_gains() -> None:
    config = recipe("qwen3_30b_a3b")
    config = replace(config, moe=replace(config.moe, dispatcher="alltoall", overlap="none"))
    found = search(config, 64, read_device("h100"), Factors(), count=10)
    assert found.best and all(mapping.config.parallelism.vocab == "tensor" for mapping in found.best)
