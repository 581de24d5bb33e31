"""Parameters and FLOPs of a model, by arithmetic on its shape.

Parameters: everything an optimizer steps, each logical weight once whatever the mapping; routers, shared-expert gates,
biases and norms are included. The router's expert bias is a buffer and is not. "Active" is the part one token uses: all
but the routed experts it does not visit. As in the published model cards, both figures include embedding and head.

FLOPs per token, where a multiplication and an addition count as two:

    forward  = 2 * N + L * H * (h + v) * S        training = 3 * forward, since backward costs two forwards

N is the active parameters with the head but without the embedding, which is looked up and not multiplied (a tied matrix
counts once, as the head). L layers, H query heads, h the width of their queries and v of their values (the same except
in latent attention), S the sequence length. The second term is causal attention: scores and weighted values cost 2 * H
* (h + v) per token and position, and a token sees S/2 positions on average; W - W^2 / 2S in a block with a sliding
window of W. In N, norms and biases (less than 0.1 % of a real model) are counted like matrix rows. Softmax, RoPE and
activations are not counted, nor is recomputation: this is the work of the model (MFU), not of the hardware (HFU). With
multi-token prediction L counts its block too, and the head is multiplied twice. Tokens that a capacity factor drops are
counted as if they were computed. A weight that is not trained (training.freeze) costs 4 FLOPs instead of 6, and 2
where nothing before it is trained, so that backward ends after it. A mixer that computes something other than scores
and values states its own FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from titanmoe.config.blocks import has_experts, moe_blocks, window
from titanmoe.config.schema import Model
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.models.lora_spec import adapter_names, is_adapter
from titanmoe.models.mixers.mixer_spec import MixerSpec, elements
from titanmoe.models.tensors import Tuning


@dataclass(frozen=True)
class Parameters:
    embedding: int
    """Both ends: embedding and head; one matrix when tied."""
    attention: int
    """Mixers: projections, their biases, sinks, or whatever a family has in their place."""
    dense: int
    """Feed-forward networks of the blocks without experts."""
    router: int
    experts: int
    """All routed experts."""
    active_experts: int
    """The routed experts one token visits."""
    shared: int
    """Shared experts and their gates."""
    norms: int
    """Those of the blocks, of queries and keys or their latents, and the final ones."""
    mtp: int
    """The projection of multi-token prediction. Its block is counted like the others, and is active in training."""

    @property
    def total(self) -> int:
        blocks = self.attention + self.dense + self.router + self.experts + self.shared + self.norms
        return self.embedding + blocks + self.mtp

    @property
    def active(self) -> int:
        return self.total - self.experts + self.active_experts


def parameters(model: Model) -> Parameters:
    layers, dim, of_blocks = model.num_layers + model.mtp_depth, model.dim, mixers(model)
    moe = len(moe_blocks(model))

    def swiglu(hidden: int) -> int:
        return 3 * dim * hidden

    expert = swiglu(model.expert_hidden) + model.expert_biases * (2 * model.expert_hidden + dim)

    return Parameters(
        embedding=(1 if model.tie_embeddings else 2) * model.vocab_size * dim,
        attention=sum(elements(mixer.parameters(model).values()) - elements(mixer.norms(model)) for mixer in of_blocks),
        dense=(layers - moe) * swiglu(model.dense_hidden),
        router=moe * model.num_experts * (dim + model.router_bias),
        experts=moe * model.num_experts * expert,
        active_experts=moe * model.top_k * expert,
        shared=moe * (swiglu(model.shared_hidden) + (dim if model.shared_hidden and model.shared_gate else 0)),
        norms=sum(2 * dim + elements(mixer.norms(model)) for mixer in of_blocks) + (1 + 3 * model.mtp_depth) * dim,
        mtp=model.mtp_depth * 2 * dim * dim,
    )


def layer_flops(model: Model, seq_len: int) -> tuple[list[int], int]:
    """Forward FLOPs per token of each block, and of what comes after them: what a pipeline stage costs."""
    dense = 2 * 3 * model.dim * model.dense_hidden
    experts = 2 * model.dim * (model.num_experts + 3 * (model.top_k * model.expert_hidden + model.shared_hidden))
    blocks = [
        2 * elements(mixer.matrices(model))
        + mixer.flops(model, i, seq_len)
        + (experts if has_experts(model, i) else dense)
        for i, mixer in enumerate(mixers(model))
    ]
    layers, mtp = blocks[: model.num_layers], blocks[model.num_layers :]
    head = (1 + model.mtp_depth) * 2 * model.vocab_size * model.dim
    return layers, head + sum(mtp) + model.mtp_depth * 2 * 2 * model.dim**2


def forward_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs of one token's forward pass, averaged over a sequence of seq_len."""
    count = parameters(model)
    multiplied = count.active - count.embedding + (1 + model.mtp_depth) * model.vocab_size * model.dim
    return 2 * multiplied + sum(mixer.flops(model, i, seq_len) for i, mixer in enumerate(mixers(model)))


def flops_per_token(model: Model, seq_len: int, tuning: Tuning | None = None) -> int:
    """FLOPs to train on one token, forward and backward, averaged over a sequence of seq_len. tuning: what is trained,
    if not everything."""
    if tuning is None or tuning.trains_all:
        return 3 * forward_flops_per_token(model, seq_len)
    blocks, ends = work_of_parts(model, seq_len, tuning)
    return sum(work.forward + work.backward for part in (*blocks, (ends,)) for work in part)


class TrainingWork(NamedTuple):
    """FLOPs to train, forward and backward."""

    per_token: float = 0.0
    """Apart from the positions that it sees."""
    per_pair: Mapping[int, float] = MappingProxyType({})
    """Of a position and one that it sees: by window (0: none), summed over the blocks that have it."""


NO_WORK = TrainingWork()
"""Where nothing is counted."""


def training_work(model: Model, tuning: Tuning) -> TrainingWork:
    blocks, ends = work_of_parts(model, 1, tuning)
    per_token, per_pair = float(sum(ends)), {}
    for layer, (mixer, block) in enumerate(zip(mixers(model), blocks, strict=True)):
        pair, width = mixer.pair_flops(model) * (1 + block.scores.factor), window(model, layer)
        per_pair[width] = per_pair.get(width, 0.0) + pair
        per_token += sum(map(sum, block)) - pair / 2  # by the formula above, a sequence of one sees half a position
    return TrainingWork(per_token, per_pair)


def trained_parameters(model: Model, tuning: Tuning) -> int:
    """How many are trained, adapters included."""
    if tuning.trains_all:
        return parameters(model).total
    return sum(prod(shape) for name, shape in tensors.shapes(model, tuning) if not tuning.freezes(name))


class PartWork(NamedTuple):
    """FLOPs of a token."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: tuple) -> PartWork:
        return PartWork(self.forward + other[0], self.backward + other[1])

    @property
    def factor(self) -> float:
        """Backward's work by forward's: 2 if everything is trained."""
        return self.backward / self.forward if self.forward else 2.0


class BlockWork(NamedTuple):
    products: PartWork
    """The mixer's, with its block's norms."""
    scores: PartWork
    ffn: PartWork
    """Dense network or experts, the shared one and the router included."""


class _Walk:
    """Through a model in forward's direction. Backward computes the gradient of a weight that is trained, and the
    gradient of its input if anything before it is."""

    def __init__(self, tuning: Tuning):
        self.tuning, self.reached = tuning, False

    def together(self, elements: Mapping[str, int]) -> PartWork:
        """Weights with one input, by name: how many of their elements multiply a token."""
        trained = {name: not self.tuning.freezes(name) for name in elements}
        work = PartWork(
            2 * sum(elements.values()), sum(2 * n * (trained[name] + self.reached) for name, n in elements.items())
        )
        self.reached = self.reached or any(trained.values())
        return work


def work_of_parts(model: Model, seq_len: int, tuning: Tuning) -> tuple[list[BlockWork], PartWork]:
    """Of each block, and of what comes after them: head, and the projection of multi-token prediction."""
    walk, blocks, ends = _Walk(tuning), [], PartWork()
    walk.together({"embed.weight": 0})  # looked up, not multiplied
    head = {tensors.stored_name("head.weight", model.tie_embeddings): model.vocab_size * model.dim}
    for layer, mixer in enumerate(mixers(model)):
        if layer == model.num_layers:
            names = ("hidden_norm", "embed_norm", "project", "norm")
            sizes = (model.dim, model.dim, 2 * model.dim**2, model.dim)
            ends += walk.together({f"mtp.0.{name}.weight": n for name, n in zip(names, sizes, strict=True)})
        blocks.append(_block_work(model, mixer, layer, seq_len, walk))
    ends += walk.together({"head.norm.weight": model.dim})
    for _ in range(1 + model.mtp_depth):
        ends += walk.together(head)
    return blocks, ends


def _block_work(model: Model, mixer: MixerSpec, layer: int, seq_len: int, walk: _Walk) -> BlockWork:
    name = tensors.block_name(model, layer)
    sizes = {part: prod(shape) for part, (shape, _) in tensors.of_layer(model, layer, mixer, walk.tuning).items()}
    sizes |= {part: model.top_k * n // model.num_experts for part, n in sizes.items() if ".experts." in part}

    def step(chosen: Callable[[str], bool]) -> PartWork:
        """What has one input; every B comes after its A, which has the input of its matrix."""
        second, first = [], []
        for part in [part for part in sizes if chosen(part)]:
            (second if is_adapter(part) and part.endswith("B") else first).append(part)
        work = PartWork()
        for group in (first, second):
            work += walk.together({f"{name}.{part}": sizes.pop(part) for part in group})
        return work

    after = {f"attention.{part}" for part in mixer.after_scores}
    after |= {adapter for part in after if part.endswith(".weight") for adapter in adapter_names(part)}
    products = step(lambda part: part == "attention_norm.weight")
    products += step(lambda part: part.startswith("attention.") and part not in after)
    flops = mixer.flops(model, layer, seq_len)
    scores = PartWork(flops, 2 * flops * walk.reached)
    products += step(lambda part: part in after)
    products += step(lambda part: part == "ffn_norm.weight")
    ffn = step(lambda part: ".w2" not in part)
    return BlockWork(products, scores, ffn + step(lambda part: True))
