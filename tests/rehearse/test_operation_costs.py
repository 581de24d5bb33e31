"""FLOPs, bytes and kernels of operations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.rehearse.small import config_of
from titanmoe.models.count import flops_per_token
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.operation_costs import OperationCost, Operations, flops, stored_bytes
from titanmoe.rehearse.rehearsal import rehearse
from titanmoe.rehearse.rehearsal_table import costs_as_json

aten = torch.ops.aten


def total(func: Any, args: tuple, out: Any = (), kwargs: dict[str, Any] | None = None) -> OperationCost:
    operations = Operations()
    operations.add(func, args, kwargs or {}, out, CodeSite())
    return operations.total()


def test_operations() -> None:
    x, w = torch.zeros(4, 8), torch.zeros(8, 16)
    assert total(aten.mm.default, (x, w), x @ w) == OperationCost(1, 2 * 4 * 8 * 16, 4 * (32 + 128), 4 * 64)
    rows = torch.zeros(3, dtype=torch.int64)
    picked = total(aten.embedding.default, (torch.zeros(1000, 8), rows), torch.zeros(3, 8))
    assert (picked.read, picked.written) == (3 * 8 * 4 + 3 * 8, 3 * 8 * 4)
    assert total(aten.view.default, (x, [32]), x.view(32)) == total(aten.empty_like.default, (x,), x) == OperationCost()
    assert total(aten.promote_types.default, (torch.float32, torch.bfloat16), torch.float32) == OperationCost()
    assert stored_bytes(torch.zeros(4, 1).expand(4, 100)) == 16


def test_a_tensor_changed_in_place_is_written_and_one_that_is_only_filled_is_not_read() -> None:
    x = torch.zeros(32)
    assert total(aten.add_.Tensor, (x, x), x) == OperationCost(1, 0, 256, 128)
    assert total(aten.copy_.default, (x, x), x) == OperationCost(1, 0, 128, 128)
    assert total(aten.zero_.default, (x,), x) == OperationCost(1, 0, 0, 128)
    assert total(aten.add.out, (x, x), x, {"out": x}) == OperationCost(1, 0, 256, 128)
    adamw = total(aten._fused_adamw_.default, ([x], [x], [x], [x], [], [torch.zeros(())]))
    assert adamw == OperationCost(1, 0, 4 * 128 + 4, 3 * 128)


def test_attention_whose_heads_share_keys_has_the_flops_of_heads_with_keys_of_their_own() -> None:
    q, out = torch.zeros(2, 8, 6, 4), torch.zeros(2, 8, 6, 3)
    for heads in (2, 8):
        k, v = torch.zeros(2, heads, 10, 4), torch.zeros(2, heads, 10, 3)
        for forward, backward in (
            (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward),
            (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward),
        ):
            scores = 2 * 2 * 8 * 6 * 10
            assert flops(forward.default, (q, k, v), {}, out) == scores * (4 + 3)
            assert flops(backward.default, (out, q, k, v), {}, ()) == scores * (3 * 4 + 2 * 3)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_a_step_has_the_flops_that_the_formula_gives() -> None:
    """flops_per_token counts as MFU does, nothing recomputed; attention is a small part of it here."""
    wide = {"model.num_layers": 2, "model.dim": 64, "model.head_dim": 8, "model.expert_hidden": 128}
    wide |= {"training.mixed_precision_param": "bfloat16", "moe.kernels": "auto", "training.global_batch_size": 2}
    config = config_of(wide, 1, "h100")
    tokens = config.training.global_batch_size * config.training.seq_len
    counted_flops = rehearse(config, 1, 0, "h100").operations.total().flops / tokens
    expected = flops_per_token(config.model, config.training.seq_len)
    assert counted_flops == pytest.approx(expected, rel=0.05)


def test_every_operation_has_a_layer_a_region_and_a_pass() -> None:
    """Also in backward, whose operations have no line of the model in their stack."""
    wide = {"model.num_layers": 3, "activation_checkpoint.mode": "full", "training.global_batch_size": 2}
    config = config_of(wide | {"training.local_batch_size": 2}, 1, "cpu")
    operations = rehearse(config, 1, 0, "cpu").operations
    flops: Counter[tuple[str, str, str]] = Counter()
    for operation, count in operations.items():
        flops[operation.site.layer, operation.site.region, operation.site.phase] += operation.flops * count
    rows = 2 * config.training.seq_len * config.model.top_k
    once = 3 * 2 * rows * config.model.dim * config.model.expert_hidden
    for layer in ("layers.0", "layers.1", "layers.2"):
        parts = {part: flops[layer, "experts", part] for part in ("forward", "recomputed", "backward")}
        assert parts == {"forward": once, "recomputed": once * 2 // 3, "backward": 2 * once}  # the last one is not
        attention = [flops[layer, "attention", part] for part in ("forward", "recomputed", "backward")]
        assert 0 < attention[1] < attention[0] == attention[2] / 2  # nor is the last product here
    assert {layer for layer, _, _ in flops} == {"", "layers.0", "layers.1", "layers.2"}
    products = {region for (_, region, _), count in flops.items() if count}
    assert products == {"attention", "router", "experts", "head and loss"}
    assert {operation.site.phase for operation in operations if operation.site.region == "optimizer"} == {"update"}
    lines = {operation.site.file for operation in operations if operation.site.region == "experts" and operation.flops}
    assert lines == {"moe/grouped_mm.py"}
    report = costs_as_json(operations)
    for unit in ("flops", "read", "written"):
        assert sum(row[unit] * row["count"] for row in report["operations"]) == report[unit]
        regions = [of[unit] for parts in report["by_region"].values() for of in parts.values()]
        assert sum(regions) == report[unit] >= sum(of[unit] for of in report["by_layer"].values())
