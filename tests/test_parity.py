"""The headline: no mapping, dispatcher, schedule or recomputation changes a number."""

from __future__ import annotations

import functools
import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from tests import parity, reference, world
from tests.support import case_features, planted_faults, processes
from tests.support.case_features import CP_KINDS, DISPATCHERS, FEATURES, MODELS, TRAINED, changes
from tests.support.covering_mappings import ATTENTION, EXPERTS, all_folds, case_id, cover, has_several_ranks
from tests.support.families import has_attention_only
from titanmoe.fold.degrees import Fold
from titanmoe.models.families import names

AXES = {*ATTENTION, *EXPERTS}


def candidates(world: int, count: int) -> list[tuple[Fold, dict[str, str]]]:
    """Random pairings of a mapping and features; schedule and cp kind only where there is a pipeline or a cp."""
    draw = random.Random(0)
    folds = [fold for fold in all_folds(world) if fold.pp <= 4]
    out = []
    for _ in range(count):
        fold = draw.choice(folds)
        choice = {feature: draw.choice(list(values)) for feature, values in FEATURES.items() if feature != "option"}
        if fold.pp == 1:
            del choice["schedule"]
        if fold.cp == 1:
            del choice["cp"]
        out.append((fold, choice))
    return out


def sample(pool: list[tuple[Fold, dict[str, str]]], chosen: list[int], *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(*pool[i], id="-".join([case_id(pool[i][0]), *pool[i][1].values()]), marks=marks) for i in chosen
    ]


def cost(fold: Fold, choice: dict[str, str]) -> float:
    """About that of its test: building, and how often the ranks run a layer."""
    given = parity.TINY | changes(fold, choice)
    microbatches = given["training.global_batch_size"] / (given["training.local_batch_size"] * fold.dp)
    layers = given["model.num_layers"] / fold.pp + given.get("model.mtp_depth", 0)
    return 3 + case_features.steps(choice) * layers * microbatches


ALIKE = {"model": ("mixtral", "qwen3_moe", "olmoe"), "schedule": ("GPipe", "LoopedBFS")}
"""Models of which others have each property, and schedules that run as 1F1B and Interleaved1F1B do."""


def taken_apart(fold: Fold, choice: dict[str, str]) -> dict[str, Any]:
    """Return the axes that are there and the features, with kinds of cp and of dropping as several features."""
    row = {name: value for name, value in choice.items() if value not in ALIKE.get(name, ())}
    if "cp" in row:
        row |= zip(("kind", "placement"), row.pop("cp").rsplit("-", 1), strict=True)
    row |= zip(("policy", "scope", "padding"), row.pop("dropping").split("-"), strict=False)
    return row | has_several_ranks(fold)


def on_4_ranks() -> list[Any]:
    """Every pair of an axis (there or not) with an axis or a feature, of `taken_apart`.

    The sweep also has every pair of two features, among them schedules with kinds of cp.
    """
    pool = candidates(4, 3000)
    # Of 60 seeds, the cheapest.
    quick = cover(
        [taken_apart(*row) for row in pool],
        seed=8,
        left_out=lambda a, b: a not in AXES and b not in AXES,
        cost=lambda row: cost(*pool[row]),
    )
    rest = set(cover([has_several_ranks(fold) | choice for fold, choice in pool])).difference(quick)
    return sample(pool, sorted(quick)) + sample(pool, sorted(rest), pytest.mark.sweep)


def on_8_ranks() -> list[Any]:
    """Every pair of two axes, used or not; random features, except those that need more samples, layers or steps. The
    sweep has all of them.
    """

    def small(fold: Fold, choice: dict[str, str]) -> bool:
        one_stage = fold.pp == 1 or choice["schedule"] in ("GPipe", "1F1B")
        return one_stage and choice["batch"] == "1" and choice["mtp"] == "no" and case_features.steps(choice) == 1

    pool = [case for case in candidates(8, 1500) if small(*case)]
    # Of 60 seeds, the cheapest.
    rows = cover([has_several_ranks(fold) for fold, _ in pool], seed=40, cost=lambda row: cost(*pool[row]))
    return sample(pool, sorted(rows))


def check_choice(fold: Fold, choice: dict[str, str]) -> None:
    documents = choice["documents"] == "yes"
    parity.check(fold.world, changes(fold, choice), documents=documents, steps=case_features.steps(choice))


@pytest.mark.parametrize(("fold", "choice"), on_4_ranks())
def test_every_pair_of_choices_on_4_ranks(fold: Fold, choice: dict[str, str]) -> None:
    check_choice(fold, choice)


@pytest.mark.parametrize(("fold", "choice"), on_8_ranks())
def test_every_pair_of_axes_on_8_ranks(fold: Fold, choice: dict[str, str]) -> None:
    check_choice(fold, choice)


def in_few(size: int, case: dict[str, Any]) -> dict[str, Any]:
    """With two microbatches per step and pipeline stage, the most that a schedule needs, instead of up to eight.

    At least four samples, which are of every kind: two in a microbatch where there is one data rank.
    """
    sequence = case.get("parallelism.cp", 1) * case.get("parallelism.tp", 1)
    few = {"training.global_batch_size": min(8, max(4, 2 * size // sequence))}
    return few | {"training.local_batch_size": 2 if sequence == size else 1} | case


@pytest.mark.parametrize("size", [1, 2])
def test_smaller_worlds(size: int) -> None:
    parity.check(size, in_few(size, {"parallelism.experts.ep": size, "moe.aux_loss": 0.02, "moe.z_loss": 0.01}))


@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "cp", "tp", "pp", "experts.ep", "experts.etp"])
def test_each_axis_alone(axis: str) -> None:
    """What `make check` runs. Experts follow attention unless set: with dp_shard 2, edp is 2 too."""
    parity.check(2, in_few(2, {f"parallelism.{axis}": 2, "moe.aux_loss_sequence": 0.02}), steps=1)


@pytest.mark.parametrize(
    "family", [name for name in names() if has_attention_only(name) or name in reference.OWN_LAYERS]
)
def test_debug_sizes_of_every_family(family: str) -> None:
    """Unchanged, except for the vocabulary and depth that the test's samples need. One with a layer of its own that the
    plain model lacks has its own test."""
    shape = [key for key in parity.TINY if key.startswith("model.") and not key.endswith(("num_layers", "init_std"))]
    own = parity.preset_of(family)
    changes = {key: own[key.removeprefix("model.")] for key in shape} | {"model.num_layers": 2}
    changes |= {"model.full_attention_every": 2} if family in reference.OWN_LAYERS else {}
    changes |= {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}
    parity.check(4, in_few(4, changes), steps=1)


@pytest.mark.parametrize(
    "case",
    [
        {"parallelism.tp": 2, "parallelism.experts.ep": 4},
        {"parallelism.cp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
        {"parallelism.pp": 2, "parallelism.experts.etp": 2, "moe.grouped_mm": "loop"},
        MODELS["gpt_oss"]
        | {"parallelism.cp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}
        | {"training.global_batch_size": 4},
    ],
    ids=["tp", "cp", "pp", "gpt_oss"],
)
def test_float32_with_frozen_margins(case: dict[str, Any]) -> None:
    single = {f"training.{key}": "float32" for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}
    parity.check(4, in_few(4, case | single | {"model.expert_hidden": 32}), steps=1)


GATED = {"model.attention_gate": True, "model.norm_adds_one": True, "model.num_heads": 16}
NASTY = {
    "no expert sharding is even: slices of the model dim": {"model.num_experts": 2, "parallelism.experts.ep": 2},
    "one expert per rank": {"model.num_experts": 4, "parallelism.experts.ep": 4, "parallelism.tp": 2},
    "etp larger than tp": {"parallelism.experts.etp": 4, "parallelism.tp": 2},
    "ep across dp_replicate": {"parallelism.dp_replicate": 2, "parallelism.experts.ep": 4},
    "experts replicated otherwise than attention": {
        "parallelism.dp_replicate": 2,
        "parallelism.experts.edp_replicate": 4,
    },
    "one token per rank": {
        "training.seq_len": 8,
        "parallelism.tp": 8,
        "parallelism.experts.ep": 8,
        "model.top_k": 1,
        "model.norm_topk": False,
    },
    "more capacity than tokens": {
        "moe.capacity_factor": 50.0,
        "moe.pad_to_capacity": True,
        "parallelism.experts.ep": 4,
    },
    "a stage without MoE layers": {
        "parallelism.pp": 2,
        "model.num_layers": 4,
        "model.num_dense_layers": 2,
        "model.dense_hidden": 16,
        "parallelism.experts.ep": 2,
    },
    "a stage with nothing but the head": {
        "parallelism.pp": 2,
        "pipeline.layers_per_stage": [2, 0],
        "parallelism.experts.ep": 2,
    },
    "a token of each sample on a rank": {"training.seq_len": 8, "parallelism.tp": 8, "parallelism.experts.ep": 8},
    "four nodes, slices of experts on each, beside a shared expert": {
        "moe.dispatcher": "hierarchical",
        "parallelism.node": 2,
        "parallelism.tp": 4,
        "parallelism.experts.ep": 4,
        "parallelism.experts.etp": 2,
        "model.top_k": 4,
        "model.shared_hidden": 16,
    },
    "reshard never": {"parallelism.reshard_after_forward": "never", "parallelism.tp": 2, "parallelism.experts.ep": 4},
    "one norm over the heads of all ranks": {
        "model.qk_norm": "full",
        "model.num_heads": 16,
        "parallelism.tp": 2,
        "parallelism.cp": 2,
        "parallelism.experts.ep": 4,
    },
    "yarn": {
        "model.rope_scaling": "yarn",
        "model.rope_factor": 4.0,
        "model.rope_theta": 100.0,
        "model.rope_original_len": 64,
        "model.rope_beta_fast": 4.0,
        "model.head_dim": 8,
        "parallelism.cp": 2,
        "parallelism.pp": 2,
    },
    "latent attention without a query latent, values wider than keys": {
        "model.kv_lora_rank": 12,
        "model.qk_nope_head_dim": 2,
        "model.qk_rope_head_dim": 4,
        "model.head_dim": 6,
        "model.v_head_dim": 8,
        "parallelism.cp": 2,
        "parallelism.tp": 2,
        "parallelism.experts.ep": 4,
    },
    "multi-token prediction, tied, three copies on the two ranks of a V": {
        "model.mtp_depth": 1,
        "model.tie_embeddings": True,
        "model.num_layers": 4,
        "pipeline.schedule": "ZBVZeroBubble",
        "parallelism.pp": 2,
        "parallelism.tp": 2,
        "moe.bias_update_rate": 0.05,
        "training.mtp_weight": 0.7,
    },
    "biases in slices, on etp and over data ranks": MODELS["gpt_oss"]
    | {"model.num_experts": 2, "model.top_k": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "fewer sinks than ranks to shard them": MODELS["gpt_oss"]
    | {"model.num_heads": 4, "model.num_kv_heads": 2, "parallelism.tp": 2, "parallelism.experts.ep": 4},
    "half of each head turned, along a ring": MODELS["glm4_moe"]
    | {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "half of each head turned, in stages, with multi-token prediction": MODELS["glm4_moe"]
    | {
        "model.mtp_depth": 1,
        "parallelism.pp": 2,
        "parallelism.cp": 2,
        "parallelism.cp_kind": "allgather",
        "parallelism.experts.ep": 2,
        "activation_checkpoint.mode": "full",
        "moe.bias_update_rate": 0.05,
    },
    "gated attention and norms that add one, along a ring": GATED
    | {"model.qk_norm": "head", "parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 2},
    "the same in stages, norms of all heads together, multi-token prediction": GATED
    | {"model.qk_norm": "full", "model.mtp_depth": 1, "parallelism.pp": 2, "parallelism.tp": 2}
    | {"activation_checkpoint.mode": "full"},
    "linear and gated attention, along a ring": MODELS["qwen3_next"]
    | {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "linear and gated attention, in stages, with multi-token prediction": MODELS["qwen3_next"]
    | {
        "model.mtp_depth": 1,
        "parallelism.pp": 2,
        "parallelism.cp": 2,
        "parallelism.cp_kind": "allgather",
        "parallelism.experts.ep": 2,
        "activation_checkpoint.mode": "selective",
    },
    "adapters of linear and gated attention": MODELS["qwen3_next"]
    | TRAINED["adapters"]
    | {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "adapters with the scale of rsLoRA": TRAINED["adapters"] | {"lora.rslora": True, "parallelism.experts.ep": 2},
    "heads of linear and gated attention by Muon": MODELS["qwen3_next"]
    | {"optimizer.name": "muon", "optimizer.by_head": True, "parallelism.tp": 2, "parallelism.experts.ep": 2},
    "gated linear attention by Muon": MODELS["gla"]
    | {"optimizer.name": "muon", "parallelism.tp": 2, "parallelism.experts.ep": 2},
    "all heads normalised together, half of each turned": MODELS["minimax_m2"]
    | {
        "parallelism.tp": 4,
        "parallelism.experts.ep": 2,
        "parallelism.experts.etp": 2,
        "moe.bias_update_rate": 0.05,
        "activation_checkpoint.mode": "selective",
    },
    "all heads normalised together, half of each turned, in stages": MODELS["minimax_m2"]
    | {"parallelism.pp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 2, "training.loss_chunks": 5},
    "multi-token prediction after the final norm, split over tp and cp": {
        "model.mtp_depth": 1,
        "model.mtp_after_norm": True,
        "model.tie_embeddings": True,
        "parallelism.tp": 2,
        "parallelism.cp": 2,
        "parallelism.experts.ep": 4,
        "training.loss_chunks": 5,
        "activation_checkpoint.mode": "full",
    },
    "multi-token prediction after the final norm, in stages of a V": {
        "model.mtp_depth": 1,
        "model.mtp_after_norm": True,
        "model.num_layers": 4,
        "parallelism.pp": 2,
        "parallelism.tp": 2,
        "parallelism.experts.etp": 2,
        "pipeline.schedule": "ZBVZeroBubble",
        "training.global_batch_size": 4,
    },
    "multi-token prediction after the final norm, sharded": {
        "model.mtp_depth": 1,
        "model.mtp_after_norm": True,
        "parallelism.dp_replicate": 2,
        "parallelism.experts.ep": 2,
    },
    "grouped-query with fewer key heads than cp": {
        "parallelism.cp": 4,
        "parallelism.cp_kind": "ulysses",
        "model.num_kv_heads": 2,
    },
    "key heads on two ranks of tp each, with biases and sinks, in halves of a sequence": MODELS["gpt_oss"]
    | {
        "model.num_heads": 8,
        "model.num_kv_heads": 2,
        "model.qk_norm": "head",
        "parallelism.tp": 4,
        "parallelism.cp": 2,
        "parallelism.experts.ep": 4,
        "parallelism.experts.etp": 2,
    },
    "one key head on all ranks of tp, one norm over the heads, split backward": {
        "model.num_kv_heads": 1,
        "model.qk_norm": "full",
        "model.qkv_bias": True,
        "model.num_layers": 4,
        "pipeline.schedule": "ZBVZeroBubble",
        "parallelism.pp": 2,
        "parallelism.tp": 2,
    },
}


ON_8_RANKS = (
    "one token per rank",
    "a token of each sample on a rank",
    "four nodes, slices of experts on each, beside a shared expert",
    "key heads on two ranks of tp each, with biases and sinks, in halves of a sequence",
)


@pytest.mark.parametrize("case", NASTY, ids=lambda name: name.replace(" ", "_"))
def test_nasty_cases(case: str) -> None:
    size = 8 if case in ON_8_RANKS else 4
    parity.check(size, in_few(size, NASTY[case]), steps=2 if "moe.bias_update_rate" in NASTY[case] else 1)


@pytest.mark.parametrize("kind", ["ring-contiguous", "ulysses-zigzag", "allgather-zigzag"])
def test_windows_and_sinks_across_the_pieces_of_a_sequence(kind: str) -> None:
    """With documents. A window of 5 over pieces of 4 or 8, or one of 2 over pieces of 16 or 32, which it cuts finer."""
    case = {"parallelism.cp": 4, "model.sliding_window": 5}
    if kind.endswith("zigzag"):
        case = {"parallelism.cp": 2, "parallelism.tp": 2, "model.sliding_window": 2, "training.seq_len": 64}
    case = MODELS["gpt_oss"] | CP_KINDS[kind] | {"training.seq_len": 32} | case
    parity.check(4, in_few(4, case), documents=True, steps=1)


@pytest.mark.parametrize(
    "case, placement, dtype",
    [
        ("cp2", "contiguous", "float32"),
        ("cp4", "zigzag", "float32"),
        ("cp4", "contiguous", "float64"),
        ("cp2_tp2", "zigzag", "float64"),
        ("sinks", "zigzag", "float64"),
    ],
)
def test_torchs_own_ring(case: str, placement: str, dtype: str) -> None:
    changes = {
        "cp2": {"parallelism.cp": 2},
        "cp4": {"parallelism.cp": 4, "parallelism.experts.ep": 2},
        "cp2_tp2": {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 4},
        "sinks": {"parallelism.cp": 2, "parallelism.tp": 2, "model.attention_sinks": True},
    }[case]
    changes |= {f"training.{name}": dtype for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}
    changes |= {"parallelism.attention_backend": "torch", "parallelism.cp_placement": placement}
    ranks = 2 if case == "cp2" else 4
    parity.check(ranks, in_few(ranks, changes), steps=1)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("crowd", ["all to one expert", "none to half of them"])
def test_crowded_and_deserted_experts(dispatcher: str, crowd: str) -> None:
    """Biased routers: experts without a row still have gradients, exactly zero."""
    case = DISPATCHERS[dispatcher] | {
        "parallelism.node": 4 if dispatcher == "symm_mem" else 2,
        "parallelism.tp": 2,
        "parallelism.experts.ep": 2,
        "parallelism.experts.etp": 2,
        "model.top_k": 1 if crowd == "all to one expert" else 2,
        "model.norm_topk": crowd != "all to one expert",
        "model.router_bias": True,
        "model.expert_linear_bias": True,
    }
    bias = [1e6] + [0.0] * 7 if crowd == "all to one expert" else [0.0] * 4 + [-1e6] * 4
    errors = parity.check_biased(4, in_few(4, case), bias)
    assert errors["deserted"] == 0.0


NARROW = {
    "tp": {"parallelism.tp": 2, "parallelism.experts.ep": 2},
    "cp": {"parallelism.cp": 2, "parallelism.experts.etp": 2, "model.shared_hidden": 16},
    "pp": {"parallelism.pp": 2, "moe.aux_loss": 0.02},
    "ep": {"parallelism.experts.ep": 2, "moe.aux_loss_global": 0.02, "moe.z_loss": 0.01},
    "ep_etp": {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
    "nodes": DISPATCHERS["hierarchical"]
    | {"parallelism.node": 2, "parallelism.experts.ep": 4, "activation_checkpoint.mode": "full"},
}


def numerics(dtype: str, param: str, reduce: str) -> dict[str, Any]:
    return dict(zip(parity.NUMERICS, (dtype, param, reduce), strict=True))


@pytest.mark.parametrize("case", NARROW)
def test_narrow_weights_in_a_wide_run(case: str) -> None:
    """The default dtypes of a run, each twice as wide: those of computation, messages and sums."""
    size = 4 if case in ("ep_etp", "nodes") else 2
    parity.check(size, in_few(size, NARROW[case] | numerics("float64", "float32", "float64")), steps=1)


@pytest.mark.parametrize("case", ["tp", "cp", "ep_etp", "nodes"])
def test_default_numerics_with_the_plain_models_choices(case: str) -> None:
    """bfloat16 changes choices; with the plain model's choices, numbers differ only by rounding. With the grouped
    product and messages of 16 bits.
    """
    size = 4 if case in ("ep_etp", "nodes") else 2
    changes = NARROW[case] | numerics("float32", "bfloat16", "float32")
    parity.check(size, in_few(size, changes), freeze=True)


@functools.cache
def agrees(case: tuple[tuple[str, Any], ...]) -> None:
    parity.check(2, dict(case), steps=1)


MUON = {"optimizer.name": "muon", "parallelism.tp": 2}
REPORTED = {"parallelism.experts.ep": 2, "moe.aux_loss": 0.02, "model.mtp_depth": 1}


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("expert_gradients_scaled_by_ep", {"parallelism.experts.ep": 2}),
        ("expert_gradients_scaled_by_etp", {"parallelism.experts.etp": 2}),
        ("router_not_reduced_over_tp", {"parallelism.tp": 2}),
        ("router_not_summed_over_cp", {"parallelism.cp": 2}),
        ("router_without_its_gradient", {"moe.z_loss": 0.01}),
        ("norm_without_experts", {"parallelism.experts.ep": 2}),
        ("loss_divided_by_local_tokens", {"parallelism.experts.ep": 2}),
        ("balance_terms_by_the_wrong_group", {"parallelism.cp": 2, "moe.aux_loss_sequence": 0.02}),
        ("balance_terms_by_the_wrong_group", {"moe.aux_loss": 0.02}),
        ("balance_terms_counted_in_recomputation_too", {"moe.aux_loss": 0.02, "activation_checkpoint.mode": "full"}),
        ("garbage_gradients_without_tokens", MODELS["top_1"]),
        ("norm_of_own_heads_only", {"parallelism.tp": 2, "model.qk_norm": "full"}),
        ("rope_offset_wrong", {"parallelism.cp": 2}),
        ("label_shifted_across_shard_edge", {"parallelism.cp": 2}),
        ("next_token_within_a_shard", {"parallelism.cp": 2, "model.mtp_depth": 1}),
        ("nan_in_a_gradient", REPORTED),
        ("nan_in_a_load", REPORTED),
        ("nan_in_an_aux_term", REPORTED),
        ("nan_in_the_mtp_loss", REPORTED),
        ("muon_of_two_experts_as_one", MUON),
        ("muon_of_padded_rows", MUON),
        ("muon_scaled_by_local_shapes", MUON),
        ("muon_owners_that_rank_1_sees_otherwise", MUON),
    ],
)
def test_the_oracle_catches(fault: str, case: dict[str, Any]) -> None:
    case = in_few(2, case)
    agrees(tuple(case.items()))
    with pytest.raises((AssertionError, world.RankError), match=r"is off by|replicas of .* differ"):
        parity.check(2, case, fault=fault, steps=1)


def test_every_fault_is_planted() -> None:
    (planted,) = (mark.args[1] for mark in test_the_oracle_catches.pytestmark)
    assert {fault for fault, _ in planted} == set(planted_faults.FAULTS)


def test_train_py_itself_agrees_under_two_mappings(tmp_path: Path) -> None:
    """torchrun train.py, 3 steps in float64 on real text, and the same loop on ranks of a pool: the logs agree."""

    def arguments(name: str, mapping: dict[str, int]) -> list[str]:
        changes = {
            "training.dtype": "float64",
            "training.mixed_precision_param": "float64",
            "training.mixed_precision_reduce": "float64",
            "training.device": "cpu",
            "training.steps": 3,
            "training.seq_len": 32,
            "training.local_batch_size": 1,
            "training.global_batch_size": 8,
            "model.num_layers": 2,
            "moe.aux_loss": 0.0,
            "moe.aux_loss_sequence": 0.01,
            "metrics.tensorboard": False,
            "job.dump_folder": str(tmp_path / name),
        }
        changes |= {f"parallelism.{axis}": n for axis, n in ({"tp": 1, "experts.ep": 1} | mapping).items()}
        return ["--config", "train_configs/debug.toml", *parity.arguments(changes)]

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    run = processes.run([*torchrun, "train.py", *arguments("folded", {"tp": 2, "experts.ep": 2})])
    assert run.returncode == 0, run.stderr[-3000:]
    world.run(4, parity.train, arguments("pipelined", {"pp": 2, "cp": 2, "experts.ep": 2}))
    losses = {}
    for name in ("folded", "pipelined"):
        log = next((tmp_path / name).rglob("metrics.jsonl")).read_text()
        losses[name] = [[json.loads(line)[key] for key in ("loss", "grad_norm")] for line in log.splitlines()]
        assert len(losses[name]) == 3
    for a, b in zip(losses["folded"], losses["pipelined"], strict=True):
        assert a == pytest.approx(b, rel=1e-10)
