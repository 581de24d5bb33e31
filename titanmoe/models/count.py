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
counted as if they were computed. A mixer that computes something other than scores and values states its own FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanmoe.config.blocks import has_experts, moe_blocks
from titanmoe.config.schema import Model
from titanmoe.models.families import mixers
from titanmoe.models.mixers.rules import elements


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
        attention=sum(elements(mixer.matrices(model) + mixer.vectors(model)) for mixer in of_blocks),
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


def flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs to train on one token, forward and backward, averaged over a sequence of seq_len."""
    return 3 * forward_flops_per_token(model, seq_len)
