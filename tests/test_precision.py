"""Code that computes in at least float32, compared with float64: only the input's roundings and one of the result.

`final` allows each number one rounding to its own dtype, and the tensor the error of float32 sums
(tests/support/tolerances.py). Numbers that were bfloat16 in between have larger errors, so that even one such step is
noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.support import tolerances
from tests.support.masks import mask_of
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config.schema import Config, Model, MoE
from titanmoe.config.schema import Optimizer as Options
from titanmoe.mask import Mask
from titanmoe.models.attention import causal_attention
from titanmoe.models.layers import RMSNorm, SplitRMSNorm, rope_angles, rotate
from titanmoe.models.vocabulary import chunked_cross_entropy, cross_entropy
from titanmoe.moe.balance import Balance
from titanmoe.moe.router import Router
from titanmoe.parallel import context
from titanmoe.parallel.attention_block import block_reference
from titanmoe.parallel.grad_norm import local_norms
from titanmoe.tokens import Tokens
from titanmoe.train.optimizers.adamw import AdamW

DTYPES = [torch.bfloat16, torch.float32]
both = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def final(got: Tensor, exact: Tensor, terms: int = 0, roundings: int = 16) -> None:
    got_wide, exact = got.detach().double(), exact.detach().double()
    rest = tolerances.bound(torch.float32, terms, roundings) * float(exact.abs().max())
    beyond = (got_wide - exact).abs() - tolerances.unit_roundoff(got.dtype) * exact.abs() - rest
    assert not beyond.isnan().any() and float(beyond.max()) <= 0, f"{float(beyond.max()):.2e} beyond one rounding"


def held(function: Callable[..., Tensor], *given: Tensor, terms: int = 0, wide: bool = False) -> None:
    """The result and its gradients. wide: the result is at least float32 whatever the input."""
    results = []
    for dtype in (given[0].dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in given]
        y = function(*leaves)
        assert y.dtype == (torch.promote_types(dtype, torch.float32) if wide else dtype)
        cotangent = random(*y.shape, dtype=given[0].dtype, seed=9).to(y.dtype)
        results.append([y, *torch.autograd.grad(y, leaves, cotangent)])
    for got, exact in zip(*results, strict=True):
        final(got, exact, terms)


# ---- norms


@both
@pytest.mark.parametrize("kind", [RMSNorm, SplitRMSNorm])
def test_norms(kind: type[RMSNorm], dtype: torch.dtype) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        made = kind(64, 1e-6, x.dtype, kernels="torch")
        del made.weight
        made.weight = weight
        return made(x)

    given = 3 * random(40, 64, dtype=dtype), 1 + random(64, dtype=dtype, seed=1) / 4
    held(norm, *given, terms=64)


# ---- rotary positions

YARN = dict(rope_scaling="yarn", rope_theta=1e4, rope_factor=40.0, rope_mscale=1.0, rope_mscale_all_dim=0.707)

BEYOND = YARN | dict(rope_theta=3.0, rope_original_len=64)
"""Its ramp would begin before the first dim and end after the last."""


@both
@pytest.mark.parametrize("shape", [{}, YARN, BEYOND], ids=["plain", "yarn", "beyond its ends"])
def test_angles(shape: dict, dtype: torch.dtype) -> None:
    model, position = Model(**shape), torch.arange(512)[None]
    frequency, scale = reference.yarn(model, 32)
    angle = (position[..., None] * torch.tensor(frequency, dtype=torch.float64)).repeat(1, 1, 2).unsqueeze(2)
    for got, exact in zip(rope_angles(position, model, 32, dtype), (angle.cos(), angle.sin()), strict=True):
        assert got.dtype == torch.float32
        tolerances.assert_close(got, (exact * scale).float(), roundings=512**2)


@both
def test_rotation(dtype: torch.dtype) -> None:
    angle = random(1, 24, 1, 16, dtype=torch.float64, seed=1).repeat(1, 1, 1, 2)
    rope = angle.cos().float(), angle.sin().float()
    held(lambda x: rotate(x, rope), random(2, 24, 3, 32, dtype=dtype))


# ---- softmax


@both
@pytest.mark.parametrize("documents", [False, True])
def test_attention_in_plain_operations(documents: bool, dtype: torch.dtype) -> None:
    """With sinks; its scores and weights are wide."""
    document = torch.arange(24)[None].expand(2, -1) // 7 if documents else None
    q, k, v = (random(2, 24, 4, 16, dtype=dtype, seed=seed) for seed in range(3))
    sinks = random(4, dtype=dtype, seed=3)
    held(lambda q, k, v, sinks: causal_attention(q, k, v, mask_of(document, 5), sinks), q, k, v, sinks, terms=16 + 24)


@pytest.mark.parametrize("chunks", [1, 16])
def test_pieces_of_attention_merge_wide(chunks: int) -> None:
    """The kernel rounds each piece and its operands, and its exp has a few bits less than float32's."""
    q, k, v = (random(2, 4, 16 * 8, 16, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    out, lse = context._start(q, v, None)
    pairs = Mask().pairs(128 // chunks, chunks, range(chunks), range(chunks))
    context._forward_pairs(q, k, v, pairs, Mask(), out=out, lse=lse)
    assert out.dtype == lse.dtype == torch.float32
    exact, exact_lse = block_reference(q.double(), k.double(), v.double(), None, True)
    assert (out - exact).norm() <= tolerances.unit_roundoff(torch.bfloat16) * exact.norm()
    assert tolerances.relative_difference(lse, exact_lse) <= tolerances.unit_roundoff(torch.bfloat16) / 16


# ---- the loss


@both
@pytest.mark.parametrize("chunks", [0, 5])
def test_loss(chunks: int, dtype: torch.dtype) -> None:
    """With numbers whose products are exact, so that logits are the same in any dtype."""
    label = torch.arange(40) % 33

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        if chunks:
            return chunked_cross_entropy(x, weight, label, NO_GROUP, chunks)[0].sum()
        return cross_entropy(x @ weight.t(), label, NO_GROUP)[0].sum()

    x, weight = (random(n, 8, seed=n).clamp(-2, 2).round().to(dtype) for n in (40, 33))
    if dtype == torch.float32:
        held(loss, x, weight, terms=33 + 40, wide=True)
    logits = (x @ weight.t()).detach()
    held(lambda logits: cross_entropy(logits, label, NO_GROUP)[0].sum(), logits, terms=33 + 40, wide=True)
    got = loss(x, weight)
    assert got.dtype == torch.float32
    final(got, loss(x.double(), weight.double()), terms=33 + 40)


# ---- gating and balance


def tokens_of(count: int) -> Tokens:
    index = torch.arange(count)
    return Tokens(index[None], index, index * 0, index % 5 != 4, torch.tensor(0))


@both
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after_topk"])
def test_gating_and_balance_terms(score: str, dtype: torch.dtype) -> None:
    """From the logits to the reported values, against the plain model."""
    model = Model(num_experts=16, top_k=3, dim=64, score_function=score, norm_topk=True, route_scale=2.5)
    options, tokens = MoE(**dict.fromkeys(reference.KEYS, 0.01), jitter=0.1), tokens_of(40)
    made, balance = Router(model, options, 0, 0, dtype), Balance(model, options, 1)
    made.weight = torch.nn.Parameter(random(16, 64, seed=1) / 4)
    made.begin_step(1)
    balance.begin_step(torch.tensor(32.0), 1)
    x = random(40, 64, dtype=dtype).requires_grad_()
    logits, scores, weights, chosen, count = made(x, tokens)
    cotangent = random(40, 3, seed=9)
    grads = torch.autograd.grad(balance(weights, logits, scores, count, tokens), (x, made.weight), cotangent)

    config = SimpleNamespace(model=model, moe=options, training=SimpleNamespace(seed=0))
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, made.weight)]
    routing = reference.route(config, leaves[1], torch.zeros(16), leaves[0], tokens.valid_T, 1, 0)
    step = reference.Tokens.of([[reference.Batch(tokens.index_T[None], tokens.index_T[None], tokens.valid_T[None])]])
    terms = reference.balance_terms(model, step, routing)
    total = (routing.weights_TK * cotangent).sum() + 0.01 * sum(terms.values())
    assert torch.equal(chosen[tokens.valid_T], routing.chosen_TK[tokens.valid_T])
    got = (logits, scores, weights, *grads)
    assert [y.dtype for y in got] == [torch.float32] * 3 + [dtype, torch.float32]
    exact = (routing.logits_TE, routing.scores_TE, routing.weights_TK, *torch.autograd.grad(total, leaves))
    for a, b in zip(got, exact, strict=True):
        final(a, b, terms=2 * 64 + 40, roundings=64)
    share = (routing.scores_TE / routing.scores_TE.sum(-1, keepdim=True))[tokens.valid_T]
    row = balance.counts.layout.read(balance.counts.counts_MX[0].tolist())
    told_of = row.losses | row.counts
    wanted = {name: 0.01 * float(terms[name]) for name in reference.KEYS}
    wanted |= {"entropy": float(torch.special.entr(share).sum()), "tokens": 32.0, "dropped": 0.0}
    assert told_of == pytest.approx(wanted, rel=tolerances.bound(torch.float32, 40 * 16, 64))
    assert balance.counts.counts_MX.dtype == torch.float64


# ---- the step


@both
def test_norm_of_gradients(dtype: torch.dtype) -> None:
    grads = [random(3 * 4096 + 7, 5, dtype=dtype), random(300, 50, dtype=dtype, seed=1).t(), random(1, dtype=dtype)]
    for norm, grad in zip(local_norms(grads), grads, strict=True):
        assert norm.dtype == torch.float64
        assert float(norm) == pytest.approx(float(grad.double().norm()), rel=tolerances.bound(torch.float32, 4096))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_moments_and_weights(implementation: str) -> None:
    options = Options(implementation=implementation, lr=0.01, weight_decay=0.1)
    config = Config(optimizer=options)
    parameter = torch.nn.Parameter(random(30, 20))
    optimizer, weights, moments = AdamW({"w": parameter}, options), {"w": parameter.detach().double()}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "learning_rate", lambda config, step: options.lr)
        for step in range(1, 4):
            parameter.grad = random(30, 20, seed=step) * 10.0**-step
            weights, moments = reference.adamw(config, weights, {"w": parameter.grad.double()}, moments, step)
            optimizer.step(options.lr)
    state = optimizer.moments()["w"]
    final(parameter, weights["w"], roundings=3 * 16)
    for name, exact in zip(("exp_avg", "exp_avg_sq"), moments["w"], strict=True):
        assert state[name].dtype == torch.float32
        final(state[name], exact, roundings=3 * 4)
