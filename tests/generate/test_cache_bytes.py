"""What generation says that a cache costs is what its tensors take; docs/generate.md has it for all families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import parity, world
from tests.generate import saved
from tests.generate.saved import MODELS
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.generate.cache import PerToken, cache_bytes, cache_cost
from titanmoe.generate.model import config_to_run
from titanmoe.models.families import mixtral, names, preset
from titanmoe.models.families.family import Family
from titanmoe.models.mixers.grouped_query import GroupedQuery

PAGE = Path(__file__).resolve().parents[2] / "docs/generate.md"
PROMPTS = [9, 4, 14]


def taken(path: Path, tp: int) -> tuple[tuple[int, int], int, int]:
    """On a rank: what is said, bytes of the tensors after the prompts and a token, and slots that they have."""
    generator = saved.generator(path, {"tp": tp})
    texts = generator.cached_texts
    with torch.no_grad():
        texts.begin_prompts(PROMPTS, [1] * len(PROMPTS))
        generator.forward(list(range(sum(PROMPTS))))
        texts.begin_tokens()
        generator.forward([1] * len(PROMPTS))
    kept = [each.x for cache in generator.caches for each in cache.stored]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    slots = {16 * len(each.x) for cache in generator.caches for each in cache.stored if isinstance(each, PerToken)}
    return cache_bytes(generator.model.shape, tp, 8), sum(storages.values()), *slots


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_it_is_what_the_tensors_take(tmp_path: Path, model: str, tp: int) -> None:
    saved.write(tmp_path / "saved", MODELS[model])
    for (token, text), nbytes, slots in world.run(tp, taken, tmp_path / "saved", tp):
        assert nbytes == token * slots + len(PROMPTS) * text
        assert slots == 16 * (3 * 3 // 2), "a page for each prompt, and by half more room than was needed"


def table() -> str:
    """Of the largest size of each family, in bfloat16, on one rank."""
    lines = ["| family | size | bytes per token | and per text |", "| --- | --- | --- | --- |"]
    for family, sizes in names().items():
        numbers = {size: cache_bytes(Model(**preset(family, size)), 1, 2) for size in sizes}
        lines += [f"| {family} | {size} | {n[0]:,} | {n[1]:,} |" for size, n in numbers.items() if size != "debug"]
    return "\n".join(lines)


def test_the_page_has_every_family() -> None:
    assert table() in PAGE.read_text(), table()


def test_a_state_is_said_per_text() -> None:
    model = Model(**preset("qwen3_next", "80b_a3b"))
    states, inputs = 36 * 32 * 128 * 128 * 4, 36 * 4 * (2 * 16 * 128 + 32 * 128) * 2
    assert cache_bytes(model, 1, 2) == (12 * 2 * 2 * 256 * 2, states + inputs)
    assert cache_cost(model, 2, 2) == f"12,288 bytes per token and {(states + inputs) // 2:,} per text"


def test_latents_are_as_wide_for_any_number_of_heads() -> None:
    model = Model(**preset("deepseek_v3", "671b"))
    assert cache_bytes(model, 8, 2) == (61 * (512 + 64) * 2, 0)
    assert cache_bytes(replace(model, num_heads=64, num_kv_heads=64), 1, 2) == cache_bytes(model, 8, 2)


class Forgetful(GroupedQuery):
    name = "forgetful attention"
    implementation = f"{__name__}:Forgetful"


SPEC = Forgetful()
FORGETFUL = Family(mixtral.SIZES, mixer=lambda model, layer: SPEC)


def test_a_layer_without_a_cache_is_refused() -> None:
    config = parity.read({"model.family": f"{__name__}:FORGETFUL"}, 1)
    degrees = dict.fromkeys(("pp", "cp", "tp", "ep", "etp"), 1)
    with pytest.raises(ConfigError, match="has forgetful attention, which has no cache for earlier tokens"):
        config_to_run(config, 1, degrees, None, "cpu")
