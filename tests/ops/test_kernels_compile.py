"""The kernels compile to Hopper machine code at real models' shapes. This needs Triton's compiler but no GPU.

The interpreter of tests/ops/test_interpreter.py accepts what the compiler does not, such as a loop that changes a
variable's type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titanmoe.ops.kernels import installed, interpreted

pytestmark = pytest.mark.skipif(not installed() or interpreted(), reason="Triton's compiler is not there")
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64"}


def size_of_machine_code(kernel: Any, pointers: dict[str, Any], warps: int, **constants: Any) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"])


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_rows(dtype: torch.dtype) -> None:
    from titanmoe.ops.kernels import rows
    from titanmoe.ops.kernels.kernel_launch import tile, wide

    own, heavy = POINTERS[dtype], POINTERS[torch.promote_types(dtype, torch.float32)]
    for width, weighted in ((2048, True), (7168, False)):
        pointers = dict(x=own, y=own, out=own, index="*i64", slot="*i64", weight=heavy, weight_out=heavy)
        pointers |= dict(weight_grad=heavy)
        row, column = tile(width, rows.TILE)
        shape = dict(D=width, K=8, ROWS=row, COLUMNS=column, WEIGHTED=weighted)
        assert size_of_machine_code(rows._fetch, pointers, 8, **shape) > 0
        assert size_of_machine_code(rows._sum, pointers, 8, **shape, J=8, WIDE=wide(dtype)) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_swiglu(dtype: torch.dtype) -> None:
    from titanmoe.ops.kernels import swiglu
    from titanmoe.ops.kernels.kernel_launch import tile, wide

    names = ("grad", "gate", "up", "out", "grad_gate", "grad_up")
    heavy = POINTERS[torch.promote_types(dtype, torch.float32)]
    pointers = dict.fromkeys(names, POINTERS[dtype]) | {"weight": heavy, "grad_weight": heavy}
    for width, clamped in ((14336, False), (2880, True)):
        row, column = tile(width, swiglu.TILE)
        shape = dict(F=width, WIDE=wide(dtype), CLAMPED=clamped, ROWS=row, COLUMNS=column)
        for kernel in (swiglu._forward, swiglu._backward):
            assert size_of_machine_code(kernel, pointers, 4, **shape) > 0


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "score, experts, top_k, groups, forced",
    [
        ("softmax", 128, 8, 1, False),
        ("sigmoid", 256, 8, 8, False),
        pytest.param("softmax_after_topk", 8, 2, 1, False, marks=pytest.mark.slow),
        pytest.param("softmax", 60, 4, 1, True, marks=pytest.mark.slow),
    ],
)
def test_route(score: str, experts: int, top_k: int, groups: int, forced: bool, dtype: torch.dtype) -> None:
    from triton import next_power_of_2

    from titanmoe.ops.kernels import route

    own, table = POINTERS[dtype], ("logits", "scores", "weights", "grad_scores", "grad_weights", "out")
    pointers = dict.fromkeys(table, own) | dict.fromkeys(("index", "sample", "chosen", "count"), "*i64")
    pointers |= {"bias": "*fp32", "valid": "*i1"}
    shape = dict(route._tile(experts), SCALE=2.5, K=top_k, MODE=route.MODES[score], NORM=True)
    choice = dict(KP=next_power_of_2(top_k), G=groups, GP=next_power_of_2(groups), TOP=max(1, groups // 2))
    # Unrolled over the experts and several warps it was 500 KB and took half a minute to compile.
    assert size_of_machine_code(route._forward, pointers, 1, **shape, **choice, FORCED=forced) < 300_000
    assert size_of_machine_code(route._backward, pointers, 1, **shape, OF_SCORES=True, OF_WEIGHTS=True) < 300_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_loss(dtype: torch.dtype) -> None:
    from titanmoe.ops.kernels import loss
    from titanmoe.ops.kernels.kernel_launch import wide

    heavy = POINTERS[torch.promote_types(dtype, torch.float32)]
    pointers = dict.fromkeys(("top", "total", "label_logit", "log_total", "scale"), heavy)
    pointers |= {"logits": POINTERS[dtype], "label": "*i64"}
    for kernel in (loss._forward, loss._backward):
        assert size_of_machine_code(kernel, pointers, 8, V=8064, WIDE=wide(dtype), COLUMNS=loss.TILE) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_rotate(dtype: torch.dtype) -> None:
    from titanmoe.ops.kernels import rotate
    from titanmoe.ops.kernels.kernel_launch import wide

    heavy = POINTERS[torch.promote_types(dtype, torch.float32)]
    pointers = dict.fromkeys(("q", "k", "q_out", "k_out"), POINTERS[dtype]) | {"cos": heavy, "sin": heavy}
    for heads, keys, width in ((32, 4, 128), (128, 0, 64)):
        shape = dict(H=heads, G=keys, HALF=width // 2, P=width // 2, SIGN=-1, WIDE=wide(dtype), ROWS=32)
        assert size_of_machine_code(rotate._rotate, pointers, 4, **shape) > 0


@pytest.mark.parametrize("experts, ep, etp", [(128, 8, 1), pytest.param(8, 4, 2, marks=pytest.mark.slow)])
def test_layout_and_balance(experts: int, ep: int, etp: int) -> None:
    from triton import next_power_of_2

    from titanmoe.ops.kernels import choice_rows, score_spread

    pointers = dict(chosen="*i64", ends="*i32", entry="*i64", slot="*i64", inverse="*i64", order="*i64")
    shape = choice_rows.tile(experts)
    assert size_of_machine_code(choice_rows._count, pointers | {"count": "*i32"}, 8, **shape) > 0
    pointers["count"] = "*i64"
    assert size_of_machine_code(choice_rows._assign, pointers, 8, **shape, HELD=experts // ep, ETP=etp) > 0
    table = {"scores": "*fp32", "valid": "*i1", "out": "*fp64"}
    assert size_of_machine_code(score_spread._spread, table, 4, **score_spread.tile(experts), NORM=True) > 0
    pieces = dict(J=experts, EXPERTS=experts // ep, P=next_power_of_2(experts), PIECE=choice_rows.PIECE)
    assert size_of_machine_code(choice_rows._regroup, pointers, 4, **pieces) > 0


@pytest.mark.parametrize("contiguous", [True, False])
def test_quantise(contiguous: bool) -> None:
    from titanmoe.ops.kernels import quantise

    x = torch.empty(2, 2048, 768, dtype=torch.bfloat16, device="meta")
    shape = quantise.shape(x if contiguous else x.transpose(1, 2))
    pointers = {"x": "*bf16", "q": "*fp8e4nv", "scale": "*fp32"}
    assert size_of_machine_code(quantise._quantise, pointers, 8, **shape) > 0


@pytest.mark.parametrize("width, dtype", [(2048, torch.bfloat16), (7168, torch.bfloat16), (1, torch.float32)])
def test_put(width: int, dtype: torch.dtype) -> None:
    """It knows nothing of experts: the same machine code serves 8, 128 and 256."""
    from titanmoe.ops.kernels import put
    from titanmoe.ops.kernels.kernel_launch import tile

    rows, columns = tile(width, put.TILE)
    pointers = {"x": POINTERS[dtype], "to": "*i64", "addresses": "*i64"}
    assert size_of_machine_code(put._put, pointers, 8, D=width, ROWS=rows, COLUMNS=columns) > 0
