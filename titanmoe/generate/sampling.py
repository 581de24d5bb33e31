"""The choice of the next token: the most probable, or drawn from what temperature, top-k and top-p leave of the logits.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanmoe.ops import counter_rng


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Logits are divided by it; 0: always the most probable token."""
    top_k: int = 0
    """Only this many of the most probable; 0: all."""
    top_p: float = 1.0
    """Only the most probable that together have this share, including the one that reaches it."""
    seed: int = 0
    step: int = 0
    """Number of the training step that the texts are generated for: each step draws others."""


def distribution(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the distribution from which each row's next token is drawn, after temperature, top-k and top-p.

    Returns:
        Probabilities (B, V) in descending order, and the token id of each; of equal logits the lower id is first.
    """
    logits_BV, token_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        logits_BV[:, sampling.top_k :] = -torch.inf
    share_BV = (logits_BV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        before_BV = share_BV.cumsum(-1) - share_BV
        share_BV = share_BV.masked_fill(before_BV >= sampling.top_p, 0)
        share_BV /= share_BV.sum(-1, keepdim=True)
    return share_BV, token_BV


def choose_tokens(
    logits_BV: Tensor, sampling: Sampling, texts: Sequence[tuple[int, int]], positions: Sequence[int]
) -> list[int]:
    """Return the next token id of each row.

    A draw is a function of (seed, step, prompt, answer, position), so it does not depend on the batch or the rank.

    Args:
        logits_BV: logits of each row.
        sampling: how to choose.
        texts: for each row the number of its prompt among all prompts, and of its answer among those of the prompt.
        positions: position of each row's next token.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    share_BV, token_BV = distribution(logits_BV, sampling)
    keys = [counter_rng.key("generate", sampling.seed, sampling.step, *text) for text in texts]
    key_B, position_B = (torch.tensor(x, dtype=torch.int64, device=logits_BV.device) for x in (keys, positions))
    drawn_B1 = counter_rng.uniform(key_B, position_B, torch.float64).unsqueeze(1)
    place_B1 = (share_BV.cumsum(-1) <= drawn_B1).sum(-1, keepdim=True)
    # Rounding may leave the total a little below 1, and a draw above it.
    last_B1 = (share_BV > 0).sum(-1, keepdim=True) - 1
    return token_BV.gather(1, place_B1.minimum(last_B1)).squeeze(1).tolist()


def log_probs_of(logits_BV: Tensor, tokens: Sequence[int], temperature: float) -> list[float]:
    """Return the log-probability of each row's token in the distribution before top-k and top-p.

    Args:
        logits_BV: logits of each row, -inf where the tokenizer has no token.
        tokens: the token of each row.
        temperature: divides the logits; 0 is taken as 1.
    """
    log_probs_BV = (logits_BV.double() / (temperature or 1.0)).log_softmax(-1)
    token_B1 = torch.tensor(tokens, dtype=torch.int64, device=logits_BV.device).unsqueeze(1)
    return log_probs_BV.gather(1, token_B1).squeeze(1).tolist()
