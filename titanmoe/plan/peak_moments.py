"""The moments of a step at which a pipeline rank may need most memory, each with its bytes by component.

titanmoe.plan.memory takes the largest. What is alive at a moment follows the modules' code as a rehearsal sees it on
GPUs (docs/rehearse.md): bytes that tensors ask for, balanced routing, Triton's kernels, nothing compiled. tests/plan
compares every formula here with rehearsals.

Shapes: T tokens of a rank, X positions of its attention slice (T times tp), R routed tokens, D model, F hidden units of
an expert, V ids in a rank's shard of the head; w bytes of the compute dtype, W at least 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from titanmoe.config.blocks import has_experts, rotary_width
from titanmoe.config.laws import WIDTHS
from titanmoe.fold.pipeline_schedules import read_csv
from titanmoe.fold.unsharded_experts import experts_are_unsharded, has_compute_copies, reshards_after_forward
from titanmoe.fold.vocabulary_passes import EARLIER_FORWARDS
from titanmoe.plan.muon_work import matrix_buffer_bytes
from titanmoe.plan.saved_bytes import SavedBytes, Widths, input_bytes, mode_of, saved_bytes
from titanmoe.plan.schedule_cost import FORWARDS_FIRST, BackwardLoad, backward_loads, largest_loads
from titanmoe.plan.sizes import (
    StageLayers,
    WeightUnit,
    fsdp,
    shared_vocabulary,
    state_bytes,
    units_of_rank,
    units_of_stage,
    vocabulary_ranks,
)
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS

SLICE = 2**30
"""Bytes of a slice of logits on GPUs (titanmoe.models.vocabulary)."""


class Moment(NamedTuple):
    """A moment of a step that may be the peak of a rank's memory."""

    name: str
    """Description, such as "backward of the last block's experts"."""
    components: dict[str, int]
    """Bytes by component."""


@dataclass(frozen=True, kw_only=True)
class BlockInBackward:
    """A block of a rank while it is in backward, and what the blocks after it have left behind."""

    position: str
    """Position among the rank's blocks: "last", "last but one" or "first"."""
    layer: int
    saved: SavedBytes
    freed: int
    """Bytes of activations that blocks after it have freed, of those counted as saved."""
    gradient_shards: int
    """Bytes of the reduced gradients of blocks after it, where no earlier microbatch has begun them."""
    sent_gradients: int
    """Bytes of gradients that are not reduced yet, or whose reduction is in flight."""
    is_first_backward: bool
    """Whether its stage has no gradients of an earlier microbatch."""


class PeakMoments:
    """Moments of a step at which a pipeline rank may need most memory."""

    def __init__(self, s: Widths, rank: int, stages: list[StageLayers], teacher: int, reference: int):
        """Compute what a rank holds during the whole step.

        Args:
            s: sizes of the recipe under the mapping.
            rank: pipeline rank.
            stages: stages of the rank.
            teacher: bytes of a teacher's weights and outputs on the rank.
            reference: bytes of a reference model's weights on the rank.
        """
        config, model, sizes = s.config, s.model, s.sizes
        self.s, self.stages = s, stages
        self.weight_width = WIDTHS[config.training.dtype]
        self.reduced_width = max(s.w, WIDTHS[config.training.mixed_precision_reduce])
        self.is_pipelined = s.fold.pp > 1
        self.reshards = reshards_after_forward(config.parallelism)
        self.shards_experts = not experts_are_unsharded(config.parallelism, config.training, s.fold.edp)
        self.hidden = s.T * model.dim * s.w
        has_last_stage = any(stage.is_last for stage in stages)
        self.blocks = [i for stage in stages for i in stage.blocks(model)]
        self.saved = {i: saved_bytes(s, i) for i in self.blocks}
        # Gathered weights of a block and of the one before it, which is prefetched.
        self.two_blocks = min(2, len(self.blocks)) * sizes.block(self.blocks[-1]).full_size * s.w * self.reshards
        self.shared = shared_vocabulary(config, sizes)
        self.has_head = bool(self.shared) or has_last_stage
        self.edge = sizes.head if self.has_head else sizes.embedding
        dense, experts = units_of_rank(config, s.fold, sizes, stages)
        units = dense + experts
        self.dense, self.experts = ([unit for unit, _ in some] for some in (dense, experts))
        self.trained = sum(unit.trained.stored_bytes(n, self.weight_width) for unit, n in units)
        frozen = sum(unit.stored_bytes(n, s.w) - unit.trained.stored_bytes(n, s.w) for unit, n in units)
        self.weights = self.trained + frozen
        self.optimizer_state = state_bytes(config, s.fold, units, stages)
        self.accumulated = self.trained if s.microbatches > 1 and not self.is_pipelined else 0

        self.loads = self._loads(rank)
        # At most one microbatch is between the passes S and T. On some ranks it never is while another one is in
        # backward; this is not considered, nor that the embedding has no gradients yet in a step's first backward.
        self.interleaves = config.pipeline.schedule not in FORWARDS_FIRST and s.microbatches > EARLIER_FORWARDS
        self.held_logits = self._scored_bytes() * (bool(self.shared) and self.interleaves)
        self.saved_by_stage = [self._saved_of(stage) for stage in stages]
        self.gradients_by_stage = [
            self._gradients_of(units_of_stage(config, sizes, stage), stage.blocks(model)) for stage in stages
        ]
        self.gradients_by_stage[-1] += sum(unit.trained.full_size for unit in self.shared)
        self.tokens = s.microbatches * s.X * 24
        if self.shared and model.mtp_depth and has_last_stage:  # embeddings of next tokens, sent by the first stage
            self.tokens += min(s.fold.pp, s.microbatches) * self.hidden
        self.always = {
            "weights": self.weights,
            "moments": self.optimizer_state,
            "teacher": teacher,
            "reference": reference,
            "symmetric buffers": s.receive_buffers,
        }
        sides = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
        self.in_passes = self.always | {
            "gathered weights": self._always_gathered() * s.w,
            "pipeline receive buffers": s.microbatches * self.hidden * sides * self.is_pipelined,
        }

    def all(self) -> Iterator[Moment]:
        """Yield the moments of backward in blocks, of the vocabulary, of the last reduction, and of Muon's update."""
        positions = [("last", -1)] + [("last but one", -2)] * (len(self.blocks) > 1)
        positions += [("first", 0)] * (not self.accumulated and not self.is_pipelined)
        for load in self.loads:
            held = self._held(load)
            for position, index in positions:
                yield from self._block_backward(held, self._block(load, position, index))
        if self.shared:
            yield from self._shared_vocabulary()
        elif self.has_head:
            yield from self._head()
        if self.is_pipelined:
            yield self._last_reduction()
        if OPTIMIZERS.look_up(self.s.config.optimizer.name).numbers_per_matrix_weight:
            buffers = matrix_buffer_bytes(self.s.config, self.s.fold)
            update = self.always | {"gradients": self.trained, "other": buffers}
            yield Moment("the update of matrices", update)

    # ---- what is held

    def _always_gathered(self) -> int:
        """Return the elements of weights that stay gathered during all passes, or are the step's compute copies."""
        dense = sum(unit.full_size for unit in (self.shared if self.reshards else self.dense))
        if not self.shards_experts:
            copies = has_compute_copies(self.s.config.training)
            return dense + sum(unit.trained.full_size for unit in self.experts) * copies
        return dense + (0 if self.reshards else sum(unit.full_size for unit in self.experts))

    def _saved_of(self, stage: StageLayers) -> float:
        """Return the bytes that one microbatch in flight has saved in a stage."""
        s, model = self.s, self.s.model
        # Every stage but the first has its input in a receive buffer, and the pipeline holds every output but the loss.
        edges = self.hidden * (stage.is_first - (stage.is_last and not self.shared))
        # Multi-token prediction: inputs of norms and projection, scales, and hidden states for the head of all stages.
        mtp = model.mtp_depth * stage.is_last * (self.hidden * (4 + bool(self.shared)) + 3 * s.T * s.W)
        rope = 2 * s.X * rotary_width(model) * 4
        return sum(self.saved[i].attention + self.saved[i].ffn for i in stage.blocks(model)) + rope + edges + mtp

    def _gradients_of(self, units: list[WeightUnit], blocks: list[int]) -> int:
        """Return the elements of the gradients of units and of blocks' experts, before data ranks shard them."""
        experts = [self.s.sizes.experts_of(i) for i in blocks if has_experts(self.s.model, i)]
        return sum(unit.trained.full_size for unit in units + experts)

    def _loads(self, rank: int) -> list[BackwardLoad]:
        """Return the microbatches in flight and gradients begun in the rank's backward passes that may be the peak."""
        s, options = self.s, self.s.config.pipeline
        if not self.is_pipelined:
            return [BackwardLoad((1.0,), (False,))]
        if options.schedule_csv:
            return largest_loads(read_csv(options.schedule_csv)[rank])
        shared = s.config.parallelism.vocab == "pipeline"
        return backward_loads(options.schedule, s.fold.pp, len(self.stages), s.microbatches, rank, shared)

    def _held(self, load: BackwardLoad) -> dict[str, int]:
        """Return the bytes by component that a rank holds in a backward pass, apart from what the pass needs."""
        saved = sum(count * size for count, size in zip(load.in_flight, self.saved_by_stage, strict=True))
        begun = sum(size for size, begun in zip(self.gradients_by_stage, load.begun, strict=True) if begun)
        return self.in_passes | {
            "saved activations": round(saved) + self.tokens,
            "gradients": begun * self.reduced_width if self.is_pipelined else self.accumulated,
            "logits": self.held_logits,
        }

    # ---- a block in backward

    def _block_backward(self, held: dict[str, int], block: BlockInBackward) -> Iterator[Moment]:
        """Yield the moments of one block's backward.

        Args:
            held: bytes by component that the rank holds anyway.
        """
        is_moe = has_experts(self.s.model, block.layer)
        yield self._ffn_backward(held, block)
        if self.is_pipelined and is_moe:
            yield from self._expert_gradients(held, block)
        mixer = self.s.mixers[block.layer]
        selective = mode_of(self.s.config, block.layer) == "selective"
        if needed := mixer.backward_bytes(self.s.model, self.s.batch, selective):
            yield self._mixer_backward(held, block, mixer.name, needed)
        if is_moe:
            if block.position == "last" and not self.s.sizes.tuning.trains_all:
                yield self._experts_forward(held, block)
            if block.saved.recomputed and self.reshards and self.s.fold.edp > 1:
                yield self._experts_recomputed(held, block)
            if not self.is_pipelined:
                yield self._expert_gradients_reduced(held, block)

    def _block(self, load: BackwardLoad, position: str, index: int) -> BlockInBackward:
        """Return one of the rank's blocks while it is in backward.

        Args:
            load: microbatches in flight and gradients begun.
            position: "last", "last but one" or "first", as messages name the block.
            index: index of the block among the rank's blocks: -1, -2 or 0.
        """
        finished = self.blocks[index + 1 :] if index + 1 else []
        is_first_backward = not load.begun[-1]
        if self.is_pipelined:
            units = [self.edge] * self.has_head + [self.s.sizes.block(i) for i in finished]
            shards, sent = 0, self._gradients_of(units, finished) * is_first_backward
        else:
            shards = 0
            if not self.accumulated:
                shards = sum(map(self._stored_of_block, finished))
                shards += self.edge.trained.stored_bytes(fsdp(self.s.fold), self.weight_width)
            # A unit's gradients stay in the buffer that they were sent from until the next unit's are sent.
            previous = self.s.sizes.block(finished[0]) if finished else self.edge
            sent = previous.trained.full_size * (bool(finished) or self.has_head)
        return BlockInBackward(
            position=position,
            layer=self.blocks[index],
            saved=self.saved[self.blocks[index]],
            freed=sum(self.saved[i].attention + self.saved[i].ffn for i in finished),
            gradient_shards=shards,
            sent_gradients=sent * self.reduced_width,
            is_first_backward=is_first_backward,
        )

    def _stored_of_block(self, layer: int) -> int:
        """Return the bytes of a rank's shard of a block's trained weights, its experts' included."""
        s, width = self.s, self.weight_width
        experts = s.sizes.experts_of(layer).trained.stored_bytes(s.fold.edp, width) * has_experts(s.model, layer)
        return s.sizes.block(layer).trained.stored_bytes(fsdp(s.fold), width) + experts

    def _experts_gathered(self, layer: int) -> int:
        """Return the bytes of a layer's experts that are gathered for this block alone.

        0 if weights stay gathered, or if experts are not sharded.
        """
        return self.s.sizes.experts_of(layer).full_size * self.s.w if self.reshards and self.shards_experts else 0

    def _ffn_backward(self, held: dict[str, int], block: BlockInBackward) -> Moment:
        s, is_moe = self.s, has_experts(self.s.model, block.layer)
        R, F, D = (s.R, s.F, s.model.dim) if is_moe else (s.X, s.model.dense_hidden // s.fold.tp, 0)
        return _moment(
            f"backward of the {block.position} block's {'experts' if is_moe else 'FFN'}",
            held,
            saved_activations=-block.freed,
            recomputed_activations=block.saved.recomputed,
            gathered_weights=self.two_blocks + self._experts_gathered(block.layer) * is_moe,
            gradients=block.gradient_shards + block.sent_gradients,
            other=R * (4 * F * s.w + 4) + self.hidden,
            dispatch_buffers=R * D * s.w,
        )

    def _expert_gradients(self, held: dict[str, int], block: BlockInBackward) -> Iterator[Moment]:
        # The activation's gradient comes before that of the last product, of which then one operand is left; the
        # gradients of the first products come together, in place of their outputs.
        s, F, D = self.s, self.s.F, self.s.model.dim
        for thirds, width in ((1, 3 * F + D), (3 if self.shards_experts else 2, D)):
            yield _moment(
                f"gradients of the {block.position} block's experts",
                held,
                saved_activations=-block.freed,
                recomputed_activations=block.saved.recomputed,
                gathered_weights=self.two_blocks + self._experts_gathered(block.layer),
                gradients=block.sent_gradients + s.sizes.experts_of(block.layer).trained.full_size * s.w * thirds // 3,
                other=s.R * width * s.w + self.hidden,
            )

    def _mixer_backward(self, held: dict[str, int], block: BlockInBackward, mixer: str, needed: int) -> Moment:
        s, experts = self.s, self.s.sizes.experts_of(block.layer).trained
        at_once = self.is_pipelined or self.accumulated
        stored = 0 if at_once else experts.stored_bytes(s.fold.edp, self.weight_width)
        is_sent = block.is_first_backward if self.is_pipelined else self.shards_experts
        expert_gradients = stored + experts.full_size * self.reduced_width * is_sent
        return _moment(
            f"backward of the {block.position} block's {mixer}",
            held,
            saved_activations=-block.freed - block.saved.ffn - block.saved.attention,
            recomputed_activations=input_bytes(s, block.layer) + needed,
            gathered_weights=s.sizes.block(self.blocks[-1]).full_size * s.w if self.reshards else 0,
            gradients=block.gradient_shards
            + block.sent_gradients * self.is_pipelined
            + expert_gradients * has_experts(s.model, block.layer),
            other=self.hidden,
        )

    def _experts_forward(self, held: dict[str, int], block: BlockInBackward) -> Moment:
        # With few gradients this may be the peak. Gathered weights arrive in a buffer and are copied, and those of the
        # head are in flight. The last product stands beside the activation, then beside its adapter's.
        s, F, D, flow = self.s, self.s.F, self.s.model.dim, self.s.flows[block.layer]
        unsaved = not block.saved.routed
        experts = s.sizes.experts_of(block.layer).full_size * (2 if s.fold.edp > 1 else 1)
        gathered = s.sizes.block(self.blocks[-1]).full_size + self.edge.full_size + self.shards_experts * experts
        return _moment(
            "forward of the last block's experts",
            held,
            gathered_weights=gathered * s.w if self.reshards else 0,
            other=s.R * (max(F + D, 2 * D * bool(flow.expert_ranks)) + 2 * F * unsaved) * s.w + self.hidden,
            dispatch_buffers=s.R * D * s.w * (unsaved or not flow.ffn_weights),
        )

    def _experts_recomputed(self, held: dict[str, int], block: BlockInBackward) -> Moment:
        s, flow = self.s, self.s.flows[block.layer]
        return _moment(
            f"recomputing the {block.position} block's experts",
            held,
            saved_activations=-block.freed,
            recomputed_activations=block.saved.recomputed + s.R * s.F * s.w,
            dispatch_buffers=s.R * s.model.dim * s.w * bool(flow.expert_ranks),
            gathered_weights=self.two_blocks + 2 * s.sizes.experts_of(block.layer).full_size * s.w,
            gradients=block.gradient_shards + block.sent_gradients,
            other=self.hidden,
        )

    def _expert_gradients_reduced(self, held: dict[str, int], block: BlockInBackward) -> Moment:
        s, D, recomputed = self.s, self.s.model.dim, block.saved.recomputed
        freed = block.saved.routed or s.R * (D * s.w + 4 + 2 * s.F * s.w)
        gradients = self._most_expert_gradients(s.sizes.experts_of(block.layer).trained)
        return _moment(
            f"reducing gradients of the {block.position} block's experts",
            held,
            saved_activations=-block.freed - (0 if recomputed else freed),
            recomputed_activations=max(0, recomputed - freed),
            gathered_weights=self.two_blocks,
            gradients=block.gradient_shards + gradients + (0 if self.shards_experts else block.sent_gradients),
            other=s.R * D * s.w + self.hidden,
        )

    def _most_expert_gradients(self, experts: WeightUnit) -> int:
        """Return the most bytes that one MoE layer needs while its experts' gradients are added to the step's sums.

        `experts` are the layer's trained experts.
        """
        elements, fold, w = experts.full_size, self.s.fold, self.s.w
        reduced, width = self.reduced_width, self.weight_width
        if not self.shards_experts:
            if self.accumulated:
                return 2 * elements * w // 3  # both that the first products return together
            summed = max(width, reduced) if fold.edp_replicate > 1 else width
            return elements * summed + elements * w // 3 * (summed != w)
        outputs = experts.shard_size(fold.edp) * reduced * (2 if fold.edp_replicate > 1 else 1)
        outputs += experts.shard_size(fold.edp) * width * (width < reduced)
        return elements * reduced + max(elements * w, outputs + elements * w // 3)

    # ---- the vocabulary

    def _head(self) -> Iterator[Moment]:
        """Yield the moments of the head and the loss on a rank of the last stage, where no other stage shares them."""
        s, D = self.s, self.s.model.dim
        unit, (V, width) = s.sizes.head, self._head_widths()
        normed = s.T * D * (2 * s.W + s.w) + (s.X * D * s.w if s.fold.tp > 1 else 0)
        gathered = unit.full_size * s.w if self.reshards else 0
        block = s.sizes.block(s.model.num_layers - 1).full_size * s.w if self.reshards else 0
        for held in map(self._held, self.loads):
            if width < V:
                yield _moment(
                    "backward of the chunked loss",
                    held,
                    logits=normed + s.X * width * s.w + s.X * D * (4 + s.w),
                    gradients=unit.trained.full_size * s.w,
                    gathered_weights=gathered + block,
                )
                continue
            yield _moment(
                "the loss",
                held,
                logits=normed + s.X * V * (s.w if s.w < 4 else 0) + 3 * s.X * V * s.W,
                # Weights arrive in a buffer that FSDP keeps until the next ones do.
                gathered_weights=gathered * (2 if fsdp(s.fold) > 1 else 1),
            )
            yield _moment(
                "backward of the head",
                held,
                logits=normed + s.X * V * (s.w + s.W),
                gradients=0 if self.is_pipelined else unit.trained.full_size * (s.w + self.reduced_width),
                gathered_weights=gathered + block,
            )
        if not self.is_pipelined:
            trained, reduced = self.edge.trained, self.reduced_width
            yield _moment(
                "reducing gradients of the head",
                held,
                gradients=trained.full_size * (s.w + reduced) + trained.shard_size(fsdp(s.fold)) * reduced,
                other=self.hidden,
            )

    def _shared_vocabulary(self) -> Iterator[Moment]:
        """Yield the moments of passes T and D (titanmoe.fold.vocabulary_passes); the vocabulary has to be shared."""
        s, D, embedding, head = self.s, self.s.model.dim, self.shared[0].trained, self.shared[-1].trained
        (V, width), X = self._head_widths(), self._predictions() * s.X
        for load in self.loads:
            begun = any(load.begun)
            if begun and not self.interleaves:  # all passes come before the first backward
                continue
            summed = 0 if begun else head.full_size * self.reduced_width
            logits = self._scored_bytes() - self.held_logits + X * width * s.w * (width < V) + X * D * (s.W + s.w)
            held = self._held(load)
            yield _moment("backward of the head", held, logits=logits, gradients=summed + head.full_size * s.w)
            yield _moment("backward of the embedding", held, gradients=embedding.full_size * s.w, other=X * D * s.w)

    def _head_widths(self) -> tuple[int, int]:
        """Return the number of ids in a rank's shard of the head, and in a slice of it, which may be all."""
        s, requested = self.s, self.s.config.training.loss_chunks
        V = -(-s.model.vocab_size // vocabulary_ranks(s.config, s.fold))
        chunks = min(max(-(-self._predictions() * s.X * V * s.W // SLICE) if requested == -1 else requested, 1), V)
        width = -(-V // chunks)
        return V, min(V, width + (-width % 128 if width >= 1024 else 0))

    def _predictions(self) -> int:
        """Return how many labels of each position the head has at once: more with MTP if all stages share it."""
        return 1 + self.s.model.mtp_depth * (self.s.config.parallelism.vocab == "pipeline")

    def _scored_bytes(self) -> int:
        """Return the bytes of a microbatch between the passes S and T: hidden states, and logits if not sliced."""
        s, D, (V, width) = self.s, self.s.model.dim, self._head_widths()
        each = s.T * D * s.w + s.X * D * s.w * (s.fold.tp > 1) + s.X * V * s.w * (width == V)
        return self._predictions() * each

    # ---- after the last microbatch of a pipeline

    def _last_reduction(self) -> Moment:
        """Return the moment at which a pipeline's gradients are reduced, one unit after the other."""
        units = [*self.dense, *(self.experts if self.shards_experts else [])]
        largest = max(unit.trained.full_size for unit in units)
        gradients = sum(self.gradients_by_stage) + largest
        # FSDP frees a unit's gathered weights before it reduces their gradients.
        return _moment(
            "reducing gradients after the last microbatch",
            self.in_passes,
            gathered_weights=-largest * self.s.w * (not self.reshards),
            gradients=gradients * self.reduced_width,
        )


def _moment(name: str, held: dict[str, int], **more: int) -> Moment:
    """Return the moment at which `more` bytes of components, with _ for spaces, are added to those in `held`."""
    components = dict(held)
    for key, value in more.items():
        key = key.replace("_", " ")
        components[key] = components.get(key, 0) + value
    return Moment(name, components)
