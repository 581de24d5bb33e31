"""What a GPU does differently from a CPU, on a single one: python -m pytest -m gpu.

Of each test the first case is what runs by default on Hopper, because `--one-of-each` takes no other. What might leave
the device unusable to the tests after it, products of no rows, comes last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.moe.test_compile import compiled_products
from tests.support.masks import mask_of
from tests.test_policy import LOSSES, with_columns
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config.schema import Model, MoE
from titanmoe.data.batch import Batch
from titanmoe.models.attention import causal_attention
from titanmoe.moe import fp8
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped_mm import Groups, can_group, grouped_product, loop_product
from titanmoe.moe.layer import MoE as Layer
from titanmoe.parallel import attention_kernel
from titanmoe.parallel.attention_block import block, block_backward, block_reference
from titanmoe.parallel.compiled import compile_layer
from titanmoe.parallel.context import Placement, blockwise_attention
from titanmoe.parallel.flex import Masks, flex, flex_attention_over
from titanmoe.tokens import Tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).resolve().parent.parent


def test_the_debug_recipe_learns(tmp_path: Path) -> None:
    alone = ["--parallelism.tp", "1", "--parallelism.experts.ep", "1", "--training.mixed_precision_param", "bfloat16"]
    where = ["--job.dump_folder", str(tmp_path), "--training.steps", "20", "--training.device", "cuda"]
    command = [sys.executable, "train.py", "--config", "train_configs/debug.toml", *alone, *where]
    run = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    log = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 0.5


@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0, 0, 136]])
def test_grouped_product_equals_the_loop(counts: list[int]) -> None:
    grouped_equals_loop(counts)


def grouped_equals_loop(counts: list[int]) -> None:
    count = torch.tensor(counts, device="cuda")
    x = torch.randn(sum(counts), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if not can_group(x, 32, 64):
        pytest.skip("torch's grouped product needs Hopper or later")
    grad = torch.randn(sum(counts), 32, device="cuda", dtype=torch.bfloat16)
    results = []
    for product in (loop_product, grouped_product):
        y = product(x, w, Groups(count))
        results.append([y, *torch.autograd.grad(y, (x, w), grad)])
    for loop, grouped in zip(*results, strict=True):
        torch.testing.assert_close(loop, grouped, rtol=2e-2, atol=2e-2)


def test_compiled_experts_of_a_rank_without_a_row() -> None:
    experts = Experts(Model(num_experts=4, top_k=2, dim=64, expert_hidden=32), MoE(), torch.bfloat16).cuda()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    compiled = compiled_products(experts, "inductor")
    for counts in ([3, 0, 5, 1], [0, 0, 0, 0], [0, 1, 0, 0]):
        x = torch.randn(sum(counts), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = compiled(x.view_as(x), torch.rand(sum(counts), 1, device="cuda"), torch.tensor(counts, device="cuda"))
        grads = torch.autograd.grad(y.float().square().sum(), [x, *experts.parameters()])
        assert y.shape == x.shape == grads[0].shape
        for grad in grads[1:]:
            empty = torch.tensor(counts, device="cuda") == 0
            assert grad.isfinite().all() and (grad[empty] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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
        out, lse = block(q, k, v, bias, mask == "causal")
        grads = block_backward(grad, q, k, v, bias, out=out, lse=lse, causal=mask == "causal")
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out, want, **close)
    torch.testing.assert_close(lse, want_lse, rtol=1e-2, atol=1e-2)
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [16, 0])
@pytest.mark.parametrize("documents", [True, False])
def test_windows_and_sinks_by_chunks_are_the_plain_ones(dtype: torch.dtype, window: int, documents: bool) -> None:
    """128 positions; the window splits them into chunks of 64."""
    q, k, v = (torch.randn(2, 128, heads, 32, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, device="cuda", dtype=dtype, requires_grad=True)
    document = torch.stack([torch.arange(128, device="cuda") // n for n in (10, 50)]) if documents else None
    want, got = (
        attend(q, k, v, mask_of(document, window), sinks) for attend in (causal_attention, blockwise_attention)
    )
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(got, want, **close)
    grad = torch.randn_like(want)
    grads = zip(*(torch.autograd.grad(out, (q, k, v, sinks), grad) for out in (got, want)), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine, expected, **close)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_layer_with_padded_bins_fits_a_cuda_graph(kernels: str) -> None:
    fits_a_cuda_graph(kernels, compiled=False)


@pytest.mark.usefixtures("compiled")
def test_a_compiled_layer_with_padded_bins_fits_a_cuda_graph() -> None:
    fits_a_cuda_graph("auto", compiled=True)


def fits_a_cuda_graph(kernels: str, compiled: bool) -> None:
    """Forward and backward are captured once; replayed with other tokens they give the same as uncaptured."""
    model = Model(num_experts=8, top_k=2, dim=128, expert_hidden=256)
    options = MoE(capacity_factor=1.0, pad_to_capacity=True, aux_loss=0.01, kernels=kernels)
    layer = Layer(model, options, shared=None, seed=0, layer=0, microbatches=1, dtype=torch.bfloat16).cuda()
    if compiled:
        compile_layer(layer, "inductor")
    generator = torch.Generator("cuda").manual_seed(0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    index = torch.arange(2 * 64, device="cuda")
    everyone = torch.ones_like(index, dtype=torch.bool)
    tokens = Tokens(index.view(2, 64) % 64, index, index // 64, everyone, torch.tensor(0, device="cuda"))
    layer.begin_step(1, torch.tensor(128.0, device="cuda"), 2)
    given = torch.randn(3, 2, 64, 128, device="cuda", generator=generator).bfloat16()
    x = given[0].clone().requires_grad_()

    def both() -> list[torch.Tensor]:
        y = layer(x, tokens)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for case in given[1:]:
        with torch.no_grad():
            x.copy_(case)
        graph.replay()
        for got, want in zip(captured, both(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [64, 64, 64, 64], [0, 0, 0, 3]])
def test_products_in_8_bits_equal_their_formula(counts: list[int]) -> None:
    in_8_bits_equal_formula(counts)


def in_8_bits_equal_formula(counts: list[int]) -> None:
    if reason := fp8.missing(True):
        pytest.skip(reason)
    count = torch.tensor(counts, device="cuda")
    x = torch.randn(sum(counts), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    cotangents = [torch.randn(sum(counts), 32, device="cuda", dtype=torch.bfloat16) for _ in weights]
    results = []
    for dtype in ("fp8_emulated", "fp8"):
        emulated = dtype == "fp8_emulated"
        products = fp8.EightBitProducts(
            groups=Groups(count), method="loop" if emulated else "grouped", emulated=emulated
        )
        outputs = products.up(x, *weights)
        results.append([*outputs, *torch.autograd.grad(outputs, (x, *weights), cotangents)])
    for want, got in zip(*results, strict=True):
        # both round the result to bfloat16; the hardware sums in fewer bits than float32 has
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * largest)


@pytest.fixture
def compiled() -> Iterator[None]:
    """After a number of compilations of one function torch runs it uncompiled, which would go unnoticed here."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "dtype, window, documents, with_sinks",
    [  # each is compiled, forward and backward
        (torch.bfloat16, 0, True, False),
        (torch.bfloat16, 100, True, True),
        (torch.bfloat16, 100, False, False),
        (torch.bfloat16, 0, False, True),
        (torch.float32, 0, True, False),
        (torch.float32, 100, True, True),
    ],
)
def test_flex_attention_is_the_plain_one(dtype: torch.dtype, window: int, documents: bool, with_sinks: bool) -> None:
    """Forward and backward; 500 positions, which are not a whole number of blocks."""
    q, k, v = (torch.randn(2, 500, heads, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, device="cuda", dtype=dtype, requires_grad=True) if with_sinks else None
    document = torch.stack([torch.arange(500, device="cuda") // n for n in (60, 300)]) if documents else None
    want = causal_attention(q, k, v, mask_of(document, window), sinks)
    masks = Masks(Placement(1, zigzag=False), 0)
    got = flex_attention_over(q, k, v, mask_of(document, window), sinks, masks=masks, group=NO_GROUP)
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 3e-3, "atol": 3e-3}
    torch.testing.assert_close(got, want, **close)
    grad, inputs = torch.randn_like(want), (q, k, v, *([sinks] if with_sinks else []))
    grads = zip(*(torch.autograd.grad(out, inputs, grad) for out in (got, want)), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine, expected, **close)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rank", [0, 1])
def test_flex_attention_of_a_ranks_queries_is_the_plain_one(rank: int) -> None:
    """As under allgather with cp = 2, values narrower than keys as in latent attention."""
    q, k, v = (torch.randn(2, 512, 4, w, device="cuda", dtype=torch.bfloat16, requires_grad=True) for w in (96, 96, 64))
    document, placement = torch.arange(512, device="cuda").expand(2, -1) // 200, Placement(2, zigzag=True)
    want = placement.rank_slice(causal_attention(q, k, v, mask_of(document)), rank)
    got = flex(placement.rank_slice(q, rank), k, v, Masks(placement, rank)(512, mask_of(document), q.device), None)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    grad = torch.randn_like(want)
    grads = zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (got, want)), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine, expected, rtol=3e-2, atol=3e-2)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    if lack := attention_kernel.missing(request.param, 32):
        pytest.skip(lack)
    attention_kernel.use(request.param)
    yield
    attention_kernel.use("cudnn")


@pytest.mark.parametrize("kernel", ["cudnn", "fa2", "fa3", "fa4"], indirect=True)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_block_takes_fewer_key_heads(heads: int, causal: bool, kernel: None) -> None:
    """40 positions: the kernels' tiles are wider."""
    for dtype, width in ((torch.bfloat16, 32), (torch.bfloat16, 16), (torch.float32, 32)):  # width of values
        shapes = (4, 32), (heads, 32), (heads, width)
        q, k, v = (torch.randn(2, n, 40, w, device="cuda", dtype=dtype, requires_grad=True) for n, w in shapes)
        want, want_lse = block_reference(q, *(x.repeat_interleave(4 // heads, 1) for x in (k, v)), None, causal)
        grad = torch.randn_like(want)
        want_grads = torch.autograd.grad(want, (q, k, v), grad)
        with torch.no_grad():
            out, lse = block(q, k, v, None, causal)
            grads = block_backward(grad, q, k, v, None, out=out, lse=lse.contiguous(), causal=causal)
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(out, want, **close)
        torch.testing.assert_close(lse, want_lse, rtol=1e-2, atol=1e-2)
        for got, expected in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(got.to(dtype), expected, **close)


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_metrics_of_a_policy_are_those_of_the_host(name: str) -> None:
    """The session's log-probabilities are on the device, and its batches in host memory."""
    labels = torch.randint(0, 9, (3, 16), generator=torch.Generator().manual_seed(0))
    batch = with_columns(Batch(labels, labels, labels == labels), documents=True)
    log_p = -4 + torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert LOSSES[name].metrics(log_p.cuda(), batch, log_p.cuda()) == LOSSES[name].metrics(log_p, batch, log_p)


def test_a_run_is_timed_and_traced(tmp_path: Path) -> None:
    alone = ["--parallelism.tp", "1", "--parallelism.experts.ep", "1", "--training.mixed_precision_param", "bfloat16"]
    where = ["--job.dump_folder", str(tmp_path), "--training.steps", "6", "--training.device", "cuda"]
    look = ["--profile.steps", "4", "--profile.memory", "steps"]
    command = [sys.executable, "train.py", "--config", "train_configs/debug.toml", *alone, *where, *look]
    run = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    log = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    inside = {"time.dispatch", "time.validation"}  # of forward and backward, and not of the step
    for line in log[1:]:
        whole = sum(value for name, value in line.items() if name.startswith("time.") and name not in inside)
        assert 0 < line["time.dispatch"] < line["time.forward_backward"] < whole
    assert log[-1]["step_time_s"] * 0.5 < whole < log[-1]["step_time_s"] * 1.5
    files = {file.name for file in next(tmp_path.rglob("profile")).iterdir()}
    assert files == {"step-4-rank-0.json.gz", "step-4-rank-0.txt", "step-4-rank-0.pickle"}


def test_grouped_products_of_no_rows() -> None:
    grouped_equals_loop([0, 0, 0, 0])


def test_products_of_no_rows_in_8_bits() -> None:
    in_8_bits_equal_formula([0, 0, 0, 0])
