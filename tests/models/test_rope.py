"""YaRN: the frequencies and factors of transformers, of the plain model, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests import reference
from titanmoe.config.schema import Model
from titanmoe.models.layers import rope_angles, rope_frequencies, rope_scale, yarn_mscale

YARN = {
    "deepseek_v3": dict(rope_theta=1e4, rope_factor=40.0, rope_mscale=1.0, rope_mscale_all_dim=1.0),
    "unequal mscale": dict(rope_theta=1e4, rope_factor=40.0, rope_mscale=1.0, rope_mscale_all_dim=0.707),
    "gpt_oss": dict(rope_theta=1.5e5, rope_factor=32.0, rope_truncate=False),
    "short": dict(rope_theta=100.0, rope_factor=4.0, rope_original_len=64, rope_beta_fast=4.0),
    "kimi_k2": dict(rope_theta=5e4, rope_factor=32.0, rope_beta_fast=1.0, rope_mscale=1.0, rope_mscale_all_dim=1.0),
    "all slow": dict(rope_theta=1e4, rope_factor=4.0, rope_original_len=2),
}


def model(case: str) -> Model:
    return Model(rope_scaling="yarn", **YARN[case])


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("case", YARN)
def test_frequencies_are_transformers(case: str, width: int) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import PreTrainedConfig

    m = model(case)
    given = {"rope_type": "yarn", "rope_theta": m.rope_theta, "factor": m.rope_factor, "truncate": m.rope_truncate}
    given |= {"original_max_position_embeddings": m.rope_original_len}
    given |= {"beta_fast": m.rope_beta_fast, "beta_slow": m.rope_beta_slow}
    if m.rope_mscale:
        given |= {"mscale": m.rope_mscale, "mscale_all_dim": m.rope_mscale_all_dim}
    theirs = PreTrainedConfig(rope_parameters=given, max_position_embeddings=m.rope_original_len)
    theirs.head_dim, theirs.hidden_size, theirs.num_attention_heads = width, width, 1
    frequency, scale = rope_utils._compute_yarn_parameters(theirs, torch.device("cpu"))
    torch.testing.assert_close(rope_frequencies(m, width, torch.float32, torch.device("cpu")), frequency)
    assert rope_scale(m) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("case", YARN)
def test_frequencies_are_the_plain_models(case: str) -> None:
    m = model(case)
    frequency, scale = reference.yarn(m, 16)
    ours = rope_frequencies(m, 16, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(ours, torch.tensor(frequency, dtype=torch.float64), rtol=1e-14, atol=0)
    assert rope_scale(m) == pytest.approx(scale, rel=1e-15)


def test_by_hand() -> None:
    """With width 8 and theta 100, pair i turns 64 / (2 pi) * 100^(-i/4) times in 64: 10.2, 3.2, 1.02, 0.32."""
    m = model("short")
    frequency = rope_frequencies(m, 8, torch.float64, torch.device("cpu"))
    # 4 times at pair 0.81, once at 2.02; rounded outward: the ramp runs from pair 0 to pair 3.
    plain = torch.tensor([100.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    slowed = torch.tensor([0, 1 / 3, 2 / 3, 1], dtype=torch.float64)
    torch.testing.assert_close(frequency, plain * (1 - slowed) + plain / 4 * slowed)
    assert rope_scale(m) == 1 + 0.1 * math.log(4) == yarn_mscale(m, 1)
    cos, sin = rope_angles(torch.zeros(1, 1, dtype=torch.int64), m, 8, torch.float64)
    assert (cos == rope_scale(m)).all() and (sin == 0).all()


def test_none_is_plain_rope() -> None:
    m = Model(rope_theta=1e4)
    frequency = rope_frequencies(m, 8, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(frequency, torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64))
    assert rope_scale(m) == 1


@pytest.mark.parametrize("case", ["none", *YARN])
def test_angles_are_wide_whatever_the_activations(case: str) -> None:
    """Late positions have large angles, of which 16 bits only keep the full turns."""
    m = Model() if case == "none" else model(case)
    position = torch.tensor([[0, 1, 1001, 131071]])
    for narrow in (torch.bfloat16, torch.float16):
        for got, want in zip(
            rope_angles(position, m, 8, narrow), rope_angles(position, m, 8, torch.float32), strict=True
        ):
            assert got.dtype == torch.float32
            assert torch.equal(got, want)
    assert rope_angles(position, m, 8, torch.float64)[0].dtype == torch.float64
