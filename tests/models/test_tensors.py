"""Names and shapes of parameters without torch are those of the modules, and patterns of names are checked by them."""

from dataclasses import replace
from math import prod

import pytest
import torch

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.fields import build
from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config, LoRA
from titanmoe.models import tensors
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.families import family_of, names
from titanmoe.models.lora import add_adapters
from titanmoe.models.transformer import Transformer


def config_of(family: str, **changes) -> Config:
    named = {"model.family": family, "model.size": "debug"}
    config = build(named | family_of(family).preset(named), COMPONENTS)
    return replace(config, model=replace(config.model, **changes))


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("more", [{}, {"mtp_depth": 1, "tie_embeddings": True}])
def test_names_are_those_of_the_modules(family, more):
    config = config_of(family, **more)
    with torch.device("meta"):
        model = Transformer(config, 1, torch.float32)
    assert set(tensors.names(config.model)) == {name for name, _ in model.named_parameters()}


def refused(freeze: list[str], lora: LoRA | None = None, **changes) -> list[str]:
    config = config_of("mixtral", **changes)
    config = replace(config, training=replace(config.training, freeze=freeze), lora=lora or LoRA())
    return [str(violation.text) for violation in contradictions(config)]


def test_patterns_that_match_nothing_and_all_frozen_are_refused_together():
    assert refused(["embed.*", "layers.*.moe.router.weight"]) == []
    one, two = refused(["layers.9.*", "attention.*", "*"])
    assert one.startswith('training.freeze has "layers.9.*" and "attention.*", which match no parameter: ')
    assert "choose from embed.weight, layers.*.attention_norm.weight, " in one
    assert "freezes all" in two
    # A tied head is the embedding.
    (text,) = refused(["head.weight"], tie_embeddings=True)
    assert "head.norm.weight" in text and "head.weight," not in text


def test_adapters_of_matrices_that_are_not_there_are_refused():
    assert refused([], LoRA(rank=4)) == refused([], LoRA(rank=4, targets=["*.attention.w[qv].*", "*.experts.w2"])) == []
    one, two = refused(["embed.*"], LoRA(rank=4, targets=["*q_proj*", "embeddings.*"]))
    assert (
        one.startswith('lora.targets has "*q_proj*" and "embeddings.*", which match no') and "embed.weight" not in one
    )
    assert "choose from layers.*.attention.wq.weight, " in one
    assert "training.freeze is not used with lora.rank = 4" in two
    one, two = refused([], LoRA(rank=4, targets=["lm_head.*", "head.*", "embed.*"]))
    assert one.startswith('lora.targets has "lm_head.*", which matches no parameter: choose from')
    assert two.startswith('lora.targets has "head.*" and "embed.*", whose parameters cannot have adapters: choose from')
    assert "choose from layers.*.attention.wq.weight, " in two and "head.weight" not in two
    one, two = refused([], LoRA(rank=4, targets=["*.router.*", "*.attention.*", "embed.*"]))
    assert one.startswith('lora.targets has "*.router.*", and routers have no adapters: frozen, they send tokens to')
    assert two.startswith('lora.targets has "embed.*", whose parameters cannot have adapters')
    one, two = refused([], LoRA(targets=["*"], experts_rank=2))
    assert "lora.targets" in one and "lora.experts_rank" in two
    (text,) = refused([], LoRA(alpha=64.0))
    assert text.startswith("lora.alpha = 64.0 does nothing with lora.rank = 0, which makes no adapters: set rank")


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (LoRA(rank=32, experts_rank=48), ""),
        (LoRA(rank=33, experts_rank=1), "lora.rank = 33 exceeds 32, the smaller side of the largest matrix that it "),
        (LoRA(rank=1000), "lora.rank = 1000 exceeds 32, the smaller"),
        (LoRA(rank=32, experts_rank=49), "lora.experts_rank = 49 exceeds 48, the smaller side of the largest matrix"),
        (
            LoRA(rank=100, targets=["*.experts.w2"]),
            "lora.experts_rank = 100 (-1: lora.rank // model.top_k) exceeds 48, the smaller",
        ),
        (LoRA(rank=100, experts_rank=2, targets=["*.experts.w2"]), ""),
    ],
)
def test_a_rank_above_that_of_all_its_matrices_is_refused(lora, says):
    sizes = {"dim": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "expert_hidden": 48}
    found = refused([], lora, **sizes, top_k=1, norm_topk=False)
    assert len(found) == bool(says) and all(text.startswith(says) for text in found)


@pytest.mark.parametrize("family", names())
def test_names_of_adapters_are_those_of_the_modules(family):
    config = replace(config_of(family, mtp_depth=1), lora=LoRA(rank=4))
    with torch.device("meta"):
        model = Transformer(config, 1, torch.float32)
        add_adapters(model, config)
    tuning = tensors.Tuning.of(config)
    modules = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert dict(tensors.shapes(config.model, tuning)) == modules
    assert trained_parameters(config.model, tuning) == sum(map(prod, modules.values())) - parameters(config.model).total


def test_a_matrix_of_another_module_is_refused_adapters():
    config = replace(config_of("mixtral"), lora=LoRA(rank=4, targets=["layers.1.attention.wq.weight"]))
    with torch.device("meta"):
        model = Transformer(config, 1, torch.float32)
        model.layers["1"].attention.wq = torch.nn.Linear(4, 8)
        with pytest.raises(ConfigError, match="cannot have adapters, because it is of Linear"):
            add_adapters(model, config)


def test_adapters_of_qwen3_30b_have_the_published_sizes():
    """In millions: 830 in experts at rank 16 and 104 at 2, 13.4 in attention."""
    named = {"model.family": "qwen3_moe", "model.size": "30b_a3b"}
    model = build(named | family_of("qwen3_moe").preset(named), COMPONENTS).model

    def millions(rank: int, experts_rank: int, target: str) -> float:
        return trained_parameters(model, tensors.Tuning((), rank, experts_rank, (target,))) / 1e6

    assert millions(16, 16, "*.experts.*") == pytest.approx(830, abs=1)
    assert millions(16, 2, "*.experts.*") == pytest.approx(104, abs=1)
    assert millions(16, 2, "*.attention.*") == pytest.approx(13.4, abs=0.1)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("lora_dropout", "--lora.dropout"),
        ("use_dora", "DoRA is not"),
        ("load_in_4bit", "quantised base"),
        ("r", "--lora.rank"),
    ],
)
def test_what_adapters_do_not_have_is_refused_by_name(option, says):
    from titanmoe.train.launch import read_config

    with pytest.raises(ConfigError, match=says):
        read_config(["--lora.rank", "4", f"--lora.{option}", "1"], 1, COMPONENTS)
