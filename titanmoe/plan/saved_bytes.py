"""Bytes of activations that a block saves of a microbatch for backward, in closed form.

The planner's memory (`titanmoe.plan.memory`) adds them up. tests/plan/test_memory.py compares the formulas with
rehearsals.

Shapes: T tokens a rank owns, X positions of its attention slice (T times tp), R routed tokens, D model, F hidden width
of an expert on a rank, K top-k; w bytes of the compute dtype, W at least 4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titanmoe.config.blocks import has_experts, separates_documents, splits_router_product
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.attention_backend import FLEX_NARROWEST, head_widths, pick_backend
from titanmoe.fold.degrees import Fold, sequence_chunks
from titanmoe.models import tensors
from titanmoe.models.lora_spec import is_adapter
from titanmoe.models.mixers.mixer_spec import LocalBatch
from titanmoe.models.tensors import Tuning
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.plan.sizes import ModelKey, Sizes, microbatches, vocabulary_ranks


class SavedBytes(NamedTuple):
    """Activation bytes of one microbatch in a block: saved by forward, and recomputed in backward."""

    attention: int
    """Bytes saved by the mixer and its norm."""
    ffn: int
    """Bytes saved by the dense network or MoE layer and its norm."""
    routed: int
    """Bytes of `ffn` that hold routed tokens: backward of the experts frees them before their gradients are reduced."""
    recomputed: int
    """Bytes of the recomputed half of the block while it is in backward."""


class Widths:
    """Token counts, number widths in bytes and weight sizes of a recipe under one mapping."""

    def __init__(self, config: Config, fold: Fold, imbalance: float = 1.0):
        model, training = config.model, config.training
        self.config, self.fold, self.model = config, fold, model
        self.w = WIDTHS[training.mixed_precision_param]
        self.W = max(4, self.w)
        self.X = training.local_batch_size * training.seq_len // fold.cp
        self.T = self.X // fold.tp
        static = DISPATCHERS.look_up(config.moe.dispatcher).static_sizes(config, self.T, fold.ep, fold.etp)
        self.R = static.receive_slots or round(self.T * model.top_k * fold.etp * imbalance)
        self.receive_buffers = static.buffer_slots * (model.dim * self.w + max(self.w, WIDTHS[config.moe.router_dtype]))
        self.F = model.expert_hidden // fold.etp
        self.microbatches = microbatches(config, fold)
        self.sizes = Sizes(model, fold, Tuning.of(config), vocabulary_ranks(config, fold))
        self.drops_inputs = config.lora.rank > 0 and config.lora.dropout > 0
        self.mixers = ModelKey.of(model).mixers
        self.flows = flow_of_blocks(ModelKey.of(model), self.sizes.tuning)
        self.batch = LocalBatch(
            tokens=self.T,
            positions=self.X,
            tp=fold.tp,
            width=self.w,
            ring=fold.cp > 1 and config.parallelism.cp_kind == "ring",
            segments=training.local_batch_size * sequence_chunks(fold.cp, config.parallelism.cp_placement),
            gathered=fold.cp if config.parallelism.cp_kind == "allgather" else 1,
            mask=training.local_batch_size * training.seq_len**2 * self.w * saves_mask(config, fold.cp),
        )


def saves_mask(config: Config, cp: int) -> bool:
    """Return whether attention on GPUs gets a (seq_len, seq_len) mask: for documents, if flex_attention cannot take it.

    Our attention by blocks, which windows, sinks and cp other than ulysses have, needs none.
    """
    model, options = config.model, config.parallelism
    by_blocks = model.attention_sinks or model.sliding_window or (cp > 1 and options.cp_kind != "ulysses")
    if by_blocks or not separates_documents(config):
        return False
    narrow = min(head_widths(model)) < FLEX_NARROWEST
    backend, _ = pick_backend(options.attention_backend, options.cp_kind, cp, device="cuda", masked=True, narrow=narrow)
    return backend == "plain"


class Flow(NamedTuple):
    """The gradients that backward computes in a block: of an input only if something before it is trained."""

    into_attention: bool = True
    """Whether the output of attention's norm has a gradient."""
    attention_weights: bool = True
    """Whether weights that read the output of attention's norm are trained."""
    into_ffn: bool = True
    """Whether the output of the norm before the dense network or experts has a gradient."""
    router_weights: bool = True
    ffn_weights: bool = True
    """Whether weights that read the input of the dense network or of the experts are trained."""
    shared_weights: bool = True
    out_of_ffn: bool = True
    """Whether the block's output has a gradient."""
    attention_ranks: int = 0
    """Sum of the ranks of attention's adapters."""
    dense_ranks: int = 0
    """Sum of the ranks of adapters of the dense network or the shared expert."""
    expert_ranks: tuple[int, ...] = ()
    """Rank of each of the experts' adapters."""
    adapter_inputs: tuple[tuple[str, int, bool], ...] = ()
    """Each adapter's name, the width of its input, and whether tp or etp splits that."""

    @property
    def attention(self) -> bool:
        """Whether any gradient in attention is computed."""
        return self.into_attention or self.attention_weights

    @property
    def ffn(self) -> bool:
        """Whether any gradient in the dense network or MoE layer is computed."""
        return self.into_ffn or self.router_weights or self.ffn_weights


@lru_cache(maxsize=1024)
def flow_of_blocks(key: ModelKey, tuning: Tuning) -> tuple[Flow, ...]:
    """Return for each block which gradients backward computes, and so what forward has to save.

    A gradient of a block's input is computed only if something before the block is trained.
    """
    model, flows = key.model, []
    if tuning.trains_all:
        return (Flow(),) * len(key.mixers)
    reached = not tuning.freezes("embed.weight")
    for layer, mixer in enumerate(key.mixers):
        experts, block = has_experts(model, layer), tensors.block_name(model, layer)
        parts = tensors.layer_splits(model, layer, mixer, tuning)
        trained = [part for part in parts if not tuning.freezes(f"{block}.{part}")]
        after_scores = tuple(f"attention.{part.removesuffix('.weight')}" for part in mixer.after_scores)
        network = "moe.experts." if experts else "ffn."

        def any_of(prefix: str, but: str | tuple[str, ...] = (), trained: list[str] = trained) -> bool:
            return any(part.startswith(prefix) and not part.startswith(but) for part in trained)

        adapters = [(part, *split) for part, split in parts.items() if is_adapter(part) and part.endswith("A")]
        downs = [(part, shape[-2]) for part, shape, _ in adapters]
        attention, routed = "attention.", "moe.experts."
        into_attention = reached or any_of("attention_norm")
        into_ffn = into_attention or any_of(attention) or any_of("ffn_norm")
        reached = into_ffn or any_of("moe.") or any_of("ffn.")
        flows.append(
            Flow(
                into_attention=into_attention,
                attention_weights=any_of(attention, after_scores),
                into_ffn=into_ffn,
                router_weights=any_of("moe.router."),
                ffn_weights=any_of(network, f"{network}w2"),
                shared_weights=any_of("moe.shared.", "moe.shared.w2"),
                out_of_ffn=reached,
                attention_ranks=sum(rank for part, rank in downs if part.startswith(attention)),
                dense_ranks=sum(rank for part, rank in downs if not part.startswith((attention, routed))),
                expert_ranks=tuple(rank for part, rank in downs if part.startswith(routed)),
                adapter_inputs=tuple((part, shape[-1], dim is not None) for part, shape, dim in adapters),
            )
        )
    return tuple(flows)


def _dense(s: Widths, hidden: int, selective: bool) -> int:
    """Return the bytes that a dense or shared feed-forward network saves of a microbatch.

    Args:
        hidden: width of the network, before tp divides it.
        selective: whether the mode of recomputation is "selective".
    """
    return (2 if selective else 4) * s.X * hidden // s.fold.tp * s.w


def _router(s: Widths, trained: bool) -> int:
    """Return the bytes that the router saves of a microbatch.

    They are its input if its weight is trained, the bfloat16 parts of the weight if the product is computed by parts,
    logits, scores, and places of routed tokens.
    """
    model, T, K = s.model, s.T, s.model.top_k
    by_parts = splits_router_product(s.config)
    product = model.dim * (T * s.w * trained + model.num_experts * 8 if by_parts else T * s.W * trained)
    places = T * K * s.fold.etp * 8 + (2 if s.fold.ep * s.fold.etp > 1 else 0) * s.R * 8 + s.R * 8
    return product + 2 * T * model.num_experts * s.W + T * K * 8 + places


def mode_of(config: Config, layer: int) -> str:
    """Return the layer's mode of recomputation: "none" unless `every` selects the layer."""
    options = config.activation_checkpoint
    return options.mode if layer % options.every == 0 else "none"


def dropped_bytes(s: Widths, layer: int, prefix: str) -> int:
    """Return the bytes that dropout before adapters saves in a block: each adapter's input after it, and the mask.

    Args:
        prefix: first part of the adapters' names, "attention." or "moe.experts.", or "" for all others.

    Returns:
        The bytes; 0 unless lora.dropout is above 0.
    """
    if not s.drops_inputs:
        return 0
    out = 0
    for name, inputs, is_split in s.flows[layer].adapter_inputs:
        routed = name.startswith("moe.experts.")
        if name.startswith(prefix) if prefix else not (routed or name.startswith("attention.")):
            ranks = (s.fold.etp if routed else s.fold.tp) if is_split else 1
            out += (s.R if routed else s.X) * (inputs // ranks) * (s.w + 1)
    return out


def input_bytes(s: Widths, layer: int) -> int:
    """Return the bytes that a block saves before its mixer: the norm's input and scales, and the projections' input.

    What attention's adapters save is among them; what nothing trained needs is not.
    """
    flow, D, w = s.flows[layer], s.model.dim, s.w
    # The adapters' narrow products are saved for the gradients of B. Under dropout each A reads an input of its own.
    shared = flow.attention_weights and not s.drops_inputs
    inputs = s.mixers[layer].input_positions(s.model, s.batch) * D * shared
    products = (inputs + s.X * flow.attention_ranks) * w + dropped_bytes(s, layer, "attention.")
    return s.T * (D * w + s.W) * flow.into_attention + products


def saved_bytes(s: Widths, layer: int, mode: str = "") -> SavedBytes:
    """Return what a block saves of one microbatch on a rank.

    Args:
        mode: "none", "selective", "moe" (of a dense block "none"), "full_except_dispatch", "full"; "" for the recipe's.
    """
    model, T, X, D, w, W = s.model, s.T, s.X, s.model.dim, s.w, s.W
    experts = has_experts(model, layer)
    mode = mode or mode_of(s.config, layer)
    if mode == "moe" and not experts:
        mode = "none"
    selective = mode == "selective"
    flow, norm = s.flows[layer], T * D * w + T * W  # a norm's input, and one scale per token
    attention = input_bytes(s, layer) + s.mixers[layer].saved_bytes(model, s.batch, selective) * flow.attention
    shared = not s.drops_inputs  # whether weights that read one input save it once
    ffn, routed = norm * flow.into_ffn + X * flow.dense_ranks * w + dropped_bytes(s, layer, ""), 0
    if not experts:
        ffn += X * D * w * (flow.ffn_weights and shared) + _dense(s, model.dense_hidden, selective) * flow.ffn
    else:
        narrow = sum(rank + -rank % (16 // w) for rank in flow.expert_ranks)
        routed = dropped_bytes(s, layer, "moe.experts.")
        routed += s.R * (D * w * (flow.ffn_weights and shared) + (4 + 2 * s.F * w) * flow.out_of_ffn + narrow * w)
        ffn += _router(s, flow.router_weights) * flow.ffn + routed
        if model.shared_hidden:
            ffn += (
                X * D * w * (flow.shared_weights and shared)
                + _dense(s, model.shared_hidden, selective) * flow.out_of_ffn
            )
            ffn += model.shared_gate * T * (D + 2) * w * flow.into_ffn
    if mode in ("full", "full_except_dispatch", "moe"):
        with_routed = mode == "full_except_dispatch" and experts
        saved = T * D * w
        if experts:  # places of routed tokens, and with_routed those that arrived, with their weights
            order = (2 if s.fold.ep * s.fold.etp > 1 else 0) * 8
            saved += T * model.top_k * s.fold.etp * 2 * 8 + s.R * (order + with_routed * (D * w + W))
        recomputed = ffn - with_routed * s.R * D * w * (flow.ffn_weights and shared)
        attention = attention if mode == "moe" else T * D * w * flow.attention
        return SavedBytes(attention, saved * flow.out_of_ffn, 0, recomputed)
    return SavedBytes(attention, ffn, routed, 0)
