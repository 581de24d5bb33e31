"""Every recipe is legal on the number of ranks it declares, and says what it is for."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

from titanmoe.components import COMPONENTS
from titanmoe.config.load import read_draft
from titanmoe.config.recipe import read_recipe
from titanmoe.config.schema import Config
from titanmoe.config.world_size import recipe_ranks
from titanmoe.data.tokenize_command import add_tokenize
from titanmoe.models.count import trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.train.launch import read_config

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))
GIVEN = {
    "mixtral_8x22b": dict(world=128, tp=2, ep=8, pp=8, etp=1, cp=1),
    "mixtral_8x22b_128k": dict(world=1024, tp=8, cp=8),
    "mixtral_8x22b_g8t8": dict(world=128, tp=4, ep=8, pp=8, cp=1),
    "qwen2_57b_a14b": dict(world=64, tp=2, ep=4, pp=4, cp=1),
    "llama3_8x70b": dict(world=256, tp=8, ep=8, pp=16, cp=1),
}
"""The mappings of arXiv 2504.14960."""
UNCOUNTED = 10_000
"""Steps in place of epochs, of data that is not here."""


def world(recipe: Path) -> int:
    ranks = recipe_ranks(read_draft([str(recipe)], COMPONENTS))
    assert ranks, f"{recipe.name} does not say its number of ranks, as in [job] ranks = 8"
    return ranks


def config_of(recipe: Path, *words: str) -> Config:
    """Without the data that steps would be counted from, or the model that a name stands for: neither is here."""
    stated = read_recipe(str(recipe)).data
    if stated["training"].get("epochs"):
        words = "--training.epochs=0", f"--training.steps={UNCOUNTED}", *words
    if stated["model"].get("hf"):
        words = "--model.hf=", *words
    return read_config(["--config", str(recipe), *words], world(recipe), COMPONENTS)


def comments(recipe: Path) -> str:
    """The lines before the first table, as running text."""
    head = recipe.read_text().partition("\n[")[0]
    return " ".join(line.removeprefix("#").strip() for line in head.splitlines())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_legal_on_its_world(recipe):
    config = config_of(recipe)
    parallelism, experts, training = config.parallelism, config.parallelism.experts, config.training
    data_ranks = parallelism.dp_replicate * parallelism.dp_shard
    assert parallelism.pp * data_ranks * parallelism.cp * parallelism.tp == world(recipe)
    assert parallelism.pp * experts.edp_replicate * experts.edp * experts.ep * experts.etp == world(recipe)
    assert training.global_batch_size % (training.local_batch_size * data_ranks) == 0
    assert config.lr_schedule.warmup_steps < training.steps


def test_memory_in_the_head_is_the_rehearsed_peak_of_the_planners_page():
    page, peaks = (ROOT / "docs/planner.md").read_text(), {}
    for name, peak in re.findall(r"^\| (\w+) \| \d+ of \d+ \| \S+ GB \| (\S+) GB \|", page, re.MULTILINE):
        peaks[name] = max(peaks.get(name, 0), float(peak))
    assert peaks.keys() == {recipe.stem for recipe in RECIPES if "debug" not in recipe.stem}
    for name, peak in peaks.items():
        assert re.search(rf"\b{peak:g} GB .*?\brehearsed", comments(ROOT / f"train_configs/{name}.toml")), name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_head_says_how_to_start_it(recipe):
    assert f"train_configs/{recipe.name}" in comments(recipe)
    slurm = f"titanmoe slurm train_configs/{recipe.name} > job.sh && sbatch job.sh" in comments(recipe)
    ranks = re.search(r"--nproc-per-node (\d+)", comments(recipe))
    hosts = re.search(r"--hosts (\S+) --gpus (\d+)", comments(recipe))
    if slurm:  # as many nodes of 8 as the recipe needs
        started = world(recipe) // 8 * 8
    elif hosts:
        started = len(hosts[1].split(",")) * int(hosts[2])
    else:
        assert f"titanmoe train train_configs/{recipe.name}" in comments(recipe)
        started = int(ranks[1]) if ranks else world(recipe)
    assert started == world(recipe)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "debug" not in path.stem], ids=lambda path: path.stem)
def test_large_ones_say_what_they_need_and_what_is_not_known(recipe):
    text = comments(recipe)
    assert "H100" in text and "Memory" in text and "Mapping:" in text
    assert "has not been run on GPUs here" in text
    config = config_of(recipe)
    tokens = config.training.global_batch_size * config.training.seq_len
    tunes = recipe.stem.startswith(("sft", "lora"))
    assert tokens == 2**18 if tunes else 2**20 <= tokens <= 2**22  # 256 to 1024 times 4096
    if recipe.stem in GIVEN:
        assert "2504.14960" in text


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "debug" not in path.stem], ids=lambda path: path.stem)
def test_large_ones_train_on_named_data_and_say_how_to_make_it(recipe):
    lines = [line.removeprefix("#").strip() for line in recipe.read_text().partition("\n[")[0].splitlines()]
    got, tokenizer, make = (
        shlex.split(line) for line in lines if line.startswith(("hf download", "titanmoe tokenize"))
    )
    parser = argparse.ArgumentParser()
    add_tokenize(parser.add_subparsers())
    args = parser.parse_args(make[1:])
    config = config_of(recipe)
    assert config.data.source == "files" and config.data.paths == [args.out]
    assert config.data.packing == ("best_fit" if args.format == "chat" else "stream")
    assert not args.chat_template or (ROOT / args.chat_template).is_file()
    (folder,), downloaded = args.paths, got[got.index("--local-dir") + 1]
    assert Path(folder).is_relative_to(downloaded) and args.tokenizer == tokenizer[tokenizer.index("--local-dir") + 1]
    random = config_of(recipe, "--data.source", "synthetic")
    assert random.data.source == "synthetic" and "--data.source synthetic" in comments(recipe)


@pytest.mark.parametrize("name", GIVEN)
def test_mappings_of_the_paper(name):
    recipe = ROOT / "train_configs" / f"{name}.toml"
    config = config_of(recipe)
    parallelism, experts = config.parallelism, config.parallelism.experts
    mapping = dict(world=world(recipe), tp=parallelism.tp, cp=parallelism.cp, pp=parallelism.pp)
    mapping |= dict(ep=experts.ep, etp=experts.etp)
    assert {key: mapping[key] for key in GIVEN[name]} == GIVEN[name]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_page_says_its_ranks(recipe):
    page = (ROOT / "docs" / "get_started.md").read_text()
    row = re.search(rf"\(\.\./train_configs/{re.escape(recipe.name)}\) \| ([\d,]+) \|", page)
    assert row and int(row[1].replace(",", "")) == world(recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_saves_and_validates_on_held_out_data(recipe):
    stated = read_recipe(str(recipe)).data
    saved = stated["checkpoint"]
    assert saved.keys() - {"initial_hf", "load", "model_only"} == {"enable", "interval", "keep_last"}
    assert saved["enable"] and saved["keep_last"] > 1
    config = config_of(recipe)
    held_out, interval = config.validation.held_out, config.validation.interval
    if config.rl.reward:
        held_out, interval = config.rl.held_out, config.rl.eval_interval
    assert 2 * saved["interval"] <= config.training.steps >= 2 * interval > 0
    assert config.validation.steps and held_out > 1 and config.checkpoint.save == "async"
    if "debug" not in recipe.stem:
        size, unit, each = re.search(r"of (\S+) (GB|TB) each, (\d+) bytes per parameter", recipe.read_text()).groups()
        assert int(each) == 3 * getattr(torch, config.training.dtype).itemsize
        expected = trained_parameters(config.model, Tuning.of(config)) * int(each) / {"GB": 1e9, "TB": 1e12}[unit]
        assert float(size) == pytest.approx(expected, abs=0.5 if unit == "GB" else 0.05)
