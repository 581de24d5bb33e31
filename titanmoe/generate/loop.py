"""The decoding loop: one forward over all prompts of a batch, then one per new token until all texts have ended.

If a batch is a single prompt that begins like the text before it, only what differs is computed: earlier turns of a
conversation are cached. Every rank runs every forward, with or without tokens of its own, because any may have experts.

Shapes: T tokens of a forward, B rows (prompts) of this rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.fold.meshes import Meshes
from titanmoe.generate.cache import add_caches
from titanmoe.generate.cached_rows import Rows
from titanmoe.models.transformer import Transformer
from titanmoe.ops import counter_rng
from titanmoe.tokens import Tokens

MOST_PAIRS = 1 << 22
"""Largest new tokens * positions for which a cache is continued, since each head computes a logit for each pair."""


class Prompt(NamedTuple):
    """The token ids of a prompt."""

    number: int
    """Index of the prompt, in the order given."""
    ids: list[int]


@dataclass
class Generated:
    """The text that is generated for a prompt."""

    number: int
    tokens: list[int] = field(default_factory=list)
    """The generated tokens, without the prompt and the end mark."""
    end: str = ""
    """Why it ended: "eos" (any end mark) or "length"; "" while it is unfinished."""


OnToken = Callable[[Generated], None]


class Generator:
    """The decoding loop of a model on this rank."""

    def __init__(self, model: Transformer, meshes: Meshes, device: torch.device, vocab_size: int, ends: Container[int]):
        """Add caches to the model, in place.

        Args:
            model: the model on this rank.
            meshes: the meshes that the model is sharded over.
            device: the device of the model.
            vocab_size: number of the tokenizer's tokens; larger ids of the model are never chosen.
            ends: the tokens that end a text.
        """
        self.model, self.meshes, self.device = model, meshes, device
        self.vocab_size, self.ends = vocab_size, ends
        self.rows = Rows(device)
        self.caches = add_caches(model, self.rows)
        self.cached_ids: list[int] = []
        """Token ids in the cache, if the last batch was a single prompt."""

    def batches(
        self, prompts: Sequence[Prompt], size: int, most: int, sampling: Sampling, on_token: OnToken | None = None
    ) -> Iterator[list[Generated]]:
        """Generate a text for each prompt; yield the texts batch by batch, on every rank, in the prompts' order.

        Collective over the world.

        Args:
            prompts: all prompts, the same on every rank.
            size: prompts in a batch on each data rank.
            most: largest number of tokens after each prompt.
            sampling: how tokens are chosen.
            on_token: called after each token of this rank's prompts with the text that it was added to.
        """
        data = self.meshes.data
        for first in range(0, len(prompts), size * data.size):
            own_prompts = prompts[first : first + size * data.size][data.rank :: data.size]
            generated = self.batch(own_prompts, most, sampling, on_token)
            of_ranks = [generated]
            if self.meshes.world.size > 1:
                of_ranks = [[] for _ in range(self.meshes.world.size)]
                dist.all_gather_object(of_ranks, generated)
            # The ranks of a tp group have generated the same tokens.
            by_number = {sequence.number: sequence for of_rank in of_ranks for sequence in of_rank}
            yield [by_number[number] for number in sorted(by_number)]

    @torch.no_grad()
    def batch(
        self, prompts: Sequence[Prompt], most: int, sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Generated]:
        """Generate a text for each of this rank's prompts in one batch. Collective over the world.

        Args:
            prompts: this rank's prompts, which differ between data ranks; may be empty.
            most: largest number of tokens after each prompt.
            sampling: how tokens are chosen.
            on_token: called after each token with the text that it was added to.

        Returns:
            The texts, in the order of the prompts.
        """
        generated = [Generated(prompt.number) for prompt in prompts]
        unfinished = list(generated)
        ids = self._begin(prompts, most)
        while True:
            logits_BV = self.forward(ids)
            ids = self._choose_next(logits_BV, sampling, unfinished) if unfinished else []
            for sequence, token in zip(unfinished, ids, strict=True):
                if token in self.ends:
                    sequence.end = "eos"
                    continue
                sequence.tokens.append(token)
                if len(sequence.tokens) == most:
                    sequence.end = "length"
                if on_token is not None:
                    on_token(sequence)
            remaining = [i for i, sequence in enumerate(unfinished) if not sequence.end]
            if not self._any_rank(bool(remaining)):
                if len(prompts) == 1 and (ends := self.rows.ends):
                    self.cached_ids = (prompts[0].ids + generated[0].tokens)[: ends[0]]
                return generated
            if len(remaining) < len(unfinished):
                unfinished, ids = [unfinished[i] for i in remaining], [ids[i] for i in remaining]
                self._select_rows(remaining)
            self.rows.advance()

    def _begin(self, prompts: Sequence[Prompt], most: int) -> list[int]:
        """Prepare the caches for a batch of prompts; return the token ids of its first forward.

        If a single prompt begins like the text of the last batch, what they share stays cached and is not among the
        ids.
        """
        cached_ids, self.cached_ids = self.cached_ids, []
        ids = [token for prompt in prompts for token in prompt.ids]
        if len(prompts) == 1:
            same, most_same = 0, min(len(ids) - 1, len(cached_ids))
            while same < most_same and ids[same] == cached_ids[same]:
                same += 1
            count = len(ids) - same
            if same and count * len(ids) <= MOST_PAIRS and self._drop_last(len(cached_ids) - same):
                self.rows.continue_row(same, count, most)
                return ids[same:]
        self.rows.begin([len(prompt.ids) for prompt in prompts], most)
        return ids

    def _drop_last(self, count: int) -> bool:
        return all(cache.drop_last(count) for cache in self.caches)

    def forward(self, ids: list[int]) -> Tensor:
        """Return the logits (B, V) of the last token of each prompt. Collective over the world.

        Args:
            ids: the new token ids of all prompts, concatenated.
        """
        rows, tp = self.rows, self.meshes.tp
        position = [
            place
            for num_cached, num_new in zip(rows.num_cached, rows.num_new, strict=True)
            for place in range(num_cached, num_cached + num_new)
        ]
        pad = -len(ids) % tp.size or (0 if ids else tp.size)
        ids_1T = rows.to_int64([ids + [0] * pad])
        valid_T = torch.arange(len(ids) + pad, device=self.device) < len(ids)
        owned_T = valid_T.chunk(tp.size)[tp.rank]
        tokens = Tokens(
            position_BS=rows.to_int64([position + [0] * pad]),
            index_T=torch.zeros_like(owned_T, dtype=torch.int64),  # for what training adds to routing
            sample_T=torch.zeros_like(owned_T, dtype=torch.int64),
            valid_T=owned_T,
            microbatch=rows.to_int64(0),
        )
        return self.model(ids_1T, tokens)[0]

    def _choose_next(self, logits_BV: Tensor, sampling: Sampling, unfinished: list[Generated]) -> list[int]:
        logits_BV[:, self.vocab_size :] = -torch.inf
        return choose_tokens(logits_BV, sampling, [sequence.number for sequence in unfinished], self.rows.ends)

    def _any_rank(self, own: bool) -> bool:
        world = self.meshes.world
        return bool(all_reduce(torch.tensor([int(own)], device=self.device), world, "max")) if world.size > 1 else own

    def _select_rows(self, remaining: list[int]) -> None:
        self.rows.select(remaining)
        row_B = self.rows.to_int64(remaining)
        for cache in self.caches:
            cache.select_rows(row_B)


# ---- the next token from logits: the most probable, or drawn from what temperature, top-k and top-p leave of them


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


def distribution(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the distribution from which each prompt's next token is drawn, after temperature, top-k and top-p.

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


def choose_tokens(logits_BV: Tensor, sampling: Sampling, numbers: list[int], positions: list[int]) -> list[int]:
    """Return the next token id of each prompt.

    A draw is a function of (seed, number of the prompt, position), so it does not depend on the batch or the rank.

    Args:
        logits_BV: logits of each prompt.
        sampling: how to choose.
        numbers: each prompt's index among all prompts.
        positions: position of each prompt's next token.
    """
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
