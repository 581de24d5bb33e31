"""Peak memory of a rank by component, in closed form: the largest of the moments that can be the peak.

What is saved follows the modules' code as a rehearsal sees it on GPUs (docs/rehearse.md): bytes that tensors ask for,
balanced routing, Triton's kernels, nothing compiled. tests/plan compares every formula here with rehearsals.

Shapes: T tokens a rank owns, X positions of its attention slice (T times tp), R routed tokens, D model, w bytes of the
compute dtype, W at least 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from titanmoe.config.blocks import has_experts, rotary_width
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import read_csv, stage_ranks
from titanmoe.fold.unsharded_experts import experts_are_unsharded, has_compute_copies, reshards_after_forward
from titanmoe.fold.vocabulary_passes import EARLIER_FORWARDS
from titanmoe.models.stages import split_layers
from titanmoe.plan.muon_work import matrix_buffer_bytes
from titanmoe.plan.saved_bytes import Widths, input_bytes, mode_of, saved_bytes
from titanmoe.plan.schedule_cost import FORWARDS_FIRST, BackwardLoad, backward_loads, largest_loads
from titanmoe.plan.sizes import (
    ModelKey,
    WeightUnit,
    fsdp,
    shared_vocabulary,
    state_bytes,
    units_of_stage,
    vocabulary_ranks,
)
from titanmoe.train.find_teacher import find_teacher, teacher_config
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS

SLICE = 2**30
"""Bytes of a chunk of logits on GPUs (titanmoe.models.vocabulary)."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of a pipeline rank's first data rank, which has the most."""

    weights: int
    """Bytes of this rank's shards of the weights."""
    gradients: int
    """Bytes of this rank's shards of the gradients after the step's backward."""
    moments: int
    """Bytes of this rank's optimizer state."""
    components: dict[str, int]
    """Bytes at the peak, by component."""
    peak_during: str
    """Description of the moment of the peak, such as "backward of the last block's experts"."""

    @property
    def peak(self) -> int:
        return sum(self.components.values())


def rank_memories(
    config: Config, fold: Fold, imbalance: float = 1.0, only_ends: bool = False, reference: bool = False
) -> list[RankMemory]:
    """Return the memory of each pipeline rank, in ascending order of ranks.

    Args:
        config: recipe.
        fold: degrees of `config`.
        imbalance: routed tokens of the busiest rank over the mean.
        only_ends: only the first rank, which has most microbatches in flight, and the last, which has the head; without
            a pipeline both are one.
        reference: whether a frozen copy of the model lies beside it. It computes between steps, in less than a step's
            memory, so its weights alone count.
    """
    s = Widths(config, fold, imbalance)
    owners = stage_ranks(config.pipeline, fold.pp)
    shared = config.parallelism.vocab == "pipeline"
    layers = stages_of(config, len(owners), tuple(config.pipeline.layers_per_stage), shared)
    ranks = sorted({0, fold.pp - 1}) if only_ends else range(fold.pp)
    teachers = _teacher_bytes(s, only_ends)
    copies = [0] * len(ranks)
    if reference:
        frozen = replace(config, training=replace(config.training, freeze=["*"]))
        copies = [memory.weights for memory in rank_memories(frozen, fold, only_ends=only_ends)]
    memories = []
    for rank, copy, teacher in zip(ranks, copies, teachers or [0] * len(ranks), strict=True):
        own_stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        memories.append(_rank(s, rank, [(layers[i], i == 0, i == len(owners) - 1) for i in own_stages], teacher, copy))
    return memories


def _teacher_bytes(s: Widths, only_ends: bool) -> list[int]:
    """Return for each pipeline rank the bytes of a teacher's weights and outputs; [] without a teacher."""
    options = s.config.distillation
    if not options.teacher:
        return []
    teacher = teacher_config(s.config, find_teacher(options.teacher))
    outputs = s.microbatches * s.X * (options.top * 8 + (options.top + 1) * s.W)
    return [memory.weights + outputs for memory in rank_memories(teacher, s.fold, only_ends=only_ends)]


@lru_cache(maxsize=1024)
def _stages(key: ModelKey, seq_len: int, stages: int, explicit: tuple[int, ...], shared: bool) -> list[range]:
    return split_layers(key.model, seq_len, stages, list(explicit), shared)


def stages_of(config: Config, stages: int, explicit: tuple[int, ...], shared: bool) -> list[range]:
    """Return the range of layers of each stage, balanced by work unless `explicit` gives their numbers.

    Args:
        config: recipe, for model and seq_len; its [pipeline] is not used.
        stages: number of stages.
        explicit: layers of each stage, as pipeline.layers_per_stage gives them; () to balance.
        shared: whether all stages share the vocabulary.
    """
    return _stages(ModelKey.of(config.model), config.training.seq_len, stages, explicit, shared)


def _rank(s: Widths, rank: int, stages: list[tuple[range, bool, bool]], teacher: int, reference: int) -> RankMemory:
    """Return the memory of one pipeline rank: the largest of all moments of a step that can be the peak.

    Args:
        s: sizes of the recipe under the mapping.
        stages: layers of each stage of the rank, whether it is the first of all stages, and whether it is the last.
        teacher: bytes of the teacher.
        reference: bytes of the reference model.
    """
    config, fold, model, sizes = s.config, s.fold, s.model, s.sizes
    weight_width, w = WIDTHS[config.training.dtype], s.w
    reduced = max(w, WIDTHS[config.training.mixed_precision_reduce])
    data, pipelined = fsdp(fold), fold.pp > 1
    units: list[WeightUnit] = []
    for layers, first, last in stages:
        units += units_of_stage(config, sizes, layers, first, last)[0]
    shared = shared_vocabulary(config, sizes)
    units += shared
    blocks = [i for layers, _, _ in stages for i in layers]
    if any(last for *_, last in stages):
        blocks += range(model.num_layers, model.num_layers + model.mtp_depth)
    sharded_units = [(unit, data) for unit in units]
    expert_units = [(sizes.experts_of(i), fold.edp) for i in blocks if has_experts(model, i)]
    sharded_units += expert_units
    trained = sum(_stored(unit.trained, n, weight_width) for unit, n in sharded_units)
    weights = trained + sum(_frozen_stored(unit, n, w) for unit, n in sharded_units)
    moments = state_bytes(config, fold, sharded_units, stages, blocks, _stored)
    saved_by_block = {i: saved_bytes(s, i) for i in blocks}
    has_head = bool(shared) or any(last for *_, last in stages)
    hidden = s.T * model.dim * w
    rope = 2 * s.X * rotary_width(model) * 4
    extra = range(model.num_layers, model.num_layers + model.mtp_depth)
    # Every stage but the first has its input in a receive buffer, and the pipeline holds every output but the loss.
    saved_by_stage = [
        sum(saved_by_block[i].attention + saved_by_block[i].ffn for i in [*layers, *extra[: last * len(extra)]])
        + rope
        + hidden * (first - (last and not shared))
        # Multi-token prediction: inputs of norms and projection, scales, and hidden states for the head of all stages.
        + last * model.mtp_depth * (hidden * (4 + bool(shared)) + 3 * s.T * s.W)
        for layers, first, last in stages
    ]
    tokens = s.microbatches * s.X * 24
    if shared and model.mtp_depth and any(last for *_, last in stages):
        tokens += min(fold.pp, s.microbatches) * hidden  # embeddings of next tokens, sent when the first stage begins
    loads = _loads(s, rank, len(stages))
    # At most one microbatch is between the passes S and T. On some ranks it never is while another one is in backward;
    # this is not considered, nor that the embedding has no gradients yet in a step's first backward passes.
    interleaves = config.pipeline.schedule not in FORWARDS_FIRST and s.microbatches > EARLIER_FORWARDS
    held_logits = _scored_bytes(s) * (bool(shared) and interleaves)
    buffers = 0
    if pipelined:
        sides = sum((not first) + (not last) for _, first, last in stages)
        buffers = s.microbatches * hidden * sides

    dense, partly = sizes.block(blocks[-1]), not sizes.tuning.trains_all
    gradients_by_stage = [_stage_gradients(s, *stage) for stage in stages]
    gradients_by_stage[-1] += sum(unit.trained.full_size for unit in shared)
    resharded = reshards_after_forward(config.parallelism)
    sharded = not experts_are_unsharded(config.parallelism, config.training, fold.edp)
    accumulated_bytes = trained if s.microbatches > 1 and not pipelined else 0
    base = {"weights": weights, "moments": moments, "teacher": teacher, "reference": reference}
    base["symmetric buffers"] = s.receive_buffers
    gathered_dense = sum(unit.full_size for unit in (shared if resharded else units))
    gathered_experts = 0 if resharded else sum(unit.full_size for unit, _ in expert_units)
    if not sharded:  # the step's copies
        gathered_experts = sum(unit.trained.full_size for unit, _ in expert_units) * has_compute_copies(config.training)
    alive = {"gathered weights": (gathered_dense + gathered_experts) * w}
    candidates: list[tuple[str, dict[str, int]]] = []

    def load_bytes(load: BackwardLoad) -> dict[str, int]:
        saved = sum(count * size for count, size in zip(load.in_flight, saved_by_stage, strict=True))
        summed = (
            sum(elements for elements, begun in zip(gradients_by_stage, load.begun, strict=True) if begun) * reduced
        )
        return {
            "saved activations": round(saved) + tokens,
            "gradients": summed if pipelined else accumulated_bytes,
            "logits": held_logits,
        }

    def add_candidate(name: str, **more: int) -> None:
        components = base | alive | {"pipeline receive buffers": buffers}
        for key, value in more.items():
            key = key.replace("_", " ")
            components[key] = components.get(key, 0) + value
        candidates.append((name, components))

    two_blocks = min(2, len(blocks)) * dense.full_size * w if resharded else 0
    edge = sizes.head if has_head else sizes.embedding
    for load, (name, index) in product(loads, (("last", -1), ("last but one", -2), ("first", 0))):
        is_first_backward = not load.begun[-1]
        if -index > len(blocks) or (name == "first" and (accumulated_bytes or pipelined)):
            continue
        alive |= load_bytes(load)
        layer, finished = blocks[index], blocks[index + 1 :] if index + 1 else []
        flow = s.flows[layer]
        experts, recomputed = has_experts(model, layer), saved_by_block[layer].recomputed
        expert = sizes.experts_of(layer)
        freed = sum(saved_by_block[i].attention + saved_by_block[i].ffn for i in finished)
        unreduced = edge.trained.full_size * has_head + sum(_block_gradients(s, i) for i in finished)
        shards, sent_gradients = 0, unreduced * reduced * is_first_backward
        if not pipelined:
            shards = (
                0
                if accumulated_bytes
                else sum(_block_stored(s, i, weight_width) for i in finished)
                + _stored(edge.trained, data, weight_width)
            )
            # A unit's gradients stay in the buffer that they were sent from until the next unit's are sent.
            sent_gradients = (
                (sizes.block(finished[0]) if finished else edge).trained.full_size
                * reduced
                * (bool(finished) or has_head)
            )
        R, F, D = (s.R, s.F, model.dim) if experts else (s.X, model.dense_hidden // fold.tp, 0)
        add_candidate(
            f"backward of the {name} block's {'experts' if experts else 'FFN'}",
            saved_activations=-freed,
            recomputed_activations=recomputed,
            gathered_weights=two_blocks + (expert.full_size * w if resharded and sharded and experts else 0),
            gradients=shards + sent_gradients,
            other=R * (4 * F * w + 4) + hidden,
            dispatch_buffers=R * D * w,
        )
        # The activation's gradient comes before that of the last product, of which then one operand is left; the
        # gradients of the first products come together, in place of their outputs.
        for thirds, width in ((1, 3 * F + D), (3 if sharded else 2, D)) if pipelined and experts else ():
            add_candidate(
                f"gradients of the {name} block's experts",
                saved_activations=-freed,
                recomputed_activations=recomputed,
                gathered_weights=two_blocks + (expert.full_size * w if resharded and sharded else 0),
                gradients=sent_gradients + expert.trained.full_size * w * thirds // 3,
                other=R * width * w + hidden,
            )
        saved, mixer = saved_by_block[layer], s.mixers[layer]
        if held := mixer.backward_bytes(model, s.batch, mode_of(config, layer) == "selective"):
            stored = 0 if pipelined or accumulated_bytes else _stored(expert.trained, fold.edp, weight_width)
            sent = expert.trained.full_size * reduced * (is_first_backward if pipelined else sharded)
            add_candidate(
                f"backward of the {name} block's {mixer.name}",
                saved_activations=-freed - saved.ffn - saved.attention,
                recomputed_activations=input_bytes(s, layer) + held,
                gathered_weights=dense.full_size * w if resharded else 0,
                gradients=shards + sent_gradients * pipelined + (stored + sent) * experts,
                other=hidden,
            )
        if partly and name == "last" and experts:
            # With few gradients this may be the peak. Gathered weights arrive in a buffer and are copied, and those of
            # the head are being gathered. The last product stands beside the activation, then beside its adapter's.
            unsaved = not saved_by_block[layer].routed  # held here alone if blocks do not save it
            gathered = dense.full_size + edge.full_size + sharded * expert.full_size * (2 if fold.edp > 1 else 1)
            add_candidate(
                "forward of the last block's experts",
                gathered_weights=gathered * w if resharded else 0,
                other=R * (max(F + D, 2 * D * bool(flow.expert_ranks)) + 2 * F * unsaved) * w + hidden,
                dispatch_buffers=R * D * w * (unsaved or not flow.ffn_weights),
            )
        if recomputed and resharded and experts and fold.edp > 1:
            add_candidate(
                f"recomputing the {name} block's experts",
                saved_activations=-freed,
                recomputed_activations=recomputed + R * F * w,
                dispatch_buffers=R * D * w * bool(flow.expert_ranks),
                gathered_weights=two_blocks + 2 * expert.full_size * w,
                gradients=shards + sent_gradients,
                other=hidden,
            )
        if experts and not pipelined:
            freed_routed = saved_by_block[layer].routed or R * (D * w + 4 + 2 * F * w)
            gradients = _layers_gradients(s, expert.trained, reduced, weight_width, bool(accumulated_bytes))
            add_candidate(
                f"reducing gradients of the {name} block's experts",
                saved_activations=-freed - (0 if recomputed else freed_routed),
                recomputed_activations=max(0, recomputed - freed_routed),
                gathered_weights=two_blocks,
                gradients=shards + gradients + (0 if sharded else sent_gradients),
                other=R * D * w + hidden,
            )
    if shared:
        for load in loads:
            alive |= load_bytes(load)
            if interleaves or not any(load.begun):  # without, all passes come before the first backward
                summed = 0 if any(load.begun) else shared[-1].trained.full_size * reduced
                _shared_vocabulary(s, add_candidate, shared, held_logits, summed)
    elif has_head:
        for load in loads:
            alive |= load_bytes(load)
            _head(s, add_candidate, resharded, pipelined, reduced)
        if not pipelined:
            add_candidate(
                "reducing gradients of the head",
                gradients=edge.trained.full_size * (w + reduced) + edge.trained.shard_size(data) * reduced,
                other=hidden,
            )
    if pipelined:
        largest = max(unit.trained.full_size for unit, _ in (sharded_units if sharded else sharded_units[: len(units)]))
        alive |= {"saved activations": 0, "gradients": sum(gradients_by_stage) * reduced, "logits": 0}
        # FSDP frees a unit's gathered weights before it reduces their gradients.
        add_candidate(
            "reducing gradients after the last microbatch",
            gathered_weights=-largest * w * (not resharded),
            gradients=largest * reduced,
        )
    if OPTIMIZERS.look_up(config.optimizer.name).numbers_per_matrix_weight:
        update = base | {"gradients": trained, "other": matrix_buffer_bytes(config, fold)}
        candidates.append(("the update of matrices", update))
    name, components = max(candidates, key=lambda candidate: sum(candidate[1].values()))
    return RankMemory(weights, trained, moments, {k: v for k, v in components.items() if v}, name)


def _stored(unit: WeightUnit, ranks: int, width: int) -> int:
    """Return the bytes of a unit's shard on the first of `ranks` data ranks. Routers are in float32 at least.

    Args:
        width: bytes of a number.
    """
    wide = sum(unit.replicated)
    return (unit.shard_size(ranks) - wide) * width + wide * max(width, 4)


def _frozen_stored(unit: WeightUnit, ranks: int, w: int) -> int:
    """Return the bytes of a unit's frozen tensors on the first of `ranks` data ranks, stored in the compute dtype.

    Args:
        w: bytes of the compute dtype.
    """
    return _stored(unit, ranks, w) - _stored(unit.trained, ranks, w)


def _layers_gradients(s: Widths, experts: WeightUnit, reduced: int, width: int, accumulated: bool) -> int:
    """Return the most bytes that one MoE layer needs while its experts' gradients are added to the step's sums.

    Args:
        experts: the layer's trained experts.
        reduced: bytes of a gradient while it is reduced.
        width: bytes of a stored weight.
        accumulated: whether the step's sums exist already, from earlier microbatches.
    """
    elements, fold = experts.full_size, s.fold
    if experts_are_unsharded(s.config.parallelism, s.config.training, fold.edp):
        if accumulated:
            return 2 * elements * s.w // 3  # both that the first products return together
        summed = max(width, reduced) if fold.edp_replicate > 1 else width
        return elements * summed + elements * s.w // 3 * (summed != s.w)
    outputs = experts.shard_size(fold.edp) * reduced * (2 if fold.edp_replicate > 1 else 1)
    outputs += experts.shard_size(fold.edp) * width * (width < reduced)
    return elements * reduced + max(elements * s.w, outputs + elements * s.w // 3)


def _block_stored(s: Widths, layer: int, width: int) -> int:
    """Return the bytes of a rank's shard of a block's trained weights. `width`: bytes of a stored weight."""
    experts = _stored(s.sizes.experts_of(layer).trained, s.fold.edp, width) if has_experts(s.model, layer) else 0
    return _stored(s.sizes.block(layer).trained, fsdp(s.fold), width) + experts


def _block_gradients(s: Widths, layer: int) -> int:
    """Return the elements of a block's gradients on a rank before data ranks shard them."""
    experts = s.sizes.experts_of(layer).trained.full_size if has_experts(s.model, layer) else 0
    return s.sizes.block(layer).trained.full_size + experts


def _stage_gradients(s: Widths, layers: range, first: bool, last: bool) -> int:
    """Return the elements of a stage's gradients on a rank before data ranks shard them.

    Args:
        s: weight sizes of the rank.
        layers: layers of the stage.
        first: whether the stage has the embedding.
        last: whether the stage has the head, and so the blocks of multi-token prediction.
    """
    extra = range(s.model.num_layers, s.model.num_layers + s.model.mtp_depth * last)
    units = units_of_stage(s.config, s.sizes, layers, first, last)[0]
    units += [s.sizes.experts_of(i) for i in (*layers, *extra) if has_experts(s.model, i)]
    return sum(unit.trained.full_size for unit in units)


def _loads(s: Widths, rank: int, stages: int) -> list[BackwardLoad]:
    """Return the microbatches in flight and gradients begun in those backward passes of a rank that may be the peak.

    Args:
        s: recipe and mapping.
        rank: pipeline rank.
        stages: number of stages of the rank.
    """
    options = s.config.pipeline
    if s.fold.pp == 1:
        return [BackwardLoad((1.0,), (False,))]
    if options.schedule_csv:
        return largest_loads(read_csv(options.schedule_csv)[rank])
    shared = s.config.parallelism.vocab == "pipeline"
    return backward_loads(options.schedule, s.fold.pp, stages, s.microbatches, rank, shared)


def _head(s: Widths, add_candidate: Callable[..., None], resharded: bool, pipelined: bool, reduced: int) -> None:
    """Add the moments of the head and the loss as candidates for the memory peak.

    Args:
        s: sizes of the recipe under the mapping.
        add_candidate: called with the name of a moment, and bytes by component as keywords.
        resharded: whether weights are freed between uses.
        pipelined: whether there is a pipeline.
        reduced: bytes of a gradient while it is reduced.
    """
    model, X, T, D, w = s.model, s.X, s.T, s.model.dim, s.w
    unit, (V, width) = s.sizes.head, _head_widths(s)
    normed = T * D * (2 * s.W + w) + (X * D * w if s.fold.tp > 1 else 0)
    gathered = unit.full_size * w if resharded else 0
    block = s.sizes.block(model.num_layers - 1).full_size * w if resharded else 0
    if width == V:
        logits = X * V * (w if w < 4 else 0) + 3 * X * V * s.W
        # Weights arrive in a buffer that FSDP keeps until the next ones do.
        arrived = gathered * (2 if fsdp(s.fold) > 1 else 1)
        add_candidate("the loss", logits=normed + logits, gathered_weights=arrived)
        add_candidate(
            "backward of the head",
            logits=normed + X * V * (w + s.W),
            gradients=0 if pipelined else unit.trained.full_size * (w + reduced),
            gathered_weights=gathered + block,
        )
        return
    add_candidate(
        "backward of the chunked loss",
        logits=normed + X * width * w + X * D * (4 + w),
        gradients=unit.trained.full_size * w,
        gathered_weights=gathered + block,
    )


def _head_widths(s: Widths) -> tuple[int, int]:
    """Return the number of ids in a rank's shard of the head, and in a slice of it, which may be all."""
    V = -(-s.model.vocab_size // vocabulary_ranks(s.config, s.fold))
    requested = s.config.training.loss_chunks
    chunks = min(max(-(-_predictions(s) * s.X * V * s.W // SLICE) if requested == -1 else requested, 1), V)
    width = -(-V // chunks)
    return V, min(V, width + (-width % 128 if width >= 1024 else 0))


def _predictions(s: Widths) -> int:
    """Return how many labels of each position the head has at once: with multi-token prediction 2 if all share it."""
    return 1 + s.model.mtp_depth * (s.config.parallelism.vocab == "pipeline")


def _scored_bytes(s: Widths) -> int:
    """Return the bytes that a microbatch has between the passes S and T: hidden states, and logits if not sliced."""
    V, width = _head_widths(s)
    each = s.T * s.model.dim * s.w + s.X * s.model.dim * s.w * (s.fold.tp > 1) + s.X * V * s.w * (width == V)
    return _predictions(s) * each


def _shared_vocabulary(
    s: Widths, add_candidate: Callable[..., None], units: list[WeightUnit], held_logits: int, summed: int
) -> None:
    """Add the moments of the passes T and D as candidates for the memory peak, if all stages share the vocabulary.

    Args:
        s: sizes of the recipe under the mapping.
        add_candidate: called with the name of a moment, and bytes by component as keywords.
        units: those of the embedding and, unless it is tied, the head.
        held_logits: bytes of the logits that candidates have already.
        summed: bytes of the head's gradients that candidates do not have, since no stage has begun its own.
    """
    (V, width), X = _head_widths(s), _predictions(s) * s.X
    sliced = X * width * s.w * (width < V)
    add_candidate(
        "backward of the head",
        logits=_scored_bytes(s) - held_logits + sliced + X * s.model.dim * (s.W + s.w),
        gradients=summed + units[-1].trained.full_size * s.w,
    )
    add_candidate("backward of the embedding", gradients=units[0].trained.full_size * s.w, other=X * s.model.dim * s.w)
