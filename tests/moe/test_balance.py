"""Auxiliary losses: their values under uniform routing, their gradients, and that recomputing forward adds nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from titanmoe.config.schema import Model, MoE
from titanmoe.moe.balance import Balance
from titanmoe.moe.layer_statistics import LayerStatistics
from titanmoe.moe.router import count_choices
from titanmoe.tokens import Tokens

E, K, L = 8, 2, 16
TERMS = ("aux_loss_sequence", "aux_loss", "aux_loss_global", "z_loss")


def balance(microbatches: int, score: str = "softmax", **coefficients: float) -> Balance:
    options = MoE(**(coefficients or dict.fromkeys(TERMS, 1.0)))
    return Balance(Model(num_experts=E, top_k=K, score_function=score), options, microbatches)


def tokens(samples: int, microbatch: int, valid_T: Tensor | None = None) -> Tokens:
    index_T = torch.arange(samples * L)
    valid_T = torch.ones_like(index_T) > 0 if valid_T is None else valid_T
    return Tokens(index_T.view(samples, L) % L, index_T, index_T // L, valid_T, torch.tensor(microbatch))


def forward(one: Balance, logits_TE: Tensor, chosen_TK: Tensor, about: Tokens) -> Tensor:
    scores_TE = logits_TE.sigmoid() if one.normalises else logits_TE.softmax(-1)
    weights_TK = scores_TE.gather(1, chosen_TK)
    chosen_TK = chosen_TK.where(about.valid_T.unsqueeze(1), E)
    count_BE = count_choices(chosen_TK, about.sample_T, len(about.position_BS), E)
    return one(weights_TK, logits_TE, scores_TE, count_BE, about)


def counted(one: Balance) -> LayerStatistics:
    """Return the sums over the microbatches that the layer has seen so far."""
    return one.counts.layout.read(one.counts.counts_MX.sum(0).tolist())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def round_robin(count: int) -> Tensor:
    return torch.arange(count * K).view(count, K) % E


@pytest.mark.parametrize("score", ["softmax", "softmax_after_topk", "sigmoid"])
@pytest.mark.parametrize("even", ["scores", "choices"])
def test_terms_are_one_under_uniform_routing(score: str, even: str) -> None:
    """Over two microbatches of two samples with some padding."""
    one = balance(2, score)
    valid_T = torch.arange(2 * L) % L < 12  # 12 tokens of 2 choices go three times around 8 experts
    one.begin_step(torch.tensor(2 * 24.0), 4)
    for m in range(2):
        logits_TE = torch.zeros(2 * L, E, dtype=torch.float64) if even == "scores" else random(2 * L, E, seed=m)
        chosen_TK = random(2 * L, E, seed=9).topk(K).indices if even == "scores" else round_robin(2 * L)
        forward(one, logits_TE, chosen_TK, tokens(2, m, valid_T))
    got = counted(one)
    for name in TERMS[:3]:
        assert got.losses[name] == pytest.approx(1, rel=1e-12), name
    assert got.counts["tokens"] == 48
    assert sum(got.load) == 48 * K
    if even == "scores":
        assert got.losses["z_loss"] == pytest.approx(math.log(E) ** 2, rel=1e-12)
        # the entropy is that of the normalised scores
        assert got.counts["entropy"] / 48 == pytest.approx(math.log(E), rel=1e-12)


def test_a_coefficient_scales_its_term_and_the_others_stay_out() -> None:
    one = balance(1, aux_loss=0.25)
    one.begin_step(torch.tensor(float(L)), 1)
    forward(one, torch.zeros(L, E, dtype=torch.float64), round_robin(L), tokens(1, 0))
    assert counted(one).losses == {"aux_loss": pytest.approx(0.25, rel=1e-12)}


def plain_terms(logits_TE: Tensor, chosen_TK: Tensor, valid_T: Tensor, all_tokens: int, all_samples: int) -> Tensor:
    """For a microbatch that is the first of its step: sequence, microbatch and global terms, and z."""
    p_TE, samples = logits_TE.softmax(-1), len(logits_TE) // L

    def f(chosen: Tensor) -> Tensor:
        return E * chosen.flatten().bincount(minlength=E).double() / (K * max(1, len(chosen)))

    sequence = logits_TE.new_zeros(())
    for b in range(samples):
        mine = torch.arange(len(logits_TE)).div(L, rounding_mode="floor").eq(b) & valid_T
        if mine.any():
            sequence = sequence + (f(chosen_TK[mine]) * p_TE[mine].mean(0)).sum() / all_samples
    microbatch = (f(chosen_TK[valid_T]) * p_TE[valid_T].sum(0)).sum() / all_tokens
    z = logits_TE[valid_T].logsumexp(-1).square().sum() / all_tokens
    return torch.stack([sequence, microbatch, microbatch, z])


@pytest.mark.parametrize("name", TERMS)
def test_the_gradient_is_injected_whatever_the_loss_is(name: str) -> None:
    one = balance(1, **{name: 0.5})
    valid_T = torch.arange(3 * L) % 5 != 0
    valid_T[2 * L :] = False  # a sample of padding only
    logits_TE = random(3 * L, E).requires_grad_()
    chosen_TK = logits_TE.detach().topk(K).indices
    one.begin_step(torch.tensor(100.0), 6)
    weights_TK = forward(one, logits_TE, chosen_TK, tokens(3, 0, valid_T))
    unchanged = logits_TE.softmax(-1).gather(1, chosen_TK)
    assert torch.equal(weights_TK, unchanged)
    cotangent = random(3 * L, K, seed=3)
    (got,) = torch.autograd.grad(weights_TK, logits_TE, cotangent)
    term = 0.5 * plain_terms(logits_TE, chosen_TK, valid_T, 100, 6)[TERMS.index(name)]
    assert counted(one).losses[name] == pytest.approx(float(term.detach()), rel=1e-12)
    (want,) = torch.autograd.grad((unchanged * cotangent).sum() + term, logits_TE)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_a_recomputed_forward_changes_nothing() -> None:
    """Neither the buffers nor the gradient, even when later microbatches ran in between."""
    one = balance(3)
    one.begin_step(torch.tensor(3.0 * L), 3)
    logits = [random(L, E, seed=m).requires_grad_() for m in range(3)]

    def run(m: int) -> Tensor:
        weights_TK = forward(one, logits[m], logits[m].detach().topk(K).indices, tokens(1, m))
        return torch.autograd.grad(weights_TK.sum(), logits[m])[0]

    grads = [run(m) for m in range(3)]
    one.counts.record(torch.tensor(1), ("dropped",), torch.tensor(5))
    before = {name: buffer.clone() for name, buffer in one.named_buffers()}
    for m in (1, 0, 2, 1):
        assert torch.equal(run(m), grads[m])
        one.counts.record(torch.tensor(1), ("dropped",), torch.tensor(5))
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert counted(one).counts["dropped"] == 5


def test_the_global_term_counts_the_microbatches_so_far() -> None:
    """The first sends everything to experts 0 and 1, the second to 2 and 3; scores favour 0."""
    one = balance(2, aux_loss_global=1.0)
    one.begin_step(torch.tensor(2.0 * L), 2)
    logits_TE = torch.zeros(L, E, dtype=torch.float64)
    logits_TE[:, 0] = math.log(3)
    p = logits_TE[0].softmax(-1)
    for m, experts in enumerate(([0, 1], [2, 3])):
        forward(one, logits_TE, torch.tensor(experts).expand(L, K), tokens(1, m))
    want = [(E / K) * (p[0] + p[1]) / 2, (E / K) * p[:4].sum() / 2 / 2]
    got = [one.counts.layout.read(row).losses["aux_loss_global"] for row in one.counts.counts_MX.tolist()]
    assert got == pytest.approx([float(w) for w in want], rel=1e-12)


def test_begin_step_clears() -> None:
    one = balance(2)
    for _ in range(2):
        one.begin_step(torch.tensor(2.0 * L), 2)
        assert not any(buffer.any() for name, buffer in one.named_buffers() if name.endswith(("_ME", "_MX")))
        assert float(one.step_tokens) == 2 * L and float(one.step_samples) == 2
        for m in range(2):
            forward(one, random(L, E), round_robin(L), tokens(1, m))
        assert sum(counted(one).load) == 2 * L * K
    one.begin_step(torch.tensor(0.0), 1)
    assert float(one.step_tokens) == 1, "a step without tokens divides by one"
