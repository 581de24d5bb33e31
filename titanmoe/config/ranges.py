"""The range of each number of a config, whatever the others are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Violation(NamedTuple):
    fields: tuple[str, ...]
    """Paths of the fields that do not fit."""
    text: str
    """Values, constraint and fix."""


class Range(NamedTuple):
    low: float
    high: float | None = None
    without_low: bool = False
    without_high: bool = False
    derived: bool = False
    """-1 is a value too, and asks for the one that fits."""

    def __contains__(self, value: object) -> bool:
        if self.derived and value == -1:
            return True
        above = value > self.low if self.without_low else value >= self.low
        below = self.high is None or (value < self.high if self.without_high else value <= self.high)
        return above and below

    def __str__(self) -> str:
        if self.high is not None:
            return f"in {'(' if self.without_low else '['}{self.low}, {self.high}{')' if self.without_high else ']'}"
        return f"{'above' if self.without_low else 'at least'} {self.low}{', or -1' if self.derived else ''}"


COUNT = Range(1)
DERIVED = Range(1, derived=True)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, without_low=True)
FRACTION = Range(0, 1)
BELOW_ONE = Range(0, 1, without_high=True)

RANGES = {
    "model.vocab_size": Range(2),
    "model.dim": COUNT,
    "model.num_layers": COUNT,
    "model.num_heads": COUNT,
    "model.num_kv_heads": COUNT,
    "model.head_dim": Range(2),
    "model.sliding_window": NOT_NEGATIVE,
    "model.full_attention_every": NOT_NEGATIVE,
    "model.kv_lora_rank": NOT_NEGATIVE,
    "model.q_lora_rank": NOT_NEGATIVE,
    "model.qk_nope_head_dim": NOT_NEGATIVE,
    "model.qk_rope_head_dim": NOT_NEGATIVE,
    "model.v_head_dim": NOT_NEGATIVE,
    "model.rope_theta": POSITIVE,
    "model.rope_factor": COUNT,
    "model.rope_original_len": COUNT,
    "model.rope_beta_fast": POSITIVE,
    "model.rope_beta_slow": POSITIVE,
    "model.rope_mscale": NOT_NEGATIVE,
    "model.rope_mscale_all_dim": NOT_NEGATIVE,
    "model.norm_eps": POSITIVE,
    "model.num_dense_layers": NOT_NEGATIVE,
    "model.dense_hidden": NOT_NEGATIVE,
    "model.moe_every": COUNT,
    "model.num_experts": COUNT,
    "model.top_k": COUNT,
    "model.expert_hidden": COUNT,
    "model.shared_hidden": NOT_NEGATIVE,
    "model.route_scale": POSITIVE,
    "model.num_groups": COUNT,
    "model.top_groups": COUNT,
    "model.mtp_depth": Range(0, 1),
    "model.init_std": POSITIVE,
    "data.weights": NOT_NEGATIVE,
    "data.workers": NOT_NEGATIVE,
    "data.prefetch": COUNT,
    "validation.interval": NOT_NEGATIVE,
    "validation.steps": NOT_NEGATIVE,
    "validation.held_out": NOT_NEGATIVE,
    "training.steps": COUNT,
    "training.seq_len": COUNT,
    "training.local_batch_size": COUNT,
    "training.global_batch_size": DERIVED,
    "training.mtp_weight": NOT_NEGATIVE,
    "training.loss_chunks": Range(0, derived=True),
    "training.seed": NOT_NEGATIVE,
    "training.gc_every": COUNT,
    "training.first_step_timeout_s": COUNT,
    "training.timeout_s": COUNT,
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.beta1": BELOW_ONE,
    "optimizer.beta2": BELOW_ONE,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.max_grad_norm": NOT_NEGATIVE,
    "lr_schedule.warmup_steps": NOT_NEGATIVE,
    "lr_schedule.decay_fraction": FRACTION,
    "lr_schedule.min_ratio": FRACTION,
    "parallelism.dp_replicate": COUNT,
    "parallelism.dp_shard": DERIVED,
    "parallelism.cp": COUNT,
    "parallelism.tp": COUNT,
    "parallelism.pp": COUNT,
    "parallelism.node": DERIVED,
    "parallelism.experts.ep": COUNT,
    "parallelism.experts.etp": COUNT,
    "parallelism.experts.edp": DERIVED,
    "parallelism.experts.edp_replicate": DERIVED,
    "pipeline.virtual_stages": DERIVED,
    "pipeline.layers_per_stage": NOT_NEGATIVE,
    "moe.symm_mem_factor": COUNT,
    "moe.overlap_chunks": DERIVED,
    "moe.capacity_factor": NOT_NEGATIVE,
    "moe.jitter": BELOW_ONE,
    "moe.aux_loss": NOT_NEGATIVE,
    "moe.aux_loss_sequence": NOT_NEGATIVE,
    "moe.aux_loss_global": NOT_NEGATIVE,
    "moe.z_loss": NOT_NEGATIVE,
    "moe.bias_update_rate": NOT_NEGATIVE,
    "activation_checkpoint.every": COUNT,
    "checkpoint.interval": NOT_NEGATIVE,
    "checkpoint.keep_last": NOT_NEGATIVE,
    "checkpoint.keep_every": NOT_NEGATIVE,
    "metrics.log_every": COUNT,
    "metrics.experts_every": Range(0, derived=True),
    "metrics.peak_tflops": NOT_NEGATIVE,
    "profile.steps": COUNT,
    "profile.ranks": NOT_NEGATIVE,
}
"""By path; a list's range is its items'."""

LIMIT = 2**63


def out_of_range(values: Mapping[str, Any]) -> list[Violation]:
    """The numbers, of those given by path, that are impossible whatever the others are."""
    found = []
    for path, limits in RANGES.items():
        value = values.get(path, [])
        several = isinstance(value, list)
        for place, number in enumerate(value if several else [value]):
            name = f"{path}[{place}]" if several else path
            if not -LIMIT < number < LIMIT:  # a NaN is not within either
                found.append(Violation((path,), f"{name} = {number} is no finite 64-bit number: it must be {limits}"))
            elif number not in limits:
                found.append(Violation((path,), f"{name} = {number} is out of range: it must be {limits}"))
    return found
