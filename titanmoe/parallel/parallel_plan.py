"""The plan of tensor, sequence and expert parallel: which module is laid on which mesh, in what style.

    layers.*.attention        TensorParallel
    layers.*.attention.wk     Sharded          weight 0          up to 8 ranks
    layers.*.moe.router       StageReplicated  weight
    layers.*.moe.experts      ExpertParallel   w1 1, w3 1, w2 2

`make_plan` makes such rows for a pipeline stage (`titanmoe fold RECIPE --plan` prints them), `parallelize` applies them
by torch's `parallelize_module`. Our styles shard parameters and tell a module its group; the module gathers and
scatters in its own forward. `sum_replicated` sums gradients of replicated parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.models.tensors import Tuning
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary_shards import VocabularyShards
from titanmoe.parallel.grad_norm import local_grad


def put_on_mesh(module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Replace a module's parameter, which is on meta, by a DTensor on a mesh, in place, without communication.

    Args:
        placements: placement on each axis of the mesh.
    """
    parameter = getattr(module, name)
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    on_mesh = distribute_tensor(full, mesh, placements, src_data_rank=None)
    setattr(module, name, nn.Parameter(on_mesh, requires_grad=parameter.requires_grad))


# ---- styles

SummedOver = Literal["tp", "etp", "stage"]
"""Ranks over which `sum_replicated` sums the gradient of a replicated parameter, once per step.

"stage" is all ranks of the pipeline stage, for routers, which FSDP does not shard: cp x tp (`Meshes.sequence`), and
then data ranks (`Meshes.data`). FSDP, or titanmoe.parallel.unsharded, sums all other gradients over data ranks.
"""


@dataclass
class Sharded(ParallelStyle):
    """A style that shards a module's own parameters over tp."""

    dims: dict[str, int | None]
    """Dim of each parameter that the mesh's last axis shards; None to replicate the parameter."""
    max_tp: int | None = None
    """Largest number of ranks that shard. With more all parameters are replicated, as keys are beyond the key heads."""
    mesh: ClassVar[Literal["tp", "ep x etp", "stage", "pp x tp"]] = "tp"
    other_axes: ClassVar[Placement] = Replicate()
    summed_over: ClassVar[SummedOver] = "tp"
    """Ranks that sum the gradients of the parameters that the style replicates."""

    def replicates(self, name: str, ranks: int) -> bool:
        """Return whether each rank of the mesh's last axis has the full parameter: its dim is None, or ranks > max_tp.

        Args:
            name: a key of `dims`.
            ranks: number of tp ranks, compared with max_tp.
        """
        return self.dims[name] is None or (self.max_tp is not None and ranks > self.max_tp)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in self.dims.items():
            last = Replicate() if self.replicates(name, device_mesh.size()) else Shard(dim)
            put_on_mesh(module, name, device_mesh, [self.other_axes] * (device_mesh.ndim - 1) + [last])
        return module


class Replicated(Sharded):
    """A style that replicates a module's own parameters over tp: each rank uses them for its own tokens or heads."""


class TensorParallel(Sharded):
    """A style for modules whose forward gathers the tokens of tp and scatters its output: sets their `tp` group."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.tp = Group.of(device_mesh.get_group())
        return super()._apply(module, device_mesh)


class VocabularyParallel(Sharded):
    """A style that shards the rows of embedding and head over pp and tp together, in `VocabularyShards`."""

    mesh = "pp x tp"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.pp_tp = Group.of(device_mesh.get_group())
        return super()._apply(module, device_mesh)


class ExpertParallel(Sharded):
    """A style that shards the experts over ep, and the hidden width of each over etp."""

    mesh, other_axes, summed_over = "ep x etp", Shard(0), "etp"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.etp_rank = device_mesh.get_coordinate()[-1]
        return super()._apply(module, device_mesh)


class StageReplicated(Replicated):
    """The style of routers: replicates the few parameters over all ranks of a pipeline stage, outside FSDP."""

    mesh = summed_over = "stage"


# ---- the plan

Plan = dict[str, Sharded]
"""Styles by module path. In a path, `*` stands for the number of any layer, `{0,2}` for layer 0 or 2."""
GATHERING = re.compile(r"(embed|embed_copy|head|.*\.(?:attention|ffn|shared))\..*")
"""Pattern of the parameters of modules whose forward gathers and scatters if tp shards anything in them."""


def make_plan(config: Config, layers: Iterable[int], first: bool = True, last: bool = True) -> Plan:
    """Return the plan of a pipeline stage: the style of each module with parameters, by path or pattern of paths.

    Args:
        config: the recipe of the full model.
        layers: the numbers of the stage's layers.
        first: whether the stage begins with the embedding.
        last: whether the stage ends with the head, and multi-token prediction before that.
    """
    model, tuning, max_tp = config.model, Tuning.of(config), {}
    splits, of_blocks = tensors.edge_splits(model, first, last), mixers(model)
    if config.parallelism.vocab == "pipeline":
        shared = *tensors.VOCABULARY, "embed_copy.weight"
        splits = {name: split for name, split in splits.items() if name not in shared}
    for layer in [*layers, *range(model.num_layers, len(of_blocks) if last else 0)]:
        block, mixer = tensors.block_name(model, layer), of_blocks[layer]
        splits |= tensors.with_prefix(block, tensors.layer_splits(model, layer, mixer, tuning))
        max_tp |= {f"{block}.attention.{module}": ranks for module, ranks in mixer.max_tp(model).items()}
    owners = {name: match[1] for name in splits if (match := GATHERING.fullmatch(name))}
    gathering = {owner for name, owner in owners.items() if splits[name][1] is not None}
    rows: dict[str, dict[str, int | None]] = {}
    for name, (_, dim) in splits.items():
        path, _, parameter = name.rpartition(".")
        if owners.get(name) in gathering:
            rows.setdefault(owners[name], {})
        rows.setdefault(path, {})[parameter] = dim

    def style(path: str) -> Sharded:
        dims = rows[path]
        if path in gathering:
            return TensorParallel(dims)
        if path.endswith(".experts"):
            return ExpertParallel(dims)
        if any(dim is not None for dim in dims.values()):
            return Sharded(dims, max_tp.get(path))
        return (StageReplicated if path.endswith(".router") else Replicated)(dims)

    return with_patterns({path: style(path) for path in rows})


def vocabulary_plan() -> Plan:
    """Return the plan of the embedding and the head that all pipeline stages share, by the paths "embed" and "head"."""
    return {name.removesuffix(".weight"): VocabularyParallel({"weight": 0}) for name in tensors.VOCABULARY}


def with_patterns(rows: Plan) -> Plan:
    """Return the plan with one row, by a pattern, for the modules of equal name and style in several layers.

    Args:
        rows: styles by path, such as "layers.3.attention.wq". Patterns are such as "layers.*.attention.wq", with the
            layers' numbers in braces in place of * if not all layers have the row.
    """
    by_style: dict[tuple[str, str], list[str]] = {}
    for path, style in rows.items():
        pattern = re.sub(r"^layers\.\d+\.", "layers.*.", path)
        by_style.setdefault((pattern, repr(style)), []).append(path)
    layers = {path.split(".")[1] for path in rows if path.startswith("layers.")}
    plan = {}
    for (pattern, _), paths in by_style.items():
        if "*" in pattern and len(paths) < len(layers):
            pattern = pattern.replace("*", f"{{{','.join(path.split('.')[1] for path in paths)}}}")
        plan[pattern] = rows[paths[0]]
    return plan


def expand(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with each pattern replaced by the paths of the model's modules that it matches.

    `parallelize_module` takes patterns too, but only warns where one matches nothing, and does not see parameters that
    no row lists.

    Raises:
        ConfigError: if a pattern matches no module, or a parameter is in no row, or a row lists one that is missing.
    """
    paths, rows, problems = [path for path, _ in model.named_modules()], {}, []
    for pattern, style in plan.items():
        regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(r"\{", "(").replace(r"\}", ")").replace(",", "|")
        matched = list(filter(re.compile(regex).fullmatch, paths))
        rows |= dict.fromkeys(matched, style)
        problems += [] if matched else [f"the parallel plan has {pattern}, which is the name of no module"]
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    listed = {f"{path}.{parameter}" for path, style in rows.items() for parameter in style.dims}
    problems += [f"the parallel plan lists {name}, which the model does not have" for name in sorted(listed - names)]
    problems += [f"no row of the parallel plan lists {name}" for name in sorted(names - listed)]
    if problems:
        raise ConfigError(problems)
    return rows


def parallelize(model: Transformer | VocabularyShards, plan: Plan, meshes: Meshes) -> None:
    """Replace a stage's parameters by DTensors as the plan says, in place; then tie embeddings. No communication.

    Where tp, or ep x etp, is a single rank, its styles are not applied: their parameters stay plain tensors. Sets the
    stage's `summed_over` too.

    Args:
        model: a pipeline stage, or the rows of embedding and head that all stages share, on meta.
        plan: styles by module path or pattern.

    Raises:
        ConfigError: if the plan does not list exactly the model's parameters.
    """
    rows, by_name = expand(plan, model), {"stage": meshes.dense}
    if meshes.tp.size > 1:
        by_name["tp"] = meshes.dense["tp"]
    if meshes.expert_group.size > 1:
        by_name["ep x etp"] = meshes.experts["ep", "etp"]
    if meshes.vocabulary_mesh is not None:
        by_name["pp x tp"] = meshes.vocabulary_mesh["vocabulary"]
    for name, mesh in by_name.items():
        parallelize_module(model, mesh, {path: style for path, style in rows.items() if style.mesh == name})
    model.summed_over = summing_ranks(rows, meshes.tp.size)
    model.tie()


# ---- gradients


def summing_ranks(rows: Plan, tp: int) -> dict[str, SummedOver]:
    """Return by full name, for each parameter that the plan replicates, the ranks that sum its gradient.

    Args:
        rows: styles by module path, as `expand` returns them.
        tp: number of tp ranks; a style whose `max_tp` is smaller replicates its parameters.
    """
    return {
        f"{path}.{name}": style.summed_over
        for path, style in rows.items()
        for name in style.dims
        if style.replicates(name, tp)
    }


@torch.no_grad()
def sum_replicated(
    parameters: Mapping[str, nn.Parameter], summed_over: Mapping[str, SummedOver], meshes: Meshes
) -> None:
    """Sum the gradients of replicated parameters over the ranks that the plan names, in place. Called once per step.

    Collective over these ranks, with one message per group and dtype; over a stage two, the first over cp x tp.

    Args:
        parameters: this rank's trained parameters with gradients, by name.
        summed_over: the ranks that sum the gradient of each replicated parameter, by name.
    """
    groups_of: dict[SummedOver, tuple[Group, ...]] = {
        "stage": (meshes.sequence, meshes.data),
        "tp": (meshes.tp,),
        "etp": (meshes.etp,),
    }
    grads_by_groups: dict[tuple[tuple[Group, ...], torch.dtype], list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        groups = groups_of[summed_over[name]] if name in summed_over else ()
        if any(group.size > 1 for group in groups):
            grad = local_grad(parameter)
            grads_by_groups.setdefault((groups, grad.dtype), []).append(grad)
    for (groups, _), grads in grads_by_groups.items():
        total = torch.cat([grad.flatten() for grad in grads])
        for group in groups:
            total = all_reduce(total, group)
        for grad, summed in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))
