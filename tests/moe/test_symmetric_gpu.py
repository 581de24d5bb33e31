"""The dispatcher over symmetric memory on real devices: python -m pytest -m gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Config
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.dispatchers.symm_mem import Symmetric
from titanmoe.moe.dispatchers.symmetric_buffers import missing
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped_mm import can_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def world_of_one() -> Iterator[Group]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(dist.group.WORLD.group_name, 1, 0)
    dist.destroy_process_group()


def test_rows_through_the_experts_without_a_host_sync(world_of_one: Group) -> None:
    """A single rank puts its rows into its own symmetric memory: there, the grouped product, and back; some choices
    are dropped.
    """
    config = Config()
    config.moe.dispatcher = "symm_mem"
    model, T, ranks = config.model, config.training.seq_len, ExpertRanks(world_of_one)
    dispatcher = Symmetric(model.num_experts)
    dispatcher.place(ranks)
    memory = Symmetric.reserve(model, config.moe, ranks, T, torch.bfloat16, torch.device("cuda"))
    assert len(memory.handles) == 2, "no symmetric memory was allocated"
    dispatcher.memory = memory
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
        exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, 0)
        y_TD = exchange.combine(experts(*exchange.receive_routed()))
        y_TD.backward(grad_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not memory.needs_repeat
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


@pytest.mark.skipif(torch.cuda.device_count() < 2 or bool(missing("cuda")), reason="needs two GPUs")
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
