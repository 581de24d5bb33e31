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
counted as if they were computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from titanmoe.config.blocks import has_experts, moe_blocks, window
from titanmoe.config.schema import Model


@dataclass(frozen=True)
class Parameters:
    embedding: int
    """Both ends: embedding and head; one matrix when tied."""
    attention: int
    """Projections, their biases, and sinks."""
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


Shape = tuple[int, ...]
Split = tuple[Shape, int | None]
"""A tensor's shape, and the dim that tp divides, if any."""


def attention_matrices(model: Model) -> list[Split]:
    """Of one block."""
    dim, heads = model.dim, model.num_heads
    query, key = heads * model.head_dim, model.num_kv_heads * model.head_dim
    if not model.kv_lora_rank:
        return [((query, dim), 0), ((key, dim), 0), ((key, dim), 0), ((dim, query), 1)]
    latent, up, rank = model.kv_lora_rank, heads * (model.qk_nope_head_dim + model.v_head_dim), model.q_lora_rank
    to_query: list[Split] = [((rank, dim), None), ((query, rank), 0)] if rank else [((query, dim), 0)]
    down: Split = ((latent + model.qk_rope_head_dim, dim), None)
    return [*to_query, down, ((up, latent), 0), ((dim, heads * model.v_head_dim), 1)]


def attention_vectors(model: Model) -> list[Split]:
    """Biases and sinks of one block."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    vectors: list[Split] = [((width,), 0) for width in (query, key, key) if model.qkv_bias]
    vectors += [((model.dim,), None)] * model.out_bias
    return vectors + [((model.num_heads,), 0)] * model.attention_sinks


def attention_norms(model: Model) -> list[Split]:
    """Those of queries and keys of one block, or of their latents."""
    if model.qk_norm == "head":
        return [((model.head_dim,), None)] * 2
    if model.qk_norm == "full":
        return [((heads * model.head_dim,), 0) for heads in (model.num_heads, model.num_kv_heads)]
    return [((rank,), None) for rank in (model.q_lora_rank, model.kv_lora_rank) if rank]


def elements(tensors: list[Split]) -> int:
    return sum(prod(shape) for shape, _ in tensors)


def _scores_and_values(model: Model, layer: int, seq_len: int) -> int:
    """Forward FLOPs per token of one block's attention without its projections."""
    width = min(window(model, layer) or seq_len, seq_len)
    twice_visible = 2 * width - width * width // seq_len  # average positions: a triangle without a corner
    return model.num_heads * (model.head_dim + (model.v_head_dim or model.head_dim)) * twice_visible


def parameters(model: Model) -> Parameters:
    layers, dim = model.num_layers + model.mtp_depth, model.dim
    moe = len(moe_blocks(model))

    def swiglu(hidden: int) -> int:
        return 3 * dim * hidden

    expert = swiglu(model.expert_hidden) + model.expert_biases * (2 * model.expert_hidden + dim)

    return Parameters(
        embedding=(1 if model.tie_embeddings else 2) * model.vocab_size * dim,
        attention=layers * elements(attention_matrices(model) + attention_vectors(model)),
        dense=(layers - moe) * swiglu(model.dense_hidden),
        router=moe * model.num_experts * (dim + model.router_bias),
        experts=moe * model.num_experts * expert,
        active_experts=moe * model.top_k * expert,
        shared=moe * (swiglu(model.shared_hidden) + (dim if model.shared_hidden and model.shared_gate else 0)),
        norms=layers * (2 * dim + elements(attention_norms(model))) + (1 + 3 * model.mtp_depth) * dim,
        mtp=model.mtp_depth * 2 * dim * dim,
    )


def layer_flops(model: Model, seq_len: int) -> tuple[list[int], int]:
    """Forward FLOPs per token of each block, and of what comes after them: what a pipeline stage costs."""
    dense = 2 * 3 * model.dim * model.dense_hidden
    experts = 2 * model.dim * (model.num_experts + 3 * (model.top_k * model.expert_hidden + model.shared_hidden))
    projections = 2 * elements(attention_matrices(model))
    blocks = [
        projections + _scores_and_values(model, i, seq_len) + (experts if has_experts(model, i) else dense)
        for i in range(model.num_layers + model.mtp_depth)
    ]
    layers, mtp = blocks[: model.num_layers], blocks[model.num_layers :]
    head = (1 + model.mtp_depth) * 2 * model.vocab_size * model.dim
    return layers, head + sum(mtp) + model.mtp_depth * 2 * 2 * model.dim**2


def forward_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs of one token's forward pass, averaged over a sequence of seq_len."""
    count = parameters(model)
    multiplied = count.active - count.embedding + (1 + model.mtp_depth) * model.vocab_size * model.dim
    blocks = range(model.num_layers + model.mtp_depth)
    return 2 * multiplied + sum(_scores_and_values(model, i, seq_len) for i in blocks)


def flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs to train on one token, forward and backward, averaged over a sequence of seq_len."""
    return 3 * forward_flops_per_token(model, seq_len)
