"""Published training runs as configurations that the planner prices, each with the stack of its own software.

Rows are tests/data/published_runs.jsonl, each with its source. What they leave out is filled in by one rule, RULE,
which was written before anything was compared. No row has a parameter of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from titanmoe.config.schema import (
    ActivationCheckpoint,
    Config,
    Experts,
    LoRA,
    Model,
    MoE,
    Parallelism,
    Pipeline,
    Training,
)
from titanmoe.fold.degrees import Fold, derive
from titanmoe.models.count import flops_per_token
from titanmoe.models.families import preset
from titanmoe.plan.devices import Device, read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.training_stacks import AUTOMODEL, MEGATRON, TORCHTITAN, Stack

ROWS = Path(__file__).resolve().parents[1] / "tests" / "data" / "published_runs.jsonl"
LATER = ROWS.with_name("published_later.jsonl")
FAMILIES = {
    "Mixtral-8x22B": ("mixtral", "8x22b"),
    "Mixtral-8x22B-G8T8": ("mixtral", "8x22b_g8t8"),
    "Qwen2-57B-A14B": ("qwen2_moe", "57b_a14b"),
    "Llama3-8x70B": ("llama3_moe", "8x70b"),
    "Qwen3-235B-A22B": ("qwen3_moe", "235b_a22b"),
    "Qwen3-30B-A3B": ("qwen3_moe", "30b_a3b"),
    "DeepSeek-V3": ("deepseek_v3", "671b"),
    "Moonlight-16B-A3B": ("deepseek_v3", "16b"),
    "GPT-OSS-120B": ("gpt_oss", "120b"),
    "GPT-OSS-20B": ("gpt_oss", "20b"),
}
RULE = (
    "microbatch: 1. Virtual stages: one layer each if the layers divide by pp and the microbatches by pp, else 1. "
    "etp: as tp, Megatron's default, or 1 where ep times that exceeds the stage. Recomputation: none. Dispatcher: "
    "all-to-all. Routing: balanced where it is forced or where a capacity of 1 drops the rest, else learned. FLOPs "
    "behind a stated MFU: with causal attention, but in arXiv 2504.14960 with all of it, as Megatron counted then."
)
PAPER = "arXiv 2504.14960"
READ_AGAIN = {
    "bridge-2": {"vpp": 1},
    "automodel-dsv3-1024": {"recompute": "full"},
}
"""By the beginning of a row's name: what its source says and the row does not. Bridge's table of gpt-oss says "n/a" for
virtual stages. AutoModel's recipe of 1,024 GPUs, when it was added (commit 2c236e0,
examples/benchmark/configs/deepseek_v3_te_deepep_1024.yaml), says "activation_checkpointing: true"."""
CONTRADICTED = {
    "bridge-25.11-gpt-oss-120b-h100-64-bf16-l592": "its source contradicts itself: with pp 4, 64 GPUs are 16 data "
    "ranks, and 16 x microbatch 4 x accumulation 2 is not the batch of 512",
    "bridge-skill-qwen30b-final": "two microbatches overlap, which the planner prices in pipelines only",
}
MODES = {"full": "full", "selective": "selective", "moe": "moe", "layernorm": "selective", "norm": "selective"}
"""Mode of recomputation by a word of the row; others cost next to nothing in time."""


@dataclass(frozen=True)
class Run:
    """A published run as the planner prices it: config, degrees, software, and load imbalance of the experts."""

    config: Config
    fold: Fold
    stack: Stack
    imbalance: float


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the published runs of a JSONL file as dicts, with what READ_AGAIN adds from their sources."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    for start, more in READ_AGAIN.items():
        rows = [row | more if row["id"].startswith(start) else row for row in rows]
    return rows


def why_not_compared(row: dict[str, Any]) -> str:
    """Return why a published run is listed but not compared with the planner; "" if it is compared."""
    if row["id"] in CONTRADICTED:
        return CONTRADICTED[row["id"]]
    if row["outcome"] == "oom":
        return "out of memory"
    if row["model"] not in FAMILIES:
        return "the model cannot be built here"
    if not row["seq"] or not row["gbs"]:
        return "no sequence length or batch stated"
    if row["framework"] == "FSDP":
        return "FSDP alone, and no microbatch stated"
    return "" if row["comparable"] else "marked not comparable"


@lru_cache(maxsize=16)
def model_of(name: str) -> Model:
    family, size = FAMILIES[name]
    return Model(**preset(family, size))


def stack_of_row(row: dict[str, Any]) -> Stack:
    """Return the software stack that a published run used."""
    software = row["framework"]
    return AUTOMODEL if "AutoModel" in software else TORCHTITAN if software[0].islower() else MEGATRON


def run_of(row: dict[str, Any], microbatch: int = 1, virtual: int = 0) -> Run | None:
    """Return a published run as a configuration; None if the microbatch or number of virtual stages does not fit it.

    Args:
        row: the published run.
        microbatch: samples of a microbatch, for a row that states none.
        virtual: virtual stages of a rank, for a row that states none; 0 to choose them by RULE.
    """
    model, stack = model_of(row["model"]), stack_of_row(row)
    tp, cp, pp, world = row["tp"], row["cp"], row["pp"], row["gpus"]
    samples, dp = row["mbs"] or microbatch, world // (tp * cp * pp)
    if row["gbs"] % (samples * dp):
        return None
    m = row["gbs"] // (samples * dp)
    fine = model.num_layers // pp if model.num_layers % pp == 0 and m % pp == 0 else 1
    stages = 1 if pp == 1 else row["vpp"] or virtual or fine
    if stages > 1 and (m % pp or stages * pp > model.num_layers):
        if virtual > 1:
            return None
        stages = 1
    etp = tp if row["etp"] is None else row["etp"]
    if row["etp"] is None and world // pp % (row["ep"] * etp):
        etp = 1
    words = (row["recompute"] or "").split(",")
    routing, dispatcher = row["routing"] or "", (row["dispatcher"] or "alltoall").split()[0]
    gathers_often = stack is TORCHTITAN or "FSDP+EP" in row["framework"]
    config = Config(
        model=model,
        training=Training(
            seq_len=row["seq"],
            local_batch_size=samples,
            global_batch_size=row["gbs"],
            mixed_precision_reduce="bfloat16" if "Bridge" in row["framework"] else "float32",
        ),
        parallelism=Parallelism(
            pp=pp,
            cp=cp,
            tp=tp,
            experts=Experts(ep=row["ep"], etp=etp),
            reshard_after_forward="always" if gathers_often else "never",
            reduce_once=not gathers_often,
        ),
        pipeline=Pipeline(schedule="Interleaved1F1B" if stages > 1 else "1F1B", virtual_stages=stages),
        moe=MoE(dispatcher="alltoall" if dispatcher == "alltoall" else "deepep"),
        activation_checkpoint=ActivationCheckpoint(mode=next((MODES[w] for w in words if w in MODES), "none")),
        lora=LoRA(rank=16, experts_rank=16) if "LoRA" in row["framework"] else LoRA(),
    )
    learned = row["ep"] > 1 and not any(word in routing for word in ("capacity", "balance"))
    return Run(config, derive(world, config.parallelism), stack, stack.busiest if learned else 1.0)


def published_step(row: dict[str, Any], causal: bool = False) -> float | None:
    """Return the seconds of a step of a published run, computed from its rate if it states no time.

    Args:
        row: the published run.
        causal: whether to count attention as causal in the FLOPs of PAPER too.

    Returns:
        The seconds; None if the row states neither time nor rate.
    """
    if row["step_s"]:
        return row["step_s"]
    tokens = row["gbs"] * row["seq"]
    if row["tok_s_gpu"]:
        return tokens / row["tok_s_gpu"] / row["gpus"]
    if not row["tflops_per_gpu"]:
        return None
    model = model_of(row["model"])
    flops = flops_per_token(model, row["seq"])
    if row["source"].startswith(PAPER) and not causal:
        flops += 3 * model.num_layers * model.num_heads * 2 * model.head_dim * row["seq"]
    return tokens * flops / (row["tflops_per_gpu"] * 1e12) / row["gpus"]


@lru_cache(maxsize=8)
def device_of(gpu: str) -> Device:
    return read_device(gpu.lower())


def price_of(row: dict[str, Any], factors: Factors, microbatch: int = 1, virtual: int = 0) -> Price | None:
    """Return the planner's price of a published run; None if the microbatch or virtual stages do not fit it."""
    run = run_of(row, microbatch, virtual)
    if run is None:
        return None
    return Pricer(run.config, device_of(row["gpu"]), factors, run.imbalance, run.stack).price(run.config, run.fold)
