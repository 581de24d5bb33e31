"""Count the parameters and FLOPs of a model by arithmetic on its shape, for headers of runs, planner and stages.

"Active" parameters are those that one token uses: all but the routed experts that it is not sent to. As in model cards,
embedding and head are included. FLOPs per token, where a multiplication and an addition count as two:

    forward  = 2 * N + L * H * (h + v) * S        training = 3 * forward, since backward costs two forwards

N active parameters without the embedding, L layers, H query heads, h and v widths of their queries and values, S
sequence length, of which a token sees half on average. Softmax, RoPE, activations and recomputation are not counted:
this is the work of the model (MFU), not of the hardware (HFU).
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
    """Numbers of parameters of a model, by kind."""

    embedding: int
    """Embedding and head; one matrix if they are tied."""
    attention: int
    """Mixers without their norms: projections, biases, sinks, or whatever a family has instead of attention."""
    dense: int
    """Feed-forward networks of the blocks without experts."""
    router: int
    experts: int
    """All routed experts."""
    active_experts: int
    """The routed experts that one token is sent to."""
    shared: int
    """Shared experts and their gates."""
    norms: int
    """Norms of the blocks, of queries and keys or their latents, and the final norms."""
    mtp: int
    """The projection of multi-token prediction. Its block is counted like the others, and is active in training."""

    @property
    def total(self) -> int:
        """All parameters."""
        blocks = self.attention + self.dense + self.router + self.experts + self.shared + self.norms
        return self.embedding + blocks + self.mtp

    @property
    def active(self) -> int:
        """Parameters that one token uses: all but the routed experts that it is not sent to."""
        return self.total - self.experts + self.active_experts


def parameters(model: Model) -> Parameters:
    """Return the numbers of a model's parameters, by kind, without adapters."""
    layers, dim, of_blocks = model.num_layers + model.mtp_depth, model.dim, mixers(model)
    moe = len(moe_blocks(model))

    def swiglu(hidden: int) -> int:
        return 3 * dim * hidden

    expert = swiglu(model.expert_hidden) + model.expert_linear_bias * (2 * model.expert_hidden + dim)

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
    """Return the forward FLOPs per token of each layer, as a list, and of all that follows the layers, as one number.

    After the layers come multi-token prediction, with its block, and the head. Products alone: norms and biases do not
    count. A token's FLOPs are averaged over a causal sequence of `seq_len` tokens. Pipeline stages are balanced by
    these numbers.
    """
    dense = 2 * 3 * model.dim * model.dense_hidden
    experts = 2 * model.dim * (model.num_experts + 3 * (model.top_k * model.expert_hidden + model.shared_hidden))
    blocks = [
        2 * elements(mixer.matrices(model))
        + mixer.flops(model, i, seq_len)
        + (experts if has_experts(model, i) else dense)
        for i, mixer in enumerate(mixers(model))
    ]
    layers, mtp = blocks[: model.num_layers], blocks[model.num_layers :]
    return layers, head_flops(model) + sum(mtp) + model.mtp_depth * 2 * 2 * model.dim**2


def head_flops(model: Model) -> int:
    """Return the forward FLOPs per token of the head: with multi-token prediction, of its two applications."""
    return (1 + model.mtp_depth) * 2 * model.vocab_size * model.dim


def flops_per_token(model: Model, seq_len: int, tuning: Tuning | None = None) -> int:
    """Return the FLOPs to train on one token, forward and backward, averaged over a sequence of `seq_len` tokens.

    With multi-token prediction the head is multiplied twice. A token sees W - W^2 / 2S positions in a window of W.
    Dropped tokens count. A frozen weight costs 4 FLOPs instead of 6, or 2 if nothing before it is trained. `tuning`
    says which parameters are trained; None for all.
    """
    blocks, ends = training_flops(model, seq_len, tuning or Tuning())
    return sum(flops.forward + flops.backward for some in (*blocks, (ends,)) for flops in some)


class TrainingWork(NamedTuple):
    """FLOPs of a model's forward and backward, for samples whose tokens see different numbers of positions."""

    per_token: float = 0.0
    """FLOPs of a token without scores and weighted values."""
    per_pair: Mapping[int, float] = MappingProxyType({})
    """FLOPs of one (query, key) pair of positions, summed over blocks, by width of the block's window (0: none)."""


NO_WORK = TrainingWork()
"""The work of a model whose FLOPs are not counted."""


def training_work(model: Model, tuning: Tuning) -> TrainingWork:
    """Return the FLOPs of forward and backward, per token and, by window, per visible (query, key) pair."""
    blocks, ends = training_flops(model, 1, tuning)
    per_token, per_pair = float(sum(ends)), {}
    for layer, (mixer, block) in enumerate(zip(mixers(model), blocks, strict=True)):
        pair, width = mixer.pair_flops(model) * (1 + block.scores.factor), window(model, layer)
        per_pair[width] = per_pair.get(width, 0.0) + pair
        per_token += sum(map(sum, block)) - pair / 2  # by the formula above, a sequence of one sees half a position
    return TrainingWork(per_token, per_pair)


def trained_parameters(model: Model, tuning: Tuning) -> int:
    """Return the number of parameters that `tuning` trains, adapters included, in the full model (all ranks)."""
    if tuning.trains_all:
        return parameters(model).total
    return sum(prod(shape) for name, shape in tensors.shapes(model, tuning) if not tuning.freezes(name))


class PassFlops(NamedTuple):
    """FLOPs of a token in the forward and in the backward pass."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: tuple) -> PassFlops:
        return PassFlops(self.forward + other[0], self.backward + other[1])

    @property
    def factor(self) -> float:
        """FLOPs of backward divided by FLOPs of forward: 2 if everything is trained, or if forward has no FLOPs."""
        return self.backward / self.forward if self.forward else 2.0


class BlockFlops(NamedTuple):
    """FLOPs of a token in one block."""

    products: PassFlops
    """The mixer's matrix products, and the block's norms."""
    scores: PassFlops
    """The mixer's scores and weighted values, or what it computes instead of them."""
    ffn: PassFlops
    """The dense network, or router, routed experts and shared expert."""


class _Walk:
    """A walk through the weights of a model in forward's direction, which counts FLOPs of both passes.

    Backward computes the gradient of a weight that is trained, and the gradient of its input if anything before it is
    trained.
    """

    def __init__(self, tuning: Tuning):
        self.tuning, self.reached = tuning, False

    def count(self, elements: Mapping[str, int]) -> PassFlops:
        """Return the FLOPs per token of weights that multiply the same input, in forward and in backward.

        Calls have to come in forward's order: each remembers whether its weights are trained.

        Args:
            elements: number of elements of each weight that multiply a token, by the weight's name in checkpoints.
        """
        trained = {name: not self.tuning.freezes(name) for name in elements}
        work = PassFlops(
            2 * sum(elements.values()), sum(2 * n * (trained[name] + self.reached) for name, n in elements.items())
        )
        self.reached = self.reached or any(trained.values())
        return work


def training_flops(model: Model, seq_len: int, tuning: Tuning) -> tuple[list[BlockFlops], PassFlops]:
    """Return the FLOPs of a token in each block, as a list, and in all that lies outside blocks.

    The block of multi-token prediction is the last of the list. Outside blocks are the final norm, the head, and norms
    and projection of multi-token prediction. What a token sees is averaged over a sequence of `seq_len` tokens.
    """
    walk, blocks, ends = _Walk(tuning), [], PassFlops()
    walk.count({"embed.weight": 0})  # looked up, not multiplied
    head = {tensors.stored_name("head.weight", model.tie_embeddings): model.vocab_size * model.dim}
    for layer, mixer in enumerate(mixers(model)):
        if layer == model.num_layers:
            names = ("hidden_norm", "embed_norm", "project", "norm")
            sizes = (model.dim, model.dim, 2 * model.dim**2, model.dim)
            ends += walk.count({f"mtp.0.{name}.weight": n for name, n in zip(names, sizes, strict=True)})
        blocks.append(_block_work(model, mixer, layer, seq_len, walk))
    ends += walk.count({"head.norm.weight": model.dim})
    for _ in range(1 + model.mtp_depth):
        ends += walk.count(head)
    return blocks, ends


def _block_work(model: Model, mixer: MixerSpec, layer: int, seq_len: int, walk: _Walk) -> BlockFlops:
    name = tensors.block_name(model, layer)
    splits = tensors.layer_splits(model, layer, mixer, walk.tuning)
    sizes = {weight: prod(shape) for weight, (shape, _) in splits.items()}
    sizes |= {weight: model.top_k * n // model.num_experts for weight, n in sizes.items() if ".experts." in weight}

    def step(chosen: Callable[[str], bool]) -> PassFlops:
        """Return the FLOPs of the weights for which `chosen` is true, and remove them from `sizes`.

        They multiply the same input, but an adapter's B multiplies the output of its A.
        """
        second, first = [], []
        for weight in [weight for weight in sizes if chosen(weight)]:
            (second if is_adapter(weight) and weight.endswith("B") else first).append(weight)
        flops = PassFlops()
        for group in (first, second):
            flops += walk.count({f"{name}.{weight}": sizes.pop(weight) for weight in group})
        return flops

    after = {f"attention.{weight}" for weight in mixer.after_scores}
    after |= {adapter for weight in after if weight.endswith(".weight") for adapter in adapter_names(weight)}
    products = step(lambda weight: weight == "attention_norm.weight")
    products += step(lambda weight: weight.startswith("attention.") and weight not in after)
    flops = mixer.flops(model, layer, seq_len)
    scores = PassFlops(flops, 2 * flops * walk.reached)
    products += step(lambda weight: weight in after)
    products += step(lambda weight: weight == "ffn_norm.weight")
    ffn = step(lambda weight: ".w2" not in weight)
    return BlockFlops(products, scores, ffn + step(lambda weight: True))
