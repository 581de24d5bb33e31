"""Policy objectives against the papers' formulas written out token by token. test_policy_gradients.py has mappings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import world
from tests.test_session import open_session, samples
from titanmoe import policy
from titanmoe.config import ConfigError
from titanmoe.data.batch import ROUTES, Batch
from titanmoe.policy import PolicyLoss, group_advantages, token_weights
from titanmoe.tokens import IGNORE, NOT_RECORDED

LOSSES = {
    "grpo": PolicyLoss(),
    "dapo": PolicyLoss(clip_high=0.28),
    "gspo": PolicyLoss(level="sequence", clip_low=0.05, clip_high=0.06),
    "truncated": PolicyLoss(truncation=2.0),
    "truncated by sequence, k1": PolicyLoss(truncation=1.5, truncate="sequence", estimator="k1"),
}


def with_columns(batch: Batch, documents: bool = False) -> Batch:
    """Every column at random; old log-probabilities so far apart that some ratios are clipped."""
    generator = torch.Generator().manual_seed(3)
    shape = batch.labels_BS.shape

    def near(centre: float, width: float) -> torch.Tensor:
        return centre + width * torch.randn(shape, generator=generator, dtype=torch.float64)

    old = near(-4.0, 0.5)
    columns = {"advantage": near(0.0, 1.0), "weight": token_weights(batch.labels_BS != IGNORE, "sample"), "old": old}
    columns |= {"generator": old + near(0.0, 0.5), "reference": near(-4.0, 0.3)}
    columns |= {"kl_weight": 0.1 * columns["weight"], "sft_weight": 0.01 * (batch.labels_BS != IGNORE).double()}
    document = torch.arange(shape[1]).expand(shape) // 6 if documents else None
    return batch._replace(document_BS=document, extra_fields=columns)


def by_hand(loss: PolicyLoss, log_p: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The objective as the papers write it: one completion and one token after the other."""
    total = torch.zeros((), dtype=torch.float64)
    x = {"old": log_p.detach()} | batch.extra_fields
    for b in range(len(log_p)):
        completions: dict[int, list[int]] = {}
        for t in range(log_p.shape[1]):
            if batch.labels_BS[b, t] != IGNORE:
                completions.setdefault(0 if batch.document_BS is None else int(batch.document_BS[b, t]), []).append(t)
        for places in completions.values():
            of_completion = torch.stack([log_p[b, t] - x["old"][b, t] for t in places]).mean().exp()
            drift = {t: float(x["old"][b, t] - x["generator"][b, t]) if loss.truncation else 0.0 for t in places}
            for t in places:
                ratio = of_completion if loss.level == "sequence" else (log_p[b, t] - x["old"][b, t]).exp()
                A = x["advantage"][b, t]
                gain = torch.min(ratio * A, torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high) * A)
                if loss.truncation:
                    over = sum(drift.values()) if loss.truncate == "sequence" else drift[t]
                    gain = gain * min(math.exp(over), loss.truncation)
                total = total - x["weight"][b, t] * gain
                if "kl_weight" in x:
                    d = x["reference"][b, t] - log_p[b, t]
                    total = total + x["kl_weight"][b, t] * (-d if loss.estimator == "k1" else d.exp() - d - 1)
                if "sft_weight" in x:
                    total = total - x["sft_weight"][b, t] * log_p[b, t]
    return total


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_papers(name: str, documents: bool) -> None:
    labels = torch.randint(0, 9, (3, 16), generator=torch.Generator().manual_seed(0))
    labels[:, :3], labels[1] = IGNORE, IGNORE
    batch = with_columns(Batch(labels.clamp(min=0), labels, labels == labels), documents)
    log_p = (-4 + torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).requires_grad_()
    value, expected = LOSSES[name](log_p, batch), by_hand(LOSSES[name], log_p, batch)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    (got,), (want,) = torch.autograd.grad(value, log_p), torch.autograd.grad(expected, log_p)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)
    routes = torch.zeros(3, 16, 2, 2, dtype=torch.int16)
    routes[0, :12] = NOT_RECORDED
    more = {"age": torch.tensor([0, 9, 3]), ROUTES: routes}  # sample 1 has no label
    watched = LOSSES[name].metrics(log_p.detach(), batch._replace(extra_fields=batch.extra_fields | more))
    assert watched["policy.age"] == 1.5 and watched["policy.age_max"] == 3
    assert watched["policy.routes_not_recorded"] == 0.25
    assert 0 < watched["policy.clipped"] < 1 and watched["policy.ratio_p1"] < watched["policy.ratio_p99"]


def test_quantiles_of_many_tokens_are_of_every_nth(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.quantile refuses more than 2^24 numbers."""
    labels, ratio = torch.ones(1, 101, dtype=torch.int64), torch.linspace(0.0, 2.0, 101, dtype=torch.float64)
    column = {"old": torch.zeros(1, 101), "weight": torch.ones(1, 101), "advantage": torch.ones(1, 101)}
    batch = Batch(labels, labels, labels == 1, extra_fields=column)
    exact = PolicyLoss().metrics(ratio.log().view(1, 101), batch)
    monkeypatch.setattr(policy, "MOST_SORTED", 40)
    watched = PolicyLoss().metrics(ratio.log().view(1, 101), batch)
    assert watched["policy.ratio_p99"] != exact["policy.ratio_p99"] == pytest.approx(1.98)
    assert watched["policy.ratio_p99"] == pytest.approx(1.96, abs=0.01)


def test_what_the_gradients_of_the_divergences_are() -> None:
    """Expected over the model's own samples: both estimate KL(model | reference), and neither has its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 6, dtype=torch.float64, generator=generator).log_softmax(-1)
    log_p = logits.requires_grad_().log_softmax(-1)
    batch = Batch(torch.arange(6).view(1, 6), torch.arange(6).view(1, 6), torch.ones(1, 6, dtype=torch.bool))
    batch = batch._replace(extra_fields={"reference": reference.view(1, 6)})
    p = log_p.detach().exp()
    forward_kl = (reference.exp() * (reference - log_p)).sum()
    (of_forward_kl,) = torch.autograd.grad(forward_kl, logits, retain_graph=True)
    for estimator, gradient in (("k1", torch.zeros(6, dtype=torch.float64)), ("k3", of_forward_kl)):
        value = (PolicyLoss(estimator=estimator).divergence(log_p.view(1, 6), batch) * p).sum()
        assert value.item() == pytest.approx((p * (log_p.detach() - reference)).sum().item(), rel=1e-12)
        (got,) = torch.autograd.grad(value, logits, retain_graph=True)
        torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-14)


def refused(changes: dict[str, Any]) -> str:
    session = open_session(changes)
    with pytest.raises(ConfigError) as error:
        session.forward_backward(with_columns(samples(session, 0, 4)), PolicyLoss())
    return str(error.value)


def test_what_training_alone_changes_is_refused() -> None:
    changes = {"moe.jitter": 0.1, "moe.capacity_factor": 1.5, "lora.rank": 2, "lora.dropout": 0.1}
    (message,) = world.run(1, refused, changes)
    assert "moe.jitter = 0.1 changes routing in training alone" in message
    assert "moe.capacity_factor = 1.5 drops choices" in message
    assert "lora.dropout = 0.1 drops inputs of adapters in training alone" in message


def test_advantages_are_relative_to_the_group_in_any_order() -> None:
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 2.0, 3.0], ["a", "a", "b", "c", "c", "a"]
    advantages = group_advantages(rewards, groups)
    of_a = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    expected = (of_a - of_a.mean()) / (of_a.std() + 1e-6)
    torch.testing.assert_close(advantages[[0, 1, 5]], expected)
    assert advantages[2:5].tolist() == [0, 0, 0], "a group of one, and one of equal rewards"
    assert group_advantages(rewards, groups, divide_by_std=False)[0] == pytest.approx(1 - 4 / 3)
    order = [5, 3, 0, 4, 2, 1]
    again = group_advantages([rewards[i] for i in order], [groups[i] for i in order])
    assert torch.equal(again, advantages[order])
    for wrong, message in (([1.0, math.nan], "the reward of sample 1 is nan"), ([1.0], "1 rewards for 2 groups")):
        with pytest.raises(ConfigError, match=message):
            group_advantages(wrong, [0, 0])


def test_weights_are_means_over_tokens_or_samples() -> None:
    has_loss = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]) > 0  # the last was dropped
    assert token_weights(has_loss, "token")[0].tolist() == [0, 0.25, 0.25, 0.25]
    assert token_weights(has_loss, "sample")[:, 3].tolist() == [pytest.approx(1 / 6), 0.5, 0]
    assert token_weights(has_loss, "constant", longest=8)[:, 3].tolist() == [1 / 16, 1 / 16, 0]
    with pytest.raises(ConfigError, match="give longest="):
        token_weights(has_loss, "constant")
