"""Log-probabilities of some ids and of all others together, against whole logits: values, gradients and largest ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests import world
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.models.candidate_classes import candidate_log_probs, top_k_log_probs
from titanmoe.tokens import IGNORE

T, D, V = 12, 6, 20


def operands(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    x_TD, weight_VD = (torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (T, V))
    label_T = torch.randint(V, (T,), generator=draw)
    label_T[::4] = IGNORE
    candidates_TK = torch.stack([torch.randperm(V, generator=draw)[:count] for _ in range(T)])
    return [x_TD, weight_VD, label_T, candidates_TK]


def plain(x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, candidates_TK: Tensor, temperature: float) -> tuple:
    logits_TV = x_TD @ weight_VD.t()
    has_label_T = label_T != IGNORE
    loss_T = -logits_TV.log_softmax(1).gather(1, label_T.clamp(min=0).unsqueeze(1)).squeeze(1)
    p_TV = (logits_TV / temperature).softmax(1)
    candidates_TV = torch.zeros(T, V, dtype=torch.bool).scatter(1, candidates_TK, True)
    classes = p_TV.gather(1, candidates_TK), p_TV.masked_fill(candidates_TV, 0).sum(1, keepdim=True)
    return loss_T.where(has_label_T, 0), torch.cat(classes, 1).t().log().where(has_label_T, 0)


def outcome(scores: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """With another weight for each number; none for the rest where nothing is left, which is -inf."""
    loss_T, log_p_CT = scores
    weight_CT = torch.linspace(1, 5, log_p_CT.numel(), dtype=torch.float64).view_as(log_p_CT)
    weight_T = torch.linspace(-1, 2, T, dtype=torch.float64)
    total = (loss_T * weight_T).sum() + (log_p_CT.where(log_p_CT > -torch.inf, 0) * weight_CT).sum()
    return [loss_T.detach(), log_p_CT.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("chunks", [1, 3, V])
@pytest.mark.parametrize(("count", "temperature"), [(1, 1.0), (5, 2.5), (V - 1, 1.0), (V, 0.5)])
def test_classes_have_the_values_and_gradients_of_whole_logits(count: int, temperature: float, chunks: int) -> None:
    x_TD, weight_VD, label_T, candidates_TK = operands(count)
    leaves = [x_TD.requires_grad_(), weight_VD.requires_grad_()]
    want = outcome(plain(*leaves, label_T, candidates_TK, temperature), leaves)
    got = outcome(candidate_log_probs(*leaves, label_T, candidates_TK, NO_GROUP, chunks, temperature), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert (got[1][-1] == -torch.inf).any() == (count == V)


@pytest.mark.parametrize("chunks", [1, 3, V])
@pytest.mark.parametrize("count", [1, 7, V])
def test_the_largest_are_those_of_whole_logits(count: int, chunks: int) -> None:
    x_TD, weight_VD, _, _ = operands(count)
    largest_TK = (x_TD @ weight_VD.t()).topk(count, 1).indices
    ids_TK, log_p_CT = top_k_log_probs(x_TD, weight_VD, count, NO_GROUP, chunks, 1.5)
    assert torch.equal(ids_TK, largest_TK)
    _, want_CT = plain(x_TD, weight_VD, torch.zeros(T, dtype=torch.int64), largest_TK, 1.5)
    torch.testing.assert_close(log_p_CT, want_CT, rtol=1e-11, atol=1e-12)


def test_a_rest_far_below_rounding_is_still_exact() -> None:
    """One minus the sum of the others would be 0."""
    x_TD = torch.ones(1, 1, requires_grad=True)
    weight_VD = torch.tensor([[60.0], [0.0], [-1.0]])
    _, log_p_CT = candidate_log_probs(x_TD, weight_VD, torch.tensor([0]), torch.tensor([[0]]), NO_GROUP, 2, 1.0)
    assert log_p_CT[1].item() == pytest.approx(torch.tensor([0.0, -1.0]).logsumexp(0).item() - 60, rel=1e-6)


def on_a_rank(count: int) -> list[Tensor]:
    import torch.distributed as dist

    tp = Group(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())
    x_TD, weight_VD, label_T, candidates_TK = operands(count)
    part_VD = weight_VD.chunk(tp.size)[tp.rank].clone()
    leaves = [x_TD.requires_grad_(), part_VD.requires_grad_()]
    found = outcome(candidate_log_probs(*leaves, label_T, candidates_TK, tp, 2, 2.0), leaves)
    return [*found, *top_k_log_probs(x_TD, part_VD, count, tp, 2, 2.0)]


@pytest.mark.parametrize("count", [3, V])
def test_a_vocabulary_that_is_split_over_ranks(count: int) -> None:
    """V is more than one rank has. Of the largest: the ids too, in one order."""
    x_TD, weight_VD, label_T, candidates_TK = operands(count)
    leaves = [x_TD.requires_grad_(), weight_VD.requires_grad_()]
    loss, classes, grad_x, grad_w = outcome(plain(*leaves, label_T, candidates_TK, 2.0), leaves)
    largest_TK = (x_TD @ weight_VD.t()).topk(count, 1).indices
    _, log_p_CT = plain(x_TD, weight_VD, torch.zeros(T, dtype=torch.int64), largest_TK, 2.0)
    ranks = world.run(2, on_a_rank, count)
    for got in ranks:
        for a, b in zip((*got[:2], got[5]), (loss, classes, log_p_CT.detach()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        assert torch.equal(got[4], largest_TK)
    torch.testing.assert_close(sum(rank[2] for rank in ranks), grad_x, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]), grad_w, rtol=1e-11, atol=1e-12)
