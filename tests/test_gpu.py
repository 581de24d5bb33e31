"""What a GPU does otherwise than a CPU, on one of them: python -m pytest -m gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titanmoe.comm import ALONE
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.models.attention import causal_attention
from titanmoe.moe.experts import Experts, can_group, grouped_loop, grouped_product
from titanmoe.moe.symmetric import Symmetric, missing
from titanmoe.parallel.context import _block, _block_backward, alone, block_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).resolve().parent.parent


def test_the_debug_recipe_learns(tmp_path: Path) -> None:
    alone = ["--parallelism.tp", "1", "--parallelism.experts.ep", "1", "--training.mixed_precision_param", "bfloat16"]
    where = ["--job.dump_folder", str(tmp_path), "--training.steps", "20", "--training.device", "cuda"]
    command = [sys.executable, "train.py", "--config", "train_configs/debug.toml", *alone, *where]
    run = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    log = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 0.5


def test_grouped_product_equals_the_loop() -> None:
    count = torch.tensor([5, 0, 130, 1], device="cuda")
    x = torch.randn(136, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if not can_group(x, 32, 64):
        pytest.skip("torch's grouped product needs Hopper or later")
    grad = torch.randn(136, 32, device="cuda", dtype=torch.bfloat16)
    results = []
    for product in (grouped_loop, grouped_product):
        y = product(x, w, count)
        results.append([y, *torch.autograd.grad(y, (x, w), grad)])
    for loop, grouped in zip(*results, strict=True):
        torch.testing.assert_close(loop, grouped, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "full", "documents"])
@pytest.mark.parametrize("value_width", [32, 16])
def test_attention_block_equals_the_reference(dtype: torch.dtype, mask: str, value_width: int) -> None:
    widths = (32, 32, value_width)
    q, k, v = (torch.randn(2, 4, 64, h, device="cuda", dtype=dtype, requires_grad=True) for h in widths)
    bias = None
    if mask == "documents":
        document = torch.arange(64, device="cuda") // 10
        allowed = (document.unsqueeze(0) == document.unsqueeze(1)).tril()
        bias = torch.zeros(2, 1, 64, 64, device="cuda", dtype=dtype).masked_fill(~allowed, -torch.inf)
    want, want_lse = block_reference(q, k, v, bias, mask == "causal")
    grad = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, (q, k, v), grad)
    with torch.no_grad():
        out, lse = _block(q, k, v, bias, mask == "causal")
        grads = _block_backward(grad, q, k, v, bias, out, lse, mask == "causal")
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out, want, **close)
    torch.testing.assert_close(lse, want_lse, rtol=1e-2, atol=1e-2)
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("documents", [False, True])
def test_windows_and_sinks_by_chunks_are_the_plain_ones(dtype: torch.dtype, window: int, documents: bool) -> None:
    """128 positions; the window cuts them into chunks of 64."""
    q, k, v = (torch.randn(2, 128, heads, 32, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, device="cuda", dtype=dtype, requires_grad=True)
    document = torch.stack([torch.arange(128, device="cuda") // n for n in (10, 50)]) if documents else None
    want, got = (attend(q, k, v, document, window, sinks) for attend in (causal_attention, alone))
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(got, want, **close)
    grad = torch.randn_like(want)
    grads = zip(*(torch.autograd.grad(out, (q, k, v, sinks), grad) for out in (got, want)), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine, expected, **close)


def test_rows_through_the_experts_without_a_host_sync() -> None:
    """The dispatcher over symmetric memory on a rank alone, the grouped product, and back; some choices dropped."""
    config = Config()
    config.moe.dispatcher = "symm_mem"
    model, T = config.model, config.training.seq_len
    dispatcher = Symmetric(config, derive(1, config.parallelism), ALONE, torch.device("cuda"))
    with torch.device("cuda"):
        experts = Experts(model, config.moe, torch.bfloat16)
        x_TD = torch.randn(T, model.dim, dtype=torch.bfloat16, requires_grad=True)
        weights_TK = torch.rand(T, model.top_k, requires_grad=True)
        chosen_TK = torch.stack([torch.randperm(model.num_experts)[: model.top_k] for _ in range(T)])
        chosen_TK[::5, 0] = model.num_experts
        grad_TD = torch.randn_like(x_TD)
    if not can_group(x_TD, model.expert_hidden, model.dim):
        pytest.skip("torch's grouped product needs Hopper or later")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows_RD, weights_R1, count_e, route = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, 0)
        y_TD = dispatcher.combine(experts(rows_RD, weights_R1, count_e), route)
        y_TD.backward(grad_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [y_TD, x_TD.grad, weights_TK.grad, experts.w1.grad, experts.w2.grad]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x_TD, weights_TK, experts.w1, experts.w2)]
    x, weights, w1, w2 = leaves
    chosen_TKE = torch.nn.functional.one_hot(chosen_TK, model.num_experts + 1)[:, :, :-1]
    weight_TE = (weights.unsqueeze(2) * chosen_TKE).sum(1)
    h_ETF = torch.nn.functional.silu(x @ w1.mT) * (x @ experts.w3.detach().mT)
    want_TD = ((h_ETF * weight_TE.t().unsqueeze(2)).bfloat16() @ w2.mT).float().sum(0)
    wanted = [want_TD, *torch.autograd.grad(want_TD, leaves, grad_TD.float())]
    for got, want in zip(found, wanted, strict=True):
        scale = float(want.float().abs().max())
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0.03 * scale)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or bool(missing("cuda")), reason="needs two GPUs and NVSHMEM")
@pytest.mark.parametrize("factor", ["1.0", "2.0"])
def test_symmetric_memory_trains_as_all_to_all_does(tmp_path: Path, factor: str) -> None:
    losses = {}
    for dispatcher in ("alltoall", "symm_mem"):
        ask = ["--parallelism.tp", "1", "--parallelism.experts.ep", "2", "--training.mixed_precision_param", "bfloat16"]
        ask += ["--moe.dispatcher", dispatcher, "--moe.symm_mem_factor", factor, "--training.steps", "5"]
        ask += ["--job.dump_folder", str(tmp_path / dispatcher), "--training.device", "cuda"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launch, "train.py", "--config", "train_configs/debug.toml", *ask]
        run = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-3000:]
        log = next((tmp_path / dispatcher).rglob("metrics.jsonl")).read_text().splitlines()
        losses[dispatcher] = [json.loads(line)["loss"] for line in log]
    assert losses["symm_mem"] == pytest.approx(losses["alltoall"], rel=0.01)
