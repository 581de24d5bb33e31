"""How many kernels a MoE layer launches on a GPU, from its norm to the residual sum: counted in a rehearsal.

A launch is an operation that is not a view, a Triton kernel, or a message.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.rehearse.small import config_of
from titanmoe.models.mixers.latent import LATENT
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.code_site import GATHER, REDUCE
from titanmoe.rehearse.operation_costs import Operation
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
NARROW = {"training.mixed_precision_param": "bfloat16", "moe.kernels": "auto", "model.num_experts": 16}
NARROW |= {"model.expert_hidden": 64, "model.dim": 64, "training.global_batch_size": 8}
DEEPSEEK = {"model.score_function": "sigmoid", "model.num_groups": 4, "model.top_groups": 2, "model.shared_hidden": 64}

LATENTS = {"model.kv_lora_rank": 16, "model.q_lora_rank": 16, "model.qk_nope_head_dim": 16, "model.v_head_dim": 16}
LATENTS |= {"model.qk_rope_head_dim": 8, "model.head_dim": 24, "model.num_kv_heads": 4, "model.num_heads": 4}


def launches(found: Rehearsal, layer: str = "layers.1") -> Counter[str]:
    counted: Counter[str] = Counter()
    for one, times in found.operations.items():
        site = one.site
        if site.layer == layer and site.region not in (GATHER, REDUCE, "attention"):
            # Norm and residual sum have no region; those of attention are as many.
            counted[site.phase] += times if site.region else times / 2
    for message in found.log.messages:
        if message.site.layer == layer and found.groups[message.group].kind == "dispatch":
            counted["backward" if message.backward else "forward"] += 1
    return counted


@pytest.mark.parametrize(
    "changes, forward, backward",
    [
        ({}, 31, 21),
        ({"parallelism.experts.etp": 2, "parallelism.experts.ep": 4}, 32, 21),
        (DEEPSEEK | {"moe.aux_loss_sequence": 0.001}, 52, 40),
        pytest.param({"moe.aux_loss_global": 0.001}, 48, 24, marks=pytest.mark.slow),
        pytest.param({"parallelism.experts.ep": 1}, 23, 20, marks=pytest.mark.slow),
    ],
    ids=["plain", "etp", "deepseek", "global", "ep 1"],
)
def test_a_dropless_layer_launches_few_kernels(changes: dict[str, Any], forward: int, backward: int) -> None:
    config = config_of(NARROW | {"parallelism.experts.ep": 8} | changes, 8, "h100")
    found = rehearse(config, 8, 0, "h100")
    counted = launches(found)
    assert counted.keys() == {"forward", "backward"}
    assert counted["forward"] <= forward and counted["backward"] <= backward, counted
    # The host asks once per layer, after the routed tokens have been copied, and not at all if none is sent.
    asks = ["moe/dispatchers/alltoall.py"] * (config.parallelism.experts.ep > 1)
    assert [line.file for line in found.log.syncs if line.layer == "layers.1"] == asks


def products(**changes: Any) -> dict[tuple[str, str], int]:
    """Of the second layer's experts and of their sums, how many in a step of two microbatches."""
    config = NARROW | {"training.global_batch_size": 16, "parallelism.experts.ep": 8}
    config |= {name.replace("__", "."): value for name, value in changes.items()}
    counted: Counter[tuple[str, str]] = Counter()
    for one, times in rehearse(config_of(config, 8, "h100"), 8, 0, "h100").operations.items():
        summed = one.site.file == "parallel/unsharded.py" and one.site.region == REDUCE
        if one.site.layer == "layers.1" and (summed or one.name in ("_grouped_mm", "add_gradient")):
            counted[one.name, one.site.phase] += times
    return dict(counted)


def test_gate_and_up_are_one_product_where_their_copies_lie_side_by_side() -> None:
    there, back = ("_grouped_mm", "forward"), ("_grouped_mm", "backward")
    assert products() == {there: 2 * 2, back: 2 * 4, ("_to_copy", "backward"): 3, ("add_", "backward"): 3}
    assert products(parallelism__experts__ep=4) == {there: 2 * 3, back: 2 * 6}  # FSDP gathers them apart


def test_products_that_accumulate_leave_nothing_to_add() -> None:
    found = products(moe__accumulate_weight_gradients=True)
    assert found == {("_grouped_mm", "forward"): 4, ("_grouped_mm", "backward"): 4, ("add_gradient", "backward"): 4}


def test_the_router_reads_its_input_in_16_bits() -> None:
    """Forward: parts of the weights, their product, a sum; counts set to zero, and the choice. Backward: of the choice;
    parts of the logits' gradients, two products, a sum over parts of the weights' gradients, and one with the gradients
    of the tokens that were dispatched."""
    config = config_of(NARROW | {"parallelism.experts.ep": 8}, 8, "h100")
    ran: dict[str, list[Operation]] = {"forward": [], "backward": []}
    for one, times in rehearse(config, 8, 0, "h100").operations.items():
        if (one.site.layer, one.site.region) == ("layers.1", "router"):
            ran[one.site.phase] += [one] * times
    names = {phase: sorted(one.name for one in ones) for phase, ones in ran.items()}
    assert names == {
        "forward": ["bfloat16_terms", "mm", "route", "sum", "zeros"],
        "backward": ["add", "bfloat16_terms", "mm", "mm", "route_backward", "sum"],
    }


@pytest.mark.parametrize("latent", [False, True], ids=["grouped queries", "latents"])
def test_no_pass_adds_up_gradients_of_one_input(latent: bool) -> None:
    """Of queries, keys and values; of both latents; of a shared expert's gate and up. Norm and residual sum have no
    region."""
    changes = NARROW | DEEPSEEK | {"parallelism.experts.ep": 8} | (LATENTS if latent else {})
    sums: Counter[str] = Counter()
    for one, times in rehearse(config_of(changes, 8, "h100"), 8, 0, "h100").operations.items():
        if one.site.layer == "layers.1" and one.site.phase == "backward" and one.name in ("add", "add_", "addmm"):
            sums[one.site.region, one.name] += times
    assert sums["attention", "addmm"] == (1 if latent else 2) and sums["shared expert", "addmm"] == 1
    assert not sums["attention", "add"] and not sums["attention", "add_"]


def test_heads_of_latents_are_written_once() -> None:
    """Forward: queries' ends are turned in place, keys written; backward: queries' gradients, and those of keys and
    values together. `cat` is of the latents alone, and `sum` of the gradients of their norms' weights."""
    config = config_of(NARROW | LATENTS | {"parallelism.experts.ep": 8}, 8, "h100")
    ran: Counter[tuple[str, str]] = Counter()
    moved: Counter[str] = Counter()
    for one, times in rehearse(config, 8, 0, "h100").operations.items():
        if (one.site.layer, one.site.region) == ("layers.1", "attention"):
            ran[one.site.phase, one.name] += times
            moved[one.site.phase] += (one.read + one.written) * times * one.name.endswith("_ends")
    kinds = "rotate_ends", "join_ends", "split_ends", "cat", "sum", "rotate"
    assert [ran["forward", kind] for kind in kinds] == [1, 1, 0, 1, 0, 0]
    assert [ran["backward", kind] for kind in kinds] == [0, 1, 1, 2, 2, 0]
    model, tokens = config.model, config.training.local_batch_size * config.training.seq_len
    # Two kernels read cos and sin, and one reads or writes the turned key.
    angles, key = 2 * tokens * 2 * model.qk_rope_head_dim * 4, tokens * model.qk_rope_head_dim * 2
    planned = [2 * tokens * heads + angles + key for heads in LATENT.work(model, 1).moved]
    assert [moved[phase] for phase in ("forward", "backward")] == planned
