"""Counts of the kernels that a layer launches on a GPU for the next tokens of texts, on meta tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes
from titanmoe.generate.build_model import build_empty
from titanmoe.generate.loop import Generator
from titanmoe.generate.model import config_to_run
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.operation_costs import Operations
from titanmoe.rehearse.rehearsal import fake_world

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
ALONE = dict.fromkeys(("pp", "cp", "tp", "ep", "etp"), 1)
SINKS = {"model.attention_sinks": True, "model.sliding_window": 8, "model.full_attention_every": 2}
LATENTS = {"model.kv_lora_rank": 16, "model.q_lora_rank": 16, "model.qk_nope_head_dim": 16, "model.v_head_dim": 16}
LATENTS |= {"model.qk_rope_head_dim": 8, "model.head_dim": 24, "model.num_kv_heads": 4, "model.num_heads": 4}


class Launches(TorchDispatchMode):
    """Counts kernels while it is active."""

    def __init__(self):
        super().__init__()
        self.operations = Operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.add(func, args, kwargs or {}, out, CodeSite())
        return out


def launches(changes: dict[str, Any], layers: int) -> int:
    trained = parity.read({"training.mixed_precision_param": "bfloat16", "model.num_layers": layers} | changes, 1)
    config, meta = config_to_run(trained, 1, ALONE, None, "cpu"), torch.device("meta")
    config.moe.kernels = "triton"  # which is refused on CPUs
    with fake_world(0, 1), torch.no_grad():
        meshes = build_meshes(derive(1, config.parallelism), "cpu", trains=False)
        model, _ = build_empty(config, meshes, meta)
        generator = Generator(model, meshes, meta, config.model.vocab_size, (), records=True)
        generator.cached_texts.begin_prompts([20, 3], [2, 1])
        generator.forward([1] * 23)
        with Launches() as counted, mock.patch.object(torch.autograd.Function, "apply"):  # a call would return a mock
            generator.cached_texts.begin_tokens()
            generator.forward([1] * 3)
    return sum(counted.operations.values())


@pytest.mark.parametrize(
    "changes, most, most_once",
    [({}, 32, 29), (SINKS, 33.5, 42), (LATENTS, 40, 28)],
    ids=["keys", "windows and sinks", "latents"],
)
def test_a_layer_launches_few_kernels_for_the_next_tokens(changes: dict[str, Any], most: float, most_once: int) -> None:
    two, four = (launches(changes, layers) for layers in (2, 4))
    of_layer = (four - two) / 2
    assert of_layer <= most and two - 2 * of_layer <= most_once, (of_layer, two)


def test_kernels_take_parameters_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from titanmoe.ops.kernels import kernel_launch

    monkeypatch.setattr(kernel_launch, "can_run", lambda x: True)
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert kernel_launch._real((weight, 1.0))  # else torch's dispatcher would double the time of the launch
