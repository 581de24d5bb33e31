"""Names and shapes of parameters without torch are those of the modules, and patterns of names are checked by them."""

from dataclasses import replace

import pytest
import torch

from titanmoe.config.fields import build
from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config
from titanmoe.models import tensors
from titanmoe.models.families import family_of, names
from titanmoe.models.transformer import Transformer
from titanmoe.parts import PARTS


def config_of(family: str, **changes) -> Config:
    named = {"model.family": family, "model.size": "debug"}
    config = build(named | family_of(family).preset(named), PARTS)
    return replace(config, model=replace(config.model, **changes))


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("more", [{}, {"mtp_depth": 1, "tie_embeddings": True}])
def test_names_are_those_of_the_modules(family, more):
    config = config_of(family, **more)
    with torch.device("meta"):
        model = Transformer(config, 1, torch.float32)
    assert set(tensors.names(config.model)) == {name for name, _ in model.named_parameters()}


def refused(freeze: list[str], **changes) -> list[str]:
    config = config_of("mixtral", **changes)
    config = replace(config, training=replace(config.training, freeze=freeze))
    return [str(violation.text) for violation in contradictions(config)]


def test_patterns_that_match_nothing_and_all_frozen_are_refused_together():
    assert refused(["embed.*", "layers.*.moe.router.weight"]) == []
    one, two, three = refused(["layers.9.*", "attention.*", "*"])
    assert one.startswith('training.freeze has "layers.9.*", which is the name of no parameter')
    assert '"attention.*"' in two and "layers.*.attention.wq.weight" in two
    assert "freezes all" in three
    # A tied head is the embedding.
    (text,) = refused(["head.weight"], tie_embeddings=True)
    assert "head.norm.weight" in text and "head.weight," not in text
