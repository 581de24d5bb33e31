"""Optimizers: what weight decay shrinks, what their specs say, and rounding to bfloat16 at random."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests import parity
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.schema import Config, Training
from titanmoe.config.schema import Optimizer as Options
from titanmoe.models.tensors import matches
from titanmoe.train.optimizers.adamw import AdamW, Rounding, round_stochastically
from titanmoe.train.optimizers.optimizer_spec import COMMON_FIELDS, OPTIMIZERS, OptimizerSpec

SPARED = {"norm.weight": (3,), "attention.wq.bias": (3,), "moe.router.weight": (2, 3), "moe.shared.gate.weight": (1, 3)}
SHRUNK = {"attention.wq.weight": (3, 3), "moe.experts.w1": (2, 3, 3)}


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_spares_norms_biases_and_gates_unless_told_otherwise(decay_all: bool, implementation: str) -> None:
    """With gradients of zero nothing else changes a weight."""
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in (SPARED | SHRUNK).items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    options = Options(weight_decay=0.5, decay_all=decay_all, implementation=implementation)
    AdamW(parameters, options).step(lr=0.1)
    for name, parameter in parameters.items():
        want = 1.0 if name in SPARED and not decay_all else 0.95
        assert parameter.unique().tolist() == pytest.approx([want]), name


OF_MIXTRAL = {
    "embed.weight": (320, 64),
    "layers.1.attention_norm.weight": (64,),
    "layers.1.attention.wq.weight": (64, 64),
    "layers.1.moe.experts.w1": (8, 128, 64),
}
"""Some parameters of the default model."""


class Asked:
    """The defaults, and which of them were asked for."""

    def __init__(self) -> None:
        self.fields: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.fields.add(name)
        return getattr(Options(), name)


@pytest.mark.parametrize("name", OPTIMIZERS.table)
def test_spec_is_true(name: str) -> None:
    """What it reads, and the size of its state, before a step and after."""
    spec, options = OPTIMIZERS.look_up(name), Asked()
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in OF_MIXTRAL.items()}
    config = replace(Config(), optimizer=cast(Options, options))
    optimizer = OPTIMIZERS.implementation(name).build(parameters, config, None)
    matrices = [name for name in parameters if matches(name, spec.matrices(config))]
    of_matrices = sum(parameters[name].numel() for name in matrices)
    others = sum(p.numel() for p in parameters.values()) - of_matrices
    numbers = spec.numbers_per_weight * others + spec.numbers_per_matrix_weight * of_matrices
    for _ in range(2):
        moments = [x for tensors in optimizer.moments().values() for x in tensors.values()]
        assert sum(x.numel() for x in moments) == numbers
        state = 4 * numbers + spec.bytes_per_tensor * (len(parameters) - len(matrices))
        assert sum(x.nbytes for x in optimizer.device_tensors) == state and optimizer.host_tensors == []
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(0.1, torch.ones(()))
        assert all(p.grad is None and not torch.equal(p, torch.ones_like(p)) for p in parameters.values())
    assert options.fields - set(COMMON_FIELDS) == set(spec.reads)


class PlainSpec(OptimizerSpec):
    reads = ("beta1",)
    numbers_per_weight = 0


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS.table, "plain", PlainSpec())


def test_a_field_that_an_optimizer_does_not_read_is_refused(plain: None) -> None:
    words = ["--optimizer.name=plain", "--optimizer.beta1=0.5", "--optimizer.lr=1", "--optimizer.skip_spikes=6"]
    assert load(words, COMPONENTS, lambda config: []).optimizer.name == "plain"
    with pytest.raises(ConfigError) as refused:
        load([*words, "--optimizer.eps=0.1", "--optimizer.offload"], COMPONENTS, lambda config: [])
    assert refused.value.problems == [
        'command line: optimizer.eps = 0.1 does nothing with optimizer.name = "plain", which reads beta1: leave it '
        "out, or set it to 1e-08",
        'command line: optimizer.offload = true does nothing with optimizer.name = "plain", which reads beta1: leave '
        "it out, or set it to false",
    ]
    read = {*COMMON_FIELDS, *(field for name in OPTIMIZERS.table for field in OPTIMIZERS.look_up(name).reads)}
    assert read == asdict(Options()).keys(), "a field of [optimizer] that no step and no optimizer reads"


# ---- bfloat16 loses small updates unless it is rounded at random, and all ranks round alike

NAME = "layers.0.attention.wq.weight"


def test_the_mean_of_what_is_rounded_at_random_is_right() -> None:
    random = torch.arange(1 << 16)
    for x in (1.001, -3.0e-5, 2.0, 0.0):
        got = round_stochastically(torch.full((1 << 16,), x), random)
        assert len(got.unique()) <= 2 and got.double().mean().item() == pytest.approx(x, rel=1e-6)
    special = round_stochastically(torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.full((3,), 0xFFFF))
    assert special[:2].tolist() == [torch.inf, -torch.inf] and special[2].isnan()


def test_pieces_are_rounded_as_the_whole_is() -> None:
    """Pieces of a tensor round by the same random numbers as the whole; other tensors and updates have others."""
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
