"""What torch.compile makes of each part for a Hopper GPU that is not there: one graph forward and one backward, whose
Triton kernels compile to its machine code. The parts are those of a model on one GPU, at a recipe's widths.

Autograd takes no CUDA tensors without a driver. So Dynamo and AOTAutograd trace fake CPU tensors through the code for
Hopper, and their graphs are moved to CUDA before inductor gets them. Nothing is loaded or run. The kernels of torch's
attention and of flex_attention are not looked at: a rehearsal's stand-ins take their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config.schema import ActivationCheckpoint, Config
from titanmoe.mask import CAUSAL
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.layer import MoE
from titanmoe.ops.device import HARDWARE, imitate
from titanmoe.ops.kernels import installed, interpreted
from titanmoe.parallel import compiled
from titanmoe.parallel.choose_attention import apply_context_parallel
from titanmoe.parallel.compiled import compile_model
from titanmoe.rehearse import stand_ins
from titanmoe.tokens import Tokens

if not installed() or interpreted():
    pytest.skip("Triton's compiler is not there", allow_module_level=True)

import triton
from torch._inductor import compile_fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from triton.runtime import driver

from tests.support.launches import SHARED_MEMORY, Hopper, read_recipe, resources, shrink

pytestmark = pytest.mark.slow
SAME_PARTS = "qwen3_5_35b_a3b", "sft_qwen3_30b_a3b", "lora_qwen3_30b_a3b"
"""Recipes whose compiled parts are those of qwen3_next_80b_a3b and qwen3_30b_a3b, without adapters."""
FOLDER = Path(__file__).resolve().parents[2] / "train_configs"
RECIPES = sorted(p for p in FOLDER.glob("*.toml") if "debug" not in p.stem and p.stem not in SAME_PARTS)
GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=228 * 1024,
    gcnArchName="",  # AMD's name for the kind of GPU
)
TORCH_CUDA = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "_lazy_init": lambda: None,
    "_get_device_properties": lambda *_: H100,
    "get_device_capability": lambda *_: (9, 0),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *_: None,
    "_exchange_device": lambda _: 0,
    "_maybe_exchange_device": lambda _: 0,
    "synchronize": lambda *_: None,
}


@contextmanager
def hopper() -> Iterator[None]:
    """What inductor asks of the GPU, answered."""
    with ExitStack() as stack:
        for name, answer in TORCH_CUDA.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer, create=True))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", lambda: True))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(mock.patch.object(driver, "_active", Hopper()))
        # The method begins with a device guard, which a torch without CUDA refuses; the operation has none.
        stack.enter_context(mock.patch.object(Tensor, "copy_", lambda x, source: torch.ops.aten.copy_(x, source)))
        yield


class SourceWritten(BaseException):
    """Not an Exception, which inductor would wrap."""


def source_of(graph: torch.fx.GraphModule, inputs: list[Any], backward: bool) -> str:
    """What inductor writes for a graph on a GPU."""
    mode = detect_fake_mode(inputs)
    graph, written = deepcopy(graph), []
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", GPU)
    graph.recompile()
    with mode:
        inputs = [
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=GPU) if isinstance(x, Tensor) else x
            for x in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)

    def stop(lowering: GraphLowering) -> None:
        written.append(lowering.codegen()[0].value)
        raise SourceWritten

    with hopper(), mock.patch.object(GraphLowering, "compile_to_module", stop), pytest.raises(SourceWritten):
        compile_fx.compile_fx_inner(graph, inputs, is_backward=backward)
    return written[0]


class Backend:
    """Runs what AOTAutograd traced, on fake tensors, and keeps inductor's source for it.

    A graph that reads counts, which fake tensors do not have, raises `SourceWritten`: both of its graphs exist then.
    """

    def __init__(self) -> None:
        self.graphs, self.sources = 0, []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return aot_autograd(
            fw_compiler=partial(self.keep, False),
            bw_compiler=partial(self.keep, True),
            decompositions=select_decomp_table(),
            partition_fn=partial(compile_fx.min_cut_rematerialization_partition, compiler="inductor"),
        )(graph, inputs)

    def keep(self, backward: bool, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.sources.append(source_of(graph, inputs, backward))

        def run(*given: Any) -> Any:
            try:
                return graph.forward(*given)
            except DataDependentOutputException:
                raise SourceWritten from None

        return compile_fx.make_boxed_func(run)


@contextmanager
def one_of(ranks: int) -> Iterator[Group]:
    """The first of a group of so many ranks, of which the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield Group.of(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def kernels_in(sources: list[str]) -> dict[str, str]:
    """The name of each Triton kernel, by its text, which parts may share."""
    found = (re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL) for source in sources)
    return {text: name for kernels in found for name, text in kernels}


def machine_code(name: str, text: str) -> list[Any]:
    """A kernel, compiled in every configuration that inductor would time."""
    made, real = [], triton.compile

    def keep(*args: Any, **options: Any) -> Any:
        made.append(real(*args, **options))
        return made[-1]

    with hopper(), mock.patch.object(triton, "compile", keep):
        getattr(PyCodeCache.load(text), name).precompile(warm_cache_only=True)
    return made


def compiled_model(config: Config, backend: Backend) -> Transformer:
    model = Transformer(config, 1, torch.bfloat16)
    apply_context_parallel(model, config.parallelism, NO_GROUP, stand_ins.flex_attention)
    with mock.patch.object(compiled.torch, "compile", partial(compile_by, torch.compile, backend)):
        compile_model(model, replace(config, compile=replace(config.compile, enable=True)), False)
    return model


def parts(config: Config, backend: Backend) -> dict[str, Callable[[], Any]]:
    """A call of each compiled part of a block and of the head."""
    shape, length = config.model, config.training.seq_len
    # The loss in chunks is not compiled.
    config = replace(config, training=replace(config.training, loss_chunks=1), moe=replace(config.moe, overlap="none"))
    config = replace(config, activation_checkpoint=ActivationCheckpoint())
    model = compiled_model(config, backend)
    block = next(block for block in model.blocks().values() if block.moe is not None)
    width = shape.qk_rope_head_dim if shape.kv_lora_rank else shape.head_dim

    def x_D(*tokens: int) -> Tensor:
        return torch.empty(*tokens, shape.dim, dtype=torch.bfloat16, requires_grad=True)

    angles = [torch.empty(1, length, 1, width) for _ in range(2)]
    calls = {
        "attention": lambda: block.attention(x_D(1, length), tuple(angles), CAUSAL),
        "MoE layer": lambda: block.moe(x_D(1, length), first_step(block.moe, length)),
        "head": lambda: model.head(x_D(1, length), torch.empty(1, length, dtype=torch.int64)),
    }
    dense = [block for block in model.blocks().values() if block.ffn is not None]
    if dense:
        calls["dense layer"] = lambda: dense[0].ffn(x_D(1, length))
    return calls


def first_step(moe: MoE, length: int) -> Tokens:
    """Return the tokens of a step that this layer begins: one sample."""
    index = torch.arange(length)
    moe.begin_step(1, torch.tensor(float(length)), 1)
    return Tokens(index.view(1, -1), index, index // length, index >= 0, torch.tensor(0))


def compile_by(real: Any, graph_backend: Backend, function: Any, *, backend: str, **options: Any) -> Any:
    return real(function, backend=graph_backend, **options)


def fit(sources: list[str]) -> None:
    for text, name in kernels_in(sources).items():
        # Inductor leaves out configurations that spill or ask for more than a block can have.
        used = [resources(kernel) for kernel in machine_code(name, text)]
        assert any(not one.stack and one.shared <= SHARED_MEMORY for one in used), (name, used)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_each_part_is_one_graph_whose_kernels_compile(recipe: Path) -> None:
    backend, sources = Backend(), []
    attention = mock.patch.object(F, "scaled_dot_product_attention", stand_ins.attention)
    config = shrink(read_recipe(recipe)[0])
    with FakeTensorMode(allow_non_fake_inputs=True), imitate(HARDWARE["h100"]), attention:
        for name, call in parts(config, backend).items():
            backend.graphs, backend.sources = 0, []
            with suppress(SourceWritten):
                call().sum().backward()
            assert (backend.graphs, len(backend.sources)) == (1, 2), f"{name}: graphs, and those forward and backward"
            assert kernels_in(backend.sources), f"{name}: nothing is fused"
            sources += backend.sources
    fit(sources)


PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}
PLACES = SimpleNamespace(name="buffers", limit=2**15, receive_slots=2**15, needs_repeat=torch.tensor(False))
"""What a graph knows of the receive buffers of symmetric memory."""


@pytest.mark.parametrize(
    "changes, forward, backward",
    [({}, 3, 2), (PADDED, 2, 2), ({"dispatcher": "symm_mem"}, 0, 0)],
    ids=["dropless", "padded", "symm_mem"],
)
@pytest.mark.parametrize("recipe", ["deepseek_671b", "qwen3_30b_a3b"])
def test_a_layer_over_eight_ranks_is_one_graph_whose_kernels_compile(
    recipe: str, changes: dict[str, Any], forward: int, backward: int
) -> None:
    """forward, backward: all-to-alls of rows and of counts; routing weights are packed with rows."""
    backend, config = Backend(), shrink(read_recipe(RECIPES[0].with_name(f"{recipe}.toml"))[0])
    options = replace(config.moe, overlap="none", aux_loss=0.01, **changes)
    length = config.training.seq_len
    with one_of(8) as group, FakeTensorMode(allow_non_fake_inputs=True), imitate(HARDWARE["h100"]):
        config = replace(config, moe=options, activation_checkpoint=ActivationCheckpoint())
        moe = next(iter(compiled_model(config, backend).moe_layers().values()))
        moe.dispatcher.place(ExpertRanks(group, group.size, 1))
        moe.dispatcher.memory = PLACES
        for name, weight in list(moe.experts.named_parameters()):
            setattr(moe.experts, name, torch.nn.Parameter(weight.detach()[: len(weight) // group.size]))
        x_BsD = torch.empty(1, length, config.model.dim, dtype=torch.bfloat16, requires_grad=True)
        with suppress(SourceWritten):
            moe(x_BsD, first_step(moe, length)).sum().backward()
    assert (backend.graphs, len(backend.sources)) == (1, 2)
    for source, messages, exchanges in zip(backend.sources, (forward, backward), (2, 2), strict=True):
        assert len(re.findall(r"= torch\.ops\._c10d_functional\.all_to_all", source)) == messages
        assert len(re.findall(r"torch\.ops\.titanmoe\.exchange", source)) == (0 if messages else exchanges)
    fit(backend.sources)
