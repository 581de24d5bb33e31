"""With all gradients 1 the norm is the square root of the number of logical parameters, under any mapping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import parity, world
from titanmoe.models.count import parameters

MAPPINGS: dict[str, dict[str, Any]] = {
    "tp2_ep4": {"parallelism.tp": 2, "parallelism.experts.ep": 4},
    "replicate2_ep2_etp2": {
        "parallelism.dp_replicate": 2,
        "parallelism.experts.ep": 2,
        "parallelism.experts.etp": 2,
        "model.qk_norm": "head",
    },
    "replicate2_edp4": {"parallelism.dp_replicate": 2, "model.shared_hidden": 16, "model.shared_gate": True},
    "pp2_tied": {"parallelism.pp": 2, "model.tie_embeddings": True},
    "pp2_mtp": {"parallelism.pp": 2, "model.mtp_depth": 1},
    "pp2_tied_mtp": {"parallelism.pp": 2, "model.tie_embeddings": True, "model.mtp_depth": 1},
    "pp2_tp2_tied": {"parallelism.pp": 2, "parallelism.tp": 2, "model.tie_embeddings": True},
}


def norms_of_ones(changes: dict[str, Any], max_norm: float) -> tuple[float, float]:
    """The norm before and after it is clipped."""
    from titanmoe.parallel.grad_norm import clip, grad_norm

    trainer = parity.make_trainer(changes, loader=parity.samples())
    for parameter in trainer.training.parameters.values():
        parameter.grad = torch.ones_like(parameter)

    def norm() -> torch.Tensor:
        return grad_norm(
            trainer.training.parameters, trainer.training.meshes.world, trainer.training.gradients.tied.names
        )

    before = norm()
    clip(trainer.training.parameters.values(), before, max_norm)
    return before.item(), norm().item()


@pytest.mark.parametrize("changes", MAPPINGS.values(), ids=MAPPINGS)
def test_the_norm_of_ones_counts_every_logical_parameter_once(changes: dict[str, Any]) -> None:
    total = parameters(parity.read(changes, 4).model).total
    for before, after in world.run(4, norms_of_ones, changes, 2.0):
        assert before == pytest.approx(math.sqrt(total), rel=1e-12)
        assert after == pytest.approx(2.0 * before / (before + 1e-6), rel=1e-12)


def test_the_norm_of_narrow_numbers_is_that_of_wide_ones() -> None:
    from titanmoe.parallel.grad_norm import local_norms

    generator = torch.Generator().manual_seed(0)
    shapes = (3 * 4096 + 7, 5), (4096,), (0, 8), (1,), (70, 4096)
    grads = [torch.randn(shape, generator=generator) * 10.0**i for i, shape in enumerate(shapes)]
    grads += [torch.randn(300, 500, generator=generator).t(), torch.randn(5000, generator=generator).bfloat16()]
    for norm, grad in zip(local_norms(grads), grads, strict=True):
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(grad.double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_is_scaled_by_one_number_of_its_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from titanmoe.parallel.grad_norm import clip

    given, scaled = [], torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda grads, scale: given.append(scale.dtype) or scaled(grads, scale))
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=kind)) for kind in (dtype, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    clip(parameters, torch.tensor(4.0, dtype=torch.float64), 2.0)
    assert given == [torch.promote_types(dtype, torch.float32)]
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.5), rtol=1e-6, atol=0)


def test_a_gradient_shorter_than_the_limit_stays_as_it_is() -> None:
    from titanmoe.parallel.grad_norm import clip

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    clip([parameter], torch.tensor(0.5, dtype=torch.float64), 2.0)
    assert torch.equal(parameter.grad, torch.ones(3))
