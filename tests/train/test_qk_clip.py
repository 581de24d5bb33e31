"""The largest logits are those of the whole score matrix under every mapping, and QK-Clip brings them to its limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import parity, world
from tests.support.masks import mask_of
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config import ConfigError
from titanmoe.parallel import largest_logits
from titanmoe.parallel.context import Placement
from titanmoe.parallel.largest_logits import largest

LIMIT = 0.05
CLIP = {"optimizer.qk_clip": LIMIT, "optimizer.lr": 1e-300, "model.init_std": 0.6, "training.global_batch_size": 2}
MODELS: dict[str, dict[str, Any]] = {
    "grouped, with biases": {"model.num_kv_heads": 4, "model.qkv_bias": True},
    "half of each head turned, one key head": {"model.num_kv_heads": 1, "model.qkv_bias": True, "model.rotary_dim": 2},
    "latent": {"model.family": "deepseek_v3", "model.kv_lora_rank": 8, "model.q_lora_rank": 8, "model.mtp_depth": 1}
    | {"model.qk_nope_head_dim": 4, "model.qk_rope_head_dim": 2, "model.v_head_dim": 4, "model.head_dim": 6},
    "latent, plain queries": {"model.family": "deepseek_v3", "model.kv_lora_rank": 8, "model.q_lora_rank": 0}
    | {"model.qk_nope_head_dim": 4, "model.qk_rope_head_dim": 2, "model.v_head_dim": 4, "model.head_dim": 6},
}


@pytest.mark.parametrize("scores", [1, 400, 1 << 25])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_the_largest_is_that_of_the_whole_score_matrix(
    window: int, documents: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(largest_logits, "SCORES", scores)
    torch.manual_seed(0)
    q, k = torch.randn(2, 12, 4, 6), torch.randn(2, 12, 2, 6)
    document = torch.arange(12).div(5, rounding_mode="floor").expand(2, 12) if documents else None
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / math.sqrt(6)
    apart = torch.arange(12).unsqueeze(1) - torch.arange(12)
    seen = (apart >= 0) & ((apart < window) if window else True)
    seen = seen & ((document.unsqueeze(2) == document.unsqueeze(1)) if documents else torch.tensor(True))
    want = logits.masked_fill(~seen.view(-1, 1, 12, 12), -torch.inf).amax((0, 2, 3))
    got = largest(q, k, mask_of(document, window), Placement(1, zigzag=False), NO_GROUP)
    assert torch.allclose(got, want, rtol=1e-6, atol=0)


class SameStep(parity.Samples):
    """The first step's samples in every step."""

    def next_step(self) -> list[Any]:
        return self.peek()


def clipped(changes: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor] | None]:
    """Two steps on the same samples: what is reported, and the weights."""
    trainer = parity.make_trainer(changes, loader=lambda *args: SameStep(*args, documents=False))
    parameters = trainer.training.parameters
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            parameter.data.fill_(0.3)
    reports = [trainer.train_step() for _ in range(2)]
    fold = trainer.training.fold
    return reports, parity.whole(parameters, trainer.training.runtime.rank, fold)


@pytest.mark.parametrize("model", MODELS)
def test_a_clipped_head_reaches_the_limit_in_the_first_block(model: str) -> None:
    """With lr = 0; later blocks have other inputs, as the one before them has changed."""
    ((before, after), weights) = world.run(1, clipped, CLIP | MODELS[model])[0]
    assert before["layers.0.max_logit"] > 2 * LIMIT and before["max_logit"] >= before["layers.0.max_logit"]
    assert LIMIT * (1 - 1e-9) < after["layers.0.max_logit"] <= LIMIT * (1 + 1e-12)
    mapping = {"parallelism.tp": 2, "parallelism.cp": 2, "parallelism.pp": 2, "activation_checkpoint.mode": "full"}
    folded, whole = world.run(8, clipped, CLIP | MODELS[model] | mapping)[0]
    for alone, there in zip((before, after), folded, strict=True):
        for name in [name for name in alone if name.endswith("max_logit")]:
            assert there[name] == pytest.approx(alone[name], rel=1e-12), name
    whole.pop("embed_copy.weight", None)
    assert parity.worst_error(whole, weights)[0] < 1e-12


def test_later_blocks_reach_it_too_with_the_inputs_that_they_had() -> None:
    world.run(1, replayed, CLIP | MODELS["grouped, with biases"] | {"model.num_layers": 3})


def replayed(changes: dict[str, Any]) -> None:
    """Before and after a clip, every block's attention gets the inputs of the step."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    logits, blocks = trainer.training.gradients.logits, trainer.training.stages[0].blocks()
    inputs: dict[int, list[tuple]] = {layer: [] for layer in blocks}
    for layer, block in blocks.items():
        block.attention.register_forward_pre_hook(lambda module, args, layer=layer: inputs[layer].append(args))
    report = trainer.train_step()
    recorded = {layer: list(calls) for layer, calls in inputs.items()}
    logits.begin_step(2)
    for layer, block in blocks.items():
        for args in recorded[layer]:
            block.attention(*args)
        before, after = report[f"layers.{layer}.max_logit"], float(logits.by_layer[layer].max())
        assert before > 2 * LIMIT and LIMIT * (1 - 1e-9) < after <= LIMIT * (1 + 1e-12), layer


ROUNDING = 1 + 1e-12
"""Room for float64: the two measures sum the same products in different orders, and a row with one key has nothing else
between its largest logit and its bound."""
BOUND = CLIP | {"optimizer.qk_clip": 3.0, "optimizer.qk_clip_measure": "bound", "model.init_std": 1.5}


@pytest.mark.parametrize(
    ("model", "kind"), [("grouped, with biases", "ring"), ("grouped, with biases", "ulysses"), ("latent", "allgather")]
)
def test_the_bound_is_that_of_every_kernel_and_the_largest_is_below_the_limit(model: str, kind: str) -> None:
    exact = BOUND | {"optimizer.qk_clip_measure": "exact"}
    keys = math.log(parity.TINY["training.seq_len"])
    (reports, weights), ((largest, _), _) = (world.run(1, clipped, how | MODELS[model])[0] for how in (BOUND, exact))
    names = [name for name in largest if name.endswith("max_logit")]
    for name in names:
        assert 3.0 < largest[name] <= reports[0][name] * ROUNDING and reports[0][name] <= largest[name] + keys, name
    assert reports[1]["layers.0.max_logit"] <= (3.0 + keys) * ROUNDING
    mapping = {"parallelism.tp": 2, "parallelism.cp": 2, "parallelism.cp_kind": kind}
    folded, whole = world.run(4, clipped, BOUND | MODELS[model] | mapping)[0]
    for alone, there in zip(reports, folded, strict=True):
        assert [there[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-12)
    assert parity.worst_error(whole, weights)[0] < 1e-12


def test_it_is_measured_with_adamw_and_only_when_asked() -> None:
    trained = world.run(1, clipped, {"metrics.max_logit_every": 2})[0][0]
    assert [("max_logit" in report) for report in trained] == [False, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer.qk_clip": 100.0, "model.qk_norm": "head"}, 'has no effect with model.qk_norm = "head"'),
        ({"optimizer.qk_clip": 100.0, "training.freeze": ["*.wk.*"]}, "scales layers.0.attention.wk.weight"),
        ({"optimizer.qk_clip": 100.0, "compile.enable": True}, "leave one out"),
        ({"optimizer.qk_clip_every": 5}, "does nothing with qk_clip = 0"),
        (BOUND | {"optimizer.qk_clip": 2.5}, r"up to ln\(seq_len\) = 2.8 above the largest logit"),
        (BOUND | {"model.attention_sinks": True}, "which has sinks in it"),
        (BOUND | {"optimizer.qk_clip": 0.0}, "does nothing with optimizer.qk_clip = 0 and metrics.max_logit_every = 0"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parity.read(changes, 1)
