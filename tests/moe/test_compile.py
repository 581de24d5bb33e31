"""torch.compile: one graph each for attention, experts of any number of rows, and a layer with padded bins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.parity import TINY
from tests.support import tolerances
from tests.support.case_features import MODELS
from titanmoe.config.schema import Model, MoE
from titanmoe.mask import CAUSAL
from titanmoe.models.attention import Attention
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import rope_angles
from titanmoe.moe.experts import Experts
from titanmoe.moe.layer import MoE as Layer
from titanmoe.moe.traced_products import experts_down, experts_up
from titanmoe.tokens import Tokens

SHAPE = dict(num_experts=4, top_k=2, dim=16, expert_hidden=24)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def filled(module: nn.Module) -> Any:
    for seed, weight in enumerate(module.parameters()):
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return module


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def same(results: list[list[Tensor]], dtype: torch.dtype) -> None:
    """Forward and backward: a rounding after each of some 6 steps, twice as many in backward, each a sum of 40."""
    for got, want in zip(*results, strict=True):
        tolerances.assert_close(got, want, terms=18 * 40, roundings=18, dtype=dtype)


COUNTS = [3, 4, 5, 6], [9, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 40, 0, 0], [1, 1, 1, 1]


def compiled_products(experts: Experts, backend: str) -> Any:
    """Return the experts' products as one graph for any number of rows, as where dispatch is in the graph too."""
    graph = torch.compile(lambda *given: experts.products(*given), backend=backend, fullgraph=True)

    def run(x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        for x in (x_RD, weight_R1):
            torch._dynamo.decorators.mark_unbacked(x, 0)
        return graph(x_RD, weight_R1, count_e)

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["loop", "grouped"])
@pytest.mark.parametrize("switches", [{}, {"expert_linear_bias": True, "expert_activation": "clamped_swiglu"}])
def test_products_are_one_graph_for_any_number_of_rows(switches: dict[str, Any], dtype: torch.dtype) -> None:
    experts = filled(Experts(Model(**SHAPE, **switches), MoE(router_dtype="float64"), dtype))
    compiled = compiled_products(experts, "aot_eager")
    for counts in COUNTS:
        results = []
        for products in (compiled, experts.products):
            x_RD, weight_R1 = random(sum(counts), 16, dtype=dtype), random(sum(counts), 1, dtype=torch.float64, seed=1)
            y_RD = products(x_RD.view_as(x_RD), weight_R1.view_as(weight_R1), torch.tensor(counts))
            grads = torch.autograd.grad(y_RD.double().square().sum(), [x_RD, weight_R1, *experts.parameters()])
            results.append([y_RD, *grads])
        same(results, dtype)
        assert graphs() == 1, f"compiled again for {counts}"


@pytest.mark.parametrize("kind", ["grouped", "even", "loop"])
@pytest.mark.parametrize("trained", [(True, True, True), (True, False, True), (False, True, False)])
def test_torch_checks_the_operations(kind: str, trained: tuple[bool, ...]) -> None:
    """Schema, shapes of fake tensors and gradients, also of what is partly frozen."""
    rows, inputs, weights = trained
    count_e, dtype = torch.tensor([4, 4]), torch.float32 if kind == "grouped" else torch.float64
    groups = {"grouped": [count_e, count_e.cumsum(0, dtype=torch.int32)], "even": [count_e], "loop": [count_e] * 2}[
        kind
    ]
    x_RD = random(8, 16, dtype=dtype).detach().requires_grad_(rows)
    w1, w3, w2 = (random(2, 16, 16, dtype=dtype, seed=i).detach().requires_grad_(weights) for i in range(3))
    weight_R1 = random(8, 1, dtype=dtype).detach().requires_grad_(inputs)
    hidden = [random(8, 16, dtype=dtype, seed=i).detach().requires_grad_(rows) for i in (4, 5)]
    how = groups, kind, False, "torch"
    torch.library.opcheck(experts_up, (x_RD, [w1, w3], *how))
    torch.library.opcheck(experts_down, (hidden, weight_R1, [w2], *how))


# Scalar code, not optimised: two thirds of the test's time would go into optimising loops over a few numbers.
QUICKLY = {"cpp.simdlen": 1, "cpp.vec_isa_ok": True, "aot_inductor.debug_compile": True, "compile_threads": 1}


@torch._inductor.config.patch(QUICKLY)
def test_a_rank_without_a_row_runs_the_compiled_experts() -> None:
    """By inductor, after a call with rows."""
    switches = {"expert_linear_bias": True, "expert_activation": "clamped_swiglu"}
    experts = filled(Experts(Model(**SHAPE | {"dim": 64, "expert_hidden": 32}, **switches), MoE(), torch.bfloat16))
    compiled = compiled_products(experts, "inductor")
    for counts in ([3, 0, 5, 1], [0, 0, 0, 0]):
        x_RD, weight_R1 = random(sum(counts), 64, dtype=torch.bfloat16), random(sum(counts), 1, seed=1)
        y_RD = compiled(x_RD.view_as(x_RD), weight_R1.view_as(weight_R1), torch.tensor(counts))
        grads = torch.autograd.grad(y_RD.float().square().sum(), [x_RD, weight_R1, *experts.parameters()])
        assert y_RD.shape == x_RD.shape and grads[0].shape == x_RD.shape and grads[1].shape == weight_R1.shape
    assert all((grad == 0).all() for grad in grads[2:]), "of experts without a row"
    assert graphs() == 1


@pytest.mark.parametrize("padded", [False, True], ids=["dropless", "padded"])
def test_a_layer_is_one_graph_whatever_the_routing_and_one_in_validation(padded: bool) -> None:
    """tests/parallel/test_compiled.py checks its numbers, in float64."""
    options = MoE(capacity_factor=float(padded), pad_to_capacity=padded, aux_loss=0.02)
    shape = Model(**SHAPE, score_function="sigmoid", num_groups=2, top_groups=1)
    layer = filled(Layer(shape, options, shared=None, seed=0, layer=0, microbatches=1, dtype=torch.bfloat16))
    index = torch.arange(32)
    tokens = Tokens(index.view(2, 16) % 16, index, index // 16, index % 5 != 4, torch.tensor(0))
    layer.begin_step(1, torch.tensor(32.0), 2)
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    made = []
    for seed, favourite in enumerate((None, 0, 3)):
        layer.router.expert_bias.zero_()
        if favourite is not None:
            layer.router.expert_bias[favourite] = 9.0
        results = []
        for forward in (compiled, layer.forward):
            x_BsD = random(2, 16, 16, dtype=torch.bfloat16, seed=seed)
            y_BsD = forward(x_BsD, tokens)
            results.append([y_BsD, *torch.autograd.grad(y_BsD.float().square().sum(), [x_BsD, *layer.parameters()])])
        made.append(graphs())
        same(results, torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x_BsD, tokens), results[0][0], rtol=2e-2, atol=1e-2)
        made.append(graphs())
    assert made == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "name", ["gpt_oss", "deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "qwen3_moe"))]
)
def test_attention_is_one_graph(name: str) -> None:
    given = {key.removeprefix("model."): value for key, value in (TINY | MODELS[name]).items() if "model." in key}
    shape = Model(**given)
    latent = shape.kv_lora_rank > 0
    attention = filled((LatentAttention if latent else Attention)(shape, 0, torch.float32))
    rope = rope_angles(
        torch.arange(8).expand(2, 8), shape, shape.qk_rope_head_dim if latent else shape.head_dim, torch.float32
    )
    results = []
    for forward in (torch.compile(attention.forward, backend="aot_eager", fullgraph=True), attention.forward):
        x_BsD = random(2, 8, shape.dim)
        y_BsD = forward(x_BsD, rope, CAUSAL)
        results.append([y_BsD, *torch.autograd.grad(y_BsD.square().sum(), [x_BsD, *attention.parameters()])])
    same(results, torch.float32)
    assert graphs() == 1
