"""Tiny models of every family, and their first steps on a device, which scripts/gpu/gpu_parity.py compares."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests import parity  # noqa: E402
from titanmoe.components import COMPONENTS  # noqa: E402
from titanmoe.models.families import FAMILIES  # noqa: E402
from titanmoe.observe import Observer, listening  # noqa: E402
from titanmoe.ops.device import Hardware, imitate  # noqa: E402
from titanmoe.parallel.materialize import local_shard  # noqa: E402
from titanmoe.train.launch import read_config  # noqa: E402
from titanmoe.train.runtime import Runtime  # noqa: E402

Changes = dict[str, Any]

# Widths that kernels of GPUs take: whole units of 16 bytes, and heads of 16, the narrowest of flex_attention. All
# families have the same ones, so that few kernels are compiled more than once.
BASE: Changes = {
    "model.size": "debug",
    "model.vocab_size": 96,
    "model.dim": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.num_experts": 8,
    "model.top_k": 2,
    "model.expert_hidden": 32,
    "model.init_std": 0.2,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 10,
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,  # AdamW turns the rounding of gradients far below eps into whole steps
    "optimizer.max_grad_norm": 0.5,
    "lr_schedule.warmup_steps": 1,
    "metrics.tensorboard": False,
    "checkpoint.enable": False,
    "validation.interval": 0,
}
LONG = {"training.seq_len": 128, "training.local_batch_size": 1, "training.global_batch_size": 2}
"""Sizes for flex_attention, which uses another kernel for fewer queries."""
SHARED = {"model.shared_hidden": 32}
DENSE = {"model.num_dense_layers": 1, "model.dense_hidden": 32}
LATENT = DENSE | {
    "model.num_kv_heads": 4,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 16,
    "model.head_dim": 32,
    "model.qk_nope_head_dim": 16,
    "model.qk_rope_head_dim": 16,
    "model.v_head_dim": 16,
    "model.shared_hidden": 32,
}
LINEAR = SHARED | {
    "model.init_std": 0.1,
    "model.rotary_dim": 8,
    "model.full_attention_every": 2,
    "model.own.linear_key_heads": 2,
    "model.own.linear_value_heads": 4,
    "model.own.linear_key_dim": 16,
    "model.own.linear_value_dim": 16,
}
WIDTHS: dict[str, Changes] = {
    "qwen2_moe": SHARED | DENSE,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "glm4_moe_lite": LATENT,
    "gpt_oss": LONG | {"model.sliding_window": 40, "model.full_attention_every": 2},
    "minimax_m2": {"model.rotary_dim": 8},
    "glm4_moe": SHARED | DENSE | {"model.rotary_dim": 8},
    "qwen3_next": LINEAR,
    "qwen3_5_moe": LINEAR,
}
MAIN = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")
"""The families that together have every kind of layer."""
OTHERS = tuple(name for name in FAMILIES.table if name not in MAIN)
DTYPES = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")
SINGLE = dict.fromkeys(DTYPES, "float32")
MIXED = dict(zip(DTYPES, ("float32", "bfloat16", "float32"), strict=True))
DPO = {"training.objective": "dpo", "data.source": "files", "data.paths": ["pairs.jsonl"], "data.format": "preference"}
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}
BALANCED = {"moe.aux_loss": 0.02, "moe.aux_loss_sequence": 0.02, "moe.aux_loss_global": 0.02, "moe.z_loss": 0.01}
MUON = {"optimizer.name": "muon"}
COMPILED = {"compile.enable": True}
ROUNDED = {"optimizer.moments_dtype": "bfloat16", "optimizer.stochastic_rounding": True}
FEATURES: dict[str, tuple[str, Changes]] = {
    "muon": ("mixtral", MUON),
    "muon by head, QK-clip": (
        "deepseek_v3",
        {"optimizer.name": "muon", "optimizer.by_head": True, "optimizer.qk_clip": 0.3},
    ),
    "QK-clip by the bound": ("mixtral", {"optimizer.qk_clip": 4.0, "optimizer.qk_clip_measure": "bound"}),
    "lora": ("mixtral", {"lora.rank": 8, "lora.experts_rank": 4}),
    "dpo": ("mixtral", DPO),
    "offload": ("mixtral", {"optimizer.offload": True}),
    "muon, offload": ("mixtral", MUON | {"optimizer.offload": True}),
    "recompute full": ("mixtral", {"activation_checkpoint.mode": "full"}),
    "recompute full_except_dispatch": ("mixtral", {"activation_checkpoint.mode": "full_except_dispatch"}),
    "recompute moe": ("mixtral", {"activation_checkpoint.mode": "moe"}),
    "recompute selective": ("deepseek_v3", {"activation_checkpoint.mode": "selective"}),
    "recompute linear": ("qwen3_next", {"activation_checkpoint.mode": "selective"}),
    "halves": ("mixtral", {"moe.overlap": "halves"}),
    "gla": ("qwen3_next", {"model.own.linear_gate": "gla"}),
    "documents": ("mixtral", {}),
    "documents, windows": ("gpt_oss", {}),
    "documents, linear": ("qwen3_next", {}),
    "capacity, padded": ("mixtral", PADDED),
    "capacity of samples": ("mixtral", {"moe.capacity_factor": 1.0, "moe.capacity_scope": "full_sequence"}),
    "balance losses": ("mixtral", BALANCED | {"moe.bias_update_rate": 0.05, "moe.jitter": 0.1}),
    "loss in slices": ("mixtral", {"training.loss_chunks": 5}),
    "several tokens": ("mixtral", {"model.mtp_depth": 1}),
    "tied embedding": ("mixtral", {"model.tie_embeddings": True}),
    "accumulated": ("mixtral", {"moe.accumulate_weight_gradients": True}),
    "rounded moments": ("mixtral", SINGLE | ROUNDED),
    "compiled": ("mixtral", COMPILED),
    "compiled windows": ("gpt_oss", COMPILED),
    "compiled selective": ("deepseek_v3", COMPILED | {"activation_checkpoint.mode": "selective"}),
    "compiled full_except_dispatch": ("mixtral", COMPILED | {"activation_checkpoint.mode": "full_except_dispatch"}),
    "compiled padded": ("mixtral", COMPILED | PADDED),
    "compiled linear": ("qwen3_next", COMPILED),
}
IN_BF16: dict[str, Changes] = {
    "compiled": COMPILED,
    "documents": LONG,
    "accumulated": {"moe.accumulate_weight_gradients": True},
    "lora": {"lora.rank": 8, "lora.experts_rank": 4},
    "loss in slices": {"training.loss_chunks": 5},
}
"""Options of mixtral whose kernels in bfloat16 are not those of float64."""
WITH_DOCUMENTS = ("dpo", "documents")


@dataclass
class Run:
    """Results of some steps of one model on one device. All tensors are on the CPU."""

    initial: dict[str, torch.Tensor]
    """Initial weights, by name."""
    config: Any
    loss: list[float] = field(default_factory=list)
    """Loss of each step."""
    norm: list[float] = field(default_factory=list)
    """Gradient norm of each step."""
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    """The gradients of the first step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights after the last step, by name."""
    chosen: list[torch.Tensor] = field(default_factory=list)
    """The experts of each token, for every call of a router in the first step; empty if routers are compiled."""
    margin: float = math.inf
    """The smallest difference between the scores of a chosen expert and the best other expert of the best groups."""


def to_cpu(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU of this rank's shards of the tensors, by name."""
    return {name: local_shard(x.detach())[0].to("cpu", copy=True) for name, x in tensors.items()}


class Side(NamedTuple):
    """A device to compare with the CPU."""

    device: torch.device
    pretended: Hardware | None = None
    """GPU whose code runs on the CPU; None if the device is real."""
    backend: str = ""
    """The backend of torch.compile; "" compiles nothing."""


CPU = Side(torch.device("cpu"))
PRETENDED = {"moe.router_product": "float32", "parallelism.attention_backend": "plain"}
"""Options that avoid what CPUs lack: a float32 matmul by bfloat16 splits, and flex_attention's backward."""


def config_of(family: str, changes: Changes, side: Side) -> Any:
    """Return the config of the tiny model of a family on a device, in float64 unless `changes` say otherwise.

    compile.enable has an effect only if `side` has a backend; a pretended GPU has the options PRETENDED. `changes` are
    options that differ from the tiny model's, by path, such as "moe.force_balance".
    """
    changes = changes | (PRETENDED if side.pretended else {})
    if changes.get("compile.enable"):
        changes = changes | {"compile.enable": bool(side.backend), "compile.backend": side.backend or "aot_eager"}
    every = {"model.family": family} | BASE | WIDTHS.get(family, {}) | dict.fromkeys(DTYPES, "float64") | changes
    return read_config(parity.arguments(every | {"training.device": side.device.type}), 1, COMPONENTS)


def trainer_of(config: Any, side: Side, documents: bool = False) -> Any:
    """Build the trainer of a tiny model on a device; with `documents`, samples have several documents."""
    runtime = Runtime(0, 0, 1, side.device, keep_timeouts=True)
    return parity.build_trainer(config, runtime, garbage=parity.no_collection, loader=parity.samples(documents))


def run(
    family: str, changes: Changes, side: Side, steps: int = 1, documents: bool = False, initial: Run | None = None
) -> Run:
    """Train a tiny model for some steps on a device and return the results.

    Gradients and choices of experts are those of the first step. Adapters begin with random B, not with zeros.

    Args:
        family: The model family.
        changes: Options that differ from the tiny model's.
        side: The device.
        steps: The number of steps.
        documents: Whether samples have several documents.
        initial: A run whose initial weights are copied; None draws them.
    """
    with imitate(side.pretended) if side.pretended else nullcontext():
        return _run(config_of(family, changes, side), side, steps, documents, initial)


def _run(config: Any, side: Side, steps: int, documents: bool, initial: Run | None) -> Run:
    trainer = trainer_of(config, side, documents)
    parameters = trainer.training.parameters
    parity.random_b(trainer)
    with torch.no_grad():
        for name, x in initial.initial.items() if initial else ():
            local_shard(parameters[name].detach())[0].copy_(x)
    out = Run(to_cpu(parameters), config)

    class Capture(Observer):
        def gradients(self, step: int, work: Any, trained: dict[str, Any]) -> None:
            if step == 1:
                out.grads = to_cpu({name: p.grad for name, p in trained.items()})

    def note_choice(router: Any, _: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        chosen, scores = outputs[3].cpu(), outputs[1].detach().cpu() + router.expert_bias.cpu()
        out.chosen.append(chosen)
        real = chosen[:, 0] < scores.shape[1]
        if real.any():
            at, scores = chosen[real], scores[real]
            within = router._best_groups(scores) if router.model.num_groups > 1 else scores
            others = within.scatter(1, at, -math.inf).amax(1)
            out.margin = min(out.margin, float((scores.gather(1, at).amin(1) - others).min()))

    routers = [] if config.compile.enable else [moe.router for moe in trainer.training.moe_layers.values()]
    hooks = [router.register_forward_hook(note_choice) for router in routers]
    with listening(Capture()):
        for _ in range(steps):
            report = trainer.train_step()
            out.loss.append(report["loss"])
            out.norm.append(report["grad_norm"])
            while hooks:
                hooks.pop().remove()
    out.weights = to_cpu(parameters)
    if side.device.type == "cuda":
        torch.cuda.synchronize()  # copies of an offloaded optimizer may still read what is freed now
    return out
