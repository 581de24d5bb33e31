"""Only titanmoe.ops.device decides which code runs on a device."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titanmoe.config import ConfigError
from titanmoe.moe.experts import can_group
from titanmoe.ops import device
from titanmoe.ops.device import Hardware, imitate
from titanmoe.ops.kernels import fused, installed
from titanmoe.parallel.attention_block import block, block_backward
from titanmoe.train.runtime import uses_gpu

SOURCE = Path(__file__).resolve().parents[2] / "titanmoe"
HOPPER, AMPERE = Hardware("cuda", (9, 0)), Hardware("cuda", (8, 0))
CALLS_CUDA = {"train/timing.py", "train/metrics.py", "train/runtime.py", "parallel/pairs.py"}
CALLS_CUDA |= {"moe/dispatchers/symmetric_buffers.py", "checkpoint/saver.py", "parallel/batch_slice.py"}
CALLS_CUDA |= {"train/optimizers/offload.py", "train/out_of_memory.py"}
CALLS_CUDA |= {"launcher/fit_ranks.py", "launcher/check_cluster.py"}
CALLS_CUDA |= {
    "plan/planned_overlap.py",
    "parallel/pipeline.py",
    "train/header.py",
}  # kernels that are still to be loaded; the allocator's answer
"""Files that check for a real GPU because they call torch.cuda, not to choose which code runs."""
NO_BACKWARD_ON_CPUS, PREPARES_THE_PROCESS = "parallel/flex.py", "train/runtime.py"


def test_nobody_else_asks():
    asks = re.compile(r'\.type [!=]= "|device_type [!=]= "|cuda\.is_available|get_device_capability')
    source = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    assert {name for name, text in source.items() if asks.search(text)} - CALLS_CUDA == {"ops/device.py"}
    asks = re.compile(r'kind\(.*\) [!=]= "cpu"')
    assert {name for name, text in source.items() if asks.search(text)} == {"ops/device.py", NO_BACKWARD_ON_CPUS}
    serves_cpus = {name for name, text in source.items() if "titanmoe.ops.cpu" in text and not name.startswith("ops/")}
    assert all(re.search(r"devices?\.choose\(", source[name]) for name in serves_cpus - {PREPARES_THE_PROCESS})


def way(where: torch.Tensor | str, compiled: bool = False) -> str:
    return device.choose(where, "usual", cpu="cpu", compiled=compiled)


def test_compilers_fuse_by_themselves(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.zeros(2)
    assert way(x) == "usual" and way(x, compiled=True) == "cpu"


def test_tensors_go_the_ways_of_their_own_device():
    x = torch.zeros(2, 8, dtype=torch.float32)
    assert device.kind(x) == device.kind(x.device) == device.kind("cpu") == "cpu"
    assert device.kind(x.to("meta")) == "meta"
    assert way(x) == "cpu" and way(x.to("meta")) == "usual" and not fused("auto", x)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_or_those_of_hardware_that_is_not_there():
    narrow, wide = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8)
    with imitate(HOPPER):
        assert fused("auto", narrow) and way(narrow) == way("cpu") == "usual"
        assert can_group(narrow, 8) and not can_group(wide, 8)
        for other in (AMPERE, Hardware("cuda", (12, 0))):
            with imitate(other):
                assert not can_group(narrow, 8)
        with imitate(Hardware("cuda", (10, 0))):
            assert can_group(narrow, 8)
        assert device.kind_of_setting("auto") == "cuda" and device.kind_of_setting("cpu") == "cpu"
    assert not fused("auto", narrow) and way(narrow) == "cpu" and can_group(wide, 8)


def test_a_gpu_that_is_asked_for_is_never_replaced_by_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device.kind_of_setting(setting) for setting in ("auto", "cpu", "cuda")] == ["cpu", "cpu", "cuda"]
    assert not uses_gpu("auto") and not uses_gpu("cpu")
    with pytest.raises(ConfigError, match=r'training\.device = "cuda" but PyTorch .* finds no GPU'):
        uses_gpu("cuda")


def compute() -> None:
    """Run a block of attention on fake tensors: CPUs have an implementation of their own for it."""
    with FakeTensorMode():
        x = torch.empty(1, 2, 16, 16)
        out, lse = block(x, x, x, None, True)
        block_backward(out, x, x, x, None, out=out, lse=lse, causal=True)


@pytest.mark.parametrize("hardware", [None, HOPPER])
def test_code_for_gpus_never_meets_what_serves_cpus(hardware):
    met = set()

    def note(frame: FrameType, event: str, _) -> None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if folder.endswith("ops/cpu"):
            met.add(name)

    before = sys.getprofile()
    with nullcontext() if hardware is None else imitate(hardware):
        sys.setprofile(note)
        try:
            compute()
        finally:
            sys.setprofile(before)
    assert met == ({"flash_attention.py"} if hardware is None else set())
