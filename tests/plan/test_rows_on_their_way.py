"""Rows that travel while something is computed: in chunks, in two halves, and beside the other half of a pair."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from titanmoe import rank
from titanmoe.cli import main
from titanmoe.config import load
from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config
from titanmoe.fold.legality import violations
from titanmoe.parts import PARTS
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.devices import Device, device_like, read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.planned_rows import planned_rows
from titanmoe.plan.rows_on_their_way import (
    CHUNK_KERNELS,
    CHUNK_ROWS,
    CHUNK_WEIGHTS,
    HALVES,
    RowsWay,
    fewest,
    hidden_by_pairs,
    seconds_in_chunks,
)
from titanmoe.plan.schedule_cost import schedule_rows
from titanmoe.plan.search import evaluate, search
from titanmoe.rehearse.code_site import GATHER, REDUCE
from titanmoe.rehearse.world import recipe_to_rehearse, rehearse
from titanmoe.train.runtime import Runtime

H100 = read_device("h100")
PLANNED = "--moe.overlap_chunks=-1"
SLOW = replace(H100, link=20e9, network=5e9)
SMALL = (
    "--model.family mixtral --model.size debug --model.vocab_size 256 --model.dim 2048 --model.num_layers 2 "
    "--model.num_heads 8 --model.num_kv_heads 2 --model.head_dim 128 --model.num_experts 16 --model.expert_hidden 64 "
    "--training.seq_len 1024 --training.local_batch_size 1 --training.global_batch_size 8 --data.source synthetic "
    "--parallelism.experts.ep 8"
)


def recipe(name: str, *changes: str) -> Config:
    return load(["--config", f"train_configs/{name}.toml", *changes], PARTS, lambda config: [])


def test_the_wire_and_the_experts_do_one_thing_at_a_time() -> None:
    assert seconds_in_chunks(3, 5, 2, 1) == 3 + 5 + 2
    assert seconds_in_chunks(1, 5, 1, 4) == 1 + 4 * 5 + 1  # products hide all but the first and the last message
    assert seconds_in_chunks(5, 1, 5, 4) == 8 * 5  # the wire is never idle
    assert seconds_in_chunks(3, 5, 2, 1, before=4) == 4 + 5 + 2
    assert fewest({1: 1.01, 2: 1.0}) == 1 and fewest({1: 1.1, 2: 1.01, 4: 1.0}) == 2


def test_chunks_cost_what_a_rehearsal_counts() -> None:
    """Kernels and bytes of a layer beside its products; rows are wide, so that lists of choices are next to nothing."""
    kernels, moved = Counter(), Counter()
    for chunks in (1, 2, 4):
        config = recipe_to_rehearse([*SMALL.split(), "--moe.overlap_chunks", str(chunks)], 8, "h100")
        for operation, count in rehearse(config, 8, 0, "h100").operations.items():
            if operation.site.layer == "layers.1" and operation.site.region not in (GATHER, REDUCE):
                kernels[chunks, operation.site.phase] += count
                moved[chunks, operation.site.phase] += (
                    (not operation.flops) * count * (operation.read + operation.written)
                )
    model, rows = config.model, config.training.seq_len * config.model.top_k * config.model.dim
    weights = 3 * model.num_experts // 8 * model.dim * model.expert_hidden
    for part, phase in enumerate(("forward", "backward")):
        fixed, each = CHUNK_KERNELS[part]
        for chunks in (2, 4):
            assert kernels[chunks, phase] - kernels[1, phase] == pytest.approx(fixed + each * (chunks - 1), abs=3)
            more = CHUNK_ROWS * rows + CHUNK_WEIGHTS * weights * (chunks - 1) * part
            assert moved[chunks, phase] - moved[1, phase] == pytest.approx(more, rel=0.1)


def test_halves_cost_what_a_rehearsal_counts() -> None:
    """Bytes of a layer beside its products: sums of gradients, and joined outputs and gradients of inputs. Left out are
    the partial sums of a norm's gradient, whose number does not depend on the tokens: here there are few."""
    moved, norms = Counter(), ("rms_norm_backward", "sum")
    for halves in (False, True):
        words = f"{SMALL} --training.local_batch_size 2 --training.global_batch_size 16 --moe.overlap_halves {halves}"
        config = recipe_to_rehearse(words.lower().split(), 8, "h100")
        for operation, count in rehearse(config, 8, 0, "h100").operations.items():
            site, name = operation.site, operation.name
            if site.layer == "layers.1" and site.region not in (GATHER, REDUCE) and name not in norms:
                moved[halves, operation.site.phase] += (
                    (not operation.flops) * count * (operation.read + operation.written)
                )
    model = config.model
    tokens = 2 * config.training.seq_len * model.dim
    weights = 3 * model.num_experts // 8 * model.dim * model.expert_hidden
    weights += model.dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    for phase, added in (("forward", HALVES * tokens), ("backward", HALVES * tokens + CHUNK_WEIGHTS * weights)):
        assert moved[True, phase] - moved[False, phase] == pytest.approx(added, rel=0.1)


def test_halves_hide_what_travels_beside_attention_and_experts() -> None:
    assert seconds_in_chunks(1, 5, 1, 2, between=3) == 3 + 2 * 5 + 1  # all but the last message back
    assert seconds_in_chunks(5, 1, 5, 2, between=3) == 4 * 5  # the wire is never idle
    half_as_fast = replace(H100, link=H100.link / 2)
    config = recipe("mixtral_8x7b", PLANNED, "--training.local_batch_size=2")
    halves = evaluate(config, 8, half_as_fast, Factors())
    assert halves.config.moe.overlap_halves and halves.config.moe.overlap_chunks == 1
    whole = evaluate(replace(config, moe=replace(config.moe, overlap_chunks=1)), 8, half_as_fast, Factors())
    rows = "rows to experts and back"
    assert halves.price.step < whole.price.step
    assert 0.25 < halves.price.components[rows] / whole.price.components[rows] < 0.6
    assert halves.price.components["waiting for the host"] > 1.8 * whole.price.components["waiting for the host"]


def test_halves_gain_less_than_megatron_measured_of_two_microbatches() -> None:
    """Qwen3-30B-A3B on 16 H100s with ep 16: 41.25 s without overlap and 31.31 s with it (NVIDIA-NeMo/Megatron-Bridge,
    skills/nemo-mbridge-perf-expert-parallel-overlap/SKILL.md)."""
    changes = "--parallelism.experts.ep=16", "--training.global_batch_size=1024", "--training.local_batch_size=2"
    steps = [
        evaluate(recipe("qwen3_30b_a3b", *changes, way), 16, H100, Factors()).price.step
        for way in ("--moe.overlap_chunks=1", "--moe.overlap_halves=true")
    ]
    assert 1.08 < steps[0] / steps[1] < 41.25 / 31.31


def test_the_search_takes_halves_where_they_pay() -> None:
    best = search(recipe("gpt_oss_20b"), 8, H100, Factors(), 3).best
    assert best[0].config.moe.overlap_halves and best[0].config.training.local_batch_size > 1


def ways_of(config: Config, world: int, device: Device) -> tuple[int, bool, bool]:
    """Chunks, halves, pairs."""
    config, _ = planned_rows(config, world, device)
    return config.moe.overlap_chunks, config.moe.overlap_halves, config.pipeline.overlap_pairs


def test_rows_are_planned_where_that_pays() -> None:
    config, whole = recipe("mixtral_8x7b", PLANNED), recipe("mixtral_8x7b")
    assert ways_of(config, 8, H100) == (1, False, False)
    assert ways_of(config, 8, SLOW) == (4, False, False)
    assert ways_of(config, 8, replace(SLOW, name="cpu")) == (1, False, False)
    in_pieces = evaluate(config, 8, SLOW, Factors())
    assert in_pieces.config == planned_rows(config, 8, SLOW)[0]
    assert planned_rows(whole, 8, SLOW) == (whole, "")
    whole = evaluate(whole, 8, SLOW, Factors())
    rows, copies = "rows to experts and back", "copies of weights"
    assert in_pieces.price.step < 0.98 * whole.price.step
    assert in_pieces.price.components[rows] < 0.8 * whole.price.components[rows]
    assert in_pieces.price.components[copies] > whole.price.components[copies]
    best = search(config, 8, replace(SLOW, memory=150e9), Factors(), 3).best
    assert any(mapping.config.moe.overlap_chunks > 1 or mapping.config.moe.overlap_halves for mapping in best)
    assert ways_of(recipe("kimi_k2"), 1024, H100) == (1, False, True)
    in_pairs = "--pipeline.schedule=DualPipeV", "--pipeline.virtual_stages=2", "--pipeline.overlap_pairs=true"
    assert ways_of(recipe("mixtral_8x22b", PLANNED, *in_pairs), 128, SLOW) == (1, False, True)
    assert ways_of(recipe("kimi_k2", "--pipeline.schedule=Interleaved1F1B"), 1024, H100) == (1, False, False)


@pytest.mark.parametrize(
    ("changes", "ways"),
    {
        "--moe.dispatcher=allgather": (1, False, False),
        "--parallelism.experts.ep=1": (1, False, False),
        "--moe.overlap_halves=true": (1, True, False),
        "--moe.capacity_factor=1.5": (1, False, False),  # what is dropped would depend on the half
        "--moe.overlap_chunks=3": (3, False, False),
    }.items(),
)
def test_only_what_is_open_and_legal_is_planned(changes: str, ways: tuple[int, bool, bool]) -> None:
    config = recipe("qwen3_235b_a22b", "--parallelism.experts.ep=16")
    assert ways_of(config, 256, SLOW) == (1, True, False)
    config = recipe("qwen3_235b_a22b", "--parallelism.experts.ep=16", changes)
    assert ways_of(config, 256, SLOW) == ways
    planned = planned_rows(config, 256, SLOW)[0]
    assert not violations(planned, 256) and not contradictions(planned)


def test_a_run_on_gpus_takes_what_is_planned_for_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("gpt_oss_20b")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    assert ways_of(config, 8, device_like("NVIDIA B200")) == (1, False, False)

    def from_rank_0(names: list[str]) -> None:
        assert names == ["NVIDIA B200"]
        names[0] = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(dist, "broadcast_object_list", from_rank_0)
    on_gpus, why = rank.planned_rows(config, Runtime(3, 3, 8, torch.device("cuda", 3)))
    assert on_gpus.moe == replace(config.moe, overlap_chunks=1, overlap_halves=True)
    assert why.startswith("in two halves, because the planner finds 7.1 s a step with that on h100 and 7.39 s without")
    on_cpus, why = rank.planned_rows(config, Runtime(3, 3, 8, torch.device("cpu")))
    assert on_cpus.moe.chunks == 1 and not on_cpus.moe.overlap_halves and not why


@pytest.mark.parametrize(("name", "halves"), {"h100": True, "b200": False, "cpu": False}.items())
def test_a_rehearsal_is_of_what_is_planned_for_its_hardware(name: str, halves: bool) -> None:
    config = recipe_to_rehearse(["--config", "train_configs/gpt_oss_20b.toml"], 8, name)
    assert config.moe.overlap_halves == halves and config.moe.overlap_chunks == 1


def test_plans_and_rehearsals_say_how_rows_travel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt_oss_20b", "--explain"]) == 0
    assert "16 microbatches of 2; rows travel in two halves.\n" in capsys.readouterr().out
    assert main(["plan", "gpt_oss_20b", "--explain", "--moe.overlap_chunks", "1"]) == 0
    assert "16 microbatches of 2.\n" in capsys.readouterr().out
    small = [*SMALL.split(), "--ranks", "8"]
    assert main(["rehearse", *small, "--moe.overlap_chunks", "2"]) == 0
    assert "\n    rows       in 2 chunks\n" in capsys.readouterr().out
    assert main(["rehearse", *small, "--moe.overlap_chunks", "1"]) == 0
    assert "    rows       " not in capsys.readouterr().out.partition("One step")[0]


def test_a_device_is_found_by_the_name_of_a_gpu() -> None:
    assert [device_like(gpu).name for gpu in ("NVIDIA GB200", "NVIDIA B200", "NVIDIA A100-SXM4-80GB", "Tesla T4")] == [
        *("gb200", "b200", "a100", "h100")
    ]


def test_the_hop_across_nodes_stays_in_one_piece() -> None:
    priced = BlockCosts(recipe("deepseek_671b"), SLOW, Factors())
    halves = {n: priced.experts(4, 1, 4, 16, 1, RowsWay("hierarchical", n))[0].rows for n in (1, 2)}
    across = priced.exchange("hierarchical", 1024, 16, 1) - priced.exchange("alltoall", 1024, 8, 1)
    assert halves[1] > halves[2] > (1 - H100.message_share) * across


def test_pairs_of_the_first_rank() -> None:
    for pp, microbatches in ((2, 16), (4, 32), (8, 64)):
        row = schedule_rows("DualPipeV", pp, 2, microbatches)[0]
        pairs, forwards = sum(len(cell) == 2 for cell in row), 2 * microbatches
        assert hidden_by_pairs(pp, microbatches, 1) == pytest.approx(min(0.37, pairs / forwards / 2))
    assert hidden_by_pairs(8, 8, 4) == 0
    config = recipe(
        "deepseek_671b", "--parallelism.pp=16", "--pipeline.schedule=DualPipeV", "--activation_checkpoint.mode=none"
    )
    alone = evaluate(replace(config, moe=replace(config.moe, overlap_chunks=1)), 512, H100, Factors()).price
    pairs = evaluate(replace(config, pipeline=replace(config.pipeline, overlap_pairs=True)), 512, H100, Factors()).price
    rows = "rows to experts and back"
    assert 0.6 < pairs.components[rows] / alone.components[rows] < 0.8 and pairs.step < alone.step


def test_the_search_pairs_where_rows_take_long() -> None:
    best = search(recipe("qwen2_57b_a14b"), 64, H100, Factors(), 4).best
    assert any(mapping.config.pipeline.overlap_pairs for mapping in best)
    assert not any(mapping.config.pipeline.overlap_pairs and mapping.config.moe.overlap_chunks > 1 for mapping in best)
