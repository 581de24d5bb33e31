"""Bounds by which the search leaves out mappings: no mapping is faster than its bound."""

from __future__ import annotations

from math import inf
from operator import attrgetter

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.plan.candidates import Candidates
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.price import Pricer
from titanmoe.plan.search import ROUNDING, _priced_mappings, with_mapping

WORLDS = [("debug", 8), ("mixtral_8x22b", 64), ("deepseek_671b", 32), ("lora_qwen3_30b_a3b", 16), ("gpt_oss_20b", 16)]


@pytest.fixture(params=WORLDS, ids=lambda world: world[0])
def candidates(request: pytest.FixtureRequest) -> Candidates:
    recipe, world = request.param
    config = load([recipe, "--training.global_batch_size", "256"], COMPONENTS, lambda config: [])
    return Candidates(config, world, Pricer(config, read_device("h100"), Factors()), inf)


def test_candidates_come_by_rising_bound(candidates: Candidates) -> None:
    rising = sorted(candidates, key=attrgetter("bound"))
    assert len(rising) == len(candidates) > 1000 and list(candidates.by_bound()) == rising


@pytest.mark.parametrize(
    ("recipe", "world", "words"),
    [
        ("qwen3_30b_a3b", 16, ["--optimizer.name", "muon"]),
        ("qwen3_30b_a3b", 16, ["--optimizer.moments_dtype", "bfloat16"]),
        ("mixtral_8x22b", 64, []),
        ("deepseek_671b", 32, []),
        ("lora_qwen3_30b_a3b", 16, []),
    ],
)
def test_no_rank_needs_less_than_the_bound(recipe: str, world: int, words: list[str]) -> None:
    config = load([recipe, "--training.global_batch_size", "256", *words], COMPONENTS, lambda config: [])
    candidates = Candidates(config, world, Pricer(config, read_device("h100"), Factors()), inf)
    for candidate in list(candidates)[:: len(candidates) // 12]:
        for reshard in ("always", "never"):
            mapped = with_mapping(config, candidate.fold, candidate, reshard)
            peak = max(memory.peak for memory in rank_memories(mapped, candidate.fold))
            assert candidate.least_bytes <= peak, (candidate, reshard)


def test_no_mapping_is_faster_than_its_bound(candidates: Candidates) -> None:
    for candidate in list(candidates)[:: len(candidates) // 200]:
        for mapping in _priced_mappings(candidates.config, candidate, candidates.pricer):
            gathering_once = with_mapping(candidates.config, mapping.fold, candidate, "never")
            exposed = candidates.pricer.least_weights_exposed(gathering_once, mapping.fold, candidate.busy)
            assert candidate.bound + exposed <= mapping.price.step * (1 + ROUNDING)
