"""Linear attention under every kind of mapping, against the recurrence position by position."""

from __future__ import annotations

import functools

import pytest
import torch

from tests import parity, reference
from tests.support import linear_family, reference_linear
from titanmoe.checkpoint import state
from titanmoe.config import ConfigError
from titanmoe.config.fields import flatten
from titanmoe.config.schema import Model
from titanmoe.fold.degrees import derive
from titanmoe.models import tensors
from titanmoe.models.count import layer_flops
from titanmoe.models.linear_attention import log_of_uniform
from titanmoe.models.transformer import Transformer
from titanmoe.plan.memory import RankMemory, rank_memories
from titanmoe.rehearse.rehearsal import Rehearsal, recipe_to_rehearse, rehearse

FAMILY = f"{linear_family.__name__}:FAMILY"
OWN = dict(linear_key_heads=2, linear_value_heads=4, linear_key_dim=4, linear_value_dim=6, conv_width=4)
BASE = {"model.family": FAMILY, "model.own": OWN, "training.global_batch_size": 4, "training.seq_len": 32}
CP, PLACEMENT, KIND = "parallelism.cp", "parallelism.cp_placement", "parallelism.cp_kind"
TP, PP, EP = "parallelism.tp", "parallelism.pp", "parallelism.experts.ep"
MODE = "activation_checkpoint.mode"
BOTH = {"model.family": "qwen3_next", "model.num_layers": 4, "model.kv_lora_rank": 8, "model.attention_gate": True}

reference.OWN_LAYERS[FAMILY] = reference.OwnLayer(
    linear_family.is_linear, reference_linear.shapes, reference_linear.linear_attention, reference_linear.BEGIN
)


def own(**changes) -> dict:
    return {"model.own": OWN | changes}


COMPILED = {"compile.enable": True, "compile.backend": "aot_eager", "model.num_layers": 1}
HALVES = {"moe.overlap": "halves", "training.local_batch_size": 2}
CASES = {
    "one rank": (1, {}, False),
    "one tap": (1, own(linear_value_heads=2, conv_width=1), True),
    "tp selective": (2, {TP: 2, MODE: "selective"}, True),
    "tp, gla": (2, {TP: 2, EP: 2, MODE: "moe", **own(linear_gate="gla")}, False),
    "contiguous": (2, {CP: 2, PLACEMENT: "contiguous"}, True),
    "allgather": (2, {CP: 2, KIND: "allgather", MODE: "selective"}, True),
    "ulysses, gla": (2, {CP: 2, KIND: "ulysses", MODE: "full", **own(linear_gate="gla")}, True),
    "compiled": (2, COMPILED | {CP: 2}, True),
    "cp 4": (4, {CP: 4, "training.local_batch_size": 2}, True),
    "cp 4 contiguous": (4, {CP: 4, PLACEMENT: "contiguous", MODE: "full"}, False),
    "runs shorter than a convolution": (4, {CP: 4, EP: 4, "training.seq_len": 16}, True),
    "tp cp halves": (4, {TP: 2, CP: 2, EP: 4} | HALVES, True),
    "pp cp": (4, {PP: 2, CP: 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_no_mapping_changes_a_number(name):
    size, mapping, documents = CASES[name]
    parity.check(size, BASE | mapping, documents=documents, steps=1)


@pytest.mark.parametrize(
    ("size", "asked", "says"),
    [
        (4, {TP: 4}, "tp = 4 does not divide model.own.linear_key_heads = 2 (2 % 4 = 2): use tp in 1, 2"),
        (1, own(linear_value_heads=5), "linear_value_heads = 5 is not a multiple of model.own.linear_key_heads = 2"),
        (1, own(linear_value_heads=5), "(5 % 2 = 1): use linear_key_heads 1, 5"),
        (1, own(conv_width=0), "model.own.conv_width = 0 leaves nothing: use 1 or more"),
        (1, own(linear_gate="mamba"), 'model.own.linear_gate = "mamba" is no gate: use "delta" or "gla"'),
        (1, {"model.sliding_window": 8}, "have linear attention: set sliding_window = 0"),
        (1, BOTH, "attention_gate = true is for grouped-query attention, and model.kv_lora_rank = 8"),
        (1, {"data.share_prefixes": True}, f'the linear attention of model.family = "{FAMILY}" takes tokens one after'),
    ],
)
def test_what_does_not_fit_is_refused(size, asked, says):
    with pytest.raises(ConfigError) as refused:
        parity.read(BASE | asked, size)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (BASE, ["model.full_attention_every is 0 and was 2 when the checkpoint was made"]),
        ({"model.sliding_window": 8}, []),
    ],
)
def test_which_blocks_attend_to_all_may_change_if_the_others_attend_too(asked, says):
    before, after = (flatten(parity.read(asked | {"model.full_attention_every": every}, 1)) for every in (2, 0))
    assert [refusal.partition(":")[0] for refusal in state.refused_shapes(before, after)] == says


@pytest.mark.parametrize("gate", ["delta", "gla"])
def test_names_and_shapes_are_those_of_the_module(gate):
    config = parity.read(BASE | own(linear_gate=gate), 1)
    with torch.device("meta"):
        model = Transformer(config, 1, torch.float32)
    assert dict(tensors.shapes(config.model)) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_work_of_a_token_is_that_of_its_products_and_of_the_recurrence():
    model = Model(**parity.preset_of(FAMILY) | dict(num_layers=2, dim=64, own=OWN | dict(linear_gate="delta")))
    (linear, attention), _ = layer_flops(model, 100)
    keys, values = 2 * 4, 4 * 6
    products = 64 * (2 * keys + 3 * values + 2 * 4) + 4 * (2 * keys + values)
    of_attention = 2 * 4 * 64 * 64 + 64 * 2 * 100
    assert linear - attention == 2 * products + 6 * 4 * 4 * 6 - of_attention


@functools.cache
def planned_and_rehearsed(more: str) -> tuple[RankMemory, Rehearsal]:
    words = f"--model.family {FAMILY} --model.size debug --model.vocab_size 1024 --model.dim 512 --model.head_dim 64 "
    words += "--model.own.linear_key_heads 4 --model.own.linear_key_dim 64 --model.own.linear_value_dim 64 "
    words += "--model.num_layers 2 --model.expert_hidden 1024 --training.seq_len 8192 --training.local_batch_size 1 "
    words += f"--training.global_batch_size 2 --data.source synthetic {more}"
    config = recipe_to_rehearse(words.split(), 2, "h100")
    return rank_memories(config, derive(2, config.parallelism))[0], rehearse(config, 2, 0, "h100")


@pytest.mark.parametrize("more", [f"--{CP} 2", f"--{TP} 2 --{MODE} full", f"--{TP} 2 --{MODE} selective"])
def test_the_plan_has_the_weights_and_the_memory_of_a_rehearsal(more):
    planned, rehearsed = planned_and_rehearsed(more)
    assert planned.weights == rehearsed.parameter_bytes
    assert planned.peak == pytest.approx(rehearsed.memory.peak, rel=0.01)


def test_a_rank_sends_its_segments_maps_and_last_inputs():
    """Of two segments: 8 heads, 64 x (64 + 64), float32; 3 positions of 2 x 256 + 512 channels, bfloat16."""
    messages = planned_and_rehearsed(f"--{CP} 2")[1].log.messages
    sent = {m.sent_bytes for m in messages if "sequence_segments.py" in str(m.site) and not m.backward}
    assert sent == {2 * 8 * 64 * 128 * 4, 2 * 3 * 1024 * 2}


def test_decays_begin_at_the_same_bits_on_every_device():
    """float32 weights are rounded from float64: float32's own logarithm, of which devices have several, has others."""
    index = torch.arange(4096)
    got, wide = (log_of_uniform(7, index, dtype) for dtype in (torch.float32, torch.float64))
    assert torch.equal(got, wide.float())
    assert got.exp().min() >= 0.0099 and got.exp().max() < 16.001 and len(got.unique()) > 4000
