"""The decoding loop: forwards over new prompts and over the next tokens of all texts that go on, until all have ended.

A prompt enters as soon as texts before it have ended, and its completions share what is cached of it. If a single
prompt begins like the text before it, only what differs is computed: earlier turns of a conversation are cached. Every
rank runs every forward, with or without tokens of its own, because any may have experts.

Shapes: T tokens of a forward, P new prompts, B texts of this rank that go on, V vocabulary, N MoE layers, K top-k, n
tokens of a text, R ranks, S = T positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import all_gather, all_reduce, gather_objects
from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_layers
from titanmoe.fold.meshes import Meshes
from titanmoe.generate.cache import add_caches
from titanmoe.generate.cached_texts import CachedTexts
from titanmoe.generate.sampling import Sampling, choose_tokens
from titanmoe.models.transformer import Transformer
from titanmoe.tokens import Tokens

MOST_PAIRS = 1 << 22
"""Largest new tokens * positions for which a cache is continued, since each head computes a logit for each pair."""

PARTS = 8
"""Texts of a call that need not be in order are gathered once this part of all has ended: an eighth."""


class Prompt(NamedTuple):
    """The token ids of a prompt."""

    number: int
    """Index of the prompt, in the order given."""
    ids: list[int]
    completions: int = 1
    """Number of texts to generate."""
    first_completion: int = 0
    """Index of the first of these texts among those of the prompt."""
    num_earlier: int = 0
    """Number of the last ids that are earlier turns of the text, which count against `Stop.most`."""


@dataclass
class Generated:
    """A text that is generated for a prompt."""

    number: int
    """Index of the prompt."""
    completion_number: int = 0
    """Index of the text among those of the prompt."""
    num_earlier: int = 0
    """Number of tokens of earlier turns, with which its prompt ends."""
    tokens: list[int] = field(default_factory=list)
    """The generated tokens, without the prompt but with the token that ended the text."""
    end: str = ""
    """Reason why the text ended: "eos" (any end mark), "stop" (a stop word) or "length"; "" while it is unfinished."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each token, without top-k and top-p; empty unless the generator records."""
    routes: list[Tensor] = field(default_factory=list)
    """Experts of the prompt's tokens and of each generated token but the last, (tokens, N, K), to be concatenated;
    empty unless the generator records."""

    @property
    def content(self) -> list[int]:
        """The generated tokens without the end mark."""
        return self.tokens[:-1] if self.end == "eos" else self.tokens


OnToken = Callable[[Generated], None]
OnForward = Callable[[int, int], bool]
"""Gets the number of texts that have ended and of tokens that were generated, on all ranks; returns whether to stop."""


class Interrupted(Exception):
    """The end of a call of `Generator.batches` that a rank has stopped; raised on all ranks."""


@dataclass(frozen=True)
class Stop:
    """Conditions that end a text."""

    most: int
    """Largest number of tokens after each prompt, earlier turns included."""
    words: tuple[str, ...] = ()
    """Strings that end a text, which keeps them."""
    decode: Callable[[list[int]], str] | None = None
    """Returns the text of token ids; needed with `words`."""

    def end(self, tokens: list[int], marks: Container[int], num_earlier: int = 0) -> str:
        """Return why a text with these generated tokens, at least one, ends (`Generated.end`), or "".

        `marks` are the tokens that end a text, `num_earlier` counts the tokens of earlier turns.
        """
        if tokens[-1] in marks:
            return "eos"
        # A token has at least a byte, so a stop word lies in as many tokens; decoding may change the first of them.
        if any(word in self.decode(tokens[-len(word.encode()) - 4 :]) for word in self.words):
            return "stop"
        return "length" if num_earlier + len(tokens) == self.most else ""


@dataclass
class _Work:
    """Remaining work of a call of `Generator.batches` on this rank."""

    queue: deque[Prompt]
    """Prompts that have not been read."""
    size: int
    """Texts at a time."""
    stop: Stop
    sampling: Sampling
    on_token: OnToken | None
    running: list[Generated] = field(default_factory=list)
    """Texts that go on, in the order of the cache."""
    num_ended: int = 0
    """Number of texts that have ended."""
    num_tokens: int = 0
    """Number of tokens that were generated."""

    def next_prompts(self) -> list[Prompt]:
        """Remove from the queue and return the first prompts whose texts there is room for."""
        prompts, room = [], self.size - len(self.running)
        while self.queue and self.queue[0].completions <= room:
            prompts.append(self.queue.popleft())
            room -= prompts[-1].completions
        return prompts


class Generator:
    """The decoding loop of a model on this rank. Building it adds caches to the model, in place.

    Args:
        model: the model on this rank.
        meshes: the meshes that the model is sharded over.
        device: the device of the model.
        vocab_size: number of the tokenizer's tokens; larger ids of the model are never chosen.
        ends: the tokens that end a text.
        records: whether texts get the log-probability and the experts of their tokens.
    """

    def __init__(
        self,
        model: Transformer,
        meshes: Meshes,
        device: torch.device,
        vocab_size: int,
        ends: Container[int],
        records: bool = False,
    ):
        self.model, self.meshes, self.device = model, meshes, device
        self.vocab_size, self.ends, self.records = vocab_size, ends, records
        if records:
            for moe in model.moe_layers().values():
                moe.router.begin_step(0)
        self.cached_texts = CachedTexts(device)
        self.caches = add_caches(model, self.cached_texts)
        self.keeps_row = False
        """Whether the only text of a call stays cached after its end, for a prompt that goes on from it."""
        self.cached_ids: list[int] = []
        """Token ids of the text whose cache is kept; empty without one."""

    def batches(
        self,
        prompts: Sequence[Prompt],
        size: int,
        stop: Stop,
        sampling: Sampling,
        on_token: OnToken | None = None,
        on_forward: OnForward = lambda ended, tokens: False,
        in_order: bool = True,
    ) -> Iterator[list[Generated]]:
        """Generate texts for each prompt; yield each once, ended, on every rank, many at a time.

        Collective over the world. A prompt's texts are in the order of `Generated.completion_number`.

        Args:
            prompts: all prompts, the same on every rank.
            size: texts at a time on each data rank; at least as many as a prompt has completions.
            stop: what ends a text.
            sampling: how tokens are chosen.
            on_token: called after each token of this rank's texts with the text that it was added to.
            on_forward: called on every rank after each forward.
            in_order: whether texts are yielded in the prompts' order, instead of whenever an eighth of all have ended.

        Raises:
            ConfigError: a prompt has more completions than `size`.
            Interrupted: on all ranks, one forward after `on_forward` has returned True on any; texts that have not
                been yielded are lost, and stay cached until `clear`. Not raised if that forward was the last.
        """
        if (completions := max((prompt.completions for prompt in prompts), default=1)) > size:
            raise ConfigError(
                f"a prompt has {completions} completions, and {size} texts are generated at a time: "
                f"let it be {completions}"
            )
        data, world = self.meshes.data, self.meshes.world
        order = [(prompt.number, prompt.first_completion + i) for prompt in prompts for i in range(prompt.completions)]
        work = _Work(deque(prompts[data.rank :: data.size]), size, stop, sampling, on_token)
        # What a generator records is of all tokens, and of weights that may have changed.
        self.keeps_row = len(work.queue) == 1 and work.queue[0].completions == 1 and not self.records
        least = size * world.size  # the ranks of a tp group count a text each
        if not in_order:
            least = min(least, -(-len(order) * self.meshes.tp.size // PARTS))
        ended: list[Generated] = []
        by_text: dict[tuple[int, int], Generated] = {}
        stops = False
        while order:
            ended += self._advance(work)
            num_rest, num_new, num_ended, num_tokens, num_stops = self._sum_over_ranks(
                len(work.queue) + len(work.running), len(ended), work.num_ended, work.num_tokens, int(stops)
            )
            if num_stops:
                raise Interrupted
            stops = on_forward(num_ended // self.meshes.tp.size, num_tokens // self.meshes.tp.size)
            if num_rest and num_new < least:
                continue
            by_text |= {(text.number, text.completion_number): text for text in self._gather(ended)}
            ended = []
            if not in_order:
                order.sort(key=lambda text: text not in by_text)
            count = next((i for i, text in enumerate(order) if text not in by_text), len(order))
            if count:
                yield [by_text.pop(text) for text in order[:count]]
            del order[:count]

    def _gather(self, ended: list[Generated]) -> list[Generated]:
        """Return the ended texts of all ranks, each once, with its routes, on every rank. Collective over the world."""
        world, tp = self.meshes.world, self.meshes.tp
        if world.size == 1:
            return ended
        local = ended if tp.rank == 0 else []  # the ranks of a tp group have generated the same tokens
        routes = [route_nNK for text in local for route_nNK in text.routes]
        message = [(replace(text, routes=[]), sum(map(len, text.routes))) for text in local]
        of_ranks = gather_objects(message, world)
        counts = [sum(count for _, count in of_rank) for of_rank in of_ranks]
        if not (most := max(counts)):
            return [text for of_rank in of_ranks for text, _ in of_rank]
        model = self.model.shape
        routes_TNK = torch.zeros(most, moe_layers(model), model.top_k, dtype=torch.int16)
        if routes:
            torch.cat(routes, out=routes_TNK[: counts[world.rank]])
        # As bytes, because gloo gathers no int16.
        routes_RTNK = all_gather(routes_TNK.view(torch.uint8).to(self.device), 0, world).cpu().view(torch.int16)
        for rank, of_rank in enumerate(of_ranks):
            first = rank * most
            for text, count in of_rank:
                text.routes, first = [routes_RTNK[first : first + count]], first + count
        return [text for of_rank in of_ranks for text, _ in of_rank]

    @torch.no_grad()
    def _advance(self, work: _Work) -> list[Generated]:
        """Run a forward and add a token to each text that it read; return this rank's texts that end.

        It reads new prompts if there is room for any, while running texts wait; else the last token of each of these.
        Collective over the world.
        """
        running = work.running
        if prompts := work.next_prompts():
            texts = [
                Generated(prompt.number, prompt.first_completion + i, prompt.num_earlier)
                for prompt in prompts
                for i in range(prompt.completions)
            ]
            running += texts
            ids = self._begin(prompts)
        elif running:
            texts = running
            self.cached_texts.begin_tokens()
            ids = [text.tokens[-1] for text in texts]
        else:
            texts, ids = [], []
            self.cached_texts.begin_prompts([], [])
        num_new = self.cached_texts.num_new
        logits_BV, routes_TNK = self.forward(ids)
        if not texts:
            return []
        if self.cached_texts.reads_prompts:
            logits_BV = logits_BV[self.cached_texts.prompt_B]
        self._add_tokens(texts, logits_BV, work)
        if routes_TNK is not None:  # the host has waited for the tokens, and does not wait for these
            routes = routes_TNK[: len(ids)].cpu().split(num_new)
            if self.cached_texts.reads_prompts:
                routes = [routes[prompt] for prompt in self.cached_texts.prompts]
            for text, routes_nNK in zip(texts, routes, strict=True):
                text.routes.append(routes_nNK)
        if work.on_token is not None:
            for text in texts:
                work.on_token(text)
        ended = [text for text in running if text.end]
        work.num_ended += len(ended)
        work.num_tokens += len(texts)
        if ended and self.keeps_row:
            self.cached_ids += ended[0].tokens[:-1]
        elif ended:
            self._select_texts([i for i, text in enumerate(running) if not text.end])
        work.running = [text for text in running if not text.end]
        return ended

    def _add_tokens(self, texts: Sequence[Generated], logits_BV: Tensor, work: _Work) -> None:
        """Choose the next token of each text, append it, and set the text's end if it stops there.

        Args:
            texts: the texts, which have the last places in the cache.
            logits_BV: logits of each text; those beyond the tokenizer's vocabulary are set to -inf in place.
            work: how to sample, and when a text stops.
        """
        positions = self.cached_texts.num_cached[-len(texts) :]
        logits_BV[:, self.vocab_size :] = -torch.inf
        numbers = [(text.number, text.completion_number) for text in texts]
        tokens, log_probs = choose_tokens(logits_BV, work.sampling, numbers, positions)
        for text, token in zip(texts, tokens, strict=True):
            text.tokens.append(token)
            text.end = work.stop.end(text.tokens, self.ends, text.num_earlier)
        if self.records:
            for text, log_prob in zip(texts, log_probs, strict=True):
                text.log_probs.append(log_prob)

    def _begin(self, prompts: Sequence[Prompt]) -> list[int]:
        """Prepare the caches for new prompts; return the token ids of their forward.

        If a single prompt begins like the text that is kept, what they share stays cached and is not among the ids.
        Else that text is removed; also if a cache cannot drop its end, or MOST_PAIRS is exceeded.
        """
        cached_ids, self.cached_ids = self.cached_ids, list(prompts[0].ids) if self.keeps_row else []
        if cached_ids:
            ids = prompts[0].ids
            same, most_same = 0, min(len(ids) - 1, len(cached_ids)) if self.keeps_row else 0
            while same < most_same and ids[same] == cached_ids[same]:
                same += 1
            count, num_dropped = len(ids) - same, len(cached_ids) - same
            if same and count * len(ids) <= MOST_PAIRS and all(cache.drop_last(num_dropped) for cache in self.caches):
                self.cached_texts.drop_last(num_dropped)
                self.cached_texts.begin_tokens(count)
                return ids[same:]
            self._select_texts([])
        self.cached_texts.begin_prompts(
            [len(prompt.ids) for prompt in prompts], [prompt.completions for prompt in prompts]
        )
        return [token for prompt in prompts for token in prompt.ids]

    def forward(self, ids: list[int]) -> tuple[Tensor, Tensor | None]:
        """Compute the tokens that `cached_texts` is prepared for, and count them as cached. Collective over the world.

        Args:
            ids: the token ids of all new prompts, or of all texts, concatenated.

        Returns:
            The logits (P or B, V) of the last token of each prompt or text; and, if the generator records, the experts
            of all tokens (T, N, K) in int16, padding for tp at the end; else None.
        """
        texts, tp = self.cached_texts, self.meshes.tp
        pad = -len(ids) % tp.size or (0 if ids else tp.size)
        ids_1T = texts.to_int64([ids + [0] * pad])
        valid_T = torch.arange(len(ids) + pad, device=self.device) < len(ids)
        owned_T = valid_T.chunk(tp.size)[tp.rank]
        zeros_T = torch.zeros_like(owned_T, dtype=torch.int64)
        model, routes_TNK = self.model.shape, None
        if self.records:
            routes_TNK = zeros_T.new_empty(len(owned_T), moe_layers(model), model.top_k, dtype=torch.int16)
        tokens = Tokens(
            position_BS=F.pad(texts.positions(), (0, pad)).unsqueeze(0),
            index_T=zeros_T,  # for what training adds to routing
            sample_T=zeros_T,
            valid_T=owned_T,
            microbatch=zeros_T[0],
            routes_TNK=routes_TNK,
        )
        logits_BV = self.model(ids_1T, tokens)[0]
        if routes_TNK is not None:
            # As bytes, because gloo gathers no int16.
            routes_TNK = all_gather(routes_TNK.view(torch.uint8), 0, tp).view(torch.int16)
        texts.end_forward()
        return logits_BV, routes_TNK

    def clear(self) -> None:
        """Remove all texts from the caches, and free the memory of these."""
        self.cached_ids = []
        self.cached_texts.clear()
        for cache in self.caches:
            for each in cache.stored:
                each.x = None

    def _sum_over_ranks(self, *numbers: int) -> list[int]:
        world = self.meshes.world
        if world.size == 1:
            return list(numbers)
        return all_reduce(self.cached_texts.to_int64(numbers), world, "sum").tolist()

    def _select_texts(self, remaining: list[int]) -> None:
        text_B = self.cached_texts.select(remaining)
        for cache in self.caches:
            cache.select_texts(text_B)
