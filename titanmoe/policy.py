"""Policy objectives of reinforcement learning, for `titanmoe.session.Session`: advantages, weights of tokens, losses.

    weight = token_weights(completion_tokens, "token")                              # those of a mean
    batch = run.batch(ids, labels, advantage=..., weight=weight, old=old_log_probs) # by `group_advantages`
    counts = run.count(batch, loss, divisor=1)                                      # the weights are divided already
    run.forward_backward(batch, loss, counts=counts)                                # loss = PolicyLoss()

Rewards, groups and weights are of all samples of a step, so groups may lie on any ranks. The caller divides "weight",
"sft_weight" and "kl_weight" by the count of their term. Shapes: N samples, B samples of a microbatch, L positions, S
those of the attention slice, G groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.batch import ROUTES, Batch
from titanmoe.tokens import IGNORE, NOT_RECORDED

Normalisation = Literal["sample", "token", "constant"]
MOST_SORTED = 1 << 24
"""Most numbers that torch.quantile takes; of more tokens, quantiles are of every n-th."""


def group_advantages(
    rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], *, divide_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return each sample's reward minus the mean of its group, by default over the group's standard deviation.

    Args:
        rewards: one for each sample.
        groups: the group of each sample, such as its prompt's number.
        divide_by_std: True: (r - mean) / (std + eps) with the sample standard deviation, as in GRPO (arXiv 2402.03300);
            False: r - mean, as in Dr. GRPO (arXiv 2503.20783), which does not favour groups with rare rewards.
        eps: added to the standard deviation.

    Returns:
        Float64 numbers (N,), 0 in a group of equal rewards or of one sample.

    Raises:
        ConfigError: a reward is not finite, or their number is not that of the groups.
    """
    reward_N = torch.as_tensor(rewards, dtype=torch.float64)
    if len(reward_N) != len(groups):
        raise ConfigError(f"{len(reward_N)} rewards for {len(groups)} groups: give one of each for every sample")
    if len(bad := (~reward_N.isfinite()).nonzero()):
        raise ConfigError(f"the reward of sample {int(bad[0])} is {float(reward_N[bad[0]])}: drop it, or give a number")
    number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    group_N = torch.tensor([number[group] for group in groups], dtype=torch.int64)
    count_G = torch.zeros(len(number), dtype=torch.float64).index_add(0, group_N, torch.ones_like(reward_N))
    mean_G = torch.zeros_like(count_G).index_add(0, group_N, reward_N) / count_G
    apart_N = reward_N - mean_G[group_N]
    if not divide_by_std:
        return apart_N
    square_G = torch.zeros_like(count_G).index_add(0, group_N, apart_N.square())
    std_G = (square_G / (count_G - 1).clamp(min=1)).sqrt()
    return torch.where(std_G[group_N] > 0, apart_N / (std_G[group_N] + eps), 0.0)


def token_weights(has_loss_NL: Tensor, by: Normalisation = "token", longest: int = 0) -> Tensor:
    """Return the weight of each token in a mean over a step's samples, float64 (N, L), 0 where there is no loss.

    A sample that was dropped is left out by the caller, or has no token with a loss and does not count.

    Args:
        has_loss_NL: whether a position has a loss, for all samples of the step.
        by: "sample": the mean over samples of the mean over their tokens (GRPO, GSPO); "token": the mean over all
            tokens (DAPO, arXiv 2503.14476); "constant": the sum over tokens / `longest`, averaged over samples (Dr.
            GRPO).
        longest: the most tokens that a completion may have; for "constant".

    Raises:
        ConfigError: no position has a loss, or `longest` is missing with "constant".
    """
    has_loss_NL = has_loss_NL.to(torch.float64)
    tokens_N1 = has_loss_NL.sum(1, keepdim=True)
    samples = (tokens_N1 > 0).sum()
    if not samples:
        raise ConfigError(f"none of {len(has_loss_NL)} samples has a token with a loss: leave this step out")
    if by == "token":
        return has_loss_NL / tokens_N1.sum()
    if by == "constant" and longest < 1:
        raise ConfigError('token_weights(..., "constant") divides by the most tokens of a completion: give longest=')
    return has_loss_NL / (samples * (longest if by == "constant" else tokens_N1.clamp(min=1)))


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy objective, with cross-entropy and divergence terms if the batch has their weights.

    Columns of the batch, per position (N, L): "advantage"; "weight"; "old", without which the old policy is the model
    itself; "generator" if `truncation` is set; "sft_weight"; "kl_weight" with "reference". A sample may be several
    documents, each a completion of its own.

    The defaults are those of PPO and GRPO. DAPO has clip_high=0.28; GSPO (arXiv 2507.18071) has level="sequence" with
    clip_low=3e-4 and clip_high=4e-4.
    """

    clip_low: float = 0.2
    """Clipping below 1: the ratio to the old policy has no gradient below 1 - clip_low for a negative advantage."""
    clip_high: float = 0.2
    """Clipping above 1: the ratio to the old policy has no gradient above 1 + clip_high for a positive advantage."""
    level: Literal["token", "sequence"] = "token"
    """The ratio of each token, or of each completion: the geometric mean of its tokens' ratios."""
    truncation: float = 0.0
    """Importance weight old / generator, at most this (2 is usual), on the loss; 0: none. It has no gradient."""
    truncate: Literal["token", "sequence"] = "token"
    """The importance weight of each token, or the product over each completion."""
    estimator: Literal["k1", "k3"] = "k3"
    """Divergence from the reference, with d = log reference - log p. k3 = exp(d) - d - 1: its gradient is that of
    KL(reference | model). k1 = -d: right as a value or in a reward, but its gradient as a loss has mean 0."""

    def find_problems(self, config: Config) -> list[str]:
        """Return a message for each option by which log-probabilities depend on more than weights and sample.

        These are moe.jitter and lora.dropout, which act in training alone, and moe.capacity_factor, if they are not 0.
        """
        moe = config.moe
        problems = []
        if moe.jitter:
            problems.append(f"moe.jitter = {moe.jitter} changes routing in training alone: set it to 0")
        if moe.capacity_factor:
            problems.append(
                f"moe.capacity_factor = {moe.capacity_factor} drops choices because of other tokens of the batch: set "
                "it to 0"
            )
        if config.lora.dropout:
            problems.append(
                f"lora.dropout = {config.lora.dropout} drops inputs of adapters in training alone: set it to 0"
            )
        return problems

    def __call__(self, log_p_BL: Tensor, batch: Batch) -> Tensor:
        """Return the weighted sum of the loss over a microbatch's labels, a scalar that gradients flow through.

        Args:
            log_p_BL: log-probability of each label under the model.
            batch: the microbatch, with the columns "advantage" and "weight", and others as its class says.
        """
        has_label_BL = batch.labels_BS != IGNORE
        log_p_BL = log_p_BL.where(has_label_BL, 0)
        batch = _with_old(batch, log_p_BL.detach())
        column = batch.extra_fields
        ratio_BL, advantage_BL = self.ratio(log_p_BL, batch), column["advantage"]
        clipped_BL = ratio_BL.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain_BL = torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
        if self.truncation:
            gain_BL = gain_BL * self.importance(batch)
        loss = -(gain_BL * column["weight"]).where(has_label_BL, 0).sum()
        if "sft_weight" in column:
            loss = loss - (log_p_BL * column["sft_weight"]).sum()
        if "kl_weight" in column:
            loss = loss + (self.divergence(log_p_BL, batch) * column["kl_weight"]).where(has_label_BL, 0).sum()
        return loss

    def ratio(self, log_p_BL: Tensor, batch: Batch) -> Tensor:
        """Return at each label, (B, L), the probability under the model over the old policy's, by token or completion.

        `log_p_BL` has each label's log-probability under the model. The batch needs the column "old".
        """
        apart_BL = (log_p_BL - batch.extra_fields["old"]).where(batch.labels_BS != IGNORE, 0)
        return (apart_BL if self.level == "token" else _over_completions(apart_BL, batch, mean=True)).exp()

    def importance(self, batch: Batch) -> Tensor:
        """Return at each label, (B, L), the old policy's probability over the generator's, at most `truncation`.

        Only for `truncation` above 0, since 0 means no such weight. The batch needs the columns "old" and "generator".
        """
        column = batch.extra_fields
        apart_BL = (column["old"] - column["generator"]).where(batch.labels_BS != IGNORE, 0)
        if self.truncate == "sequence":
            apart_BL = _over_completions(apart_BL, batch, mean=False)
        return apart_BL.exp().clamp(max=self.truncation)

    def divergence(self, log_p_BL: Tensor, batch: Batch) -> Tensor:
        """Return at each label, (B, L), the estimate of the divergence from the reference model: "k1" or "k3".

        `log_p_BL` has each label's log-probability under the model. The batch needs the column "reference".
        """
        apart_BL = (batch.extra_fields["reference"] - log_p_BL).where(batch.labels_BS != IGNORE, 0)
        return -apart_BL if self.estimator == "k1" else apart_BL.exp() - apart_BL - 1

    @torch.no_grad()
    def metrics(self, log_probs_NL: Tensor, batch: Batch, entropy_NL: Tensor | None = None) -> dict[str, float]:
        """Return metrics of the given samples by name, for reports; {} if every label's weight is 0. No communication.

        Labels with weight 0 do not count. Without the column "old" the old policy is the model itself.

        "policy.clipped" is the fraction of clipped labels; "policy.ratio_p1", "policy.ratio_p50" and "policy.ratio_p99"
        are quantiles of the ratio to the old policy; with `entropy_NL` "policy.entropy" is the mean entropy; with the
        column "reference" "policy.kl" the mean divergence from that model; with the column "generator"
        "policy.mismatch" and "policy.mismatch_max" the mean and largest absolute difference of log-probabilities
        between generator and old policy; with the column "age" (N,), steps made since a sample's generator got its
        weights, "policy.age" and "policy.age_max" its mean and largest value; with "routes"
        "policy.routes_not_recorded" the fraction of tokens whose routers choose themselves.

        Args:
            log_probs_NL: log-probability of each label, as `forward_backward` returned them.
            batch: the samples, with the columns (`extra_fields`) "weight" and "advantage".
            entropy_NL: entropy of the distribution of each label, in nats; None to leave it out.
        """
        log_probs_NL, entropy_NL = log_probs_NL.cpu(), None if entropy_NL is None else entropy_NL.cpu()
        column = {name: x.cpu() for name, x in _with_old(batch, log_probs_NL).extra_fields.items()}
        batch = Batch(*(None if x is None else x.cpu() for x in batch[:-1]), column)
        is_label_NL = (batch.labels_BS != IGNORE) & (column["weight"] != 0)
        if not is_label_NL.any():
            return {}
        ratio, advantage = self.ratio(log_probs_NL, batch)[is_label_NL], column["advantage"][is_label_NL]
        clipped = ((ratio > 1 + self.clip_high) & (advantage > 0)) | ((ratio < 1 - self.clip_low) & (advantage < 0))
        some = ratio[:: 1 + (len(ratio) - 1) // MOST_SORTED].double()
        low, middle, high = some.quantile(torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)).tolist()
        out = {"policy.clipped": float(clipped.double().mean())}
        out |= {"policy.ratio_p1": low, "policy.ratio_p50": middle, "policy.ratio_p99": high}
        if entropy_NL is not None:
            out["policy.entropy"] = float(entropy_NL[is_label_NL].double().mean())
        if "reference" in column:
            out["policy.kl"] = float(self.divergence(log_probs_NL, batch)[is_label_NL].double().mean())
        if "generator" in column:
            mismatch = (column["old"] - column["generator"])[is_label_NL].abs().double()
            out |= {"policy.mismatch": float(mismatch.mean()), "policy.mismatch_max": float(mismatch.max())}
        if "age" in column:
            age = column["age"][is_label_NL.any(1)].double()
            out |= {"policy.age": float(age.mean()), "policy.age_max": float(age.max())}
        if ROUTES in column:
            is_fresh = column[ROUTES][batch.valid_BS] == NOT_RECORDED
            out["policy.routes_not_recorded"] = float(is_fresh.double().mean())
        return out


def _with_old(batch: Batch, log_p_BL: Tensor) -> Batch:
    """Return the batch with the column "old": its own, or else these log-probabilities, which have to be detached."""
    return batch._replace(extra_fields={"old": log_p_BL} | batch.extra_fields)


def _over_completions(x_BL: Tensor, batch: Batch, mean: bool) -> Tensor:
    """Sum or average x over the labels of each completion; return (B, L), the result at all positions of it.

    A completion is a document, or a sample if the batch has no documents.

    Args:
        x_BL: values by position; those of positions without a label do not count.
        batch: the microbatch with the labels and documents.
        mean: whether to divide by the completion's number of labels; 0 for a completion without labels.
    """
    has_label_BL = (batch.labels_BS != IGNORE).to(x_BL.dtype)
    if batch.document_BS is None:
        completion_BL = torch.zeros_like(batch.labels_BS)
    else:
        document_BS = batch.document_BS
        completion_BL = (document_BS.diff(dim=1, prepend=document_BS[:, :1]) != 0).cumsum(1)
    total_BL = torch.zeros_like(x_BL).scatter_add(1, completion_BL, x_BL * has_label_BL)
    if mean:
        total_BL = total_BL / torch.zeros_like(x_BL).scatter_add(1, completion_BL, has_label_BL).clamp(min=1)
    return total_BL.gather(1, completion_BL)
