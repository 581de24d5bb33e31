"""Muon is torch's on plain weights, and a plain model's under every mapping; groups have rates of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import parity, reference, world
from tests.support.covering_mappings import all_folds
from tests.support.parity_errors import largest_gain
from titanmoe.comm.collectives import Group
from titanmoe.config import ConfigError
from titanmoe.config.fields import toml_value
from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.degrees import Fold, derive
from titanmoe.models.count import parameters
from titanmoe.models.matrices import Matrix, matrices_of, matrix_parameters
from titanmoe.models.mixers.grouped_query import GroupedQuery
from titanmoe.models.mixers.mixer_spec import MatrixRows
from titanmoe.models.tensors import shapes
from titanmoe.ops.newton_schulz import orthogonalize, orthogonalizing_factor, step_coefficients
from titanmoe.parallel import full_matrices
from titanmoe.parallel.full_matrices import assign_owners
from titanmoe.parallel.matrix_shards import (
    NOT_SHARDED,
    ShardGroup,
    WeightSharding,
    shard_group_members,
    shard_region,
    sharded_weights,
)
from titanmoe.train.header import make_header
from titanmoe.train.optimizers.muon import Muon
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS
from titanmoe.train.out_of_memory import _state_bytes

MUON = {"optimizer.name": "muon", "training.global_batch_size": 4}
LATENT = {"model.family": "deepseek_v3", "model.kv_lora_rank": 8, "model.q_lora_rank": 8, "model.qk_nope_head_dim": 4}
LATENT |= {"model.qk_rope_head_dim": 2, "model.v_head_dim": 4, "model.head_dim": 6, "model.shared_hidden": 16}
TP = {"parallelism.tp": 2}
ETP = TP | {"parallelism.experts.ep": 2, "parallelism.experts.etp": 2}


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
@pytest.mark.parametrize("adjust", ["original", "match_rms"])
def test_it_is_torchs_on_plain_weights(shape: tuple[int, int], adjust: str) -> None:
    """torch computes in bfloat16 and knows nothing else, so to its rounding: 0.05 of a step, of a matrix of 5 steps."""
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(ours.detach().clone())
    options = Options(name="muon", ns_eps=0.0, adjust_lr=adjust, ns_dtype="bfloat16")
    muon = Muon(
        {"w": ours},
        options,
        sharded_weights({"w": ours}, {"w": [Matrix(shape, ((0, shape[0]),))]}, lambda _: NOT_SHARDED),
    )
    names = {"original": "original", "match_rms": "match_rms_adamw"}
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, eps=1e-30, adjust_lr_fn=names[adjust])
    for _ in range(3):
        before, ours.grad = theirs.detach().clone(), torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step(0.02)
        torchs.step()
    assert (ours - theirs).norm() < 0.05 * (before - theirs).norm()


@pytest.mark.parametrize(("kind", "steps", "worst"), [("classic", 5, 0.32), ("polar_express", 6, 3e-3)])
def test_singular_values_become_one(kind: str, steps: int, worst: float) -> None:
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(3, 8, 20, dtype=torch.float64), full_matrices=False)
    x = u @ torch.diag_embed(torch.logspace(0, -1.8, 8, dtype=torch.float64).expand(3, -1)) @ v
    singular = torch.linalg.svdvals(orthogonalize(x.mT, step_coefficients(kind, steps), 0.0))
    assert (singular - 1).abs().max() < worst
    by_gram = orthogonalizing_factor(x @ x.mT, step_coefficients(kind, steps), 0.1) @ x
    assert torch.allclose(by_gram, orthogonalize(x, step_coefficients(kind, steps), 0.1), rtol=0, atol=1e-11)


def test_gain_and_what_is_only_rounding() -> None:
    assert largest_gain(step_coefficients("classic", 5)) == pytest.approx(484.9, abs=0.05)
    gains = [largest_gain(step_coefficients("polar_express", steps)) for steps in (5, 6, 7, 8)]
    assert gains == pytest.approx([976, 1828, 3394, 6363], abs=1)
    x = torch.full((2, 3, 4), 1e-17, dtype=torch.float64)
    x[1] = 0
    assert orthogonalize(x, step_coefficients("classic", 5), 1e-7).abs().max() < 1e-7
    assert orthogonalize(x, step_coefficients("classic", 5), 0.0)[1].eq(0).all(), "0 / 0"
    with pytest.raises(ValueError, match="no coefficients 'polar' of Newton-Schulz steps: use"):
        step_coefficients("polar", 5)


def test_units_of_latents_heads_and_stacks() -> None:
    assert [m.shape for m in matrices_of((12, 5), MatrixRows((4, 2)), by_head=False)] == [(8, 5), (4, 5)]
    assert [m.spans for m in matrices_of((12, 5), MatrixRows((4, 2)), by_head=True)][2:] == [((4, 6),), ((10, 12),)]
    assert [m.shape for m in matrices_of((12, 5), MatrixRows((4,)), by_head=False)] == [(12, 5)]
    assert [m.expert for m in matrices_of((3, 12, 5), MatrixRows(()), by_head=True)] == [0, 1, 2]
    gated = matrix_parameters(replace(Config().model, attention_gate=True), router=False)
    assert gated["layers.0.attention.wg.weight"] == gated["layers.0.attention.wq.weight"] != []
    names = matrix_parameters(Config().model, router=False)
    assert "layers.0.moe.experts.w2" in names and not [n for n in names if "router" in n or "embed" in n or "head" in n]


def test_rows_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedQuery, "matrix_rows", lambda self, model: {"wq.weight": MatrixRows((3, 4))})
    with pytest.raises(ConfigError, match=r"layers.0.attention.wq.weight has 32 rows, and matrices of 3 \+ 4 rows"):
        parity.read(MUON, 1)


def test_boxes_are_torchs_and_owners_have_equal_work() -> None:
    axes = (("fsdp", 4, 0), ("tp", 2, 0))
    boxes = [shard_region((10, 3), axes, {"fsdp": f, "tp": t}) for f in range(4) for t in range(2)]
    assert [box.shape[0] for box in boxes] == [2, 2, 2, 2, 1, 1, 0, 0] and boxes[5].begin == (9, 0)
    loads = [5, 0, 0]
    assert assign_owners([1, 4, 3, 3], loads) == [1, 1, 2, 2] and loads == [5, 5, 6]


def shardings(fold: Fold) -> Iterator[WeightSharding]:
    """Weights as a mapping shards them: uneven shards, heads of two parts, experts full and sliced."""
    fsdp, sliced = ("fsdp", fold.dp_shard * fold.cp, 0), 8 // fold.ep % fold.edp > 0
    experts = (("edp", fold.edp, 2 if sliced else 0), ("ep", fold.ep, 0), ("etp", fold.etp, 1))
    attention = [("attention", (20, 12), (fsdp, ("tp", fold.tp, dim))) for dim in (0, 1)]
    for view, shape, axes in (*attention, ("experts", (8, 24, 16), experts)):
        team = ShardGroup(Group("", 1, 0), tuple(shard_group_members(fold, view, 0).values()))
        for by_head in (False, True):
            yield WeightSharding(shape, axes, matrices_of(shape, MatrixRows((3, 2)), by_head), team)


def test_the_pieces_of_every_mapping_make_up_each_matrix_once() -> None:
    for fold in all_folds(8):
        for sharding in shardings(fold):
            for matrix, overlaps in zip(sharding.matrices, sharding.shards, strict=True):
                seen = torch.zeros(matrix.shape)
                for shard, sends in zip(overlaps, sharding.is_sender, strict=True):
                    for first, _, count in shard.rows if sends else ():
                        seen[first : first + count, shard.columns[0] : sum(shard.columns)] += 1
                assert seen.eq(1).all(), (fold, matrix)


TALL = {"model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 64}
"""With tp = 2, wk and wv are on both ranks, and so much higher than wide that their Gram matrices are summed."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "etp, owners of sharded experts": (4, ETP),
    "etp, by the sum of Gram matrices": (4, ETP | {"model.expert_hidden": 64}),
    "a replicated piece in the sum of Gram matrices": (4, TP | TALL),
    "pipeline, cp and uneven shards": (4, {"parallelism.pp": 2, "parallelism.cp": 2, "model.dim": 24}),
    "a stage without matrices": (2, {"parallelism.pp": 2, "training.freeze": ["layers.0.*"]}),
    "replicas": (8, TP | {"parallelism.dp_replicate": 2, "parallelism.experts.ep": 8}),
    "experts sliced over edp": (8, TP | {"parallelism.experts.ep": 4, "model.num_experts": 4}),
    "latents by head, routers": (4, TP | LATENT | {"optimizer.by_head": True, "optimizer.router_matrix": True}),
    "groups": (
        4,
        ETP
        | {
            "optimizer.groups": '[{match = ["*.wq.weight", "embed.*", "*.w1"], lr = 3e-2, weight_decay = 0.0}, '
            '{match = ["*norm*", "*.w2"], weight_decay = 0.5}]'
        },
    ),
    "rates apart, and a key head on both ranks": (
        2,
        TP | {"optimizer.adjust_lr": "original", "optimizer.adamw_lr": 0.003, "model.num_kv_heads": 1},
    ),
}
POLAR = {"optimizer.ns_coefficients": "polar_express", "optimizer.ns_steps": 8}


@pytest.mark.parametrize("case", CASES)
def test_every_mapping_agrees_with_the_plain_model(case: str) -> None:
    ranks, changes = CASES[case]
    parity.check(ranks, MUON | changes)


@pytest.mark.parametrize(
    "case", [case if "Gram" in case else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_so_it_does_with_other_steps(case: str) -> None:
    """To 1e-10 by the gain of the steps over that of five classic ones."""
    ranks, changes = CASES[case]
    parity.check(ranks, MUON | changes | POLAR, steps=3)


def test_experts_without_tokens_only_decay() -> None:
    """Under two mappings: their gradients are 0, and 0 / 0 is 0."""
    half = [0.0] * 4 + [-1e6] * 4
    alone, folded = (world.run(ranks, parity.biased, MUON | how, half)[0] for ranks, how in ((1, {}), (4, ETP)))
    assert parity.worst_error(folded.weights, alone.weights)[0] < 1e-10
    config = parity.read(MUON, 1)
    left = 1 - reference.learning_rate(config, 1) * config.optimizer.weight_decay
    for name, start in parity.initial_weights(config).items():
        if ".experts." in name:
            assert torch.allclose(alone.weights[name][4:], start[4:] * left, rtol=1e-12, atol=0)
            assert not torch.allclose(alone.weights[name][:4], start[:4] * left, rtol=1e-3, atol=0)


def resumed(folder: str, changes: dict[str, Any], until: int) -> list[float]:
    """Losses of the steps up to `until`, from the folder's checkpoint on if there is one; saved after the last."""
    trainer = parity.make_trainer(
        parity.SAVING | MUON | {"job.dump_folder": folder, "checkpoint.interval": 0} | changes
    )
    losses = []
    with trainer.training.checkpoints.in_folder(Path(folder) / "run") as checkpoints:
        checkpoints.begin()
        while trainer.step < until:
            losses.append(trainer.train_step()["loss"])
        checkpoints.finish()
    return losses


def test_a_checkpoint_goes_on_under_another_mapping_and_not_with_another_optimizer(tmp_path: Path) -> None:
    (want,) = world.run(1, resumed, str(tmp_path / "alone"), {}, 4)
    folded = str(tmp_path / "folded")
    first = world.run(4, resumed, folded, ETP | {"optimizer.offload": True}, 2)[0]
    with pytest.raises(world.RankError, match=r'optimizer\.name = "adamw" cannot go on from the moments of "muon"'):
        world.run(1, resumed, folded, {"optimizer.name": "adamw"}, 4)
    with pytest.raises(world.RankError, match=r"optimizer\.router_matrix = true keeps another state of routers"):
        world.run(1, resumed, folded, {"optimizer.router_matrix": True}, 4)
    (rest,) = world.run(1, resumed, folded, {}, 4)
    assert first + rest == pytest.approx(want, rel=1e-10) and len(set(want)) == 4


def test_what_is_said_of_memory_knows_that_matrices_have_one_number() -> None:
    config = parity.read(MUON | {"training.freeze": ["layers.0.*"]}, 1)
    trained = [(name, prod(shape)) for name, shape in shapes(config.model) if not name.startswith("layers.0.")]
    matrices = sum(n for name, n in trained if name in matrix_parameters(config.model, router=False))
    numbers = 2 * sum(n for _, n in trained) - matrices
    assert OPTIMIZERS.look_up("muon").state_numbers(config) == numbers
    of_model = parameters(config.model)
    saved = make_header(config, derive(1, config.parallelism), "cpu", None).checkpoint_bytes
    assert saved == 8 * (of_model.total + numbers)
    weights, those_trained = 8 * of_model.total, 8 * sum(n for _, n in trained)
    assert _state_bytes(weights, those_trained, config, torch.device("cpu"))["optimizer state"] == 8 * numbers


def notes(changes: dict[str, Any]) -> dict[str, str]:
    return parity.make_trainer(changes, loader=parity.samples()).training.setup_rows


def test_the_header_says_which_way_is_taken() -> None:
    shown = world.run(4, notes, MUON | ETP | {"model.expert_hidden": 64})[0]
    assert shown["muon"].startswith("0 full matrices here, 8 in shards") and "24 by the sum" in shown["muon"]
    assert shown["adamw"].startswith("embed.weight, layers.*.attention_norm.weight")


def stepped(offload: bool) -> list[torch.Tensor]:
    """Weights and state after three steps of several rounds."""
    config = Config(optimizer=Options(name="muon", offload=offload))
    names = {f"layers.{i}.attention.wq.weight": (64, 64) for i in range(4)} | {"embed.weight": (320, 64)}
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(s, generator=generator)) for name, s in names.items()}
    muon = Muon.build(parameters, config)
    assert len(muon.rounds) == 4 and (muon.offload is not None) == offload
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        muon.step(0.02, 1.0)
    state = [x.clone() for tensors in muon.moments().values() for x in tensors.values()]
    return [*(p.detach() for p in parameters.values()), *state]


def test_momentum_in_host_memory_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_matrices, "ROUND", 5000)
    assert all(torch.equal(a, b) for a, b in zip(stepped(False), stepped(True), strict=True))


def test_groups_have_rates_and_decay_of_their_own() -> None:
    tables = [{"match": ["layers.*.wq.weight", "embed.*"], "lr": 0.5, "weight_decay": 0.0}]
    names = {
        "embed.weight": (320, 64),
        "layers.0.attention.wq.weight": (64, 64),
        "layers.0.attention.wk.weight": (64, 64),
    }
    moved = {}
    for optimizer in (Options(name="muon", lr=0.1), Options(name="muon", lr=0.1, groups=tables)):
        parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in names.items()}
        for parameter in parameters.values():
            parameter.grad = torch.arange(parameter.numel()).view_as(parameter) / 1e3
        muon = Muon.build(parameters, Config(optimizer=optimizer))
        muon.step(0.05)  # half of the schedule
        moved[bool(optimizer.groups)] = {name: 1 - p.detach() for name, p in parameters.items()}
    for name, alike in moved[False].items():
        want = alike if ".wk." in name else (alike - 0.05 * 0.1) * 5  # without decay, at 5 times the rate
        assert torch.allclose(moved[True][name], want, atol=1e-5), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([{"match": ["*.nothing"], "lr": 1.0}], 'has "*.nothing", which matches no parameter'),
        ([{"match": ["head.norm.*"], "lr": 1.0}], 'has "head.norm.*", which matches 1 frozen parameter and none that'),
        ([{"match": ["embed.*"], "lr": 1.0}] * 2, "embed.weight is in groups 1 and 2"),
        ([{"match": "embed.*", "rate": 1.0}], "group 1: unknown key rate: a group has match, lr and weight_decay"),
        ([{"match": ["embed.*"]}], "group 1 changes nothing"),
        ([{"match": ["embed.*"], "lr": 5.0}], "group 1: lr = 5.0 must be a number in (0, 1]"),
        ([{"match": ["embed.*"], "lr": 0.0}], "must be a number in (0, 1] (to keep weights as they are, name them in"),
    ],
)
def test_groups_that_cannot_be_are_refused(words: list[dict], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parity.read({"optimizer.groups": toml_value(words), "training.freeze": ["head.norm.*"]}, 1)
    assert any(said in problem for problem in refused.value.problems), refused.value.problems
    with pytest.raises(ConfigError, match=r"optimizer.momentum = 0.5 does nothing with optimizer.name = \"adamw\""):
        parity.read({"optimizer.momentum": 0.5}, 1)
