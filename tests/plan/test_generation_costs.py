"""Planned bytes of the model that completes prompts of [rl] are those of its tensors, and it fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.schema import Config, GenerationParallelism
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.fold.meshes import build_meshes
from titanmoe.generate.build_model import build_empty
from titanmoe.generate.loop import Generator, Prompt, Stop
from titanmoe.generate.model import config_to_run
from titanmoe.generate.sampling import Sampling
from titanmoe.models.count import parameters
from titanmoe.plan.communicators import usable_bytes
from titanmoe.plan.devices import read_device
from titanmoe.plan.generation_costs import READS, GeneratorCosts, GeneratorPlan, TextLengths, generator_weights
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.search import search
from titanmoe.rehearse.rehearsal import fake_world, recipe_to_rehearse
from titanmoe.rehearse.rehearsed_relayout import Destination, rehearse_relayout

COMPLETIONS = "--rl.reward exact --rl.prompts x.jsonl --validation.interval 0"
LARGE = (
    f"{COMPLETIONS} --training.seq_len 2048 --generation.max_tokens 1024 --generation.batch_size 64 "
    "--rl.prompts_per_step 64"
)


def read(*words: str) -> Config:
    return load([word for some in words for word in some.split()], COMPONENTS, lambda config: [])


def planned(config: Config, ranks: int, lengths: TextLengths | None = None, **degrees: int) -> GeneratorPlan:
    costs = GeneratorCosts(config, ranks, read_device("h100"), Factors(), lengths=lengths)
    return costs.plan(GenerationParallelism(**degrees) if degrees else config.generation.parallelism)


# ---- memory


@pytest.mark.parametrize(
    ("words", "degrees"),
    [
        ("qwen3_30b_a3b --validation.interval 0", {"tp": 2, "ep": 4, "etp": 2}),
        ("qwen3_30b_a3b --validation.interval 0 --lora.rank 8", {"tp": 8, "ep": 8, "etp": 1}),
        ("--model.family deepseek_v3 --model.size 16b --model.tie_embeddings", {"tp": 4, "ep": 2, "etp": 1}),
        ("--model.family qwen3_next --model.size 80b_a3b", {"tp": 2, "ep": 8, "etp": 1}),
    ],
)
def test_weights_are_those_of_the_model(words: str, degrees: dict[str, int]) -> None:
    own = config_to_run(read(words), 16, {"pp": 1, "cp": 1} | degrees, None, "cpu")
    fold = derive(16, own.parallelism)
    with fake_world(15, 16):
        model, _ = build_empty(own, build_meshes(fold, "cpu", trains=False), torch.device("meta"))
    assert generator_weights(own, fold) == sum(weight.nbytes for weight in model.parameters())


def tensors(config: Config) -> tuple[int, int]:
    """On a rank: bytes of a generator's weights, and the most of its caches in a round with the longest texts."""
    ranks, generation, rl = torch.distributed.get_world_size(), config.generation, config.rl
    own = config_to_run(config, ranks, {"pp": 1, "cp": 1, **vars(generation.parallelism)}, None, "cpu")
    meshes = build_meshes(derive(ranks, own.parallelism), "cpu", trains=False)
    model, _ = build_empty(own, meshes, torch.device("cpu"))
    for weight in model.parameters():
        weight.zero_()
    generator, most = Generator(model, meshes, torch.device("cpu"), config.model.vocab_size, ()), 0

    def measure(text: Any) -> None:
        nonlocal most
        cached = [each.x for cache in generator.caches for each in cache.stored]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in cached}
        most = max(most, sum(storages.values()))

    ids, count, completions = (
        [1] * (config.training.seq_len - generation.max_tokens),
        rl.prompts_per_step,
        rl.completions,
    )
    earlier = 0
    if rl.eval_interval:
        count, completions = generation.batch_size * meshes.data.size, 1
    elif rl.max_turns > 1:  # the last turn of each, of one token
        count, completions, earlier = count * completions, 1, generation.max_tokens - 1
    prompts = [Prompt(number, ids + [1] * earlier, completions, num_earlier=earlier) for number in range(count)]
    for _ in generator.batches(prompts, generation.batch_size, Stop(generation.max_tokens), Sampling(0.0), measure):
        pass
    return sum(weight.nbytes for weight in model.parameters()), most


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--rl.eval_interval 9 --rl.held_out 9 --generation.batch_size 16 --generation.max_tokens 2",
        "--rl.max_turns 2 --rl.reward run",
        "--model.family deepseek_v3 --generation.parallelism.tp 2",
        "--model.family qwen3_next --model.num_layers 4 --generation.parallelism.tp 2",
    ],
)
def test_bytes_are_those_of_the_tensors_of_a_round(words: str) -> None:
    config = read("rl_debug --rl.prompts_per_step 8 --rl.eval_interval 0 --rl.held_out 0", words)
    plan = planned(config, 4)
    assert world.run(4, tensors, config) == [(plan.weights, plan.cache)] * 4


def test_copied_bytes_are_those_of_a_rehearsed_move() -> None:
    config = recipe_to_rehearse(["rl_debug"], 4, "h100")
    own = config_to_run(config, 4, {"pp": 1, "cp": 1, **vars(config.generation.parallelism)}, None, "cpu")
    moves, _ = rehearse_relayout(config, Destination(own, generates=True), 4, "h100")
    plan = planned(config, 4)
    assert 0.9 * plan.weights < max(move.received for move in moves) <= plan.weights
    assert max(move.messages for move in moves) <= plan.messages


def test_memory_is_that_of_the_fullest_moment() -> None:
    config = read("qwen3_30b_a3b", LARGE)
    generator, training = planned(config, 16, ep=8), rank_memories(config, derive(16, config.parallelism))[0]
    beside = generator.beside(training)
    # Training needs more than generating does beside what training holds between steps.
    assert beside.peak_during == training.peak_during
    assert beside.peak == training.peak + round(generator.communicators)
    generator = replace(generator, cache=10**12)  # more than anything
    held, own = generator.beside(training), 10**12 + generator.weights + generator.activations
    assert held.peak_during == "generating completions"
    assert held.peak == training.weights + training.moments + own + round(generator.communicators)
    config = replace(config, generation=replace(config.generation, offload_training=True))
    freed = replace(planned(config, 16, ep=8), cache=10**12).beside(training)
    assert freed.peak == own + round(generator.communicators)


def test_the_fastest_generator_that_fits_is_beside_training() -> None:
    config, device = read("qwen3_30b_a3b", LARGE, "--rl.held_out 9 --rl.eval_interval 9"), read_device("h100")
    config = replace(config, generation=replace(config.generation, batch_size=256))
    best = search(config, 16, device, Factors(), count=1).best[0]
    assert best.config.generation.parallelism == best.generator.parallelism
    assert best.peak <= (usable := usable_bytes(best.config, best.fold, device))
    training = rank_memories(best.config, best.fold)
    generators = GeneratorCosts(config, 16, device, Factors()).fastest()
    faster = generators[: generators.index(best.generator)]
    assert faster and all(max(one.beside(rank).peak for rank in training) > usable for one in faster)


# ---- time


def test_a_token_of_one_text_takes_as_long_as_its_active_weights_and_its_cache() -> None:
    config = read("qwen3_30b_a3b", LARGE, "--rl.completions 2 --rl.prompts_per_step 1")
    plan, device = planned(config, 1, TextLengths(1000, 100)), read_device("h100")
    count, model = parameters(config.model), config.model
    first = replace(config, rl=replace(config.rl, completions=1))
    one = planned(first, 1, TextLengths(1000, 100))
    read_bytes = 2 * (count.active - model.vocab_size * model.dim) + READS * 1050 * 98304
    assert one.token == pytest.approx(read_bytes / (device.bandwidth * Factors().memory), rel=0.01)
    assert one.token < plan.token < 2 * one.token  # two texts read what both need once


def test_seconds_follow_texts_and_mapping() -> None:
    config = read("qwen3_30b_a3b", LARGE)
    short, long = (planned(config, 16, TextLengths(512, n), ep=8) for n in (256, 512))
    assert long.tokens == 2 * short.tokens and long.reading == short.reading and long.copying == short.copying
    several = planned(replace(config, rl=replace(config.rl, updates=2)), 16, TextLengths(512, 256), ep=8)
    assert several.components["copying weights"] == pytest.approx(short.copying / 2)
    assert several.texts == 64 and short.texts == 32
    alone, divided = planned(config, 1), planned(config, 16, ep=16)
    assert alone.copying == pytest.approx(4 * alone.weights / (3.35e12 * Factors().memory))
    assert divided.weights < alone.weights / 8


# ---- titanmoe plan


def test_the_proposed_mapping_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, data = tmp_path / "best.toml", tmp_path / "plan.json"
    assert main(["plan", "rl_debug", "--write", str(file), "--json", str(data), "--prompt-tokens", "4"]) == 0
    out, best = capsys.readouterr().out, json.loads(data.read_text())["best"][0]
    config, mapping = read(f"--config {file}"), best["generation"]["mapping"]
    assert vars(config.generation.parallelism) == mapping and not violations(config, 4)
    assert "[rl]: 112 samples a step are taken, into which its texts of 8 tokens are packed" in out
    degrees = "".join(f"    {name} = {n}\n" for name, n in mapping.items())
    assert f"    [generation.parallelism]\n{degrees}\n    [parallelism]\n" in out
    assert sum(best["generation"]["time"].values()) == pytest.approx(best["generation"]["seconds"])
    assert f"take {best['generation']['seconds']:.3g} s if prompts have 4 tokens and completions 4. This is a " in out


def test_an_explanation_is_of_the_recipes_own_mappings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "plan.json"
    assert main(["plan", "rl_debug", "--explain", "--json", str(data)]) == 0
    plan = json.loads(data.read_text())["plan"]
    assert plan["generation"]["mapping"] == {"tp": 1, "ep": 2, "etp": 1}
    assert sum(plan["memory"][0]["components"].values()) == plan["memory"][0]["peak"]
    assert "The completions of a step, 16 of each of 28 prompts, take" in capsys.readouterr().out
    assert main(["plan", "rl_debug", "--explain", "--generation.parallelism.ep", "3"]) == 2
    assert "generation: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("debug --ranks 4 --training.global_batch_size 8 --completion-tokens 9", "is for recipes with [rl]"),
        ("rl_debug --completion-tokens 5", "--completion-tokens = 5 is not from 1 to 4, which"),
        ("rl_debug --prompt-tokens 0", "--prompt-tokens = 0 is not from 1 to 32, which"),
        ("rl_debug --tokens 1e9", "[rl] has steps: leave it out"),
        ("rl_debug --reference", "a run of [rl] has no model beside it"),
    ],
)
def test_options_that_contradict_the_recipe_are_refused(words: str, says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_fits_nowhere_with_its_generator(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "qwen3_30b_a3b", "--ranks", "4", *LARGE.split()]) == 2
    message = capsys.readouterr().err
    assert "no mapping of 4 h100 fits" in message and "of single changes --" in message


def test_the_fastest_mapping_is_the_same_however_many_are_shown() -> None:
    """Beside the one that trains fastest only a slower generator fits."""
    config = read("qwen3_30b_a3b", LARGE, "--generation.offload_training false")
    device = replace(read_device("h100"), memory=52e9)
    (first,), (same, second) = (search(config, 16, device, Factors(), count=count).best for count in (1, 2))
    assert first.config == same.config and same.price.step > second.price.step
