"""Only titanmoe.ops.device decides which code runs on a device."""

import re
from pathlib import Path

import pytest
import torch

from titanmoe.models.layers import RMSNorm
from titanmoe.moe.grouped import can_group
from titanmoe.ops import device
from titanmoe.ops.cpu import rowwise
from titanmoe.ops.device import Hardware, as_on
from titanmoe.ops.kernels import fused, installed

SOURCE = Path(__file__).resolve().parents[2] / "titanmoe"
HOPPER, AMPERE = Hardware("cuda", (9, 0)), Hardware("cuda", (8, 0))
CALLS_CUDA = {"train/clock.py", "train/metrics.py", "train/profile.py", "train/runtime.py", "parallel/pairs.py"}
CALLS_CUDA |= {"moe/dispatchers/symm_mem.py", "checkpoint/saver.py", "parallel/batch_slice.py"}
CALLS_CUDA |= {"train/offload.py", "train/out_of_memory.py", "launcher/fit_ranks.py", "launcher/check_cluster.py"}
"""Files that check for a real GPU because they call torch.cuda, not to choose which code runs."""


def test_nobody_else_asks():
    asks = re.compile(r'\.type [!=]= "|device_type [!=]= "|cuda\.is_available|get_device_capability')
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if asks.search(path.read_text())}
    assert found - CALLS_CUDA == {"ops/device.py"}


def test_tensors_go_the_ways_of_their_own_device():
    x = torch.zeros(2, 8, dtype=torch.float32)
    assert device.kind(x) == device.kind(x.device) == device.kind("cpu") == "cpu"
    assert device.kind(x.to("meta")) == "meta"
    assert rowwise.pays(x) and not rowwise.pays(x.to("meta")) and not fused("auto", x)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_or_those_of_hardware_that_is_not_there():
    narrow, wide = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8)
    with as_on(HOPPER):
        assert fused("auto", narrow) and not rowwise.pays(narrow)
        assert can_group(narrow, 8) and not can_group(wide, 8)
        for other in (AMPERE, Hardware("cuda", (12, 0))):
            with as_on(other):
                assert not can_group(narrow, 8)
        with as_on(Hardware("cuda", (10, 0))):
            assert can_group(narrow, 8)
        assert device.chosen("auto") == "cuda" and device.chosen("cpu") == "cpu"
    assert not fused("auto", narrow) and rowwise.pays(narrow) and can_group(wide, 8)


def test_ways_differ_and_numbers_do_not():
    norm = RMSNorm(16, 1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    here = norm(x)
    with as_on(HOPPER):
        there = norm(x)
    torch.testing.assert_close(here, there)
