"""Apply sharded data parallel (FSDP2) and HSDP, on each view's own data axes.

Gradients are summed over data ranks and never divided: the loss is divided once, by the step's global token count.

Routers are replicated on every rank, as the plan lays them out (titanmoe.parallel.parallel_plan). They compute in at
least float32, so each would be an FSDP unit of its own among 16-bit units. FSDP gathers and reduces one unit after the
other, so a matrix of E x D would cost two gathers and a reduction per layer and microbatch, and the experts would wait
for them. `sum_replicated` sums their gradients once per step over all ranks of the stage: cp x tp, then data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanmoe.config.schema import Parallelism, Training
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.unsharded_experts import experts_are_unsharded, reshards_after_forward
from titanmoe.models.tensors import expert_data_dim
from titanmoe.models.transformer import Block, Transformer
from titanmoe.models.vocabulary_shards import VocabularyShards
from titanmoe.moe.experts import Experts
from titanmoe.ops import device
from titanmoe.ops.cpu.fsdp import use_gloo_collectives
from titanmoe.parallel.parallel_plan import put_on_mesh


def shard_experts_on_model_dim(num_experts: int, ep: int, edp: int) -> bool:
    """Return whether FSDP shards experts along the model dim, because edp does not divide a rank's experts.

    Along the experts the shards would be uneven, and FSDP would pad them, to as much as edp times the bytes.
    """
    return num_experts // ep % edp != 0


def _on_model_dim(experts: Experts) -> Callable[[nn.Parameter], Shard]:
    placements = {id(parameter): Shard(expert_data_dim(name)) for name, parameter in experts.named_parameters()}
    return lambda parameter: placements[id(parameter)]


def replicate_experts(model: Transformer, meshes: Meshes) -> set[nn.Parameter]:
    """Replace parameters of a stage's experts by DTensors that edp_replicate and edp replicate, in place; return these.

    For experts that no two data ranks shard: edp is 1. `model` is the stage, on meta; parameters that ep or etp divide
    stay divided. No communication.
    """
    layers = [moe.experts for moe in model.moe_layers().values()]
    for experts in layers:
        for name, parameter in list(experts.named_parameters()):
            within = parameter.placements if isinstance(parameter, DTensor) else (Replicate(), Replicate())
            put_on_mesh(experts, name, meshes.experts, [Replicate(), Replicate(), *within])
    return {parameter for experts in layers for parameter in experts.parameters()}


def apply_fsdp(model: Transformer, training: Training, parallelism: Parallelism, meshes: Meshes) -> None:
    """Wrap a stage, its blocks, its experts, embedding and head in FSDP units, in place. No communication.

    Experts are a unit on the experts' data axes, all else on attention's. Routers are in no unit, nor are experts that
    one data rank has alone (titanmoe.parallel.unsharded). Head and tied embedding stay gathered after forward. Also
    sets what blocks prefetch, and whether experts cache their weights in 8 bits.

    Args:
        model: the stage, on meta.
        parallelism: the recipe's [parallelism], for reshard_after_forward.
    """
    freed, policy = reshards_after_forward(parallelism), _precision(training)
    unsharded = experts_are_unsharded(parallelism, training, meshes.fold.edp)
    ignored = {parameter for moe in model.moe_layers().values() for parameter in moe.router.parameters()}
    if unsharded:
        ignored |= replicate_experts(model, meshes)
    options = dict(mesh=meshes.dense_data, reshard_after_forward=freed, ignored_params=ignored, mp_policy=policy)
    on_model_dim = shard_experts_on_model_dim(model.shape.num_experts, meshes.fold.ep, meshes.fold.edp)
    for block in model.blocks().values():
        if block.moe is not None:
            if not unsharded:
                fully_shard(
                    block.moe.experts,
                    **options | {"mesh": meshes.expert_data},
                    shard_placement_fn=_on_model_dim(block.moe.experts) if on_model_dim else None,
                )
            block.moe.experts.rounded.keep = not freed or meshes.fold.edp == 1
        fully_shard(block, **options)
    # Not freed, because backward begins with them at once: the head, and what is in no block (a tied embedding).
    last = options | {"reshard_after_forward": False}
    for embedding in (model.embed_copy,) if model.shape.tie_embeddings else (model.embed, model.embed_copy):
        if embedding is not None:
            fully_shard(embedding, **options)
            embedding.set_unshard_in_backward(False)  # the gradient of a lookup needs no weights
    if model.head is not None and not model.shape.tie_embeddings:
        fully_shard(model.head, **last)
    fully_shard(model, **last)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_gradients(module, meshes.expert_data if isinstance(module, Experts) else meshes.dense_data)
    _prefetch(model, meshes, freed)


def apply_fsdp_to_vocabulary(shards: VocabularyShards, training: Training, meshes: Meshes) -> None:
    """Wrap the rows of embedding and head that all stages share in one FSDP unit, in place. They are on meta.

    The unit, on `meshes.vocabulary_data`, is not freed after a forward: a step's passes need it from beginning to end.
    """
    mesh = meshes.vocabulary_data
    fully_shard(shards, mesh=mesh, reshard_after_forward=False, mp_policy=_precision(training))
    _sum_gradients(shards, mesh)


def _precision(training: Training) -> MixedPrecisionPolicy:
    """Return the dtypes of gathered weights and of reductions, the latter at least as wide. Inputs are not cast."""
    param, reduce = getattr(torch, training.mixed_precision_param), getattr(torch, training.mixed_precision_reduce)
    return MixedPrecisionPolicy(param, torch.promote_types(param, reduce), cast_forward_inputs=False)


def _sum_gradients(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Let an FSDP unit sum its gradients over its mesh, and on CPUs communicate over gloo by our own collectives."""
    if mesh.size() > 1:  # else torch would divide every number by 1.0
        module.set_gradient_divide_factor(1.0)
    if over_gloo := device.choose(mesh.device_type, None, cpu=use_gloo_collectives):
        over_gloo(module, mesh)
    module.set_force_sum_reduction_for_comms(True)


def free_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP holds gathered, as it does after a forward without backward. No communication."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _prefetch(model: Transformer, meshes: Meshes, freed: bool) -> None:
    """Set which weights each layer prefetches: its experts' and the next one's or the head's; in backward those before.

    Only weights that more than one rank shards; the block of multi-token prediction prefetches nothing.

    A dropless dispatcher makes the host wait until routed tokens are counted, and the device would then wait for the
    weights. Blocks prefetch, not experts: the experts' hooks run a second time under recomputation, and weights
    gathered in backward would be outdated in the next forward.

    Args:
        model: a pipeline stage whose FSDP units are wrapped.
        freed: whether forward frees gathered weights after use; if not, backward prefetches nothing.
    """
    # The last axis shards; an axis before it replicates.
    dense, experts = (mesh.size(mesh.ndim - 1) > 1 for mesh in (meshes.dense_data, meshes.expert_data))

    def units(block: Block, and_then: nn.Module | None) -> list[nn.Module]:
        prefetched = [block.moe.experts] if experts and block.moe is not None else []
        return [*prefetched, and_then] if dense and and_then is not None else prefetched

    blocks = list(model.layers.values())
    head = model.head if isinstance(model.head, FSDPModule) else None
    for block, before, after in zip(blocks, [None, *blocks], [*blocks[1:], head], strict=False):
        block.set_modules_to_forward_prefetch(units(block, after))
        if freed:  # else backward gathers nothing
            block.set_modules_to_backward_prefetch(units(block, before))
