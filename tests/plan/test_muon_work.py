"""What the planner says of Muon's update against rehearsals of all ranks, and against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rehearse.small import config_of
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, derive
from titanmoe.models.count import flops_per_token
from titanmoe.models.families import preset
from titanmoe.models.matrices import flops
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.muon_work import matrix_buffer_bytes, muon_work
from titanmoe.plan.price import Pricer
from titanmoe.rehearse.many_ranks import build_programs, check_ranks, rehearse_ranks
from titanmoe.rehearse.message_order import HOST_ORDER, check_order
from titanmoe.rehearse.rehearsal import Rehearsal, recipe_to_rehearse, rehearse

TP_ETP = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}
CASES: dict[str, dict[str, Any]] = {
    "cut experts to owners": TP_ETP,
    "cut experts by Gram": TP_ETP | {"model.expert_hidden": 64, "model.expert_linear_bias": True},
    "whole experts": {"parallelism.cp": 2, "parallelism.experts.ep": 4},
    "sliced experts": {"parallelism.experts.ep": 1, "model.num_experts": 2},
}


def sent(rehearsal: Rehearsal) -> int:
    """Bytes of matrices that leave a rank."""
    total = 0
    for message in rehearsal.log.messages:
        if message.site.file.endswith("full_matrices.py"):
            ranks = rehearsal.groups[message.group].ranks
            if message.op == "all-reduce":
                total += 2 * (len(ranks) - 1) * message.sent_bytes // len(ranks)
            else:
                own = message.splits[0][ranks.index(rehearsal.rank)]
                total += message.sent_bytes - own * message.row_bytes
    return total


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if "to" in name else name for name in CASES]
)
def test_bytes_and_flops_are_those_of_rehearsals(case: str) -> None:
    config = config_of({"optimizer.name": "muon", "model.num_layers": 1} | CASES[case], 4, "h100")
    every = [rehearse(config, 4, rank, "h100") for rank in range(4)]
    assert check_order(build_programs(every)).text == HOST_ORDER
    work = muon_work(config, derive(4, config.parallelism))
    assert sum(map(sent, every)) / 4 == pytest.approx(work.attention_bytes + work.expert_bytes, rel=0.02)
    steps = [
        operation.flops * count
        for rehearsal in every
        for operation, count in rehearsal.operations.items()
        if operation.site.file.endswith("newton_schulz.py")
    ]
    # The sum of Gram matrices does other products, on every rank that has a piece.
    assert "Gram" in case or sum(steps) / 4 == pytest.approx(work.flops, rel=0.02)


def test_ranks_that_stand_for_others_are_enough() -> None:
    stages = {"parallelism.pp": 2, "parallelism.experts.ep": 1}
    config = config_of({"optimizer.name": "muon", "model.num_layers": 2} | TP_ETP | stages, 4, "h100")
    assert check_ranks(rehearse_ranks(config, 4, "h100")).text == HOST_ORDER


def test_qwen3() -> None:
    """18,432 experts' matrices of 768 x 2048: 5 x (4 m^2 n + 2 m^3) is 28.7 GFLOP each, and 529 TFLOP for all."""
    model = replace(Config().model, **preset("qwen3_moe", "30b_a3b"))
    assert 529e12 < flops(model, by_head=False, router=False, steps=5) < 575e12
    config = replace(Config(), model=model)
    fold = Fold(world=64, pp=1, dp_replicate=1, dp_shard=64, cp=1, tp=1, edp_replicate=1, edp=8, ep=8, etp=1)
    work = muon_work(config, fold)
    assert work.flops * 64 == pytest.approx(flops(model, by_head=False, router=False, steps=5))
    # Of attention's 0.9 G weights in bfloat16, 63 in 64 leave a rank, there and back.
    assert work.expert_bytes == 0 and work.attention_bytes == pytest.approx(2 * 2 * 0.906e9 / 64 * 63 / 64, rel=0.01)


PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
TOKENS = 2**20


def row(recipe: str, world: int, mapping: str) -> str:
    """Of docs/optimizers.md: what Muon costs in a step of 1 M tokens."""
    moments = []
    for optimizer in ("adamw", "muon"):
        words = [f"--optimizer.name={optimizer}", *mapping.split()]
        config = recipe_to_rehearse([f"train_configs/{recipe}.toml", *words], world, "h100")
        fold = derive(world, config.parallelism)
        moments.append(max(memory.moments for memory in rank_memories(config, fold)) / 2**30)
    work = muon_work(config, fold)
    share = work.flops / (TOKENS / world * flops_per_token(config.model, config.training.seq_len))
    cells = f"{moments[0]:.2f} | {moments[1]:.2f} | {work.flops / 1e12:.2f} | {share:.1%}"
    sent = f"{work.attention_bytes / 2**20:.0f} | {work.expert_bytes / 2**20:.0f}"
    seconds = Pricer(config, read_device("h100"), Factors()).matrices(config, fold)
    return f"| {recipe} | {world:,} | {cells} | {sent} | {seconds * 1e3:.0f} |"


ROWS = (
    ("qwen3_30b_a3b", 64, "--training.local_batch_size=1"),
    ("qwen3_30b_a3b", 1024, "--training.local_batch_size=1 --training.global_batch_size=1024"),
    ("mixtral_8x22b", 64, "--parallelism.pp=4"),
    ("mixtral_8x22b", 1024, ""),
    ("deepseek_671b", 1024, ""),
)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 2), ("float64", 8)])
def test_a_weight_larger_than_a_round_is_exchanged_at_once(dtype: str, width: int) -> None:
    words = ["--optimizer.name=muon", "--parallelism.pp=1", "--parallelism.cp=1", "--parallelism.tp=2"]
    words += ["--parallelism.experts.ep=32", "--parallelism.experts.etp=2"]
    config = load(["kimi_k2", *words, f"--training.dtype={dtype}"], COMPONENTS, lambda config: [])
    fold = derive(64, config.parallelism)
    # 12 of 384 experts, each half of its 2,048 x 7,168; sent and received in bfloat16, or where training is in float64.
    assert fold.edp == 1 and matrix_buffer_bytes(config, fold) == 2 * 12 * 1024 * 7168 * width


def test_the_page_has_these_figures() -> None:
    """If this fails: these are the rows that docs/optimizers.md has to have."""
    rows = [row(*case) for case in ROWS]
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)
