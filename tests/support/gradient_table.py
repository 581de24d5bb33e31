"""Makes the table of docs/parallelism.md on what sums each parameter's gradient over which axis, from small steps.

    python -m tests.support.gradient_table                      write the table into docs/parallelism.md

Rank r's local gradient of every parameter is replaced by 8^r right after backward. The octal digits of the summed
gradient show how often each rank was added, and thus over which axes; the parameter's placement shows by what.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from tests import parity, world
from tests.support import case_features
from tests.support.blame import DATA, sharded_axes, sums_in_backward, view_of, what_sums
from titanmoe.config.fields import replace_marked
from titanmoe.fold.degrees import Fold
from titanmoe.fold.rank_groups import coordinates, group_of
from titanmoe.moe.router import Router

PAGE = Path(__file__).resolve().parents[2] / "docs/parallelism.md"
BEGIN, END = "<!-- gradients: written by `python -m tests.support.gradient_table` -->", "<!-- end of gradients -->"
AXES = {
    "attention": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "experts": ("pp", "edp_replicate", "edp", "ep", "etp"),
}

BASE = 8
EVERYTHING = (
    case_features.MODELS["gpt_oss"]
    | case_features.MODELS["qwen2_moe"]
    | {"model.qk_norm": "full", "model.sliding_window": 0, "model.full_attention_every": 1}
)
LATENT = case_features.MODELS["deepseek_v3"] | {"model.mtp_depth": 1}
SMALL = {"model.qk_norm": "head", "model.mtp_depth": 1, "model.num_kv_heads": 1, "model.qkv_bias": True}
TP_CP = {"parallelism.tp": 2, "parallelism.cp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}
TP_CP["training.global_batch_size"] = 2
DP = {"parallelism.dp_replicate": 2, "training.global_batch_size": 4}
PP = {"parallelism.pp": 2, "training.global_batch_size": 4}
TIED = {"parallelism.tp": 2, "model.tie_embeddings": True, "model.mtp_depth": 1}
CASES: tuple[dict[str, Any], ...] = (
    *(model | mapping for model in (EVERYTHING, LATENT) for mapping in (TP_CP, DP, PP | TIED)),
    *(SMALL | mapping for mapping in (TP_CP, PP, PP | {"parallelism.cp": 2})),
    *(model | PP | {"parallelism.dp_replicate": 2} for model in (SMALL, EVERYTHING)),
)
"""Cases on 4 ranks that together have every kind of parameter with every axis of several ranks."""


@contextmanager
def replace_gradients(modules: Iterable[nn.Module], unsharded: Iterable[nn.Parameter], value: float) -> Iterator[None]:
    """Return a context in which backward gives every parameter the gradient `value` on this rank, before any sum.

    FSDP must allocate its unsharded weights in this context. `modules` are those of the model, `unsharded` the expert
    weights that FSDP does not manage.
    """

    def replaced(grad: torch.Tensor) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return torch.full_like(grad, value)
        local = torch.full_like(grad.to_local(), value)
        return DTensor.from_local(local, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride())

    def made(managed: FSDPParam) -> None:
        is_new = not hasattr(managed, "_unsharded_param")
        make(managed)
        if is_new:
            hooks.append(managed._unsharded_param.register_hook(replaced))

    make = FSDPParam.init_unsharded_param
    routers = (module for module in modules if isinstance(module, Router))
    parameters = chain(unsharded, *(router.parameters() for router in routers))
    hooks = [parameter.register_hook(replaced) for parameter in parameters]
    try:
        with mock.patch.object(FSDPParam, "init_unsharded_param", made):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def contributing_ranks(parameters: dict[str, nn.Parameter], microbatches: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose local gradients were added to each parameter's, by name and in ascending order.

    Local gradients were BASE**rank on every rank, in each of the microbatches. Asserts that each was added once, to an
    embedding or head at most twice. Parameters of which this rank holds no elements are left out.
    """
    counts = {}
    for name, parameter in parameters.items():
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        values = (grad / microbatches).unique().tolist()
        assert len(values) <= 1, f"{name}: its gradient has several values: {values}"
        if values:
            times = [int(values[0] / BASE**rank) % BASE for rank in range(dist.get_world_size())]
            assert sum(n * BASE**rank for rank, n in enumerate(times)) == values[0] > 0, f"{name}: {values[0]}"
            # A stage may hold two copies of the embedding.
            most = 2 if name in ("embed.weight", "embed_copy.weight", "head.weight") else 1
            assert max(times) <= most, f"{name}: times that each rank was added: {times}"
            counts[name] = tuple(rank for rank, n in enumerate(times) if n)
    return counts


def axes_of_group(fold: Fold, seen: str, ranks: tuple[int, ...], rank: int) -> set[str]:
    """Return the axes along which these ranks differ, and assert that they are a full group of these axes.

    `ranks`, in ascending order, include `rank`; `seen` is the view whose axes are meant, "attention" or "experts".
    """
    here = coordinates(fold, seen, rank)
    axes = {a for other in ranks for a, at in coordinates(fold, seen, other).items() if at != here[a]}
    assert ranks == (group_of(fold, seen, tuple(axes), rank) if axes else (rank,)), f"{ranks} are not a group of {axes}"
    return axes


def table_of_step(changes: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return for each of this rank's parameters and each axis of several ranks what sums its gradient.

    The answer comes from placements (`what_sums`); a forward and backward with replaced gradients, and no update,
    assert it. Collective over the world. `changes` are recipe keys.
    """
    trainer = parity.make_trainer(changes, loader=parity.samples())
    fold, rank, batches = trainer.training.fold, dist.get_rank(), trainer.training.loader.next_step()
    engine = trainer.training.gradients.engine
    unsharded = [w.computed for stage in getattr(engine, "stages", [engine]) for w in stage.unsharded_experts.weights]
    with replace_gradients(
        (module for part in trainer.training.stages for module in part.modules()), unsharded, float(BASE**rank)
    ):
        trainer.training.gradients.forward_backward(
            trainer.training.slicer.slices(batches), trainer.training.slicer.count(batches), None
        )
    microbatches = trainer.training.loader.microbatches
    in_backward = contributing_ranks(trainer.training.parameters, microbatches)
    trainer.training.gradients.finish_gradients()
    in_all = contributing_ranks(trainer.training.parameters, microbatches)

    table = {}
    for name in in_all:
        parameter, seen = trainer.training.parameters[name], view_of(trainer.training.parameters[name])
        sizes = fold.attention_axes if seen == "attention" else fold.expert_axes
        during, after = (axes_of_group(fold, seen, ranks[name], rank) for ranks in (in_backward, in_all))
        is_sharded = sharded_axes(parameter)
        row = {}
        for axis in AXES[seen]:
            if sizes[axis] == 1:
                continue
            if axis == "pp":
                row[axis] = "`TiedEmbeddings`" if axis in after else "one stage"
                continue
            row[axis] = what_sums(axis, is_sharded)
            summed = axis in during, axis in after
            want = sums_in_backward(axis, is_sharded), axis in DATA or not is_sharded[axis]
            assert summed == want, (name, axis, row[axis], summed)
        table[name] = row
    return table


def kind_of(name: str) -> str:
    """Return a parameter's name without its layer, such as "moe.router.weight"."""
    return re.sub(r"^(layers\.\d+|mtp\.\d+\.block)\.", "", name).replace("mtp.0.", "mtp.")


def collect() -> dict[str, dict[str, dict[str, set[str]]]]:
    """Return what sums gradients, by view, kind of parameter and axis: one name if all mappings and models agree."""
    out: dict[str, dict[str, dict[str, set[str]]]] = {"attention": {}, "experts": {}}
    for case in CASES:
        for rows in world.run(4, table_of_step, {"training.global_batch_size": 1} | case):
            for name, row in rows.items():
                cells = out["experts" if ".experts." in name else "attention"].setdefault(kind_of(name), {})
                for axis, who in row.items():
                    cells.setdefault(axis, set()).add(who)
    return out


def table() -> str:
    """Return the table for the page, with a row for each set of parameters that are treated alike."""
    lines = []
    for seen, rows in collect().items():
        axes = AXES[seen]
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, cells in rows.items():
            row = tuple(" or ".join(sorted(cells.get(axis, {"?"}))) for axis in axes)
            alike.setdefault(row, []).append(f"`{name}`")
        lines += [f"| {seen} | {' | '.join(axes)} |", "|---" * (len(axes) + 1) + "|"]
        lines += [f"| {', '.join(sorted(names))} | {' | '.join(row)} |" for row, names in sorted(alike.items())]
        lines.append("")
    return "\n".join(lines)


def replace_table(page: str) -> str:
    """Return the page's text with a new table between BEGIN and END, for which steps run on 4 ranks."""
    return replace_marked(page, BEGIN, END, f"\n\n{table()}\n")


if __name__ == "__main__":
    try:
        PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    finally:
        world.shutdown()
    sys.exit()
