"""What the spec of docs/extending_families.md's mixer refuses, and its work and memory against a rehearsal."""

from dataclasses import replace

import pytest

from tests import parity
from titanmoe.checkpoint.hf.config_json import to_config_json
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.fold.degrees import derive
from titanmoe.models.count import flops_per_token
from titanmoe.plan.memory import rank_memories
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

FAMILY = {"model.family": "conv_moe", "model.own": {"conv_width": 3}}


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (
            2,
            {"parallelism.cp": 2},
            'the short convolution of model.family = "conv_moe" needs full sequences: use cp = 1',
        ),
        (3, {"parallelism.tp": 3}, "tp = 3 does not divide the width of the short convolution = 16"),
        (1, {"model.own": {"conv_width": 0}}, "model.own.conv_width = 0 sees nothing"),
        (1, {"model.own": {"conv_with": 3}}, "unknown key model.own.conv_with: did you mean model.own.conv_width?"),
    ],
)
def test_what_does_not_fit_is_refused(size, options, message):
    with pytest.raises(ConfigError) as refused:
        parity.read(FAMILY | options, size)
    assert message in str(refused.value)


def test_its_work_is_its_matrices():
    wide, plain = (Model(**parity.preset_of(family)) for family in ("conv_moe", "mixtral"))
    wide = replace(wide, num_layers=2)
    attention = 6 * 4 * 64 * 64 + 3 * 64 * 2 * 100  # scores and values see 50 of 100 positions
    convolution = 6 * (4 * 64 * 64 + 64 * 4)
    difference = flops_per_token(replace(plain, num_layers=2), 100) - flops_per_token(wide, 100)
    assert difference == attention - convolution


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_the_plan_has_the_weights_and_the_memory_of_a_rehearsal(mode):
    words = "--model.family conv_moe --model.size debug --model.vocab_size 1024 --model.dim 512 --model.head_dim 64 "
    words += "--model.expert_hidden 1024 --training.seq_len 8192 --training.local_batch_size 1 --parallelism.tp 2 "
    words += f"--training.global_batch_size 4 --data.source synthetic --activation_checkpoint.mode {mode}"
    config = recipe_to_rehearse(words.split(), 2, "h100")
    rehearsed, (planned, *_) = rehearse(config, 2, 0, "h100"), rank_memories(config, derive(2, config.parallelism))
    assert planned.weights == rehearsed.parameter_bytes
    assert planned.peak == pytest.approx(rehearsed.memory.peak, rel=0.005)


def test_it_has_no_hugging_face_format():
    with pytest.raises(ConfigError, match="'conv_moe' has no Hugging Face format"):
        to_config_json(Model(**parity.preset_of("conv_moe")), None, "float32", 64)
