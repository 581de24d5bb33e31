"""What weight decay shrinks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanmoe.config.schema import Optimizer as Options
from titanmoe.train.optimizer import Optimizer

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
    Optimizer(parameters, options).step(lr=0.1)
    for name, parameter in parameters.items():
        want = 1.0 if name in SPARED and not decay_all else 0.95
        assert parameter.unique().tolist() == pytest.approx([want]), name
