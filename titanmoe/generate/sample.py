"""The next token from logits: the likeliest, or drawn from the distribution that temperature, top-k and top-p leave.

Draws are counted: each is a function of (seed, number of the prompt, position), so it does not matter which prompts
share a batch, or which rank has them.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titanmoe.ops import counter_rng


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """Only this many of the likeliest; 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have this share, including the one that reaches it."""
    seed: int = 0


def distribution(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Shares that sum to 1, in descending order, and the token of each. Of equal logits the lower token comes first."""
    logits_BV, token_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        logits_BV[:, sampling.top_k :] = -torch.inf
    share_BV = (logits_BV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        before_BV = share_BV.cumsum(-1) - share_BV
        share_BV = share_BV.masked_fill(before_BV >= sampling.top_p, 0)
        share_BV /= share_BV.sum(-1, keepdim=True)
    return share_BV, token_BV


def choose_tokens(logits_BV: Tensor, sampling: Sampling, numbers: list[int], positions: list[int]) -> list[int]:
    """numbers: of the prompts; positions: where each token will be in its row."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    share_BV, token_BV = distribution(logits_BV, sampling)
    keys = [counter_rng.key("generate", sampling.seed, number) for number in numbers]
    key_B, position_B = (torch.tensor(x, dtype=torch.int64, device=logits_BV.device) for x in (keys, positions))
    drawn_B1 = counter_rng.uniform(key_B, position_B, torch.float64).unsqueeze(1)
    place_B1 = (share_BV.cumsum(-1) <= drawn_B1).sum(-1, keepdim=True)
    # Rounding may leave the total a little below 1, and a draw above it.
    last_B1 = (share_BV > 0).sum(-1, keepdim=True) - 1
    return token_BV.gather(1, place_B1.minimum(last_B1)).squeeze(1).tolist()
