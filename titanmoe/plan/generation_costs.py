"""Memory and time of generating completions for [rl], and the mapping that generates them fastest.

Before every `rl.updates` steps a run copies its weights to a model under a mapping of its own (titanmoe.rl), which
reads prompts and then extends all completions by a token at a time. The next tokens of a rank's B completions take,
together, or the host's time to launch all layers if that is longer,

    weights    max(bytes / bandwidth, FLOPs / the best rate of a product): of experts those that a token chose
    cache      READS times the bytes of all cached positions / bandwidth
    messages   of tp in each layer, and of ep x etp in each MoE layer: dispatch, combine and counts
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log
from operator import attrgetter
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.config.blocks import has_experts, moe_layers
from titanmoe.config.laws import WIDTHS
from titanmoe.config.ranges import divisors
from titanmoe.config.schema import Config, GenerationParallelism
from titanmoe.fold.degrees import Fold, derive
from titanmoe.generate.model import generation_config
from titanmoe.models.tensors import Tuning
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.candidates import MOST_SPLIT
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import NEAR, DispatchChoice
from titanmoe.plan.links import Factors, LinkGroup
from titanmoe.plan.memory import RankMemory
from titanmoe.plan.sizes import Sizes, WeightUnit
from titanmoe.plan.training_stacks import TITANMOE, Stack

READS = 3
"""Times that attention to cached positions moves them: they are read and written to be in order, and read again
(titanmoe.generate.cached_attention)."""
CHOICE = 17
"""Bytes that the choice of a token holds of each logit: two float64 and a bool (titanmoe.generate.sampling)."""
LAUNCHES = 0.2
"""Host time of a layer's forward over new tokens, over that of its forward and backward in training: 0.13 with the
idle kernels of scripts/bench/host.py, and more where a driver launches them. No GPU's machine has shown it."""
GENERATING = ("copying weights to the generator", "generating completions")
"""Moments that may be the fullest while a rank generates."""
RESTING = ("weights", "moments", "teacher", "reference", "symmetric buffers")
"""Components of memory that training holds between steps."""


class TextLengths(NamedTuple):
    """Mean tokens of a text."""

    prompt: int
    completion: int

    @classmethod
    def of(cls, config: Config, prompt: int | None = None, completion: int | None = None) -> TextLengths:
        """Return the given lengths, and in place of None the most that the recipe allows.

        Args:
            config: recipe with [rl].
            prompt: mean tokens of a prompt; None for seq_len - max_tokens.
            completion: mean tokens of a completion; None for max_tokens.
        """
        most = config.generation.max_tokens
        return cls(prompt or config.training.seq_len - most, completion or most)

    def samples(self, config: Config) -> int:
        """Return the samples of a step, rounded up, if each has as many full completions with their prompts as fit."""
        texts = config.rl.prompts_per_step * config.rl.completions
        return ceil(texts / max(1, config.training.seq_len // sum(self)))


@dataclass(frozen=True)
class GeneratorPlan:
    """Memory and time of a generator under one mapping, on the rank that has most of each."""

    parallelism: GenerationParallelism
    offloads: bool
    """Whether training's weights and optimizer state are in host memory meanwhile."""
    weights: int
    """Bytes of the weights."""
    cache: int
    """Most bytes of the caches."""
    activations: int
    """Most bytes of a forward's activations, or of logits and their probabilities."""
    messages: int
    """Bytes of the messages that copy weights."""
    communicators: float
    """Bytes that NCCL takes for the generator's messages, also while the run trains."""
    copying: float
    """Seconds of a round's copy of the weights."""
    reading: float
    """Seconds of a round's forwards of prompts."""
    token: float
    """The device's seconds of a forward of one more token of all completions."""
    launches: float
    """The host's seconds of a forward."""
    tokens: int
    """Number of forwards of one more token in a round."""
    updates: int
    """Steps of a round."""
    texts: int
    """Completions that a data rank generates at a time."""
    lengths: TextLengths

    @property
    def components(self) -> dict[str, float]:
        """Seconds of generating for one step: "next tokens", "reading prompts" and "copying weights"."""
        tokens = self.tokens * max(self.token, self.launches)
        parts = {"next tokens": tokens, "reading prompts": self.reading, "copying weights": self.copying}
        return {name: seconds / self.updates for name, seconds in parts.items()}

    @property
    def seconds(self) -> float:
        """Seconds of generating for one step."""
        return sum(self.components.values())

    def as_json(self) -> dict[str, Any]:
        """Return the plan as data for `--json`: seconds of a step; of one forward, by device and host; bytes."""
        return {
            "mapping": vars(self.parallelism),
            "seconds": self.seconds,
            "time": self.components,
            "token": {"device": self.token, "host": self.launches},
            "texts": self.texts,
            "lengths": self.lengths._asdict(),
            "memory": {"weights": self.weights, "cache": self.cache, "activations": self.activations},
        }

    @property
    def order(self) -> tuple[float, ...]:
        """Key by which plans are sorted: seconds to within NEAR, then those of the device alone, then memory."""
        return round(log(self.seconds, NEAR)), self.token, self.bytes

    @property
    def bytes(self) -> int:
        """Bytes of weights, cache and activations. Communicators, messages and what training holds are not counted."""
        return self.weights + self.cache + self.activations

    def beside(self, memory: RankMemory) -> RankMemory:
        """Return a rank's memory with this generator, at its fullest moment.

        That is in training, as `memory` is without the generator, or while weights are copied or completions generated.
        """
        resting = {name: memory.components.get(name, 0) for name in RESTING}
        if self.offloads:
            resting |= {"weights": 0, "moments": 0}
        buffers = {"communicators of the generator": round(self.communicators)}
        generator = buffers | {"weights of the generator": self.weights}
        copying = generator | {"weights": memory.weights, "messages": self.messages}
        generating = generator | {"cache of completions": self.cache, "activations": self.activations}
        moments = {
            memory.peak_during: memory.components | buffers,
            GENERATING[0]: resting | copying,
            GENERATING[1]: resting | generating,
        }
        name, components = max(moments.items(), key=lambda moment: sum(moment[1].values()))
        return replace(memory, components={k: v for k, v in components.items() if v}, peak_during=name)


def generator_weights(config: Config, fold: Fold) -> int:
    """Return the bytes of a generator's weights on a rank, which holds all that tp, ep and etp do not divide.

    Args:
        config: the config to generate with.
    """
    model, w = config.model, WIDTHS[config.training.dtype]
    sizes, layers = generator_sizes(config, fold), range(config.model.num_layers)
    head = WeightUnit(((model.dim,),), (0,)) if model.tie_embeddings else sizes.head
    units = [sizes.embedding, head, *map(sizes.block, layers)]
    units += [sizes.experts_of(layer) for layer in layers if has_experts(model, layer)]
    return sum(unit.stored_bytes(1, w) for unit in units)


def generator_sizes(config: Config, fold: Fold) -> Sizes:
    """Return the weight units of a generator on a rank, unsharded over data ranks: divided by tp, ep and etp alone.

    Args:
        fold: degrees of the generator, not of training.
    """
    return Sizes(config.model, replace(fold, edp=1), Tuning.of(config))


class GeneratorCosts:
    """Plans of a recipe's generator on a number of devices, under any mapping."""

    def __init__(
        self,
        config: Config,
        world: int,
        device: Device,
        factors: Factors,
        *,
        imbalance: float = 1.0,
        stack: Stack = TITANMOE,
        lengths: TextLengths | None = None,
    ):
        """Prepare the prices.

        Args:
            config: recipe with [rl].
            imbalance: routed tokens of the busiest rank over the mean.
            lengths: mean tokens of texts; None for the most that the recipe allows.

        Raises:
            ConfigError: the model cannot generate, even with tp, ep and etp of 1.
        """
        self.config, self.world, self.device = config, world, device
        self.lengths = lengths or TextLengths.of(config)
        priced = self._config(GenerationParallelism())
        priced = replace(priced, training=replace(priced.training, seq_len=self.lengths.prompt))
        self.blocks, self.w = BlockCosts(priced, device, factors, imbalance, stack), WIDTHS[priced.training.dtype]
        self.links, self.model = self.blocks.links, priced.model
        self.bandwidth = device.bandwidth * factors.memory
        self.rate = self.blocks.peak * device.curve[-1][1] * factors.matrix

    def _config(self, parallelism: GenerationParallelism) -> Config:
        """Return the config to generate with; ConfigError if the model cannot generate under the mapping."""
        try:
            generation = replace(self.config.generation, parallelism=parallelism)
            return generation_config(replace(self.config, generation=generation), self.world, "cpu")
        except ConfigError as error:
            raise ConfigError([f"generation: {problem}" for problem in error.problems]) from None

    def fastest(self) -> list[GeneratorPlan]:
        """Return the plans of all legal mappings with tp and etp up to 16, fastest first, whether they fit or not.

        Plans within about 2 % are ordered by the device's time of a token, then by memory.
        """
        plans, experts = [], moe_layers(self.model) > 0
        splits = [n for n in divisors(self.world) if n <= MOST_SPLIT]
        ep_degrees = [n for n in divisors(self.world) if self.model.num_experts % n == 0] if experts else [1]
        for tp, ep, etp in product(splits, ep_degrees, splits if experts else [1]):
            if self.world % (ep * etp) == 0:
                try:
                    plans.append(self.plan(GenerationParallelism(tp, ep, etp)))
                except ConfigError:
                    continue
        return sorted(plans, key=attrgetter("order"))

    def plan(self, parallelism: GenerationParallelism) -> GeneratorPlan:
        """Return memory, and seconds per training step, copies of weights included, under a mapping.

        Raises ConfigError if the model cannot generate under it; one that does not fit into memory is no error.
        """
        from titanmoe.checkpoint.relayout import ROUND_BYTES
        from titanmoe.generate.cache import cache_bytes

        config, rl, generation = self._config(parallelism), self.config.rl, self.config.generation
        fold = derive(self.world, config.parallelism)
        weights = generator_weights(config, fold)
        prompts = ceil(rl.prompts_per_step * rl.updates / fold.dp)
        at_once = min(prompts, generation.batch_size // rl.completions)
        rounds, texts = ceil(prompts / at_once), at_once * rl.completions
        stack = self.blocks.stack
        launches = self.model.num_layers * LAUNCHES * (stack.host_tp if fold.tp > 1 else stack.host)
        token, text = cache_bytes(self.model, fold.tp, self.w)
        most, most_prompts = texts, at_once
        # An evaluation has a text of each prompt, and may have as many prompts as there are texts at a time. So has a
        # turn after the first: each completion is a prompt of its own, which is read again.
        if rl.eval_interval:
            most = most_prompts = generation.batch_size
        elif rl.max_turns > 1:
            most = most_prompts = min(generation.batch_size, prompts * rl.completions)
        return GeneratorPlan(
            parallelism=parallelism,
            offloads=generation.offload_training,
            weights=weights,
            cache=token * self._slots(most, most_prompts) + text * most,
            activations=max(
                self._activations(fold, most_prompts), most * self.model.vocab_size * (2 * self.w + CHOICE)
            ),
            messages=2 * min(ROUND_BYTES, weights),
            communicators=self._communicators(fold),
            copying=self._copy(weights, ceil(weights / ROUND_BYTES)),
            reading=rounds * max(self._read(fold, at_once), launches),
            token=self._token(config, fold, texts, token, text),
            launches=launches,
            tokens=rounds * self.lengths.completion,
            updates=rl.updates,
            texts=texts,
            lengths=self.lengths,
        )

    def _slots(self, texts: int, prompts: int) -> int:
        """Return the most positions that a cache has room for: half more than the longest texts need.

        Args:
            texts: texts of a data rank.
            prompts: prompts of these, whose full pages their texts share.
        """
        from titanmoe.generate.cached_texts import PAGE

        longest = self.config.training.seq_len
        pages = texts * ceil((longest - 1) / PAGE)  # the last token of a text is not cached
        pages -= (texts - prompts) * ((longest - self.config.generation.max_tokens) // PAGE)
        return pages * 3 // 2 * PAGE

    def _activations(self, fold: Fold, prompts: int) -> int:
        """Return the most bytes that a forward of the longest prompts of a data rank holds besides weights and caches.

        They are those of experts (titanmoe.plan.peak_moments, "forward of the last block's experts") or of a dense
        network.
        """
        model, D, longest = self.model, self.model.dim, self.config.training.seq_len
        if self.config.rl.max_turns == 1:  # later turns read the earlier ones, too
            longest -= self.config.generation.max_tokens
        T = prompts * longest / fold.tp
        elements = T * 3 * model.dense_hidden
        if moe_layers(model):
            F = model.expert_hidden / fold.etp
            width = D + 2 * F + max(F + D, 2 * D * (fold.ep * fold.etp > 1))
            elements = max(elements, T * model.top_k * fold.etp * self.blocks.imbalance * width)
        return round((elements + 3 * T * D) * self.w)

    def _communicators(self, fold: Fold) -> float:
        """Return the bytes that NCCL takes beyond those of training: for tp, routed tokens, and copies of weights."""
        groups = [LinkGroup(fold.ep * fold.etp, 1), LinkGroup(self.world, 1)]  # all ranks of which send to each other
        peers = sum(group.ranks_per_domain(self.device.domain) - 1 for group in groups)
        return self.device.communicator * ((fold.tp > 1) + (fold.ep * fold.etp > 1)) + self.device.peer * peers

    def _copy(self, weights: int, rounds: int) -> float:
        """Return the seconds in which a rank receives its weights by all-to-alls, and reads and writes them twice.

        Args:
            weights: bytes of the rank's weights.
            rounds: number of all-to-alls.
        """
        return rounds * self.links.exchange(LinkGroup(self.world, 1), weights / rounds) + 4 * weights / self.bandwidth

    def _read(self, fold: Fold, prompts: int) -> float:
        """Return the device's seconds of one forward of that many prompts of mean length on each data rank.

        Embedding and head are left out.
        """
        choice, blocks = DispatchChoice(self.blocks.config.moe.dispatcher), self.blocks
        costs = (blocks.attention_and_ffn(fold, prompts, i, choice) for i in range(self.model.num_layers))
        return sum(attention[0].seconds + ffn[0].seconds for attention, ffn in costs)

    def _token(self, config: Config, fold: Fold, texts: int, token: int, text: int) -> float:
        """Return the device's seconds of a forward of one more token of each completion of a data rank.

        The head is included; the caches are those of completions that are half done.

        Args:
            texts: completions of the data rank.
            token: bytes that a rank caches of a token.
            text: bytes that a rank caches of each text in addition, whatever its length.
        """
        model, sizes = self.model, generator_sizes(config, fold)
        layers, moe = model.num_layers, moe_layers(model)

        def products(weights: float, multiplied: float) -> float:
            return max(weights * self.w / self.bandwidth, 2 * multiplied / self.rate)

        dense = sum(sizes.block(i).full_size for i in range(layers)) + sizes.head.full_size
        seconds = products(dense, dense * texts)
        cached = token * (self.lengths.prompt + self.lengths.completion / 2)
        seconds += texts * (READS * cached + 2 * text) / self.bandwidth
        networks = layers - moe + moe * (model.shared_hidden > 0)  # that tp divides, as it does attention
        hidden = texts * model.dim * self.w
        tp, routed = LinkGroup(fold.tp, 1), LinkGroup(fold.ep * fold.etp, 1)
        seconds += 2 * (layers + networks) * self.links.gather(tp, hidden)
        seconds += self.links.gather(tp, texts * model.vocab_size * self.w)
        if moe:
            tokens = texts / fold.tp  # that a rank owns
            chosen = 1 - (1 - model.top_k / model.num_experts) ** (tokens * routed.size)
            weights = sizes.experts.full_size
            multiplied = tokens * model.top_k * fold.etp * self.blocks.imbalance * weights
            seconds += moe * products(chosen * weights, multiplied * fold.ep / model.num_experts)
            messages = self.blocks.exchange(config.moe.dispatcher, tokens, fold.ep, fold.etp)
            seconds += moe * (messages + self.links.exchange(routed, 0))
        return seconds
