"""From prompts to tokens: one forward over all prompts of a batch, then one over a token of each until all have ended.

Every rank runs every forward, with or without tokens of its own, since any rank may hold experts.

Shapes: T tokens of a forward, B rows (prompts) of this rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.fold.meshes import Meshes
from titanmoe.generate.cache import Rows, add_caches
from titanmoe.generate.sample import Sampling, choose_tokens
from titanmoe.models.transformer import Transformer
from titanmoe.tokens import Tokens


class Prompt(NamedTuple):
    number: int
    """Position in the order they were given."""
    ids: list[int]


@dataclass
class Generated:
    number: int
    tokens: list[int] = field(default_factory=list)
    """After the prompt; without the end mark."""
    end: str = ""
    """eos, or length."""


OnToken = Callable[[Generated], None]


class Generator:
    def __init__(self, model: Transformer, meshes: Meshes, device: torch.device, vocab_size: int, eos: int | None):
        """vocab_size: the tokenizer's; ids that the model has beyond it are not tokens, and are never chosen."""
        self.model, self.meshes, self.device = model, meshes, device
        self.vocab_size, self.eos = vocab_size, eos
        self.rows = Rows(device)
        self.caches = add_caches(model, self.rows)

    def batches(
        self, prompts: Sequence[Prompt], size: int, most: int, sampling: Sampling, on_token: OnToken | None = None
    ) -> Iterator[list[Generated]]:
        """All prompts, `size` at a time on each data rank; every rank gets what all have made, in order."""
        data = self.meshes.data
        for first in range(0, len(prompts), size * data.size):
            mine = prompts[first : first + size * data.size][data.rank :: data.size]
            made = self.batch(mine, most, sampling, on_token)
            everyone = [made]
            if self.meshes.world.size > 1:
                everyone = [[] for _ in range(self.meshes.world.size)]
                dist.all_gather_object(everyone, made)
            # The ranks of a tp group have made the same.
            yield [one for _, one in sorted({one.number: one for some in everyone for one in some}.items())]

    @torch.no_grad()
    def batch(
        self, prompts: Sequence[Prompt], most: int, sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Generated]:
        made = [Generated(prompt.number) for prompt in prompts]
        going = list(made)
        self.rows.begin([len(prompt.ids) for prompt in prompts], most)
        ids = [token for prompt in prompts for token in prompt.ids]
        while True:
            logits_BV = self.forward(ids)
            ids = self._next(logits_BV, sampling, going) if going else []
            for one, token in zip(going, ids, strict=True):
                if token == self.eos:
                    one.end = "eos"
                    continue
                one.tokens.append(token)
                if len(one.tokens) == most:
                    one.end = "length"
                if on_token is not None:
                    on_token(one)
            stay = [i for i, one in enumerate(going) if not one.end]
            if not self._anywhere(bool(stay)):
                return made
            if len(stay) < len(going):
                going, ids = [going[i] for i in stay], [ids[i] for i in stay]
                self._keep(stay)
            self.rows.advance()

    def forward(self, ids: list[int]) -> Tensor:
        """Logits (B, V) at the end of each row, from the ids that are added to all rows."""
        rows, tp = self.rows, self.meshes.tp
        position = [
            place for known, added in zip(rows.known, rows.added, strict=True) for place in range(known, known + added)
        ]
        pad = -len(ids) % tp.size or (0 if ids else tp.size)
        ids_1T = rows.numbers([ids + [0] * pad])
        valid_T = torch.arange(len(ids) + pad, device=self.device) < len(ids)
        owned_T = valid_T.chunk(tp.size)[tp.rank]
        tokens = Tokens(
            position_BS=rows.numbers([position + [0] * pad]),
            index_T=torch.zeros_like(owned_T, dtype=torch.int64),  # for what training adds to routing
            sample_T=torch.zeros_like(owned_T, dtype=torch.int64),
            valid_T=owned_T,
            microbatch=rows.numbers(0),
        )
        return self.model(ids_1T, tokens)[0]

    def _next(self, logits_BV: Tensor, sampling: Sampling, going: list[Generated]) -> list[int]:
        logits_BV[:, self.vocab_size :] = -torch.inf
        return choose_tokens(logits_BV, sampling, [one.number for one in going], self.rows.ends)

    def _anywhere(self, here: bool) -> bool:
        world = self.meshes.world
        return bool(all_reduce(torch.tensor([int(here)], device=self.device), world, "max")) if world.size > 1 else here

    def _keep(self, stay: list[int]) -> None:
        self.rows.keep(stay)
        row_B = self.rows.numbers(stay)
        for cache in self.caches:
            cache.keep(row_B)
