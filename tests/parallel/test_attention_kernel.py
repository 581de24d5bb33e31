"""Which kernel computes attention in 16 bits: the choice, what is refused, and what the operations are given. None of
these kernels runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity
from tests.support.fake_gpu import FakeGPU
from titanmoe.config import ConfigError
from titanmoe.ops.device import Hardware, imitate
from titanmoe.parallel import attention_kernel
from titanmoe.parallel.attention_block import block, block_backward
from titanmoe.parallel.attention_kernel import missing, pick, use

HOPPER, B200, A100 = (Hardware("cuda", (major, 0)) for major in (9, 10, 8))
WIDE, LATENT, ODD = (128, 128), (192, 128), (256, 256)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "find_spec", lambda name: name)


@pytest.fixture
def with_flash_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend the oldest torch that has FlashAttention 3 and 4, whatever is installed: older ones lack them."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(attention_kernel.TORCH))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", lambda name: None, raising=False)


@pytest.mark.parametrize(
    "hardware, widths, deterministic, without_packages, with_packages",
    [
        (HOPPER, WIDE, False, "cudnn", "fa3"),
        (HOPPER, LATENT, False, "cudnn", "cudnn"),
        (HOPPER, ODD, False, "fa2", "fa3"),
        (HOPPER, WIDE, True, "fa2", "fa3"),
        (HOPPER, LATENT, True, "fa2", "fa2"),
        (B200, WIDE, False, "cudnn", "fa4"),
        (B200, ODD, False, "fa2", "fa2"),
        (A100, WIDE, False, "fa2", "fa2"),
        (Hardware("cpu"), WIDE, False, "fa2", "fa2"),
    ],
)
def test_auto_takes_the_newest_that_can_run(
    hardware: Hardware,
    widths: tuple[int, int],
    deterministic: bool,
    without_packages: str,
    with_packages: str,
    with_flash_3: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with imitate(hardware):
        for found, picked in ((None, without_packages), (object(), with_packages)):
            monkeypatch.setattr(attention_kernel, "find_spec", lambda name, found=found: found)
            assert pick("auto", *widths, deterministic) == picked


@pytest.mark.parametrize(
    "kernel, version, cudnn, lack",
    [
        ("fa3", "2.13.0", 91100, ""),
        ("fa3", "2.11.0", 91100, "it needs torch 2.13, and this is 2.11.0"),
        ("fa4", "2.13.0", 91100, ""),
        ("cudnn", "2.13.0", 91100, ""),
        ("cudnn", "2.13.0", 91002, "it needs cuDNN 91100, and this is 91002"),
        ("cudnn", "2.13.0", None, "it needs cuDNN 91100, and this is 0"),
    ],
)
def test_what_a_gpu_lacks(
    kernel: str, version: str, cudnn: int | None, lack: str, packages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    with FakeGPU():
        assert missing(kernel, 192) == lack


def test_what_no_gpu_of_this_kind_has(with_flash_3: None) -> None:
    assert missing("cudnn", 128) == "it runs on GPUs, and there is none"
    with imitate(A100):
        assert missing("fa3", 128) == "it does not run on GPUs of compute capability 8.x"
        assert missing("fa2", 128) == ""
    with imitate(HOPPER):
        assert missing("fa3", 128) == "the package flash_attn_interface is not installed"
        assert missing("fa4", 128) == "the package flash_attn.cute is not installed"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kernel": "cudnn"}, "it runs on GPUs, and this run is on CPUs"),
        ({"kernel": "fa3", "model.head_dim": 264}, "one width, up to 256, and these have 264 and 264"),
        ({"kernel": "cudnn", "model.head_dim": 136}, "multiples of 8 up to 128.* these are 136 and 136"),
        (
            {"kernel": "cudnn", "model.head_dim": 16, "training.deterministic": True},
            "does not count it as deterministic",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    changes = {"parallelism.attention_kernel" if key == "kernel" else key: value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=f'parallelism.attention_kernel = .*{message}.*use "auto"'):
        parity.read(changes, 1)


def test_torchs_switches(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", active.clear)
    seen = []
    for kernel in ("cudnn", "fa3", "fa4", "fa2"):
        use(kernel)
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), list(active)))
    assert seen == [(True, []), (False, ["FA3"]), (False, ["FA4"]), (False, [])]


class Kernels(TorchDispatchMode):
    """The operations of cuDNN's attention, by torch's own flash kernel for CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, name = torch.ops.aten, func._overloadpacket.__name__
        self.calls.append(name)
        if name == "_scaled_dot_product_cudnn_attention":
            q, k, v, bias, with_sums, *_ = args
            assert (bias, with_sums) == (None, True)
            if q.is_meta:
                return func(*args)
            causal = args[6] if len(args) > 6 else False  # defaults are left out
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
            nothing = lse.new_empty(0)
            return out, lse.unsqueeze(-1), nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing
        if name == "_scaled_dot_product_cudnn_attention_backward":
            grad, q, k, v, out, lse, _, _, bias, _, _, queries, keys, dropout, causal = args
            assert lse.shape == (*q.shape[:3], 1) and bias is None
            assert (queries, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse.squeeze(-1), 0.0, causal
            )
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("causal", [True, False])
def test_cudnns_operations_get_what_the_flash_kernel_gets(causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def x(heads: int) -> Tensor:
        return torch.randn(2, heads, 16, 32, generator=generator).to(torch.bfloat16)

    q, k, v, grad = x(4), x(2), x(2), x(4)
    expected = expected_out, expected_lse = block(q, k, v, None, causal)
    expected_grads = block_backward(grad, q, k, v, None, out=expected_out, lse=expected_lse, causal=causal)
    use("cudnn")
    with Kernels() as kernels, imitate(HOPPER):
        out, lse = block(q, k, v, None, causal)
        grads = block_backward(grad, q, k, v, None, out=out, lse=lse, causal=causal)
    assert [name for name in kernels.calls if "attention" in name] == [
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ]
    for one, other in zip((out, lse, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(one, other)


def test_compiled_code_has_the_chosen_kernel() -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes if "attention" in str(node.target))
        return graph

    x = torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16)
    for kernel in ("cudnn", "fa2"):
        torch._dynamo.reset()
        use(kernel)
        torch.compile(lambda x: block(x, x, x, None, True)[0], backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()
    assert names == ["aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention"]


@pytest.mark.parametrize("kernel", ["cudnn", "fa2"])
@pytest.mark.parametrize("dtype, widths, keys, biased", [
    (torch.bfloat16, (192, 128), 8, False),
    (torch.bfloat16, (16, 16), 8, False),
    (torch.bfloat16, (16, 16), 1, False),
    (torch.bfloat16, (16, 16), 8, True),
    (torch.bfloat16, (24, 16), 8, True),
    (torch.float32, (16, 16), 8, False),
])  # fmt: skip
def test_each_block_goes_to_a_kernel_that_takes_it(
    kernel: str, dtype: torch.dtype, widths: tuple[int, int], keys: int, biased: bool
) -> None:
    query, value = widths
    shapes = (8, query), (keys, query), (keys, value)
    q, k, v = (torch.empty(1, 2, *shape, device="meta", dtype=dtype) for shape in shapes)
    bias = torch.empty(1, 1, 8, keys, device="meta", dtype=dtype) if biased else None
    use(kernel)
    with Kernels() as kernels:
        block(q, k, v, bias, False)
    (name,) = (name for name in kernels.calls if "attention" in name)
    if biased or dtype == torch.float32:
        assert "efficient" in name
    elif kernel == "cudnn" and keys > 1:
        assert "cudnn" in name
    else:
        assert ("flash" if query == value else "efficient") in name
    assert "repeat" not in " ".join(kernels.calls) and "index_select" not in kernels.calls
