"""The range of each number of a config, whatever the others are."""

from __future__ import annotations

import math
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
    """-1 is a value too: derive the one that fits."""

    def __contains__(self, value: object) -> bool:
        if self.derived and value == -1:
            return True
        above = value > self.low if self.without_low else value >= self.low
        below = self.high is None or (value < self.high if self.without_high else value <= self.high)
        return above and below

    def __str__(self) -> str:
        if self.high is not None:
            text = f"in {'(' if self.without_low else '['}{self.low}, {self.high}{')' if self.without_high else ']'}"
            return f"{text}{', or -1' if self.derived else ''}"
        return f"{'above' if self.without_low else 'at least'} {self.low}{', or -1' if self.derived else ''}"


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, without_low=True)
FRACTION = Range(0, 1)
BELOW_ONE = Range(0, 1, without_high=True)

# The largest sizes are checked before anything is built from them: loops and lists are made per layer, expert and rank.
# Each is far above any model that has been published (126 layers, 384 experts, a vocabulary of 262,144).
LAYERS = 10_000
WIDTH = 2**20
EXPERTS = 2**16
RANKS = 2**20
TOKENS = 2**31
SECONDS = 31_536_000  # a year; a timedelta cannot hold 2**63 seconds

RANGES = {
    "job.ranks": Range(0, RANKS),
    "model.vocab_size": Range(2, 2**24),
    "model.dim": Range(1, WIDTH),
    "model.num_layers": Range(1, LAYERS),
    "model.num_heads": Range(1, WIDTH),
    "model.num_kv_heads": Range(1, WIDTH),
    "model.head_dim": Range(2, WIDTH),
    "model.sliding_window": Range(0, TOKENS),
    "model.full_attention_every": Range(0, LAYERS),
    "model.kv_lora_rank": Range(0, WIDTH),
    "model.q_lora_rank": Range(0, WIDTH),
    "model.qk_nope_head_dim": Range(0, WIDTH),
    "model.qk_rope_head_dim": Range(0, WIDTH),
    "model.v_head_dim": Range(0, WIDTH),
    "model.rope_theta": POSITIVE,
    "model.rope_factor": COUNT,
    "model.rope_original_len": Range(1, TOKENS),
    "model.rope_beta_fast": POSITIVE,
    "model.rope_beta_slow": POSITIVE,
    "model.rope_mscale": NOT_NEGATIVE,
    "model.rope_mscale_all_dim": NOT_NEGATIVE,
    "model.norm_eps": POSITIVE,
    "model.num_dense_layers": Range(0, LAYERS),
    "model.dense_hidden": Range(0, 2**24),
    "model.moe_every": Range(1, LAYERS),
    "model.num_experts": Range(1, EXPERTS),
    "model.top_k": Range(1, EXPERTS),
    "model.expert_hidden": Range(1, 2**24),
    "model.shared_hidden": Range(0, 2**24),
    "model.route_scale": POSITIVE,
    "model.num_groups": Range(1, EXPERTS),
    "model.top_groups": Range(1, EXPERTS),
    "model.mtp_depth": Range(0, 1),
    "model.init_std": POSITIVE,
    "data.weights": NOT_NEGATIVE,
    "data.workers": Range(0, 1024),
    "data.prefetch": Range(1, 2**16),
    "data.max_document_mb": Range(1, 2**20),
    "validation.interval": NOT_NEGATIVE,
    "validation.steps": NOT_NEGATIVE,
    "validation.held_out": NOT_NEGATIVE,
    "training.steps": COUNT,
    "training.seq_len": Range(1, TOKENS),
    "training.local_batch_size": Range(1, TOKENS),
    "training.global_batch_size": Range(1, TOKENS, derived=True),
    "training.mtp_weight": NOT_NEGATIVE,
    "training.loss_chunks": Range(0, 2**24, derived=True),
    "training.seed": NOT_NEGATIVE,
    "training.gc_every": COUNT,
    "training.first_step_timeout_s": Range(1, SECONDS),
    "training.timeout_s": Range(1, SECONDS),
    "optimizer.lr": Range(0, 100),
    "optimizer.beta1": BELOW_ONE,
    "optimizer.beta2": BELOW_ONE,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.max_grad_norm": NOT_NEGATIVE,
    "optimizer.skip_spikes": NOT_NEGATIVE,
    "optimizer.skip_window": Range(4, 2**16),
    "optimizer.skip_limit": COUNT,
    "lr_schedule.warmup_steps": NOT_NEGATIVE,
    "lr_schedule.decay_fraction": FRACTION,
    "lr_schedule.min_ratio": FRACTION,
    "parallelism.dp_replicate": Range(1, RANKS),
    "parallelism.dp_shard": Range(1, RANKS, derived=True),
    "parallelism.cp": Range(1, RANKS),
    "parallelism.tp": Range(1, RANKS),
    "parallelism.pp": Range(1, RANKS),
    "parallelism.node": Range(1, RANKS, derived=True),
    "parallelism.experts.ep": Range(1, RANKS),
    "parallelism.experts.etp": Range(1, RANKS),
    "parallelism.experts.edp": Range(1, RANKS, derived=True),
    "parallelism.experts.edp_replicate": Range(1, RANKS, derived=True),
    "pipeline.virtual_stages": Range(1, 1024, derived=True),
    "pipeline.layers_per_stage": Range(0, LAYERS),
    "moe.symm_mem_factor": COUNT,
    "moe.overlap_chunks": Range(1, 2**16),
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
    "checkpoint.timeout_s": COUNT,
    "metrics.log_every": COUNT,
    "metrics.experts_every": Range(0, derived=True),
    "metrics.peak_tflops": NOT_NEGATIVE,
    "debug.replicas_every": NOT_NEGATIVE,
    "profile.steps": COUNT,
    "profile.ranks": Range(0, RANKS),
}
"""By path; for a list, the range of its items."""

LIMIT = 2**63
REASONS = {
    "optimizer.lr": "a step of AdamW moves every weight by about lr, and weights are far below 1",
}


def digits(number: float) -> str:
    """As text; Python does not write out integers of thousands of digits."""
    return hex(number)[:40] + "..." if isinstance(number, int) and number.bit_length() > 256 else str(number)


def out_of_range(values: Mapping[str, Any]) -> list[Violation]:
    """The numbers, of those given by path, that are impossible whatever the others are."""
    found = []
    for path, limits in RANGES.items():
        value = values.get(path, [])
        several = isinstance(value, list)
        for place, number in enumerate(value if several else [value]):
            name = f"{path}[{place}]" if several else path
            if number != number or number in (math.inf, -math.inf):
                found.append(Violation((path,), f"{name} = {number} is not a finite number: it must be {limits}"))
            elif number not in limits or not -LIMIT < number < LIMIT:
                why = f", because {REASONS[path]}" if path in REASONS and number > 0 else ""
                if number in limits:
                    why = " and below 2**63 = 9.2e18, because larger ones do not fit into 64 bits"
                text = f"{name} = {digits(number)} is out of range: it must be {limits}{why}"
                found.append(Violation((path,), text))
    return found
