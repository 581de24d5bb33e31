"""scripts/bench/roofline.py counts the layers of real models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from titanmoe.ops.kernels import installed
from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.work import Operation

FILE = Path(__file__).resolve().parent.parent / "scripts/bench/roofline.py"
spec = importlib.util.spec_from_file_location("bench_roofline", FILE)
roofline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(roofline)


def test_the_ceiling_of_one_operation() -> None:
    device = roofline.DEVICES["H100"]
    product = Operation("mm", CodeSite(), int(device.peak_bfloat16 / 1000), 10**6, 10**6)  # a millisecond of products
    assert roofline.ceiling({product: 2}, device) == pytest.approx(1 / 1.001)
    copies = Operation("clone", CodeSite(), 0, 1675 * 10**6, 1675 * 10**6)  # and one of copies
    assert roofline.ceiling({product: 1, copies: 1}, device) == pytest.approx(1 / 2.002)
    small = {Operation("add", CodeSite(), 0, 8, 8): 1000}  # the host takes five
    assert roofline.ceiling({product: 1} | small, device) == pytest.approx(1 / 5.005)


@pytest.mark.parametrize("groups", [1, 8])
def test_products_take_the_rate_of_their_size(groups: int) -> None:
    device, (m, n, k) = roofline.DEVICES["H100"], (4096, 1024, 2048)
    product = Operation("mm", CodeSite(), groups * 2 * m * n * k, groups * 2 * (m * k + k * n), groups * 2 * m * n)
    share = roofline.share(product, device)
    assert share == pytest.approx(device.share(m, n, k)) and 0.4 < share < 0.7
    assert roofline.ceiling({product: 1000}, device, usual=True) == pytest.approx(share, rel=0.1)
    attention = product._replace(name="_scaled_dot_product_flash_attention")
    assert roofline.share(attention, device) == device.attention


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_a_layer_of_mixtral() -> None:
    tokens = 256
    config = roofline.recipe("mixtral", tokens)
    model = config.model
    counted = roofline.ours(config)
    row = roofline.summary(counted, tokens)
    experts = 3 * model.dim * model.expert_hidden * model.top_k
    attention = 2 * model.dim * (model.num_heads + model.num_kv_heads) * model.head_dim
    weights = 2 * (experts + attention + model.dim * model.num_experts)
    scores = 4 * tokens * model.num_heads * model.head_dim
    assert row["forward"]["flops"] == pytest.approx(weights + scores, rel=1e-6)
    assert 2 * weights < row["backward"]["flops"] < 2 * weights + 3 * scores
    assert 0 < row["mfu"]["H100"] < row["mfu"]["H200"] < 1
    assert 0 < row["mfu_usual"]["H100"] < row["mfu"]["H100"]
    assert roofline.movers(counted, tokens)[0][:2] == ("_grouped_mm", "experts")
