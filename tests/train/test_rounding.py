"""What is kept in bfloat16 loses small updates unless it is rounded at random, and all ranks round alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests import parity
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config, Training
from titanmoe.config.schema import Optimizer as Options
from titanmoe.train.optimizers.adamw import Rounding, at_random
from titanmoe.train.optimizers.optimizer_rules import OPTIMIZERS

NAME = "layers.0.attention.wq.weight"


def test_the_mean_of_what_is_rounded_at_random_is_right() -> None:
    random = torch.arange(1 << 16)
    for x in (1.001, -3.0e-5, 2.0, 0.0):
        got = at_random(torch.full((1 << 16,), x), random)
        assert len(got.unique()) <= 2 and got.double().mean().item() == pytest.approx(x, rel=1e-6)
    special = at_random(torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.full((3,), 0xFFFF))
    assert special[:2].tolist() == [torch.inf, -torch.inf] and special[2].isnan()


def test_pieces_are_rounded_as_the_whole_is() -> None:
    """Of one tensor in one update; other tensors and updates have other random numbers."""
    value = torch.rand(6, 5) + 1
    rounding = Rounding({"a": nn.Parameter(torch.zeros(6, 5)), "b": nn.Parameter(torch.zeros(6, 5))}, seed=3)
    whole, part, other, later = (torch.zeros(6, 5, dtype=torch.bfloat16) for _ in range(4))
    rounding.store(whole, value, "a", "weight")
    rounding.store(other, value, "b", "weight")
    rounding.places["a"] = (2, 1), (6, 5)
    piece = part[2:5, 1:4].contiguous()
    rounding.store(piece, value[2:5, 1:4], "a", "weight")
    assert torch.equal(piece, whole[2:5, 1:4]) and not torch.equal(whole, other)
    rounding.places["a"], rounding.update = ((0, 0), (6, 5)), 1
    rounding.store(later, value, "a", "weight")
    assert not torch.equal(later, whole)


def moved(optimizer: str, dtype: torch.dtype, steps: int = 100, **options: object) -> torch.Tensor:
    """How far a weight of ones has come, and the optimizer, after steps that each change it by some 1e-4."""
    torch.manual_seed(0)
    parameters = {NAME: nn.Parameter(torch.ones(64, 64, dtype=dtype))}
    config = Config(optimizer=Options(name=optimizer, weight_decay=0.0, **options), training=Training(seed=1))
    made = OPTIMIZERS.implementation(optimizer).build(parameters, config, None)
    direction = torch.randn(64, 64)
    for _ in range(steps):
        parameters[NAME].grad = direction.to(dtype, copy=True)
        made.step(1e-4, 1.0)
    return (parameters[NAME].detach().float() - 1) * -direction.sign()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_small_updates_of_bfloat16_weights_are_lost_or_not(optimizer: str) -> None:
    want = moved(optimizer, torch.float32).mean().item()
    assert want > 1e-3
    assert moved(optimizer, torch.bfloat16).abs().max() == 0, "rounded to the nearest, nothing has moved"
    assert moved(optimizer, torch.bfloat16, stochastic_rounding=True).mean().item() == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_in_bfloat16_change_a_little(optimizer: str, offload: bool) -> None:
    want = moved(optimizer, torch.float32)
    narrow = {"moments_dtype": "bfloat16", "stochastic_rounding": True, "offload": offload}
    got = moved(optimizer, torch.float32, **narrow)
    assert 0 < (got - want).norm() < 0.05 * want.norm()


def test_rounding_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds to bfloat16, and training\.dtype"):
        parity.read({"optimizer.stochastic_rounding": True}, 1)
    with pytest.raises(ConfigError, match="goes with weights in float32 or bfloat16"):
        parity.read({"optimizer.moments_dtype": "bfloat16"}, 1)
