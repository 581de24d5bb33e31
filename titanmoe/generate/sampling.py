"""The choice of the next token: the most probable, or drawn from what temperature, top-k and top-p leave of the logits.

Called by the decoding loop (titanmoe.generate.loop). Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from titanmoe.ops import counter_rng


@dataclass(frozen=True)
class Sampling:
    """Options of the choice of the next token."""

    temperature: float = 1.0
    """Divisor of the logits; 0: always the most probable token."""
    top_k: int = 0
    """Number of most probable tokens to choose from; 0: all."""
    top_p: float = 1.0
    """Probability of the most probable tokens to choose from, including the one that reaches it."""
    seed: int = 0
    step: int = 0
    """Number of the training step that the texts are generated for: each step draws others."""


def truncate(prob_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities (B, V) that top-k, then top-p, leave: 0 for other ids, and sum 1 per row.

    Of equal probabilities the lower id comes first. `prob_BV` is not changed; without top-k and top-p it is returned.
    """
    if not sampling.top_k and sampling.top_p == 1:
        return prob_BV
    descending_BV, token_BV = prob_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        descending_BV[:, sampling.top_k :] = 0
        descending_BV /= descending_BV.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        before_BV = descending_BV.cumsum(-1) - descending_BV
        descending_BV[before_BV >= sampling.top_p] = 0
        descending_BV /= descending_BV.sum(-1, keepdim=True)
    return torch.zeros_like(prob_BV).scatter_(1, token_BV, descending_BV)


@lru_cache(1 << 16)
def _key(seed: int, step: int, prompt: int, completion: int) -> int:
    return counter_rng.key("generate", seed, step, prompt, completion)


def choose_tokens(
    logits_BV: Tensor, sampling: Sampling, texts: Sequence[tuple[int, int]], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the next token id of each row, and its log-probability before top-k and top-p.

    A draw is a function of (seed, step, prompt, completion, position), so it does not depend on the batch or the rank.

    Args:
        logits_BV: logits of each row, -inf where the tokenizer has no token.
        sampling: how to choose; log-probabilities are those of temperature 1 if its temperature is 0.
        texts: for each row the number of its prompt among all prompts, and of its completion among those of the prompt.
        positions: position of each row's next token.
    """
    prob_BV = (logits_BV.double() / (sampling.temperature or 1.0)).softmax(-1)
    if sampling.temperature == 0:
        token_B = logits_BV.argmax(-1)
    else:
        keys = [_key(sampling.seed, sampling.step, *text) for text in texts]
        key_B, position_B = torch.tensor((keys, positions), device=logits_BV.device)  # the host waits once, not twice
        drawn_B1 = counter_rng.uniform(key_B, position_B, torch.float64).unsqueeze(1)
        total_BV = truncate(prob_BV, sampling).cumsum(-1)
        # A draw is below 1, so the token is one whose probability is above 0.
        token_B = (total_BV <= drawn_B1 * total_BV[:, -1:]).sum(-1)
    log_prob_B = prob_BV.gather(1, token_B.unsqueeze(1)).squeeze(1).log()
    return token_B.tolist(), log_prob_B.tolist()
