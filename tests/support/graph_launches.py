"""Counts the kernel launches of a MoE layer on an H100: eager with our kernels, and as one graph of torch.compile.

    python -m tests.support.graph_launches qwen3_30b_a3b mixtral_8x7b deepseek_671b gpt_oss_20b

prints a table, on any machine: eager layers from a rehearsal of the recipe's step, graphs from the code that inductor
writes for them (tests.parallel.test_compiled_on_gpus). The experts' products and activations are left out, because both
run the same ones. A step has one sample of the recipe's length, ep ranks, and no other axis. B samples, s owned
positions, D model.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parallel import test_compiled_on_gpus as on_gpus
from tests.support.launches import shrink
from titanmoe.config.schema import Config
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.ops.device import HARDWARE, imitate
from titanmoe.rehearse.code_site import GATHER, REDUCE
from titanmoe.rehearse.operation_costs import PICKS_ROWS
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

RECIPES = Path(__file__).resolve().parents[2] / "train_configs"
PRODUCTS = ("_grouped_mm", "weighted_swiglu", "weighted_swiglu_backward")
EXTERN = ("mm", "bmm", "addmm", "mm_dtype")
ONE_RANK = ("pp", "tp", "cp", "dp_replicate", "dp_shard")


@dataclass
class Cost:
    """Cost of a layer's forward or backward."""

    launches: int = 0
    moved: int = 0
    """Bytes read and written."""
    waits: int = 0


Costs = dict[str, Cost]
"""Costs of a layer, with the keys "forward" and "backward"."""


def config_of(recipe: str, ep: int) -> Config:
    """Return the config of train_configs/RECIPE.toml on ep ranks, with few layers and one sample per rank."""
    sizes = {"parallelism.experts.ep": ep, "parallelism.experts.etp": 1, "activation_checkpoint.mode": "none"}
    sizes |= {f"parallelism.{axis}": 1 for axis in ONE_RANK if axis != "dp_shard"} | {"parallelism.dp_shard": ep}
    sizes |= {"moe.overlap": "none", "moe.dispatcher": "alltoall", "pipeline.schedule": "1F1B"}
    sizes |= {"training.local_batch_size": 1, "training.global_batch_size": ep, "compile.enable": False}
    argv = [
        word
        for key, value in sizes.items()
        for word in (f"--{key}", str(value).lower() if value is False else str(value))
    ]
    return shrink(recipe_to_rehearse(["--config", str(RECIPES / f"{recipe}.toml"), *argv], ep, "h100"))


def eager_costs(config: Config, ep: int) -> Costs:
    """Return the costs of the first MoE layer without torch.compile, from a rehearsal of rank 0.

    Attention and FSDP's messages are left out, those of the dispatcher count. `config` is from `config_of`, for the
    same ep.
    """
    rehearsal, costs = rehearse(config, ep, 0, "h100"), {"forward": Cost(), "backward": Cost()}
    layer = f"layers.{rehearsal.moe_layers[0]}"
    for operation, times in rehearsal.operations.items():
        site = operation.site
        if site.layer != layer or site.region in ("", "attention", GATHER, REDUCE):
            continue
        if operation.name in PRODUCTS or (site.region == "experts" and operation.name == "add_"):
            continue
        costs[site.phase].launches += times
        costs[site.phase].moved += times * (operation.read + operation.written)
    for message in rehearsal.log.messages:
        if message.site.layer == layer and rehearsal.groups[message.group].kind == "dispatch":
            cost = costs["backward" if message.backward else "forward"]
            cost.launches += 1
            cost.moved += message.sent_bytes + message.received_bytes
    costs["forward"].waits = sum(site.layer == layer for site in rehearsal.log.syncs)
    return costs


def graph_costs(config: Config, ep: int) -> Costs:
    """Return the costs of a MoE layer compiled as one graph, from the code that inductor writes.

    `config` is from `config_of`, for the same ep.
    """
    backend, costs = on_gpus.Backend(), []
    rows = config.training.seq_len * config.model.top_k // ep  # that one rank sends another under even routing
    write = GraphLowering.codegen

    def count(lowering: GraphLowering) -> Any:
        code = write(lowering)
        text = code[0].value
        cost = Cost(len(re.findall(r"\.run\(|workspace_\d+\.zero_\(|extern_kernels\.\w+\(", text)))
        for node in lowering.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode):
                cost.moved += node.get_read_write_buffers_sizes()
        for node in lowering.module.graph.nodes:
            space, _, name = str(node.target).partition(".")
            name = name.partition(".")[0]
            ours = (
                space in ("titanmoe", "_c10d_functional") and name != "wait_tensor" and not name.startswith("experts_")
            )
            cost.launches += ours
            if ours or (space == "aten" and name in EXTERN):
                cost.moved += bytes_of(node, rows)
        cost.waits = int("_local_scalar_dense" in str(lowering.module.graph) and not costs)
        costs.append(cost)
        return code

    with on_gpus.one_of(max(ep, 2)) as group, FakeTensorMode(allow_non_fake_inputs=True), imitate(HARDWARE["h100"]):
        moe = next(iter(on_gpus.compiled_model(config, backend).moe_layers().values()))
        if ep > 1:
            moe.dispatcher.place(ExpertRanks(group, ep, 1))
            for name, weight in list(moe.experts.named_parameters()):
                setattr(moe.experts, name, torch.nn.Parameter(weight.detach()[: len(weight) // ep]))
        length = config.training.seq_len
        x_BsD = torch.empty(1, length, config.model.dim, dtype=torch.bfloat16, requires_grad=True)
        patches = mock.patch.object(GraphLowering, "codegen", count), inductor.patch(unbacked_symint_fallback=rows)
        with patches[0], patches[1], suppress(on_gpus.SourceWritten):
            moe(x_BsD, on_gpus.first_step(moe, length)).sum().backward()
    return dict(zip(("forward", "backward"), costs, strict=True))


def bytes_of(node: torch.fx.Node, rows: int) -> int:
    """Return the bytes that an operation of a graph reads and writes; symbolic sizes count as `rows`."""

    def tensors(x: Any) -> list[Tensor]:
        out: list[Tensor] = []
        torch.utils._pytree.tree_map_only(Tensor, out.append, x)
        return out

    inputs = [n.meta["val"] for n in node.all_input_nodes if "val" in n.meta]
    inputs, outputs = tensors(inputs), tensors(node.meta["val"])
    if str(node.target).split(".")[1] in PICKS_ROWS:  # it reads as many rows as it writes
        inputs = [outputs[0], *inputs[1:]]
    return sum(as_number(x.numel(), rows) * x.element_size() for x in (*inputs, *outputs))


def as_number(size: int | torch.SymInt, rows: int) -> int:
    """Return a size as a number, with `rows` for every symbol in it."""
    if isinstance(size, int):
        return size
    return int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, rows)))


def main() -> None:
    print("| model | ep | layer | launches forward | backward | MB moved forward | backward | host waits |")
    print("|---|---|---|---|---|---|---|---|")
    for recipe in sys.argv[1:]:
        for ep in (8, 1):
            config = config_of(recipe, ep)
            for name, costs in (("eager", eager_costs(config, ep)), ("one graph", graph_costs(config, ep))):
                forward, backward = costs["forward"], costs["backward"]
                megabytes = f"{forward.moved / 1e6:,.0f} | {backward.moved / 1e6:,.0f}"
                print(
                    f"| {recipe} | {ep} | {name} | {forward.launches} | {backward.launches} | {megabytes} | "
                    f"{forward.waits} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
